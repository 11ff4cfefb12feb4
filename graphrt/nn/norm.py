"""Residual add and RMSNorm in one kernel."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from graphrt.guards import untraced
from graphrt.kernels.norm import rms_norm, rms_norm_backward
from graphrt.nn.gemm import is_fusable
from graphrt.nn.rows import flatten
from graphrt.owners import working_for

__all__ = ["composed_norm", "residual_rms_norm"]


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


class _ResidualNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, residual: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        with working_for(weight):
            stream, n, rstd = rms_norm(flatten(delta), flatten(residual), weight, eps)
        assert isinstance(n, Tensor)
        ctx.save_for_backward(stream, rstd, weight)
        ctx.shape = residual.shape
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
            grad_x, grad_weight = rms_norm_backward(grad_n, stream, rstd, weight, grad_stream)
        grad_x = grad_x.view(ctx.shape)
        return grad_x, grad_x, grad_weight.to(weight.dtype), None
