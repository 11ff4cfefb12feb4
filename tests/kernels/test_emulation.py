"""The CUDA sources, executed on a CPU by the emulation, equal the reference bit for bit.

The launcher's own grid and argument code runs too: only the launch itself is replaced.
"""

import pytest
import torch

from graphrt.kernels import device, launcher, reference
from graphrt.kernels.quantized import allocate

from . import emulated
from .cases import (
    FP8_DTYPES,
    INPUT_DTYPES,
    NUM_SLOTS,
    SCALES,
    SHAPES,
    SLOT,
    assert_same_bits,
    assert_same_result,
    check_quantize,
    check_update,
    make_input,
    make_scales,
    make_state,
)

pytestmark = pytest.mark.skipif(not emulated.is_available(), reason="g++ is not installed")


@pytest.fixture(scope="session")
def libraries(tmp_path_factory):
    folder = tmp_path_factory.mktemp("emulation")
    return [emulated.build(source, folder) for source in ("quantize", "scale_update")]


@pytest.fixture(autouse=True, params=emulated.ORDERS)
def emulate(request, monkeypatch, libraries):
    """Threads run in order and in reverse: a missing barrier shows in one of them."""
    monkeypatch.setattr(device, "launch", emulated.make_launch(libraries, is_reversed=request.param))


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0]}x{shape[1]}")
@pytest.mark.parametrize("dtype", INPUT_DTYPES, ids=str)
def test_quantize_equals_reference_over_shapes(shape, dtype):
    rows, cols = shape
    x = make_input(rows, cols, dtype)
    for i, fp8 in enumerate(FP8_DTYPES):
        for transpose in (False, True):
            check_quantize(launcher.quantize, x, fp8, scale_value=SCALES[i], transpose=transpose, has_amax=transpose == bool(i))


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0]}x{shape[1]}")
def test_the_transposed_copy_alone_equals_reference(shape):
    for dtype in INPUT_DTYPES:
        for fp8, scale in zip(FP8_DTYPES, SCALES, strict=False):
            x, scales = make_input(*shape, dtype, seed=2), make_scales(scale)
            actual = launcher.quantize_transposed(x, scales[0], SLOT, fp8)
            assert_same_bits(actual, reference.quantize(x, *scales, SLOT, fp8, transpose=True).transposed, "transposed")


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("dtype", INPUT_DTYPES, ids=str)
def test_quantize_equals_reference_with_nonfinite_values(scale, dtype):
    x = make_input(33, 80, dtype, nonfinite=True, seed=1)
    for fp8 in FP8_DTYPES:
        for transpose in (False, True):
            check_quantize(launcher.quantize, x, fp8, scale_value=scale, transpose=transpose, has_amax=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_16_bit_pattern_equals_reference(dtype):
    x = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype).view(256, 256)
    for fp8 in FP8_DTYPES:
        check_quantize(launcher.quantize, x, fp8, scale_value=1.0, transpose=True, has_amax=True)
        check_quantize(launcher.quantize, x, fp8, scale_value=0.3, transpose=False, has_amax=False)


def test_pad_is_zero_under_a_scale_that_is_not_finite():
    x = make_input(5, 33, torch.float32)
    check_quantize(launcher.quantize, x, torch.float8_e4m3fn, scale_value=float("inf"), transpose=True, has_amax=False)


@pytest.mark.parametrize("transpose", [False, True])
def test_unaligned_input_and_output(transpose):
    flat = make_input(1, 40 * 64 + 1, torch.bfloat16).view(-1)
    x = flat[1:].view(40, 64)
    assert x.data_ptr() % 16
    check_quantize(launcher.quantize, x, torch.float8_e4m3fn, scale_value=0.75, transpose=transpose, has_amax=True)
    scale, scale_inv = make_scales(2.0)
    out = allocate(x, torch.float8_e5m2, transpose)
    storage = torch.zeros(40 * 64 + 1, dtype=torch.uint8)
    out = out._replace(data=storage[1:].view(torch.float8_e5m2).view(40, 64))
    result = launcher.quantize(x, scale, scale_inv, SLOT, torch.float8_e5m2, transpose=transpose, out=out)
    assert result.data.data_ptr() == storage.data_ptr() + 1
    assert_same_result(result, reference.quantize(x, scale, scale_inv, SLOT, torch.float8_e5m2, transpose=transpose))


def test_noncontiguous_input():
    x = make_input(64, 40, torch.bfloat16).t()
    check_quantize(launcher.quantize, x, torch.float8_e4m3fn, scale_value=0.75, transpose=True, has_amax=True)


@pytest.mark.parametrize("shape", [(0, 16), (16, 0), (0, 0)])
def test_empty_input_launches_nothing_and_copies_scale_inv(shape):
    for transpose in (False, True):
        check_quantize(launcher.quantize, torch.zeros(shape), torch.float8_e5m2, scale_value=4.0, transpose=transpose, has_amax=True)


@pytest.mark.parametrize("count", [0, 1, 7, 8, 4096, 8192, 8193, 20001])
@pytest.mark.parametrize("dtype", INPUT_DTYPES, ids=str)
def test_record_amax_equals_reference(count, dtype):
    x = make_input(1, count + 1, dtype, nonfinite=count % 2 == 1).view(-1)[1:]
    for values in (x, x.clone(), torch.zeros_like(x)):
        amax = torch.zeros(NUM_SLOTS)
        expected = amax.clone()
        launcher.record_amax_(values, amax, SLOT)
        reference.record_amax_(values, expected, SLOT)
        assert_same_bits(amax, expected, "amax")


@pytest.mark.parametrize("num_rows", [1, 2, 3, 16, 1024, 1025, 2500])
@pytest.mark.parametrize("algo", ["max", "most_recent"])
def test_update_equals_reference(num_rows, algo):
    state = make_state(num_rows, 27)
    for margin, start, end in ((0, 0, 27), (3, 3, 20), (-4, 12, 13), (0, 5, 5)):
        rule = {"start": start, "end": end, "direction": margin % 2, "fp8_max": 448.0, "margin": margin, "algo": algo}
        check_update(launcher.update_scales_, state, **rule)


def test_consecutive_updates_equal_reference():
    state = make_state(5, 24)
    rule = {"start": 0, "end": 24, "direction": 1, "fp8_max": 57344.0, "margin": 0, "algo": "max"}
    for seed in range(8):
        check_update(launcher.update_scales_, state, **rule)
        state[0][0] = make_state(5, 24, seed=seed)[0][0].roll(seed)
