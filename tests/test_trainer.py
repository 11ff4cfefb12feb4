"""The Trainer: one step, its atomicity, evaluation, saving and loading, and what it refuses. Eager unless a test says otherwise."""

import copy
import gc
import logging
import random
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from stepping import (
    HISTORY,
    TokenModel,
    adamw,
    assert_same_trajectory,
    assert_same_values,
    deterministic,
    make_trainer,
    run,
    step_values,
    token_batch,
    token_batches,
    token_loss,
    values,
)
from torch import Tensor, nn

import graphrt
from graphrt.kernels.gemm_choice import choices


@pytest.fixture(autouse=True)
def _bitwise() -> Iterator[None]:
    with deterministic():
        yield


both_modes = pytest.mark.parametrize("mode", ["eager", "graph"])


def sgd(parameters: Any, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr)


def mean_square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()


def linear_trainer(mode: str = "eager", device: Any = "cpu", **options: Any) -> graphrt.Trainer:
    options = {
        "model": lambda: nn.Linear(16, 16),
        "loss_fn": mean_square,
        "is_fp8": False,
        "optimizer": sgd,
        "max_grad_norm": None,
        **options,
    }
    return make_trainer(mode, device, **options)


#: A batch that draws nothing from the generator when it is used.
X = torch.arange(64, dtype=torch.float32).reshape(4, 16).sin()


def snr_db(signal: Tensor, noisy: Tensor) -> float:
    return float(10 * torch.log10(signal.square().sum() / (signal - noisy).square().sum()))


# -- calibration


def _calibration_loss(model: nn.Module, batch: Any) -> Tensor:
    return token_loss(model, batch)[0]


@both_modes
def test_the_first_step_has_gradients_worth_the_name(device: torch.device, mode: str) -> None:
    def gradients(**options: Any) -> Tensor:
        with make_trainer(mode, device, optimizer=lambda p: sgd(p, 0.0), max_grad_norm=None, **options) as trainer:
            trainer.step(token_batch(0, weight=1e-3))
            return torch.cat([p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None])

    exact = gradients(is_fp8=False)
    assert snr_db(exact, gradients()) > 17
    assert snr_db(exact, gradients(calibrate=False)) < 10, "without calibration this test would not tell"


def test_calibration_changes_nothing_but_the_quantization_state(device: torch.device) -> None:
    seen: list[dict[str, Tensor]] = []

    class Peeking(TokenModel):
        def forward(self, tokens: Tensor) -> Tensor:
            seen.append({name: value for name, value in values(trainer).items() if not name.startswith("state")})
            return super().forward(tokens)

    with make_trainer("eager", device, model=lambda: Peeking(dropout=0.5)) as trainer:
        before = {name: value for name, value in values(trainer).items() if not name.startswith("state")}
        trainer.step(token_batch(0))
        assert len(seen) == 2  # calibration, step
        assert_same_values(seen[1], before)
        assert trainer.state is not None
        assert (trainer.state.forward_updates, trainer.state.backward_updates) == (2, 2)
        trainer.step(token_batch(1))
        assert len(seen) == 3


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_what_loss_fn_writes_into_its_batch_in_the_calibration_is_not_there_for_the_step(device: torch.device, mode: str) -> None:
    seen: list[Tensor] = []

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        seen.append(batch["tokens"].clone())
        batch["tokens"].zero_()
        return token_loss(model, {**batch, "tokens": seen[-1]})[0]

    with make_trainer(mode, device, loss_fn=loss_fn) as trainer:
        trainer.step(token_batch(0))
    assert len(seen) == 2
    assert torch.equal(*seen)


def test_a_state_that_has_updated_before_is_not_calibrated_again(device: torch.device) -> None:
    with make_trainer("eager", device) as trainer:
        run(trainer, token_batches(2))
        model = trainer.model
    with graphrt.Trainer(model, adamw(model.parameters()), token_loss, mode="eager") as trainer:
        assert trainer.state is not None
        trainer.step(token_batch(2))
        assert trainer.state.forward_updates == 4


# -- microbatches


@both_modes
def test_gradients_loss_and_metrics_are_means_over_the_microbatches(device: torch.device, mode: str) -> None:
    def loss_fn(model: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return mean_square(model, x), {"largest": x.max(), "rows": torch.full((), x.shape[0], device=x.device)}

    x = torch.arange(16 * 16, dtype=torch.float32).reshape(16, 16) / 100
    with linear_trainer(mode, device, loss_fn=loss_fn) as whole:
        whole.step(x)
        expected = whole.model.weight.grad
    with linear_trainer(mode, device, loss_fn=loss_fn, grad_accum_steps=4) as trainer:
        result = trainer.step(x)
        torch.testing.assert_close(trainer.model.weight.grad, expected)
        parts = [float(part.max()) for part in x.chunk(4)]
        assert float(result.metrics["largest"]) == pytest.approx(sum(parts) / 4)
        assert float(result.metrics["rows"]) == 4.0
        assert result.metrics["rows"].is_floating_point()
    assert isinstance(expected, Tensor)


@both_modes
def test_a_list_of_as_many_batches_is_taken_as_it_is(device: torch.device, mode: str) -> None:
    x = torch.randn(8, 16)
    with linear_trainer(mode, device, grad_accum_steps=2) as trainer:
        split = step_values(trainer, x)
    with linear_trainer(mode, device, grad_accum_steps=2) as trainer:
        listed = step_values(trainer, [x[:4], x[4:]])
    assert_same_values(listed, split)


def test_0_dim_tensors_and_constants_are_shared_by_the_microbatches() -> None:
    seen = []

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        seen.append((tuple(batch["x"].shape), float(batch["scale"]), batch["name"]))
        return mean_square(model, batch["x"])

    with linear_trainer(loss_fn=loss_fn, grad_accum_steps=2) as trainer:
        trainer.step({"x": torch.randn(6, 16), "scale": torch.tensor(3.0), "name": "a"})
    assert seen == [((3, 16), 3.0, "a")] * 2


def test_one_region_spans_all_microbatches() -> None:
    with make_trainer("eager", grad_accum_steps=4) as trainer:
        assert trainer.state is not None
        trainer.step(token_batch(0))
        assert (trainer.state.forward_updates, trainer.state.backward_updates) == (2, 2)
        assert not trainer.state.backward_update_requested


# -- clipping, skipping, metrics


@both_modes
@pytest.mark.parametrize("max_norm", [0.1, 1e6, None])
def test_clipping_is_torchs(device: torch.device, mode: str, max_norm: float | None) -> None:
    x = torch.randn(8, 16) * 3
    with linear_trainer(mode, device, max_grad_norm=max_norm) as trainer:
        reference = copy.deepcopy(trainer.model)
        optimizer = sgd(reference.parameters())
        for _ in range(5):
            result = trainer.step(x)
            optimizer.zero_grad()
            loss = mean_square(reference, x.to(device))
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), float("inf") if max_norm is None else max_norm)
            optimizer.step()
            torch.testing.assert_close(result.grad_norm, norm, rtol=1e-6, atol=0)
            torch.testing.assert_close(result.loss, loss.detach())
            for p, q in zip(trainer.model.parameters(), reference.parameters(), strict=True):
                torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


