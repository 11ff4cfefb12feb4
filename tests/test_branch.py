"""The branch of a captured step: what forks, what joins, and what is left when a capture fails."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from branching import Capture, capturing
from cuda.bindings import driver

from graphrt.capture.branch import Branch, growing_chunks
from graphrt.capture.cuda_graph import CaptureCounter, CapturedGraph, GraphPool, _nodes, branch_stream, capture, capture_stream
from graphrt.capture.cuda_rng import RngTrace
from graphrt.capture.driver import call
from graphrt.kernels import preload
from graphrt.kernels.fill import FILL_KERNEL


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[Capture]:
    with capturing(monkeypatch) as capture:
        yield capture


def test_work_beside_starts_after_the_fork_and_ends_before_the_join(streams):
    branch = streams.branch
    with branch.open():
        streams.issue("first")
        with branch.beside():
            streams.issue("beside")
        streams.issue("forward")
        assert not streams.precedes("beside", "forward")
        branch.join()
        streams.issue("last")
    assert streams.edges == {"first": set(), "beside": {"first"}, "forward": {"first"}, "last": {"forward", "beside"}}
    assert branch.nodes == {1}


def test_a_stream_waits_once_for_a_mark(streams):
    branch = streams.branch
    with branch.open():
        marks = []
        with branch.beside():
            for name in ("one", "two"):
                streams.issue(name)
                marks.append(branch.mark())
        marks[0].join()
        streams.issue("a")
        marks[0].join()
        streams.issue("b")
        with streams.on(other := type(streams.main)("other")):
            marks[0].join()
        marks[1].join()
        streams.issue("c")
    assert [streams.edges[name] for name in "abc"] == [{"one"}, {"a"}, {"b", "two"}]
    assert other.after == {"one"}


def test_each_piece_of_work_waits_for_what_the_chain_has_then(streams):
    branch = streams.branch
    with branch.open():
        for i in range(2):
            streams.issue(f"backward {i}")
            with branch.beside():
                streams.issue(f"norm {i}")
    assert streams.edges["norm 1"] == {"norm 0", "backward 1"}
    assert streams.edges["backward 1"] == {"backward 0"}


def test_what_nobody_waited_for_is_joined_at_the_end(streams):
    with streams.branch.open():
        with streams.branch.beside():
            streams.issue("beside")
        assert streams.unjoined == {"beside"}
    assert streams.unjoined == set()


def test_an_error_inside_leaves_nothing_unjoined_and_the_stream_as_it_was(streams):
    def fail():
        with streams.branch.open(), streams.branch.beside():
            streams.issue("beside")
            raise ArithmeticError("on purpose")

    with pytest.raises(ArithmeticError, match="on purpose"):
        fail()
    assert streams.unjoined == set()
    assert streams.current is streams.main
    assert not streams.branch.is_open
    with streams.branch.beside():
        assert streams.current is streams.main


def test_the_error_under_way_wins_over_that_of_an_invalid_capture(streams, monkeypatch):
    def refuse(_other):
        raise RuntimeError("operation failed due to a previous error during capture")

    def fail():
        with streams.branch.open():
            with streams.branch.beside():
                streams.issue("beside")
            monkeypatch.setattr(streams.main, "wait_stream", refuse)
            raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="not permitted"):
        fail()
    assert not streams.branch.is_open


def test_outside_a_capture_work_is_issued_in_place(streams):
    with streams.branch.beside():
        streams.issue("in place")
        assert streams.branch.mark() is None
    streams.branch.join()
    assert streams.stream_of == {"in place": "main"}
    without_gpu = Branch()
    with without_gpu.open(), without_gpu.beside():
        assert without_gpu.mark() is None
        assert torch.cuda.current_stream() is streams.main
        assert not without_gpu.is_open


def test_the_nodes_of_the_branch_are_those_of_the_last_capture(streams):
    with streams.branch.open(), streams.branch.beside():
        streams.issue("one")
    with streams.branch.open():
        streams.issue("two")
        with streams.branch.beside():
            streams.issue("three")
    assert streams.branch.nodes == {2}


@pytest.mark.parametrize(
    ("sizes", "first", "expected"),
    [
        ([], 4, []),
        ([1, 1, 1], 4, [3]),  # less than the first: one chunk
        ([5, 5], 4, [1, 1]),
        ([4, 4, 4, 4, 4, 4, 4], 4, [1, 2, 4]),
        ([4, 4, 4, 1], 4, [1, 3]),  # a small rest is part of the last
        ([4, 4, 4, 4], 4, [1, 2, 1]),
        ([1, 1, 1, 1, 9, 1, 1, 1, 1, 1], 4, [4, 1, 5]),
        ([100, 1, 1, 1], 4, [4]),
    ],
)
def test_chunks_grow(sizes, first, expected):
    chunks = growing_chunks(sizes, first)
    assert [len(chunk) for chunk in chunks] == expected
    assert [i for chunk in chunks for i in chunk] == list(range(len(sizes)))


# -- in a CUDA graph


class CudaCapture:
    """Captures functions with a branch open, and reads the graph."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        preload(self.device)
        self.stream, self.side = capture_stream(self.device), branch_stream(self.device)
        self.pool = GraphPool(self.stream)
        self.branch = Branch((self.stream, self.side), CaptureCounter(self.stream))

    def capture(self, body: Callable[[], Any]) -> CapturedGraph:
        def opened() -> None:
            with self.branch.open():
                body()

        return capture(opened, stream=self.stream, pool=self.pool.handle, rng_trace=RngTrace())[0]


