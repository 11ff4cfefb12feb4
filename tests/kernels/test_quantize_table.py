"""Many matrices quantized by one launch equal one `quantize` each, bit for bit: on the CPU, emulated, and on a GPU."""

import pytest
import torch
from torch import Tensor

from graphrt import kernels
from graphrt.kernels import device as kernel_device
from graphrt.kernels import quantize_table, reference
from graphrt.kernels.quantize_table import QuantizeEntry, QuantizeTable, quantize_many
from graphrt.kernels.quantized import QuantizedTensor, QuantizeTo, allocate

from . import emulated
from .cases import INPUT_DTYPES, assert_same_bits, assert_same_result, make_input

E4M3 = torch.float8_e4m3fn
SHAPES = [(16, 16), (48, 80), (1, 16), (1, 1), (128, 64), (129, 130), (15, 17), (300, 257), (256, 192), (17, 64)]
VALUES = (1.0, 0.75, 37.3, 1e-3, 2.0**20)


class Problem:
    """Matrices with a slot each, one without an amax, every fourth without the transposed copy."""

    def __init__(self, shapes: list[tuple[int, int]], dtypes: tuple[torch.dtype, ...], device: str = "cpu", offset: int = 0) -> None:
        self.device, num_slots = device, len(shapes)
        self.scale = torch.tensor([VALUES[i % len(VALUES)] for i in range(num_slots)])
        self.scale_inv = torch.full((num_slots, 4), 7.0)
        self.scale_inv[:, 0] = 1.0 / self.scale
        self.amax = torch.full((num_slots,), 0.25)
        self.matrices = [self._matrix(i, *shape, dtypes[i % len(dtypes)], offset) for i, shape in enumerate(shapes)]
        self.tensors = [tensor.to(device) for tensor in (self.scale, self.scale_inv, self.amax)]

    def _matrix(self, i: int, rows: int, cols: int, dtype: torch.dtype, offset: int) -> Tensor:
        """Every third has values that are not finite, every fifth is all zeros; ``offset`` elements in front unalign them."""
        storage = torch.empty(rows * cols + offset, dtype=dtype, device=self.device)
        x = storage[offset:].view(rows, cols)
        x.copy_(make_input(rows, cols, dtype, seed=i, nonfinite=i % 3 == 1))
        return x.zero_() if i % 5 == 4 else x

    def entries(self) -> list[QuantizeEntry]:
        scale, scale_inv, amax = self.tensors
        made = []
        for slot, x in enumerate(self.matrices):
            transpose = slot % 4 != 3
            out = allocate(x, E4M3, transpose)
            made.append(QuantizeEntry(x, QuantizeTo(scale, scale_inv, slot, E4M3, amax if slot != 1 else None, transpose), out))
        return made

    def expected(self) -> tuple[list[QuantizedTensor], Tensor]:
        """What one reference call a matrix gives, and the staging row."""
        amax = self.amax.clone()
        results = [
            reference.quantize(x.cpu(), self.scale, self.scale_inv, slot, E4M3, amax=amax if slot != 1 else None, transpose=slot % 4 != 3)
            for slot, x in enumerate(self.matrices)
        ]
        return results, amax

    def check(self, entries: list[QuantizeEntry]) -> None:
        results, amax = self.expected()
        for (_, _, out), result in zip(entries, results, strict=True):
            assert_same_result(out, result)
        assert_same_bits(self.tensors[2], amax, "amax")


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory):
    if not emulated.is_available():
        pytest.skip("g++ is not installed")
    return emulated.build("quantize", tmp_path_factory.mktemp("emulation"))


