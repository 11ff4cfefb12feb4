"""The program that tests/test_ranges.py runs under its profiler: steps of each kind, a section of the record each.

python ranged_steps.py LOG DEVICE
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stepping import TokenModel, make_trainer, token_batch, token_loss
from torch import nn

import graphrt

LOG, DEVICE = Path(sys.argv[1]), sys.argv[2]


@contextmanager
def section(name: str) -> Iterator[None]:
    """What the profiler hears inside stands between two lines of the record."""
    _write(f"begin {name}\n")
    try:
        yield
    finally:
        _write("end\n")


def _write(line: str) -> None:
    with LOG.open("a") as file:
        file.write(line)


class Fails:
    """token_loss, which raises when it is told to: in the forward, or in the backward."""

    def __init__(self) -> None:
        self.where = ""

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        loss, metrics = token_loss(model, batch)
        if self.where == "forward":
            raise ValueError("told to fail in the forward")
        if self.where == "backward":
            loss.register_hook(self.raise_in_backward)
        return loss, metrics

    def raise_in_backward(self, _grad: Any) -> None:
        raise ValueError("told to fail in the backward")


def step(trainer: graphrt.Trainer, name: str) -> None:
    with section(name):
        trainer.step(token_batch(trainer.steps_taken))


def failing_step(trainer: graphrt.Trainer, loss_fn: Fails, where: str, name: str) -> None:
    loss_fn.where = where
    try:
        step(trainer, name)
    except ValueError:
        loss_fn.where = ""
        return
    raise AssertionError("the step did not fail")


def captured() -> None:
    with make_trainer("graph", DEVICE) as trainer:
        for number in range(1, 6):
            step(trainer, f"captured {number}")


def eager() -> None:
    with make_trainer("eager", DEVICE, grad_accum_steps=2) as trainer:
        for number in range(1, 3):
            step(trainer, f"eager {number}")


def failing() -> None:
    loss_fn = Fails()
    with make_trainer("eager", DEVICE, loss_fn=loss_fn, calibrate=False) as trainer:
        for where in ("forward", "backward"):
            failing_step(trainer, loss_fn, where, f"eager {where} fails")
            step(trainer, f"eager after {where}")
    loss_fn = Fails()
    with make_trainer("graph", DEVICE, loss_fn=loss_fn, calibrate=False) as trainer:
        failing_step(trainer, loss_fn, "forward", "warmup fails")
        step(trainer, "warmup after")
        step(trainer, "warmup last")
        failing_step(trainer, loss_fn, "backward", "capture fails")
        step(trainer, "capture after")


def by_hand() -> None:
    model = graphrt.convert_to_float8_training(TokenModel().to(DEVICE))
    tokens = token_batch(0)["tokens"].to(DEVICE)
    for number in range(1, 4):
        with section(f"by hand {number}"):
            with graphrt.fp8_autocast():
                loss = model(tokens).float().square().mean()
            loss.backward()


def module_by_module() -> None:
    loss_fn = Fails()
    with make_trainer("eager", DEVICE, loss_fn=loss_fn, calibrate=False) as trainer:
        with graphrt.module_ranges(trainer.model):
            step(trainer, "modules")
            failing_step(trainer, loss_fn, "forward", "modules fail")
        step(trainer, "modules over")


captured()
eager()
failing()
by_hand()
module_by_module()
