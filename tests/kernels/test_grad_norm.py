"""The gradient norm: against an fp64 one, and the same bits however its gradients are divided into launches."""

import pytest
import torch
from torch import Tensor

from graphrt.kernels import device as kernel_device
from graphrt.kernels import grad_norm as norm_kernel
from graphrt.kernels import preload
from graphrt.kernels.grad_norm import NormSums, NormTable, grad_norm
from graphrt.kernels.tensor_table import TableCache

from . import emulated

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CHUNK, PIECE = 8192, 65536
SIZES = (5, 0, 2 * CHUNK, 9001, PIECE, PIECE + 1, 1, 2 * PIECE + CHUNK + 3)
#: Rows of SIZES * 3 by launch.
DIVISIONS = [
    [list(range(24))],
    [list(range(24))[::-1]],
    [[i] for i in range(24)],
    [[7, 23, 3], list(range(8, 23)), [0, 1, 2], [4, 5, 6]],
]


def make_grads(sizes=SIZES, device="cpu", offset=0, seed=0) -> list[Tensor]:
    """Of each dtype one of each size; ``offset`` elements in front unalign each."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size + offset, generator=generator).to(device, dtype)[offset:] for dtype in DTYPES for size in sizes]


def exact_norm(grads: list[Tensor]) -> float:
    return torch.cat([grad.double().cpu() for grad in grads]).norm().item()


def tables_of(grads: list[Tensor], division: list[list[int]]) -> list[NormTable]:
    sums = NormSums([grad.numel() for grad in grads], grads[0].device)
    tables = [NormTable(sums, rows) for rows in division]
    for table in tables:
        table.hold([grads[row] for row in table.rows])
        table.write()
    return tables


# ---- the reference ----


@pytest.mark.parametrize("division", DIVISIONS, ids=len)
def test_the_reference_is_close_to_an_fp64_norm_and_repeats(division):
    grads = make_grads()
    tables, norms = tables_of(grads, division), torch.zeros(3)
    for out in norms:
        for table in tables:
            grad_norm(table, out)
    assert abs(norms[0].item() / exact_norm(grads) - 1) < 1e-6
    assert (norms == norms[0]).all()
    whole = torch.zeros(())
    grad_norm(NormTable.whole(grads), whole)
    assert whole == norms[0]


def test_a_permuted_layout_is_taken():
    x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    out = torch.zeros(())
    grad_norm(NormTable.whole([x]), out)
    torch.testing.assert_close(out, x.norm())


def test_a_table_of_the_same_gradients_is_kept():
    grads, cache = make_grads((3, 4)), TableCache()
    table = cache.get("gradients", grads, make=NormTable.whole)
    assert cache.get("gradients", list(grads), make=NormTable.whole) is table
    assert cache.get("gradients", grads[::-1], make=NormTable.whole) is not table


def test_wrong_arguments_are_named():
    grads = make_grads((3, 4))
    table = NormTable.whole(grads)
    with pytest.raises(ValueError, match=r"out is .*expected a 0-dim float32"):
        grad_norm(table, torch.zeros(1))
    with pytest.raises(ValueError, match=r"row 1 is .*expected 4 elements"):
        table.hold([grads[0], grads[0], *grads[2:]])
    with pytest.raises(ValueError, match=r"row 0 holds .*float64"):
        NormTable.whole([torch.zeros(2, dtype=torch.float64)])
    with pytest.raises(ValueError, match="lengths"):
        NormTable.whole([])


# ---- the CUDA source on a CPU ----


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    if not emulated.is_available():
        pytest.skip("g++ is not installed")
    return emulated.build("grad_norm", tmp_path_factory.mktemp("grad_norm"))


@pytest.fixture(params=emulated.ORDERS)
def emulate(request, monkeypatch, library):
    """Threads run in order and in reverse: a missing barrier shows in one of them."""
    monkeypatch.setattr(kernel_device, "launch", emulated.make_launch([library], is_reversed=request.param))


@pytest.mark.usefixtures("emulate")
@pytest.mark.parametrize("offset", [0, 1])
def test_emulated_launches_give_the_bits_of_one(offset):
    grads = make_grads(offset=offset)
    found = []
    for division in DIVISIONS:
        tables, norms = tables_of(grads, division), torch.zeros(2)
        for out in norms:  # the counter of finished blocks goes back to zero
            for table in tables:
                assert out == 0, "written before the last launch"
                norm_kernel._launch(table, out)
        found += norms.tolist()
    assert abs(found[0] / exact_norm(grads) - 1) < 1e-6
    assert set(found) == {found[0]}


@pytest.mark.slow
@pytest.mark.usefixtures("emulate")
def test_emulated_sums_of_more_pieces_than_a_block_has_threads():
    grads = [torch.full((1,), float(i)) for i in range(2500)]
    out = torch.zeros(())
    norm_kernel._launch(NormTable.whole(grads), out)
    assert out == torch.tensor(float(sum(i * i for i in range(2500)))).double().sqrt().float()


@pytest.mark.usefixtures("emulate")
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), 1e20], ids=str)
def test_emulated_nonfinite_squares_make_the_norm_nonfinite(value):
    grads = make_grads()
    grads[5][-1] = value
    tables, out = tables_of(grads, DIVISIONS[-1]), torch.zeros(())
    for table in tables:
        norm_kernel._launch(table, out)
    assert not out.isfinite()


@pytest.mark.usefixtures("emulate")
def test_a_table_is_read_where_its_gradients_are_once_it_is_written():
    """Its memory is there before, so that a launch may be captured before the gradients' addresses are written to it."""
    grads, out = make_grads(), torch.zeros(())
    table = NormTable(NormSums([grad.numel() for grad in grads], grads[0].device), range(len(grads)))
    addresses = table.addresses
    table.hold(grads)
    table.write()
    assert table.addresses == addresses
    norm_kernel._launch(table, out)
    other = make_grads(seed=1)
    table.hold(other)
    table.write()
    norm_kernel._launch(table, out)
    assert abs(out.item() / exact_norm(other) - 1) < 1e-6