def test_max_grad_norm_follows_an_assignment(device: torch.device) -> None:
    with linear_trainer("eager", device) as trainer:
        moved = []
        for max_norm in (None, 1e-4):
            trainer.max_grad_norm = max_norm
            assert trainer.max_grad_norm == max_norm
            before = trainer.model.weight.detach().clone()
            trainer.step(torch.randn(8, 16) * 10)
            moved.append(float((trainer.model.weight.detach() - before).norm()))
    assert moved[1] <= 1.01e-5 < moved[0]


@both_modes
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_non_finite_gradient_moves_nothing_and_is_counted(device: torch.device, mode: str, bad: float) -> None:
    with make_trainer(mode, device) as trainer:
        run(trainer, token_batches(4))
        before = values(trainer)
        result = trainer.step(token_batch(4, weight=bad))
        assert bool(result.skipped)
        after = values(trainer)
        kept = [name for name in before if name.startswith("optimizer") or name in dict(trainer.model.named_parameters())]
        assert_same_values({name: after[name] for name in kept}, {name: before[name] for name in kept})
        assert trainer.num_skipped_steps == trainer.report().num_skipped_steps == 1
        assert trainer.steps_taken == 5
        assert not bool(trainer.step(token_batch(5)).skipped)


@both_modes
def test_results_are_device_tensors_that_the_caller_owns(device: torch.device, mode: str) -> None:
    with make_trainer(mode, device) as trainer:
        results = [trainer.step(batch) for batch in token_batches()]
    tensors = [x for result in results for x in (result.loss, result.grad_norm, result.skipped, *result.metrics.values())]
    assert all(x.device.type == device.type and x.dim() == 0 and not x.requires_grad for x in tensors)
    assert {result.loss.dtype for result in results} == {torch.float32}
    assert len({x.data_ptr() for x in tensors}) == len(tensors)


