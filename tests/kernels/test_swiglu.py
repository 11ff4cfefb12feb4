"""SwiGLU: the reference against autograd, the CUDA source on the emulation and on a GPU against the reference.

The sigmoid is approximate: a bf16 result may differ from the reference by one unit in the last place. What is quantized
from a bf16 result, where it lands and its amax are exact, given the kernel's own bf16 result.
"""

import pytest
import torch
from torch import Tensor

from graphrt.kernels import device, reference, swiglu
from graphrt.kernels.quantized import QuantizedTensor, QuantizeTo

from . import emulated
from .cases import FP8_DTYPES, NUM_SLOTS, SLOT, assert_same_bits, assert_same_result, make_input, make_scales

E4M3, E5M2 = FP8_DTYPES
SMALLEST_SIGMOID = 2.0**-125  # below it the kernel gives zero
MAX_SHARE_OFF = 0.01  # of the elements; half a unit of fp32 noise in 2^16 of a bf16 unit flips far fewer

#: rows, F: tails of the tile of 128 x 64 and of the 16 rows of a unit of the transposed copy.
SHAPES = [(1, 16), (15, 48), (16, 64), (17, 80), (127, 64), (130, 144), (257, 32)]


def make_halves(rows: int, features: int, *, seed: int = 0) -> Tensor:
    """gate | up: gates of a few units, as in a model, the other half over many magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    gate = 4 * torch.randn(rows, features, generator=generator)
    return torch.cat([gate, make_input(rows, features, torch.float32, seed=seed)], dim=1).bfloat16()


def make_target(dtype: torch.dtype, scale: float, *, device: str = "cpu", transpose: bool = True, has_amax: bool = True) -> QuantizeTo:
    amax = torch.full((NUM_SLOTS,), 0.25, device=device) if has_amax else None
    return QuantizeTo(*make_scales(scale, device), SLOT, dtype, amax, transpose)


def ordered(x: Tensor) -> Tensor:
    """bf16 as integers in the order of their values: neighbours differ by one, both zeros are 0."""
    bits = x.view(torch.int16).int()
    return torch.where(bits < 0, -(bits & 0x7FFF), bits)


def assert_within_one_ulp(actual: Tensor, expected: Tensor, noise: Tensor | float) -> None:
    """Neighbours in bf16 at most, apart from an absolute ``noise``; not a number in the same places."""
    actual, expected = actual.cpu(), expected.cpu()
    assert torch.equal(actual.isnan(), expected.isnan())
    distance = (ordered(actual) - ordered(expected)).abs().masked_fill(expected.isnan(), 0)
    is_noise = (actual.double() - expected.double()).abs().nan_to_num(0.0) <= noise
    far = (distance > 1) & ~is_noise
    assert not far.any(), f"{int(far.sum())} elements are {distance[far].max()} units off"
    assert (distance > 0).double().mean() <= MAX_SHARE_OFF or distance.numel() < 1000


def check_quantized(run, args: tuple[Tensor, ...], to: QuantizeTo) -> None:
    """What ``run`` quantizes equals ``graphrt.kernels.quantize`` of what it gives in bf16."""
    n = run(*args, None).cpu()
    amax = None if to.amax is None else to.amax.cpu().clone()
    actual = run(*args, to)
    scales = to.scale.cpu(), to.scale_inv.cpu()
    assert_same_result(actual, reference.quantize(n, *scales, SLOT, to.dtype, amax=amax, transpose=to.transpose))
    if to.amax is not None and amax is not None:
        assert_same_bits(to.amax, amax, "amax")


def check_output_again(h: Tensor, grad_out: Tensor, scale: float = 37.3) -> None:
    """The backward that makes the forward's transposed copy gives the bits that the two launches give."""
    place = str(h.device)
    output_to = make_target(E4M3, scale, device=place, has_amax=False)
    expected = swiglu._launch_forward(h, output_to)
    assert isinstance(expected, QuantizedTensor)
    assert expected.transposed is not None
    for to in (None, make_target(E5M2, 0.75, device=place), make_target(E5M2, 1e-3, device=place, transpose=False)):
        again = to and to._replace(amax=None if to.amax is None else to.amax.clone())
        expected_grad = swiglu._launch_backward(h, grad_out, again)
        transposed = torch.full_like(expected.transposed.view(torch.uint8), 0xAA).view(E4M3)
        actual_grad = swiglu._launch_backward(h, grad_out, to, (output_to, transposed))
        assert_same_bits(transposed, expected.transposed, "transposed output")
        if isinstance(actual_grad, QuantizedTensor):
            assert isinstance(expected_grad, QuantizedTensor)
            assert_same_result(actual_grad, expected_grad)
        else:
            assert isinstance(expected_grad, Tensor)
            assert_same_bits(actual_grad, expected_grad, "gradient")
        if to is not None and again is not None and to.amax is not None and again.amax is not None:
            assert_same_bits(to.amax, again.amax, "amax")