# ---- the GPU ----

GPU_SIZES = (*SIZES[:-1], 100_003, 40 * CHUNK, 700 * CHUNK + 1)
GPU_DIVISION = [list(range(20, 30)), [0, 3, 9], [1, 2, 4, 5, 6, 7, 8, *range(10, 20)]]


@pytest.mark.gpu
def test_gpu_norm():
    grads = make_grads(GPU_SIZES, "cuda")
    table = NormTable.whole(grads)
    norms = torch.zeros(20, device="cuda")
    for out in norms:
        grad_norm(table, out)
    assert abs(norms[0].item() / exact_norm(grads) - 1) < 1e-6
    assert (norms == norms[0]).all()
    for value in (float("inf"), float("-inf"), float("nan")):
        grads[-1][-1] = value
        grad_norm(table, norms[0])
        assert not norms[0].isfinite()


@pytest.mark.gpu
def test_gpu_launches_on_two_streams_give_the_bits_of_one():
    grads = make_grads(GPU_SIZES, "cuda")
    expected, norms = torch.zeros((), device="cuda"), torch.zeros(20, device="cuda")
    grad_norm(NormTable.whole(grads), expected)
    tables, side = tables_of(grads, GPU_DIVISION), torch.cuda.Stream()
    for out in norms:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            grad_norm(tables[0], out)
        for table in tables[1:]:
            grad_norm(table, out)
        torch.cuda.current_stream().wait_stream(side)
    assert (norms == expected).all()


@pytest.mark.gpu
def test_gpu_norm_equals_its_emulation_bit_for_bit(library, monkeypatch):
    grads, out = make_grads(device="cuda"), torch.zeros((), device="cuda")
    grad_norm(NormTable.whole(grads), out)
    monkeypatch.setattr(kernel_device, "launch", emulated.make_launch([library], is_reversed=False))
    expected = torch.zeros(())
    norm_kernel._launch(NormTable.whole([grad.cpu() for grad in grads]), expected)
    assert out.cpu() == expected


@pytest.mark.gpu
def test_gpu_tables_are_filled_after_the_capture():
    preload()
    grads, out = make_grads(GPU_SIZES, "cuda"), torch.zeros((), device="cuda")
    sums = NormSums([grad.numel() for grad in grads], grads[0].device)
    tables = [NormTable(sums, rows) for rows in GPU_DIVISION]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for table in tables:
            table.hold([grads[row] for row in table.rows])
            grad_norm(table, out)
    for table in tables:
        table.write()
    for seed in range(2):
        for grad, value in zip(grads, make_grads(GPU_SIZES, seed=seed), strict=True):
            grad.copy_(value)
        graph.replay()
        assert abs(out.item() / exact_norm(grads) - 1) < 1e-6