def test_a_metric_that_is_a_parameter_is_copied() -> None:
    def loss_fn(model: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return mean_square(model, x), {"bias": model.bias}  # type: ignore[dict-item]

    with linear_trainer(loss_fn=loss_fn) as trainer:
        bias = trainer.step(X).metrics["bias"]
        before = bias.clone()
        trainer.step(X)
        assert torch.equal(bias, before)
        assert not torch.equal(bias, trainer.model.bias)


BAD_LOSSES: dict[str, tuple[Any, str]] = {
    "vector": (lambda model, x: model(x).sum(1), r"a torch\.float32 tensor of shape \[4\] as the loss"),
    "number": (lambda model, x: 3.0, "a float as the loss"),
    "None": (lambda model, x: None, "a NoneType as the loss"),
    "integer": (lambda model, x: x.long().sum(), r"a torch\.int64 tensor of shape \[\] as the loss"),
    "metrics": (lambda model, x: (mean_square(model, x), {"a": 1.0}), r"\{a: float\} as metrics"),
    "list": (lambda model, x: (mean_square(model, x), [x]), "a list as metrics"),
}


@both_modes
@pytest.mark.parametrize(("loss_fn", "message"), BAD_LOSSES.values(), ids=BAD_LOSSES.keys())
def test_a_loss_that_is_none_is_refused_and_described(mode: str, loss_fn: Any, message: str) -> None:
    with linear_trainer(mode, loss_fn=loss_fn) as trainer:
        before = values(trainer)
        with pytest.raises(graphrt.GraphrtError, match=message):
            trainer.step(X)
        assert_same_values(values(trainer), before)


def test_a_loss_that_depends_on_no_parameter_is_refused() -> None:
    p = nn.Parameter(torch.ones(()))
    with (
        linear_trainer(loss_fn=lambda model, x: p * 2) as trainer,
        pytest.raises(graphrt.GraphrtError, match="No parameter got a gradient"),
    ):
        trainer.step(X)


def test_metrics_that_change_between_microbatches_are_refused() -> None:
    names = iter("ab")

    def loss_fn(model: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return mean_square(model, x), {next(names): x.mean()}

    with linear_trainer(loss_fn=loss_fn, grad_accum_steps=2) as trainer, pytest.raises(graphrt.GraphrtError, match=r"metrics \['a'\]"):
        trainer.step(X)


def test_sparse_gradients_are_refused_by_name() -> None:
    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).square().mean()

    model = nn.Embedding(8, 16, sparse=True)
    trainer = graphrt.Trainer(model, torch.optim.SparseAdam(model.parameters()), loss_fn, mode="eager")
    with pytest.raises(graphrt.GraphrtError, match=r"weight\.grad is torch\.sparse_coo"):
        trainer.step(torch.arange(4))
    assert model.weight.grad is None


# -- atomic steps


class _Broken(Exception):
    pass


class Breakable(TokenModel):
    """Fails where it is told to; moves everything a step may change before that."""

    where = ""

    def branch(self, x: Tensor) -> Tensor:
        is_recompute = self.has_run_branch
        self.has_run_branch = True
        if (self.where == "checkpointed forward" and not is_recompute) or (self.where == "recompute" and is_recompute):
            raise _Broken
        return F.dropout(x.sin() * x, 0.2)

    def forward(self, tokens: Tensor) -> Tensor:
        self.has_run_branch = False
        y = super().forward(tokens)
        if self.where == "buffer rebound":
            self.num_tokens = self.num_tokens * 2
        if self.where == "mode":
            self.eval()
        y = graphrt.checkpoint(self.branch, y, use_reentrant=self.is_reentrant)
        if self.where in ("forward", "buffer rebound", "mode"):
            random.random()
            np.random.rand()
            raise _Broken
        if self.where == "backward hook":
            y.register_hook(_raise)
        return y


def _raise(*_: Any) -> None:
    raise _Broken


class BreakableSGD(torch.optim.SGD):
    is_broken = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.param_groups[0]["lr"] *= 0.5
        if self.is_broken:
            raise _Broken


PLACES = ["forward", "buffer rebound", "mode", "checkpointed forward", "recompute", "backward hook"]


@pytest.mark.parametrize("is_reentrant", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["non-reentrant", "reentrant"])
@pytest.mark.parametrize("at", [0, 2], ids=["first step", "third step"])
@pytest.mark.parametrize("where", PLACES)
def test_after_an_exception_the_step_has_not_happened(device: torch.device, where: str, at: int, is_reentrant: bool) -> None:
    def make() -> graphrt.Trainer:
        trainer = make_trainer("eager", device, model=lambda: Breakable(dropout=0.2), grad_accum_steps=2)
        trainer.model.is_reentrant = is_reentrant  # type: ignore[assignment]
        return trainer

    with make() as trainer:
        expected = run(trainer, token_batches(HISTORY + 2))
    with make() as trainer:
        actual = run(trainer, token_batches(HISTORY + 2)[:at])
        before, host = values(trainer), (random.getstate(), np.random.get_state()[1].tobytes())
        flags = [module.training for module in trainer.model.modules()]
        trainer.model.where = where  # type: ignore[assignment]
        for _ in range(2):
            with pytest.raises(_Broken):
                trainer.step(token_batch(50))
        trainer.model.where = ""  # type: ignore[assignment]
        assert_same_values(values(trainer), before)
        assert (random.getstate(), np.random.get_state()[1].tobytes()) == host
        assert [module.training for module in trainer.model.modules()] == flags
        actual += run(trainer, token_batches(HISTORY + 2)[at:])
    assert_same_trajectory(actual, expected)


@both_modes
@pytest.mark.parametrize("at", [0, 2, 4])
def test_after_an_exception_in_a_custom_optimizer_the_step_has_not_happened(device: torch.device, mode: str, at: int) -> None:
    def make() -> graphrt.Trainer:
        return make_trainer(mode, device, optimizer=lambda p: BreakableSGD(p, lr=0.1, momentum=0.9), model={"dropout": 0.2})

    with make() as trainer:
        expected = run(trainer, token_batches())
    with make() as trainer:
        actual = run(trainer, token_batches()[:at])
        before, lr = values(trainer), trainer.optimizer.param_groups[0]["lr"]
        trainer.optimizer.is_broken = True  # type: ignore[attr-defined]
        with pytest.raises(_Broken):
            trainer.step(token_batch(50))
        trainer.optimizer.is_broken = False  # type: ignore[attr-defined]
        assert_same_values(values(trainer), before)
        assert trainer.optimizer.param_groups[0]["lr"] == lr
        actual += run(trainer, token_batches()[at:])
    assert_same_trajectory(actual, expected)


def test_what_was_pending_before_a_failed_step_is_pending_after_it() -> None:
    with make_trainer("eager", model=Breakable) as trainer:
        trainer.model.is_reentrant = False  # type: ignore[assignment]
        run(trainer, token_batches(1))
        assert trainer.state is not None
        with graphrt.fp8_autocast():
            loss = token_loss(trainer.model, token_batch(7))[0]
        loss.backward()
        for p in trainer.model.parameters():
            p.grad = None
        before = values(trainer)
        trainer.model.where = "forward"  # type: ignore[assignment]
        with pytest.raises(_Broken):
            trainer.step(token_batch(1))
        after = values(trainer)
        names = [name for name in before if not name.endswith(".grad")]
        assert_same_values({name: after[name] for name in names}, {name: before[name] for name in names})
        assert trainer.state.backward_update_requested


def test_a_failed_step_gives_gradients_back_that_the_user_had() -> None:
    with linear_trainer(loss_fn=lambda model, x: 1 / 0) as trainer:
        own = torch.full((16, 16), 2.0)
        trainer.model.weight.grad = own
        with pytest.raises(ZeroDivisionError):
            trainer.step(X)
        assert trainer.model.weight.grad is own
        assert own.tolist() == torch.full((16, 16), 2.0).tolist()


@both_modes
def test_ctrl_c_in_the_middle_of_a_step_is_an_exception_like_another(device: torch.device, mode: str) -> None:
    stops = [False]

    def loss_fn(model: nn.Module, batch: Any) -> Any:
        out = token_loss(model, batch)
        if stops[0]:
            raise KeyboardInterrupt
        return out

    with make_trainer(mode, device, loss_fn=loss_fn) as trainer:
        run(trainer, token_batches(1))
        before = values(trainer)
        stops[0] = True
        with pytest.raises(KeyboardInterrupt):
            trainer.step(token_batch(1))
        assert_same_values(values(trainer), before)


# -- evaluate


@both_modes
def test_evaluate_takes_any_shape_in_eval_mode_and_touches_nothing(device: torch.device, mode: str) -> None:
    modes: list[tuple[bool, bool]] = []

    class Watched(TokenModel):
        def forward(self, tokens: Tensor) -> Tensor:
            modes.append((self.training, torch.is_grad_enabled()))
            return super().forward(tokens)

    with make_trainer(mode, device, model=lambda: Watched(dropout=0.5), grad_accum_steps=2) as trainer:
        trainer.model.get_submodule("blocks.0").eval()
        run(trainer, token_batches(4))
        flags = [module.training for module in trainer.model.modules()]
        before = values(trainer)
        losses = [trainer.evaluate(token_batch(9, batch_size=size, seq=seq)) for size, seq in ((1, 5), (3, 16), (7, 2))]
        again = trainer.evaluate(token_batch(9, batch_size=3, seq=16))
        assert modes[-1] == (False, False)
        assert [module.training for module in trainer.model.modules()] == flags
        assert_same_values(values(trainer), before)
        assert float(losses[1]) == float(again), "dropout is on"
        assert len({float(loss) for loss in losses}) == 3
        assert losses[0].shape == ()
        assert not losses[0].requires_grad


def test_an_evaluation_that_fails_gives_modes_and_rng_back() -> None:
    def loss_fn(model: nn.Module, batch: Any) -> Any:
        if not model.training:
            torch.rand(3)
            raise _Broken
        return token_loss(model, batch)

    with make_trainer("eager", loss_fn=loss_fn) as trainer:
        run(trainer, token_batches(2))
        before = values(trainer)
        with pytest.raises(_Broken):
            trainer.evaluate(token_batch(3))
        assert trainer.model.training
        assert_same_values(values(trainer), before)
        trainer.step(token_batch(3))


def test_evaluating_before_the_first_step_leaves_calibration_to_it() -> None:
    with make_trainer("eager") as trainer:
        expected = run(trainer, token_batches(3))
    with make_trainer("eager") as trainer:
        trainer.evaluate(token_batch(5))
        assert_same_trajectory(run(trainer, token_batches(3)), expected)


# -- saving and loading


def test_the_state_dict_is_plain_and_a_copy(tmp_path: Any) -> None:
    with make_trainer("eager") as trainer:
        run(trainer, token_batches(3))
        saved = trainer.state_dict()
        before = copy.deepcopy(saved)
        run(trainer, token_batches(2))

    def check(value: Any, other: Any) -> None:
        if isinstance(value, dict):
            assert type(value) is dict
            for key in value:
                check(value[key], other[key])
        elif isinstance(value, list | tuple):
            for one, two in zip(value, other, strict=True):
                check(one, two)
        elif isinstance(value, Tensor):
            assert type(value) is Tensor
            assert value.device.type == "cpu"
            assert not value.requires_grad
            assert torch.equal(value, other)
        else:
            assert value is None or isinstance(value, int | float | str | bool)

    check(saved, before)
    torch.save(saved, tmp_path / "t.pt")
    check(torch.load(tmp_path / "t.pt", weights_only=True), before)


@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD", "RMSprop", "Adagrad", "NAdam", "Adamax"])
@pytest.mark.parametrize("at", [0, 1, 3])
def test_a_resumed_run_equals_the_unbroken_one(device: torch.device, name: str, at: int) -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        options: dict[str, Any] = {"momentum": 0.9} if name == "SGD" else {}
        return getattr(torch.optim, name)(parameters, lr=0.01, **options)

    with make_trainer("eager", device, optimizer=make, model={"dropout": 0.2}) as trainer:
        expected = run(trainer, token_batches())
    with make_trainer("eager", device, optimizer=make, model={"dropout": 0.2}) as trainer:
        run(trainer, token_batches()[:at])
        saved = trainer.state_dict()
    with make_trainer("eager", device, optimizer=make, model={"dropout": 0.2}, seed=8) as trainer:
        trainer.load_state_dict(saved)
        assert_same_trajectory(run(trainer, token_batches()[at:]), expected[at:])


def test_a_resumed_run_goes_on_decaying_what_took_part_before_it() -> None:
    """A parameter used in step 1 alone keeps a gradient of zero, and so its momentum and decay, also in another process."""

    class Once(TokenModel):
        num_left = 1

        def forward(self, tokens: Tensor) -> Tensor:
            logits = super().forward(tokens)
            self.num_left -= 1
            return logits + self.unused.weight.mean() if self.num_left >= 0 else logits

    options: dict[str, Any] = {"model": lambda: Once(has_unused=True), "is_fp8": False}
    with make_trainer("eager", **options) as trainer:
        expected = run(trainer, token_batches(4))
    with make_trainer("eager", **options) as trainer:
        run(trainer, token_batches(4)[:2])
        saved = trainer.state_dict()
    with make_trainer("eager", seed=3, **options) as trainer:
        trainer.model.num_left = 0  # type: ignore[assignment]
        trainer.load_state_dict(saved)
        assert_same_trajectory(run(trainer, token_batches(4)[2:]), expected[2:])
    assert not torch.equal(expected[2]["unused.weight"], expected[3]["unused.weight"])


def test_an_earlier_state_loaded_into_a_trainer_that_went_on_takes_it_back(device: torch.device) -> None:
    with make_trainer("eager", device) as trainer:
        fresh = trainer.state_dict()
        first = run(trainer, token_batches(3))
        addresses = [p.data_ptr() for p in trainer.model.parameters()]
        trainer.load_state_dict(fresh)
        assert trainer.steps_taken == 0
        assert_same_trajectory(run(trainer, token_batches(3)), first)
        assert [p.data_ptr() for p in trainer.model.parameters()] == addresses


def test_loading_copies_into_the_tensors_that_are_there(device: torch.device) -> None:
    with make_trainer("eager", device) as trainer:
        run(trainer, token_batches(2))
        saved = trainer.state_dict()

        def tensors() -> list[Tensor]:
            assert trainer.state is not None
            states = [value for state in trainer.optimizer.state.values() for value in state.values()]
            return [*trainer.model.state_dict(keep_vars=True).values(), *states, *trainer.state.scales]

        before = [(id(x), x.data_ptr()) for x in tensors()]
        run(trainer, token_batches(1))
        trainer.load_state_dict(saved)
        assert [(id(x), x.data_ptr()) for x in tensors()] == before


def _other_model() -> dict[str, Any]:
    return make_trainer("eager", model={"has_unused": True}).state_dict()


def _without(key: str) -> Callable[[dict[str, Any]], Any]:
    return lambda saved: {name: value for name, value in saved.items() if name != key}


def _misshaped(saved: dict[str, Any]) -> Any:
    return {**saved, "model": {**saved["model"], "head.weight": torch.zeros(3, 3)}}


def _plain_models(saved: dict[str, Any]) -> Any:
    return {**saved, "quantization_state": None}


def _other_groups(saved: dict[str, Any]) -> Any:
    groups = [{**group, "params": group["params"][1:]} for group in saved["optimizer"]["param_groups"]]
    return {**saved, "optimizer": {**saved["optimizer"], "param_groups": groups}}


def _other_optimizer(_saved: dict[str, Any]) -> Any:
    with make_trainer("eager", optimizer=sgd) as trainer:
        trainer.step(token_batch(0))
        return trainer.state_dict()


def _other_recipe(saved: dict[str, Any]) -> Any:
    state = {**saved["quantization_state"]}
    state["recipe"] = {**state["recipe"], "margin": 3}
    return {**saved, "quantization_state": state}


MISFITS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "other model": (lambda saved: _other_model(), r"unused\.weight is missing from this model"),
    "no rng": (_without("rng"), "lacks rng"),
    "no optimizer": (_without("optimizer"), "lacks optimizer"),
    "nothing": (lambda saved: [], "lacks version, model"),
    "shape": (_misshaped, r"head\.weight is torch\.float32 \[3, 3\] in the trainer state, and torch\.float32 \[32, 16\]"),
    "plain": (_plain_models, "of a plain model, this is a converted one"),
    "groups": (_other_groups, r"groups of \[\d+\] parameters, the trainer state \[\d+\]"),
    "optimizer": (_other_optimizer, r"group 0 has .*Use the same optimizer class"),
    "recipe": (_other_recipe, r"saved with margin=3, this state has 0"),
    "version": (lambda saved: {**saved, "version": 99}, "version 99, expected"),
    "gradients": (lambda saved: {**saved, "gradients": ["nothing.weight"]}, r"a gradient of nothing\.weight"),
}


