"""Host time of a captured step beyond the replay call itself, part by part, inside real steps.

    python profiles/host_cost.py micro 1b
    python profiles/host_cost.py tiny --device cpu        the parts alone tell something: a replay computes on the CPU

Twice: with the device idle at each step's begin, and with steps one after the other, where the replay call waits for the
device and everything else runs beside it. Times are medians; each part costs a third of a microsecond more for being timed.
"""

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from graphrt import batch as batches
from graphrt.eager.autocast import FlushManager
from graphrt.jobsetup import build_trainer
from graphrt.settings import make_settings

NUM_STEPS = 40


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


def measure(preset: str, device: torch.device) -> None:
    """Print the parts of one preset's step."""
    options = {"preset": preset, "precision": "fp8", "mode": "graph", "device": device.type, "vocab_size": 32768}
    settings = make_settings(options if preset != "tiny" else {**options, "vocab_size": None})
    trainer = build_trainer(settings, device)
    shape = (settings.batch_size, settings.seq_len)
    batch = {name: torch.randint(200, shape, device=device) for name in ("tokens", "labels")}
    for _ in range(4):
        trainer.step(batch)
    runner = trainer._captured
    assert runner is not None
    graph = runner.select(batch)
    assert graph is not None
    clock = Clock()
    body = trainer._body
    for name, owner, attribute in (
        ("whole step", trainer, "step"),
        ("check usable", trainer, "check_usable"),
        ("plain", batches, "plain"),
        ("select", runner, "select"),
        ("attach", body.gradients, "attach"),
        ("fingerprint", runner, "check"),
        ("flush", FlushManager, "flush"),
        ("refresh", body.optimizer, "refresh"),
        ("copy inputs", graph, "copy_inputs"),
        ("replay call", graph.graph, "replay"),
        ("results", graph.results, "read"),
    ):
        clock.watch(name, owner, attribute)
    columns = {"device idle": _steps(trainer, batch, clock, is_idle=True), "in a row": _steps(trainer, batch, clock, is_idle=False)}
    _print(f"{preset}: {len(trainer.named_parameters)} parameters", columns)
    trainer.close()


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


def main() -> int:
    """Measure the presets named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("presets", nargs="*", default=["micro"], help="(default: micro)")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="(default: %(default)s)")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        print("host_cost.py needs an NVIDIA GPU, and there is none; --device cpu tries it on the recorder.", file=sys.stderr)
        return 2
    for preset in args.presets:
        measure(preset, torch.device("cuda", 0) if args.device == "cuda" else torch.device("cpu"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
