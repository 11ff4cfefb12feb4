"""Bandwidth of quantize, copy and fill kernels and time of the scale update, measured against copies of the same run.

Every case is a CUDA graph of many launches that rotate among buffers larger than the L2 cache together, so reads come
from memory, as they do in a training step. A time is the median over replays, divided by the launches in the graph.
Bytes are those a kernel must move: x read once, the FP8 copies written once.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from graphrt import kernels
from graphrt.kernels import device
from graphrt.kernels.copy import Copy, copy_launches, launch_copies
from graphrt.kernels.fill import FILL_KERNEL, Fill, fill_launch
from graphrt.presets import PRESETS

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ROWS = 8192
COLS = (2048, 4096, 5632, 6144, 14336)
L2_BYTES = 60 * 2**20
NUM_LAUNCHES = 24
NUM_UPDATES = 64
TARGET_RATIO = 0.85
TARGET_UPDATE_US = 10.0


@dataclass(frozen=True)
class Row:
    """One measured case."""

    name: str
    shape: str
    time_us: float
    bandwidth_tb_s: float
    ratio_to_copy: float | None  # None for a copy itself and for the update
    target: str


def measure_us(launches: list[Callable[[], object]], num_launches: int, num_replays: int) -> float:
    """Median time of one launch, in a graph of ``num_launches`` that takes ``launches`` in turn."""
    for launch in launches:
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(num_launches):
            launches[i % len(launches)]()
    for _ in range(3):
        graph.replay()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(num_replays)]
    for start, end in events:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events) * 1e3 / num_launches


def num_buffers(bytes_each: int) -> int:
    """Enough buffers that none is still in L2 when its turn comes again."""
    return min(NUM_LAUNCHES, max(2, -(-2 * L2_BYTES // bytes_each) + 1))


def measure_copy(num_bytes: int, shape: str, num_replays: int) -> Row:
    """A device-to-device copy that reads and writes ``num_bytes`` in all."""
    half = num_bytes // 2
    launches = []
    for _ in range(num_buffers(num_bytes)):
        source = torch.zeros(half, dtype=torch.uint8, device="cuda")
        launches.append(partial(torch.empty_like(source).copy_, source))
    time_us = measure_us(launches, NUM_LAUNCHES, num_replays)
    return Row("copy", shape, time_us, num_bytes / time_us / 1e6, None, "")


def make_quantize_launches(
    cols: int, x_dtype: torch.dtype, fp8: torch.dtype, transpose: bool, num_bytes: int
) -> list[Callable[[], object]]:
    """Quantize launches with their amax, each on input and output buffers of its own."""
    scale, scale_inv = torch.ones(1, device="cuda"), torch.ones(1, 4, device="cuda")
    amax = torch.zeros(1, device="cuda")
    launches = []
    for _ in range(num_buffers(num_bytes)):
        x = torch.randn(ROWS, cols, device="cuda").to(x_dtype)
        out = kernels.quantize(x, scale, scale_inv, 0, fp8, transpose=transpose)
        launches.append(partial(kernels.quantize, x, scale, scale_inv, 0, fp8, amax=amax, transpose=transpose, out=out))
    return launches


def measure_quantize(cols: int, x_dtype: torch.dtype, fp8: torch.dtype, transpose: bool, num_replays: int) -> tuple[Row, Row]:
    """The quantize kernel with its amax, and a copy that moves as many bytes."""
    num_bytes = ROWS * cols * (x_dtype.itemsize + 1 + int(transpose))
    time_us = measure_us(make_quantize_launches(cols, x_dtype, fp8, transpose, num_bytes), NUM_LAUNCHES, num_replays)
    shape = f"{ROWS}x{cols}"
    copy = measure_copy(num_bytes, shape, num_replays)
    kind = "quantize+transpose" if transpose else "quantize"
    name = f"{kind} {str(x_dtype).removeprefix('torch.')} -> {'e4m3' if fp8 is E4M3 else 'e5m2'}"
    target = f">= {TARGET_RATIO}" if transpose and x_dtype is torch.bfloat16 else ""
    return Row(name, shape, time_us, num_bytes / time_us / 1e6, copy.time_us / time_us, target), copy


def weight_shapes(preset: str) -> list[tuple[int, int]]:
    """Of the linears of all blocks: qkv, out, w13, w2."""
    shape = PRESETS[preset].shape
    width, ffn = shape.width, shape.ffn
    return [(3 * width, width), (width, width), (2 * ffn, width), (width, ffn)] * shape.num_layers


def measure_weights(preset: str, num_replays: int) -> list[Row]:
    """All fp32 weights of a preset with their amaxes, by one launch and one by one, and a copy that moves as many bytes."""
    shapes = weight_shapes(preset)
    num_slots, num_bytes = len(shapes), sum(rows * cols for rows, cols in shapes) * 6
    scale, scale_inv = torch.ones(num_slots, device="cuda"), torch.ones(num_slots, 4, device="cuda")
    amax = torch.zeros(num_slots, device="cuda")
    entries = []
    for slot, shape in enumerate(shapes):
        x = torch.randn(shape, device="cuda")
        to = kernels.QuantizeTo(scale, scale_inv, slot, E4M3, amax)
        entries.append(kernels.QuantizeEntry(x, to, kernels.allocate(x, E4M3, True)))
    table = kernels.QuantizeTable(entries)
    singles: list[Callable[[], object]] = [
        partial(kernels.quantize, x, *to[:4], amax=amax, transpose=True, out=out) for x, to, out in entries
    ]
    many_us = measure_us([partial(kernels.quantize_many, table)], NUM_LAUNCHES, num_replays)
    singles_us = measure_us(singles, num_slots, num_replays) * num_slots
    name = f"{num_slots} fp32 weights of {preset}"
    copy = measure_copy(num_bytes, name, num_replays)
    measured = (("quantize_many", many_us), ("quantize+transpose one by one", singles_us))
    return [*(Row(kind, name, us, num_bytes / us / 1e6, copy.time_us / us, "") for kind, us in measured), copy]


def make_state(num_slots: int, history_len: int) -> tuple[torch.Tensor, ...]:
    """amax_history, scale, scale_inv, num_nonfinite, num_updates."""
    return (
        torch.rand(history_len, num_slots, device="cuda"),
        torch.ones(num_slots, device="cuda"),
        torch.ones(num_slots, 4, device="cuda"),
        torch.zeros(num_slots, dtype=torch.int32, device="cuda"),
        torch.zeros(2, dtype=torch.int64, device="cuda"),
    )


def fill_staging_row(state: tuple[torch.Tensor, ...]) -> None:
    """Mark every slot used: one that was not would not roll."""
    state[0][0].fill_(1.5)


def fill_and_update(state: tuple[torch.Tensor, ...]) -> None:
    fill_staging_row(state)
    history, scale, scale_inv, num_nonfinite, num_updates = state
    rule: dict[str, Any] = {"direction": 0, "fp8_max": 448.0, "margin": 0, "algo": "max"}
    kernels.update_scales_(history, scale, scale_inv, num_nonfinite, num_updates, start=0, end=history.shape[1], **rule)


def measure_update(num_slots: int, history_len: int, num_replays: int) -> Row:
    """The scale update of all slots, every one rolling; the time of filling the staging row is taken off."""
    states = [make_state(num_slots, history_len) for _ in range(NUM_UPDATES)]
    both_us = measure_us([partial(fill_and_update, state) for state in states], NUM_UPDATES, num_replays)
    fill_us = measure_us([partial(fill_staging_row, state) for state in states], NUM_UPDATES, num_replays)
    time_us = both_us - fill_us
    num_bytes = 2 * 4 * history_len * num_slots
    return Row("update", f"{num_slots} slots x {history_len} rows", time_us, num_bytes / time_us / 1e6, None, f"<= {TARGET_UPDATE_US} us")


def measure_moves(num_replays: int) -> list[Row]:
    """The copy and the fill kernel: a large size, and one a step has (tokens and labels of 1b; the largest memset replaced).

    All buffers of the small size are in L2 together, as a step's inputs may be.
    """
    kernels.preload()
    index = torch.cuda.current_device()
    rows: list[Row] = []
    for num_bytes in (1 << 16, 1 << 26):
        shape = f"{num_bytes >> 10:,} KiB"
        # A copy takes three ranges a launch; each of these two is read and written.
        pairs = [torch.zeros(4, num_bytes, dtype=torch.uint8, device="cuda") for _ in range(num_buffers(4 * num_bytes))]
        copies = [[Copy(x[i].data_ptr(), x[i + 2].data_ptr(), num_bytes) for i in range(2)] for x in pairs]
        launches: list[Callable[[], object]] = [partial(launch_copies, index, copy_launches(each)) for each in copies]
        own_us = measure_us(launches, NUM_LAUNCHES, num_replays)
        copy = measure_copy(4 * num_bytes, f"2 x {shape}", num_replays)
        rows += [Row("copy of two ranges", copy.shape, own_us, 4 * num_bytes / own_us / 1e6, copy.time_us / own_us, ""), copy]
        # Where they replace memsets of a graph they do not begin early either.
        launches = [
            partial(device.launch, index, FILL_KERNEL, *fill_launch(Fill(x.data_ptr(), 0, 1, num_bytes)), begins_early=False) for x in pairs
        ]
        own_us = measure_us(launches, NUM_LAUNCHES, num_replays)
        copy = measure_copy(num_bytes, shape, num_replays)
        rows += [Row("fill", shape, own_us, num_bytes / own_us / 1e6, copy.time_us / own_us, ""), copy]
        memset_us = measure_us([x[0].zero_ for x in pairs], NUM_LAUNCHES, num_replays)
        rows.append(Row("torch's zero_", shape, memset_us, num_bytes / memset_us / 1e6, copy.time_us / memset_us, ""))
    return rows


def measure_all(num_replays: int) -> list[Row]:
    """Every case, weights (fp32) last in each width, then all weights of a model."""
    kernels.preload()
    rows = []
    for cols in COLS:
        cases = [(torch.bfloat16, fp8, transpose) for fp8 in (E4M3, E5M2) for transpose in (True, False)]
        cases += [(torch.float32, E4M3, True)]
        for x_dtype, fp8, transpose in cases:
            row, copy = measure_quantize(cols, x_dtype, fp8, transpose, num_replays)
            rows += [row, copy]
    for preset in ("micro", "1b"):
        rows += measure_weights(preset, num_replays)
    return [*rows, *measure_moves(num_replays), measure_update(512, 1024, num_replays), measure_update(512, 16, num_replays)]


def print_table(rows: list[Row]) -> None:
    """One line a case; copies only as the ratio of the case they were made for."""
    print(f"{'kernel':40} {'shape':22} {'us':>8} {'TB/s':>6} {'of copy':>8}  target")
    for row in rows:
        if row.name != "copy":
            ratio = "" if row.ratio_to_copy is None else f"{row.ratio_to_copy:.3f}"
            print(f"{row.name:40} {row.shape:22} {row.time_us:8.2f} {row.bandwidth_tb_s:6.2f} {ratio:>8}  {row.target}")
    best = max(row.bandwidth_tb_s for row in rows if row.name == "copy")
    print(f"best copy: {best:.2f} TB/s")


def run_script(name: str, about: str | None, measure: Callable[[int], list[Row]], arguments: list[str] | None) -> int:
    """The command line of a table of kernels: measure, print, and write if asked. Returns 2 without a GPU."""
    parser = argparse.ArgumentParser(
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"example: python profiles/{name}.py --replays 50 --out {name}.json",
    )
    parser.add_argument(
        "--replays", type=int, default=30, metavar="N", help="graph replays per case, of which the median counts (default: 30)"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="also write the cases as JSON: device, torch version and one object a case"
    )
    parsed = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print(f"profiles/{name}.py needs an NVIDIA GPU with FP8, and torch sees none.", file=sys.stderr)
        return 2
    rows = measure(parsed.replays)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print_table(rows)
    if parsed.out is not None:
        result = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": [asdict(row) for row in rows]}
        parsed.out.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(run_script("kernels", __doc__, measure_all, None))
