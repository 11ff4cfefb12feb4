"""The rotary embedding and its backward: the reference means what it says, and the CUDA source equals it bit for bit."""

import itertools

import pytest
import torch
from torch import Tensor

from graphrt.kernels import compiler, device, reference, rope
from graphrt.kernels.device import entry_points
from graphrt.kernels.quantized import QuantizedTensor, QuantizeTo

from . import emulated
from .cases import FP8_DTYPES, NUM_SLOTS, SLOT, assert_same_bits, assert_same_result, make_input, make_scales

E4M3, E5M2 = FP8_DTYPES

#: B, T, H, Dh. Row counts around the tile's 64, odd head counts, and every way a head's lanes can fall on a tile.
SHAPES = [
    *((1, 1, 1, 16), (2, 3, 1, 32), (1, 64, 2, 64), (1, 65, 3, 64), (3, 43, 2, 48), (1, 17, 5, 128), (2, 33, 1, 256), (1, 20, 1, 80)),
    *((2, 31, 3, 96), (1, 9, 2, 240), (5, 2, 7, 16), (1, 5, 1, 176)),
]
LARGE_SHAPES = [(2, 1000, 12, 64), (2, 512, 8, 128), (1, 300, 5, 112), (4, 2048, 32, 64)]


def make_angles(positions: int, head_size: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """cos and sin [T, Dh/2] with the usual base of 10000."""
    frequencies = 10000.0 ** (-torch.arange(0, head_size, 2) / head_size)
    angles = torch.arange(positions)[:, None] * frequencies
    return angles.cos().to(device), angles.sin().to(device)


def make_qkv(shape: tuple[int, int, int, int], *, seed: int = 0, nonfinite: bool = False, device: str = "cpu") -> Tensor:
    batches, positions, num_heads, head_size = shape
    rows = make_input(batches * positions, 3 * num_heads * head_size, torch.bfloat16, seed=seed, nonfinite=nonfinite, device=device)
    return rows.view(batches, positions, 3, num_heads, head_size)


def make_gradients(shape: tuple[int, int, int, int], layout: str, *, nonfinite: bool = False, device: str = "cpu") -> list[Tensor]:
    """Three [B, H, T, Dh], stored as the name of the layout says."""
    qkv = make_qkv(shape, seed=1, nonfinite=nonfinite, device=device)
    batches, positions, num_heads, head_size = shape
    grads = [qkv[:, :, i].transpose(1, 2) for i in range(3)]
    if layout == "views of a joint gradient":
        return grads
    if layout == "bhtd":
        return [grad.contiguous() for grad in grads]
    if layout == "bthd":
        return [grad.transpose(1, 2).contiguous().transpose(1, 2) for grad in grads]
    if layout == "mixed":
        return [grads[0].contiguous(), grads[1].transpose(1, 2).contiguous().transpose(1, 2), grads[2]]
    if layout == "last dimension strided":
        return [grad.transpose(2, 3).contiguous().transpose(2, 3) for grad in grads]
    if layout == "expanded":
        return [grad[:, :1].contiguous().expand(grad.shape) for grad in grads]
    if layout == "odd strides":
        wide = [torch.zeros(batches, num_heads, positions, head_size + 4, dtype=grad.dtype, device=device) for grad in grads]
        return [storage[..., :head_size].copy_(grad) for storage, grad in zip(wide, grads, strict=True)]
    assert layout == "unaligned"
    flat = [torch.zeros(grad.numel() + 1, dtype=grad.dtype, device=device)[1:] for grad in grads]
    return [storage.view(grad.shape).copy_(grad) for storage, grad in zip(flat, grads, strict=True)]


LAYOUTS = ("bhtd", "bthd", "mixed", "views of a joint gradient", "last dimension strided", "expanded", "odd strides", "unaligned")


def make_target(
    dtype: torch.dtype, *, scale: float = 0.75, has_amax: bool = True, transpose: bool = True, device: str = "cpu"
) -> QuantizeTo:
    scales, inverses = make_scales(scale, device)
    return QuantizeTo(scales, inverses, SLOT, dtype, torch.full((NUM_SLOTS,), 0.25, device=device) if has_amax else None, transpose)


def to_cpu(target: QuantizeTo) -> QuantizeTo:
    amax = None if target.amax is None else target.amax.cpu().clone()
    return target._replace(scale=target.scale.cpu(), scale_inv=target.scale_inv.cpu(), amax=amax)


def same_nan(x: Tensor) -> Tensor:
    """Every NaN the same one: its payload is not specified."""
    return torch.where(x.isnan(), torch.full_like(x, float("nan")), x)


def check_rope_(run, qkv: Tensor, cos: Tensor, sin: Tensor) -> None:
    expected = qkv.cpu().clone()
    rope.reference_rope_(expected, cos.cpu(), sin.cpu())
    run(qkv, cos, sin)
    assert_same_bits(same_nan(qkv), same_nan(expected), "qkv")


def check_backward(run, grads: list[Tensor], cos: Tensor, sin: Tensor, target: QuantizeTo | None) -> None:
    expected_target = None if target is None else to_cpu(target)
    expected = rope.reference_rope_backward(*[grad.cpu() for grad in grads], cos.cpu(), sin.cpu(), expected_target)
    actual = run(*grads, cos, sin, target)
    if target is None or expected_target is None:
        assert_same_bits(same_nan(actual), same_nan(expected), "grad_qkv")
        return
    assert_same_result(actual, expected)
    if target.amax is not None and expected_target.amax is not None:
        assert_same_bits(target.amax, expected_target.amax, "amax")


# ---- the reference ----


def test_forward_turns_pairs_and_leaves_v():
    shape = (2, 7, 3, 32)
    qkv = make_qkv(shape).float().clamp(-8, 8).bfloat16()
    cos, sin = make_angles(9, 32)
    before = qkv.clone()
    rope.rope_(qkv, cos, sin)
    pairs = torch.complex(before[:, :, :2, :, :16].double(), before[:, :, :2, :, 16:].double())
    turned = pairs * torch.complex(cos.double(), sin.double())[:7, None, None]
    expected = torch.cat([turned.real, turned.imag], dim=-1)
    torch.testing.assert_close(qkv[:, :, :2].double(), expected, rtol=2**-8, atol=1e-5)
    assert torch.equal(qkv[:, :, 2], before[:, :, 2])


def test_backward_is_the_transposed_jacobian():
    """Against autograd in fp32, on values that bf16 holds."""
    shape = (2, 5, 3, 32)
    cos, sin = make_angles(5, 32)
    qkv = make_qkv(shape).float().requires_grad_()
    grads = [grad.float() / 64 for grad in make_gradients(shape, "bhtd")]
    q, k, v = qkv.unbind(2)
    turned = [rope._rotate(x, cos[:, None], sin[:, None]) for x in (q, k)]
    outputs = [x.transpose(1, 2) for x in (*turned, v)]
    [expected] = torch.autograd.grad(outputs, qkv, grads)
    actual = rope.rope_backward(*[grad.bfloat16() for grad in grads], cos, sin)
    assert isinstance(actual, Tensor)
    torch.testing.assert_close(actual.float(), expected.reshape(10, -1), rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("transpose", [False, True])
def test_backward_to_fp8_is_quantize_of_the_bf16_result(transpose):
    shape = (2, 9, 2, 48)
    cos, sin = make_angles(9, 48)
    grads = make_gradients(shape, "mixed")
    target, expected_target = make_target(E5M2, transpose=transpose), make_target(E5M2, transpose=transpose)
    actual = rope.rope_backward(*grads, cos, sin, to=target)
    grad_qkv = rope.rope_backward(*grads, cos, sin)
    assert isinstance(actual, QuantizedTensor)
    assert isinstance(grad_qkv, Tensor)
    scale, scale_inv, slot, dtype, amax, _ = expected_target
    assert_same_result(actual, reference.quantize(grad_qkv, scale, scale_inv, slot, dtype, amax=amax, transpose=transpose))
    assert target.amax is not None
    assert amax is not None
    assert_same_bits(target.amax, amax, "amax")
    assert target.amax[SLOT] > 0.25


def test_a_graph_is_not_recorded():
    qkv = make_qkv((1, 4, 1, 16))
    leaf = qkv.clone().requires_grad_()
    cos, sin = make_angles(4, 16)
    rope.rope_(leaf, cos, sin)
    rope.rope_(qkv, cos, sin)
    assert torch.equal(leaf.detach(), qkv)
    grads = [grad.requires_grad_() for grad in make_gradients((1, 4, 1, 16), "bhtd")]
    grad_qkv = rope.rope_backward(*grads, cos, sin)
    assert isinstance(grad_qkv, Tensor)
    assert not grad_qkv.requires_grad


# ---- arguments ----


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qkv": torch.zeros(1, 4, 3, 2, 32).double()}, "qkv is contiguous torch.float64"),
        ({"qkv": torch.zeros(1, 4, 2, 2, 32).bfloat16()}, "qkv is"),
        ({"qkv": torch.zeros(1, 3, 4, 2, 32).bfloat16().transpose(1, 2)}, "qkv is non-contiguous"),
        ({"qkv": torch.zeros(1, 4, 3, 2, 24).bfloat16()}, "head size 24"),
        ({"qkv": torch.zeros(1, 4, 3, 2, 272).bfloat16()}, "head size 272"),
        ({"cos": torch.zeros(3, 16)}, r"cos is .*at least 4, 16"),
        ({"sin": torch.zeros(4, 32)}, "sin is"),
        ({"sin": torch.zeros(4, 16).double()}, "sin is"),
        ({"cos": torch.zeros(16, 4).t()}, "cos is non-contiguous"),
        ({"cos": torch.zeros(4, 16, device="meta")}, "on cpu"),
    ],
)
def test_rope_names_the_bad_argument(changes, message):
    cos, sin = make_angles(4, 32)
    with pytest.raises(ValueError, match=message):
        rope.rope_(**{"qkv": make_qkv((1, 4, 2, 32)), "cos": cos, "sin": sin, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"grad_q": torch.zeros(1, 4, 32).bfloat16()}, "grad_q has shape"),
        ({"grad_k": torch.zeros(1, 2, 4, 16).bfloat16()}, "grad_k is"),
        ({"grad_v": torch.zeros(1, 2, 4, 32)}, "grad_v is"),
        ({"cos": torch.zeros(3, 16)}, "cos is"),
        ({"to": make_target(torch.float16)}, "dtype is torch.float16"),
        ({"to": make_target(E4M3)._replace(slot=9)}, "slot is 9"),
        ({"to": make_target(E4M3)._replace(amax=torch.zeros(2))}, "length of amax"),
    ],
)
def test_backward_names_the_bad_argument(changes, message):
    cos, sin = make_angles(4, 32)
    grad_q, grad_k, grad_v = make_gradients((1, 4, 2, 32), "bhtd")
    with pytest.raises(ValueError, match=message):
        rope.rope_backward(**{"grad_q": grad_q, "grad_k": grad_k, "grad_v": grad_v, "cos": cos, "sin": sin, **changes})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_other_dtypes_are_for_the_cpu(dtype):
    """There they are rotated in fp32 and rounded to their own dtype."""
    qkv = make_qkv((1, 4, 2, 32)).clamp(-8, 8).to(dtype)
    cos, sin = make_angles(4, 32)
    expected = qkv.double()
    first, second = expected[:, :, :2].chunk(2, dim=-1)
    c, s = cos.double()[:, None, None], sin.double()[:, None, None]
    expected[:, :, :2] = torch.cat([first * c - second * s, second * c + first * s], dim=-1)
    rope.rope_(qkv, cos, sin)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(qkv.double(), expected, rtol=eps, atol=8 * eps)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_gpu_refuses_other_dtypes(dtype):
    cos, sin = make_angles(4, 32, "cuda")
    with pytest.raises(ValueError, match=f"qkv is contiguous {dtype}"):
        rope.rope_(make_qkv((1, 4, 2, 32), device="cuda").to(dtype), cos, sin)


