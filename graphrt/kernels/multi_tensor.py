"""AdamW over all tensors of a step, in two launches, with nothing read on the host.

The kernels get a table on the device: the tensors' addresses in columns, their sizes, and a map from the blocks of a 1-D
grid to equal chunks of tensors. On a CPU the same function runs in plain torch, tensor by tensor and in order: that is
the specification, which the kernel equals bit for bit (the bias corrections come from fp64 powers, where a last bit
may differ between math libraries and, rarely, show).
"""

from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from graphrt.kernels import device
from graphrt.kernels.tensor_table import TableCache, TensorTable, check_scalar

__all__ = ["TableCache", "TensorTable", "adamw_"]

_THREADS = 256  # as in adamw.cu
_CLIP_EPS = 1e-6  # as torch.nn.utils.clip_grad_norm_
_DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class _Rule:
    """The arguments of :func:`adamw_` beside its tables."""

    lr: Tensor
    weight_decay: Tensor
    grad_norm: Tensor
    max_grad_norm: Tensor
    beta1: float
    beta2: float
    eps: float
    amsgrad: bool
    maximize: bool
    write_clipped_grads: bool


def adamw_(
    table: TensorTable,
    steps: TensorTable,
    *,
    lr: Tensor,
    weight_decay: Tensor,
    grad_norm: Tensor,
    max_grad_norm: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    amsgrad: bool = False,
    maximize: bool = False,
    write_clipped_grads: bool = False,
) -> None:
    """Clip the gradients and take one AdamW step, in place (Loshchilov and Hutter, 2019, algorithm 2). Two launches.

    If ``grad_norm`` is not finite nothing changes. Else, in fp32 and in torch's order of operations::

        g      = grad * min(1, max_grad_norm / (grad_norm + 1e-6))
        step  += 1
        p     -= (lr * weight_decay) * p
        m     += (1 - beta1) * (g - m)                      # g = -g for maximize
        v     += (1 - beta2) * (g * g - v)
        p     -= (lr / (1 - beta1**step)) * m / (sqrt(v) / sqrt(1 - beta2**step) + eps)

    What all elements share (``lr / ...`` and ``1 / sqrt(1 - beta2**step)``) is computed in fp64 and rounded once. Over ten
    steps parameters and moments stay within 8 fp32 ulp of torch.optim.AdamW(fused=True), measured on a CPU.

    Args:
        table: columns parameter, gradient, exp_avg, exp_avg_sq and, with amsgrad, max_exp_avg_sq, all of one dtype.
        steps: one column, the parameters' step counts, fp32 of one element each; every one counts once.
        lr: 0-dim fp32, read on the device.
        weight_decay: 0-dim fp32, read on the device.
        grad_norm: 0-dim fp32, the norm of all gradients, of other tables too.
        max_grad_norm: 0-dim fp32, inf for no clipping.
        beta1: in [0, 1).
        beta2: in [0, 1).
        eps: not negative.
        amsgrad: divide by the largest ``v`` so far.
        maximize: ascend.
        write_clipped_grads: leave the clipped gradients in the gradient column, as ``clip_grad_norm_`` does. Off by default:
            nothing else needs them, and writing them costs a seventh more memory traffic in a step that clips.

    Raises:
        ValueError: an argument is not as above.
    """
    rule = _Rule(lr, weight_decay, grad_norm, max_grad_norm, float(beta1), float(beta2), float(eps), amsgrad, maximize, write_clipped_grads)
    _check_adamw(table, steps, rule)
    (_launch_adamw if table.device.type == "cuda" else _reference_adamw)(table, steps, rule)


# ---- launches ----


