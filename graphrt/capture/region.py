"""The captured path's region: what updates inside the graph, and flushes nothing."""

from graphrt.region import Region, RegionRecord

__all__ = ["CapturedRegion"]


class CapturedRegion(Region):
    """A region for a step that a graph holds.

    A flush is host work that replays would never repeat, so whoever runs the step flushes before it; the step body
    consumes its own backward request. Nothing outlives the step, so no scales are kept for recomputes after its exit.
    """

    def close_record(self, record: RegionRecord) -> None:
        """Keep nothing."""
        record.close(keep_scales=False)
