"""How much of the device's time lies between the replays of a run, without waiting for the device."""

from collections.abc import Callable
from typing import Any

import torch

from graphrt.ranges import REPLAY

__all__ = ["ReplayClock"]


def _record_event() -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class ReplayClock:
    """Listens to the replay range (`graphrt.ranges.listening`) and marks both ends of each replay on the device.

    A mark is one event recorded on the stream; the times are read at `read` only. Steps that are not replayed (warmup, eager
    mode) leave no marks.

    Args:
        record_event: puts a timing event on the current stream and returns it.
    """

    def __init__(self, record_event: Callable[[], Any] = _record_event) -> None:
        self._record_event = record_event
        self._start: Any = None  # of the replay being launched
        self._replays: list[tuple[Any, Any]] = []  # events before and after each one
        self._last_end: Any = None  # of the last replay that has been read

    def enter_range(self, name: str) -> None:
        """Mark the start of a replay."""
        if name == REPLAY.name:
            self._start = self._record_event()

    def exit_range(self, name: str) -> None:
        """Mark the end of a replay."""
        if name == REPLAY.name and self._start is not None:
            self._replays.append((self._start, self._record_event()))
            self._start = None

    def restart(self) -> None:
        """Leave out what the device does between now and the next replay: an evaluation, a checkpoint."""
        self._start = self._last_end = None
        self._replays.clear()

    def read(self) -> float | None:
        """Share of the device's time since the last read that lay between replays; None where no two replays followed each other.

        The caller has waited for the last step. Time is the device's, from event to event. Between two replays lie the copies of
        inputs and results, and whatever idle time the host causes; idle time inside a replay is not in it.
        """
        replays, self._replays = self._replays, []
        if not replays:
            return None
        start = replays[0][0] if self._last_end is None else self._last_end
        has_between = len(replays) > 1 or self._last_end is not None
        self._last_end = replays[-1][1]
        total_ms = start.elapsed_time(self._last_end)
        inside_ms = sum(begin.elapsed_time(end) for begin, end in replays)
        return min(1.0, max(0.0, 1 - inside_ms / total_ms)) if has_between and total_ms > 0 else None
