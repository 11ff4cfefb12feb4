"""The gradient of an embedding's table, summed in a fixed order.

    out[v] (+)= sum of grad[i] over the positions i with tokens[i] == v

(the transpose of a gather, as in every framework). The order is part of the specification, so that reference and CUDA
kernels give the same bits: the positions of a token, in order, make segments of 64; a segment's rows are added in turn,
then the segments' sums in turn, then that total to what the table holds, all in fp32. Up to 64 occurrences that is the
sum in order of position, and no other token's positions change a bit of it.

On a GPU three launches and the fill: a stable sort of the positions by token, segments, runs longer than a segment.
The sort counts, for each position, those before it: n^2 comparisons, 18 to 21 us for 8192 positions on an H200 (the
instructions alone would allow 5); from 16384 positions on torch sorts. The sums
read each gradient once and write each row that a token names once. A token that fills a batch of 8192 is 128 segments in
as many blocks, then 128 sums in turn: two chains of eight and of sixteen memory latencies.
"""

import torch
from torch import Tensor

from graphrt.kernels import device
from graphrt.kernels.quantized import INPUT_DTYPES

__all__ = ["embedding_backward"]

# These mirror the constants of embedding.cu.
_SEGMENT = 64
_THREADS = 256
_WARP = 32
_SORT_THREADS = 512
_ELEMENTS = {torch.bfloat16: 8, torch.float16: 8, torch.float32: 4}  # in 16 bytes

_SUM_KERNELS = {
    dtype: f"graphrt_embedding_sum_{name}" for dtype, name in ((torch.bfloat16, "bf16"), (torch.float16, "fp16"), (torch.float32, "fp32"))
}
_MAX_COUNTED = 16384  # positions that the kernel sorts: its time grows with the square
_MAX_ROWS = 2**31 - 2  # a key is 32 bits, and one more than the largest is compared with


def embedding_backward(grad: Tensor, tokens: Tensor, out: Tensor, *, accumulate: bool = False, padding_idx: int | None = None) -> None:
    """Write the gradient of a table whose rows ``tokens`` were looked up.

    No host sync, and the same bits each time. Tokens outside [0, V) are skipped: the lookup has refused them.

    Args:
        grad: [N, D] bf16, fp16 or fp32, contiguous: the gradient of the rows that were looked up.
        tokens: [N] int64 or int32, contiguous.
        out: [V, D] fp32, contiguous; overwritten, all of it.
        accumulate: add to ``out`` instead; rows that no token names are not touched.
        padding_idx: the token whose row gets no gradient; None for no such token.

    Raises:
        ValueError: an argument has another shape, dtype, device or layout than above; the message names it.
        GraphrtError: the kernels cannot be compiled or loaded for the device.
    """
    _check(grad, tokens, out)
    if not accumulate:
        out.zero_()
    if grad.numel() == 0 or out.numel() == 0:
        return
    padding = -1 if padding_idx is None else padding_idx
    (_launch if grad.is_cuda else _compute)(grad.detach(), tokens.long(), out, accumulate, padding)


def _keys(tokens: Tensor, num_rows: int, padding: int) -> Tensor:
    """The tokens; ``num_rows`` in place of those that get no gradient, which puts them last."""
    return torch.where((tokens >= 0) & (tokens < num_rows) & (tokens != padding), tokens, num_rows)


# ---- plain torch: the specification, and what runs on a CPU ----


def _compute(grad: Tensor, tokens: Tensor, out: Tensor, accumulate: bool, padding: int) -> None:
    """Index additions, which a CPU makes in order. A segment's sum stands where it begins in the sorted order, a run's likewise."""
    del accumulate  # the table holds zeros where it is overwritten
    keys, order = torch.sort(_keys(tokens, out.shape[0], padding), stable=True)
    run, segment = _beginnings(keys)
    segment_at = torch.empty_like(segment).scatter_(0, order, segment)
    zeros = torch.zeros(grad.shape, dtype=torch.float32, device=grad.device)
    totals = zeros.index_add(0, segment_at, grad.float())
    if len(tokens) > _SEGMENT:
        totals = zeros.index_add_(0, run, totals)
    # What is added for places without a token of their own must change no bit: -0 does not.
    is_token = keys < out.shape[0]
    totals.masked_fill_(~is_token[:, None], -0.0)
    out.index_add_(0, torch.where(is_token, keys, 0), totals)


