"""Residual add and RMSNorm in one kernel."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from graphrt.guards import untraced
from graphrt.kernels.norm import rms_norm, rms_norm_input_grad, rms_norm_transposed
from graphrt.nn.gemm import Gemm, is_fusable
from graphrt.nn.rows import flatten
from graphrt.owners import working_for
from graphrt.sinks import deliver

__all__ = ["composed_norm", "quantize_norm_again", "residual_rms_norm", "residual_rms_norm_backward"]


def residual_rms_norm(residual: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``s = residual + delta`` and ``s / rms(s) * weight`` (Zhang and Sennrich, 2019).

    Args:
        residual, delta: [..., D].
        weight: [D].

    Returns:
        (s, its norm), both [..., D] in the residual's dtype.
    """
    if not is_fusable(residual, delta):
        return composed_norm(residual, delta, weight, eps)
    return _ResidualNorm.apply(residual, delta, weight, eps)


def composed_norm(residual: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`residual_rms_norm` from torch's own operations, for any dtype."""
    stream = residual + delta
    return stream, F.rms_norm(stream, (stream.shape[-1],), weight.to(stream.dtype), eps)


def residual_rms_norm_backward(
    grad_out: Tensor, stream: Tensor, rstd: Tensor, weight: Tensor, grad_stream: Tensor, parameter: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """(gradient of residual and delta, of the weight), the second None where it went straight into ``weight.grad``.

    Args:
        grad_out: [rows, D], of the norm.
        stream, rstd, weight: what the forward kept.
        grad_stream: [rows, D], what reaches the stream from behind the norm.
        parameter: the weight as the forward got it, which its gradient belongs to; None if none is asked for.
    """
    grad_x, sum_into = rms_norm_input_grad(grad_out, stream, rstd, weight, grad_stream)

    def compute(out: Tensor | None) -> Tensor:
        if out is None or out.dtype is torch.float32:
            return sum_into(out).to(weight.dtype)
        return out.copy_(sum_into(None))

    if parameter is None:
        return grad_x, None
    # The sum is a few blocks, whose result nobody needs before the gradient norm. In another dtype it takes a temporary.
    return grad_x, deliver(parameter, compute, reads=sum_into.reads if weight.dtype is torch.float32 else None)


def quantize_norm_again(gemm: Gemm, saved: list[Any], stream: Tensor, rstd: Tensor, weight: Tensor, is_needed: bool) -> None:
    """Put the transposed copy of the norm, which the weight gradient of the linear behind it reads, into ``saved``.

    Args:
        gemm: of that linear.
        saved: what ``gemm.release`` returned.
        stream, rstd, weight: what the forward kept.
        is_needed: whether the weight gradient is asked for.
    """
    to = gemm.input_again(saved, is_needed)
    if to is not None:
        with working_for(weight):
            saved[0] = rms_norm_transposed(stream, rstd, weight, to=to)
        gemm.keep_input(saved)


class _ResidualNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, residual: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        with working_for(weight):
            stream, n, rstd = rms_norm(flatten(delta), flatten(residual), weight, eps)
        assert isinstance(n, Tensor)
        ctx.save_for_backward(stream, rstd, weight)
        ctx.parameter, ctx.shape = weight if ctx.needs_input_grad[2] else None, residual.shape
        return stream.view(residual.shape), n.view(residual.shape)

    @staticmethod
    @untraced
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        stream, rstd, weight = ctx.saved_tensors
        grad_stream, grad_n = map(flatten, grad_outputs)
        with working_for(weight):
            grad_x, grad_weight = residual_rms_norm_backward(grad_n, stream, rstd, weight, grad_stream, ctx.parameter)
        grad_x = grad_x.view(ctx.shape)
        return grad_x, grad_x, grad_weight, None
