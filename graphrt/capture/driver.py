"""Calls of the CUDA driver about graphs."""

from collections.abc import Callable
from typing import Any

from graphrt.errors import CaptureError

__all__ = ["call"]


def call(function: Callable[..., Any], *args: Any) -> Any:
    """The results of a driver call without its status; one alone as it is.

    Raises:
        CaptureError: the driver returned an error.
    """
    status, *results = function(*args)
    if int(status):
        raise CaptureError(f"{function.__name__} failed with {status.name}. The captured graph cannot be read or changed: report this.")
    return results[0] if len(results) == 1 else results
