"""What the fused kernels share on the host: checks of their arguments, storage for their results, addresses."""

import torch
from torch import Tensor

from graphrt.kernels.quantized import INPUT_DTYPES, QuantizedTensor, QuantizeTo, check_arguments, transposed_shape

__all__ = [
    "aligned",
    "allocate_result",
    "check_again",
    "check_columns",
    "check_matrix",
    "check_target",
    "check_tensor",
    "output_addresses",
    "output_name",
    "slot_addresses",
]

_COLUMN_MULTIPLE = 16
MAX_COLUMNS = 16384
_OUTPUT_NAMES = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}


def check_matrix(name: str, x: Tensor) -> None:
    """Raise ValueError unless ``x`` is a matrix the fused kernels read: bf16 on CUDA, also fp16 and fp32 elsewhere."""
    if x.dim() != 2:
        raise ValueError(f"{name} has shape {list(x.shape)}, expected two dimensions. Flatten the leading ones with .flatten(0, -2).")
    if x.dtype not in INPUT_DTYPES:
        raise ValueError(f"{name} has dtype {x.dtype}, expected bfloat16, float16 or float32. Convert it first.")
    if x.is_cuda and x.dtype is not torch.bfloat16:
        raise ValueError(f"{name} has dtype {x.dtype}, expected bfloat16: the CUDA kernel reads nothing else. Convert it first.")


def check_columns(name: str, num_columns: int) -> None:
    """Raise ValueError unless rows of so many elements are whole 32-byte pieces that a block can hold."""
    if num_columns % _COLUMN_MULTIPLE or not 0 < num_columns <= MAX_COLUMNS:
        raise ValueError(f"{name} is {num_columns}, expected a multiple of {_COLUMN_MULTIPLE} from {_COLUMN_MULTIPLE} to {MAX_COLUMNS}.")


def check_tensor(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """Raise ValueError unless ``tensor`` is as the others of the call require."""
    if tensor.shape != shape or tensor.dtype is not dtype or tensor.device != device:
        raise ValueError(f"{name} is a {tensor.dtype} {list(tensor.shape)} on {tensor.device}, expected {dtype} {list(shape)} on {device}.")


def check_target(to: QuantizeTo | None, x: Tensor) -> None:
    """Raise ValueError unless a result on ``x``'s device can be quantized with ``to``."""
    if to is not None:
        check_arguments(x, to.scale, to.scale_inv, to.slot, to.dtype, to.amax)


def check_again(name: str, to: QuantizeTo, x: Tensor) -> None:
    """Raise ValueError unless a backward on ``x``'s device can quantize with ``to`` what its forward has quantized before."""
    check_target(to, x)
    if to.dtype is not torch.float8_e4m3fn or to.amax is not None:
        amax = "without" if to.amax is None else "with"
        raise ValueError(
            f"{name} is {str(to.dtype).removeprefix('torch.')} {amax} an amax, expected float8_e4m3fn without. "
            "Pass what the forward quantized with, and amax=None: it has recorded it."
        )


def aligned(x: Tensor) -> Tensor:
    """``x`` contiguous and at an address of 16 bytes: copied if it is not."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


def allocate_result(rows: int, cols: int, like: Tensor, to: QuantizeTo | None) -> Tensor | QuantizedTensor:
    """Uninitialised storage for a result of ``rows x cols``: of ``like``'s dtype, or quantized."""
    if to is None:
        return torch.empty((rows, cols), dtype=like.dtype, device=like.device)
    data = torch.empty((rows, cols), dtype=to.dtype, device=like.device)
    transposed = torch.empty(transposed_shape(rows, cols), dtype=to.dtype, device=like.device) if to.transpose else None
    return QuantizedTensor(data, transposed, torch.empty(1, dtype=torch.float32, device=like.device))


def output_name(to: QuantizeTo | None) -> str:
    """What a kernel's name says it writes."""
    return "bf16" if to is None else _OUTPUT_NAMES[to.dtype]


def output_addresses(result: Tensor | QuantizedTensor) -> tuple[int, int]:
    """Addresses of the row-major result and of its transposed copy, 0 without one."""
    if isinstance(result, Tensor):
        return result.data_ptr(), 0
    return result.data.data_ptr(), 0 if result.transposed is None else result.transposed.data_ptr()


def slot_addresses(to: QuantizeTo | None, result: Tensor | QuantizedTensor) -> tuple[int, int, int, int]:
    """Addresses of the slot's scale and scale_inv, of the result's scale_inv, and of the slot's amax; 0 where there is none."""
    if to is None or isinstance(result, Tensor):
        return 0, 0, 0, 0
    amax = 0 if to.amax is None else to.amax.data_ptr() + 4 * to.slot
    return to.scale.data_ptr() + 4 * to.slot, to.scale_inv.data_ptr() + 16 * to.slot, result.scale_inv.data_ptr(), amax
