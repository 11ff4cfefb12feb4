"""The feed-forward half of a transformer block: five stages, four kernels beside the GEMMs, FP8 in between.

    s = residual + delta                     one kernel writes s and quantizes n
    n = rms_norm(s) * weight
    h = n w13^T                              GEMM
    a = silu(gate) * up                      one kernel, quantizes a
    y = a w2^T                               GEMM

In the backward the output gradient of w13 is quantized by the kernel that computes it, and never exists in 16 bits. The same
kernel makes the transposed copy of a that the weight gradient of w2 reads, and another one that of n for w13, so that nothing
of a and n is kept in between.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from graphrt.guards import untraced
from graphrt.kernels import QuantizeTo
from graphrt.kernels.norm import rms_norm
from graphrt.kernels.swiglu import swiglu, swiglu_backward, swiglu_backward_with_output
from graphrt.nn.gemm import Gemm, Operand, can_fuse, gemm_of, is_fusable
from graphrt.nn.norm import composed_norm, quantize_norm_again, residual_rms_norm_backward
from graphrt.nn.rows import flatten
from graphrt.owners import working_for
from graphrt.recompute import unseen_by_selective_checkpoints
from graphrt.saved import take_saved

__all__ = ["swiglu_feed_forward"]


def swiglu_feed_forward(
    residual: Tensor, delta: Tensor, norm_weight: Tensor, w13: nn.Linear, w2: nn.Linear, eps: float
) -> tuple[Tensor, Tensor]:
    """Add to the residual stream, normalize, and run a SwiGLU feed-forward (Shazeer, 2020).

    Args:
        residual: [..., D], the residual stream.
        delta: [..., D], what the layer before adds to it.
        norm_weight: [D], of the RMSNorm.
        w13: D -> 2 F without bias; gate and up side by side.
        w2: F -> D without bias.
        eps: of the RMSNorm.

    Returns:
        (residual + delta, what this layer adds to it), both [..., D] in the residual's dtype.
    """
    if not (is_fusable(residual, delta) and can_fuse(residual, w13, w2)):
        stream, n = composed_norm(residual, delta, norm_weight, eps)
        gate, up = w13(n).chunk(2, dim=-1)
        return stream, w2(F.silu(gate) * up)
    gemms = gemm_of(w13, residual), gemm_of(w2, residual)
    return _FeedForward.apply(residual, delta, norm_weight, w13.weight, w2.weight, *gemms, eps)


class _FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, residual: Tensor, delta: Tensor, norm_weight: Tensor, w13: Tensor, w2: Tensor, first: Gemm, second: Gemm, eps: float
    ) -> tuple[Tensor, Tensor]:
        with torch.autocast(residual.device.type, enabled=False), unseen_by_selective_checkpoints():
            with working_for(norm_weight):
                stream, n, rstd = rms_norm(flatten(delta), flatten(residual), norm_weight, eps, to=first.input_target(transpose=False))
            h = first.forward(n)
            a = swiglu(h, to=second.input_target(transpose=False))
            y = second.forward(a)
        ctx.save_for_backward(stream, rstd, norm_weight, h, *first.release(n), *second.release(a))
        ctx.first, ctx.second, ctx.shape = first, second, residual.shape
        ctx.norm_parameter = norm_weight if ctx.needs_input_grad[2] else None
        return stream.view(residual.shape), y.view(residual.shape)

    @staticmethod
    @untraced
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        stream, rstd, norm_weight, h, *saved = take_saved(ctx)
        grad_stream, grad_y = map(flatten, grad_outputs)
        first, second = ctx.first, ctx.second
        needs_w13, needs_w2 = ctx.needs_input_grad[3:5]
        saved_n, saved_a = saved[:4], saved[4:]
        del saved
        g2 = second.prepare_grad(grad_y, transpose=needs_w2)
        grad_a = second.grad_input(g2, saved_a)
        g2 = second.for_weight_grad(g2)
        g13 = first.receive(_swiglu_backward(h, grad_a, first.grad_target(transpose=needs_w13), second, saved_a, needs_w2))
        del h, grad_a
        grad_w2 = second.weight_grad(g2, saved_a) if needs_w2 else None
        del g2, saved_a
        grad_n = first.grad_input(g13, saved_n)
        g13 = first.for_weight_grad(g13)
        quantize_norm_again(first, saved_n, stream, rstd, norm_weight, needs_w13)
        grad_w13 = first.weight_grad(g13, saved_n) if needs_w13 else None
        del g13, saved_n
        with working_for(norm_weight):
            grad_x, grad_norm = residual_rms_norm_backward(grad_n, stream, rstd, norm_weight, grad_stream, ctx.norm_parameter)
        first.finish()
        second.finish()
        grad_x = grad_x.view(ctx.shape)
        return grad_x, grad_x, grad_norm, grad_w13, grad_w2, None, None, None


def _swiglu_backward(h: Tensor, grad_a: Tensor, to: QuantizeTo | None, gemm: Gemm, saved: list[Any], needs_a: bool) -> Operand:
    """The gradient of ``h``; puts what w2's weight gradient reads of ``a`` into ``saved``, if the forward did not keep it."""
    again = gemm.input_again(saved, needs_a)
    if again is None:
        return swiglu_backward(h, grad_a, to=to)
    grad_h, saved[0] = swiglu_backward_with_output(h, grad_a, to=to, output_to=again)
    gemm.keep_input(saved)
    return grad_h
