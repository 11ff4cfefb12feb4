"""The kernels on a GPU equal the CPU reference bit for bit, eagerly and in a replayed CUDA graph."""

import subprocess
import sys
import threading

import pytest
import torch

from graphrt import kernels
from graphrt.kernels import reference

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

HAS_FP8_GPU = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_FP8_GPU, reason="no CUDA device with FP8 (compute capability 8.9 or later)")]

E4M3, E5M2 = FP8_DTYPES


@pytest.mark.parametrize("dtype", INPUT_DTYPES, ids=str)
@pytest.mark.parametrize("fp8", FP8_DTYPES, ids=str)
def test_quantize_equals_reference(dtype, fp8):
    for i, (rows, cols) in enumerate([*SHAPES, (1000, 1040), (2048, 1024)]):
        x = make_input(rows, cols, dtype, nonfinite=bool(i % 2), seed=i, device="cuda")
        for transpose in (False, True):
            for has_amax in (False, True):
                scale = SCALES[i % len(SCALES)]
                check_quantize(kernels.quantize, x, fp8, scale_value=scale, transpose=transpose, has_amax=has_amax)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("fp8", FP8_DTYPES, ids=str)
def test_every_16_bit_pattern_equals_reference(dtype, fp8):
    x = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype).view(256, 256).cuda()
    for scale in SCALES:
        check_quantize(kernels.quantize, x, fp8, scale_value=scale, transpose=True, has_amax=True)


def test_noncontiguous_unaligned_and_empty_input():
    storage = make_input(1, 40 * 64 + 1, torch.bfloat16, device="cuda").view(-1)
    inputs = [make_input(64, 40, torch.bfloat16, device="cuda").t(), storage[1:].view(40, 64), storage[: 40 * 64].view(40, 64)[:, 3:51]]
    for x in [*inputs, torch.empty(0, 16, device="cuda"), torch.empty(16, 0, device="cuda")]:
        for transpose in (False, True):
            check_quantize(kernels.quantize, x, E4M3, scale_value=0.75, transpose=transpose, has_amax=True)


@pytest.mark.parametrize("dtype", INPUT_DTYPES, ids=str)
def test_record_amax_equals_reference(dtype):
    for count in (0, 1, 8, 8192, 8193, 100_003):
        x = make_input(1, count + 1, dtype, nonfinite=count == 8193, device="cuda").view(-1)[1:]
        amax, expected = torch.zeros(NUM_SLOTS, device="cuda"), torch.zeros(NUM_SLOTS)
        kernels.record_amax_(x, amax, SLOT)
        reference.record_amax_(x.cpu(), expected, SLOT)
        assert_same_bits(amax, expected, "amax")


@pytest.mark.parametrize("algo", ["max", "most_recent"])
@pytest.mark.parametrize("num_rows", [1, 2, 16, 1024, 1025, 5000])
def test_update_equals_reference(num_rows, algo):
    state = make_state(num_rows, 515, device="cuda")
    for margin, start, end in ((0, 0, 515), (3, 3, 500), (-4, 12, 13), (0, 5, 5)):
        state[0][0].copy_(make_state(1, 515)[0][0].roll(margin))
        rule = {"start": start, "end": end, "direction": margin % 2, "fp8_max": 57344.0, "margin": margin, "algo": algo}
        check_update(kernels.update_scales_, state, **rule)


def capture(step) -> torch.cuda.CUDAGraph:
    kernels.preload()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def test_replays_read_and_write_the_same_addresses():
    """A quantize and an update in one graph: each replay equals the reference run on the same values."""
    x = torch.empty(300, 272, dtype=torch.bfloat16, device="cuda")
    state = make_state(16, NUM_SLOTS, device="cuda")
    history, scale, scale_inv = state[:3]
    history[0].zero_()
    expected = [tensor.cpu().clone() for tensor in state]
    out = kernels.quantize(x.zero_(), scale, scale_inv, SLOT, E4M3, transpose=True)
    rule = {"start": 0, "end": NUM_SLOTS, "direction": 0, "fp8_max": 448.0, "margin": 0, "algo": "max"}

    def step():
        kernels.quantize(x, scale, scale_inv, SLOT, E4M3, amax=history[0], transpose=True, out=out)
        kernels.update_scales_(*state, **rule)

    graph = capture(step)
    for seed in range(5):
        x.copy_(make_input(300, 272, torch.bfloat16, seed=seed, nonfinite=seed == 2))
        graph.replay()
        wanted = reference.quantize(x.cpu(), expected[1], expected[2], SLOT, E4M3, amax=expected[0][0], transpose=True)
        reference.update_scales_(*expected, **rule)
        assert_same_result(out, wanted)
        for actual, wanted_tensor in zip(state, expected, strict=True):
            assert_same_bits(actual, wanted_tensor, "state")


