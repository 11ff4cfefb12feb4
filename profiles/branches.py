"""What a second branch in the captured graph gains: the same step as one chain, and with each kind of work beside it.

    python profiles/branches.py

One trainer a preset, a graph for each way, all on the same state. They take turns in rounds of some steps, so that the GPU's
clock and its neighbours treat them alike; times are quartiles of all steps by CUDA events.
"""

import argparse
import sys
from collections import defaultdict
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import torch

from graphrt.capture import runner as capture_runner
from graphrt.capture import weights
from graphrt.capture.runner import CapturedRunner
from graphrt.jobsetup import build_trainer
from graphrt.presets import PRESETS
from graphrt.settings import make_settings
from graphrt.trainer import Trainer

NUM_STEPS, NUM_WARMUP_STEPS = 20, 4
NOTHING = 1 << 62  # elements that no model has: no weights go to the branch

#: name: what goes to the branch
WAYS = {"one chain": (), "weights": ("weights",), "small work": ("small work",), "both": ("weights", "small work")}


def capture(trainer: Trainer, batch: Any, beside: tuple[str, ...]) -> CapturedRunner:
    """A runner of its own whose graph has ``beside`` on the branch."""
    first_elements, side = weights._FIRST_ELEMENTS, capture_runner.asides
    weights._FIRST_ELEMENTS = first_elements if "weights" in beside else NOTHING
    capture_runner.asides = side if "small work" in beside else nullcontext
    try:
        runner = trainer.make_captured(has_branch=bool(beside))
        for _ in range(NUM_WARMUP_STEPS):
            trainer.step_with(runner, batch)
        return runner
    finally:
        weights._FIRST_ELEMENTS, capture_runner.asides = first_elements, side


def time_steps(trainer: Trainer, runner: CapturedRunner, batch: Any) -> list[float]:
    """Milliseconds of steps in a row."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(NUM_STEPS + 1)]
    events[0].record()
    for event in events[1:]:
        trainer.step_with(runner, batch)
        event.record()
    torch.cuda.synchronize()
    return [first.elapsed_time(second) for first, second in pairwise(events)]


def measure(preset: str, num_rounds: int) -> None:
    """Print a row for each way."""
    settings = make_settings({"preset": preset, "precision": "fp8", "mode": "graph", "device": "cuda", "vocab_size": 32768})
    device = torch.device("cuda", 0)
    with device:  # made where it runs, which is faster
        trainer = build_trainer(settings, device)
    with trainer:
        shape = (settings.batch_size, settings.seq_len)
        batch = {name: torch.randint(PRESETS[preset].shape.vocab, shape, device=device) for name in ("tokens", "labels")}
        runners = {name: capture(trainer, batch, beside) for name, beside in WAYS.items()}
        times: dict[str, list[float]] = defaultdict(list)
        for _ in range(num_rounds):
            for name, runner in runners.items():
                times[name] += time_steps(trainer, runner, batch)
        for name, runner in runners.items():
            ordered = sorted(times[name])
            quartiles = " ".join(f"{ordered[len(ordered) * i // 4]:9.3f}" for i in (1, 2, 3))
            num_beside = len(runner.branch.nodes)
            print(f"{preset:8} {name:10} {quartiles}  {num_beside:3} of {sum(runner.stats.num_nodes_by_kind.values())} nodes beside")
            runner.close()


def main() -> int:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("presets", nargs="*", default=["micro"], help="(default: micro)")
    parser.add_argument("--rounds", type=int, default=12, metavar="N", help=f"of {NUM_STEPS} steps each way (default: %(default)s)")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("branches.py needs an NVIDIA GPU, and there is none.", file=sys.stderr)
        return 2
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"{'preset':8} {'beside':10} {'quartiles of a step, ms':>29}")
    for preset in args.presets:
        measure(preset, args.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
