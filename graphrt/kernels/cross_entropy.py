"""Cross-entropy of logits over a vocabulary, and its gradient written where the logits were.

    lse = m + log(sum(exp(x - m))),  m = max(x)
    loss = (m - x[label]) + log(sum(exp(x - m)))
    gradient = (exp(x - lse) - onehot(label)) * scale

all in fp32 (the log-softmax of every framework; the loss keeps ``m - x[label]`` together because that difference is
exact for close logits). The gradient replaces the logits, so no second [M, V] exists.

The CUDA kernels take ``ex2.approx(x * log2(e))`` for the exponential and sum in a fixed order, so they are deterministic,
but not the reference's bits. How far from the exact values:

- Losses are within 1e-5 relative or 2e-6 absolute, for up to 2^17 classes. An exponential has a relative error below 2^-22
  (instruction) + |x - m| * 2^-23 (rounded product), and terms with a large |x - m| are a small part of the sum. A sum is
  made of few terms at a time: 32 of a thread, then its 16 sums, then 256 threads by halves. The absolute part counts
  where the loss is nearly 0: log(sum) cannot be better than the rounding of a sum that is almost 1.
- Gradients are within one unit in the last place of bf16, or 1e-6 * scale absolute. The fp32 that holds ``lse`` may add
  |lse| * 2^-23 * probability * scale, which matters for fp32 logits only.
"""

import torch
from torch import Tensor

from graphrt.kernels import device

__all__ = ["cross_entropy", "cross_entropy_backward_"]

# These mirror the constants of cross_entropy.cu.
_THREADS = 256
_LOADS = 4

_NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32"}
_ELEMENTS = {torch.bfloat16: 8, torch.float32: 4}  # in 16 bytes
_FORWARD_KERNELS = {dtype: f"graphrt_cross_entropy_{name}" for dtype, name in _NAMES.items()}
_BACKWARD_KERNELS = {dtype: f"graphrt_cross_entropy_backward_{name}" for dtype, name in _NAMES.items()}
_CPU_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def cross_entropy(logits: Tensor, labels: Tensor, ignore_index: int = -100) -> tuple[Tensor, Tensor]:
    """Loss and log-sum-exp of every row. No host sync: a label is never read on the host.

    Args:
        logits: [M, V] bf16 or fp32, contiguous; on a CPU fp16 too. V >= 1.
        labels: [M] int64, contiguous.
        ignore_index: rows with this label have loss 0. Any other label outside [0, V) gives NaN.

    Returns:
        losses [M] fp32, one per row, and lse [M] fp32, ignored rows too, for :func:`cross_entropy_backward_`.

    Raises:
        ValueError: an argument has another shape, dtype, device or layout than above; the message names it.
        GraphrtError: the kernels cannot be compiled or loaded for the device.
    """
    _check(logits, labels)
    return (launch_cross_entropy if logits.is_cuda else reference_cross_entropy)(logits, labels, ignore_index)


def cross_entropy_backward_(logits: Tensor, labels: Tensor, lse: Tensor, grad_losses_scale: Tensor, ignore_index: int = -100) -> None:
    """Overwrite the logits with the gradient ``(exp(logits - lse) - onehot(labels)) * grad_losses_scale``.

    Rows with the label ``ignore_index`` become 0, whatever their logits. Rows with any other label outside [0, V) become
    NaN like their loss, so that a check of the gradients sees what a check of the loss would.

    Args:
        logits: [M, V] as given to :func:`cross_entropy`.
        labels: [M] int64, contiguous.
        lse: [M] fp32, what :func:`cross_entropy` returned.
        grad_losses_scale: one fp32 element: the gradient of the mean loss divided by the number of rows it is a mean of.
        ignore_index: as given to :func:`cross_entropy`.

    Raises:
        ValueError: an argument has another shape, dtype, device or layout than above; the message names it.
        GraphrtError: the kernels cannot be compiled or loaded for the device.
    """
    _check(logits, labels)
    _check_rows("lse", lse, torch.float32, logits)
    if grad_losses_scale.dtype is not torch.float32 or grad_losses_scale.numel() != 1 or grad_losses_scale.device != logits.device:
        raise ValueError(f"grad_losses_scale is {_describe(grad_losses_scale)}, expected one float32 element on {logits.device}.")
    run = launch_cross_entropy_backward_ if logits.is_cuda else reference_cross_entropy_backward_
    run(logits, labels, lse, grad_losses_scale, ignore_index)


# ---- plain torch: the specification, and what runs on a CPU ----


