"""An embedding whose weight gradient is summed in a fixed order, straight into ``.grad``."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from graphrt.guards import untraced
from graphrt.kernels.embedding import embedding_backward
from graphrt.kernels.quantized import INPUT_DTYPES
from graphrt.nn.rows import flatten
from graphrt.owners import working_for
from graphrt.sinks import deliver

__all__ = ["embedding"]


def embedding(tokens: Tensor, module: nn.Embedding, dtype: torch.dtype | None = None) -> Tensor:
    """``module(tokens).to(dtype)``, for a table of fp32 master weights.

    torch's own backward makes a table of zeros, adds rows to it, and adds it to ``.grad``; here the rows of ``grad`` that
    tokens name are written themselves, and repeatedly the same bits: no atomics, and the order of each sum is fixed. Tied
    weights add up. ``padding_idx`` is followed. A module with hooks, ``max_norm``, ``scale_grad_by_freq`` or ``sparse``, a
    subclass, and a table that is not fp32 are called as they are.

    Args:
        tokens: [...] int64 or int32.
        module: V -> D.
        dtype: of the rows, and of the gradient that comes back for them; None for the table's.

    Returns:
        [..., D].
    """
    dtype = module.weight.dtype if dtype is None else dtype
    if not _can_fuse(tokens, module, dtype):
        return module(tokens).to(dtype)
    return _Embedding.apply(tokens, module.weight, module.padding_idx, dtype)


def _can_fuse(tokens: Tensor, module: nn.Embedding, dtype: torch.dtype) -> bool:
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    is_watched = any(hooks) or "forward" in vars(module)
    is_plain = module.max_norm is None and not (module.scale_grad_by_freq or module.sparse)
    is_known = type(module.weight) in (Tensor, nn.Parameter) and module.weight.dtype is torch.float32 and dtype in INPUT_DTYPES
    is_on_device = tokens.dtype in (torch.int64, torch.int32) and tokens.device == module.weight.device
    return type(module) is nn.Embedding and is_plain and is_known and is_on_device and not is_watched


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, padding_idx: int | None, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(tokens)
        # The weight is read in the backward for its sink and its shape alone, so an update in between is no mistake.
        ctx.weight, ctx.padding_idx = weight, padding_idx
        with working_for(weight):
            return F.embedding(tokens, weight).to(dtype)

    @staticmethod
    @untraced
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        if not ctx.needs_input_grad[1]:
            return None, None, None, None
        [tokens] = ctx.saved_tensors
        grad, flat = flatten(grad_outputs[0]), tokens.reshape(-1).contiguous()

        def write(out: Tensor | None, accumulate: bool = False) -> Tensor:
            out = torch.empty_like(ctx.weight, memory_format=torch.contiguous_format) if out is None else out
            embedding_backward(grad, flat, out, accumulate=accumulate, padding_idx=ctx.padding_idx)
            return out

        with working_for(ctx.weight):
            return None, deliver(ctx.weight, write, lambda out: write(out, accumulate=True)), None, None
