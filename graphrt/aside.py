"""Small work that nobody waits for before the end of the step: where it may be issued.

[Note: aside]
A step is a chain of kernels, and each costs the chain its time and a gap, however little of the chip it fills. Some of them
are a few blocks whose result is read last or not at all: a sum of partial gradients, the scale updates, the results. What is
issued inside `aside` may run on a stream of its own, beside what the current one gets next. Who runs the step says where
(`asides`); a captured step has its second branch for it ([Note: branch]). Without anyone it is issued in place: the same
kernels on the same data in an order that the data allows, so the same bits.

* Two pieces of work aside run in the order of issue.
* Whatever reads the results calls `join_asides` first.
* Inside, nothing is allocated: memory would belong to the stream that the work happens to be on.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

from torch import Tensor

__all__ = ["Side", "aside", "asides", "join_asides"]


class Side(Protocol):
    """Where work that is aside goes."""

    def beside(self, *operands: Tensor) -> AbstractContextManager[None]: ...
    def join(self) -> None: ...


# Of the process, not of a thread: on CUDA a backward runs on another one than the step that it is part of.
_sides: list[Side] = []
_IN_PLACE: AbstractContextManager[None] = nullcontext()


def aside(*operands: Tensor) -> AbstractContextManager[None]:
    """Work issued inside the block may run beside what the current stream gets after it, until `join_asides`.

    Args:
        operands: tensors of the work that are freed, or that others may touch, before the end of the step. They are held
            until a join; where a reader could not be seen coming, work that has any is issued in place.
    """
    return _sides[-1].beside(*operands) if _sides else _IN_PLACE


def join_asides() -> None:
    """What the current stream gets from here on runs after all work that is aside."""
    if _sides:
        _sides[-1].join()


@contextmanager
def asides(side: Side) -> Iterator[None]:
    """Inside the block work that is aside goes to ``side``."""
    _sides.append(side)
    try:
        yield
    finally:
        _sides.remove(side)
