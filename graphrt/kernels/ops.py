"""The kernels as torch custom operators, for tracing only: torch.compile sees one opaque node with a shape rule.

``graphrt::quantize``, ``graphrt::quantize_out``, ``graphrt::record_amax_`` and ``graphrt::update_scales_`` call the
public functions of :mod:`graphrt.kernels`, so traced and eager code run the same kernels.
"""

import torch
from torch import Tensor

from graphrt import kernels
from graphrt.kernels.quantized import QuantizedTensor, allocate

__all__ = ["quantize", "record_amax_", "update_scales_"]


@torch.library.custom_op("graphrt::quantize", mutates_args=("amax",))
def _quantize(
    x: Tensor, scale: Tensor, scale_inv: Tensor, slot: int, dtype: torch.dtype, amax: Tensor | None, transpose: bool
) -> tuple[Tensor, Tensor, Tensor]:
    result = kernels.quantize(x, scale, scale_inv, slot, dtype, amax=amax, transpose=transpose)
    return _as_tensors(result, x)


@_quantize.register_fake
def _(
    x: Tensor, scale: Tensor, scale_inv: Tensor, slot: int, dtype: torch.dtype, amax: Tensor | None, transpose: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return _as_tensors(allocate(x, dtype, transpose), x)


@torch.library.custom_op("graphrt::quantize_out", mutates_args=("amax", "data", "transposed", "scale_inv_out"))
def _quantize_out(
    x: Tensor,
    scale: Tensor,
    scale_inv: Tensor,
    slot: int,
    amax: Tensor | None,
    data: Tensor,
    transposed: Tensor | None,
    scale_inv_out: Tensor,
) -> None:
    out = QuantizedTensor(data, transposed, scale_inv_out)
    kernels.quantize(x, scale, scale_inv, slot, data.dtype, amax=amax, transpose=transposed is not None, out=out)


@_quantize_out.register_fake
def _(
    x: Tensor,
    scale: Tensor,
    scale_inv: Tensor,
    slot: int,
    amax: Tensor | None,
    data: Tensor,
    transposed: Tensor | None,
    scale_inv_out: Tensor,
) -> None:
    return None


@torch.library.custom_op("graphrt::record_amax_", mutates_args=("amax",))
def _record_amax_(x: Tensor, amax: Tensor, slot: int) -> None:
    kernels.record_amax_(x, amax, slot)


@_record_amax_.register_fake
def _(x: Tensor, amax: Tensor, slot: int) -> None:
    return None


@torch.library.custom_op("graphrt::update_scales_", mutates_args=("amax_history", "scale", "scale_inv", "num_nonfinite", "num_updates"))
def _update_scales_(
    amax_history: Tensor,
    scale: Tensor,
    scale_inv: Tensor,
    num_nonfinite: Tensor,
    num_updates: Tensor,
    start: int,
    end: int,
    direction: int,
    fp8_max: float,
    margin: int,
    algo: str,
) -> None:
    state = (amax_history, scale, scale_inv, num_nonfinite, num_updates)
    kernels.update_scales_(*state, start=start, end=end, direction=direction, fp8_max=fp8_max, margin=margin, algo=algo)


@_update_scales_.register_fake
def _(
    amax_history: Tensor,
    scale: Tensor,
    scale_inv: Tensor,
    num_nonfinite: Tensor,
    num_updates: Tensor,
    start: int,
    end: int,
    direction: int,
    fp8_max: float,
    margin: int,
    algo: str,
) -> None:
    return None


def quantize(
    x: Tensor,
    scale: Tensor,
    scale_inv: Tensor,
    slot: int,
    dtype: torch.dtype,
    amax: Tensor | None,
    transpose: bool,
    out: QuantizedTensor | None,
) -> QuantizedTensor:
    """:func:`graphrt.kernels.quantize` as one traced operator. The result carries no gradient."""
    x = x.detach()
    if out is not None:
        _quantize_out(x, scale, scale_inv, slot, amax, out.data, out.transposed, out.scale_inv)
        return out
    data, transposed, result_scale_inv = _quantize(x, scale, scale_inv, slot, dtype, amax, transpose)
    return QuantizedTensor(data, transposed if transpose else None, result_scale_inv)


def record_amax_(x: Tensor, amax: Tensor, slot: int) -> None:
    """:func:`graphrt.kernels.record_amax_` as one traced operator."""
    _record_amax_(x.detach(), amax, slot)


#: :func:`graphrt.kernels.update_scales_` as one traced operator, its arguments in that order.
update_scales_ = _update_scales_


def _as_tensors(result: QuantizedTensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """An operator returns a fixed number of tensors: an empty one stands for no transposed copy."""
    transposed = result.transposed if result.transposed is not None else torch.empty(0, dtype=result.data.dtype, device=x.device)
    return result.data, transposed, result.scale_inv
