"""The kernels in plain torch: their specification, and what runs on a CPU.

Every CUDA kernel equals these functions bit for bit. They read no value on the host, so a recorder can replay them.
"""

import torch
from torch import Tensor

from graphrt.kernels.quantized import QuantizedTensor, allocate, transposed_shape
from graphrt.recipe import FP8_MAX

__all__ = ["quantize", "record_amax_", "saturating_cast", "update_scales_"]

_ABS_MASK = 0x7FFFFFFF
_FP8_NAN = 0x7F  # what cvt.satfinite writes for a NaN of either sign, in e4m3 and in e5m2


def saturating_cast(values: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32 to FP8, round to nearest even: beyond the largest finite value clamps, inf becomes it, NaN becomes 0x7f.

    The clamp comes first because plain casts differ between torch releases: some turn 449 into NaN.
    """
    largest = FP8_MAX[dtype]
    cast = values.clamp(-largest, largest).to(dtype)
    return cast.view(torch.uint8).masked_fill(values.isnan(), _FP8_NAN).view(dtype)


def quantize(
    x: Tensor,
    scale: Tensor,
    scale_inv: Tensor,
    slot: int,
    dtype: torch.dtype,
    *,
    amax: Tensor | None = None,
    transpose: bool = False,
    out: QuantizedTensor | None = None,
) -> QuantizedTensor:
    """``q = saturating_cast(x.float() * scale[slot])``; see :func:`graphrt.kernels.quantize`."""
    x = x.detach()
    rows, cols = x.shape
    result = allocate(x, dtype, transpose) if out is None else out
    if amax is not None:
        record_amax_(x, amax, slot)
    result.data.copy_(saturating_cast(x.float() * scale[slot], dtype))
    if result.transposed is not None:
        result.transposed[:, :rows].copy_(result.data.t())
        result.transposed.view(torch.uint8)[:, rows : transposed_shape(rows, cols)[1]].zero_()
    result.scale_inv.copy_(scale_inv[slot, :1])
    return result


def record_amax_(x: Tensor, amax: Tensor, slot: int) -> None:
    """Merge ``max|x|`` into ``amax[slot]``: an integer maximum of the absolute bits, so NaN > inf > finite."""
    if x.numel() == 0:
        return
    bits = x.detach().float().contiguous().view(torch.int32) & _ABS_MASK
    staging = amax.view(torch.int32)[slot]
    staging.copy_(torch.maximum(staging, bits.amax()))


def update_scales_(
    amax_history: Tensor,
    scale: Tensor,
    scale_inv: Tensor,
    num_nonfinite: Tensor,
    num_updates: Tensor,
    *,
    start: int,
    end: int,
    direction: int,
    fp8_max: float,
    margin: int,
    algo: str,
) -> None:
    """The delayed update of slots [start, end), in place; see :func:`graphrt.kernels.update_scales_`."""
    num_updates[direction : direction + 1].add_(1)
    if start == end:
        return
    history = amax_history[:, start:end]
    staging = history[0].clone()
    is_finite = staging.isfinite()
    is_rolled = (staging != 0) & is_finite
    amax = history.amax(0) if algo == "max" else staging

    new_scale = _scale_from(amax, fp8_max, margin)
    scale[start:end].copy_(torch.where(is_rolled, new_scale, scale[start:end]))
    inverse = scale_inv[start:end, 0]
    inverse.copy_(torch.where(is_rolled, torch.div(torch.ones_like(new_scale), new_scale), inverse))
    num_nonfinite[start:end].add_((~is_finite).to(torch.int32))
    _roll_(history, staging, is_rolled)


def _scale_from(amax: Tensor, fp8_max: float, margin: int) -> Tensor:
    """``(fp8_max / amax) / 2**margin`` in fp32; inf becomes FLT_MAX.

    Tensor by tensor: torch evaluates ``float / tensor`` as a multiplication by a rounded reciprocal.
    """
    scale = torch.div(torch.full_like(amax, fp8_max), amax)
    scale = torch.div(scale, torch.full_like(amax, 2.0**margin))
    return torch.where(scale.isinf(), torch.finfo(torch.float32).max, scale)


def _roll_(history: Tensor, staging: Tensor, is_rolled: Tensor) -> None:
    """Rows 1.. of the slots in ``is_rolled`` move one towards the oldest, staging becomes the newest; row 0 of all becomes 0."""
    if history.shape[0] > 1:
        shifted = torch.cat([history[2:], staging[None]])
        history[1:].copy_(torch.where(is_rolled, shifted, history[1:]))
    history[0].zero_()
