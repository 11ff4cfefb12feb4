"""Streams under capture without a GPU: what is issued becomes nodes of a graph, with the edges that a CUDA capture would make."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from graphrt.capture.branch import Branch


class Stream:
    """One captured stream: the next node waits for the nodes in `after`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.after: set[str] = set()

    def record_event(self) -> frozenset[str]:
        return frozenset(self.after)

    def wait_event(self, event: frozenset[str]) -> None:
        self.after |= event

    def wait_stream(self, other: "Stream") -> None:
        self.wait_event(other.record_event())


class Capture:
    """Two streams and the graph that they make; the current one is what `torch.cuda.current_stream` says."""

    def __init__(self) -> None:
        self.main, self.side = Stream("main"), Stream("side")
        self.current = self.main
        self.edges: dict[str, set[str]] = {}  # node: those it waits for, in the order of issue
        self.stream_of: dict[str, str] = {}
        self.branch = Branch((self.main, self.side), lambda: len(self.edges))  # pyright: ignore[reportArgumentType]

    def issue(self, node: str) -> None:
        """Launch a kernel on the current stream."""
        assert node not in self.edges
        self.edges[node], self.stream_of[node] = set(self.current.after), self.current.name
        self.current.after = {node}

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        previous, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = previous

    def precedes(self, first: str, second: str) -> bool:
        """Whether ``second`` cannot start before ``first`` has ended."""
        return first in self.edges[second] or any(self.precedes(first, node) for node in self.edges[second])

    @property
    def unjoined(self) -> set[str]:
        """Nodes that the main stream does not wait for at its end: a CUDA capture with one fails."""
        done, pending = set(), list(self.main.after)
        while pending:
            node = pending.pop()
            done.add(node)
            pending += self.edges[node]
        return set(self.edges) - done

    @property
    def side_nodes(self) -> list[str]:
        return [node for node, stream in self.stream_of.items() if stream == "side"]


@contextmanager
def capturing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Capture]:
    """Let torch's streams be those of a `Capture`."""
    capture = Capture()
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "current_stream", lambda device=None: capture.current)
        patch.setattr(torch.cuda, "stream", capture.on)
        yield capture
