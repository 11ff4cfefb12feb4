"""From tensors to a kernel's name, grid and arguments. Tensors are on one CUDA device and checked by the caller."""

import torch
from torch import Tensor

from graphrt.kernels import device
from graphrt.kernels.quantized import QuantizedTensor, allocate, transposed_shape

__all__ = ["quantize", "quantize_transposed", "record_amax_", "update_scales_"]

# These mirror the constants of quantize.cu and scale_update.cu.
_THREADS = 256
_TILE_ROWS, _TILE_COLS = 128, 64
_LOADS = 4
_UPDATE_THREADS = 1024
_UPDATE_SLOTS = 8

_INPUT_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_FP8_NAMES = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
_ELEMENTS = {torch.bfloat16: 8, torch.float16: 8, torch.float32: 4}  # in 16 bytes
_TRANSPOSE_KERNELS = {
    (i, o): f"graphrt_quantize_transpose_{i_name}_{o_name}" for i, i_name in _INPUT_NAMES.items() for o, o_name in _FP8_NAMES.items()
}
_ROWS_KERNELS = {
    (i, o): f"graphrt_quantize_rows_{i_name}_{o_name}" for i, i_name in _INPUT_NAMES.items() for o, o_name in _FP8_NAMES.items()
}
_AMAX_KERNELS = {i: f"graphrt_record_amax_{name}" for i, name in _INPUT_NAMES.items()}


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
    """:func:`graphrt.kernels.quantize` on the GPU: one launch."""
    result = allocate(x, dtype, transpose) if out is None else out
    rows, cols = x.shape
    if rows == 0 or cols == 0:
        result.scale_inv.copy_(scale_inv[slot, :1])
        return result
    x = x.contiguous()
    slot_args = (
        scale.data_ptr() + 4 * slot,
        scale_inv.data_ptr() + 16 * slot,
        result.scale_inv.data_ptr(),
        0 if amax is None else amax.data_ptr() + 4 * slot,
    )
    if result.transposed is None:
        _quantize_rows(x, result.data, slot_args)
    else:
        _quantize_transpose(x, result.data, result.transposed, slot_args)
    return result


def _quantize_rows(x: Tensor, data: Tensor, slot_args: tuple[int, int, int, int]) -> None:
    count = x.numel()
    address, data_address = x.data_ptr(), data.data_ptr()
    is_aligned = (address | data_address) % 16 == 0
    args = (address, data_address, *slot_args, count, int(is_aligned))
    device.launch(x.get_device(), _ROWS_KERNELS[x.dtype, data.dtype], _num_flat_blocks(x, count), _THREADS, args)


def _quantize_transpose(x: Tensor, data: Tensor, transposed: Tensor, slot_args: tuple[int, int, int, int]) -> None:
    _launch_tiles(x, data.data_ptr(), transposed, slot_args)


def _launch_tiles(x: Tensor, data_address: int, transposed: Tensor, slot_args: tuple[int, int, int, int]) -> None:
    rows, cols = x.shape
    address, transposed_address = x.data_ptr(), transposed.data_ptr()
    is_aligned = (address | data_address | transposed_address) % 16 == 0 and cols % _ELEMENTS[x.dtype] == 0
    num_blocks = -(-rows // _TILE_ROWS) * -(-cols // _TILE_COLS)
    args = (address, data_address, transposed_address, *slot_args, rows, cols, int(is_aligned))
    device.launch(x.get_device(), _TRANSPOSE_KERNELS[x.dtype, transposed.dtype], num_blocks, _THREADS, args)


def quantize_transposed(x: Tensor, scale: Tensor, slot: int, dtype: torch.dtype) -> Tensor:
    """:func:`graphrt.kernels.quantize_transposed` on the GPU: one launch."""
    transposed = torch.empty(transposed_shape(*x.shape), dtype=dtype, device=x.device)
    if transposed.numel():
        _launch_tiles(x.contiguous(), 0, transposed, (scale.data_ptr() + 4 * slot, 0, 0, 0))
    return transposed


def record_amax_(x: Tensor, amax: Tensor, slot: int) -> None:
    """:func:`graphrt.kernels.record_amax_` on the GPU: one launch."""
    count = x.numel()
    if count == 0:
        return
    x = x.contiguous()
    address = x.data_ptr()
    args = (address, amax.data_ptr() + 4 * slot, count, int(address % 16 == 0))
    device.launch(x.get_device(), _AMAX_KERNELS[x.dtype], _num_flat_blocks(x, count), _THREADS, args)


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
    """:func:`graphrt.kernels.update_scales_` on the GPU: one launch, also for an empty range (it counts the update)."""
    num_rows, num_slots = amax_history.shape
    state = (amax_history, scale, scale_inv, num_nonfinite, num_updates)
    addresses = [tensor.data_ptr() for tensor in state]
    rule = (float(fp8_max), 2.0**margin, int(algo == "max"))
    args = (*addresses, num_rows, num_slots, start, end, direction, *rule)
    num_blocks = max(1, -(-(end - start) // _UPDATE_SLOTS))
    device.launch(amax_history.get_device(), "graphrt_update_scales", num_blocks, _UPDATE_THREADS, args)


def _num_flat_blocks(x: Tensor, count: int) -> int:
    return -(-count // (_THREADS * _LOADS * _ELEMENTS[x.dtype]))
