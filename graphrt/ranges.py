"""Named ranges: what a profiler shows of a step, and what a graph's nodes are told apart by.

[Note: ranges]
A range is entered where work is issued, on either path. A profiler sees it as an NVTX range of the domain ``graphrt``. A
listener sees the same entry and exit: while a step is captured, the graph's nodes issued in between belong to the range,
which is how replayed kernels, where no Python runs, get their names back. Listeners hear of an entry before NVTX does, and of
an exit after it, so that one of them may turn a profiler on and off around whole ranges.

Without a profiler and without a listener a range allocates nothing and costs a fraction of a microsecond
(``profiles/range_cost.py``): the ranges are made once, at import, and their names are registered with NVTX then.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import nvtx

__all__ = [
    "BACKWARD", "CAPTURE", "CLIP", "COPY_INPUTS", "DOMAIN_NAME", "FLUSH", "FORWARD", "INSTANTIATE", "MICROBATCH", "OPTIMIZER",
    "QUANTIZE_WEIGHTS", "REPLAY", "RESULTS", "SCALE_UPDATE", "SNAPSHOT", "STEP", "WARMUP", "ZERO_GRAD", "Range", "RangeListener",
    "listening",
]  # fmt: skip

DOMAIN_NAME = "graphrt"

_domain: Any = nvtx.get_domain(DOMAIN_NAME)


class RangeListener(Protocol):
    """Who hears of ranges entered and left, on the thread that does it."""

    def enter_range(self, name: str) -> None: ...
    def exit_range(self, name: str) -> None: ...


_listeners: list[RangeListener] = []


class Range:
    """A context manager to enter again and again, from any thread.

    Args:
        name: what profilers show; registered, and kept alive with the range.
    """

    __slots__ = ("_attributes", "name", "number")

    def __init__(self, name: str) -> None:
        self.name = name
        #: What `numbered` was last called with; None for a range that is not numbered.
        self.number: int | None = None
        # None where no profiler has been loaded into the process: NVTX decides that once, at its first call.
        self._attributes: Any = _domain.get_event_attributes(message=name)

    def numbered(self, number: int) -> "Range":
        """This range, its next entry carrying ``number`` as the payload."""
        self.number = number
        if self._attributes is not None:
            self._attributes.payload = number
        return self

    # The conditions spare an iterator, and three names a tuple: nothing is allocated where nobody listens.

    def __enter__(self) -> None:
        if _listeners:
            for listener in _listeners:
                listener.enter_range(self.name)
        _domain.push_range(self._attributes)

    def __exit__(self, _type: object, _error: object, _traceback: object) -> None:
        _domain.pop_range()
        if _listeners:
            for listener in _listeners:
                listener.exit_range(self.name)


@contextmanager
def listening(listener: RangeListener) -> Iterator[None]:
    """Inside the block ``listener`` hears of every range."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


#: One call of `Trainer.step`; its payload is the number of the step, from 1.
STEP = Range("step")
#: Copies of what a step may change, for the case that it fails; replays need none.
SNAPSHOT = Range("snapshot")
# The captured path, each step:
COPY_INPUTS = Range("copy_inputs")
REPLAY = Range("replay")
RESULTS = Range("results")
# The captured path, once a batch shape:
WARMUP = Range("warmup")
CAPTURE = Range("capture")
INSTANTIATE = Range("instantiate")
# The step body: entered at every eager step, and once by a capture.
ZERO_GRAD = Range("zero_grad")
MICROBATCH = Range("microbatch")
FORWARD = Range("forward")
BACKWARD = Range("backward")
FLUSH = Range("flush")
SCALE_UPDATE = Range("scale_update")
#: A captured step's few launches for all FP8 weights.
QUANTIZE_WEIGHTS = Range("quantize_weights")
CLIP = Range("clip")
OPTIMIZER = Range("optimizer")
