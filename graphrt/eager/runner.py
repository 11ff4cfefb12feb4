"""The eager runner: the step body, run as Python, kernel by kernel."""

from collections.abc import Sequence
from typing import Any

import torch

from graphrt.eager.autocast import fp8_autocast
from graphrt.linear import forget_weights
from graphrt.step import StepBody, StepResult

__all__ = ["EagerRunner"]


class EagerRunner:
    """Runs the step body eagerly: breakpoints and hooks work, and nothing is remembered between steps."""

    def __init__(self, body: StepBody) -> None:
        self.body = body

    def step(self, microbatches: Sequence[Any]) -> StepResult:
        """One step; the optimizer runs inside the body where it can, by its own ``step()`` after it elsewhere."""
        result = self.body.run(microbatches, fp8_autocast())
        self.body.finish(result)
        return result

    def calibrate(self, microbatches: Sequence[Any]) -> None:
        """Forward and backward in high precision, recording amaxes and turning them into scales; gradients are left behind."""
        region = fp8_autocast(calibrating=True)
        with self.body.surroundings(), region:
            for microbatch in microbatches:
                loss, _ = self.body.evaluate(microbatch)
                (loss / len(microbatches)).backward()
        self.body.adopt_states(region)
        self.body.update_backward()

    @torch.no_grad()
    def evaluate(self, batch: Any) -> torch.Tensor:
        """The loss of one batch with the scales as they are."""
        try:
            with self.body.surroundings(), fp8_autocast():
                return self.body.evaluate(batch)[0]
        finally:
            forget_weights(self.body.model)