# ---- the CUDA source, emulated ----


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return emulated.build("rope", tmp_path_factory.mktemp("rope"))


@pytest.fixture(params=emulated.ORDERS)
def emulate(request, monkeypatch, library):
    """Threads run in order and in reverse: a missing barrier shows in one of them."""
    monkeypatch.setattr(device, "launch", emulated.make_launch([library], is_reversed=request.param))


needs_gxx = pytest.mark.skipif(not emulated.is_available(), reason="g++ is not installed")


@needs_gxx
@pytest.mark.usefixtures("emulate")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_emulated_kernels_equal_reference(shape):
    cos, sin = make_angles(shape[1] + 3, shape[3])
    check_rope_(rope.launch_rope_, make_qkv(shape), cos, sin)
    grads = make_gradients(shape, LAYOUTS[SHAPES.index(shape) % 4])
    check_backward(rope.launch_rope_backward, grads, cos, sin, None)
    for fp8, transpose in itertools.product(FP8_DTYPES, (False, True)):
        target = make_target(fp8, transpose=transpose, has_amax=transpose == (fp8 is E5M2))
        check_backward(rope.launch_rope_backward, grads, cos, sin, target)


@needs_gxx
@pytest.mark.usefixtures("emulate")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_emulated_backward_reads_any_layout(layout):
    shape = (2, 35, 3, 48)
    cos, sin = make_angles(35, 48)
    grads = make_gradients(shape, layout)
    for target in (None, make_target(E5M2)):
        check_backward(rope.launch_rope_backward, grads, cos, sin, target)


