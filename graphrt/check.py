"""Whether a step can be captured: what a graph could not hold, what it would freeze, and what would run outside it.

The step is run three times, eagerly and watched operation by operation, and everything is put back. No GPU is needed, and
nothing is captured: a laptop can tell. What the recorder cannot see stands in `graphrt.capture.recorder`.
"""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from graphrt import batch as batches
from graphrt.capture.record_location import in_parentheses, locations_of
from graphrt.capture.recorder import CollectionEnded, Recording, compare
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
        lines = [f"The step can be captured: {self.num_operations:,} operations." if self else "The step cannot be captured:"]
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
        reason = trainer.report().optimizer_outside_reason
        try:
            with _forwards_remembered():
                first, second = _watch(trainer, batch)
        except CollectionEnded as ended:
            return _failed(ended.error, ended.refusals, reason)
        except Exception as error:
            return _failed(error, (), reason)
        return CheckReport(
            hazards=_sentences((*first.refusals, *second.refusals)),
            differences=_sentences(compare(first, second)),
            num_operations=second.num_nodes,
            optimizer_outside_reason=reason,
        )


def _failed(error: Exception, refusals: Sequence[CaptureError], reason: str | None) -> CheckReport:
    """The report of a step that raised; an error of graphrt's that is no refusal is the caller's."""
    if isinstance(error, CaptureError):
        return CheckReport(_sentences((*refusals, error)), (), 0, reason)
    if isinstance(error, GraphrtError):
        raise error
    return CheckReport(_sentences(refusals), (), 0, reason, _describe(error))


def _sentences(found: Iterable[object]) -> tuple[str, ...]:
    """Each once, in order."""
    return tuple(dict.fromkeys(map(str, found)))


def _describe(error: Exception) -> str:
    """The error's kind, words, and the innermost place in the user's code that it came from."""
    places = locations_of(error)
    return f"{type(error).__name__}: {error}{in_parentheses(places[-1] if places else None)}"


@contextmanager
def _forwards_remembered() -> Iterator[None]:
    """Each backward operation knows the line of its forward."""
    was_enabled, was_checking = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
    torch.autograd.set_detect_anomaly(True, check_nan=False)
    try:
        with warnings.catch_warnings():
            # torch tells of a backward that raised in many lines; the report has it in one.
            warnings.filterwarnings("ignore", message="Error detected in")
            yield
    finally:
        torch.autograd.set_detect_anomaly(was_enabled, was_checking)


def _watch(trainer: Trainer, batch: Any) -> tuple[Recording, Recording]:
    """Two like steps; a warmup step before them makes gradients, optimizer state and scales, which they find in place."""
    runner = trainer.make_captured()
    try:
        trainer.step_with(runner, batch)
        return trainer.watch_with(runner, batch), trainer.watch_with(runner, batch)
    finally:
        runner.close()
