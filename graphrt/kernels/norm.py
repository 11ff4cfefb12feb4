"""RMSNorm (Zhang and Sennrich, 2019) with the residual add in front and the quantization behind, and its backward.

The reference and the CUDA kernel give the same bits: the order of every sum is part of the specification, each step is
rounded as written, and ``rstd`` comes from an IEEE division and square root. ``rstd`` therefore differs from
``torch.rsqrt(x.square().mean(-1) + eps)`` by a few units in the last place.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from graphrt.kernels import device, reference
from graphrt.kernels.fused import (
    aligned,
    allocate_result,
    check_again,
    check_columns,
    check_matrix,
    check_target,
    check_tensor,
    output_addresses,
    output_name,
    slot_addresses,
)
from graphrt.kernels.quantized import QuantizedTensor, QuantizeTo, transposed_shape

__all__ = ["SumInto", "rms_norm", "rms_norm_backward", "rms_norm_input_grad", "rms_norm_transposed"]

# These mirror the constants of norm.cu.
_VECTOR = 8  # columns in 16 bytes
_WARP = 32
_MAX_THREADS = 1024
_WIDE_VECTORS = 4
_BLOCK_ROWS = 16  # of a block, where there are rows enough for all
_MIN_BLOCKS = 264  # two on each of an H200's multiprocessors; fewer rows than these take are spread over as many blocks
_TILE_ROWS, _TILE_COLS, _TILE_THREADS = 128, 128, 256
_AGAIN_TILE_ROWS, _AGAIN_TILE_COLS = 128, 64  # of rms_norm_transposed: those of fp8_tile in common.cuh
_MAX_PARTIALS = 1024
_SUM_COLUMNS, _SUM_THREADS = 32, 1024


@dataclass(frozen=True, eq=False)
class SumInto:
    """Computes a gradient of the norm's weight, [D] fp32, into the contiguous tensor it is called with, or a new one for None.

    Attributes:
        compute: does it.
        reads: what it reads, to be kept until it has run.
    """

    compute: Callable[[Tensor | None], Tensor]
    reads: tuple[Tensor, ...]

    def __call__(self, out: Tensor | None) -> Tensor:
        return self.compute(out)


def rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, *, to: QuantizeTo | None = None
) -> tuple[Tensor, Tensor | QuantizedTensor, Tensor]:
    """``n = bf16(r * rstd * weight)`` of the stream ``r = bf16(x + residual)``, with ``rstd = 1 / sqrt(mean(r^2) + eps)``.

    Args:
        x: [rows, D] bf16, D a multiple of 16 up to 16384; on a CPU also fp16 or fp32. What a block adds to the stream, or
            the stream itself.
        residual: [rows, D], of ``x``'s dtype: the stream so far, or None.
        weight: [D] fp32 (bf16 and fp16 are converted at each call).
        eps: added to the mean.
        to: where to quantize n, as :func:`graphrt.kernels.quantize` does; None for n itself.

    Returns:
        residual_out: the stream r, [rows, D] of ``x``'s dtype; ``x`` itself without a residual.
        out: n, [rows, D] of ``x``'s dtype, or quantized.
        rstd: [rows] fp32.

    Raises:
        ValueError: an argument has another shape, dtype or device than above; the message names it.
        GraphrtError: the kernels cannot be compiled or loaded for the device.
    """
    _check_stream("x", x, weight)
    if residual is not None:
        check_tensor("residual", residual, tuple(x.shape), x.dtype, x.device)
    check_target(to, x)
    run = _launch_forward if x.is_cuda else _compute_forward
    return run(x, residual, weight.detach().float(), eps, to)


def rms_norm_backward(grad_out: Tensor, x: Tensor, rstd: Tensor, weight: Tensor, grad_residual: Tensor | None) -> tuple[Tensor, Tensor]:
    """The gradients of :func:`rms_norm`'s stream and weight.

    With ``gw = grad_out * weight``: ``grad_x = bf16((gw - x * mean(gw * x) * rstd^2) * rstd + grad_residual)``, and
    ``grad_weight = sum over rows of grad_out * (x * rstd)``.

    Args:
        grad_out: [rows, D], the gradient of n, of ``x``'s dtype.
        x: [rows, D], the stream: residual_out of the forward.
        rstd: [rows] fp32, from the forward.
        weight: [D] fp32 (bf16 and fp16 are converted at each call).
        grad_residual: [rows, D] of ``x``'s dtype, the gradient that reaches the stream from behind the norm; or None.

    Returns:
        grad_x: [rows, D] of ``x``'s dtype; the gradient of both what was added and the residual.
        grad_weight: [D] fp32.

    Raises:
        ValueError: an argument has another shape, dtype or device than above; the message names it.
        GraphrtError: the kernels cannot be compiled or loaded for the device.
    """
    grad_x, sum_into = rms_norm_input_grad(grad_out, x, rstd, weight, grad_residual)
    return grad_x, sum_into(None)


def rms_norm_input_grad(grad_out: Tensor, x: Tensor, rstd: Tensor, weight: Tensor, grad_residual: Tensor | None) -> tuple[Tensor, SumInto]:
    """:func:`rms_norm_backward` with the sum over rows left to the caller: the weight's gradient can go where it belongs.

    Arguments and errors are the same.

    Returns:
        grad_x: [rows, D] of ``x``'s dtype.
        sum_into: computes grad_weight.
    """
    _check_stream("x", x, weight)
    shape = tuple(x.shape)
    check_tensor("grad_out", grad_out, shape, x.dtype, x.device)
    check_tensor("rstd", rstd, shape[:1], torch.float32, x.device)
    if grad_residual is not None:
        check_tensor("grad_residual", grad_residual, shape, x.dtype, x.device)
    run = _launch_backward if x.is_cuda else _compute_backward
    return run(grad_out, x, rstd, weight.detach().float(), grad_residual)


def rms_norm_transposed(x: Tensor, rstd: Tensor, weight: Tensor, *, to: QuantizeTo) -> Tensor:
    """The transposed copy of :func:`rms_norm`'s n, quantized again from the stream.

    A forward that quantizes n without the transposed copy need keep nothing of it for the weight gradient of the linear
    behind it: the stream and ``rstd`` are kept anyway, and the copy is written here instead of there.

    Args:
        x: [rows, D], the stream: residual_out of the forward.
        rstd: [rows] fp32, from the forward.
        weight: [D] fp32 (bf16 and fp16 are converted at each call).
        to: e4m3, with the forward's scale and no amax, which the forward has recorded.

    Returns:
        [D, ceil16(rows)] e4m3: the bits that the forward's ``n.transposed`` had.

    Raises:
        ValueError: an argument has another shape, dtype or device than above; the message names it.
        GraphrtError: the kernels cannot be compiled or loaded for the device.
    """
    _check_stream("x", x, weight)
    check_tensor("rstd", rstd, tuple(x.shape[:1]), torch.float32, x.device)
    check_again("to", to, x)
    run = _launch_transposed if x.is_cuda else _compute_transposed
    return run(x, rstd.detach(), weight.detach().float(), to)


def _check_stream(name: str, x: Tensor, weight: Tensor) -> None:
    check_matrix(name, x)
    check_columns(f"D, the columns of {name},", x.shape[1])
    dtype = weight.dtype if weight.is_floating_point() else torch.float32
    check_tensor("weight", weight, (x.shape[1],), dtype, x.device)


def _layout(cols: int) -> tuple[int, int]:
    """How many vectors of a row a thread takes, and how many threads that makes."""
    vectors = 1 if cols <= _MAX_THREADS * _VECTOR else _WIDE_VECTORS
    return vectors, _round_up(-(-cols // (_VECTOR * vectors)), _WARP)


def _block_rows(rows: int, multiple: int) -> int:
    """Rows that a block takes, a multiple of what it takes at once."""
    return min(_BLOCK_ROWS, _round_up(max(1, -(-rows // _MIN_BLOCKS)), multiple))


def _backward_block_rows(rows: int) -> int:
    """Rows that add up to one partial gradient of the weight. It decides the order of that sum, so nothing else may."""
    return max(_block_rows(rows, 2), _round_up(-(-rows // _MAX_PARTIALS), 2))


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


# ---- reference ----


def _compute_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, to: QuantizeTo | None
) -> tuple[Tensor, Tensor | QuantizedTensor, Tensor]:
    stream = x if residual is None else (x.detach().float() + residual.detach().float()).to(x.dtype)
    values = stream.detach().float()
    rstd = _rstd_from(_sum_rows(values * values), x.shape[1], eps)
    out = (values * rstd[:, None] * weight).to(x.dtype)
    if to is None:
        return stream, out, rstd
    quantized = reference.quantize(out, to.scale, to.scale_inv, to.slot, to.dtype, amax=to.amax, transpose=to.transpose)
    return stream, quantized, rstd


def _compute_transposed(x: Tensor, rstd: Tensor, weight: Tensor, to: QuantizeTo) -> Tensor:
    out = (x.detach().float() * rstd[:, None] * weight).to(x.dtype)
    transposed = reference.quantize(out, to.scale, to.scale_inv, to.slot, to.dtype, transpose=True).transposed
    assert transposed is not None
    return transposed


def _compute_backward(grad_out: Tensor, x: Tensor, rstd: Tensor, weight: Tensor, grad_residual: Tensor | None) -> tuple[Tensor, SumInto]:
    grad, values, row_rstd = grad_out.detach().float(), x.detach().float(), rstd.detach()[:, None]
    weighted = grad * weight
    mean = _sum_rows(weighted * values)[:, None] * (1.0 / x.shape[1])
    grad_x = (weighted - values * (mean * row_rstd * row_rstd)) * row_rstd
    if grad_residual is not None:
        grad_x = grad_x + grad_residual.detach().float()

    def sum_into(out: Tensor | None) -> Tensor:
        sums = _sum_columns(grad * (values * row_rstd))
        return sums if out is None else out.copy_(sums)

    return grad_x.to(x.dtype), SumInto(sum_into, (grad, values, row_rstd))


def _rstd_from(sums: Tensor, cols: int, eps: float) -> Tensor:
    """``1 / sqrt(mean + eps)``. The root is taken in fp64 and rounded, which is the IEEE one: torch's in fp32 may be one bit off."""
    deviation = torch.sqrt((sums * (1.0 / cols) + eps).double()).float()
    return torch.div(torch.ones_like(deviation), deviation)


