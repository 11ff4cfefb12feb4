"""The result of a quantization, and what its arguments must look like on every device."""

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["FP8_DTYPES", "TRANSPOSE_MULTIPLE", "QuantizeTo", "QuantizedTensor", "allocate", "check_arguments", "transposed_shape"]

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
INPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

#: FP8 GEMMs contract over multiples of 16, so the transposed copy pads its rows (the contraction of a weight gradient) to one.
TRANSPOSE_MULTIPLE = 16


class QuantizedTensor(NamedTuple):
    """An FP8 tensor, with the ``scale_inv`` it was made with: ``x`` is about ``data.float() * scale_inv``."""

    data: Tensor  # [rows, cols] fp8, row-major
    transposed: Tensor | None  # [cols, ceil16(rows)] fp8, row-major, the pad columns zero; None without transpose
    scale_inv: Tensor  # [1] fp32, own storage: a later update of the slot never changes data already quantized


class QuantizeTo(NamedTuple):
    """Where and how a fused kernel quantizes its output; the arguments of ``graphrt.kernels.quantize``."""

    scale: Tensor  # [n] fp32
    scale_inv: Tensor  # [n, 4] fp32, column 0 the value
    slot: int
    dtype: torch.dtype  # torch.float8_e4m3fn or torch.float8_e5m2
    amax: Tensor | None  # [n] fp32, the staging row; None records nothing
    transpose: bool = True


def transposed_shape(rows: int, cols: int) -> tuple[int, int]:
    """Shape of the transposed copy of a ``[rows, cols]`` tensor."""
    return cols, -(-rows // TRANSPOSE_MULTIPLE) * TRANSPOSE_MULTIPLE


def allocate(x: Tensor, dtype: torch.dtype, transpose: bool) -> QuantizedTensor:
    """Uninitialised storage for the quantized ``x``."""
    rows, cols = x.shape
    data = torch.empty((rows, cols), dtype=dtype, device=x.device)
    transposed = torch.empty(transposed_shape(rows, cols), dtype=dtype, device=x.device) if transpose else None
    return QuantizedTensor(data, transposed, torch.empty(1, dtype=torch.float32, device=x.device))


def check_input(x: Tensor) -> None:
    """Raise ValueError unless the kernels read ``x``'s dtype."""
    if x.dtype not in INPUT_DTYPES:
        raise ValueError(f"x has dtype {x.dtype}, expected bfloat16, float16 or float32. Convert it first.")


def check_staging_row(amax: Tensor, slot: int, device: torch.device) -> None:
    """Raise ValueError unless ``amax`` is a staging row of ``device`` with the slot ``slot``."""
    if amax.dtype is not torch.float32 or amax.dim() != 1 or not amax.is_contiguous() or amax.device != device:
        raise ValueError(
            f"amax is {_describe(amax)}, expected a contiguous float32 [n] on {device}. Pass the staging row, amax_history[0]."
        )
    _check_slot("amax", slot, amax.shape[0])


def check_arguments(x: Tensor, scale: Tensor, scale_inv: Tensor, slot: int, dtype: torch.dtype, amax: Tensor | None) -> None:
    """Raise ValueError, naming the argument, unless ``quantize`` can take these."""
    check_input(x)
    device = x.device
    if x.dim() != 2:
        raise ValueError(f"x has shape {list(x.shape)}, expected two dimensions. Flatten the leading ones with x.flatten(0, -2).")
    if dtype not in FP8_DTYPES:
        raise ValueError(f"dtype is {dtype}, expected torch.float8_e4m3fn or torch.float8_e5m2.")
    if scale.dtype is not torch.float32 or scale.dim() != 1 or not scale.is_contiguous() or scale.device != device:
        raise ValueError(f"scale is {_describe(scale)}, expected a contiguous float32 [n] on {device}.")
    _check_slot("scale", slot, scale.shape[0])
    if scale_inv.dtype is not torch.float32 or not scale_inv.is_contiguous() or scale_inv.shape != (scale.shape[0], 4):
        raise ValueError(f"scale_inv is {_describe(scale_inv)}, expected a contiguous float32 [{scale.shape[0]}, 4].")
    if scale_inv.device != device:
        raise ValueError(f"scale_inv is on {scale_inv.device}, expected {device}, where x is.")
    if amax is not None:
        check_staging_row(amax, slot, device)


def check_out(out: QuantizedTensor, x: Tensor, dtype: torch.dtype, transpose: bool) -> None:
    """Raise ValueError unless ``out`` can hold the quantized ``x``."""
    rows, cols = x.shape
    if (out.transposed is not None) != transpose:
        raise ValueError(f"out.transposed is {'None' if transpose else 'a tensor'}, but transpose is {transpose}. Make both agree.")
    expected = [("data", out.data, dtype, (rows, cols)), ("scale_inv", out.scale_inv, torch.float32, (1,))]
    if out.transposed is not None:
        expected.append(("transposed", out.transposed, dtype, transposed_shape(rows, cols)))
    for name, tensor, want, shape in expected:
        if tensor.dtype is not want or tensor.shape != shape or not tensor.is_contiguous() or tensor.device != x.device:
            raise ValueError(f"out.{name} is {_describe(tensor)}, expected a contiguous {want} {list(shape)} on {x.device}.")


def check_update_arguments(
    amax_history: Tensor,
    scale: Tensor,
    scale_inv: Tensor,
    num_nonfinite: Tensor,
    num_updates: Tensor,
    start: int,
    end: int,
    direction: int,
    algo: str,
) -> None:
    """Raise ValueError, naming the argument, unless ``update_scales_`` can take these."""
    if amax_history.dim() != 2 or amax_history.shape[0] < 1:
        raise ValueError(f"amax_history is {_describe(amax_history)}, expected [H, n] with at least the staging row.")
    num_slots = amax_history.shape[1]
    expected = [
        ("amax_history", amax_history, torch.float32, amax_history.shape),
        ("scale", scale, torch.float32, (num_slots,)),
        ("scale_inv", scale_inv, torch.float32, (num_slots, 4)),
        ("num_nonfinite", num_nonfinite, torch.int32, (num_slots,)),
        ("num_updates", num_updates, torch.int64, (2,)),
    ]
    for name, tensor, dtype, shape in expected:
        if tensor.dtype is not dtype or tensor.shape != shape or not tensor.is_contiguous() or tensor.device != amax_history.device:
            raise ValueError(f"{name} is {_describe(tensor)}, expected a contiguous {dtype} {list(shape)} on {amax_history.device}.")
    if not 0 <= start <= end <= num_slots:
        raise ValueError(f"start and end are {start} and {end}, expected 0 <= start <= end <= {num_slots}, the number of slots.")
    if direction not in (0, 1):
        raise ValueError(f"direction is {direction}, expected 0 (forward) or 1 (backward).")
    if algo not in ("max", "most_recent"):
        raise ValueError(f"algo is {algo!r}, expected 'max' or 'most_recent'.")


def _check_slot(name: str, slot: int, num_slots: int) -> None:
    if not 0 <= slot < num_slots:
        raise ValueError(f"slot is {slot}, expected 0 <= slot < {num_slots}, the length of {name}.")


def _describe(tensor: Tensor) -> str:
    layout = "contiguous" if tensor.is_contiguous() else "non-contiguous"
    return f"{layout} {tensor.dtype} {list(tensor.shape)} on {tensor.device}"