@pytest.mark.parametrize(("change", "message"), MISFITS.values(), ids=MISFITS.keys())
def test_a_state_of_something_else_is_refused_by_name_and_changes_nothing(change: Any, message: str) -> None:
    with make_trainer("eager") as trainer:
        run(trainer, token_batches(2))
        saved = trainer.state_dict()
        run(trainer, token_batches(1))
        before = values(trainer)
        with pytest.raises(ValueError, match=message):
            trainer.load_state_dict(change(saved))
        assert_same_values(values(trainer), before)


# -- the rest of the surface


@both_modes
def test_the_eager_context_nests_and_restores(device: torch.device, mode: str) -> None:
    with make_trainer(mode, device) as trainer:
        with trainer.eager() as same:
            assert same is trainer
            with trainer.eager():
                trainer.step(token_batch(0))
            trainer.step(token_batch(1))
        with pytest.raises(_Broken), trainer.eager():
            raise _Broken
        run(trainer, token_batches(4))
        if mode == "graph":
            assert trainer.report().capture.num_graphs == 1  # type: ignore[union-attr]
        assert trainer.steps_taken == 6


def test_auto_is_graph_on_cuda_and_eager_elsewhere_and_says_so(device: torch.device, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="graphrt"), make_trainer("auto", device, is_fp8=False) as trainer:
        assert trainer.mode == ("graph" if device.type == "cuda" else "eager")
    lines = [record.message for record in caplog.records if "mode='auto'" in record.message]
    assert len(lines) == 1
    assert trainer.mode in lines[0]
    assert device.type in lines[0]


