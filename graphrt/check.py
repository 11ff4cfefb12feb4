"""Whether a step can be captured: what a graph could not hold, what it would freeze, and what would run outside it.

The step is run three times, eagerly and watched operation by operation, and everything is put back. No GPU is needed, and
nothing is captured: a laptop can tell. What the recorder cannot see stands in `graphrt.capture.recorder`.
"""

from dataclasses import dataclass
from typing import Any

from graphrt import batch as batches
from graphrt.capture.recorder import Recording, compare
from graphrt.errors import CaptureError, GraphrtError
from graphrt.trainer import Trainer

__all__ = ["CheckReport", "check_capture"]


@dataclass(frozen=True)
class CheckReport:
    """What `check_capture` found. True in a boolean context if the step can be captured.

    Attributes:
        hazards: what a CUDA graph cannot hold, one sentence of fact and one of remedy each, with file and line.
        differences: what two like steps did differently, which a graph would freeze; in the same form.
        num_operations: operations a replay would run.
        optimizer_outside_reason: why the optimizer would run after the replay; None if it is part of the graph.
        failure: what the step raised by itself, None if it ran.
    """

    hazards: tuple[str, ...]
    differences: tuple[str, ...]
    num_operations: int
    optimizer_outside_reason: str | None
    failure: str | None = None

    @property
    def can_be_captured(self) -> bool:
        """Whether nothing stands against a capture."""
        return not self.hazards and not self.differences and self.failure is None

    def __bool__(self) -> bool:
        return self.can_be_captured

    def __str__(self) -> str:
        lines = [f"The step {'can' if self else 'cannot'} be captured: {self.num_operations:,} operations."]
        if self.failure is not None:
            lines.append(f"  it failed  {self.failure}")
        lines += [f"  a graph cannot hold  {hazard}" for hazard in self.hazards]
        lines += [f"  a graph would freeze  {difference}" for difference in self.differences]
        if self.optimizer_outside_reason is not None:
            lines.append(f"  runs after the replay  the optimizer's step: {self.optimizer_outside_reason}")
        return "\n".join(lines)


def check_capture(trainer: Trainer, batch: Any) -> CheckReport:
    """Say whether ``trainer``'s step could be captured, without capturing it, and put everything back.

    Args:
        trainer: in any mode, before or after its first step.
        batch: what `Trainer.step` would get.

    Raises:
        GraphrtError: the trainer is closed, or the call is inside a region or torch.autocast.
        StaticInputError: the batch is not one that a step could take.
    """
    trainer.check_usable("check_capture")
    batch = batches.plain(batch)
    batches.split(batch, trainer.grad_accum_steps)
    with trainer.everything_put_back():
        try:
            first, second = _watch(trainer, batch)
        except GraphrtError as error:
            if not isinstance(error, CaptureError):
                raise
            return CheckReport((str(error),), (), 0, trainer.report().optimizer_outside_reason)
        except Exception as error:
            return CheckReport((), (), 0, trainer.report().optimizer_outside_reason, f"{type(error).__name__}: {error}")
        differences = compare(first, second)
        return CheckReport(
            hazards=tuple(dict.fromkeys(str(refusal) for refusal in (*first.refusals, *second.refusals))),
            differences=tuple(dict.fromkeys(str(difference) for difference in differences)),
            num_operations=second.num_nodes,
            optimizer_outside_reason=trainer.report().optimizer_outside_reason,
        )


def _watch(trainer: Trainer, batch: Any) -> tuple[Recording, Recording]:
    """Two like steps; a warmup step before them makes gradients, optimizer state and scales, which they find in place."""
    runner = trainer.make_captured()
    try:
        trainer.step_with(runner, batch)
        return trainer.watch_with(runner, batch), trainer.watch_with(runner, batch)
    finally:
        runner.close()