@needs_gxx
@pytest.mark.usefixtures("emulate")
@pytest.mark.parametrize("scale", [1.0, 37.3, float("inf")])
def test_emulated_kernels_equal_reference_with_nonfinite_values(scale):
    shape = (1, 37, 3, 64)
    cos, sin = make_angles(37, 64)
    check_rope_(rope.launch_rope_, make_qkv(shape, nonfinite=True), cos, sin)
    grads = make_gradients(shape, "mixed", nonfinite=True)
    for target in (None, make_target(E5M2, scale=scale), make_target(E4M3, scale=scale)):
        check_backward(rope.launch_rope_backward, grads, cos, sin, target)


@needs_gxx
@pytest.mark.usefixtures("emulate")
def test_emulated_kernels_take_unaligned_addresses():
    shape = (1, 5, 2, 32)
    cos, sin = (torch.cat([torch.zeros(1), angles.view(-1)])[1:].view(5, 16) for angles in make_angles(5, 32))
    storage = torch.cat([torch.zeros(1).bfloat16(), make_qkv(shape).view(-1)])
    qkv = storage[1:].view(1, 5, 3, 2, 32)
    assert cos.data_ptr() % 16
    assert qkv.data_ptr() % 16
    check_rope_(rope.launch_rope_, qkv, cos, sin)
    check_backward(rope.launch_rope_backward, make_gradients(shape, "unaligned"), cos, sin, make_target(E4M3))


