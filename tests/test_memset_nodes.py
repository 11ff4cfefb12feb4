"""Memset nodes of a captured graph become kernels, and the graph writes the same bytes as before."""

import pytest
import torch

from graphrt.capture.cuda_graph import GraphPool, capture, capture_stream
from graphrt.capture.cuda_rng import RngTrace
from graphrt.capture.memset_nodes import MAX_BYTES
from graphrt.kernels import device as kernel_device
from graphrt.kernels.copy import COPY_KERNEL, Copy, copy_launches

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


def _copy_early(to: torch.Tensor, source: torch.Tensor) -> None:
    """A kernel of ours that may begin before those ahead of it have ended."""
    for launch in copy_launches([Copy(to.data_ptr(), source.data_ptr(), source.nbytes)]):
        kernel_device.launch(source.get_device(), COPY_KERNEL, *launch)


@pytest.mark.parametrize("is_captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("between", ["nothing", "small kernels", "memset", "torch", "fork and join"])
def test_a_kernel_that_begins_early_sees_all_that_is_ahead_of_it(between, is_captured):
    large = [torch.zeros(1 << 27, dtype=torch.uint8, device="cuda") for _ in range(4)]
    small = [torch.zeros(1 << 10, dtype=torch.uint8, device="cuda") for _ in range(4)]
    side = torch.cuda.Stream()
    kernel_device.preload()

    def put_between(i: int) -> None:
        if between == "small kernels":  # each waits, so that what follows them waits for what is ahead of them
            for _ in range(3):
                _copy_early(small[i], small[0])
        elif between == "memset":
            _memset(small[i], 0, 4, i, 64)
        elif between == "torch":
            small[i].add_(1)
        elif between == "fork and join":
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                _copy_early(small[i], large[i][-(1 << 10) :])
            _copy_early(small[0], large[i][: 1 << 10])
            torch.cuda.current_stream().wait_stream(side)

    def body() -> None:
        for i in range(1, 4):
            _copy_early(large[i], large[i - 1])
            put_between(i)
        _copy_early(large[0], large[3])
        large[0].add_(1)

    graph, pool = _capture(body) if is_captured else (None, None)
    for step in range(1, 21):
        body() if graph is None else graph.replay()
        assert [int(x.min()) for x in large] == [step, *[step - 1] * 3]
        assert [int(x.max()) for x in large] == [step, *[step - 1] * 3]
        if between == "fork and join":
            assert all(int(x.min()) == int(x.max()) == step - 1 for x in small[1:])
    if graph is not None:
        graph.close()
        pool.close()
