"""Rotary position embedding, in place on a joint qkv, and its backward into one gradient of the joint projection.

The rotation is that of Su et al., "RoFormer" (arXiv:2104.09864), with a head's elements paired as (x[i], x[i + Dh/2]):

    first' = first * cos - second * sin
    second' = second * cos + first * sin

in fp32, every operation rounded by itself (no fused multiply-add), the result rounded once to bf16. The backward turns
by the opposite angle. The CUDA kernels equal the plain torch reference beside them bit for bit, but for the payload of a NaN.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from graphrt.kernels import device, reference
from graphrt.kernels.quantized import INPUT_DTYPES, QuantizedTensor, QuantizeTo, allocate, check_arguments

__all__ = ["MAX_HEAD_SIZE", "rope_", "rope_backward"]

# These mirror the constants of rope.cu.
_THREADS = 256
_HEADS = 4
_TILE_ROWS, _TILE_COLUMNS = 64, 32  # columns of a half of each head

MAX_HEAD_SIZE = 256
_PAIRS = 8  # what a 16-byte vector of the first half of a head, and one of the second, hold
_BACKWARD_KERNELS = {
    torch.float8_e4m3fn: "graphrt_rope_backward_bf16_e4m3",
    torch.float8_e5m2: "graphrt_rope_backward_bf16_e5m2",
}


class _Shape(NamedTuple):
    """Sizes of a joint qkv."""

    batches: int
    positions: int
    num_heads: int
    head_size: int

    @property
    def rows(self) -> int:
        return self.batches * self.positions

    @property
    def columns(self) -> int:
        return 3 * self.num_heads * self.head_size


def rope_(qkv: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Turn q and k by the angles of their positions, in place. v stays.

    Args:
        qkv: [B, T, 3, H, Dh] bf16, contiguous; index 0 of the third dimension is q, 1 is k. Dh a multiple of 16 up to 256.
        cos: [>= T, Dh/2] fp32, contiguous: cosines of the angles of each position.
        sin: the sines, likewise.

    Raises:
        ValueError: an argument has another shape, dtype, device or layout than above; the message names it.
        GraphrtError: the kernels cannot be compiled or loaded for the device.
    """
    shape = _check_qkv(qkv)
    _check_angles(shape, qkv.device, cos, sin)
    if shape.rows and shape.columns:
        (launch_rope_ if qkv.is_cuda else reference_rope_)(qkv, cos, sin)


def rope_backward(
    grad_q: Tensor, grad_k: Tensor, grad_v: Tensor, cos: Tensor, sin: Tensor, *, to: QuantizeTo | None = None
) -> Tensor | QuantizedTensor:
    """Gradient of the joint projection: those of q and k turned back and rounded to bf16, that of v as it is.

    Args:
        grad_q: [B, H, T, Dh] bf16, any strides. Read in place if the last dimension is contiguous and vectors of eight
            elements are aligned to 16 bytes; made contiguous otherwise. Dh a multiple of 16 up to 256.
        grad_k: likewise.
        grad_v: likewise.
        cos: [>= T, Dh/2] fp32, contiguous, as given to :func:`rope_`.
        sin: likewise.
        to: quantize the bf16 result in the same launch.

    Returns:
        [B * T, 3 * H * Dh] bf16, columns ordered as in a qkv [B, T, 3, H, Dh]; with ``to`` what
        :func:`graphrt.kernels.quantize` makes of that: data, transposed copy if asked for, ``scale_inv``, the amax merged.

    Raises:
        ValueError: an argument has another shape, dtype, device or layout than above; the message names it.
        GraphrtError: the kernels cannot be compiled or loaded for the device.
    """
    shape = _check_gradients(grad_q, grad_k, grad_v)
    _check_angles(shape, grad_q.device, cos, sin)
    if to is not None:
        check_arguments(_stand_in(grad_q, shape), to.scale, to.scale_inv, to.slot, to.dtype, to.amax)
    run = launch_rope_backward if grad_q.is_cuda else reference_rope_backward
    return run(grad_q, grad_k, grad_v, cos, sin, to)


# ---- plain torch: the specification, and what runs on a CPU ----


