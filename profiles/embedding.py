"""Time of the embedding's gradient beside torch's own, measured as profiles/kernels.py measures quantize.

Bytes are those that must move: the table's gradient written once, the 16-bit gradients read once. A copy of as many bytes
is measured beside every case. torch's own is what autograd runs for an fp32 table under autocast: the cast of the
gradients, a table of zeros, rows added to it, its addition to ``.grad``, and the zeroing of ``.grad`` for the next step.
"""

import sys
from collections.abc import Callable
from functools import partial

import torch
from kernels import Row, measure_copy, measure_us, num_buffers, run_script

from graphrt.kernels import preload
from graphrt.kernels.embedding import embedding_backward

NUM_ROWS = 32768
WIDTHS = (768, 2048, 4096)
TOKENS = (512, 8192)
NUM_LAUNCHES = 8
TARGET_RATIO = 0.6

Launch = Callable[[], object]


def make_tokens(num: int, is_skewed: bool) -> torch.Tensor:
    """Tokens of the whole vocabulary alike; skewed, every second position has the same one."""
    tokens = torch.randint(NUM_ROWS, (num,), device="cuda")
    if is_skewed:
        tokens[::2] = 7
    return tokens


def add_like_torch(grad: torch.Tensor, tokens: torch.Tensor, out: torch.Tensor) -> None:
    out.add_(torch.ops.aten.embedding_dense_backward(grad.float(), tokens, NUM_ROWS, -1, False))
    out.zero_()


def measure(num: int, width: int, is_skewed: bool, num_replays: int) -> list[Row]:
    """graphrt's, torch's, and the copy."""
    num_bytes = 4 * NUM_ROWS * width + 2 * num * width
    shape = f"{num} -> {NUM_ROWS}x{width}"
    copy = measure_copy(num_bytes, shape, num_replays)
    arguments = [
        (torch.randn(num, width, device="cuda").bfloat16(), make_tokens(num, is_skewed), torch.zeros(NUM_ROWS, width, device="cuda"))
        for _ in range(num_buffers(num_bytes))
    ]
    rows = []
    for name, function, target in (("graphrt", embedding_backward, f">= {TARGET_RATIO}"), ("torch", add_like_torch, "")):
        launches: list[Launch] = [partial(function, *each) for each in arguments]
        time_us = measure_us(launches, NUM_LAUNCHES, num_replays)
        kind = "half one token" if is_skewed else "uniform"
        rows.append(Row(f"embedding backward {kind}, {name}", shape, time_us, num_bytes / time_us / 1e6, copy.time_us / time_us, target))
    return [*rows, copy]


def measure_all(num_replays: int) -> list[Row]:
    """Every case."""
    preload()
    rows = []
    for width in WIDTHS:
        for num in TOKENS:
            for is_skewed in (False, True):
                rows += measure(num, width, is_skewed, num_replays)
                torch.cuda.empty_cache()
    return rows


if __name__ == "__main__":
    sys.exit(run_script("embedding", __doc__, measure_all, None))