def _launch_adamw(table: TensorTable, steps: TensorTable, rule: _Rule) -> None:
    on_device, index, num_rows = table.on_device, rule.lr.get_device(), table.num_rows
    pointers, sizes, _, chunks = on_device.addresses
    scalars = on_device.scalars.data_ptr()
    shared = [x.data_ptr() for x in (rule.lr, rule.weight_decay, rule.grad_norm, rule.max_grad_norm)]
    args = (steps.on_device.addresses[0], num_rows, *shared, rule.beta1, rule.beta2, scalars)
    device.launch(index, "graphrt_adamw_prepare", -(-num_rows // _THREADS), _THREADS, args)
    if on_device.num_chunks:
        weights = (_move_weight(rule.beta1), _move_weight(rule.beta2), rule.eps)
        args = (pointers, sizes, chunks, num_rows, scalars, *weights, int(rule.maximize), int(rule.write_clipped_grads))
        device.launch(index, _adamw_kernel(table, rule), on_device.num_chunks, _THREADS, args)
    written = [column for i, column in enumerate(table.columns) if i != 1 or rule.write_clipped_grads]
    # Autograd and the FP8 weights made from a parameter see by this that the values changed.
    torch.autograd.graph.increment_version(list(chain(*written, steps.columns[0])))


def _adamw_kernel(table: TensorTable, rule: _Rule) -> str:
    name = _DTYPE_NAMES[table.columns[0][0].dtype]
    return f"graphrt_adamw_amsgrad_{name}" if rule.amsgrad else f"graphrt_adamw_{name}"


def _move_weight(beta: float) -> float:
    """``1 - beta``, or ``-beta`` (0 and below) where the move is counted from its end; see :func:`_moved`."""
    return 1.0 - beta if 1.0 - beta < 0.5 else -beta


# ---- reference ----


@torch.no_grad()
def _reference_adamw(table: TensorTable, steps: TensorTable, rule: _Rule) -> None:
    is_finite = rule.grad_norm.isfinite()
    clip = (rule.max_grad_norm / (rule.grad_norm + _CLIP_EPS)).clamp(max=1.0)
    for row, step in zip(zip(*table.columns, strict=True), steps.columns[0], strict=True):
        step.add_(is_finite.float())
        for old, new in zip(row, _updated(row, step, clip, rule), strict=True):
            if new is not None:
                old.copy_(torch.where(is_finite, new.to(old.dtype), old))


def _updated(row: tuple[Tensor, ...], step: Tensor, clip: Tensor, rule: _Rule) -> tuple[Tensor | None, ...]:
    """What one row's tensors become, in fp32; None for a gradient that stays."""
    p, grad, mean, square, *largest = (x.float() for x in row)
    grad = grad * clip
    signed = -grad if rule.maximize else grad
    mean = _moved(mean, signed, rule.beta1)
    square = _moved(square, signed * signed, rule.beta2)
    if rule.amsgrad:
        largest = [torch.where(largest[0] < square, square, largest[0])]
    step_size = (rule.lr.double() / (1.0 - rule.beta1 ** step.double())).float()
    inv_root = (1.0 / (1.0 - rule.beta2 ** step.double()).sqrt()).float()
    denominator = _root(largest[0] if rule.amsgrad else square) * inv_root + rule.eps
    p = p - (rule.lr * rule.weight_decay) * p
    p = p - (step_size * mean) / denominator
    return p, grad if rule.write_clipped_grads else None, mean, square, *largest


def _root(x: Tensor) -> Tensor:
    """The square root rounded to nearest, as IEEE asks and the kernel does; torch's fp32 one on a CPU is at times an ulp off."""
    return x.double().sqrt().float()


def _moved(x: Tensor, y: Tensor, beta: float) -> Tensor:
    """``x + (1 - beta) * (y - x)``; for beta of a half or less ``y - beta * (y - x)``, so that 0 gives ``y``."""
    weight = _move_weight(beta)
    return (x if weight > 0 else y) + weight * (y - x)


# ---- checks ----


def _check_adamw(table: TensorTable, steps: TensorTable, rule: _Rule) -> None:
    num_columns = 5 if rule.amsgrad else 4
    if len(table.columns) != num_columns or table.dtype is None:
        raise ValueError(
            f"table has {len(table.columns)} columns and dtype {table.dtype or 'mixed'}, expected {num_columns} columns of one dtype: "
            "parameter, gradient, exp_avg, exp_avg_sq and, with amsgrad, max_exp_avg_sq."
        )
    counts = steps.columns[0]
    is_one_each = len(steps.columns) == 1 and len(counts) == table.num_rows and all(step.numel() == 1 for step in counts)
    if not is_one_each or steps.dtype is not torch.float32 or steps.device != table.device:
        raise ValueError(f"steps is not one column of {table.num_rows} float32 counts of one element on {table.device}.")
    for name in ("lr", "weight_decay", "grad_norm", "max_grad_norm"):
        check_scalar(name, getattr(rule, name), table.device)
    if not (0 <= rule.beta1 < 1 and 0 <= rule.beta2 < 1 and rule.eps >= 0):
        raise ValueError(f"beta1, beta2 and eps are {rule.beta1}, {rule.beta2} and {rule.eps}, expected 0 <= beta < 1 and eps >= 0.")