def reference_rope_(qkv: Tensor, cos: Tensor, sin: Tensor) -> None:
    """:func:`rope_` in plain torch."""
    positions = qkv.shape[1]
    q_and_k = qkv.detach()[:, :, :2]
    q_and_k.copy_(_rotate(q_and_k, cos[:positions, None, None], sin[:positions, None, None]))


def reference_rope_backward(
    grad_q: Tensor, grad_k: Tensor, grad_v: Tensor, cos: Tensor, sin: Tensor, to: QuantizeTo | None
) -> Tensor | QuantizedTensor:
    """:func:`rope_backward` in plain torch."""
    batches, num_heads, positions, head_size = grad_q.shape
    angles = cos[:positions], -sin[:positions]
    turned = [_rotate(grad.detach(), *angles).transpose(1, 2) for grad in (grad_q, grad_k)]
    grads = torch.stack([*turned, grad_v.detach().transpose(1, 2)], dim=2)
    grad_qkv = grads.reshape(batches * positions, 3 * num_heads * head_size)
    if to is None:
        return grad_qkv
    return reference.quantize(grad_qkv, to.scale, to.scale_inv, to.slot, to.dtype, amax=to.amax, transpose=to.transpose)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


# ---- one launch on the GPU ----


def launch_rope_(qkv: Tensor, cos: Tensor, sin: Tensor) -> None:
    """:func:`rope_` on the GPU. A qkv at an address that is not a multiple of 16 bytes is copied there and back."""
    if qkv.data_ptr() % 16:
        copy = qkv.clone()
        launch_rope_(copy, cos, sin)
        qkv.copy_(copy)
        return
    batches, positions, _, num_heads, head_size = qkv.shape
    shape = _Shape(batches, positions, num_heads, head_size)
    cos, sin = _aligned(cos), _aligned(sin)
    args = (qkv.data_ptr(), cos.data_ptr(), sin.data_ptr(), *_sizes(shape))
    device.launch(qkv.get_device(), "graphrt_rope_bf16", _num_flat_blocks(shape, 2), _THREADS, args)


def launch_rope_backward(
    grad_q: Tensor, grad_k: Tensor, grad_v: Tensor, cos: Tensor, sin: Tensor, to: QuantizeTo | None
) -> Tensor | QuantizedTensor:
    """:func:`rope_backward` on the GPU."""
    batches, num_heads, positions, head_size = grad_q.shape
    shape = _Shape(batches, positions, num_heads, head_size)
    grads = [_vectorizable(grad) for grad in (grad_q, grad_k, grad_v)]
    cos, sin = _aligned(cos), _aligned(sin)
    sources = (*[value for grad in grads for value in (grad.data_ptr(), *grad.stride()[:3])], cos.data_ptr(), sin.data_ptr())
    if to is not None:
        return _launch_quantizing(grad_q, sources, shape, to)
    grad_qkv = torch.empty(shape.rows, shape.columns, dtype=grad_q.dtype, device=grad_q.device)
    if grad_qkv.numel():
        args = (*sources, grad_qkv.data_ptr(), *_sizes(shape))
        device.launch(grad_q.get_device(), "graphrt_rope_backward_bf16", _num_flat_blocks(shape, 3), _THREADS, args)
    return grad_qkv


def _launch_quantizing(grad: Tensor, sources: tuple[int, ...], shape: _Shape, to: QuantizeTo) -> QuantizedTensor:
    result = allocate(_stand_in(grad, shape), to.dtype, to.transpose)
    if shape.rows == 0 or shape.columns == 0:
        result.scale_inv.copy_(to.scale_inv[to.slot, :1])
        return result
    slot_args = (
        to.scale.data_ptr() + 4 * to.slot,
        to.scale_inv.data_ptr() + 16 * to.slot,
        result.scale_inv.data_ptr(),
        0 if to.amax is None else to.amax.data_ptr() + 4 * to.slot,
    )
    outputs = (result.data.data_ptr(), 0 if result.transposed is None else result.transposed.data_ptr())
    args = (*sources, *outputs, *slot_args, *_sizes(shape))
    device.launch(grad.get_device(), _BACKWARD_KERNELS[to.dtype], _num_tiles(shape), _THREADS, args)
    return result


