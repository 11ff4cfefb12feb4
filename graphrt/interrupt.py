"""Stopping between two steps: SIGINT, SIGTERM and SIGHUP become a wish that the loop grants when it can."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

__all__ = ["StopRequest"]

_EXIT_CODE_BASE = 128  # a shell's convention for "ended by signal n"
_SIGHUP: int | None = getattr(signal, "SIGHUP", None)
_SIGPIPE = 13  # what a closed pipe would have ended the process by
_FAILURE_EXIT_CODE = 1


class StopRequest:
    """While open, the first SIGINT, SIGTERM or SIGHUP sets `is_set`; a second SIGINT raises KeyboardInterrupt at once.

    Outside the main thread, where Python sets no handlers, signals do not set it.

    Args:
        on_request: called with a line to show when the first signal comes.
        output_error: why the output has gone away, None while it has not. A run that nobody hears stops too.
    """

    def __init__(self, on_request: Callable[[str], None], output_error: Callable[[], OSError | None] = lambda: None) -> None:
        self._on_request, self._output_error = on_request, output_error
        self._signum: int | None = None
        self._is_at_once = False
        self._previous: dict[int, Any] = {}

    @property
    def is_set(self) -> bool:
        """Whether a signal has come, or the output has gone away."""
        return self._signum is not None or self._output_error() is not None

    @property
    def exit_code(self) -> int:
        """128 + n after signal n, 141 after a closed pipe, 1 after another failure of the output, else 0."""
        if self._signum is not None:
            return _EXIT_CODE_BASE + self._signum
        error = self._output_error()
        if error is None:
            return 0
        return _EXIT_CODE_BASE + _SIGPIPE if isinstance(error, BrokenPipeError) else _FAILURE_EXIT_CODE

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """End the block where it is when a signal comes: all that matters is written."""
        self._is_at_once = True
        try:
            yield
        except KeyboardInterrupt:
            if self._signum is None:
                raise
        finally:
            self._is_at_once = False

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._handle) for number in _signals()}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, signum: int, _: FrameType | None) -> None:
        is_second = self._signum is not None
        if not is_second:
            self._signum = signum
            # The signal may have interrupted a write to the same stream, which then cannot be entered again.
            with contextlib.suppress(RuntimeError):
                self._on_request(self._announcement(signum))
        if self._is_at_once or (is_second and signum == signal.SIGINT):
            raise KeyboardInterrupt

    def _announcement(self, signum: int) -> str:
        if self._is_at_once:
            return "Stopping."
        if signum == signal.SIGINT:
            return "Stopping after this step and saving a checkpoint. Ctrl-C again stops at once, without one."
        return f"{signal.Signals(signum).name}: stopping after this step and saving a checkpoint."


def _signals() -> list[int]:
    # nohup has SIGHUP ignored, so that a run outlives its terminal.
    hangup = [_SIGHUP] if _SIGHUP is not None and signal.getsignal(_SIGHUP) is not signal.SIG_IGN else []
    return [signal.SIGINT, signal.SIGTERM, *hangup]