@needs_gxx
@pytest.mark.usefixtures("emulate")
@pytest.mark.parametrize("shape", [(0, 4, 2, 32), (1, 0, 2, 32), (1, 4, 0, 32)], ids=str)
def test_empty_tensors_launch_nothing_and_copy_scale_inv(shape):
    cos, sin = make_angles(4, 32)
    batches, positions, num_heads, head_size = shape
    rope.rope_(torch.zeros(batches, positions, 3, num_heads, head_size).bfloat16(), cos, sin)
    grads = [torch.zeros(batches, num_heads, positions, head_size).bfloat16() for _ in range(3)]
    for target in (None, make_target(E5M2, scale=4.0)):
        check_backward(rope.launch_rope_backward, grads, cos, sin, target)


def test_source_compiles_without_spills():
    pytest.importorskip("cuda.bindings.nvrtc")
    cubin, log = compiler.compile_source(compiler.source_text("rope"), "rope", "sm_90", ptxas_options=("-v",))
    quantizing = [f"graphrt_rope_backward_bf16_{name}" for name in ("e4m3", "e5m2")]
    assert entry_points(cubin) == sorted(["graphrt_rope_bf16", "graphrt_rope_backward_bf16", *quantizing])
    assert "warning" not in log
    assert log.count(" 0 bytes spill stores, 0 bytes spill loads") == 4


