"""Bandwidth of the fused RMSNorm and SwiGLU kernels, measured as profiles/kernels.py measures quantize.

Bytes are those a kernel must move: each input read once, each result written once; what the weight and the per-row and
per-block values take is left out. A copy of as many bytes is measured beside every case.
"""

import sys
from collections.abc import Callable
from functools import partial

import torch
from kernels import E4M3, E5M2, NUM_LAUNCHES, Row, measure_copy, measure_us, num_buffers, run_script

from graphrt.kernels import preload
from graphrt.kernels.norm import rms_norm, rms_norm_backward, rms_norm_transposed
from graphrt.kernels.quantized import QuantizeTo
from graphrt.kernels.swiglu import swiglu, swiglu_backward, swiglu_backward_with_output

ROWS = 8192
WIDTHS = (768, 2048, 4096)
FEATURES = (2048, 5632, 14336)
EPS = 1e-5
TARGET_RATIO = 0.8

Launch = Callable[[], object]


def make_target(dtype: torch.dtype, transpose: bool = True) -> QuantizeTo:
    scale, scale_inv, amax = torch.ones(1, device="cuda"), torch.ones(1, 4, device="cuda"), torch.zeros(1, device="cuda")
    return QuantizeTo(scale, scale_inv, 0, dtype, amax, transpose)


def random_bf16(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def make_norm(width: int, to: QuantizeTo | None, has_residual: bool) -> Launch:
    residual = random_bf16(ROWS, width) if has_residual else None
    return partial(rms_norm, random_bf16(ROWS, width), residual, torch.ones(width, device="cuda"), EPS, to=to)


def make_norm_transposed(width: int, to: QuantizeTo) -> Launch:
    tensors = random_bf16(ROWS, width), torch.ones(ROWS, device="cuda"), torch.ones(width, device="cuda")
    return partial(rms_norm_transposed, *tensors, to=to)


def make_norm_backward(width: int, has_residual: bool) -> Launch:
    residual = random_bf16(ROWS, width) if has_residual else None
    tensors = random_bf16(ROWS, width), random_bf16(ROWS, width), torch.ones(ROWS, device="cuda"), torch.ones(width, device="cuda")
    return partial(rms_norm_backward, *tensors, residual)


def make_swiglu(features: int, to: QuantizeTo | None) -> Launch:
    return partial(swiglu, random_bf16(ROWS, 2 * features), to=to)


def make_swiglu_backward(features: int, to: QuantizeTo | None) -> Launch:
    return partial(swiglu_backward, random_bf16(ROWS, 2 * features), random_bf16(ROWS, features), to=to)


def keep_result(launch: Launch) -> Launch:
    """``launch``, its latest result kept: results then rotate among buffers as inputs do, instead of being written to one
    that stays in L2."""
    kept: list[object] = []

    def run() -> None:
        kept[:] = [launch()]

    return run


def measure(name: str, cols: int, bytes_each: int, make: Callable[[], Launch], num_replays: int) -> list[Row]:
    """One case of ``bytes_each`` for each of ``ROWS x cols`` elements, and the copy of as many."""
    num_bytes = ROWS * cols * bytes_each
    launches = [keep_result(make()) for _ in range(num_buffers(num_bytes))]
    time_us = measure_us(launches, NUM_LAUNCHES, num_replays)
    shape = f"{ROWS}x{cols}"
    copy = measure_copy(num_bytes, shape, num_replays)
    return [Row(name, shape, time_us, num_bytes / time_us / 1e6, copy.time_us / time_us, f">= {TARGET_RATIO}"), copy]


def measure_norm(width: int, num_replays: int) -> list[Row]:
    e4m3, rows_only = make_target(E4M3), make_target(E4M3, transpose=False)
    return [
        *measure("rms_norm+residual -> e4m3+transpose", width, 8, partial(make_norm, width, e4m3, True), num_replays),
        *measure("rms_norm+residual -> e4m3", width, 7, partial(make_norm, width, rows_only, True), num_replays),
        *measure("rms_norm+residual -> bf16", width, 8, partial(make_norm, width, None, True), num_replays),
        *measure("rms_norm -> e4m3+transpose", width, 4, partial(make_norm, width, e4m3, False), num_replays),
        *measure("rms_norm transposed again", width, 3, partial(make_norm_transposed, width, e4m3._replace(amax=None)), num_replays),
        *measure("rms_norm_backward", width, 6, partial(make_norm_backward, width, False), num_replays),
        *measure("rms_norm_backward+residual", width, 8, partial(make_norm_backward, width, True), num_replays),
    ]


def make_swiglu_backward_with_output(features: int, to: QuantizeTo, output_to: QuantizeTo) -> Launch:
    h, grad = random_bf16(ROWS, 2 * features), random_bf16(ROWS, features)
    return partial(swiglu_backward_with_output, h, grad, to=to, output_to=output_to)


def measure_swiglu(features: int, num_replays: int) -> list[Row]:
    e4m3, e5m2 = make_target(E4M3), make_target(E5M2)
    rows_only, output_to = make_target(E4M3, transpose=False), e4m3._replace(amax=None)
    return [
        *measure("swiglu -> e4m3", features, 5, partial(make_swiglu, features, rows_only), num_replays),
        *measure("swiglu -> e4m3+transpose", features, 6, partial(make_swiglu, features, e4m3), num_replays),
        *measure("swiglu -> bf16", features, 6, partial(make_swiglu, features, None), num_replays),
        *measure("swiglu_backward -> e5m2+transpose", features, 10, partial(make_swiglu_backward, features, e5m2), num_replays),
        *measure(
            "swiglu_backward -> e5m2+transpose, output transposed",
            features,
            11,
            partial(make_swiglu_backward_with_output, features, e5m2, output_to),
            num_replays,
        ),
        *measure("swiglu_backward -> bf16", features, 10, partial(make_swiglu_backward, features, None), num_replays),
    ]


def measure_all(num_replays: int) -> list[Row]:
    preload()
    rows = [row for width in WIDTHS for row in measure_norm(width, num_replays)]
    return rows + [row for features in FEATURES for row in measure_swiglu(features, num_replays)]


if __name__ == "__main__":
    sys.exit(run_script("fused_kernels", __doc__, measure_all, None))