def check_all(h: Tensor, grad_out: Tensor) -> None:
    """Forward and backward launches, in bf16 and quantized."""
    gate, up = h.cpu().double().chunk(2, dim=1)
    flushed = (up.abs() * gate.abs()).nan_to_num() * SMALLEST_SIGMOID
    assert_within_one_ulp(swiglu._launch_forward(h, None), swiglu._compute_forward(h.cpu(), None), flushed)
    grad_noise = (grad_out.cpu().double().abs().repeat(1, 2) * torch.cat([up.abs() * (1 + gate.abs()), gate.abs()], 1)).nan_to_num()
    actual, expected = swiglu._launch_backward(h, grad_out, None), swiglu._compute_backward(h.cpu(), grad_out.cpu(), None)
    assert_within_one_ulp(actual, expected, grad_noise * SMALLEST_SIGMOID)
    place = str(h.device)
    for run, args in ((swiglu._launch_forward, (h,)), (swiglu._launch_backward, (h, grad_out))):
        check_quantized(run, args, make_target(E4M3, 37.3, device=place))
        check_quantized(run, args, make_target(E5M2, 0.75, device=place, has_amax=False))
        check_quantized(run, args, make_target(E5M2, 1e-3, device=place, transpose=False))
    check_output_again(h, grad_out)


# ---- the reference ----


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_reference_is_close_to_autograd(dtype):
    generator = torch.Generator().manual_seed(0)
    h, grad_out = torch.randn(40, 96, generator=generator).to(dtype), torch.randn(40, 48, generator=generator).to(dtype)
    exact = h.double().requires_grad_()
    gate, up = exact.chunk(2, dim=1)
    expected = torch.nn.functional.silu(gate) * up
    expected.backward(grad_out.double())
    assert exact.grad is not None
    out, grad = swiglu.swiglu(h), swiglu.swiglu_backward(h, grad_out)
    assert isinstance(out, Tensor)
    assert isinstance(grad, Tensor)
    assert out.dtype is grad.dtype is dtype
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), expected.detach(), rtol=eps, atol=1e-6)
    torch.testing.assert_close(grad.double(), exact.grad, rtol=eps, atol=1e-6)


def test_reference_quantizes_like_quantize():
    h, grad_out = make_halves(33, 48), make_input(33, 48, torch.bfloat16)
    check_quantized(lambda h, to: swiglu.swiglu(h, to=to), (h,), make_target(E4M3, 37.3))
    check_quantized(lambda h, grad, to: swiglu.swiglu_backward(h, grad, to=to), (h, grad_out), make_target(E5M2, 0.75))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_reference_gives_the_output_again(dtype):
    h, grad_out = make_halves(33, 48).to(dtype), make_input(33, 48, dtype)
    to, output_to = make_target(E5M2, 0.75), make_target(E4M3, 37.3, has_amax=False, transpose=False)
    grad, transposed = swiglu.swiglu_backward_with_output(h, grad_out, to=to, output_to=output_to)
    output = swiglu.swiglu(h, to=output_to._replace(transpose=True))
    expected = swiglu.swiglu_backward(h, grad_out, to=to)
    assert isinstance(output, QuantizedTensor)
    assert output.transposed is not None
    assert isinstance(grad, QuantizedTensor)
    assert isinstance(expected, QuantizedTensor)
    assert_same_bits(transposed, output.transposed, "transposed output")
    assert_same_result(grad, expected)


def test_reads_nothing_on_the_host_and_keeps_no_graph():
    h = torch.empty(5, 64, device="meta", dtype=torch.bfloat16, requires_grad=True)
    out = swiglu.swiglu(h, to=make_target(E4M3, 1.0, device="meta"))
    assert isinstance(out, QuantizedTensor)
    assert out.transposed is not None
    assert out.transposed.shape == (32, 16)
    grad = swiglu.swiglu_backward(h, h[:, :32])
    assert isinstance(grad, Tensor)
    assert (grad.shape, grad.requires_grad) == (h.shape, False)


