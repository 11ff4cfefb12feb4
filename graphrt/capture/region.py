"""The captured path's region: what updates inside the graph, and flushes nothing."""

from collections.abc import Callable
from typing import Any

from graphrt.region import Region, RegionRecord
from graphrt.state import QuantizationState, last_update

__all__ = ["CapturedRegion"]


class CapturedRegion(Region):
    """A region for a step that a graph holds.

    A flush is host work that replays would never repeat, so whoever runs the step flushes before it; the step body
    consumes its own backward request. Nothing outlives the step, so no scales are kept for recomputes after its exit.

    Args:
        on_open: called with the record of the step's outermost region before its first forward.
        on_close: called at the region's exit, before its forward update.
    """

    def __init__(self, on_open: Callable[[RegionRecord], None], on_close: Callable[[], None]) -> None:
        super().__init__()
        self._on_open, self._on_close = on_open, on_close

    def open_record(self, record: RegionRecord) -> None:
        """Let the step prepare what its forwards will find."""
        self._on_open(record)

    def close_record(self, record: RegionRecord) -> None:
        """Keep nothing, and let the step finish what it prepared."""
        record.close(keep_scales=False)
        self._on_close()

    def update(self, state: QuantizationState, group: Any) -> None:
        """Nothing in the step reads the scales any more: its forwards, backwards and their recomputes are inside the region."""
        with last_update():
            super().update(state, group)