def _stand_in(grad: Tensor, shape: _Shape) -> Tensor:
    """What has shape, dtype and device of the bf16 result, which is never stored on the way to FP8."""
    return grad.new_empty(()).expand(shape.rows, shape.columns)


def _sizes(shape: _Shape) -> tuple[int, int, int, int]:
    return shape.rows, shape.positions, shape.num_heads, shape.head_size


def _num_flat_blocks(shape: _Shape, num_parts: int) -> int:
    """Blocks of the row-major kernels, which go through ``num_parts`` of q, k and v."""
    num_groups = -(-num_parts * shape.num_heads // _HEADS)
    return -(-shape.rows * num_groups * (shape.head_size // 2 // _PAIRS) // _THREADS)


def _num_tiles(shape: _Shape) -> int:
    return -(-shape.rows // _TILE_ROWS) * -(-3 * shape.num_heads // _HEADS) * -(-(shape.head_size // 2) // _TILE_COLUMNS)


def _vectorizable(grad: Tensor) -> Tensor:
    """``grad``, or a copy of it whose vectors of eight elements are contiguous and 16-byte aligned."""
    is_vectorizable = grad.stride(-1) == 1 and all(
        size <= 1 or stride % _PAIRS == 0 for size, stride in zip(grad.shape[:3], grad.stride()[:3], strict=True)
    )
    return _aligned(grad if is_vectorizable else grad.contiguous())


def _aligned(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format) if tensor.data_ptr() % 16 else tensor


# ---- arguments ----


def _check_qkv(qkv: Tensor) -> _Shape:
    if qkv.dim() != 5 or qkv.shape[2] != 3 or not _is_readable(qkv) or not qkv.is_contiguous():
        raise ValueError(f"qkv is {_describe(qkv)}, expected a contiguous bfloat16 [B, T, 3, H, Dh]. Make it so before.")
    batches, positions, _, num_heads, head_size = qkv.shape
    _check_head_size("qkv", head_size)
    return _Shape(batches, positions, num_heads, head_size)


def _check_gradients(grad_q: Tensor, grad_k: Tensor, grad_v: Tensor) -> _Shape:
    if grad_q.dim() != 4:
        raise ValueError(f"grad_q has shape {list(grad_q.shape)}, expected [B, H, T, Dh].")
    batches, num_heads, positions, head_size = grad_q.shape
    for name, grad in (("grad_q", grad_q), ("grad_k", grad_k), ("grad_v", grad_v)):
        if not _is_readable(grad) or grad.dtype is not grad_q.dtype or grad.shape != grad_q.shape or grad.device != grad_q.device:
            expected = f"a bfloat16 {list(grad_q.shape)} on {grad_q.device}, as grad_q is shaped"
            raise ValueError(f"{name} is {_describe(grad)}, expected {expected}.")
    _check_head_size("grad_q", head_size)
    return _Shape(batches, positions, num_heads, head_size)


def _is_readable(x: Tensor) -> bool:
    """The kernel reads bf16; the reference rounds to any of the dtypes that can be quantized."""
    return x.dtype is torch.bfloat16 or (not x.is_cuda and x.dtype in INPUT_DTYPES)


def _check_head_size(name: str, head_size: int) -> None:
    if head_size % (2 * _PAIRS) or not 0 < head_size <= MAX_HEAD_SIZE:
        raise ValueError(f"{name} has head size {head_size}, expected a multiple of 16 up to {MAX_HEAD_SIZE}.")


def _check_angles(shape: _Shape, where: torch.device, cos: Tensor, sin: Tensor) -> None:
    half = shape.head_size // 2
    for name, angles in (("cos", cos), ("sin", sin)):
        is_table = angles.dim() == 2 and angles.shape[1] == half and angles.shape[0] >= shape.positions
        if not is_table or angles.dtype is not torch.float32 or not angles.is_contiguous() or angles.device != where:
            expected = f"a contiguous float32 [at least {shape.positions}, {half}] on {where}"
            raise ValueError(f"{name} is {_describe(angles)}, expected {expected}.")


def _describe(tensor: Tensor) -> str:
    layout = "contiguous" if tensor.is_contiguous() else "non-contiguous"
    return f"{layout} {tensor.dtype} {list(tensor.shape)} on {tensor.device}"
