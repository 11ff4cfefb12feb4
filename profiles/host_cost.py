"""Host time of a captured step beyond the replay call itself, part by part.

    python profiles/host_cost.py micro 1b

The GPU's queue is drained before each measurement, so that nothing waits for the device.
"""

import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from graphrt import batch as batches
from graphrt.eager.autocast import FlushManager
from graphrt.jobsetup import build_trainer
from graphrt.settings import make_settings


def median_us(call: Callable[[], Any], repeats: int = 60) -> float:
    """Median host time of one call."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return sorted(times)[repeats // 2] * 1e6


def step_us(step: Callable[[], Any], graph: Any, repeats: int = 40) -> tuple[float, float]:
    """Median host times of the replay call inside a step, and of the rest of that step, on an idle device."""
    replay, inside, rest = graph.replay, [], []

    def timed_replay() -> None:
        start = time.perf_counter()
        replay()
        inside.append(time.perf_counter() - start)

    graph.replay = timed_replay
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        rest.append(time.perf_counter() - start - inside[-1])
    del graph.replay
    return sorted(inside)[repeats // 2] * 1e6, sorted(rest)[repeats // 2] * 1e6


def measure(preset: str) -> None:
    """Print the parts of one preset's step."""
    settings = make_settings({"preset": preset, "precision": "fp8", "mode": "graph", "device": "cuda", "vocab_size": 32768})
    trainer = build_trainer(settings, torch.device("cuda", 0))
    shape = (settings.batch_size, settings.seq_len)
    batch = {name: torch.randint(1000, shape, device="cuda") for name in ("tokens", "labels")}
    for _ in range(4):
        trainer.step(batch)
    runner = trainer._captured
    assert runner is not None
    graph = runner.select(batch)
    assert graph is not None
    assert graph.graph is not None
    assert graph.results is not None
    torch.cuda.synchronize()
    parts = {
        "plain": lambda: batches.plain(batch),
        "select": lambda: runner.select(batch),
        "attach": trainer._body.gradients.attach,
        "fingerprint": runner.check,
        "flush": lambda: FlushManager().flush(),
        "refresh": trainer._body.optimizer.refresh,
        "copy inputs": lambda: graph.copy_inputs(batch),
        "results": graph.results.read,
    }
    print(f"{preset}: {len(trainer.named_parameters)} parameters")
    for name, call in parts.items():
        print(f"  {name:12} {median_us(call, 30):8.1f} us")
        torch.cuda.synchronize()
    replay, rest = step_us(lambda: trainer.step(batch), graph.graph)
    print(f"  in one step: replay call {replay:.1f} us, all else {rest:.1f} us")
    trainer.close()


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit("host_cost.py needs an NVIDIA GPU, and there is none.")
    for name in sys.argv[1:] or ["micro"]:
        measure(name)
