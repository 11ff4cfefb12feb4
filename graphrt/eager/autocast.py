"""fp8_autocast: a region whose top-level entry flushes what earlier backwards requested."""

import sys
import warnings
from typing import Any

from graphrt.guards import is_capturing
from graphrt.ranges import FLUSH
from graphrt.region import Region
from graphrt.state import blocking_guard, registered_states

__all__ = ["FlushManager", "fp8_autocast"]


class FlushManager:
    """Flushes the pending backward updates of every state in the process, in order of creation.

    It has nothing of its own to remember: the requests live in the states, the guards are asked of the process.
    """

    def flush(self) -> bool:
        """Flush all that is due, unless a guard forbids it now; returns whether nothing is left pending."""
        pending = [state for state in registered_states() if state.backward_update_requested]
        if pending and blocking_guard() is not None:
            return False
        if pending:
            with FLUSH:
                for state in pending:
                    state.flush()
        return True


class fp8_autocast(Region):
    """FP8 for the converted linears of every model, inside the block; nests.

    The outermost enabled block entered with gradients is one step of delayed scaling: its entry flushes the backward
    update that the previous backwards requested, its exit updates the forward scales.

    Args:
        enabled: False makes converted linears plain nn.Linears inside the block.
        calibrating: compute in high precision and only record amaxes, of inputs, weights and output gradients. Run it on
            a batch or more before the first step, whose scales would otherwise be 1.
        amax_reduction_group: process group over which ``reduce_amax`` takes the maximum; None is the default group.

    Raises:
        FlushError: entered while torch.compile traces under ``fullgraph=True``; without it, the graph breaks here.
    """

    def __init__(self, enabled: bool = True, calibrating: bool = False, amax_reduction_group: Any = None) -> None:
        super().__init__(enabled, calibrating, amax_reduction_group)

    def before_outermost(self) -> None:
        """Flush; under a capture by the user's own hand, say how the update gets into the graph."""
        FlushManager().flush()
        if is_capturing():
            warnings.warn(
                "fp8_autocast was entered under a CUDA graph capture: the forward update is captured with the region's exit, the backward "
                "update is not. Call state.reduce_and_update_quantization_state(forward=False) after the backward, inside the capture.",
                stacklevel=_level_of_the_user(),
            )


def _level_of_the_user() -> int:
    """``stacklevel`` at which a warning from the calling function names the first line outside graphrt and torch."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("graphrt", "torch"):
        level, frame = level + 1, frame.f_back
    return level
