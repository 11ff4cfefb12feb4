"""RMSNorm: the reference against torch, the CUDA source on the emulation and on a GPU against the reference, bit for bit."""

import math

import pytest
import torch
from torch import Tensor

from graphrt.kernels import device, norm, reference
from graphrt.kernels.quantized import QuantizedTensor, QuantizeTo

from . import emulated
from .cases import FP8_DTYPES, NUM_SLOTS, SLOT, assert_same_bits, assert_same_result, make_input, make_scales

E4M3, E5M2 = FP8_DTYPES
EPS = 1e-5

#: rows, columns: tails of a step of four rows, a block of 16, a warp and a tile of 128 x 128; several warps, more than eight.
SHAPES = [(1, 16), (3, 32), (16, 48), (17, 256), (33, 272), (34, 768), (5, 2064), (145, 144)]
WIDE_SHAPES = [(3, 8208)]


def make_stream(rows: int, cols: int, *, seed: int = 0, nonfinite: bool = False) -> Tensor:
    return make_input(rows, cols, torch.bfloat16, seed=seed, nonfinite=nonfinite)


def make_weight(cols: int) -> Tensor:
    return torch.randn(cols, generator=torch.Generator().manual_seed(cols)) + 1


def make_target(dtype: torch.dtype, scale: float, *, device: str = "cpu", transpose: bool = True, has_amax: bool = True) -> QuantizeTo:
    scales = make_scales(scale, device)
    amax = torch.full((NUM_SLOTS,), 0.25, device=device) if has_amax else None
    return QuantizeTo(*scales, SLOT, dtype, amax, transpose)


def copy_of(to: QuantizeTo | None) -> QuantizeTo | None:
    """The same target on the CPU, with a staging row of its own."""
    if to is None:
        return None
    amax = None if to.amax is None else to.amax.cpu().clone()
    return to._replace(scale=to.scale.cpu(), scale_inv=to.scale_inv.cpu(), amax=amax)


def assert_same_values(actual: Tensor, expected: Tensor, what: str) -> None:
    """Equal bits, every NaN counting as the same one."""
    assert actual.dtype is expected.dtype
    assert_same_bits(actual.float(), expected.float(), what)


def assert_same_output(actual: Tensor | QuantizedTensor, expected: Tensor | QuantizedTensor) -> None:
    if isinstance(expected, Tensor):
        assert isinstance(actual, Tensor)
        assert_same_values(actual, expected, "out")
    else:
        assert isinstance(actual, QuantizedTensor)
        assert_same_result(actual, expected)


def check_forward(run, x: Tensor, residual: Tensor | None, weight: Tensor, to: QuantizeTo | None) -> None:
    expected_to = copy_of(to)
    stream, out, rstd = run(x, residual, weight, EPS, to)
    cpu_residual = None if residual is None else residual.cpu()
    expected_stream, expected_out, expected_rstd = norm._compute_forward(x.cpu(), cpu_residual, weight.cpu(), EPS, expected_to)
    assert_same_values(stream, expected_stream, "residual_out")
    assert_same_values(rstd, expected_rstd, "rstd")
    assert_same_output(out, expected_out)
    if to is not None and to.dtype is E4M3 and isinstance(out, QuantizedTensor) and out.transposed is not None:
        again = norm._launch_transposed if run is norm._launch_forward else norm._compute_transposed
        assert_same_bits(again(stream, rstd, weight, to._replace(amax=None)), out.transposed, "transposed again")
    if to is not None and to.amax is not None and expected_to is not None and expected_to.amax is not None:
        assert_same_bits(to.amax, expected_to.amax, "amax")


def launch_backward(*args):
    grad_x, sum_into = norm._launch_backward(*args)
    grad_weight, given = sum_into(None), torch.full((grad_x.shape[1],), math.nan, device=grad_x.device)
    assert sum_into(given) is given
    torch.testing.assert_close(given, grad_weight, rtol=0, atol=0, equal_nan=True)
    return grad_x, grad_weight


def check_backward(run, x: Tensor, weight: Tensor, *, has_residual: bool) -> None:
    rows, cols = x.shape
    grad, grad_residual = (make_stream(rows, cols, seed=seed).to(x.device) for seed in (5, 6))
    rstd = norm._compute_forward(x.cpu(), None, weight.cpu(), EPS, None)[2].to(x.device)
    args = (grad, x, rstd, weight, grad_residual if has_residual else None)
    grad_x, grad_weight = run(*args)
    expected_x, expected_weight = norm.rms_norm_backward(*[None if arg is None else arg.cpu() for arg in args])
    assert_same_values(grad_x, expected_x, "grad_x")
    assert_same_values(grad_weight, expected_weight, "grad_weight")


