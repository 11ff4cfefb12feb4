"""What a run shows and records while it trains, with one host read for many steps."""

import math
import time
from collections.abc import Iterable
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from torch import Tensor

from graphrt.runfolder import RunFolder
from graphrt.step import StepResult

__all__ = ["MetricsLog", "make_progress"]

_FLUSH_INTERVAL_S = 1.0


def make_progress(console: Console) -> Progress:
    """A bar with steps, loss, tokens/s and time left."""
    text = "[bold]{task.description}[/]", "loss {task.fields[loss]}", "{task.fields[speed]} tokens/s"
    columns = TextColumn(text[0]), BarColumn(None), MofNCompleteColumn(), TextColumn(text[1]), TextColumn(text[2]), TimeRemainingColumn()
    return Progress(*columns, console=console)


class MetricsLog:
    """Collects the results of steps on the device; once a second reads them all together, writes and shows them.

    Args:
        folder: where the rows go.
        progress: the bar to move.
        step: number of steps done before.
        num_steps: number of steps in all.
        tokens_per_step: for the speed.
    """

    def __init__(self, folder: RunFolder, progress: Progress, step: int, num_steps: int, tokens_per_step: int) -> None:
        self._folder, self._progress, self._tokens_per_step = folder, progress, tokens_per_step
        self._task: TaskID = progress.add_task("training", total=num_steps, completed=step, loss="-", speed="-")
        self._pending: list[tuple[int, float, StepResult]] = []
        self._flushed_at_s = time.perf_counter()

    def add(self, step: int, lr: float, result: StepResult) -> None:
        """Take the result of a step; `step` counts from 1."""
        self._pending.append((step, lr, result))
        self._progress.update(self._task, completed=step)
        if time.perf_counter() - self._flushed_at_s >= _FLUSH_INTERVAL_S:
            self.flush()

    def add_evaluation(self, step: int, val_loss: float, nats_per_unit: float, unit: str) -> None:
        """Record and show a validation loss, given in nats per token."""
        self.flush()
        self._folder.append_metrics([{"step": step, "val_loss": _finite(val_loss)}])
        self._progress.console.print(f"step {step}: validation {val_loss / nats_per_unit:.3f} {unit}")
        self._flushed_at_s = time.perf_counter()

    def flush(self) -> None:
        """Read what is pending from the device, write it, show the last of it."""
        if not self._pending:
            return
        losses, norms, skipped = (_read(getattr(result, name) for *_, result in self._pending) for name in ("loss", "grad_norm", "skipped"))
        speed = len(self._pending) * self._tokens_per_step / (time.perf_counter() - self._flushed_at_s)
        self._folder.append_metrics(
            _row(step, lr, loss, norm, is_skipped, speed)
            for (step, lr, _), loss, norm, is_skipped in zip(self._pending, losses, norms, skipped, strict=True)
        )
        self._progress.update(self._task, loss=f"{losses[-1]:.3f}", speed=f"{speed:,.0f}")
        self._pending, self._flushed_at_s = [], time.perf_counter()


def _row(step: int, lr: float, loss: float, norm: float, is_skipped: float, speed: float) -> dict[str, Any]:
    return {
        "step": step, "loss": _finite(loss), "grad_norm": _finite(norm), "lr": lr, "skipped": bool(is_skipped),
        "tokens_per_s": round(speed, 1),
    }  # fmt: skip


def _read(values: Iterable[Tensor | None]) -> list[float]:
    tensors = [torch.tensor(math.nan) if value is None else value.detach().float() for value in values]
    return torch.stack(tensors).tolist()


def _finite(value: float) -> float | None:
    # JSON has no NaN or infinity.
    return value if math.isfinite(value) else None
