"""Time and bandwidth of the gradient norm and AdamW kernels, beside a device copy and torch's own in the same run.

Bytes are those a kernel must move: gradients read once for the norm, 28 bytes an fp32 parameter for AdamW (read parameter,
gradient and two moments, write all but the gradient), 32 if clipped gradients are written. Times are medians of CUDA events.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn

from graphrt import kernels
from graphrt.kernels.grad_norm import NormTable, grad_norm
from graphrt.kernels.multi_tensor import TensorTable, adamw_

COPY_BYTES = 2**31  # of each buffer
NUM_WARMUP = 3
TARGET_RATIO = 0.85

Shape = tuple[int, ...]


def llama_shapes(num_layers: int, width: int, num_qkv: int, inner: int, vocab: int, num_embeddings: int) -> list[Shape]:
    """Parameter shapes of a Llama with fused qkv and fused gate and up."""
    layer = [(num_qkv, width), (width, width), (2 * inner, width), (width, inner), (width,), (width,)]
    return [*num_layers * layer, (width,), *num_embeddings * [(vocab, width)]]


MODELS = {"1b": llama_shapes(16, 2048, 6144, 5632, 32768, 2), "135m": llama_shapes(30, 576, 960, 1536, 49152, 1)}


@dataclass(frozen=True)
class Row:
    """One measured case."""

    name: str
    model: str
    num_params: int
    time_ms: float
    bandwidth_tb_s: float
    ratio_to_copy: float


def measure_ms(launch: Callable[[], object], num_runs: int) -> float:
    """Median time on the device of what ``launch`` puts on the stream."""
    for _ in range(NUM_WARMUP):
        launch()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(num_runs)]
    for start, end in events:
        start.record()
        launch()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events)


def measure_copy_tb_s(num_runs: int) -> float:
    """Bytes read and written a second by a copy on the device, in TB/s."""
    source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device="cuda")
    return 2 * COPY_BYTES / measure_ms(partial(torch.empty_like(source).copy_, source), num_runs) / 1e9


def make_params(shapes: list[Shape]) -> list[nn.Parameter]:
    params = [nn.Parameter(torch.randn(shape, device="cuda").mul_(0.02)) for shape in shapes]
    for p in params:
        p.grad = torch.randn_like(p).mul_(1e-3)
    return params


def make_cases(params: list[nn.Parameter]) -> list[tuple[str, int, Callable[[], object]]]:
    """Name, bytes a parameter, and launch of each case; torch's works on the same parameters and gradients."""
    grads = [p.grad for p in params if p.grad is not None]
    moments = [[torch.zeros_like(p) for p in params] for _ in range(2)]
    table, grads_table = TensorTable(params, grads, *moments), NormTable.whole(grads)
    steps = TensorTable([torch.zeros((), device="cuda") for _ in params])
    norm, lr, weight_decay = [torch.tensor(value, device="cuda") for value in (0.0, 1e-4, 0.1)]
    grad_norm(grads_table, norm)
    max_grad_norm = norm * 0.999  # clips, and many runs leave gradients of the same magnitude
    update = partial(
        adamw_, table, steps, lr=lr, weight_decay=weight_decay, grad_norm=norm, max_grad_norm=max_grad_norm, beta1=0.9, beta2=0.95, eps=1e-8
    )

    def norm_and_update() -> None:
        grad_norm(grads_table, norm)
        update()

    optimizer = torch.optim.AdamW(params, lr=lr.clone(), weight_decay=0.1, betas=(0.9, 0.95), fused=True)

    def torch_step() -> None:
        torch.nn.utils.clip_grad_norm_(params, 1.0, foreach=True)
        optimizer.step()

    return [
        ("grad_norm", 4, partial(grad_norm, grads_table, norm)),
        ("adamw", 28, update),
        ("grad_norm + adamw", 32, norm_and_update),
        ("adamw, clipped grads written", 32, partial(update, write_clipped_grads=True)),
        ("torch AdamW(fused)", 28, optimizer.step),
        ("torch clip_grad_norm_ + AdamW(fused)", 32, torch_step),
    ]


def measure_model(model: str, copy_tb_s: float, num_runs: int) -> list[Row]:
    """All cases on one list of shapes."""
    params = make_params(MODELS[model])
    num_params = sum(p.numel() for p in params)
    rows = []
    for name, bytes_each, launch in make_cases(params):
        time_ms = measure_ms(launch, num_runs)
        bandwidth = bytes_each * num_params / time_ms / 1e9
        rows.append(Row(name, model, num_params, time_ms, bandwidth, bandwidth / copy_tb_s))
    return rows


def print_table(rows: list[Row], copy_tb_s: float) -> None:
    print(f"{'kernel':38} {'model':6} {'params':>8} {'ms':>8} {'TB/s':>6} {'of copy':>8}")
    for row in rows:
        line = f"{row.name:38} {row.model:6} {row.num_params / 1e6:7.0f}M {row.time_ms:8.3f}"
        print(f"{line} {row.bandwidth_tb_s:6.2f} {row.ratio_to_copy:8.3f}")
    print(f"copy: {copy_tb_s:.2f} TB/s; target of adamw on 1b: >= {TARGET_RATIO} of it")


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example: python profiles/optimizer_kernels.py --models 1b --out optimizer.json",
    )
    parser.add_argument("--runs", type=int, default=20, metavar="N", help="runs per case, of which the median counts (default: 20)")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS), help="lists of shapes (default: all)")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="also write the cases as JSON: device, torch version and one object a case"
    )
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, and write if asked. Returns 2 without a GPU."""
    parsed = parse_arguments(arguments)
    if not torch.cuda.is_available():
        print("profiles/optimizer_kernels.py needs an NVIDIA GPU with FP8, and torch sees none.", file=sys.stderr)
        return 2
    kernels.preload()
    copy_tb_s = measure_copy_tb_s(parsed.runs)
    rows = [row for model in parsed.models for row in measure_model(model, copy_tb_s, parsed.runs)]
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print_table(rows, copy_tb_s)
    if parsed.out is not None:
        result = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "copy_tb_s": copy_tb_s}
        parsed.out.write_text(json.dumps({**result, "rows": [asdict(row) for row in rows]}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
