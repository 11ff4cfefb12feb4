"""Optimizers issued inside the step agree with torch's own; the rest run outside it, and the report says why."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from stepping import assert_same_trajectory, deterministic, make_trainer, run, token_batch, token_batches, values
from torch import Tensor, nn

import graphrt


@pytest.fixture(autouse=True)
def _bitwise() -> Iterator[None]:
    with deterministic():
        yield


NUM_STEPS = 10
SHAPES = ((16, 16), (16, 8), (8, 16))


def _options(name: str) -> dict[str, dict[str, Any]]:
    variants: dict[str, dict[str, dict[str, Any]]] = {
        "AdamW": {"plain": {}, "amsgrad": {"amsgrad": True}, "maximize": {"maximize": True}, "no decay": {"weight_decay": 0.0}},
        "Adam": {
            "plain": {},
            "amsgrad": {"amsgrad": True},
            "maximize": {"maximize": True},
            "decoupled": {"decoupled_weight_decay": True},
        },
        "SGD": {
            "plain": {},
            "momentum": {"momentum": 0.9},
            "nesterov": {"momentum": 0.9, "nesterov": True},
            "maximize": {"maximize": True, "momentum": 0.5},
        },
        "RMSprop": {
            "plain": {},
            "momentum": {"momentum": 0.9},
            "centered": {"centered": True, "momentum": 0.5},
            "maximize": {"maximize": True},
        },
        "Muon": {
            "plain": {},
            "no nesterov": {"nesterov": False},
            "adjusted": {"adjust_lr_fn": "match_rms_adamw"},
        },
    }
    return {f"{name} {variant}": {"lr": 0.01, "weight_decay": 0.1, **options} for variant, options in variants[name].items()}


CASES = {
    label: (getattr(torch.optim, name), options)
    for name in ("AdamW", "Adam", "SGD", "RMSprop", "Muon")
    if hasattr(torch.optim, name)
    for label, options in _options(name).items()
}


class Matrices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in SHAPES)

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.layers[0]).tanh() @ self.layers[1] @ self.layers[2]


def _loss(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - 1.0).square().mean()


def _batch(step: int) -> Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(step))


def _schedule(optimizer: torch.optim.Optimizer, step: int) -> None:
    for group in optimizer.param_groups:
        group["lr"] = 0.02 / (1 + step)
        group["weight_decay"] = group["weight_decay"] * 0.9


@pytest.mark.parametrize(("cls", "options"), CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("max_norm", [None, 0.05])
def test_steps_agree_with_torchs_own_over_schedules(
    device: torch.device, cls: Callable[..., Any], options: dict[str, Any], max_norm: float | None
) -> None:
    torch.manual_seed(0)
    model = Matrices().to(device)
    reference = copy.deepcopy(model)
    theirs = cls(reference.parameters(), **options)
    starts = [p.detach().clone() for p in model.parameters()]
    with graphrt.Trainer(model, cls(model.parameters(), **options), _loss, mode="eager", max_grad_norm=max_norm) as trainer:
        assert trainer.report().is_optimizer_in_step
        for step in range(NUM_STEPS):
            _schedule(trainer.optimizer, step)
            _schedule(theirs, step)
            trainer.step(_batch(step))
            theirs.zero_grad()
            _loss(reference, _batch(step).to(device)).backward()
            if max_norm is not None:
                torch.nn.utils.clip_grad_norm_(reference.parameters(), max_norm)
            theirs.step()
            for p, q, start in zip(model.parameters(), reference.parameters(), starts, strict=True):
                if "Muon" in cls.__name__:
                    # It iterates in bf16, where the order of two operations is a bit of the update.
                    assert float((p - q).detach().norm()) < 0.02 * float((q - start).detach().norm())
                else:
                    torch.testing.assert_close(p, q, rtol=2e-5, atol=2e-6)
        counts = [float(state["step"]) for state in trainer.optimizer.state.values() if "step" in state]
        assert all(count == NUM_STEPS for count in counts)


@pytest.mark.parametrize(("cls", "options"), CASES.values(), ids=CASES.keys())
def test_captured_steps_equal_eager_ones_with_every_optimizer_of_the_list(
    device: torch.device, cls: Callable[..., Any], options: dict[str, Any]
) -> None:
    def trajectory(mode: str) -> list[list[Tensor]]:
        torch.manual_seed(0)
        model = Matrices().to(device)
        found = []
        with graphrt.Trainer(model, cls(model.parameters(), **options), _loss, mode=mode, max_grad_norm=0.1) as trainer:
            for step in range(6):
                _schedule(trainer.optimizer, step)
                trainer.step(_batch(step) * (float("inf") if step == 4 else 1.0))
                states = [value for state in trainer.optimizer.state.values() for value in state.values()]
                found.append([x.detach().clone() for x in (*model.parameters(), *states)])
            assert trainer.num_skipped_steps == 1
        return found

    for captured, eager in zip(trajectory("graph"), trajectory("eager"), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(captured, eager, strict=True))


@pytest.mark.parametrize(("cls", "options"), CASES.values(), ids=CASES.keys())
def test_a_skipped_step_leaves_parameters_and_state(device: torch.device, cls: Callable[..., Any], options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Matrices().to(device)
    with graphrt.Trainer(model, cls(model.parameters(), **options), _loss, mode="eager") as trainer:
        trainer.step(_batch(0))
        states = [value for state in trainer.optimizer.state.values() for value in state.values()]
        before = [x.detach().clone() for x in (*model.parameters(), *states)]
        assert bool(trainer.step(_batch(1) * float("nan")).skipped)
        assert all(torch.equal(x, y) for x, y in zip((*model.parameters(), *states), before, strict=True))


class Custom(torch.optim.SGD):
    """An exact class is on the list; what a subclass does is unknown."""


def _hooked(parameters: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


OUTSIDE: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], str]] = {
    "subclass": (lambda p: Custom(p, lr=0.1), "Custom is not on the list of optimizers that can be captured (AdamW, Adam, SGD, RMSprop"),
    "Adagrad": (lambda p: torch.optim.Adagrad(p, lr=0.1), "Adagrad is not on the list"),
    "dampening": (
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
        "SGD with dampening treats its first step differently",
    ),
    "hooks": (_hooked, "SGD has step hooks, which are Python"),
    "differentiable": (lambda p: torch.optim.SGD(p, lr=0.1, differentiable=True), "SGD is differentiable=True"),
}


@pytest.mark.parametrize(("make", "reason"), OUTSIDE.values(), ids=OUTSIDE.keys())
def test_an_optimizer_that_cannot_be_captured_runs_outside_and_the_report_says_why(make: Any, reason: str) -> None:
    model = Matrices()
    with graphrt.Trainer(model, make(model.parameters()), _loss, mode="graph") as trainer:
        report = trainer.report()
        assert not report.is_optimizer_in_step
        assert reason in str(report.optimizer_outside_reason)
        assert reason in str(report)


def test_step_hooks_of_an_optimizer_outside_run_once_a_step() -> None:
    calls = []
    model = Matrices()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    with graphrt.Trainer(model, optimizer, _loss, mode="graph") as trainer:
        for step in range(5):
            trainer.step(_batch(step))
    assert calls == ["pre"] * 5


def test_clipping_of_an_optimizer_outside_agrees_with_torchs() -> None:
    torch.manual_seed(0)
    model = Matrices()
    reference = copy.deepcopy(model)
    theirs = torch.optim.Adagrad(reference.parameters(), lr=0.1)
    with graphrt.Trainer(model, torch.optim.Adagrad(model.parameters(), lr=0.1), _loss, mode="graph", max_grad_norm=0.05) as trainer:
        for step in range(5):
            trainer.step(_batch(step))
            theirs.zero_grad()
            _loss(reference, _batch(step)).backward()
            torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.05)
            theirs.step()
            for p, q in zip(model.parameters(), reference.parameters(), strict=True):
                torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_a_state_from_torchs_own_steps_is_taken_over(device: torch.device, mode: str) -> None:
    """A run begun in a plain loop: the step count is on the host, the momenta are there."""
    torch.manual_seed(0)
    model = Matrices().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    reference = copy.deepcopy(model)
    theirs = torch.optim.AdamW(reference.parameters(), lr=0.01)

    # The gradients of the last step by hand are still there: they are no part of the trainer's.
    def by_hand(net: nn.Module, opt: torch.optim.Optimizer, step: int) -> None:
        opt.zero_grad()
        _loss(net, _batch(step).to(device)).backward()
        opt.step()

    for step in range(3):
        by_hand(model, optimizer, step)
        by_hand(reference, theirs, step)
    with graphrt.Trainer(model, optimizer, _loss, mode=mode) as trainer:
        for step in range(3, 8):
            trainer.step(_batch(step))
            by_hand(reference, theirs, step)
            for p, q in zip(model.parameters(), reference.parameters(), strict=True):
                torch.testing.assert_close(p, q, rtol=2e-5, atol=2e-6)
        assert all(float(state["step"]) == 8 for state in optimizer.state.values())


def test_a_tensor_learning_rate_is_followed(device: torch.device) -> None:
    model = Matrices().to(device)
    lr = torch.tensor(0.1, device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    with graphrt.Trainer(model, optimizer, _loss, mode="graph") as trainer:
        for step in range(4):
            trainer.step(_batch(step))
        lr.zero_()
        before = [p.detach().clone() for p in model.parameters()]
        trainer.step(_batch(4))
        assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


def test_groups_added_and_removed_between_eager_steps_are_followed(device: torch.device) -> None:
    with make_trainer("eager", device, is_fp8=False) as trainer:
        run(trainer, token_batches(2))
        extra = nn.Parameter(torch.ones(4, device=device))
        trainer.optimizer.add_param_group({"params": [extra], "lr": 0.5})
        trainer.step(token_batch(2))
        trainer.optimizer.param_groups.pop()
        before = values(trainer)
        trainer.step(token_batch(3))
        assert not torch.equal(values(trainer)["head.weight"], before["head.weight"])


def test_mixed_dtypes_in_one_group_are_trained(device: torch.device) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16, dtype=torch.bfloat16)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x).bfloat16()).float()

    def trajectory(mode: str) -> Any:
        def sgd(parameters: Any) -> torch.optim.Optimizer:
            return torch.optim.AdamW(parameters, lr=0.01)

        with make_trainer(mode, device, model=Mixed, loss_fn=_loss, optimizer=sgd, is_fp8=False) as trainer:
            return run(trainer, [_batch(step) for step in range(5)])

    captured, eager = trajectory("graph"), trajectory("eager")
    assert_same_trajectory(captured, eager)
    assert not torch.equal(eager[0]["b.weight"], eager[-1]["b.weight"])
