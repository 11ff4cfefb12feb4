"""Stopping between two steps: SIGINT and SIGTERM become a wish that the loop grants when it can."""

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

__all__ = ["StopRequest"]

_EXIT_CODE_BASE = 128  # a shell's convention for "ended by signal n"


class StopRequest:
    """While open, the first SIGINT or SIGTERM sets `is_set`; a second SIGINT raises KeyboardInterrupt at once.

    Outside the main thread, where Python sets no handlers, it stays unset.

    Args:
        on_request: called with a line to show when the first signal comes.
    """

    def __init__(self, on_request: Callable[[str], None]) -> None:
        self._on_request = on_request
        self._signum: int | None = None
        self._previous: dict[int, Any] = {}

    @property
    def is_set(self) -> bool:
        """Whether a signal has come."""
        return self._signum is not None

    @property
    def exit_code(self) -> int:
        """130 after SIGINT, 143 after SIGTERM, 0 without a signal."""
        return 0 if self._signum is None else _EXIT_CODE_BASE + self._signum

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, signum: int, _: FrameType | None) -> None:
        if self.is_set and signum == signal.SIGINT:
            raise KeyboardInterrupt
        if not self.is_set:
            self._signum = signum
            self._on_request("Stopping after this step and saving a checkpoint. Ctrl-C again stops at once, without one.")