@both_modes
def test_the_report_says_what_ran(device: torch.device, mode: str) -> None:
    with make_trainer(mode, device) as trainer:
        run(trainer, token_batches(4))
        report = trainer.report()
    assert (report.mode, report.steps_taken, report.num_fp8_linears, report.optimizer) == (mode, 4, 5, "AdamW")
    assert report.is_optimizer_in_step
    assert report.num_parameters == sum(p.numel() for p in trainer.model.parameters())
    assert (report.capture is not None) == (mode == "graph")
    text = str(report)
    assert "optimizer outside reason" in text
    assert ("torch's algorithms" in text) == (device.type == "cuda")
    if report.capture is not None:
        assert report.capture.num_graphs == 1
        assert report.capture.capture_s > 0
        assert sum(report.capture.num_nodes_by_kind.values()) > 50
        assert "num nodes by kind" in text


@both_modes
def test_only_training_steps_choose_gemm_algorithms(device: torch.device, mode: str) -> None:
    seen: list[tuple[bool, bool]] = []

    def loss_fn(model: nn.Module, batch: Any) -> Any:
        seen.append((torch.is_grad_enabled(), choices.is_choosing))
        return token_loss(model, batch)

    with make_trainer(mode, device, loss_fn=loss_fn) as trainer:
        run(trainer, token_batches(3))
        trainer.evaluate(token_batch(0))
    assert seen[0] == (True, True)
    assert [is_choosing for has_gradients, is_choosing in seen if not has_gradients] == [False]
    assert not choices.is_choosing


