"""A second branch of a captured step, for work that memory bandwidth bounds.

[Note: branch]
A small step is a chain of hundreds of kernels that each wait for the one before and leave most of the chip idle. Work that
only streams memory (quantizing weights, adding up squares) can run beside that chain. While a step is captured, what is
issued inside `Branch.beside` goes to a side stream, forked from the current one: a parallel branch of the graph. Everywhere
else (eager steps, warmups, the recorder) it is issued in place: the same kernels on the same data, so the same bits.

* Few joins: every edge between the branches costs the chain about as much as a small kernel.
* The capture stream has the higher priority, which its kernels keep in the graph: the branch takes what the chain leaves.
* Memory: nothing is allocated inside `beside`. What its kernels read and write is allocated before, and outlives the graph
  or is freed after a join; then neither torch's allocator nor the graph's pool can hand it out too early.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

__all__ = ["Branch", "Mark", "growing_chunks"]


class Mark:
    """A point on the branch; made by `Branch.mark`."""

    def __init__(self, event: Any) -> None:
        self._event = event
        self._waiting: set[Any] = set()  # streams that wait for it already

    def join(self) -> None:
        """What the current stream gets from here on runs after everything before this mark. A second call adds no edge."""
        stream = torch.cuda.current_stream()
        if stream not in self._waiting:
            stream.wait_event(self._event)
            self._waiting.add(stream)


class Branch:
    """The branch beside one capture stream; does nothing outside of `open`, and nothing at all without streams.

    Args:
        streams: the capture stream, and that of the branch, of lower priority; None for a graph of one chain, or no GPU.
        num_nodes: number of nodes in the graph so far.
    """

    def __init__(self, streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None, num_nodes: Callable[[], int] = int) -> None:
        self._streams, self._num_nodes = streams, num_nodes
        self._is_open = False
        self._is_forked = False  # there may be work that no stream waits for
        #: Indices of the nodes issued beside the others in the last capture.
        self.nodes: set[int] = set()

    @property
    def is_open(self) -> bool:
        """Whether `beside` forks."""
        return self._is_open

    @property
    def can_fork(self) -> bool:
        """Whether there is a second stream at all."""
        return self._streams is not None

    @contextmanager
    def open(self) -> Iterator[None]:
        """Surrounds what is captured, inside the capture. All work is joined at the end, also after an error."""
        self.nodes = set()
        self._is_open = self._streams is not None
        try:
            yield
        except BaseException:
            # In an invalid capture the driver refuses this too; the error under way says why.
            with suppress(RuntimeError):
                self.join()
            raise
        else:
            self.join()
        finally:
            self._is_open = self._is_forked = False

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Issue what is inside on the branch, after what the current stream has."""
        if not self._is_open or self._streams is None:
            yield
            return
        _, side = self._streams
        side.wait_stream(torch.cuda.current_stream())
        self._is_forked = True
        first = self._num_nodes()
        try:
            with torch.cuda.stream(side):
                yield
        finally:
            self.nodes.update(range(first, self._num_nodes()))

    def mark(self) -> Mark | None:
        """The end of what the branch has so far; None where it was issued in place, and nothing has to wait."""
        return Mark(self._streams[1].record_event()) if self._is_forked and self._streams is not None else None

    def join(self) -> None:
        """What the capture stream gets from here on runs after everything on the branch."""
        if self._is_forked and self._streams is not None:
            main, side = self._streams
            main.wait_stream(side)
            self._is_forked = False


def growing_chunks(sizes: Sequence[int], first: int, growth: float = 2.0) -> list[range]:
    """Consecutive ranges of ``sizes``: each the shortest that adds up to ``growth`` times the one before, the first to ``first``.

    A rest below half of the last range is part of it. Work in such chunks is done about when it is needed if what needs it
    takes at least ``growth`` times as long, at the price of a join for each doubling.
    """
    chunks: list[range] = []
    target, total, start = float(first), 0, 0
    for i, size in enumerate(sizes):
        total += size
        if total >= target:
            chunks.append(range(start, i + 1))
            target, total, start = growth * total, 0, i + 1
    if start < len(sizes):
        if chunks and 2 * growth * total < target:
            start = chunks.pop().start
        chunks.append(range(start, len(sizes)))
    return chunks