@pytest.fixture(params=["reference", "forward", pytest.param("reverse", marks=pytest.mark.slow)])
def run(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    """`quantize_many` on the CPU, and emulated with threads in order and in reverse: a missing barrier shows in one of them."""
    if request.param == "reference":
        return quantize_many
    launch = emulated.make_launch([request.getfixturevalue("library")], is_reversed=request.param == "reverse")
    monkeypatch.setattr(kernel_device, "launch", launch)
    return quantize_table._launch


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("dtypes", [*((dtype,) for dtype in INPUT_DTYPES), INPUT_DTYPES], ids=str)
def test_one_launch_equals_one_quantize_each(run, dtypes, offset):
    problem = Problem(SHAPES, dtypes, offset=offset)
    entries = problem.entries()
    table = QuantizeTable(entries)
    assert len(table.launches) == len(set(dtypes))
    run(table)
    problem.check(entries)


def test_large_weights(run):
    problem = Problem([(768, 2304), (16, 16)], (torch.float32,))
    entries = problem.entries()
    run(QuantizeTable(entries))
    problem.check(entries)


def test_one_weight_in_two_slots_and_two_weights_in_one(run):
    problem = Problem([(48, 80), (48, 80), (16, 64)], (torch.float32,))
    entries = problem.entries()
    tied = [entries[0], entries[2]._replace(x=entries[0].x, out=allocate(entries[0].x, E4M3, True))]
    run(QuantizeTable([*tied, entries[1]._replace(to=entries[0].to)]))
    assert_same_bits(problem.tensors[2][0], torch.maximum(bits_max(entries[0].x), bits_max(entries[1].x)), "amax")
    assert_same_bits(tied[0].out.data, reference.quantize(entries[0].x, problem.scale, problem.scale_inv, 0, E4M3).data, "slot 0")
    assert_same_bits(tied[1].out.data, reference.quantize(entries[0].x, problem.scale, problem.scale_inv, 2, E4M3).data, "slot 2")


def bits_max(x: Tensor) -> Tensor:
    amax = torch.full((1,), 0.25)
    reference.record_amax_(x, amax, 0)
    return amax[0]


def test_what_a_table_refuses():
    entry = Problem([(16, 16)], (torch.float32,)).entries()[0]
    wide = torch.zeros(16, 32)
    for entries, message in [
        ([], "entries is empty"),
        ([entry, entry._replace(to=entry.to._replace(dtype=torch.float8_e5m2))], "Entry 1: out.data is"),
        ([entry._replace(to=entry.to._replace(transpose=False))], "Entry 0: out.transposed is a tensor, but transpose is False"),
        ([entry._replace(to=entry.to._replace(slot=1))], "Entry 0: slot is 1, expected 0 <= slot < 1"),
        ([entry._replace(x=wide[:, :16])], r"Entry 0 has x of shape \[16, 16\] and strides \[32, 1\]"),
        ([entry._replace(x=torch.zeros(16, 16, dtype=torch.float64))], "Entry 0: x has dtype"),
        ([entry, entry._replace(x=wide)], r"Entry 1: out.data is contiguous torch.float8_e4m3fn \[16, 16\]"),
    ]:
        with pytest.raises(ValueError, match=message):
            QuantizeTable(entries)


@pytest.mark.gpu
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("dtypes", [*((dtype,) for dtype in INPUT_DTYPES), INPUT_DTYPES], ids=str)
def test_gpu_equals_reference(dtypes, offset):
    problem = Problem([*SHAPES, (768, 2304), (4096, 768), (2000, 1040)], dtypes, device="cuda", offset=offset)
    entries = problem.entries()
    quantize_many(QuantizeTable(entries))
    problem.check(entries)


@pytest.mark.gpu
def test_gpu_replays_follow_weights_and_scales():
    problem = Problem(SHAPES, (torch.float32, torch.bfloat16), device="cuda")
    entries = problem.entries()
    table = QuantizeTable(entries)
    kernels.preload()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        quantize_many(table)
    for step in range(3):
        for x in problem.matrices:
            x.mul_(0.5 + step)
        problem.scale.mul_(1.5)
        problem.tensors[0].copy_(problem.scale)
        problem.tensors[2].fill_(0.25)
        graph.replay()
        problem.check(entries)