# ---- the reference ----


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(7, 48), (33, 768), (2, 8208)], ids=str)
def test_reference_is_close_to_torch(shape, dtype):
    generator = torch.Generator().manual_seed(0)
    x, residual = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    weight = make_weight(shape[1])
    stream, out, rstd = norm.rms_norm(x, residual, weight, EPS)
    assert isinstance(out, Tensor)
    assert torch.equal(stream, x + residual)
    exact = torch.rsqrt(stream.double().square().mean(-1) + EPS)
    torch.testing.assert_close(rstd.double(), exact, rtol=4 * 2.0**-24, atol=0)
    expected = torch.nn.functional.rms_norm(stream.double(), shape[1:], weight.double(), EPS)
    torch.testing.assert_close(out.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("shape", [(7, 48), (300, 768), (3, 8208)], ids=str)
def test_reference_gradient_is_close_to_autograd(shape, has_residual):
    generator = torch.Generator().manual_seed(0)
    x, grad, grad_residual = (torch.randn(shape, generator=generator) for _ in range(3))
    weight = make_weight(shape[1])
    exact_x, exact_weight = x.double().requires_grad_(), weight.double().requires_grad_()
    torch.nn.functional.rms_norm(exact_x, shape[1:], exact_weight, EPS).backward(grad.double())
    assert exact_x.grad is not None
    assert exact_weight.grad is not None
    rstd = norm.rms_norm(x, None, weight, EPS)[2]
    grad_x, grad_weight = norm.rms_norm_backward(grad, x, rstd, weight, grad_residual if has_residual else None)
    expected = exact_x.grad + grad_residual if has_residual else exact_x.grad
    torch.testing.assert_close(grad_x.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grad_weight.double(), exact_weight.grad, rtol=1e-5, atol=1e-4)


def test_quantized_output_is_the_quantized_bf16_output():
    x, weight = make_stream(33, 80), make_weight(80)
    stream, n, _ = norm.rms_norm(x, x, weight, EPS)
    to, expected_to = make_target(E4M3, 37.3), make_target(E4M3, 37.3)
    same_stream, quantized, _ = norm.rms_norm(x, x, weight, EPS, to=to)
    assert isinstance(n, Tensor)
    assert torch.equal(stream, same_stream)
    expected = reference.quantize(n, expected_to.scale, expected_to.scale_inv, SLOT, E4M3, amax=expected_to.amax, transpose=True)
    assert_same_output(quantized, expected)
    assert to.amax is not None
    assert expected_to.amax is not None
    assert_same_bits(to.amax, expected_to.amax, "amax")


def test_without_residual_the_stream_is_x_itself():
    x = make_stream(4, 32).requires_grad_()
    stream, out, _ = norm.rms_norm(x, None, make_weight(32).requires_grad_(), EPS)
    assert stream is x
    assert isinstance(out, Tensor)
    assert not out.requires_grad


def test_bf16_weight_counts_as_fp32():
    x, weight = make_stream(4, 32), make_weight(32).bfloat16()
    for actual, expected in zip(norm.rms_norm(x, x, weight, EPS), norm.rms_norm(x, x, weight.float(), EPS), strict=True):
        assert isinstance(actual, Tensor)
        assert isinstance(expected, Tensor)
        assert torch.equal(actual, expected)


def test_reads_nothing_on_the_host():
    x, weight = torch.empty(5, 32, device="meta", dtype=torch.bfloat16), torch.empty(32, device="meta")
    stream, out, rstd = norm.rms_norm(x, x, weight, EPS, to=make_target(E4M3, 1.0, device="meta"))
    grad_x, grad_weight = norm.rms_norm_backward(x, stream, rstd, weight, x)
    assert isinstance(out, QuantizedTensor)
    assert out.transposed is not None
    assert out.transposed.shape == (32, 16)
    assert (grad_x.shape, grad_weight.shape) == (x.shape, weight.shape)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_transposed_copy_again_is_that_of_the_forward(dtype):
    x, weight = make_stream(37, 48).to(dtype), make_weight(48)
    to = make_target(E4M3, 37.3)
    stream, out, rstd = norm.rms_norm(x, None, weight, EPS, to=to)
    assert isinstance(out, QuantizedTensor)
    assert out.transposed is not None
    again = to._replace(amax=None, transpose=False)
    assert_same_bits(norm.rms_norm_transposed(stream, rstd, weight, to=again), out.transposed, "transposed again")
    with pytest.raises(ValueError, match="to is float8_e4m3fn with an amax"):
        norm.rms_norm_transposed(stream, rstd, weight, to=to)
    with pytest.raises(ValueError, match="to is float8_e5m2 without an amax"):
        norm.rms_norm_transposed(stream, rstd, weight, to=again._replace(dtype=E5M2))
    with pytest.raises(ValueError, match="rstd is a"):
        norm.rms_norm_transposed(stream, rstd[:3], weight, to=again)
    assert norm.rms_norm_transposed(stream[:0], rstd[:0], weight, to=again).shape == (48, 0)


def test_refuses_other_arguments_by_name():
    x, weight = make_stream(4, 32), make_weight(32)
    with pytest.raises(ValueError, match="x has shape"):
        norm.rms_norm(x[0], None, weight, EPS)
    with pytest.raises(ValueError, match=r"x has dtype torch\.float64"):
        norm.rms_norm(x.double(), None, weight, EPS)
    with pytest.raises(ValueError, match="D, the columns of x, is 24"):
        norm.rms_norm(x[:, :24], None, weight[:24], EPS)
    with pytest.raises(ValueError, match="is 16400"):
        norm.rms_norm(torch.zeros(1, 16400), None, torch.ones(16400), EPS)
    with pytest.raises(ValueError, match=r"residual is a torch\.float32"):
        norm.rms_norm(x, x.float(), weight, EPS)
    with pytest.raises(ValueError, match=r"weight is a torch\.int64"):
        norm.rms_norm(x, None, weight.long(), EPS)
    with pytest.raises(ValueError, match="slot is 9"):
        norm.rms_norm(x, None, weight, EPS, to=make_target(E4M3, 1.0)._replace(slot=9))
    with pytest.raises(ValueError, match="rstd is a"):
        norm.rms_norm_backward(x, x, torch.ones(5), weight, None)
    with pytest.raises(ValueError, match="grad_residual is a"):
        norm.rms_norm_backward(x, x, torch.ones(4), weight, x[:3])


def test_backward_sums_at_most_1024_partials():
    assert norm._backward_block_rows(1) == 2
    assert norm._backward_block_rows(16384) == 16
    for rows in (16385, 65536, 100_001):
        block_rows = norm._backward_block_rows(rows)
        assert block_rows % 2 == 0
        assert -(-rows // block_rows) <= 1024


@pytest.mark.parametrize("run", [norm.rms_norm, norm._launch_forward], ids=["reference", "launch"])
def test_no_rows(run):
    x, weight, to = torch.empty(0, 32, dtype=torch.bfloat16), make_weight(32), make_target(E4M3, 4.0)
    stream, out, rstd = run(x, x, weight, EPS, to=to)
    assert (stream.shape, rstd.shape, out.data.shape) == ((0, 32), (0,), (0, 32))
    assert out.transposed.shape == (32, 0)
    assert out.scale_inv.item() == 0.25
    for run_backward in (norm.rms_norm_backward, launch_backward):
        grad_x, grad_weight = run_backward(x, x, rstd, weight, None)
        assert grad_x.shape == (0, 32)
        assert not grad_weight.any()


# ---- the source ----


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    if not emulated.is_available():
        pytest.skip("g++ is not installed")
    return emulated.build("norm", tmp_path_factory.mktemp("norm"))


@pytest.fixture(params=emulated.ORDERS)
def emulate(request, monkeypatch, library):
    """Threads run in order and in reverse: a missing barrier shows in one of them."""
    monkeypatch.setattr(device, "launch", emulated.make_launch([library], is_reversed=request.param))


@pytest.mark.usefixtures("emulate")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_emulated_forward_equals_reference(shape):
    x, residual, weight = make_stream(*shape), make_stream(*shape, seed=1), make_weight(shape[1])
    for added in (None, residual):
        check_forward(norm._launch_forward, x, added, weight, None)
        check_forward(norm._launch_forward, x, added, weight, make_target(E4M3, 37.3))
    check_forward(norm._launch_forward, x, residual, weight, make_target(E5M2, 0.75, has_amax=False))
    check_forward(norm._launch_forward, x, residual, weight, make_target(E4M3, 1e-3, transpose=False))


@pytest.mark.usefixtures("emulate")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("has_residual", [False, True])
def test_emulated_backward_equals_reference(shape, has_residual):
    check_backward(launch_backward, make_stream(*shape), make_weight(shape[1]), has_residual=has_residual)


@pytest.mark.slow
@pytest.mark.usefixtures("emulate")
@pytest.mark.parametrize("shape", WIDE_SHAPES, ids=str)
def test_emulated_wide_rows_equal_reference(shape):
    x, residual, weight = make_stream(*shape), make_stream(*shape, seed=1), make_weight(shape[1])
    check_forward(norm._launch_forward, x, residual, weight, make_target(E4M3, 37.3))
    check_forward(norm._launch_forward, x, None, weight, None)
    check_backward(launch_backward, x, weight, has_residual=True)


@pytest.mark.usefixtures("emulate")
@pytest.mark.parametrize("scale", [1.0, float("inf")])
def test_emulated_forward_equals_reference_with_nonfinite_values(scale):
    x, residual = make_stream(18, 272, nonfinite=True), make_stream(18, 272, seed=1)
    x[:, 16:] = x[:, 16:].nan_to_num(1.0, 2.0, 3.0)  # some rows stay finite
    x[1] = 3e38  # squares overflow
    check_forward(norm._launch_forward, x, residual, make_weight(272), make_target(E4M3, scale))
    check_forward(norm._launch_forward, torch.zeros_like(x), None, make_weight(272), make_target(E5M2, scale))


@pytest.mark.usefixtures("emulate")
def test_emulated_sum_of_many_partials_equals_reference():
    check_backward(launch_backward, make_stream(16 * 70 + 1, 16), make_weight(16), has_residual=False)


@pytest.mark.usefixtures("emulate")
def test_emulated_launch_copies_unaligned_and_strided_input():
    weight = make_weight(33)[1:]
    storage = make_stream(1, 5 * 32 + 1).view(-1)
    x, residual = storage[1:].view(5, 32), make_stream(32, 5).t()
    assert x.data_ptr() % 16
    assert weight.data_ptr() % 16
    check_forward(norm._launch_forward, x, residual, weight, make_target(E4M3, 0.75))
    check_backward(launch_backward, x, weight, has_residual=True)


# ---- on a GPU ----


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [*SHAPES, *WIDE_SHAPES, (1000, 2048), (531, 4096), (100, 8192), (40, 16384)], ids=str)
def test_gpu_equals_reference(shape):
    x, residual, weight = make_stream(*shape).cuda(), make_stream(*shape, seed=1).cuda(), make_weight(shape[1]).cuda()
    for added in (None, residual):
        check_forward(norm._launch_forward, x, added, weight, None)
        for fp8, scale in ((E4M3, 37.3), (E5M2, 0.75)):
            for transpose in (False, True):
                to = make_target(fp8, scale, device="cuda", transpose=transpose)
                check_forward(norm._launch_forward, x, added, weight, to)
        check_backward(launch_backward, x, weight, has_residual=added is not None)


@pytest.mark.gpu
def test_gpu_equals_reference_with_nonfinite_values():
    x, weight = make_stream(64, 272, nonfinite=True), make_weight(272).cuda()
    x[:, 16:] = x[:, 16:].nan_to_num(1.0, 2.0, 3.0)
    x[1] = 3e38
    check_forward(norm._launch_forward, x.cuda(), None, weight, make_target(E4M3, 1.0, device="cuda"))


@pytest.mark.gpu
def test_gpu_replays_equal_reference():
    weight, to = make_weight(768).cuda(), make_target(E4M3, 2.0, device="cuda")
    x, residual, grad = (make_stream(130, 768, seed=seed).cuda() for seed in range(3))
    norm.rms_norm(x, residual, weight, EPS, to=to)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stream, out, rstd = norm.rms_norm(x, residual, weight, EPS, to=to)
        grads = norm.rms_norm_backward(grad, stream, rstd, weight, grad)
    for seed in range(3, 6):
        x.copy_(make_stream(130, 768, seed=seed))
        graph.replay()
        expected_stream, expected_out, expected_rstd = norm.rms_norm(x.cpu(), residual.cpu(), weight.cpu(), EPS, to=copy_of(to))
        assert_same_values(stream, expected_stream, "residual_out")
        assert_same_output(out, expected_out)
        expected = norm.rms_norm_backward(grad.cpu(), expected_stream, expected_rstd, weight.cpu(), grad.cpu())
        for actual_grad, expected_grad in zip(grads, expected, strict=True):
            assert_same_values(actual_grad, expected_grad, "grad")


@pytest.mark.gpu
def test_gpu_refuses_other_dtypes():
    with pytest.raises(ValueError, match=r"x has dtype torch\.float16, expected bfloat16"):
        norm.rms_norm(torch.zeros(4, 32, device="cuda", dtype=torch.float16), None, torch.ones(32, device="cuda"), EPS)
