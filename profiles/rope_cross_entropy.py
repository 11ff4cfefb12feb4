"""Bandwidth of the rotary embedding and of the cross-entropy, measured against copies of the same run.

Measured like profiles/kernels.py, whose functions it uses: graphs of many launches that rotate among buffers larger than
the L2 cache together. Bytes are those a kernel must move: each input read once, each output written once. The cosines
and sines, which stay in the L2, are not counted.
"""

import argparse
import sys
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from kernels import L2_BYTES, NUM_LAUNCHES, Row, measure_copy, measure_us, num_buffers, print_table

from graphrt.kernels import preload
from graphrt.kernels.cross_entropy import cross_entropy, cross_entropy_backward_
from graphrt.kernels.quantized import QuantizeTo
from graphrt.kernels.rope import rope_, rope_backward

E5M2 = torch.float8_e5m2
ROPE_SHAPES = ((4, 2048, 32, 64), (2, 4096, 32, 128), (8, 1024, 12, 64))  # B, T, H, Dh
NUM_ROWS, NUM_CLASSES = 8192, 32768
NUM_LOSS_LAUNCHES = 4
TARGET_RATIO = 0.85


def compare(name: str, shape: str, num_bytes: int, launches: list[Callable[[], object]], num_launches: int, num_replays: int) -> list[Row]:
    """A kernel that moves ``num_bytes``, and a copy that moves as many."""
    time_us = measure_us(launches, num_launches, num_replays)
    copy = measure_copy(num_bytes, shape, num_replays)
    return [Row(name, shape, time_us, num_bytes / time_us / 1e6, copy.time_us / time_us, f">= {TARGET_RATIO}"), copy]


def make_angles(positions: int, head_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.rand(positions, head_size // 2, device="cuda")
    return angles.cos(), angles.sin()


def keep_results(launches: list[Callable[[], object]]) -> list[Callable[[], object]]:
    """As many results stay alive as there are launches, so that none is written where the last one still is in L2."""
    results: deque[object] = deque(maxlen=len(launches))
    return [lambda launch=launch: results.append(launch()) for launch in launches]


def measure_rope(shape: tuple[int, int, int, int], num_replays: int) -> list[Row]:
    """In place on a joint qkv: q and k are read and written."""
    batches, positions, num_heads, head_size = shape
    cos, sin = make_angles(positions, head_size)
    num_bytes = 2 * 2 * batches * positions * 2 * num_heads * head_size
    sizes = (batches, positions, 3, num_heads, head_size)
    buffers = [torch.randn(sizes, device="cuda").bfloat16() for _ in range(num_buffers(num_bytes // 2))]
    launches: list[Callable[[], object]] = [partial(rope_, qkv, cos, sin) for qkv in buffers]
    return compare("rope", str(list(sizes)), num_bytes, launches, NUM_LAUNCHES, num_replays)


def make_gradients(shape: tuple[int, int, int, int], layout: str) -> list[torch.Tensor]:
    """Gradients of q, k and v, [B, H, T, Dh], stored as BHTD or as BTHD."""
    batches, positions, num_heads, head_size = shape
    if layout == "BHTD":
        return [torch.randn(batches, num_heads, positions, head_size, device="cuda").bfloat16() for _ in range(3)]
    return [torch.randn(batches, positions, num_heads, head_size, device="cuda").bfloat16().transpose(1, 2) for _ in range(3)]


def measure_rope_backward(shape: tuple[int, int, int, int], layout: str, is_fp8: bool, num_replays: int) -> list[Row]:
    """Three gradients read; one bf16 matrix written, or its FP8 and transposed FP8, as many bytes."""
    batches, positions, num_heads, head_size = shape
    cos, sin = make_angles(positions, head_size)
    num_bytes = 2 * 2 * batches * positions * 3 * num_heads * head_size
    to = QuantizeTo(torch.ones(1, device="cuda"), torch.ones(1, 4, device="cuda"), 0, E5M2, torch.zeros(1, device="cuda"))
    keywords: dict[str, Any] = {"to": to} if is_fp8 else {}
    gradients = [make_gradients(shape, layout) for _ in range(num_buffers(num_bytes))]
    launches = keep_results([partial(rope_backward, *grads, cos, sin, **keywords) for grads in gradients])
    name = f"rope backward {layout} -> {'e5m2 + transposed' if is_fp8 else 'bf16'}"
    return compare(name, str([batches, positions, 3, num_heads, head_size]), num_bytes, launches, NUM_LAUNCHES, num_replays)


def measure_cross_entropy(num_replays: int) -> list[Row]:
    """The loss reads the logits, its gradient reads and overwrites them. A copy reads and writes: halves of the bytes."""
    num_bytes = 2 * NUM_ROWS * NUM_CLASSES
    assert num_bytes > 4 * L2_BYTES, "one buffer is enough: it leaves the L2 before it is read again"
    logits = torch.randn(NUM_ROWS, NUM_CLASSES, device="cuda").bfloat16()
    labels = torch.randint(NUM_CLASSES, (NUM_ROWS,), device="cuda")
    scale = torch.ones(1, device="cuda")
    _, lse = cross_entropy(logits, labels)
    shape = f"{NUM_ROWS}x{NUM_CLASSES}"
    forward: list[Callable[[], object]] = [partial(cross_entropy, logits, labels)]
    backward: list[Callable[[], object]] = [partial(cross_entropy_backward_, logits, labels, lse, scale)]
    rows = compare("cross-entropy", shape, num_bytes, forward, NUM_LOSS_LAUNCHES, num_replays)
    return rows + compare("cross-entropy backward", shape, 2 * num_bytes, backward, NUM_LOSS_LAUNCHES, num_replays)


def measure_all(num_replays: int) -> list[Row]:
    """Every case."""
    preload()
    rows = []
    for shape in ROPE_SHAPES:
        rows += measure_rope(shape, num_replays)
        for layout in ("BHTD", "BTHD"):
            for is_fp8 in (True, False):
                rows += measure_rope_backward(shape, layout, is_fp8, num_replays)
                torch.cuda.empty_cache()
    return rows + measure_cross_entropy(num_replays)


def main(arguments: list[str] | None = None) -> int:
    """Measure and print. Returns 2 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--replays", type=int, default=30, metavar="N", help="graph replays per case, of which the median counts (default: 30)"
    )
    parsed = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("profiles/rope_cross_entropy.py needs an NVIDIA GPU with FP8, and torch sees none.", file=sys.stderr)
        return 2
    rows = measure_all(parsed.replays)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print_table(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