@pytest.fixture
def cuda() -> Iterator[CudaCapture]:
    made = CudaCapture()
    yield made
    made.pool.close()


def edges_of(graph: CapturedGraph) -> set[tuple[int, int]]:
    """(index, index) of a node and one that waits for it."""
    assert graph._graph is not None
    raw = graph._graph.raw_cuda_graph()
    nodes = {int(node): index for index, node in enumerate(_nodes(graph._graph))}
    num_edges = call(driver.cuGraphGetEdges, raw)[-1]
    first, second, *_ = call(driver.cuGraphGetEdges, raw, num_edges)
    return {(nodes[int(a)], nodes[int(b)]) for a, b in zip(first, second, strict=True)}


def priorities_of(graph: CapturedGraph) -> list[int]:
    assert graph._graph is not None
    attribute = driver.CUkernelNodeAttrID.CU_LAUNCH_ATTRIBUTE_PRIORITY
    return [call(driver.cuGraphKernelNodeGetAttribute, node, attribute).priority for node in _nodes(graph._graph)]


@pytest.mark.gpu
def test_a_cuda_graph_has_the_branch(cuda):
    x, y = torch.zeros(1 << 20, device="cuda"), torch.zeros(1 << 20, device="cuda")

    def body() -> None:
        x.add_(1)  # 0
        with cuda.branch.beside():
            y.add_(2)  # 1
            y.mul_(3)  # 2
            mark = cuda.branch.mark()
        x.add_(1)  # 3
        mark.join()
        x.add_(y)  # 4
        with cuda.branch.beside():
            y.add_(1)  # 5, joined by the end of the capture

    graph = cuda.capture(body)
    assert cuda.branch.nodes == {1, 2, 5}
    assert edges_of(graph) - {(2, 5)} == {(0, 1), (1, 2), (0, 3), (3, 4), (2, 4), (4, 5)}  # 2 is before 5 by way of 4 too
    expected_x = expected_y = 0
    for _ in range(2):
        graph.replay()
        expected_y = 3 * (expected_y + 2)
        expected_x += 2 + expected_y
        expected_y += 1
        assert (x == expected_x).all()
        assert (y == expected_y).all()
    graph.close()


@pytest.mark.gpu
def test_kernels_of_the_chain_come_first_also_those_that_replace_memsets(cuda):
    x = torch.zeros(1 << 20, device="cuda")
    y = torch.zeros(1 << 20, device="cuda")

    def body() -> None:
        x.add_(1)
        with cuda.branch.beside():
            y.add_(1)
        call(driver.cuMemsetD32Async, x.data_ptr(), 0, 64, torch.cuda.current_stream().cuda_stream)
        x.add_(2)

    graph = cuda.capture(body)
    assert graph.num_nodes_by_kind == {"kernel": 4}
    assert graph.kernel_names[2] == FILL_KERNEL
    chain, beside = cuda.stream.priority, cuda.side.priority
    assert chain < beside == 0
    assert priorities_of(graph) == [chain, beside, chain, chain]
    assert edges_of(graph) == {(0, 1), (0, 3), (3, 2)}  # the driver's list has the kernel that replaced the memset last
    for _ in range(2):
        graph.replay()
    assert x[:64].tolist() == [2.0] * 64
    assert y[0] == 2
    graph.close()


@pytest.mark.gpu
@pytest.mark.parametrize("is_of_the_driver", [False, True])
def test_a_capture_that_fails_beside_leaves_the_process_as_it_was(cuda, is_of_the_driver):
    x = torch.zeros(16, device="cuda")
    before = torch.cuda.current_stream()

    def failing() -> None:
        x.add_(1)
        with cuda.branch.beside():
            x.add_(1)
            if is_of_the_driver:
                x.item()
            raise ArithmeticError("on purpose")

    with pytest.raises(RuntimeError if is_of_the_driver else ArithmeticError):
        cuda.capture(failing)
    assert torch.cuda.current_stream() == before
    with torch.cuda.stream(cuda.side):
        assert not torch.cuda.is_current_stream_capturing()
        x.add_(1)
    torch.cuda.synchronize()
    assert x[0] == 1

    def working() -> None:
        with cuda.branch.beside():
            x.add_(1)

    graph = cuda.capture(working)
    graph.replay()
    torch.cuda.synchronize()
    assert x[0] == 2
    graph.close()
