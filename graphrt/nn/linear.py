"""An unconverted linear whose weight gradient is written in the parameter's dtype, straight into ``.grad``."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from graphrt.guards import untraced
from graphrt.nn.gemm import PlainGemm, can_fuse
from graphrt.nn.rows import flatten
from graphrt.recompute import unseen_by_selective_checkpoints
from graphrt.saved import take_saved

__all__ = ["linear"]


def linear(x: Tensor, module: nn.Linear) -> Tensor:
    """``module(x)``, for a head that stays in 16 bits over fp32 master weights.

    Under autocast a plain nn.Linear computes the weight gradient in 16 bits and casts it; here the GEMM writes the
    parameter's dtype itself. A converted linear, one with a bias or with hooks is called as it is.

    Args:
        x: [..., in_features], already in the dtype to compute in.
        module: in_features -> out_features.
    """
    if type(module) is not nn.Linear or not can_fuse(x, module):
        return module(x)
    return _Linear.apply(x, module.weight, PlainGemm(module, x.dtype))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, gemm: PlainGemm) -> Tensor:
        rows = flatten(x)
        with torch.autocast(x.device.type, enabled=False), unseen_by_selective_checkpoints():
            y = gemm.forward(rows)
        ctx.save_for_backward(*gemm.release(rows))
        ctx.gemm, ctx.shape = gemm, x.shape
        return y.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @untraced
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        saved = take_saved(ctx)
        grad = flatten(grad_outputs[0])
        grad_x = ctx.gemm.grad_input(grad, saved).view(ctx.shape) if ctx.needs_input_grad[0] else None
        grad_weight = ctx.gemm.weight_grad(grad, saved) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, None
