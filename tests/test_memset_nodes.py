"""Memset nodes of a captured graph become kernels, and the graph writes the same bytes as before."""

import pytest
import torch

from graphrt.capture.cuda_graph import GraphPool, capture, capture_stream
from graphrt.capture.cuda_rng import RngTrace
from graphrt.capture.memset_nodes import MAX_BYTES

pytestmark = pytest.mark.gpu

#: (offset in bytes, bytes an element, value, elements); the last is too large to be replaced
RANGES = [
    (0, 1, 0xAB, 5),
    (17, 1, 1, 1001),
    (2048, 2, 0xBEEF, 77),
    (4100, 4, 0xDEADBEEF, 3000),
    (20480, 4, 0, 1),
    (1 << 17, 1, 7, MAX_BYTES + 1),
]


def _memset(x: torch.Tensor, offset: int, element_size: int, value: int, num_elements: int) -> None:
    from cuda.bindings import driver

    name = {1: "cuMemsetD8Async", 2: "cuMemsetD16Async", 4: "cuMemsetD32Async"}[element_size]
    stream = torch.cuda.current_stream().cuda_stream
    (status,) = getattr(driver, name)(x.data_ptr() + offset, value, num_elements, stream)
    assert int(status) == 0


def _capture(body):
    device = torch.device("cuda", torch.cuda.current_device())
    stream = capture_stream(device)
    pool = GraphPool(stream)
    return capture(body, stream=stream, pool=pool.handle, rng_trace=RngTrace())[0], pool


def test_small_memsets_become_kernels_that_write_the_same_bytes():
    x = torch.zeros(1 << 18, dtype=torch.uint8, device="cuda")
    y = torch.zeros_like(x)
    seen = torch.zeros(len(RANGES), dtype=torch.int64, device="cuda")

    def body():
        for i, values in enumerate(RANGES):
            _memset(x, *values)
            seen[i].copy_(x.sum(dtype=torch.int64))  # what the chain wrote up to here: the order is kept
            x[-1].add_(1)

    graph, pool = _capture(body)
    assert graph.num_nodes_by_kind["memset"] == 1
    # torch's sum clears a workspace of its own beside ours.
    assert graph.kernel_names.count("graphrt_fill") >= len(RANGES) - 1
    assert graph.kernel_names[0] == "graphrt_fill"
    expected = []
    for values in RANGES:
        _memset(y, *values)
        expected.append(int(y.sum(dtype=torch.int64)))
        y[-1].add_(1)
    for _ in range(2):
        x.zero_()
        graph.replay()
        assert seen.tolist() == expected
        assert torch.equal(x, y)
    graph.close()
    pool.close()


def test_a_graph_of_memsets_alone_is_replaced_too():
    x = torch.zeros(64, dtype=torch.uint8, device="cuda")
    graph, pool = _capture(lambda: [_memset(x, 4 * i, 4, i, 1) for i in range(4)])
    graph.replay()
    assert x.view(torch.int32)[:4].tolist() == [0, 1, 2, 3]
    assert graph.num_nodes_by_kind == {"kernel": 4}
    graph.close()
    pool.close()