def test_refuses_other_arguments_by_name():
    h = make_halves(4, 32)
    with pytest.raises(ValueError, match="h has shape"):
        swiglu.swiglu(h[0])
    with pytest.raises(ValueError, match=r"h has dtype torch\.float64"):
        swiglu.swiglu(h.double())
    with pytest.raises(ValueError, match=r"expected \[rows, 2 F\]"):
        swiglu.swiglu(h[:, :31])
    with pytest.raises(ValueError, match="F, half the columns of h, is 24"):
        swiglu.swiglu(h[:, :48])
    with pytest.raises(ValueError, match=r"grad_out is a torch\.bfloat16"):
        swiglu.swiglu_backward(h, h)
    with pytest.raises(ValueError, match=r"dtype is torch\.bfloat16"):
        swiglu.swiglu(h, to=make_target(torch.bfloat16, 1.0))
    for dtype, has_amax in ((E5M2, False), (E4M3, True)):
        with pytest.raises(ValueError, match=r"output_to is float8_e\dm\w+ with(out)? an amax"):
            swiglu.swiglu_backward_with_output(h, h[:, :32], output_to=make_target(dtype, 1.0, has_amax=has_amax))


@pytest.mark.parametrize("run", [swiglu.swiglu, swiglu._launch_forward], ids=["reference", "launch"])
def test_no_rows(run):
    out = run(torch.empty(0, 64, dtype=torch.bfloat16), to=make_target(E4M3, 4.0))
    assert (out.data.shape, out.transposed.shape, out.scale_inv.item()) == ((0, 32), (32, 0), 0.25)


# ---- the source ----


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    if not emulated.is_available():
        pytest.skip("g++ is not installed")
    return emulated.build("swiglu", tmp_path_factory.mktemp("swiglu"))


@pytest.fixture(params=emulated.ORDERS)
def emulate(request, monkeypatch, library):
    """Threads run in order and in reverse: a missing barrier shows in one of them."""
    monkeypatch.setattr(device, "launch", emulated.make_launch([library], is_reversed=request.param))


@pytest.mark.usefixtures("emulate")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_emulated_equals_reference(shape):
    check_all(make_halves(*shape), make_input(*shape, torch.bfloat16, seed=3))


@pytest.mark.usefixtures("emulate")
def test_emulated_every_gate():
    """Every bf16 value as a gate: nothing but the flushed range is more than a unit off."""
    gate = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(512, 128)
    check_all(torch.cat([gate, torch.full_like(gate, 1.5)], dim=1), torch.full_like(gate, 0.75))


@pytest.mark.usefixtures("emulate")
def test_emulated_nonfinite_values_and_pad():
    h, grad_out = make_halves(21, 48), make_input(21, 48, torch.bfloat16, nonfinite=True)
    h[:, 48:] = make_input(21, 48, torch.bfloat16, nonfinite=True, seed=1)
    check_all(h, grad_out)
    for run, args in ((swiglu._launch_forward, (h,)), (swiglu._launch_backward, (h, grad_out))):
        check_quantized(run, args, make_target(E4M3, float("inf")))
    check_output_again(h, grad_out, float("inf"))


@pytest.mark.usefixtures("emulate")
def test_emulated_launch_copies_unaligned_and_strided_input():
    h = make_halves(1, 6 * 48 + 8).view(-1)[1 : 6 * 96 + 1].view(6, 96)
    assert h.data_ptr() % 16
    check_all(h, make_input(48, 6, torch.bfloat16).t())


# ---- on a GPU ----


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [*SHAPES, (1000, 2048), (333, 5632), (200, 16384)], ids=str)
def test_gpu_equals_reference(shape):
    check_all(make_halves(*shape).cuda(), make_input(*shape, torch.bfloat16, seed=3).cuda())


@pytest.mark.gpu
def test_gpu_every_gate():
    gate = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(512, 128)
    check_all(torch.cat([gate, torch.full_like(gate, 1.5)], dim=1).cuda(), torch.full_like(gate, 0.75).cuda())


@pytest.mark.gpu
def test_gpu_replays_equal_launches():
    h, grad_out = make_halves(130, 144).cuda(), make_input(130, 144, torch.bfloat16, seed=3).cuda()
    to, grad_to = make_target(E4M3, 2.0, device="cuda"), make_target(E5M2, 0.5, device="cuda")
    swiglu.swiglu(h, to=to)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = swiglu.swiglu(h, to=to), swiglu.swiglu_backward(h, grad_out, to=grad_to)
    for seed in range(3):
        h.copy_(make_halves(130, 144, seed=seed))
        graph.replay()
        for result, expected in zip(results, (swiglu.swiglu(h, to=to), swiglu.swiglu_backward(h, grad_out, to=grad_to)), strict=True):
            assert isinstance(result, QuantizedTensor)
            assert isinstance(expected, QuantizedTensor)
            assert_same_result(result, expected)


@pytest.mark.gpu
def test_gpu_refuses_other_dtypes():
    with pytest.raises(ValueError, match=r"h has dtype torch\.float32, expected bfloat16"):
        swiglu.swiglu(torch.zeros(4, 32, device="cuda"))
