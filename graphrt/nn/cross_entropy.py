"""Cross-entropy over 16-bit logits: one read forward, the gradient in place of the logits backward, no fp32 copy."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from graphrt.guards import untraced
from graphrt.kernels.cross_entropy import cross_entropy as _losses
from graphrt.kernels.cross_entropy import cross_entropy_backward_

__all__ = ["cross_entropy"]


def cross_entropy(logits: Tensor, labels: Tensor, ignore_index: int = -100) -> Tensor:
    """Mean over the labels that count of ``logsumexp(logits) - logits[label]``.

    The backward overwrites ``logits`` with their gradient: nothing may read them after it, and it runs once. Their
    gradient goes to whatever computed them.

    Args:
        logits: [..., V], bf16, fp16 or fp32.
        labels: [...] int64.
        ignore_index: label that counts for nothing.

    Returns:
        0-dim fp32; NaN if no label counts, as torch's.
    """
    return _CrossEntropy.apply(logits.contiguous(), labels, ignore_index)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
        rows, flat = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
        losses, lse = _losses(rows, flat, ignore_index)
        num_counted = (flat != ignore_index).sum()
        ctx.save_for_backward(logits, flat, lse, num_counted)
        ctx.ignore_index = ignore_index
        return losses.sum() / num_counted

    @staticmethod
    @untraced
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        logits, labels, lse, num_counted = ctx.saved_tensors
        scale = (grad_outputs[0].float() / num_counted).reshape(1)
        rows = logits.detach().view(-1, logits.shape[-1])
        cross_entropy_backward_(rows, labels, lse, scale, ctx.ignore_index)
        # A kernel writes behind autograd's back: without this, whoever else kept the logits would read gradients.
        torch.autograd.graph.increment_version(logits)
        return rows.view(logits.shape), None, None