# ---- on a GPU ----


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [*SHAPES, *LARGE_SHAPES], ids=str)
def test_gpu_kernels_equal_reference(shape):
    cos, sin = make_angles(shape[1] + 3, shape[3], "cuda")
    for nonfinite in (False, True):
        check_rope_(rope.rope_, make_qkv(shape, nonfinite=nonfinite, device="cuda"), cos, sin)
        for layout in ("bhtd", "bthd"):
            grads = make_gradients(shape, layout, nonfinite=nonfinite, device="cuda")
            for target in (None, make_target(E5M2, device="cuda"), make_target(E4M3, transpose=False, has_amax=False, device="cuda")):
                check_backward(_backward, grads, cos, sin, target)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gpu_backward_reads_any_layout(layout):
    shape = (2, 35, 3, 48)
    cos, sin = make_angles(35, 48, "cuda")
    grads = make_gradients(shape, layout, device="cuda")
    for target in (None, make_target(E5M2, device="cuda")):
        check_backward(_backward, grads, cos, sin, target)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_gpu_launches_do_not_synchronize():
    shape = (2, 100, 3, 64)
    cos, sin = make_angles(100, 64, "cuda")
    qkv, grads = make_qkv(shape, device="cuda"), make_gradients(shape, "bhtd", device="cuda")
    target = make_target(E5M2, device="cuda")
    device.preload()
    torch.cuda.set_sync_debug_mode("error")
    try:
        rope.rope_(qkv, cos, sin)
        rope.rope_backward(*grads, cos, sin)
        rope.rope_backward(*grads, cos, sin, to=target)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_gpu_replays_equal_reference():
    shape = (2, 100, 3, 64)
    cos, sin = make_angles(100, 64, "cuda")
    qkv = make_qkv(shape, device="cuda")
    grads = make_gradients(shape, "bhtd", device="cuda")
    target = make_target(E5M2, device="cuda")
    device.preload()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rope.rope_(qkv, cos, sin)
        result = rope.rope_backward(*grads, cos, sin, to=target)
    for seed in range(3):
        qkv.copy_(make_qkv(shape, seed=seed))
        expected = qkv.cpu()
        grads[0].copy_(qkv[:, :, 0].transpose(1, 2))
        expected_target = to_cpu(target)
        graph.replay()
        rope.reference_rope_(expected, cos.cpu(), sin.cpu())
        assert_same_bits(qkv, expected, "qkv")
        wanted = rope.reference_rope_backward(*[grad.cpu() for grad in grads], cos.cpu(), sin.cpu(), expected_target)
        assert isinstance(result, QuantizedTensor)
        assert isinstance(wanted, QuantizedTensor)
        assert_same_result(result, wanted)
        assert target.amax is not None
        assert expected_target.amax is not None
        assert_same_bits(target.amax, expected_target.amax, "amax")


@pytest.mark.gpu
def test_gpu_more_than_2_to_the_31_elements():
    if torch.cuda.mem_get_info()[0] < 30 * 2**30:
        pytest.skip("needs 30 GiB of free GPU memory")
    batches, positions, num_heads, head_size = 11, 4096, 128, 128
    cos, sin = make_angles(positions, head_size, "cuda")
    qkv = torch.zeros(batches, positions, 3, num_heads, head_size, dtype=torch.bfloat16, device="cuda")
    qkv[-1, -1] = make_qkv((1, 1, num_heads, head_size)).cuda()[0, 0]
    last = qkv[-1:, -1:].cpu().contiguous()
    rope.rope_(qkv, cos, sin)
    rope.reference_rope_(last, cos[-1:].cpu(), sin[-1:].cpu())
    assert_same_bits(qkv[-1:, -1:], last, "the last position")
    assert not qkv[:-1].any()
    target = make_target(E5M2, device="cuda")
    grads = [qkv[:, :, i].transpose(1, 2) for i in range(3)]
    result = rope.rope_backward(*grads, cos, sin, to=target)
    wanted = rope.reference_rope_backward(
        *[grad[-1:, :, -1:].cpu() for grad in grads], cos[-1:].cpu(), sin[-1:].cpu(), make_target(E5M2, transpose=False)
    )
    assert isinstance(result, QuantizedTensor)
    assert isinstance(wanted, QuantizedTensor)
    assert result.transposed is not None
    assert_same_bits(result.data[-1:], wanted.data, "data")
    assert_same_bits(result.transposed[:, -1:].t(), wanted.data, "transposed")
    assert not (result.data[:-1].view(torch.uint8) & 0x7F).any()  # zeros of either sign


def _backward(grad_q: Tensor, grad_k: Tensor, grad_v: Tensor, cos: Tensor, sin: Tensor, target: QuantizeTo | None):
    return rope.rope_backward(grad_q, grad_k, grad_v, cos, sin, to=target)