@pytest.mark.parametrize("verb", ["step", "evaluate"])
def test_a_closed_trainer_refuses(verb: str) -> None:
    trainer = make_trainer("graph")
    trainer.close()
    trainer.close()
    with pytest.raises(graphrt.GraphrtError, match=f"{verb} was called on a closed Trainer"):
        getattr(trainer, verb)(token_batch(0))
    with pytest.raises(graphrt.GraphrtError, match="check_capture was called on a closed Trainer"):
        graphrt.check_capture(trainer, token_batch(0))


@both_modes
@pytest.mark.parametrize("num_steps", [0, 4])
def test_a_step_inside_a_region_autocast_or_no_grad_is_refused(device: torch.device, mode: str, num_steps: int) -> None:
    with make_trainer(mode, device) as trainer:
        run(trainer, token_batches(num_steps))
        before = values(trainer)
        for context, message in (
            (graphrt.fp8_autocast(), "inside an fp8_autocast region"),
            (graphrt.fp8_autocast(enabled=False), "inside an fp8_autocast region"),
            (torch.autocast(device.type, torch.bfloat16), r"inside torch\.autocast.*in loss_fn"),
            (torch.no_grad(), r"under torch\.no_grad"),
            (torch.inference_mode(), r"under torch\.no_grad"),
        ):
            with context, pytest.raises(graphrt.GraphrtError, match=message):  # type: ignore[attr-defined]
                trainer.step(token_batch(0))
        after = values(trainer)
        assert_same_values(after, before)
        trainer.step(token_batch(num_steps))


@both_modes
def test_a_scaled_loss_is_refused_by_name(mode: str) -> None:
    scaler = torch.amp.GradScaler("cpu")

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return scaler.scale(mean_square(model, x))

    original = torch.amp.GradScaler.scale
    with linear_trainer(mode, loss_fn=loss_fn) as trainer:
        with pytest.raises(graphrt.GraphrtError, match="GradScaler"):
            trainer.step(X)
        assert torch.amp.GradScaler.scale is original
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        trainer.step(X)


