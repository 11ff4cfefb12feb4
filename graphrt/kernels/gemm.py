"""FP8 matrix multiplication: ``out = (a @ b_t^T) * (a_scale_inv * b_scale_inv) + bias``.

On a GPU ``torch._scaled_mm``, or cuBLASLt with another algorithm where one was found to be faster
(`graphrt.kernels.gemm_choice`).
"""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from graphrt.kernels.cublaslt_gemm import GemmKey
from graphrt.kernels.gemm_choice import ChosenGemm, Operands, choices
from graphrt.kernels.quantized import FP8_DTYPES

__all__ = ["scaled_mm"]

OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
DIM_MULTIPLE = 16
SCALE_ALIGNMENT_BYTES = 16  # of a scale's address: cuBLASLt refuses others
MATRIX_ALIGNMENT_BYTES = 256  # what cuBLASLt's algorithms count on unless they are told otherwise

_num_dispatch_modes = torch._C._len_torch_dispatch_stack


@runtime_checkable
class LaunchRecorder(Protocol):
    """A dispatch mode that also takes work done beside torch's operations, as a CUDA graph does."""

    def record_launch(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[[], Tensor]) -> Tensor:
        """Run ``run``, which computes what ``operation`` would."""
        ...


def scaled_mm(
    a: Tensor,
    a_scale_inv: Tensor,
    b_t: Tensor,
    b_scale_inv: Tensor,
    out_dtype: torch.dtype,
    *,
    fast_accum: bool,
    bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Multiply two FP8 matrices, both stored with the contraction innermost.

    Args:
        a: [M, K] fp8, row-major. M may be anything, 0 included.
        a_scale_inv: [1] fp32, at a 16-byte aligned address on CUDA.
        b_t: [N, K] fp8, row-major; K and N multiples of 16. At most one of ``a`` and ``b_t`` is e5m2.
        b_scale_inv: [1] fp32, like ``a_scale_inv``.
        out_dtype: bf16, fp16 or fp32.
        fast_accum: accumulate in the tensor cores' reduced precision; ignored on a CPU.
        bias: [N], added after scaling; any floating dtype. On CUDA one of the output's 16-bit dtype is added inside the
            GEMM, any other by a second kernel.
        out: [M, N] of ``out_dtype``, row-major, to write into.

    Returns:
        [M, N] of ``out_dtype``.

    Raises:
        ValueError: a shape, dtype or layout that FP8 GEMMs on the GPU refuse, refused on every device.
    """
    _check(a, a_scale_inv, b_t, b_scale_inv, out_dtype, bias)
    if a.shape[0] == 0 or a.shape[1] == 0 or b_t.shape[0] == 0 or not a.is_cuda:
        run = _reference if a.numel() and b_t.numel() else _multiply_nothing
        product = run(a, a_scale_inv, b_t, b_scale_inv, out_dtype, bias)
        return product if out is None else out.copy_(product)
    is_fused = bias is not None and bias.dtype is out_dtype and out_dtype is not torch.float32
    operands = Operands(a, a_scale_inv, b_t, b_scale_inv, bias if is_fused else None)
    chosen = _find_chosen(operands, out_dtype, fast_accum, out)
    if chosen is None:
        product = _multiply_by_torch(operands, out_dtype, fast_accum, out)
    else:
        product = _multiply_by_choice(chosen, operands, out_dtype, fast_accum, out)
    return product if bias is None or is_fused else product.add_(bias)


def _multiply_by_torch(operands: Operands, out_dtype: torch.dtype, fast_accum: bool, out: Tensor | None) -> Tensor:
    a, a_scale_inv, b_t, b_scale_inv, bias = operands
    keywords = {} if out is None else {"out": out}
    return torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
        a,
        b_t.t(),
        scale_a=a_scale_inv,
        scale_b=b_scale_inv,
        bias=bias,
        out_dtype=out_dtype,
        use_fast_accum=fast_accum,
        **keywords,
    )


def _find_chosen(operands: Operands, out_dtype: torch.dtype, fast_accum: bool, out: Tensor | None) -> ChosenGemm | None:
    """The product to run instead of torch's, where one was chosen and takes these tensors."""
    a, _, b_t, _, bias = operands
    (m, k), n = a.shape, b_t.shape[0]
    if torch.compiler.is_compiling() or m % DIM_MULTIPLE or (_num_dispatch_modes() and _is_watched()):
        return None
    if out is not None and not (out.dtype is out_dtype and out.shape == (m, n) and out.is_contiguous()):
        return None
    addresses = a.data_ptr() | b_t.data_ptr() | (0 if bias is None else bias.data_ptr()) | (0 if out is None else out.data_ptr())
    if addresses % MATRIX_ALIGNMENT_BYTES:
        return None
    key = GemmKey(a.get_device(), m, n, k, a.dtype, b_t.dtype, out_dtype, fast_accum, bias is not None)
    return choices.find(key, operands)


def _is_watched() -> bool:
    """Whether somebody counts, saves or replaces torch's operations, and is to see this one called."""
    return not all(isinstance(mode, LaunchRecorder) for mode in _get_current_dispatch_mode_stack())


def _multiply_by_choice(chosen: ChosenGemm, operands: Operands, out_dtype: torch.dtype, fast_accum: bool, out: Tensor | None) -> Tensor:
    a, a_scale_inv, b_t, b_scale_inv, bias = operands

    def run() -> Tensor:
        product = torch.empty((a.shape[0], b_t.shape[0]), dtype=out_dtype, device=a.device) if out is None else out
        chosen.multiply(operands, product)
        if out is not None:
            # As torch's call does: autograd sees by it that a gradient it saved has changed.
            torch.autograd.graph.increment_version(out)
        return product

    if not _num_dispatch_modes():
        return run()
    recorder = _get_current_dispatch_mode_stack()[-1]
    assert isinstance(recorder, LaunchRecorder)
    operation = torch.ops.aten._scaled_mm.default if out is None else torch.ops.aten._scaled_mm.out
    arguments = (a, b_t.t(), a_scale_inv, b_scale_inv, bias, None, out_dtype, fast_accum)
    return recorder.record_launch(operation, arguments, {} if out is None else {"out": out}, run)


def _reference(a: Tensor, a_scale_inv: Tensor, b_t: Tensor, b_scale_inv: Tensor, out_dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    # Autocast would round the fp32 sums to bf16.
    with torch.autocast("cpu", enabled=False):
        product = (a.float() @ b_t.float().t()) * (a_scale_inv * b_scale_inv)
    return (product if bias is None else product + bias.float()).to(out_dtype)


def _multiply_nothing(a: Tensor, _a_inv: Tensor, b_t: Tensor, _b_inv: Tensor, out_dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    """The result when M, K or N is 0, which cuBLASLt does not take."""
    out = torch.zeros((a.shape[0], b_t.shape[0]), dtype=out_dtype, device=a.device)
    return out if bias is None else out.add_(bias)


def _check(a: Tensor, a_scale_inv: Tensor, b_t: Tensor, b_scale_inv: Tensor, out_dtype: torch.dtype, bias: Tensor | None) -> None:
    for name, matrix in (("a", a), ("b_t", b_t)):
        if matrix.dtype not in FP8_DTYPES or matrix.dim() != 2 or not matrix.is_contiguous():
            raise ValueError(
                f"{name} is {matrix.dtype} {list(matrix.shape)} with strides {list(matrix.stride())}, expected a row-major FP8 matrix."
            )
    if a.dtype is torch.float8_e5m2 and b_t.dtype is torch.float8_e5m2:
        raise ValueError("a and b_t are both float8_e5m2, which FP8 GEMMs refuse. Make one of them float8_e4m3fn.")
    if a.shape[1] != b_t.shape[1]:
        raise ValueError(f"a has K = {a.shape[1]} and b_t has K = {b_t.shape[1]}, expected the same contraction.")
    for name, size in (("K", a.shape[1]), ("N", b_t.shape[0])):
        if size % DIM_MULTIPLE:
            raise ValueError(f"{name} is {size}, expected a multiple of {DIM_MULTIPLE}. Pad it with zeros: FP8 GEMMs take no other.")
    if a.device != b_t.device:
        raise ValueError(f"a is on {a.device} and b_t on {b_t.device}, expected one device.")
    _check_scale("a_scale_inv", a_scale_inv, a.device)
    _check_scale("b_scale_inv", b_scale_inv, a.device)
    if out_dtype not in OUT_DTYPES:
        raise ValueError(f"out_dtype is {out_dtype}, expected bfloat16, float16 or float32.")
    if bias is not None and bias.shape != (b_t.shape[0],):
        raise ValueError(f"bias has shape {list(bias.shape)}, expected [{b_t.shape[0]}], the rows of b_t.")


def _check_scale(name: str, scale: Tensor, device: torch.device) -> None:
    if scale.dtype is not torch.float32 or scale.numel() != 1 or scale.device != device:
        raise ValueError(f"{name} is {scale.dtype} {list(scale.shape)} on {scale.device}, expected float32 [1] on {device}.")
    if scale.is_cuda and not torch.compiler.is_compiling() and scale.data_ptr() % SCALE_ALIGNMENT_BYTES:
        raise ValueError(f"{name} is at an address that is no multiple of {SCALE_ALIGNMENT_BYTES} bytes. Use QuantizedTensor.scale_inv.")
