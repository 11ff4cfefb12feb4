"""Host time of a captured step beyond the replay call itself, part by part, inside real steps.

    python profiles/host_cost.py micro 1b
    python profiles/host_cost.py --layers 2,4,8,16,32     how it grows: small models of that many blocks
    python profiles/host_cost.py --layers 4,16 --device cpu --evict-mib 64

Twice: with the device idle at each step's begin, and with steps one after the other, where the replay call waits for the
device and everything else runs beside it. Times are medians. The replay call, the whole step and the difference are
of steps in which nothing else is timed: each part takes some tenths of a microsecond more for it.

Most of the time goes into memory that other work has pushed out of the caches since the step before. ``--evict-mib`` stands in
for a replay with one pass over that much memory, so that a CPU shows the same; nothing is computed then. Compare parts with each
other, within one run.
"""

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from graphrt import Trainer, convert_to_float8_training
from graphrt import batch as batches
from graphrt.eager.autocast import FlushManager
from graphrt.jobsetup import make_optimizer
from graphrt.llama import Llama, is_block_linear, make_loss_fn
from graphrt.presets import PRESETS, ModelShape

NUM_STEPS = 40
_COLUMNS = {"device idle": True, "in a row": False}
_LAYERED_SHAPE = ModelShape(num_layers=0, width=128, num_heads=4, ffn=352, vocab=256)
_LAYERED_BATCH = (1, 32)  # sequences, tokens of each


class Clock:
    """Times calls of methods, wherever they are called from."""

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = defaultdict(list)

    def watch(self, name: str, owner: Any, attribute: str) -> None:
        """Time every call of ``owner.attribute`` under ``name``."""
        call: Callable[..., Any] = getattr(owner, attribute)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.times[name].append(time.perf_counter() - start)

        setattr(owner, attribute, timed)

    def medians_us(self) -> dict[str, float]:
        """By name, of the calls since the last reading."""
        medians = {name: sorted(times)[len(times) // 2] * 1e6 for name, times in self.times.items()}
        self.times.clear()
        return medians


def measure(title: str, shape: ModelShape, batch_shape: tuple[int, int], device: torch.device, evict_mib: int) -> None:
    """Print the parts of one model's step."""
    trainer = _build_trainer(shape, batch_shape[1], device)
    batch = {name: torch.randint(200, batch_shape, device=device) for name in ("tokens", "labels")}
    for _ in range(4):
        trainer.step(batch)
    runner = trainer._captured
    assert runner is not None
    graph = runner.select(batch)
    assert graph is not None
    if evict_mib:
        _evict_in(graph.graph, evict_mib)
    clock = Clock()
    body = trainer._body
    clock.watch("replay call", graph.graph, "replay")
    clock.watch("whole step", trainer, "step")
    totals = {name: _steps(trainer, batch, clock, is_idle=is_idle) for name, is_idle in _COLUMNS.items()}
    for name, owner, attribute in (
        ("check usable", trainer, "check_usable"),
        ("plain", batches, "plain"),
        ("select", runner, "select"),
        ("attach", body.gradients, "attach"),
        ("fingerprint", runner, "check"),
        ("flush", FlushManager, "flush"),
        ("refresh", body.optimizer, "refresh"),
        ("copy inputs", graph, "copy_inputs"),
        ("results", graph.results, "read"),
    ):
        clock.watch(name, owner, attribute)
    parts = {name: _steps(trainer, batch, clock, is_idle=is_idle) for name, is_idle in _COLUMNS.items()}
    _print(f"{title}: {len(trainer.named_parameters)} parameters", {name: parts[name] | totals[name] for name in _COLUMNS})
    trainer.close()


def _build_trainer(shape: ModelShape, seq_len: int, device: torch.device) -> Trainer:
    torch.manual_seed(0)
    with device:  # a large model's random numbers take a GPU no time
        model = Llama(shape, seq_len)
    model = convert_to_float8_training(model, module_filter_fn=is_block_linear)
    dtype = torch.bfloat16 if device.type == "cuda" else None
    return Trainer(model, make_optimizer(model, 1e-4), make_loss_fn(device.type, dtype), mode="graph", max_grad_norm=1.0)


def _evict_in(graph: Any, evict_mib: int) -> None:
    """Make each replay call overwrite so much memory, and nothing else."""
    memory = torch.empty(evict_mib << 18, dtype=torch.int32)
    graph.replay = lambda: memory.add_(1)


def _steps(trainer: Any, batch: Any, clock: Clock, *, is_idle: bool) -> dict[str, float]:
    for _ in range(NUM_STEPS):
        if is_idle and trainer.device.type == "cuda":
            torch.cuda.synchronize()
        trainer.step(batch)
        times = clock.times
        times["all but the replay call"].append(times["whole step"][-1] - times["replay call"][-1])
    return clock.medians_us()


def _print(title: str, columns: dict[str, dict[str, float]]) -> None:
    print(f"{title:26}" + "".join(f"{name:>14}" for name in columns))
    for part in next(iter(columns.values())):
        print(f"  {part:24}" + "".join(f"{values[part]:11.1f} us" for values in columns.values()))


def main(argv: list[str] | None = None) -> int:
    """Measure the presets named, then the models of so many layers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("presets", nargs="*", help="(default: micro, without --layers)")
    parser.add_argument("--layers", default="", help="numbers of blocks of small models, separated by commas")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="(default: %(default)s)")
    parser.add_argument("--evict-mib", type=int, default=0, help="memory to overwrite in place of each replay")
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        print("host_cost.py needs an NVIDIA GPU, and there is none; --device cpu tries it on the recorder.", file=sys.stderr)
        return 2
    device = torch.device("cuda", 0) if args.device == "cuda" else torch.device("cpu")
    layers = [int(number) for number in args.layers.split(",") if number]
    for name in args.presets or ([] if layers else ["micro"]):
        preset = PRESETS[name]
        measure(name, preset.shape, (preset.batch_size, preset.seq_len), device, args.evict_mib)
    for num_layers in layers:
        measure(f"{num_layers} layers", replace(_LAYERED_SHAPE, num_layers=num_layers), _LAYERED_BATCH, device, args.evict_mib)
    return 0


if __name__ == "__main__":
    sys.exit(main())