class DistributedDataParallel(nn.Module):
    """Named as torch's, which cannot be made without a process group."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


class FSDPModule:
    pass


def test_wrapped_models_and_closures_are_refused_by_name() -> None:
    inner = nn.Linear(16, 16)
    wrapped = DistributedDataParallel(inner)
    with pytest.raises(graphrt.GraphrtError, match="The model is wrapped in DistributedDataParallel"):
        graphrt.Trainer(wrapped, sgd(wrapped.parameters()), mean_square)
    sharded = nn.Sequential(type("FSDPLinear", (FSDPModule, nn.Linear), {})(16, 16))
    with pytest.raises(graphrt.GraphrtError, match="0 is wrapped in FSDPModule"):
        graphrt.Trainer(sharded, sgd(sharded.parameters()), mean_square)
    with pytest.raises(graphrt.GraphrtError, match="LBFGS calls the model several times"):
        graphrt.Trainer(inner, torch.optim.LBFGS(inner.parameters()), mean_square)


BAD_ARGUMENTS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "model": ({"model": 3}, TypeError, r"model must be an nn\.Module, got int"),
    "optimizer": ({"optimizer": None}, TypeError, r"optimizer must be a torch\.optim\.Optimizer, got NoneType"),
    "loss_fn": ({"loss_fn": 1.0}, TypeError, "loss_fn must be callable"),
    "mode": ({"mode": "fast"}, ValueError, "mode must be one of auto, graph, eager, got 'fast'"),
    "grad_accum_steps": ({"grad_accum_steps": 0}, ValueError, "grad_accum_steps must be an int of at least 1, got 0"),
    "grad_accum_steps float": ({"grad_accum_steps": 2.0}, ValueError, r"grad_accum_steps must be an int of at least 1, got 2\.0"),
    "warmup_steps": ({"warmup_steps": 1}, ValueError, "warmup_steps must be an int of at least 2, got 1"),
    "max_graphs": ({"max_graphs": True}, ValueError, "max_graphs must be an int of at least 1, got True"),
    "max_grad_norm": ({"max_grad_norm": 0.0}, ValueError, r"max_grad_norm must be a positive number or None, got 0\.0"),
    "max_grad_norm nan": ({"max_grad_norm": float("nan")}, ValueError, "max_grad_norm must be a positive number"),
    "max_grad_norm str": ({"max_grad_norm": "1"}, ValueError, "max_grad_norm must be a positive number"),
}


@pytest.mark.parametrize(("change", "error", "message"), BAD_ARGUMENTS.values(), ids=BAD_ARGUMENTS.keys())
def test_arguments_out_of_range_are_refused_by_name(change: dict[str, Any], error: type[Exception], message: str) -> None:
    model = nn.Linear(16, 16)
    arguments = {"model": model, "optimizer": sgd(model.parameters()), "loss_fn": mean_square, **change}
    with pytest.raises(error, match=message):
        graphrt.Trainer(**arguments)


def test_models_that_cannot_be_trained_are_refused() -> None:
    frozen = nn.Linear(16, 16).requires_grad_(False)
    with pytest.raises(ValueError, match="Nothing would be trained"):
        graphrt.Trainer(frozen, sgd(frozen.parameters()), mean_square)
    split = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16, device="meta"))
    with pytest.raises(ValueError, match="on cpu, meta, expected one device"):
        graphrt.Trainer(split, sgd(split.parameters()), mean_square)
    meta = nn.Linear(16, 16, device="meta")
    with pytest.raises(ValueError, match="Materialize the model first"):
        graphrt.Trainer(meta, sgd(meta.parameters()), mean_square)


def test_parameters_that_only_the_optimizer_holds_are_trained_and_named(device: torch.device) -> None:
    extra = nn.Parameter(torch.ones(16, device=device))
    model = nn.Linear(16, 16).to(device)
    optimizer = sgd([*model.parameters(), extra])

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return (model(x) * extra).square().mean()

    with graphrt.Trainer(model, optimizer, loss_fn, mode="graph") as trainer:
        for _ in range(4):
            before = extra.detach().clone()
            trainer.step(X)
            assert not torch.equal(extra, before)
        extra.grad = torch.zeros_like(extra)
        with pytest.raises(graphrt.GraphrtError, match=r'optimizer\.param_groups\[0\]\["params"\]\[2\]\.grad is another tensor'):
            trainer.step(X)


def test_a_batch_that_requires_a_gradient_is_refused_by_name() -> None:
    with linear_trainer() as trainer, pytest.raises(graphrt.StaticInputError, match=r"batch requires a gradient"):
        trainer.step(torch.randn(4, 16, requires_grad=True))


@both_modes
def test_a_batch_without_tensors_is_a_batch(mode: str) -> None:
    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return mean_square(model, torch.ones(4, 16)) * batch["scale"]

    with linear_trainer(mode, loss_fn=loss_fn) as trainer:
        losses = {float(trainer.step({"scale": 2.0}).loss) for _ in range(4)}
    assert len(losses) == 4


def test_an_unconverted_model_has_no_state_and_trains(device: torch.device) -> None:
    with make_trainer("eager", device, is_fp8=False) as trainer:
        assert trainer.state is None
        assert trainer.report().num_fp8_linears == 0
        losses = [float(trainer.step(token_batch(0)).loss) for _ in range(20)]
    assert losses[-1] < 0.8 * losses[0]


def test_fp8_training_follows_training_in_high_precision(device: torch.device) -> None:
    with make_trainer("eager", device) as trainer:
        fp8 = [float(trainer.step(token_batch(step % 3, weight=1.0)).loss) for step in range(30)]
    with make_trainer("eager", device, is_fp8=False) as trainer:
        plain = [float(trainer.step(token_batch(step % 3, weight=1.0)).loss) for step in range(30)]
    assert plain[-1] < 0.8 * plain[0]
    assert abs(fp8[-1] - plain[-1]) < 0.05 * plain[-1]


def test_steps_work_with_hooks_and_a_scheduler_of_torchs(device: torch.device) -> None:
    with make_trainer("eager", device) as trainer, warnings.catch_warnings():
        warnings.simplefilter("error")
        seen = []
        trainer.model.get_submodule("blocks.0").register_forward_hook(lambda *_: seen.append(1))
        scheduler = torch.optim.lr_scheduler.StepLR(trainer.optimizer, step_size=1, gamma=0.5)
        for batch in token_batches(3):
            trainer.step(batch)
            scheduler.step()
        assert scheduler.get_last_lr() == [0.01 / 8]
        assert len(seen) == 4  # calibration and three steps


def test_a_trainer_that_is_dropped_without_close_frees_its_model() -> None:
    trainer = make_trainer("graph")
    run(trainer, token_batches(3))
    model = weakref.ref(trainer.model)
    del trainer
    gc.collect()
    assert model() is None


# -- check_capture


@pytest.mark.parametrize("mode", ["graph", "eager"])
def test_only_the_first_steps_time_gemms(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new number of tokens later on would make a step wait for a clock each time."""
    choosing, entered = choices.choosing, []

    def watched() -> Any:
        entered.append(True)
        return choosing()

    monkeypatch.setattr(choices, "choosing", watched)

    def chooses(trainer: graphrt.Trainer, step: int) -> bool:
        entered.clear()
        trainer.step(token_batch(step))
        return bool(entered)

    with make_trainer(mode, calibrate=False) as trainer:
        assert [chooses(trainer, step) for step in range(5)] == [True, True, False, False, False]
        trainer.recapture()
        assert [chooses(trainer, step) for step in range(3)] == [True, True, False]


def test_check_capture_says_that_a_step_can_be_captured_and_puts_everything_back(device: torch.device) -> None:
    for num_steps in (0, 4):
        with make_trainer("graph", device, model={"dropout": 0.2}) as trainer:
            run(trainer, token_batches(num_steps))
            before = values(trainer)
            report = graphrt.check_capture(trainer, token_batch(9))
            assert_same_values(values(trainer), before)
            assert report
            assert report.num_operations > 50
            assert "can be captured" in str(report)
            actual = run(trainer, token_batches()[num_steps:])
        with make_trainer("eager", device, model={"dropout": 0.2}) as trainer:
            assert_same_trajectory(actual, run(trainer, token_batches())[num_steps:])


def test_check_capture_lists_every_hazard_and_every_difference_with_its_line() -> None:
    calls = [0]

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        loss = token_loss(model, batch)[0]
        calls[0] += 1
        loss = loss * calls[0]
        if loss.item() > 1e9:
            loss = loss * 2
        loss.detach().reshape(1).tolist()
        return loss * random.random()

    with make_trainer("eager", loss_fn=loss_fn, optimizer=lambda p: torch.optim.Adagrad(p)) as trainer:
        before, host = values(trainer), random.getstate()
        report = graphrt.check_capture(trainer, token_batch(0))
        assert_same_values(values(trainer), before)
        assert random.getstate() == host
    assert not report
    text = str(report)
    assert len(report.hazards) == 3, text
    for part in (r"loss.item()", "tolist()", "random.random()", "loss * calls[0]"):
        assert part in text
    assert all("test_trainer.py:" in line for line in (*report.hazards, *report.differences))
    assert "Adagrad is not on the list" in text
    assert "cannot be captured" in text


def test_check_capture_keeps_what_it_found_before_it_had_to_stop() -> None:
    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        loss = mean_square(model, x)
        loss.detach().reshape(1).tolist()
        return torch.cond(loss > 0, lambda y: y.sin(), lambda y: y.cos(), (loss,))

    with linear_trainer(loss_fn=loss_fn) as trainer:
        before = values(trainer)
        report = graphrt.check_capture(trainer, X)
        assert_same_values(values(trainer), before)
    assert report.failure is None
    assert [any(word in hazard for hazard in report.hazards) for word in ("tolist()", "cond runs Python")] == [True, True]


