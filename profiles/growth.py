"""How the cost of a captured step grows: with layers, width, sequence length, microbatches, slots and amax history.

One quantity at a time is changed from a base model; of each point the step's median time by CUDA events, its nodes, the
seconds its capture took and what the graph's pool added to reserved memory.

    python profiles/growth.py --out growth            writes growth.json and growth.png, prints the table
    python profiles/growth.py --device cpu --quick    a few points on the recorder, to try the script
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

import graphrt
from graphrt.jobsetup import make_optimizer
from graphrt.llama import Llama, is_block_linear, make_loss_fn
from graphrt.presets import ModelShape

NUM_STEPS, NUM_WARMUP_STEPS = 10, 5
VOCAB = 4096


@dataclass(frozen=True)
class Point:
    """One configuration."""

    layers: int = 4
    width: int = 1024
    seq_len: int = 1024
    batch_size: int = 8
    microbatches: int = 1
    history: int = 1024

    @property
    def slots(self) -> int:
        """Four linears a layer, three slots each."""
        return 12 * self.layers

    def value(self, axis: str) -> int:
        """Where on the axis the point lies."""
        return getattr(self, axis)


BASE, SMALL = Point(), Point(width=64, seq_len=64, batch_size=1)
AXES: dict[str, list[Point]] = {
    "layers": [replace(BASE, layers=n) for n in (2, 4, 8, 16, 32)],
    "width": [replace(BASE, width=n) for n in (512, 1024, 2048, 4096)],
    "seq_len": [replace(BASE, seq_len=n, batch_size=1) for n in (1024, 2048, 4096, 8192)],
    "microbatches": [replace(BASE, microbatches=n) for n in (1, 2, 4, 8)],
    "slots": [replace(SMALL, layers=n) for n in (8, 42, 167, 333)],
    "history": [replace(BASE, history=n) for n in (1, 16, 1024, 4096)],
}


def measure(point: Point, device: torch.device) -> dict[str, Any]:
    """Build, capture and time one configuration."""
    torch.manual_seed(0)
    shape = ModelShape(point.layers, point.width, max(1, point.width // 64), 11 * point.width // 4 // 16 * 16, VOCAB)
    with device:  # made where it runs: drawing large weights on a CPU takes longer than measuring
        model = Llama(shape, point.seq_len)
    recipe = graphrt.DelayedScaling(amax_history_len=point.history)
    graphrt.convert_to_float8_training(model, recipe=recipe, module_filter_fn=is_block_linear)
    loss_fn = make_loss_fn(device.type, torch.bfloat16 if device.type == "cuda" else None)
    optimizer = make_optimizer(model, 1e-4)
    tokens = torch.randint(VOCAB, (point.batch_size, point.seq_len), device=device)
    batch = {"tokens": tokens, "labels": tokens}
    with graphrt.Trainer(model, optimizer, loss_fn, mode="graph", grad_accum_steps=point.microbatches, max_grad_norm=1.0) as trainer:
        for _ in range(NUM_WARMUP_STEPS):
            trainer.step(batch)
        step_ms = _median_ms(lambda: trainer.step(batch), device)
        stats = trainer.report().capture
    assert stats is not None
    return {
        **asdict(point),
        "slots": point.slots,
        "step_ms": step_ms,
        "capture_s": stats.capture_s,
        "pool_mib": (stats.pool_bytes_after - stats.pool_bytes_before) / 2**20,
        "nodes": sum(stats.num_nodes_by_kind.values()),
    }


def _median_ms(step: Any, device: torch.device) -> float:
    if device.type != "cuda":
        times = []
        for _ in range(3):
            start = time.perf_counter()
            step()
            times.append((time.perf_counter() - start) * 1e3)
        return sorted(times)[1]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(NUM_STEPS + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    return sorted(a.elapsed_time(b) for a, b in pairwise(events))[NUM_STEPS // 2]


def _shrunk(point: Point) -> Point:
    """One that a CPU can try."""
    return replace(point, width=max(64, point.width // 8), seq_len=max(64, point.seq_len // 16))


def run(axes: list[str], device: torch.device, is_quick: bool) -> Iterator[dict[str, Any]]:
    """Measure every point of the axes, one row each, printed as it comes."""
    print(f"{'axis':>13} {'value':>6} {'step ms':>9} {'capture s':>10} {'pool MiB':>9} {'nodes':>7}")
    for axis in axes:
        for point in AXES[axis][:2] if is_quick else AXES[axis]:
            point = _shrunk(point) if is_quick else point
            row = {"axis": axis, "value": point.value(axis), **measure(point, device)}
            line = f"{row['step_ms']:9.3f} {row['capture_s']:10.2f} {row['pool_mib']:9.0f} {row['nodes']:7}"
            print(f"{axis:>13} {row['value']:6} {line}", flush=True)
            yield row


def plot(rows: list[dict[str, Any]], file: Path, title: str) -> None:
    """A column an axis: step time above, capture seconds and pool memory below; in proportion is a line of slope one."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    axes = list(dict.fromkeys(row["axis"] for row in rows))
    quantities = ("step_ms", "capture_s", "pool_mib")
    figure = Figure(figsize=(max(6, 3 * len(axes)), 7), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(quantities), len(axes), squeeze=False)
    for column, axis in enumerate(axes):
        points = [row for row in rows if row["axis"] == axis]
        for line, quantity in zip(grid, quantities, strict=True):
            values = [row["value"] for row in points]
            line[column].plot(values, [row[quantity] for row in points], marker="o")
            line[column].set(xscale="log", xlabel=axis, ylabel=quantity.replace("_", " "))
            if all(row[quantity] > 0 for row in points):
                line[column].set_yscale("log")
            line[column].set_xticks(values, [str(value) for value in values], minor=False)
            line[column].set_xticks([], minor=True)
            line[column].grid(alpha=0.3)
    figure.suptitle(title)
    figure.savefig(file, dpi=110)


def main() -> int:
    """Run the axes asked for, print the table, write JSON and a picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--axes", default=",".join(AXES), help="comma-separated (default: %(default)s)")
    parser.add_argument("--device", default="cuda", help="cuda or cpu (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="two small points an axis")
    parser.add_argument("--out", type=Path, help="write OUT.json and OUT.png")
    args = parser.parse_args()
    unknown = set(args.axes.split(",")) - set(AXES)
    if unknown:
        parser.error(f"there is no axis {', '.join(sorted(unknown))}; choose from {', '.join(AXES)}")
    if args.device == "cuda" and not torch.cuda.is_available():
        print("growth.py needs an NVIDIA GPU, and there is none; try it with --device cpu --quick.", file=sys.stderr)
        return 2
    device = torch.device(args.device, 0) if args.device == "cuda" else torch.device(args.device)
    rows = []
    for row in run(args.axes.split(","), device, args.quick):
        rows.append(row)
        if args.out:  # a run that is cut short leaves what it measured
            args.out.with_suffix(".json").write_text(json.dumps(rows, indent=1))
    if args.out:
        name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU recorder"
        plot(rows, args.out.with_suffix(".png"), f"One captured FP8 step, {name}, torch {torch.__version__}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
