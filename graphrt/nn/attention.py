"""From the residual stream to queries, keys and values: residual add, RMSNorm, projection, rotary embedding in place.

The projection's output stays in its own layout, [B, T, 3, H, Dh]; attention reads it through strides, and the rotation
touches only queries and keys, where they lie. The backward rotates the gradients back and quantizes them in that layout
in one kernel.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from graphrt.guards import untraced
from graphrt.kernels.norm import rms_norm
from graphrt.kernels.rope import MAX_HEAD_SIZE, rope_, rope_backward
from graphrt.nn.gemm import Gemm, can_fuse, gemm_of, is_fusable
from graphrt.nn.norm import composed_norm, quantize_norm_again, residual_rms_norm_backward
from graphrt.nn.rows import flatten
from graphrt.owners import working_for
from graphrt.recompute import unseen_by_selective_checkpoints
from graphrt.saved import take_saved

__all__ = ["rotary_qkv"]


def rotary_qkv(
    residual: Tensor, delta: Tensor, norm_weight: Tensor, qkv: nn.Linear, cos: Tensor, sin: Tensor, num_heads: int, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Add to the residual stream, normalize, project, and rotate queries and keys (Su et al., 2021).

    Args:
        residual: [B, T, D], the residual stream.
        delta: [B, T, D], what the layer before adds to it.
        norm_weight: [D], of the RMSNorm.
        qkv: D -> 3 H Dh without bias; queries, keys and values one after the other.
        cos, sin: [>= T, Dh / 2] fp32, by position.
        num_heads: H.
        eps: of the RMSNorm.

    Returns:
        (residual + delta [B, T, D], queries, keys, values), the last three [B, H, T, Dh], views of one buffer.
    """
    head_size = residual.shape[-1] // num_heads
    if not (is_fusable(residual, delta) and can_fuse(residual, qkv)) or head_size % 16 or head_size > MAX_HEAD_SIZE:
        return _composed(residual, delta, norm_weight, qkv, cos, sin, num_heads, eps)
    gemm = gemm_of(qkv, residual)
    return _RotaryQkv.apply(residual, delta, norm_weight, qkv.weight, gemm, cos, sin, num_heads, eps)


def _composed(
    residual: Tensor, delta: Tensor, norm_weight: Tensor, qkv: nn.Linear, cos: Tensor, sin: Tensor, num_heads: int, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same from torch's own operations."""
    stream, n = composed_norm(residual, delta, norm_weight, eps)
    batch, seq_len, _ = residual.shape
    query, key, value = qkv(n).view(batch, seq_len, 3, num_heads, -1).permute(2, 0, 3, 1, 4)
    return stream, _rotate(query, cos[:seq_len], sin[:seq_len]), _rotate(key, cos[:seq_len], sin[:seq_len]), value


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (x[i], x[i + Dh / 2]) of [..., T, Dh] by its position's angle."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class _RotaryQkv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        residual: Tensor,
        delta: Tensor,
        norm_weight: Tensor,
        weight: Tensor,
        gemm: Gemm,
        cos: Tensor,
        sin: Tensor,
        num_heads: int,
        eps: float,
    ) -> tuple[Tensor, ...]:
        batch, seq_len, _ = residual.shape
        # In place on the product: a selective checkpoint that kept it would hand it out turned, to be turned again.
        with torch.autocast(residual.device.type, enabled=False), unseen_by_selective_checkpoints():
            with working_for(norm_weight):
                stream, n, rstd = rms_norm(flatten(delta), flatten(residual), norm_weight, eps, to=gemm.input_target(transpose=False))
            packed = gemm.forward(n).view(batch, seq_len, 3, num_heads, -1)
            rope_(packed, cos, sin)
        ctx.save_for_backward(stream, rstd, norm_weight, cos, sin, *gemm.release(n))
        ctx.gemm, ctx.shape = gemm, residual.shape
        ctx.norm_parameter = norm_weight if ctx.needs_input_grad[2] else None
        query, key, value = packed.permute(2, 0, 3, 1, 4).unbind()
        return stream.view(residual.shape), query, key, value

    @staticmethod
    @untraced
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        stream, rstd, norm_weight, cos, sin, *saved = take_saved(ctx)
        grad_stream, grad_query, grad_key, grad_value = grad_outputs
        gemm, needs_weight = ctx.gemm, ctx.needs_input_grad[3]
        grad = gemm.receive(rope_backward(grad_query, grad_key, grad_value, cos, sin, to=gemm.grad_target(transpose=needs_weight)))
        grad_n = gemm.grad_input(grad, saved)
        grad = gemm.for_weight_grad(grad)
        quantize_norm_again(gemm, saved, stream, rstd, norm_weight, needs_weight)
        grad_weight = gemm.weight_grad(grad, saved) if needs_weight else None
        del grad, saved
        with working_for(norm_weight):
            grad_x, grad_norm = residual_rms_norm_backward(grad_n, stream, rstd, norm_weight, flatten(grad_stream), ctx.norm_parameter)
        gemm.finish()
        grad_x = grad_x.view(ctx.shape)
        return grad_x, grad_x, grad_norm, grad_weight, None, None, None, None, None