def test_check_capture_keeps_what_it_found_before_the_step_failed() -> None:
    calls = [0]

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        loss = mean_square(model, x)
        loss.detach().reshape(1).tolist()
        calls[0] += 1
        return loss / (1 / 0 if calls[0] > 1 else 1)

    with linear_trainer(loss_fn=loss_fn) as trainer:
        report = graphrt.check_capture(trainer, X)
    assert "division by zero" in (report.failure or "")
    assert ["tolist()" in hazard for hazard in report.hazards] == [True]


def test_check_capture_reports_a_step_that_fails_by_itself() -> None:
    with linear_trainer(loss_fn=lambda model, x: mean_square(model, x) / (1 / 0)) as trainer:
        before = values(trainer)
        report = graphrt.check_capture(trainer, X)
        assert_same_values(values(trainer), before)
    assert report.failure is not None
    assert report.failure.startswith("ZeroDivisionError: division by zero (")
    assert report.failure.endswith(", 1 / 0)")
    assert not report
    assert "division by zero" in str(report)


def test_another_converted_model_in_loss_fn_updates_with_the_step():
    def run(mode):
        torch.manual_seed(0)
        recipe = graphrt.DelayedScaling(amax_history_len=3)
        model = graphrt.convert_to_float8_training(nn.Sequential(nn.Linear(32, 16)), recipe=recipe)
        critic = graphrt.convert_to_float8_training(nn.Sequential(nn.Linear(16, 16)), recipe=recipe).requires_grad_(False)
        batches = [torch.randn(8, 32, generator=torch.Generator().manual_seed(i)) for i in range(6)]
        with graphrt.Trainer(model, torch.optim.AdamW(model.parameters()), lambda m, b: critic(m(b)).square().mean(), mode=mode) as trainer:
            losses = [trainer.step(batch).loss for batch in batches]
        state = graphrt.quantization_state(critic)
        assert (state.forward_updates, state.backward_updates, state.backward_update_requested) == (7, 7, False)
        return torch.stack(losses), state.snapshot().tensors

    (eager_losses, eager_state), (losses, state) = run("eager"), run("graph")
    assert torch.equal(eager_losses, losses)
    assert all(torch.equal(eager_state[name], state[name]) for name in eager_state)


def test_a_step_hook_registered_later_runs():
    model, calls = nn.Linear(16, 16), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with graphrt.Trainer(model, optimizer, lambda m, b: m(b).square().mean(), mode="eager") as trainer:
        trainer.step(torch.randn(4, 16))
        optimizer.register_step_post_hook(lambda *_: calls.append(1))
        trainer.step(torch.randn(4, 16))
        assert calls == [1]
        assert "step hooks" in str(trainer.report().optimizer_outside_reason)


@pytest.mark.parametrize(("make", "change"), [(torch.optim.SGD, {"momentum": 0.9}), (torch.optim.AdamW, {"amsgrad": True})])
def test_eager_steps_follow_a_hyper_parameter_that_needs_new_state(make, change):
    model = nn.Linear(16, 16)
    optimizer = make(model.parameters(), lr=0.1)
    with graphrt.Trainer(model, optimizer, lambda m, b: m(b).square().mean(), mode="eager") as trainer:
        trainer.step(torch.randn(4, 16))
        optimizer.param_groups[0].update(change)
        assert bool(trainer.step(torch.randn(4, 16)).loss.isfinite())


def test_a_hyper_parameter_changed_before_the_capture_is_named():
    model = nn.Linear(16, 16)
    optimizer = torch.optim.AdamW(model.parameters())
    with graphrt.Trainer(model, optimizer, lambda m, b: m(b).square().mean(), mode="graph") as trainer:
        for _ in range(2):
            trainer.step(torch.randn(4, 16))
        optimizer.param_groups[0]["betas"] = (0.8, 0.9)
        with pytest.raises(graphrt.CaptureError, match=r"betas.*recapture"):
            trainer.step(torch.randn(4, 16))
        trainer.recapture()
        for _ in range(4):
            assert bool(trainer.step(torch.randn(4, 16)).loss.isfinite())


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_what_loss_fn_takes_out_of_a_batch_is_there_again(mode):
    model = graphrt.convert_to_float8_training(nn.Sequential(nn.Linear(16, 16)))

    def loss_fn(m, batch):
        y = batch.pop("y")
        return (m(batch["x"]) - y).square().mean()

    with graphrt.Trainer(model, torch.optim.AdamW(model.parameters()), loss_fn, mode=mode) as trainer:
        for _ in range(4):
            trainer.step({"x": torch.randn(4, 16), "y": torch.randn(4, 16)})


def test_a_scheduler_on_one_side_only_does_not_matter_to_a_checkpoint():
    def make():
        model = nn.Linear(16, 16)
        optimizer = torch.optim.AdamW(model.parameters())
        return graphrt.Trainer(model, optimizer, lambda m, b: m(b).square().mean(), mode="eager"), optimizer

    (first, optimizer), (second, _) = make(), make()
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=20, cycle_momentum=False)
    first.step(torch.randn(4, 16))
    second.load_state_dict(first.state_dict())
    assert second.steps_taken == 1


def test_evaluate_leaves_buffers_as_they_were():
    class Counting(nn.Linear):
        def __init__(self) -> None:
            super().__init__(16, 16)
            self.register_buffer("n", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.n.add_(1)
            return super().forward(x)

    model = Counting()
    with graphrt.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, b: m(b).mean(), mode="eager") as trainer:
        trainer.step(torch.randn(4, 16))
        trainer.evaluate(torch.randn(4, 16))
        assert model.n == 1