def _beginnings(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Where the run and where the segment of each place in the sorted order begins."""
    places = torch.arange(len(keys), device=keys.device)
    is_start = torch.ones_like(keys, dtype=torch.bool)
    torch.ne(keys[1:], keys[:-1], out=is_start[1:])
    run = torch.where(is_start, places, 0).cummax(0).values
    return run, places - (places - run) % _SEGMENT


# ---- three launches on the GPU ----


def _launch(grad: Tensor, tokens: Tensor, out: Tensor, accumulate: bool, padding: int) -> None:
    num, cols = grad.shape
    keys, positions = _sort(tokens, out.shape[0], padding)
    # Of 64 neighbouring places in the sorted order at most two begin segments of long runs (see embedding.cu).
    partials = torch.empty((2 * -(-num // _SEGMENT), cols), dtype=torch.float32, device=grad.device)
    addresses = (grad.data_ptr(), keys.data_ptr(), positions.data_ptr(), out.data_ptr(), partials.data_ptr())
    num_threads, col_blocks = _layout(cols, _ELEMENTS[grad.dtype])
    args = (*addresses, num, out.shape[0], cols, col_blocks, int(accumulate), _is_aligned(grad, out))
    device.launch(grad.get_device(), _SUM_KERNELS[grad.dtype], num * col_blocks, num_threads, args)
    if num <= _SEGMENT:
        return
    num_threads, col_blocks = _layout(cols, _ELEMENTS[torch.float32])
    long_args = (keys.data_ptr(), partials.data_ptr(), out.data_ptr(), num, out.shape[0], cols, col_blocks)
    long_args = (*long_args, int(accumulate), _is_aligned(partials, out))
    device.launch(grad.get_device(), "graphrt_embedding_sum_long_runs", -(-num // _SEGMENT) * col_blocks, num_threads, long_args)


def _sort(tokens: Tensor, num_rows: int, padding: int) -> tuple[Tensor, Tensor]:
    """The keys in order, and the position of each: two int32 [N]. Equal keys keep their order."""
    num = len(tokens)
    if num > _MAX_COUNTED:
        keys, positions = torch.sort(_keys(tokens, num_rows, padding).int(), stable=True)
        return keys, positions.int()
    keys = torch.empty(num, dtype=torch.int32, device=tokens.device)
    positions = torch.empty_like(keys)
    args = (tokens.data_ptr(), keys.data_ptr(), positions.data_ptr(), num, num_rows, padding)
    device.launch(tokens.get_device(), "graphrt_embedding_sort", -(-num // _WARP), _SORT_THREADS, args)
    return keys, positions


def _layout(cols: int, elements: int) -> tuple[int, int]:
    """Threads of a block, of so many columns each, and blocks beside each other."""
    vectors = -(-cols // elements)
    return min(_THREADS, -(-vectors // _WARP) * _WARP), -(-vectors // _THREADS)


def _is_aligned(x: Tensor, out: Tensor) -> int:
    """Whether every row starts at a multiple of 16 bytes and ends at one."""
    return int((x.data_ptr() | out.data_ptr()) % 16 == 0 and x.shape[1] % _ELEMENTS[x.dtype] == 0)


# ---- arguments ----


def _check(grad: Tensor, tokens: Tensor, out: Tensor) -> None:
    if grad.dim() != 2 or not grad.is_contiguous() or grad.dtype not in INPUT_DTYPES:
        raise ValueError(f"grad is {_describe(grad)}, expected a contiguous [N, D] of bfloat16, float16 or float32.")
    is_fitting = tokens.shape == grad.shape[:1] and tokens.is_contiguous() and tokens.device == grad.device
    if not is_fitting or tokens.dtype not in (torch.int64, torch.int32):
        expected = f"a contiguous int64 or int32 [{grad.shape[0]}] on {grad.device}, a token for each row of grad"
        raise ValueError(f"tokens are {_describe(tokens)}, expected {expected}.")
    is_fitting = out.dim() == 2 and out.shape[1] == grad.shape[1] and out.is_contiguous() and out.device == grad.device
    if not is_fitting or out.dtype is not torch.float32 or out.shape[0] > _MAX_ROWS:
        expected = f"a contiguous float32 [V, {grad.shape[1]}] on {grad.device} with less than 2**31 - 1 rows"
        raise ValueError(f"out is {_describe(out)}, expected {expected}.")


def _describe(tensor: Tensor) -> str:
    layout = "contiguous" if tensor.is_contiguous() else "non-contiguous"
    return f"{layout} {tensor.dtype} {list(tensor.shape)} on {tensor.device}"
