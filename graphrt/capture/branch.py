"""A second branch of a captured step, for work that need not hold up the chain.

[Note: branch]
A small step is a chain of hundreds of kernels that each wait for the one before and leave most of the chip idle. Weights can
be quantized beside that chain, and small kernels that nobody waits for ([Note: aside]) need not be part of it. While a step is
captured, what is issued inside `Branch.beside` goes to a side stream, forked from the current one: a parallel branch of the
graph. Everywhere else (eager steps, warmups, the recorder) it is issued in place: the same kernels on the same data, so the
same bits.

* Little work: what fills the memory's bandwidth from all multiprocessors slows the chain by as much as it saves.
* Few joins: every edge from the branch costs the chain about as much as a small kernel.
* The capture stream has the higher priority, which its kernels keep in the graph: the branch takes what the chain leaves.
* Memory: nothing is allocated inside `beside`. What its kernels read and write is allocated before, and outlives the graph
  or is held until a join; then neither torch's allocator nor the graph's pool can hand it out too early.
* Readers: an operation of torch's on what the branch holds, wherever it comes from (a hook of the user's that looks at a
  gradient), is seen by the recorder that watches the capture, and joins first. Where none watches, work on such tensors stays
  in the chain.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from graphrt.capture.record_nodes import storage_key

__all__ = ["Branch", "Mark", "growing_chunks"]

#: Memory held until a join that the chain could use again; beyond it the next piece of work joins what there is.
_MAX_HELD_BYTES = 1 << 26


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
        self._is_watched = False
        self._held: dict[int, Tensor] = {}  # operands of that work, by storage
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
    def open(self, *, is_watched: bool = False) -> Iterator[None]:
        """Surrounds what is captured, inside the capture. All work is joined at the end, also after an error.

        Args:
            is_watched: `before_operation` will be called before each operation of torch's.
        """
        self.nodes = set()
        self._is_open, self._is_watched = self._streams is not None, is_watched
        try:
            yield
        except BaseException:
            # In an invalid capture the driver refuses this too; the error under way says why.
            with suppress(RuntimeError):
                self._join_main()
            raise
        else:
            self._join_main()
        finally:
            self._is_open = self._is_watched = self._is_forked = False
            self._held.clear()

    @contextmanager
    def beside(self, *operands: Tensor) -> Iterator[None]:
        """Issue what is inside on the branch, after what the current stream has.

        Args:
            operands: held until a join. Work that has any is issued in place, after the branch, where no recorder watches,
                and on a stream of the user's: its allocator knows nothing of a join of the capture stream.
        """
        if not self._is_open or self._streams is None:
            yield
            return
        main, side = self._streams
        current = torch.cuda.current_stream()
        if operands and not (self._is_watched and current == main):
            if self._held:
                self.join()
            yield
            return
        self._hold(operands)
        side.wait_stream(current)
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
        """What the current stream gets from here on runs after everything on the branch."""
        if not self._is_forked or self._streams is None:
            return
        main, side = self._streams
        current = torch.cuda.current_stream()
        if current == main:
            self._join_main()
        elif current != side:
            current.wait_stream(side)

    def before_operation(self, inputs: Iterable[Tensor]) -> None:
        """An operation is about to be issued: join if it touches what the branch holds."""
        if self._held and any(storage_key(tensor) in self._held for tensor in inputs):
            self.join()

    def _hold(self, operands: Sequence[Tensor]) -> None:
        if sum(tensor.nbytes for tensor in self._held.values()) > _MAX_HELD_BYTES:
            self.join()
        self._held.update((storage_key(tensor), tensor) for tensor in operands)

    def _join_main(self) -> None:
        if self._is_forked and self._streams is not None:
            main, side = self._streams
            main.wait_stream(side)
            self._is_forked = False
            self._held.clear()


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
