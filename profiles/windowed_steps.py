"""The program that run_nsys.py and run_ncu.py profile: steps of a preset, as bench.py runs them, some of them in a window.

    python profiles/windowed_steps.py --preset micro --start 10 --stop 12 [--node-map node_map.json]

The window is `graphrt.nsys_window`. The node map of the captured step is saved where --node-map says, for summarize.py and
run_ncu.py to name layers with.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from graphrt.presets import PRESETS

POOL = 4  # different batches


def add_job_options(parser: argparse.ArgumentParser) -> None:
    """What this program and those that start it have in common."""
    parser.add_argument("--preset", default="micro", choices=sorted(PRESETS), help="(default: %(default)s)")
    parser.add_argument("--precision", default="fp8", help="of the blocks' linears (default: %(default)s)")
    parser.add_argument("--mode", default="graph", choices=("graph", "eager"), help="(default: %(default)s)")


def job_command(options: argparse.Namespace, start: int, stop: int, node_map: Path | None = None) -> list[str]:
    """The command that runs this program with the options of `add_job_options`."""
    command = [sys.executable, str(Path(__file__).resolve()), "--start", str(start), "--stop", str(stop)]
    command += ["--preset", options.preset, "--precision", options.precision, "--mode", options.mode]
    return command + (["--node-map", str(node_map)] if node_map else [])


def save_node_map(trainer: Any, batch: Any, path: Path) -> None:
    """Write the map of the graph that runs ``batch``."""
    graph = trainer._captured.select(batch) if trainer._captured is not None else None
    if graph is None or graph.node_map is None:
        print("There is no node map to save: the step is not captured in this mode.", file=sys.stderr)
    else:
        graph.node_map.save(path)


def run(options: argparse.Namespace) -> int:
    """Steps 1 to stop, the last of them in the window; the exit code."""
    import torch

    import graphrt
    from graphrt.jobsetup import build_trainer
    from graphrt.settings import make_settings

    if not torch.cuda.is_available():
        print("windowed_steps.py needs an NVIDIA GPU, and there is none.", file=sys.stderr)
        return 2
    names = {"preset": options.preset, "precision": options.precision, "mode": options.mode}
    settings = make_settings({**names, "device": "cuda", "vocab_size": 32768})
    trainer = build_trainer(settings, torch.device("cuda", 0))
    pool = torch.randint(PRESETS[options.preset].shape.vocab, (POOL, 2, settings.batch_size, settings.seq_len), device="cuda")
    batches = [{"tokens": tokens, "labels": labels} for tokens, labels in pool]
    with trainer, graphrt.nsys_window(options.start, options.stop):
        for step in range(options.stop):
            trainer.step(batches[step % POOL])
        if options.node_map:
            save_node_map(trainer, batches[0], options.node_map)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_job_options(parser)
    parser.add_argument("--start", type=int, default=10, help="first step in the window, from 1 (default: %(default)s)")
    parser.add_argument("--stop", type=int, default=12, help="last step in the window (default: %(default)s)")
    parser.add_argument("--node-map", type=Path, help="where to save the node map")
    return run(parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