def reference_cross_entropy(logits: Tensor, labels: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """:func:`cross_entropy` in plain torch."""
    values = logits.detach().float()
    maximum = values.amax(dim=1)
    base = torch.where(maximum == -torch.inf, 0.0, maximum)  # -inf minus -inf would be NaN
    log_sum = (values - base[:, None]).exp().sum(dim=1).log()
    is_class = _is_class(logits, labels)
    picked = values.gather(1, torch.where(is_class, labels, 0)[:, None])[:, 0]
    losses = torch.where(is_class, maximum - picked + log_sum, torch.nan)
    return losses.masked_fill(labels == ignore_index, 0.0), base + log_sum


def reference_cross_entropy_backward_(logits: Tensor, labels: Tensor, lse: Tensor, grad_losses_scale: Tensor, ignore_index: int) -> None:
    """:func:`cross_entropy_backward_` in plain torch."""
    logits = logits.detach()
    is_class = _is_class(logits, labels)
    gradient = (logits.float() - lse[:, None]).exp()
    gradient.scatter_add_(1, torch.where(is_class, labels, 0)[:, None], -is_class.float()[:, None])
    scale = torch.where(is_class, grad_losses_scale.reshape(1), torch.nan)
    gradient = (gradient * scale[:, None]).masked_fill((labels == ignore_index)[:, None], 0.0)
    logits.copy_(gradient)


def _is_class(logits: Tensor, labels: Tensor) -> Tensor:
    return (labels >= 0) & (labels < logits.shape[1])


# ---- one launch on the GPU ----


def launch_cross_entropy(logits: Tensor, labels: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """:func:`cross_entropy` on the GPU: a block a row."""
    num_rows, num_classes = logits.shape
    losses = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    lse = torch.empty_like(losses)
    if num_rows:
        addresses = (logits.data_ptr(), labels.data_ptr(), losses.data_ptr(), lse.data_ptr())
        args = (*addresses, num_classes, ignore_index, _is_aligned(logits))
        device.launch(logits.get_device(), _FORWARD_KERNELS[logits.dtype], num_rows, _THREADS, args)
    return losses, lse


def launch_cross_entropy_backward_(logits: Tensor, labels: Tensor, lse: Tensor, grad_losses_scale: Tensor, ignore_index: int) -> None:
    """:func:`cross_entropy_backward_` on the GPU: as many blocks a row as its vectors fill."""
    num_rows, num_classes = logits.shape
    if num_rows == 0:
        return
    blocks_per_row = -(-num_classes // (_THREADS * _LOADS * _ELEMENTS[logits.dtype]))
    addresses = (logits.data_ptr(), labels.data_ptr(), lse.data_ptr(), grad_losses_scale.data_ptr())
    args = (*addresses, num_classes, ignore_index, blocks_per_row, _is_aligned(logits))
    device.launch(logits.get_device(), _BACKWARD_KERNELS[logits.dtype], num_rows * blocks_per_row, _THREADS, args)


def _is_aligned(logits: Tensor) -> int:
    """Whether every row starts at a multiple of 16 bytes and ends at one."""
    return int(logits.data_ptr() % 16 == 0 and logits.shape[1] % _ELEMENTS[logits.dtype] == 0)


# ---- arguments ----


def _check(logits: Tensor, labels: Tensor) -> None:
    dtypes = tuple(_NAMES) if logits.is_cuda else _CPU_DTYPES
    if logits.dim() != 2 or logits.shape[1] == 0 or not logits.is_contiguous():
        raise ValueError(f"logits are {_describe(logits)}, expected a contiguous [M, V]. Flatten the leading ones with x.flatten(0, -2).")
    if logits.dtype not in dtypes:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(f"logits have dtype {logits.dtype}, expected {names} on {logits.device}. Convert them first.")
    _check_rows("labels", labels, torch.int64, logits)


def _check_rows(name: str, tensor: Tensor, dtype: torch.dtype, logits: Tensor) -> None:
    is_fitting = tensor.shape == logits.shape[:1] and tensor.is_contiguous() and tensor.device == logits.device
    if not is_fitting or tensor.dtype is not dtype:
        expected = f"a contiguous {dtype} [{logits.shape[0]}] on {logits.device}, one element for each row of the logits"
        raise ValueError(f"{name} is {_describe(tensor)}, expected {expected}.")


def _describe(tensor: Tensor) -> str:
    layout = "contiguous" if tensor.is_contiguous() else "non-contiguous"
    return f"{layout} {tensor.dtype} {list(tensor.shape)} on {tensor.device}"
