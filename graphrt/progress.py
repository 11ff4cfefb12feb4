"""What a run shows and records while it trains, with one host read for many steps."""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text
from torch import Tensor

from graphrt.step import StepResult
from graphrt.stepclock import ReplayClock

__all__ = ["MetricsLog", "RunProgress", "make_progress", "show_validation"]

_FLUSH_INTERVAL_S = 1.0
_LINE_INTERVAL_S = 20.0  # where no live display is possible

Rows = list[dict[str, Any]]


class RunProgress(Progress):
    """A bar, and under it a line with the numbers of the last steps."""

    numbers = ""

    def get_renderables(self) -> Iterator[RenderableType]:
        """The bar, and the line once there is one."""
        yield from super().get_renderables()
        if self.numbers:
            yield Text(self.numbers)


def make_progress(console: Console, *, transient: bool = False) -> RunProgress:
    """A bar with steps and time left, and room for a line of numbers; a transient one goes when it ends."""
    columns = TextColumn("[bold]{task.description}[/]"), BarColumn(None), MofNCompleteColumn(), TimeRemainingColumn()
    return RunProgress(*columns, console=console, transient=transient)


@contextmanager
def show_validation(console: Console, progress: RunProgress | None, num_batches: int) -> Iterator[Callable[[], None]]:
    """A bar while validating, or a line now and then where there is no terminal; what is yielded is called after each batch.

    Args:
        console: where to show it.
        progress: the display that is open; None for one of its own.
        num_batches: batches to come.
    """
    lines = _Lines(console)
    with make_progress(console, transient=True) if progress is None else nullcontext(progress) as bars:
        task, num_done = bars.add_task("validating", total=num_batches), 0

        def advance() -> None:
            nonlocal num_done
            num_done += 1
            bars.update(task, completed=num_done)
            lines.print_now_and_then(f"validating: {num_done} of {num_batches} batches")

        try:
            yield advance
        finally:
            bars.remove_task(task)


class _Lines:
    """Prints a line at most so often, and only where there is no live display."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._printed_at_s = time.perf_counter()

    def restart(self) -> None:
        """Something else has been printed."""
        self._printed_at_s = time.perf_counter()

    def print_now_and_then(self, line: str) -> None:
        """Print the line if it is time."""
        if not self._console.is_terminal and time.perf_counter() - self._printed_at_s >= _LINE_INTERVAL_S:
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)
            self.restart()


class MetricsLog:
    """Collects the results of steps on the device; once a second reads them all together, records and shows them.

    Args:
        record: takes rows for metrics.jsonl.
        progress: what to move.
        step: number of steps done before.
        num_steps: number of steps in all.
        tokens_per_step: for the speed.
        num_skipped: steps skipped before.
        clock: hears the replays of the steps; None where there is no GPU.
    """

    def __init__(
        self,
        record: Callable[[Rows], None],
        progress: RunProgress,
        step: int,
        num_steps: int,
        tokens_per_step: int,
        *,
        num_skipped: int = 0,
        clock: ReplayClock | None = None,
    ) -> None:
        self._record, self._progress, self._tokens_per_step = record, progress, tokens_per_step
        self._num_skipped, self._clock = num_skipped, clock
        self._task: TaskID = progress.add_task("training", total=num_steps, completed=step)
        self._pending: list[tuple[int, float, StepResult]] = []
        self._flushed_at_s = time.perf_counter()
        self._lines = _Lines(progress.console)

    def add(self, step: int, lr: float, result: StepResult) -> None:
        """Take the result of a step; `step` counts from 1."""
        self._pending.append((step, lr, result))
        self._progress.update(self._task, completed=step)
        if time.perf_counter() - self._flushed_at_s >= _FLUSH_INTERVAL_S:
            self.flush()

    def add_evaluation(self, step: int, val_loss: float, unit: str) -> None:
        """Record a validation loss, given in nats per token, and show it in ``unit``, which is bits per something."""
        self._record([{"step": step, "val_loss": _finite(val_loss)}])
        console = self._progress.console
        console.print(f"step {step}: validation {val_loss / math.log(2):.3f} {unit}")
        if not console.is_terminal:
            # There the live line is shown once only, at the end.
            console.print(f"  {self._progress.numbers}", highlight=False, soft_wrap=True)
            self._lines.restart()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Flush, and leave the time spent in the block out of step times and speed."""
        self.flush()
        try:
            yield
        finally:
            self._restart()

    def flush(self) -> None:
        """Read what is pending from the device, record it, show the last of it."""
        if not self._pending:
            return
        rows = self._read_rows()
        self._num_skipped += sum(row["skipped"] for row in rows)
        self._progress.numbers = _describe(rows[-1], self._num_skipped)
        self._record(rows)
        self._lines.print_now_and_then(f"step {rows[-1]['step']}: {self._progress.numbers}")
        self._pending, self._flushed_at_s = [], time.perf_counter()

    def _read_rows(self) -> Rows:
        losses, norms, skipped = (_read(getattr(result, name) for *_, result in self._pending) for name in ("loss", "grad_norm", "skipped"))
        speed = self._speed()
        return [
            {"step": step, "loss": _finite(loss), "grad_norm": _finite(norm), "lr": lr, "skipped": bool(is_skipped), **speed}
            for (step, lr, _), loss, norm, is_skipped in zip(self._pending, losses, norms, skipped, strict=True)
        ]

    def _speed(self) -> dict[str, float]:
        """Means over the pending steps. The device has been waited for, so the host's clock covers what it did."""
        step_s = (time.perf_counter() - self._flushed_at_s) / len(self._pending)
        speed = {"tokens_per_s": round(self._tokens_per_step / step_s, 1), "step_ms": round(step_s * 1e3, 3)}
        gap_share = None if self._clock is None else self._clock.read()
        return speed if gap_share is None else {**speed, "gap_share": round(gap_share, 4)}

    def _restart(self) -> None:
        self._flushed_at_s = time.perf_counter()
        if self._clock is not None:
            self._clock.restart()


def _describe(row: dict[str, Any], num_skipped: int) -> str:
    loss = row["loss"]
    # In bits, as validations are shown.
    parts = [f"loss {_number(None if loss is None else loss / math.log(2), '.3f')} bits", f"grad norm {_number(row['grad_norm'], '.3g')}"]
    parts += [f"{row['tokens_per_s']:,.0f} tokens/s", f"{row['step_ms']:,.1f} ms/step"]
    if "gap_share" in row:
        parts.append(f"gap {row['gap_share']:.1%}")
    return "  ".join([*parts, f"skipped {num_skipped}"])


def _number(value: float | None, form: str) -> str:
    return "not finite" if value is None else format(value, form)


def _read(values: Iterable[Tensor | None]) -> list[float]:
    tensors = [torch.tensor(math.nan) if value is None else value.detach().float() for value in values]
    return torch.stack(tensors).tolist()


def _finite(value: float) -> float | None:
    # JSON has no NaN or infinity.
    return value if math.isfinite(value) else None
