"""Activation checkpointing: torch's, with the keywords sorted."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch.utils.checkpoint as torch_checkpoint

from graphrt.recompute import close_abandoned

__all__ = ["checkpoint"]

_KEYWORDS = ("preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop")
# This torch's own; early_stop, for one, is not in every release.
_ACCEPTED = {"preserve_rng_state", *inspect.signature(torch_checkpoint.checkpoint).parameters} - {"function", "args", "kwargs"}


def checkpoint(fn: Callable[..., Any], *args: Any, use_reentrant: bool = False, **kwargs: Any) -> Any:
    """Run ``fn(*args)`` without keeping its activations; the backward runs it again.

    The recompute quantizes with the scales of the forward it repeats, bit for bit, and leaves no trace in amaxes,
    histories or counts. ``torch.utils.checkpoint.checkpoint`` called directly gives the same.

    Args:
        fn: what to run. It must do the same each time.
        args: its positional arguments; gradients flow to the tensors among them.
        use_reentrant: which of torch's two implementations.
        kwargs: torch's keywords (preserve_rng_state, context_fn, determinism_check, debug, early_stop) go to torch,
            all others to ``fn``.

    Raises:
        ValueError: a keyword of torch's that this release, or the reentrant implementation, does not take.
    """
    unknown = [name for name in _KEYWORDS if name in kwargs and name not in _ACCEPTED]
    if unknown:
        raise ValueError(f"This torch's checkpoint does not take {unknown[0]}. Leave it out, or use a newer torch.")
    torch_keywords = {name: kwargs.pop(name) for name in _KEYWORDS if name in kwargs}
    function = functools.partial(fn, **kwargs) if kwargs else fn
    try:
        return torch_checkpoint.checkpoint(function, *args, use_reentrant=use_reentrant, **torch_keywords)
    except BaseException as error:
        close_abandoned(error.__traceback__)
        raise