def test_launches_go_to_the_current_stream():
    x = make_input(256, 256, torch.bfloat16, device="cuda")
    scale, scale_inv = make_scales(1.0, "cuda")
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        x.fill_(3.0)  # behind the sleep: a launch on another stream would not see it
        result = kernels.quantize(x, scale, scale_inv, SLOT, E4M3, transpose=True)
    stream.synchronize()
    assert (result.data.float() == 3).all()


def test_launch_from_a_new_thread():
    x = make_input(64, 64, torch.bfloat16, device="cuda")
    kernels.preload()
    failures: list[BaseException] = []

    def run():
        try:
            check_quantize(kernels.quantize, x, E4M3, scale_value=1.0, transpose=True, has_amax=True)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert not failures, failures


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_launch_does_not_synchronize():
    x = make_input(64, 64, torch.bfloat16, device="cuda")
    scale, scale_inv = make_scales(1.0, "cuda")
    amax = torch.zeros(NUM_SLOTS, device="cuda")
    state = make_state(16, NUM_SLOTS, device="cuda")
    kernels.preload()
    torch.cuda.set_sync_debug_mode("error")
    try:
        kernels.quantize(x, scale, scale_inv, SLOT, E5M2, amax=amax, transpose=True)
        kernels.record_amax_(x, amax, SLOT)
        kernels.update_scales_(*state, start=0, end=NUM_SLOTS, direction=0, fp8_max=448.0, margin=0, algo="max")
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_first_launch_inside_a_capture():
    """In a process that has loaded nothing: the kernels are compiled and loaded under capture."""
    code = """
import torch
from graphrt import kernels
x = torch.full((64, 64), 3.0, device="cuda")
scale, scale_inv = torch.ones(1, device="cuda"), torch.ones(1, 4, device="cuda")
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    result = kernels.quantize(x, scale, scale_inv, 0, torch.float8_e4m3fn, transpose=True)
graph.replay()
assert (result.data.float() == 3).all()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_on_another_device_than_the_current():
    x = make_input(130, 136, torch.bfloat16, device="cuda:1")
    with torch.cuda.device(0):
        check_quantize(kernels.quantize, x, E4M3, scale_value=0.75, transpose=True, has_amax=True)
        assert torch.cuda.current_device() == 0


def test_a_tensor_of_more_than_2_to_the_31_elements():
    if torch.cuda.mem_get_info()[0] < 20 * 2**30:
        pytest.skip("needs 20 GiB of free GPU memory")
    rows, cols = 131_080, 16_400
    x = torch.zeros(rows, cols, dtype=torch.bfloat16, device="cuda")
    x[-1, -1] = 5.0
    scale, scale_inv = make_scales(1.0, "cuda")
    amax = torch.zeros(NUM_SLOTS, device="cuda")
    result = kernels.quantize(x, scale, scale_inv, SLOT, E4M3, amax=amax, transpose=True)
    assert result.transposed is not None
    assert amax[SLOT].item() == 5
    assert result.data[-1, -1].float().item() == 5
    assert result.transposed[-1, rows - 1].float().item() == 5
    assert result.data.view(torch.int32).count_nonzero().item() == 1
    assert result.transposed.view(torch.int32).count_nonzero().item() == 1
    flat = kernels.quantize(x, scale, scale_inv, SLOT, E4M3)
    assert_same_bits(flat.data[-64:], result.data[-64:], "data")


@pytest.mark.parametrize("dtypes", [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)], ids=str)
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_scaled_mm_equals_the_reference_closely(dtypes, out_dtype):
    generator = torch.Generator().manual_seed(0)
    for m, k, n in ((32, 64, 48), (1, 128, 16), (17, 32, 256), (0, 32, 16)):
        a, b_t = (torch.randn(rows, k, generator=generator).to(dtype) for rows, dtype in zip((m, n), dtypes, strict=True))
        scales = torch.tensor([0.5]), torch.tensor([0.25])
        for bias in (None, torch.randn(n, generator=generator), torch.randn(n, generator=generator).bfloat16()):
            expected = kernels.scaled_mm(a, scales[0], b_t, scales[1], out_dtype, fast_accum=False, bias=bias)
            a_inv, b_inv = scales[0].cuda(), scales[1].cuda()
            bias = None if bias is None else bias.cuda()
            out = kernels.scaled_mm(a.cuda(), a_inv, b_t.cuda(), b_inv, out_dtype, fast_accum=False, bias=bias)
            assert out.dtype is out_dtype
            torch.testing.assert_close(out.cpu(), expected, rtol=2e-2, atol=2e-2)


def test_scaled_mm_names_an_unaligned_scale():
    a, b_t = torch.ones(16, 16, device="cuda").to(E4M3), torch.ones(16, 16, device="cuda").to(E4M3)
    scales = torch.ones(4, device="cuda")
    with pytest.raises(ValueError, match="b_scale_inv is at an address"):
        kernels.scaled_mm(a, scales[:1], b_t, scales[1:2], torch.bfloat16, fast_accum=True)