def _sum_rows(products: Tensor) -> Tensor:
    """[rows, D] -> [rows], in the kernel's order: vectors of 8, the vectors of a thread, 32 lanes, warps."""
    rows, cols = products.shape
    vectors, num_threads = _layout(cols)
    products = _pad(products, 1, vectors * num_threads * _VECTOR)
    for _ in range(3):  # a tree over neighbours
        products = products[:, 0::2] + products[:, 1::2]
    per_thread = _sum_in_turn(products.view(rows, vectors, num_threads))
    per_warp = _sum_halves(per_thread.view(rows, num_threads // _WARP, _WARP).transpose(1, 2))
    per_warp = _pad(per_warp, 1, _round_up(per_warp.shape[1], 8))
    # The kernel starts from zero here: a sum of -0 becomes +0.
    return _sum_halves(_sum_in_turn(per_warp.reshape(rows, per_warp.shape[1] // 8, 8)) + 0.0)


def _sum_columns(products: Tensor) -> Tensor:
    """[rows, D] -> [D], in the kernels' order: rows of a block in turn, every 32nd block in turn, then those 32."""
    rows, cols = products.shape
    block_rows = _backward_block_rows(rows)
    num_blocks = -(-rows // block_rows)
    per_block = _sum_in_turn(_pad(products, 0, num_blocks * block_rows).view(num_blocks, block_rows, cols)) + 0.0
    per_block = _pad(per_block, 0, max(_WARP, _round_up(num_blocks, _WARP)))
    return _sum_halves(_sum_in_turn(per_block.view(1, -1, _WARP * cols)).view(1, _WARP, cols)).view(cols)


def _pad(x: Tensor, dim: int, size: int) -> Tensor:
    """Zeros behind ``x`` up to ``size``."""
    if x.shape[dim] == size:
        return x
    return torch.cat([x, x.new_zeros([size - x.shape[d] if d == dim else x.shape[d] for d in range(x.dim())])], dim)


def _sum_in_turn(x: Tensor) -> Tensor:
    """Over dimension 1, one after the other."""
    total = x[:, 0]
    for i in range(1, x.shape[1]):
        total = total + x[:, i]
    return total


def _sum_halves(x: Tensor) -> Tensor:
    """Over dimension 1, a power of two: the first half plus the second, until one is left."""
    while x.shape[1] > 1:
        half = x.shape[1] // 2
        x = x[:, :half] + x[:, half:]
    return x[:, 0]


# ---- launches ----


def _launch_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, to: QuantizeTo | None
) -> tuple[Tensor, Tensor | QuantizedTensor, Tensor]:
    rows, cols = x.shape
    result = allocate_result(rows, cols, x, to)
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
    stream = x if residual is None else torch.empty((rows, cols), dtype=x.dtype, device=x.device)
    if rows == 0:
        if to is not None and isinstance(result, QuantizedTensor):
            result.scale_inv.copy_(to.scale_inv[to.slot, :1])
        return stream, result, rstd
    x, weight = aligned(x), aligned(weight)
    residual = None if residual is None else aligned(residual)
    residual_addresses = (0, 0) if residual is None else (residual.data_ptr(), stream.data_ptr())
    addresses = (x.data_ptr(), residual_addresses[0], weight.data_ptr(), residual_addresses[1], rstd.data_ptr())
    data_address, transposed_address = output_addresses(result)
    block_rows = _block_rows(rows, 4)
    args = (*addresses, data_address, *slot_addresses(to, result), rows, cols, block_rows, 1.0 / cols, float(eps))
    vectors, num_threads = _layout(cols)
    name = f"graphrt_{'' if vectors == 1 else 'wide_'}rms_norm_{output_name(to)}"
    device.launch(x.get_device(), name, -(-rows // block_rows), num_threads, args)
    if transposed_address:
        num_tiles = -(-rows // _TILE_ROWS) * -(-cols // _TILE_COLS)
        transpose_args = (data_address, transposed_address, rows, cols)
        device.launch(x.get_device(), "graphrt_rms_norm_transpose", num_tiles, _TILE_THREADS, transpose_args)
    return stream, result, rstd


def _launch_transposed(x: Tensor, rstd: Tensor, weight: Tensor, to: QuantizeTo) -> Tensor:
    rows, cols = x.shape
    transposed = torch.empty(transposed_shape(rows, cols), dtype=to.dtype, device=x.device)
    if rows:
        inputs = aligned(x), rstd.contiguous(), aligned(weight)
        addresses = (*[tensor.data_ptr() for tensor in inputs], transposed.data_ptr(), to.scale.data_ptr() + 4 * to.slot)
        num_tiles = -(-rows // _AGAIN_TILE_ROWS) * -(-cols // _AGAIN_TILE_COLS)
        device.launch(x.get_device(), "graphrt_rms_norm_transposed", num_tiles, _TILE_THREADS, (*addresses, rows, cols))
    return transposed


def _launch_backward(grad_out: Tensor, x: Tensor, rstd: Tensor, weight: Tensor, grad_residual: Tensor | None) -> tuple[Tensor, SumInto]:
    rows, cols = x.shape
    grad_x = torch.empty((rows, cols), dtype=x.dtype, device=x.device)
    block_rows = _backward_block_rows(rows)
    num_blocks = -(-rows // block_rows)
    partials = torch.empty((num_blocks, cols), dtype=torch.float32, device=x.device)
    sum_into = SumInto(lambda out: _sum_partials(partials, out), (partials,))
    if rows == 0:
        return grad_x, sum_into
    inputs = [aligned(grad_out), aligned(x), rstd.contiguous(), aligned(weight)]
    if grad_residual is not None:
        inputs.append(aligned(grad_residual))
    addresses = [tensor.data_ptr() for tensor in inputs]
    if grad_residual is None:
        addresses.append(0)
    vectors, num_threads = _layout(cols)
    name = "graphrt_rms_norm_backward" if vectors == 1 else "graphrt_wide_rms_norm_backward"
    args = (*addresses, grad_x.data_ptr(), partials.data_ptr(), rows, cols, block_rows, 1.0 / cols)
    device.launch(x.get_device(), name, num_blocks, num_threads, args)
    return grad_x, sum_into


def _sum_partials(partials: Tensor, out: Tensor | None) -> Tensor:
    """[num_blocks, D] -> [D] fp32; no blocks give zeros."""
    num_blocks, cols = partials.shape
    sums = torch.empty(cols, dtype=torch.float32, device=partials.device) if out is None else out
    if num_blocks == 0:
        return sums.zero_()
    args = (partials.data_ptr(), sums.data_ptr(), num_blocks, cols)
    device.launch(partials.get_device(), "graphrt_rms_norm_sum_partials", -(-cols // _SUM_COLUMNS), _SUM_THREADS, args)
    if out is not None:
        # A kernel writes behind autograd's back.
        torch.autograd.graph.increment_version(out)
    return sums
