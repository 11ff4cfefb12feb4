"""The reference against the FP8 specification, built here from its value tables, and against the rules in words."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphrt import kernels
from graphrt.kernels import reference
from graphrt.recipe import FP8_MAX

from .cases import EDGES, FP8_DTYPES, NONFINITE, NUM_SLOTS, SLOT, assert_same_bits, make_input, make_scales, make_state

LAYOUTS = {torch.float8_e4m3fn: (4, 3, 7), torch.float8_e5m2: (5, 2, 15)}  # exponent bits, mantissa bits, bias


def finite_values(dtype: torch.dtype) -> np.ndarray:
    """value of each non-negative finite code, in code order (OCP 8-bit floating point, tables 1 and 2)."""
    exponent_bits, mantissa_bits, bias = LAYOUTS[dtype]
    values = []
    for code in range(128):
        exponent, mantissa = code >> mantissa_bits, code % 2**mantissa_bits
        fraction = mantissa / 2**mantissa_bits
        values.append(2.0 ** (exponent - bias) * (1 + fraction) if exponent else 2.0 ** (1 - bias) * fraction)
    num_finite = 127 if dtype is torch.float8_e4m3fn else 124  # e4m3 has one NaN, e5m2 inf and three NaN
    assert values[num_finite - 1] == FP8_MAX[dtype]
    assert exponent_bits + mantissa_bits == 7
    return np.array(values[:num_finite])


def cast_by_table(values: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """The nearest code, of two equally near ones the even one; saturating; NaN is 0x7f."""
    table = finite_values(dtype)
    numbers = np.where(np.isnan(values), 0, values).astype(np.float64)
    safe = np.minimum(np.abs(numbers), table[-1])
    upper = np.searchsorted(table, safe).clip(1, len(table) - 1)
    below, above = safe - table[upper - 1], table[upper] - safe
    is_upper = (above < below) | ((above == below) & (upper % 2 == 0))
    code = np.where(is_upper, upper, upper - 1) | np.where(np.signbit(values), 0x80, 0)
    return np.where(np.isnan(values), 0x7F, code).astype(np.uint8)


def assert_cast_matches_table(values: torch.Tensor, dtype: torch.dtype) -> None:
    actual = reference.saturating_cast(values, dtype).view(torch.uint8).numpy()
    np.testing.assert_array_equal(actual, cast_by_table(values.numpy(), dtype))


@pytest.mark.parametrize("dtype", FP8_DTYPES, ids=str)
class TestCast:
    def test_edges(self, dtype):
        assert_cast_matches_table(torch.tensor([*EDGES, *NONFINITE]), dtype)

    def test_negative_nan_and_payloads(self, dtype):
        bits = torch.tensor([0x7F800001, 0x7FFFFFFF, -1, -0x7FFFFF], dtype=torch.int32)
        assert (reference.saturating_cast(bits.view(torch.float32), dtype).view(torch.uint8) == 0x7F).all()

    def test_every_tie_and_its_neighbours(self, dtype):
        table = torch.tensor(finite_values(dtype), dtype=torch.float32)
        middle = (table[1:] + table[:-1]) / 2
        near = torch.cat([table, middle, middle.nextafter(torch.tensor(0.0)), middle.nextafter(torch.tensor(1e9))])
        assert_cast_matches_table(torch.cat([near, -near]), dtype)

    def test_every_bf16_pattern(self, dtype):
        values = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
        assert_cast_matches_table(values, dtype)
        assert_cast_matches_table(values * 0.3, dtype)

    @settings(max_examples=50, deadline=None)
    @given(values=st.lists(st.floats(width=32), min_size=1, max_size=50))
    def test_any_float(self, dtype, values):
        assert_cast_matches_table(torch.tensor(values, dtype=torch.float32), dtype)


@pytest.mark.parametrize("dtype", FP8_DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 15, 16, 17, 32])
def test_quantize_layout(dtype, rows):
    x = make_input(rows, 24, torch.bfloat16, nonfinite=True)
    scale, scale_inv = make_scales(0.3)
    amax = torch.zeros(NUM_SLOTS)
    result = kernels.quantize(x, scale, scale_inv, SLOT, dtype, amax=amax, transpose=True)
    assert result.data.shape == (rows, 24)
    assert result.data.dtype is dtype
    assert result.transposed is not None
    padded = -(-rows // 16) * 16
    assert result.transposed.shape == (24, padded)
    assert_same_bits(result.transposed[:, :rows], result.data.t(), "transposed")
    assert (result.transposed.view(torch.uint8)[:, rows:] == 0).all()
    expected = cast_by_table((x.float() * torch.tensor(0.3)).numpy(), dtype)
    np.testing.assert_array_equal(result.data.view(torch.uint8).numpy(), expected)
    assert result.scale_inv.shape == (1,)
    assert result.scale_inv.untyped_storage().data_ptr() != scale_inv.untyped_storage().data_ptr()


def test_amaxes_of_several_casts_combine_by_max_in_their_slot():
    scale, scale_inv = make_scales(1.0)
    amax = torch.zeros(NUM_SLOTS)
    for largest in (2.0, -5.0, 3.0):
        kernels.quantize(torch.tensor([[largest, 0.5]]), scale, scale_inv, SLOT, torch.float8_e5m2, amax=amax)
    kernels.record_amax_(torch.tensor(4.5), amax, SLOT)
    assert amax.tolist() == [0, 0, 0, 5.0, 0]


def test_nan_beats_inf_beats_finite_and_stays():
    amax = torch.zeros(NUM_SLOTS)
    for value, expected in ((1e30, 1e30), (float("-inf"), float("inf")), (1.0, float("inf")), (float("nan"), None), (float("inf"), None)):
        kernels.record_amax_(torch.tensor([value, 2.0]), amax, 0)
        assert amax[0].isnan() if expected is None else amax[0] == torch.tensor(expected)


def test_out_is_written_in_place():
    scale, scale_inv = make_scales(2.0)
    x = make_input(17, 33, torch.float32)
    out = kernels.quantize(torch.zeros_like(x), scale, scale_inv, SLOT, torch.float8_e4m3fn, transpose=True)
    addresses = [t.data_ptr() for t in out if t is not None]
    result = kernels.quantize(x, scale, scale_inv, SLOT, torch.float8_e4m3fn, transpose=True, out=out)
    assert [t.data_ptr() for t in result if t is not None] == addresses
    expected = kernels.quantize(x, scale, scale_inv, SLOT, torch.float8_e4m3fn, transpose=True)
    assert_same_bits(out.data, expected.data, "data")


def test_quantizing_a_tensor_that_requires_grad_keeps_no_graph():
    scale, scale_inv = make_scales(2.0)
    amax = torch.zeros(NUM_SLOTS)
    x = torch.ones(2, 16, requires_grad=True)
    result = kernels.quantize(x, scale, scale_inv, SLOT, torch.float8_e4m3fn, amax=amax)
    kernels.record_amax_(x, amax, SLOT)
    assert not result.data.requires_grad
    assert not amax.requires_grad


def update(state, **changes):
    rule = {"start": 0, "end": state[0].shape[1], "direction": 0, "fp8_max": 448.0, "margin": 0, "algo": "max", **changes}
    kernels.update_scales_(*state, **rule)


def column(*rows: float) -> tuple[torch.Tensor, ...]:
    """State of one slot with this history, scale 3, scale_inv 1/3."""
    history = torch.tensor(rows).view(-1, 1)
    scale_inv = torch.tensor([[1 / 3, 8.0, 8.0, 8.0]])
    return history, torch.tensor([3.0]), scale_inv, torch.zeros(1, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)


class TestUpdate:
    def test_history_rolls_and_max_is_taken_before_the_shift(self):
        state = column(2.0, 7.0, 5.0, 6.0)
        update(state)
        assert state[0].flatten().tolist() == [0, 5, 6, 2]
        assert state[1].item() == 64.0  # 448 / 7: row 1 counts although the shift drops it
        assert state[2].tolist() == [[1 / 64, 8, 8, 8]]
        assert state[4].tolist() == [1, 0]

    def test_most_recent_takes_row_0(self):
        state = column(2.0, 7.0, 5.0)
        update(state, algo="most_recent", direction=1, fp8_max=57344.0, margin=3)
        assert state[1].item() == 57344 / 2 / 8
        assert state[4].tolist() == [0, 1]

    def test_unused_slot_keeps_everything(self):
        state = column(0.0, 7.0, 5.0)
        update(state)
        assert state[0].flatten().tolist() == [0, 7, 5]
        assert state[1].item() == 3.0
        assert state[3].item() == 0

    @pytest.mark.parametrize("value", [float("inf"), float("nan")])
    def test_nonfinite_staging_is_counted_and_dropped(self, value):
        state = column(value, 7.0, 5.0)
        update(state)
        assert state[0].flatten().tolist() == [0, 7, 5]
        assert state[1].item() == 3.0
        assert state[3].item() == 1

    def test_tiny_amax_gives_flt_max_with_any_margin(self):
        for margin in (0, 3):
            state = column(1e-45, 0.0)
            update(state, margin=margin)
            largest = torch.finfo(torch.float32).max
            assert state[1].item() == largest
            assert state[2][0, 0] == torch.tensor(1.0) / torch.tensor(largest)
            assert state[2][0, 0] > 0

    def test_one_row_history_has_only_the_staging_row(self):
        state = column(2.0)
        update(state)
        assert state[0].tolist() == [[0.0]]
        assert state[1].item() == 224.0

    def test_slots_outside_the_range_are_untouched(self):
        state = make_state(4, 24)
        before = [tensor.clone() for tensor in state]
        update(state, start=5, end=9)
        for actual, expected in zip(state[:4], before[:4], strict=True):
            dim = 1 if actual.shape[0] == 4 else 0
            outside = torch.tensor([*range(5), *range(9, 24)])
            assert_same_bits(actual.index_select(dim, outside), expected.index_select(dim, outside), "outside")

    def test_division_is_rounded_once(self):
        amaxes = torch.rand(4096, generator=torch.Generator().manual_seed(0)) * 100 + 1e-3
        n = len(amaxes)
        state = (
            amaxes.view(1, n).clone(),
            torch.ones(n),
            torch.ones(n, 4),
            torch.zeros(n, dtype=torch.int32),
            torch.zeros(2, dtype=torch.int64),
        )
        update(state)
        expected = np.float32(448) / amaxes.numpy()
        np.testing.assert_array_equal(state[1].numpy(), expected)
        np.testing.assert_array_equal(state[2][:, 0].numpy(), np.float32(1) / expected)
