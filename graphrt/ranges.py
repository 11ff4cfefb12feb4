"""Named ranges: what a profiler shows of a step, and what a graph's nodes are told apart by.

[Note: ranges]
A range is entered where work is issued, on either path. A profiler sees it as an NVTX range of the domain ``graphrt``. A
listener sees the same entry and exit: while a step is captured, the graph's nodes issued in between belong to the range,
which is how replayed kernels, where no Python runs, get their names back.

Without a profiler and without a listener a range costs a tenth of a microsecond and allocates nothing: the ranges are made
once, at import, and their names are registered with NVTX then.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import nvtx

__all__ = [
    "BACKWARD", "CAPTURE", "CLIP", "COPY_INPUTS", "DOMAIN_NAME", "FLUSH", "FORWARD", "INSTANTIATE", "MICROBATCH", "OPTIMIZER",
    "REPLAY", "RESULTS", "SCALE_UPDATE", "STEP", "WARMUP", "ZERO_GRAD", "Range", "RangeListener", "listening",
]  # fmt: skip

DOMAIN_NAME = "graphrt"

_domain: Any = nvtx.get_domain(DOMAIN_NAME)


class RangeListener(Protocol):
    """Who hears of ranges entered and left, on the thread that does it."""

    def enter_range(self, name: str) -> None: ...
    def exit_range(self, name: str) -> None: ...


_listeners: list[RangeListener] = []


class Range:
    """A context manager to enter again and again, from any thread; it holds no state of an entry.

    Args:
        name: what profilers show; registered, and kept alive with the range.
    """

    __slots__ = ("_attributes", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        # The domain registers the name and keeps it. None without a profiler in the process: NVTX decides that at its first call.
        self._attributes: Any = _domain.get_event_attributes(message=name)

    def numbered(self, payload: int) -> "Range":
        """This range, its next entry carrying ``payload``."""
        if self._attributes is not None:
            self._attributes.payload = payload
        return self

    def __enter__(self) -> None:
        _domain.push_range(self._attributes)
        for listener in _listeners:
            listener.enter_range(self.name)

    def __exit__(self, *_exception: object) -> None:
        for listener in _listeners:
            listener.exit_range(self.name)
        _domain.pop_range()


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
CLIP = Range("clip")
OPTIMIZER = Range("optimizer")
