"""Step times of graphrt's presets, beside what else one could pick, in one run on one GPU.

Each measurement runs in a process of its own: the median of 20 steps by CUDA events after warmup, host time a step, peak
memory, and from a trace of three more steps the share of their time in which no kernel runs (gap share).

    python profiles/bench.py --presets micro,1b --precisions fp8,bf16
    python profiles/bench.py --presets 1b --peers peers.py --peer-modes graph,compile+graph,ao+compile+graph

The work is the same for all: fp32 master weights, bf16 autocast, the head in bf16, causal attention, cross-entropy over
all tokens, gradient norm clipped to 1, AdamW, a new batch of random tokens each step. --peers names a script that prints
one JSON line with ms, tok_s and mem_gib when called as `python PEERS PRESET MODE`, and with `--profile` behind it a table of
its kernels too, which tells its attention backend; it is called that way with --peers-profile.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from itertools import pairwise, product
from pathlib import Path
from typing import Any

from graphrt.presets import PRESETS
from graphrt.profiling.events import covered

ATTENTION_WORDS = ("cudnn", "flash", "fmha", "efficient")  # in names of attention kernels
NUM_STEPS, NUM_WARMUP_STEPS, NUM_PROFILED = 20, 8, 3
POOL = 8


def measure(preset_name: str, precision: str, mode: str, accum: str, transpose: str, show_kernels: int) -> dict[str, Any]:
    """Time one configuration in this process."""
    import torch

    from graphrt.settings import make_settings

    preset = PRESETS[preset_name]
    settings = make_settings(
        {
            "preset": preset_name,
            "precision": precision,
            "mode": mode.removeprefix("compile+"),
            "device": "cuda",
            "vocab_size": 32768,
            "backward_accum": accum,
            "weight_transpose": None if transpose == "preset" else transpose,
        }
    )
    device = torch.device("cuda", 0)
    trainer = _build(settings, device, is_compiled=mode == "compile+graph")
    shape = (POOL, 2, settings.batch_size, settings.seq_len)
    pool = torch.randint(preset.shape.vocab, shape, device=device)
    batches = [{"tokens": tokens, "labels": labels} for tokens, labels in pool]
    start = time.perf_counter()
    for i in range(NUM_WARMUP_STEPS):
        trainer.step(batches[i % POOL])
    torch.cuda.synchronize()
    warmup_s = time.perf_counter() - start
    events = [torch.cuda.Event(enable_timing=True) for _ in range(NUM_STEPS + 1)]
    host, result = [], None
    events[0].record()
    for i in range(NUM_STEPS):
        begin = time.perf_counter()
        result = trainer.step(batches[i % POOL])
        host.append(time.perf_counter() - begin)
        events[i + 1].record()
    torch.cuda.synchronize()
    assert result is not None
    times_ms = sorted(a.elapsed_time(b) for a, b in pairwise(events))
    ms = times_ms[NUM_STEPS // 2]
    peak = torch.cuda.max_memory_allocated(device)
    report = trainer.report()
    row = {
        "preset": preset_name,
        "side": " ".join(("graphrt", precision, mode, *_fp8_options(settings))),
        "ms": round(ms, 3),
        "host_us": round(sorted(host)[NUM_STEPS // 2] * 1e6, 1),
        "tok_s": round(settings.batch_size * settings.seq_len / ms * 1e3),
        "mem_gib": round(peak / 2**30, 2),
        "loss": round(float(result.loss), 4),
        "warmup_s": round(warmup_s, 2),
        "capture_s": round(report.capture.capture_s, 2) if report.capture else None,
        "num_nodes": sum(report.capture.num_nodes_by_kind.values()) if report.capture else None,
    }
    return {**row, **_profile(trainer, batches, show_kernels)}


def _fp8_options(settings: Any) -> list[str]:
    """What a row says of the FP8 products beyond the usual."""
    asked = {"fast": settings.backward_accum == "fast", "again": settings.weight_transpose == "again"}
    return [name for name, is_asked in asked.items() if is_asked and settings.precision == "fp8"]


def _build(settings: Any, device: Any, *, is_compiled: bool) -> Any:
    """The preset's trainer; compiled: a model of torch's own operations, its blocks compiled around the converted linears."""
    import torch
    from plain_model import PlainLlama, cross_entropy

    import graphrt
    from graphrt.jobsetup import build_trainer, make_optimizer
    from graphrt.llama import is_block_linear

    with device:  # made where it runs: drawing a billion weights on a CPU takes longer than measuring
        if not is_compiled:
            return build_trainer(settings, device)
        torch.manual_seed(settings.seed)
        model: Any = PlainLlama(settings.shape, settings.seq_len)
    if settings.precision == "fp8":
        recipe = graphrt.DelayedScaling(
            backward_fast_accum=settings.backward_accum == "fast", keep_weight_transpose=settings.weight_transpose == "kept"
        )
        graphrt.convert_to_float8_training(model, recipe=recipe, module_filter_fn=is_block_linear)
    for block in model.blocks:
        block.compile()
    compiled_loss = torch.compile(cross_entropy)

    def loss_fn(model: Any, batch: Any) -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            return compiled_loss(model(batch["tokens"]), batch["labels"])

    return graphrt.Trainer(model, make_optimizer(model, settings.lr), loss_fn, max_grad_norm=1.0)


def _profile(trainer: Any, batches: list[Any], show_kernels: int) -> dict[str, Any]:
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as recorded:
        for i in range(NUM_PROFILED + 1):
            trainer.step(batches[i % POOL])
        torch.cuda.synchronize()
    kernels = sorted(
        (event for event in recorded.events() or () if event.device_type.name == "CUDA"), key=lambda event: event.time_range.start
    )
    # The first step begins with the profiler's own work.
    kernels = kernels[len(kernels) // (NUM_PROFILED + 1) :]
    kernel_ms = sum(event.device_time for event in kernels) / NUM_PROFILED / 1e3
    # Kernels of a second branch run beside others: what counts for the gaps is the time that any of them covers.
    busy_ms = covered((event.time_range.start, event.time_range.end) for event in kernels) / NUM_PROFILED / 1e3
    span_ms = (max(event.time_range.end for event in kernels) - kernels[0].time_range.start) / NUM_PROFILED / 1e3
    if show_kernels:
        print(recorded.key_averages().table(sort_by="cuda_time_total", row_limit=show_kernels, max_name_column_width=80))
    return {
        "kernel_ms": round(kernel_ms, 3),
        "busy_ms": round(busy_ms, 3),
        "traced_ms": round(span_ms, 3),
        "gap_share": round(1 - busy_ms / span_ms, 4),
        "num_kernels": len(kernels) // NUM_PROFILED,
        "attention": attention_of(event.name for event in kernels),
    }


def attention_of(names: Iterable[str]) -> str:
    """The words of `ATTENTION_WORDS` that kernels' names have, as in "cudnn+flash" (cuDNN's own flash attention)."""
    text = "\n".join(names).lower()
    return "+".join(word for word in ATTENTION_WORDS if word in text) or "?"


def run_process(command: list[str], label: str, *, is_shown: bool = True) -> dict[str, Any] | None:
    """The JSON lines that a command prints, as one row; None if it fails. The rest of its output is shown, or only read."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    others = [line for line in done.stdout.splitlines() if not line.startswith("{")]
    if others and is_shown:
        print("\n".join(others), file=sys.stderr)
    if done.returncode or not lines:
        print(f"{label} failed: {(done.stderr or done.stdout).strip().splitlines()[-1:]}", file=sys.stderr)
        return None
    rows = [json.loads(line) for line in lines]
    told = {"attention": attention_of(others)} if others else {}
    return {**told, **{key: value for row in rows for key, value in row.items()}}


def _print_table(rows: list[dict[str, Any]]) -> None:
    width = max(len(row["side"]) for row in rows)
    header = (
        f"{'preset':8} {'side':{width}} {'ms':>9} {'host us':>8} {'tokens/s':>10} {'ratio':>6} {'gap':>6} {'GiB':>7} {'loss':>8}  attention"
    )
    print(header)
    for preset in dict.fromkeys(row["preset"] for row in rows):
        group = [row for row in rows if row["preset"] == preset]
        peers = [row["ms"] for row in group if not row["side"].startswith("graphrt")]
        best = min(peers) if peers else min(row["ms"] for row in group)
        for row in group:
            gap = f"{row['gap_share']:.1%}" if row.get("gap_share") is not None else "-"
            print(
                f"{preset:8} {row['side']:{width}} {row['ms']:9.3f} {row.get('host_us') or 0:8.0f} {row['tok_s']:10,} "
                f"{row['ms'] / best:6.3f} {gap:>6} {row['mem_gib']:7.2f} {row['loss']:8.4f}  {row.get('attention', '-')}"
            )


def main() -> int:
    """Run what was asked for and print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", default="micro,125m,1b,8bslice", help="comma-separated (default: %(default)s)")
    parser.add_argument("--precisions", default="fp8", help="of graphrt's side: fp8, bf16 (default: %(default)s)")
    parser.add_argument(
        "--modes",
        default="graph",
        help="of graphrt's side: graph, eager; compile+graph is a model of torch's own operations with compiled blocks, "
        "converted and captured (default: %(default)s)",
    )
    parser.add_argument("--backward-accums", default="accurate", help="of FP8 gradient products: accurate, fast (default: %(default)s)")
    parser.add_argument(
        "--weight-transposes",
        default="preset",
        help="FP8 weights' transposed copies: preset, kept, again (default: %(default)s, the preset's)",
    )
    parser.add_argument("--peers", type=Path, help="script that measures the others")
    parser.add_argument("--peers-profile", action="store_true", help="have it print its kernels too, to name its attention backend")
    parser.add_argument("--peer-modes", default="graph,compile+graph,ao+compile+graph", help="modes to ask it for (default: %(default)s)")
    parser.add_argument("--kernels", type=int, default=0, metavar="N", help="also print the N most expensive kernels")
    parser.add_argument("--out", type=Path, help="write all rows as JSON")
    parser.add_argument("--one", nargs=5, metavar=("PRESET", "PRECISION", "MODE", "ACCUM", "TRANSPOSE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(*args.one, show_kernels=args.kernels)))
        return 0
    import torch

    if not torch.cuda.is_available():
        print("bench.py needs an NVIDIA GPU, and there is none.", file=sys.stderr)
        return 2
    found, num_failed = [], 0
    for row in _measure_all(args):
        if row is None:
            num_failed += 1
            continue
        found.append(row)
        print(f"{row['preset']} {row['side']}: {row['ms']} ms", file=sys.stderr, flush=True)
        if args.out:  # a run that is cut short leaves what it measured
            args.out.write_text(json.dumps(found, indent=1))
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    _print_table(found)
    return 1 if num_failed else 0


def _measure_all(args: argparse.Namespace) -> Iterator[dict[str, Any] | None]:
    """A row for each side of each preset, as it is measured; None for one that failed."""
    for preset in args.presets.split(","):
        options = args.precisions, args.modes, args.backward_accums, args.weight_transposes
        for one in product(*(filter(None, option.split(",")) for option in options)):
            command = [sys.executable, __file__, "--one", preset, *one, "--kernels", str(args.kernels)]
            yield run_process(command, " ".join((preset, *one)))
        for mode in args.peer_modes.split(",") if args.peers else []:
            profile = ["--profile"] if args.peers_profile else []
            row = run_process([sys.executable, str(args.peers), preset, mode, *profile], f"{preset} {mode}", is_shown=False)
            if row is not None:
                row |= {"preset": preset, "side": mode, "host_us": row.get("host_ms", 0) * 1e3}
            yield row


if __name__ == "__main__":
    sys.exit(main())
