"""The shared kernels: quantize to FP8, record an amax, update the scales, multiply FP8 matrices.

Each function runs the CUDA C++ kernel on a CUDA tensor and the plain torch reference, its specification, elsewhere.
Both give the same bits. While torch.compile traces, they become the custom operators of :mod:`graphrt.kernels.ops`;
eager calls skip that wrapper, which costs eight launches' worth of host time.
"""

import torch
from torch import Tensor

from graphrt.kernels import launcher, ops, reference
from graphrt.kernels.device import preload
from graphrt.kernels.gemm import scaled_mm
from graphrt.kernels.quantize_table import QuantizeEntry, QuantizeTable, quantize_many
from graphrt.kernels.quantized import (
    QuantizedTensor,
    QuantizeTo,
    allocate,
    check_arguments,
    check_input,
    check_out,
    check_staging_row,
    check_update_arguments,
)

__all__ = [
    "QuantizeEntry",
    "QuantizeTable",
    "QuantizeTo",
    "QuantizedTensor",
    "allocate",
    "preload",
    "quantize",
    "quantize_many",
    "quantize_transposed",
    "record_amax_",
    "scaled_mm",
    "update_scales_",
]


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
    """Quantize a matrix with its slot's current scale: ``q = saturating_cast(x.float() * scale[slot])``.

    Saturating: beyond the format's largest finite value clamps, inf becomes that value, NaN stays NaN. Rounds to nearest
    even. No host sync; may be captured in a CUDA graph.

    Args:
        x: [rows, cols], bf16, fp16 or fp32, any strides (made contiguous if it is not).
        scale: [n] fp32.
        scale_inv: [n, 4] fp32; column 0 is the value, the stride of 16 bytes is what FP8 GEMMs ask of a scale's address.
        slot: row of ``scale`` and ``scale_inv``, column of ``amax``.
        dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        amax: [n] fp32, the staging row; ``max|x|`` before scaling is merged into ``amax[slot]`` in place (see
            :func:`record_amax_`). None records nothing.
        transpose: also write the transposed copy, [cols, ceil16(rows)], its pad columns zero.
        out: a result to write into, for static addresses.

    Raises:
        ValueError: an argument has another shape, dtype, device or layout than above; the message names it.
        GraphrtError: the kernels cannot be compiled or loaded for the device.
    """
    if torch.compiler.is_compiling():
        return ops.quantize(x, scale, scale_inv, slot, dtype, amax, transpose, out)
    check_arguments(x, scale, scale_inv, slot, dtype, amax)
    if out is not None:
        check_out(out, x, dtype, transpose)
    run = launcher.quantize if x.is_cuda else reference.quantize
    return run(x, scale, scale_inv, slot, dtype, amax=amax, transpose=transpose, out=out)


def quantize_transposed(x: Tensor, scale: Tensor, scale_inv: Tensor, slot: int, dtype: torch.dtype) -> Tensor:
    """The transposed copy that :func:`quantize` makes beside the other, alone, to the same bits: [cols, ceil16(rows)].

    Args:
        x, scale, scale_inv, slot, dtype: as of :func:`quantize`.

    Raises:
        ValueError: as :func:`quantize`.
        GraphrtError: the kernels cannot be compiled or loaded for the device.
    """
    check_arguments(x, scale, scale_inv, slot, dtype, None)
    if x.is_cuda:
        return launcher.quantize_transposed(x, scale, slot, dtype)
    transposed = reference.quantize(x, scale, scale_inv, slot, dtype, transpose=True).transposed
    assert transposed is not None
    return transposed


def record_amax_(x: Tensor, amax: Tensor, slot: int) -> None:
    """Merge ``max|x|`` into ``amax[slot]`` in place, by an integer maximum of the absolute bits: NaN > inf > finite.

    Args:
        x: any shape, bf16, fp16 or fp32, any strides.
        amax: [n] fp32, the staging row.
        slot: index into ``amax``.

    Raises:
        ValueError: an argument has another shape, dtype, device or layout than above; the message names it.
    """
    if torch.compiler.is_compiling():
        ops.record_amax_(x, amax, slot)
        return
    check_input(x)
    check_staging_row(amax, slot, x.device)
    (launcher.record_amax_ if x.is_cuda else reference.record_amax_)(x, amax, slot)


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
    """The delayed update of the slots [start, end), in place, in one launch.

    For a slot with staging value ``s = amax_history[0, slot]``:

    - ``s == 0`` (not used since the last update): nothing changes.
    - ``s`` not finite: scale and history stay, row 0 becomes 0, ``num_nonfinite`` counts one.
    - else ``amax`` is the maximum of all rows ("max") or ``s`` ("most_recent"); rows 1.. move one towards the oldest
      (``row[i] = row[i + 1]``), ``row[H - 1] = s``, row 0 becomes 0; ``scale = (fp8_max / amax) / 2**margin``, inf
      becoming FLT_MAX; ``scale_inv = 1 / scale``. IEEE divisions, subnormals kept.

    ``num_updates[direction]`` counts one in every case.

    Args:
        amax_history: [H, n] fp32, H >= 1; row 0 the staging row, rows 1.. oldest to newest.
        scale: [n] fp32.
        scale_inv: [n, 4] fp32, column 0 the value.
        num_nonfinite: [n] int32.
        num_updates: [2] int64, forward and backward.
        start: first slot.
        end: one past the last slot.
        direction: 0 forward, 1 backward.
        fp8_max: 448 for e4m3, 57344 for e5m2.
        margin: from -32 to 32.
        algo: "max" or "most_recent".

    Raises:
        ValueError: an argument has another shape, dtype, device or value than above; the message names it.
    """
    state = (amax_history, scale, scale_inv, num_nonfinite, num_updates)
    if torch.compiler.is_compiling():
        ops.update_scales_(*state, start, end, direction, fp8_max, margin, algo)
        return
    check_update_arguments(*state, start, end, direction, algo)
    run = launcher.update_scales_ if amax_history.is_cuda else reference.update_scales_
    run(*state, start=start, end=end, direction=direction, fp8_max=fp8_max, margin=margin, algo=algo)
