"""Captured steps equal eager ones, bit for bit: on the recorder everywhere, in a CUDA graph on a GPU."""

import functools
import gc
import re
import sys
import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from stepping import (
    KINDS,
    NUM_STEPS,
    TokenModel,
    assert_captured_equals_eager,
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
from torch.optim.optimizer import register_optimizer_step_pre_hook

import graphrt
from graphrt import batch as batch_
from graphrt.capture.fingerprint import Fingerprint
from graphrt.capture.runner import CapturedRunner
from graphrt.nn import embedding


@pytest.fixture(autouse=True)
def _bitwise() -> Iterator[None]:
    with deterministic():
        yield


# -- bitwise equal to eager over more steps than the history has rows


def test_captured_steps_equal_eager_steps(device: torch.device) -> None:
    assert_captured_equals_eager(device)


def test_captured_steps_of_an_unconverted_model_equal_eager_steps(device: torch.device) -> None:
    assert_captured_equals_eager(device, is_fp8=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_captured_steps_in_half_precision_equal_eager_steps(device: torch.device, dtype: torch.dtype) -> None:
    assert_captured_equals_eager(device, dtype=dtype)


def test_captured_steps_under_autocast_equal_eager_steps(device: torch.device) -> None:
    def autocast_loss(model: nn.Module, batch: dict[str, Tensor]) -> Any:
        with torch.autocast(device.type, torch.bfloat16):
            return token_loss(model, batch)

    assert_captured_equals_eager(device, loss_fn=autocast_loss)


@pytest.mark.parametrize("num", [2, 4])
def test_captured_microbatches_equal_eager_microbatches(device: torch.device, num: int) -> None:
    assert_captured_equals_eager(device, grad_accum_steps=num, model={"dropout": 0.2})


def test_a_captured_list_of_microbatches_equals_an_eager_one(device: torch.device) -> None:
    batches = [[token_batch(3 * step), token_batch(3 * step + 1)] for step in range(NUM_STEPS)]
    assert_captured_equals_eager(device, grad_accum_steps=2, batches=batches)


def test_captured_dropout_draws_what_eager_draws(device: torch.device) -> None:
    same = [token_batch(0)] * NUM_STEPS

    def freeze(_trainer: graphrt.Trainer, _step: int) -> None:
        for group in _trainer.optimizer.param_groups:
            group["lr"] = 0.0

    def losses_of(mode: str) -> list[Tensor]:
        with make_trainer(mode, device, model={"dropout": 0.5}, is_fp8=False) as trainer:
            return [values["loss"] for values in run(trainer, same, freeze)]

    captured, eager = losses_of("graph"), losses_of("eager")
    assert [float(loss) for loss in captured] == [float(loss) for loss in eager]
    assert len({float(loss) for loss in captured}) == NUM_STEPS, "the masks do not change from step to step"


def test_a_seed_set_between_captured_steps_is_followed(device: torch.device) -> None:
    def reseed(_trainer: graphrt.Trainer, step: int) -> None:
        if step in (4, 5):
            torch.manual_seed(77)

    assert_captured_equals_eager(device, model={"dropout": 0.5}, before_step=reseed)


FAST_KINDS = ("graphrt", "graphrt-reentrant", "own")


@pytest.mark.parametrize("dropout", [pytest.param(0.0, marks=pytest.mark.slow), 0.3])
@pytest.mark.parametrize("kind", [pytest.param(name, marks=[] if name in FAST_KINDS else pytest.mark.slow) for name in KINDS])
def test_captured_checkpointed_steps_equal_eager_ones(device: torch.device, kind: str, dropout: float) -> None:
    # The own checkpoint of the tests does not rewind the generator, so its gradients are not those of the forward; equal they have to be.
    assert_captured_equals_eager(device, model={"dropout": dropout, "wrap": KINDS[kind]})


@pytest.mark.parametrize("kind", [KINDS["graphrt"], KINDS["graphrt-reentrant"]], ids=["graphrt", "graphrt-reentrant"])
def test_captured_checkpointing_with_dropout_has_the_gradients_of_a_plain_captured_step(device: torch.device, kind: Any) -> None:
    with make_trainer("graph", device, model={"dropout": 0.3}) as trainer:
        plain = run(trainer, token_batches())
    with make_trainer("graph", device, model={"dropout": 0.3, "wrap": kind}) as trainer:
        checkpointed = run(trainer, token_batches())
    assert_same_trajectory(checkpointed, plain)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [KINDS["graphrt"], KINDS["torch-reentrant"]], ids=["graphrt", "torch-reentrant"])
def test_captured_nested_checkpoints_equal_eager_ones(device: torch.device, kind: Any) -> None:
    def nested(fn: Any, x: Tensor) -> Tensor:
        return kind(lambda y: kind(fn, y) * 1.0, x)

    assert_captured_equals_eager(device, model={"dropout": 0.3, "wrap": nested}, grad_accum_steps=2)


def test_captured_tied_weights_equal_eager_ones(device: torch.device) -> None:
    assert_captured_equals_eager(device, model={"is_tied": True})


@pytest.mark.slow
@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("num", [1, 2])
def test_captured_fused_embeddings_equal_eager_ones(device: torch.device, num: int, is_tied: bool) -> None:
    """Batches that are mostly one token: its gradient is a sum of several segments."""
    batches = token_batches(batch_size=16)
    for batch in batches:
        batch["tokens"].masked_fill_(batch["tokens"] > 4, 7)
    model = {"is_tied": is_tied, "embed": embedding}
    assert_captured_equals_eager(device, grad_accum_steps=num, model=model, batches=batches)


def test_a_parameter_that_takes_no_part_keeps_no_gradient_and_does_not_decay(device: torch.device) -> None:
    eager = assert_captured_equals_eager(device, model={"has_unused": True})
    assert torch.equal(eager[0]["unused.weight"], eager[-1]["unused.weight"])
    assert "unused.weight.grad" not in eager[-1]


def test_captured_steps_with_frozen_layers_equal_eager_ones(device: torch.device) -> None:
    def freeze(model: nn.Module) -> None:
        model.get_submodule("blocks.0").requires_grad_(False).eval()

    eager = assert_captured_equals_eager(device, model={"dropout": 0.3}, prepare=freeze)
    assert torch.equal(eager[0]["blocks.0.up.weight"], eager[-1]["blocks.0.up.weight"])


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("at", [1, 2, 4], ids=["warmup", "capture", "replay"])
def test_a_non_finite_step_is_skipped_alike_captured_and_eager(device: torch.device, bad: float, at: int) -> None:
    batches = token_batches()
    batches[at]["weight"] = torch.tensor(bad)
    eager = assert_captured_equals_eager(device, batches=batches)
    assert [bool(values["is skipped"]) for values in eager] == [step == at for step in range(NUM_STEPS)]
    assert torch.equal(eager[at - 1]["head.weight"], eager[at]["head.weight"])
    assert int(eager[-1]["skipped steps"]) == 1


def test_schedules_of_learning_rate_and_weight_decay_are_followed_by_the_graph(device: torch.device) -> None:
    def schedule(trainer: graphrt.Trainer, step: int) -> None:
        for i, group in enumerate(trainer.optimizer.param_groups):
            group["lr"] = 0.02 / (1 + step + i)
            group["weight_decay"] = 0.1 * step

    def two_groups(parameters: Any) -> torch.optim.Optimizer:
        first, *rest = parameters
        return torch.optim.AdamW([{"params": [first]}, {"params": rest, "lr": 0.005}], lr=0.01)

    assert_captured_equals_eager(device, optimizer=two_groups, before_step=schedule)


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "RMSprop"])
def test_at_learning_rate_zero_no_weight_moves_after_the_capture(device: torch.device, name: str) -> None:
    options: dict[str, Any] = {"momentum": 0.9} if name == "SGD" else {}

    def make(parameters: Any) -> torch.optim.Optimizer:
        return getattr(torch.optim, name)(parameters, lr=0.01, weight_decay=0.1, **options)

    def stop(trainer: graphrt.Trainer, step: int) -> None:
        if step == 4:
            for group in trainer.optimizer.param_groups:
                group["lr"] = 0.0

    eager = assert_captured_equals_eager(device, optimizer=make, before_step=stop)
    assert torch.equal(eager[3]["head.weight"], eager[5]["head.weight"])
    assert not torch.equal(eager[2]["head.weight"], eager[3]["head.weight"])


def test_max_grad_norm_is_live_in_the_graph(device: torch.device) -> None:
    def change(trainer: graphrt.Trainer, step: int) -> None:
        trainer.max_grad_norm = (None, 1e-3, 10.0)[step % 3]

    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

    eager = assert_captured_equals_eager(device, optimizer=sgd, before_step=change)
    moved = [float((eager[i]["head.weight"] - eager[i - 1]["head.weight"]).norm()) for i in range(1, NUM_STEPS)]
    assert moved[3] < 2e-4 < moved[4]  # steps 4 (clipped to 1e-3) and 5


@pytest.mark.parametrize("is_eager", ["eegggeggge", "gegegegege", "gggegggeee"])
def test_eager_and_captured_steps_mix_in_any_order(device: torch.device, is_eager: str) -> None:
    batches = token_batches(len(is_eager))
    with make_trainer("eager", device, model={"dropout": 0.3}) as trainer:
        expected = run(trainer, batches)
    actual = []
    with make_trainer("graph", device, model={"dropout": 0.3}) as trainer:
        for letter, batch in zip(is_eager, batches, strict=True):
            if letter == "e":
                with trainer.eager():
                    actual.append(step_values(trainer, batch))
            else:
                actual.append(step_values(trainer, batch))
        assert trainer.report().capture.num_graphs == 1  # type: ignore[union-attr]
    assert_same_trajectory(actual, expected)


@pytest.mark.slow
@pytest.mark.parametrize("at", [1, 3, 5])
@pytest.mark.parametrize("modes", ["gg", "ge", "eg"])
def test_a_run_saved_and_resumed_in_any_mode_equals_the_unbroken_run(device: torch.device, modes: str, at: int, tmp_path: Any) -> None:
    names = {"g": "graph", "e": "eager"}
    batches = token_batches(NUM_STEPS + 3)
    with make_trainer("eager", device, model={"dropout": 0.3}) as trainer:
        expected = run(trainer, batches)
    with make_trainer(names[modes[0]], device, model={"dropout": 0.3}) as trainer:
        actual = run(trainer, batches[:at])
        torch.save(trainer.state_dict(), tmp_path / "trainer.pt")
    saved = torch.load(tmp_path / "trainer.pt", weights_only=True)
    with make_trainer(names[modes[1]], device, model={"dropout": 0.3}, seed=99) as trainer:
        trainer.load_state_dict(saved)
        actual += run(trainer, batches[at:])
    assert_same_trajectory(actual, expected)


def test_loading_into_a_captured_trainer_keeps_its_graph_and_its_addresses(device: torch.device) -> None:
    batches = token_batches(8)
    with make_trainer("eager", device, model={"dropout": 0.3}) as trainer:
        expected = run(trainer, batches)
    with make_trainer("graph", device, model={"dropout": 0.3}) as trainer:
        run(trainer, batches[:4])
        saved = trainer.state_dict()
        run(trainer, batches[5:8])
        addresses = [p.data_ptr() for p in trainer.model.parameters()]
        trainer.load_state_dict(saved)
        actual = run(trainer, batches[4:])
        assert addresses == [p.data_ptr() for p in trainer.model.parameters()]
        assert trainer.report().capture.num_graphs == 1  # type: ignore[union-attr]
    assert_same_trajectory(actual, expected[4:])


@pytest.mark.parametrize("at", [1, 2])
def test_a_fresh_state_loaded_during_the_warmup_starts_it_again(device: torch.device, at: int) -> None:
    with make_trainer("graph", device) as trainer:
        fresh = trainer.state_dict()
        expected = run(trainer, token_batches(5))
    with make_trainer("graph", device) as trainer:
        run(trainer, token_batches(at))
        trainer.load_state_dict(fresh)
        assert_same_trajectory(run(trainer, token_batches(5)), expected)


def test_the_state_of_a_fresh_trainer_loads_into_a_captured_one(device: torch.device) -> None:
    batches = token_batches(5)
    with make_trainer("graph", device) as trainer:
        fresh = trainer.state_dict()
        expected = run(trainer, batches)
        trainer.load_state_dict(fresh)
        actual = run(trainer, batches)
        assert trainer.report().capture.num_graphs == 1  # type: ignore[union-attr]
    assert_same_trajectory(actual, expected)


# -- shapes, results, inputs


def test_a_second_shape_gets_a_graph_of_its_own_and_further_ones_run_eagerly(device: torch.device) -> None:
    sizes = [4, 2, 4, 2, 4, 2, 4, 2, 8, 4, 2, 8]
    batches = [token_batch(step, batch_size=size) for step, size in enumerate(sizes)]
    with make_trainer("eager", device) as trainer:
        expected = run(trainer, batches)
    with make_trainer("graph", device, max_graphs=2) as trainer:
        actual = run(trainer, batches)
        stats = trainer.report().capture
    assert_same_trajectory(actual, expected)
    assert stats is not None
    assert (stats.num_graphs, stats.num_eager_fallbacks) == (2, 2)


class KeywordModel(TokenModel):
    """Calls modules with keywords of any name."""

    class Calling(nn.Module):
        def forward(self, x: Tensor, *, module: nn.Module, args: Any = None) -> Tensor:
            return module(x)

    def __init__(self) -> None:
        super().__init__()
        self.calling = self.Calling()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.calling(super().forward(tokens), module=nn.Identity(), args=())


def test_a_modules_keywords_are_its_own(device: torch.device) -> None:
    with make_trainer("eager", device, model=KeywordModel) as trainer:
        expected = run(trainer, token_batches(5))
    with make_trainer("graph", device, model=KeywordModel) as trainer:
        actual = run(trainer, token_batches(5))
        assert trainer.profile(steps=1).captured is not None
    assert_same_trajectory(actual, expected)


class WarmingModel(TokenModel):
    """Uses one linear from its third call on: calibration, the first step, then the others."""

    def __init__(self) -> None:
        super().__init__()
        self.late, self.num_calls = nn.Linear(16, 16), 0

    def forward(self, tokens: Tensor) -> Tensor:
        self.num_calls += 1
        x = super().forward(tokens)
        return x if self.num_calls < 3 else x + self.late(self.embedding(tokens)).mean()


def test_a_first_gradient_in_the_last_warmup_step_means_one_more(device: torch.device) -> None:
    with make_trainer("eager", device, model=WarmingModel) as trainer:
        expected = run(trainer, token_batches(6))
    with make_trainer("graph", device, model=WarmingModel) as trainer:
        actual = run(trainer, token_batches(6))
        assert trainer.report().capture.num_graphs == 1  # type: ignore[union-attr]
    assert_same_trajectory(actual, expected)


class ShapedModel(TokenModel):
    """Uses one linear only for batches of two."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = nn.Linear(16, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = self.pair(x) if tokens.shape[0] == 2 else x
        return self.head(self.blocks[1](self.blocks[0](x)))


def test_a_parameter_that_only_a_second_shape_uses_is_refused_by_name(device: torch.device) -> None:
    with make_trainer("graph", device, model=ShapedModel, max_graphs=2) as trainer:
        run(trainer, token_batches(4))
        before = values(trainer)
        with pytest.raises(graphrt.CaptureError, match=r"pair\.(weight|bias) got its first gradient with this batch shape"):
            trainer.step(token_batch(4, batch_size=2))
        assert_same_values(values(trainer), before)
        run(trainer, token_batches(2))
        assert trainer.model.pair.weight.grad is None


def test_a_second_shape_is_refused_by_default_and_captured_after_recapture(device: torch.device) -> None:
    with make_trainer("graph", device) as trainer:
        run(trainer, token_batches(4))
        before = values(trainer)
        with pytest.raises(graphrt.StaticInputError, match=r'batch\["tokens"\] has shape \[2, 16\].*captured with \[4, 16\]'):
            trainer.step(token_batch(4, batch_size=2))
        assert_same_values(values(trainer), before)
        trainer.recapture()
        run(trainer, token_batches(4, batch_size=2))
        assert trainer.report().capture.num_graphs == 2  # type: ignore[union-attr]


def test_recapture_goes_on_with_the_trajectory(device: torch.device) -> None:
    def recapture(trainer: graphrt.Trainer, step: int) -> None:
        if step == 4:
            trainer.recapture()

    with make_trainer("eager", device, model={"dropout": 0.3}) as trainer:
        expected = run(trainer, token_batches(9))
    with make_trainer("graph", device, model={"dropout": 0.3}) as trainer:
        actual = run(trainer, token_batches(9), recapture)
        assert trainer.report().capture.num_graphs == 2  # type: ignore[union-attr]
    assert_same_trajectory(actual, expected)


def test_a_recapture_takes_changed_hyper_parameters_and_flags_in(device: torch.device) -> None:
    def change(trainer: graphrt.Trainer, step: int) -> None:
        if step == 4:
            trainer.optimizer.param_groups[0]["betas"] = (0.5, 0.6)
            trainer.model.get_submodule("blocks.0").eval()
            trainer.recapture()

    with make_trainer("eager", device, model={"dropout": 0.3}) as trainer:
        expected = run(trainer, token_batches(9), change)
    with make_trainer("graph", device, model={"dropout": 0.3}) as trainer:
        assert_same_trajectory(run(trainer, token_batches(9), change), expected)


def test_an_item_of_a_list_of_hyper_parameters_changed_in_place_is_seen(device: torch.device) -> None:
    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(parameters, lr=1e-3)
        optimizer.param_groups[0]["betas"] = [0.9, 0.95]  # some releases make a tuple of what the constructor gets
        return optimizer

    with make_trainer("graph", device, optimizer=make) as trainer:
        batches = token_batches(5)
        run(trainer, batches[:4])
        group, before = trainer.optimizer.param_groups[0], values(trainer)
        group["betas"][0] = 0.5
        with pytest.raises(
            graphrt.CaptureError, match=re.escape("param_groups[0]['betas'] is [0.5, 0.95], but the step was captured with [0.9")
        ):
            trainer.step(batches[4])
        assert_same_values(values(trainer), before)
        group["betas"][0] = 0.9
        trainer.step(batches[4])


def test_results_kept_in_a_list_stay_what_they_were(device: torch.device) -> None:
    with make_trainer("graph", device) as trainer:
        results = [trainer.step(batch) for batch in token_batches()]
    with make_trainer("eager", device) as trainer:
        expected = [trainer.step(batch) for batch in token_batches()]
    assert [float(result.loss) for result in results] == [float(result.loss) for result in expected]
    assert [float(result.grad_norm) for result in results] == [float(result.grad_norm) for result in expected]
    assert [float(result.metrics["spread"]) for result in results] == [float(result.metrics["spread"]) for result in expected]
    assert len({float(result.loss) for result in results}) == NUM_STEPS


def test_the_caller_may_refill_its_buffers_as_soon_as_step_returns(device: torch.device) -> None:
    with make_trainer("eager", device) as trainer:
        expected = run(trainer, token_batches())
    buffers = {name: value.to(device) for name, value in token_batch(0).items()}
    actual = []
    with make_trainer("graph", device) as trainer:
        for batch in token_batches():
            for name, value in batch.items():
                buffers[name].copy_(value)
            result = trainer.step(buffers)
            for buffer in buffers.values():
                buffer.zero_()
            actual.append({"loss": result.loss, **values(trainer)})
    assert_same_trajectory(actual, [{"loss": one["loss"], **{name: one[name] for name in actual[0] if name != "loss"}} for one in expected])


def test_other_strides_and_other_key_orders_are_copied_in(device: torch.device) -> None:
    with make_trainer("eager", device) as trainer:
        expected = run(trainer, token_batches())

    def other(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: value.t().contiguous().t() if value.dim() == 2 else value for name, value in reversed(batch.items())}

    with make_trainer("graph", device) as trainer:
        actual = run(trainer, [batch if step % 2 else other(batch) for step, batch in enumerate(token_batches())])
    assert_same_trajectory(actual, expected)


def test_static_addresses_stay_from_step_to_step(device: torch.device) -> None:
    with make_trainer("graph", device) as trainer:
        run(trainer, token_batches(3))

        def addresses() -> list[int]:
            owned = [p.grad.data_ptr() for p in trainer.model.parameters() if p.grad is not None]
            states = [value.data_ptr() for state in trainer.optimizer.state.values() for value in state.values()]
            assert trainer.state is not None
            return [*owned, *states, *(p.data_ptr() for p in trainer.model.parameters()), trainer.state.scales.scale.data_ptr()]

        before = addresses()
        run(trainer, token_batches(3))
        assert addresses() == before


# -- gradients


def sunk(trainer: graphrt.Trainer) -> list[nn.Parameter]:
    """The parameters whose gradients the step overwrites, which is why it may make them anew."""
    found = [p for p in trainer.model.parameters() if p in trainer._body.gradients.sinks]
    assert found
    return found


def test_until_the_capture_each_step_makes_the_gradients_it_overwrites(device: torch.device) -> None:
    with make_trainer("graph", device) as trainer:
        seen: list[list[Tensor | None]] = []
        for batch in token_batches(5):
            trainer.step(batch)
            seen.append([p.grad for p in sunk(trainer)])
        first, second, captured, *replayed = seen
        assert all(one is not other for one, other in zip(first, second, strict=True))
        assert all(one is not other for one, other in zip(second, captured, strict=True))
        assert all(one is other for later in replayed for one, other in zip(captured, later, strict=True))


def test_recapture_and_close_free_the_gradients_that_are_in_the_pool(device: torch.device) -> None:
    with make_trainer("eager", device) as trainer:
        expected = run(trainer, token_batches(12))
    with make_trainer("graph", device) as trainer:
        actual = run(trainer, token_batches(12)[:5])
        trainer.recapture()
        parameters = sunk(trainer)
        assert all(p.grad is None for p in parameters)
        with trainer.eager():
            actual += run(trainer, token_batches(12)[5:6])
        actual += run(trainer, token_batches(12)[6:])
        assert all(p.grad is not None for p in parameters)
    assert all(p.grad is None for p in parameters)
    assert_same_trajectory(actual, expected)


def test_recapture_keeps_no_gradient_alive(device: torch.device) -> None:
    with make_trainer("graph", device) as trainer:
        run(trainer, token_batches(4))
        seen = [weakref.ref(p.grad) for p in sunk(trainer)]
        assert all(grad() is not None for grad in seen)
        trainer.recapture()
        gc.collect()
        assert all(grad() is None for grad in seen)


@pytest.mark.parametrize("way", ["check_capture", "failed eager step"])
def test_released_gradients_are_remembered_by_what_puts_everything_back(device: torch.device, way: str) -> None:
    def loss_fn(model: nn.Module, batch: Any) -> Any:
        if is_broken[0]:
            raise ZeroDivisionError
        return token_loss(model, batch)

    is_broken = [False]
    with make_trainer("graph", device, loss_fn=loss_fn) as trainer:
        run(trainer, token_batches(4))
        before = trainer.state_dict()["gradients"]
        trainer.recapture()
        if way == "check_capture":
            graphrt.check_capture(trainer, token_batch(0))
        else:
            is_broken[0] = True
            with trainer.eager(), pytest.raises(ZeroDivisionError):
                trainer.step(token_batch(0))
            is_broken[0] = False
        assert sorted(trainer.state_dict()["gradients"]) == sorted(before)
        run(trainer, token_batches(4))


class SometimesModel(TokenModel):
    """A layer that only the first forward uses, so that its gradient is made once and zero ever after."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(16, 16, bias=False)
        self.num_forwards = 0

    def forward(self, tokens: Tensor) -> Tensor:
        self.num_forwards += 1
        hidden = self.head.weight.new_ones(16, 16)
        used = self.extra(hidden).mean() if self.num_forwards == 1 else 0.0
        return super().forward(tokens) + used


def test_a_released_gradient_that_the_step_does_not_write_is_zero(device: torch.device) -> None:
    with make_trainer("eager", device, model=SometimesModel, calibrate=False) as trainer:
        expected = run(trainer, token_batches(6))
        assert trainer.model.extra.weight.grad.count_nonzero() == 0
    with make_trainer("graph", device, model=SometimesModel, calibrate=False) as trainer:
        actual = run(trainer, token_batches(6))
        assert any(p is trainer.model.extra.weight for p in sunk(trainer))
        assert trainer.model.extra.weight.grad.count_nonzero() == 0
    assert_same_trajectory(actual, expected)


def test_metrics_of_any_dtype_are_means_over_the_microbatches(device: torch.device) -> None:
    """A mean of whole numbers is a float32; one of complex numbers keeps its imaginary part."""

    def loss_fn(model: nn.Module, batch: Any) -> Any:
        loss, _ = token_loss(model, batch)
        mean = loss.detach()
        return loss, {"complex": torch.complex(mean, 2 * mean), "count": (batch["labels"] > 3).sum(), "flag": mean > 0}

    results = {}
    for mode in ("eager", "graph"):
        with make_trainer(mode, device, loss_fn=loss_fn, grad_accum_steps=2) as trainer:
            results[mode] = [trainer.step(batch) for batch in token_batches(5)][-1]
            metrics = results[mode].metrics
            assert torch.equal(metrics["complex"], torch.complex(results[mode].loss, 2 * results[mode].loss))
            assert (metrics["count"].dtype, metrics["flag"].dtype) == (torch.float32, torch.float32)
            assert float(metrics["count"]) == float((token_batch(4)["labels"] > 3).sum()) / 2
    assert {k: v.item() for k, v in results["eager"].metrics.items()} == {k: v.item() for k, v in results["graph"].metrics.items()}


def test_a_failed_warmup_step_gives_released_gradients_back(device: torch.device) -> None:
    def broken(model: nn.Module, batch: Any) -> Any:
        loss, metrics = token_loss(model, batch)
        if is_broken:
            loss.register_hook(raise_broken)
        return loss, metrics

    is_broken = False
    with make_trainer("graph", device, loss_fn=broken) as trainer:
        run(trainer, token_batches(1))
        before = [p.grad.clone() for p in sunk(trainer)]
        is_broken = True
        with pytest.raises(ZeroDivisionError):
            trainer.step(token_batch(1))
        is_broken = False
        assert all(torch.equal(p.grad, grad) for p, grad in zip(sunk(trainer), before, strict=True))
        run(trainer, token_batches(4))


def raise_broken(_grad: Tensor) -> None:
    raise ZeroDivisionError


@pytest.mark.gpu
def test_gradients_of_a_captured_step_take_memory_that_activations_have_left() -> None:
    """Peak memory beyond the parameters and moments is less than gradients and activations together."""
    device, width, rows = torch.device("cuda", 0), 1024, 8192

    def run_steps(has_own_gradients: bool) -> tuple[int, list[int]]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width, bias=False), nn.GELU()) for _ in range(16))).to(device)
        graphrt.convert_to_float8_training(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        with graphrt.Trainer(model, optimizer, lambda model, x: model(x).square().mean(), mode="graph") as trainer:
            assert trainer._captured is not None
            trainer._captured._has_own_gradients = has_own_gradients
            for _ in range(4):
                trainer.step(torch.randn(rows, width, device=device))
            assert trainer._captured.stats.num_graphs == 1
            pools = [segment["segment_pool_id"] for p in model.parameters() for segment in segments() if holds(segment, p.grad)]
            assert len(pools) == 16
            return trainer._captured.stats.pool_bytes_after - trainer._captured.stats.pool_bytes_before, pools

    def segments() -> list[dict[str, Any]]:
        return torch.cuda.memory_snapshot()

    def holds(segment: dict[str, Any], x: Tensor | None) -> bool:
        assert x is not None
        return segment["address"] <= x.data_ptr() < segment["address"] + segment["total_size"]

    with_own, own_pools = run_steps(True)
    without, other_pools = run_steps(False)
    assert all(pool != (0, 0) for pool in own_pools)
    assert all(pool == (0, 0) for pool in other_pools)
    num_gradient_bytes = 16 * width * width * 4
    assert with_own < without + num_gradient_bytes // 2


@pytest.mark.parametrize("mode", ["graph", "eager"])
def test_zeroed_and_removed_gradients_are_attached_again(device: torch.device, mode: str) -> None:
    def remove(trainer: graphrt.Trainer, step: int) -> None:
        if step % 3 == 1:
            trainer.optimizer.zero_grad()
        elif step % 3 == 2:
            trainer.model.zero_grad(set_to_none=False)
        else:
            for p in trainer.model.parameters():
                p.grad = None

    with make_trainer("eager", device) as trainer:
        expected = run(trainer, token_batches())
    with make_trainer(mode, device) as trainer:
        assert_same_trajectory(run(trainer, token_batches(), remove), expected)


@pytest.mark.parametrize("mode", ["graph", "eager"])
@pytest.mark.parametrize("num_steps", [1, 4])
def test_a_rebound_gradient_is_refused_by_name(device: torch.device, mode: str, num_steps: int) -> None:
    with make_trainer(mode, device) as trainer:
        run(trainer, token_batches(num_steps))
        p = trainer.model.get_parameter("head.weight")
        own, p.grad = p.grad, torch.zeros_like(p)
        with pytest.raises(graphrt.GraphrtError, match=r"head\.weight\.grad is another tensor"):
            trainer.step(token_batch(9))
        p.grad = own
        trainer.step(token_batch(9))


def test_a_first_gradient_after_the_capture_is_refused_by_name(device: torch.device) -> None:
    with make_trainer("graph", device, model={"has_unused": True}) as trainer:
        run(trainer, token_batches(4))
        p = trainer.model.get_parameter("unused.weight")
        p.grad = torch.zeros_like(p)
        with pytest.raises(graphrt.CaptureError, match=r"unused\.weight\.grad has appeared"):
            trainer.step(token_batch(4))
        p.grad = None
        trainer.step(token_batch(4))


class LateModel(TokenModel):
    """Uses ``unused`` from step ``first`` on, counted in Python."""

    def __init__(self, first: int) -> None:
        super().__init__(has_unused=True)
        self.first, self.num_forwards = first, 0

    def forward(self, tokens: Tensor) -> Tensor:
        self.num_forwards += 1
        logits = super().forward(tokens)
        return logits + self.unused(logits[..., :16]).mean() if self.num_forwards >= self.first else logits


def test_a_first_gradient_in_the_captured_step_is_refused_by_name(device: torch.device) -> None:
    with make_trainer("graph", device, model=lambda: LateModel(first=3), is_fp8=False) as trainer:
        run(trainer, token_batches(2))
        before = values(trainer)
        with pytest.raises(graphrt.CaptureError, match=r"unused\.weight got its first gradient in the step that was captured"):
            trainer.step(token_batch(2))
        assert_same_values(values(trainer), before)
        assert trainer.model.get_parameter("unused.weight").grad is None


# -- the fingerprint


def _submodule(trainer: graphrt.Trainer, name: str) -> nn.Module:
    return trainer.model.get_submodule(name)


def _eval(trainer: graphrt.Trainer) -> Any:
    trainer.model.eval()
    return trainer.model.train


def _eval_one(trainer: graphrt.Trainer) -> Any:
    _submodule(trainer, "blocks.1.dropout").eval()
    return _submodule(trainer, "blocks.1.dropout").train


def _freeze(trainer: graphrt.Trainer) -> Any:
    p = trainer.model.get_parameter("blocks.0.up.bias").requires_grad_(False)
    return lambda: p.requires_grad_(True)


def _add_group(trainer: graphrt.Trainer) -> Any:
    trainer.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2, device=trainer.device))]})
    return trainer.optimizer.param_groups.pop


def _change_betas(trainer: graphrt.Trainer) -> Any:
    group = trainer.optimizer.param_groups[0]
    before, group["betas"] = group["betas"], (0.8, 0.9)
    return lambda: group.update(betas=before)


def _change_eps(trainer: graphrt.Trainer) -> Any:
    group = trainer.optimizer.param_groups[0]
    before, group["eps"] = group["eps"], 1e-3
    return lambda: group.update(eps=before)


def _rebind_data(trainer: graphrt.Trainer) -> Any:
    p = trainer.model.get_parameter("head.weight")
    before = p.data
    p.data = p.data.clone()

    def undo() -> None:
        p.data = before

    return undo


def _rebind_parameter(trainer: graphrt.Trainer) -> Any:
    module = _submodule(trainer, "blocks.0.norm")
    before = module.weight
    module.weight = nn.Parameter(before.detach().clone())

    def undo() -> None:
        module.weight = before

    return undo


def _rebind_buffer(trainer: graphrt.Trainer) -> Any:
    before = trainer.model.num_tokens
    trainer.model.num_tokens = before.clone()

    def undo() -> None:
        trainer.model.num_tokens = before

    return undo


def _replace_submodule(trainer: graphrt.Trainer) -> Any:
    block = _submodule(trainer, "blocks.1")
    before, block.norm = block.norm, nn.LayerNorm(16, device=trainer.device)

    def undo() -> None:
        block.norm = before

    return undo


def _add_submodule(trainer: graphrt.Trainer) -> Any:
    block = _submodule(trainer, "blocks.1")
    block.extra = nn.Identity()

    def undo() -> None:
        del block.extra

    return undo


def _load_optimizer(trainer: graphrt.Trainer) -> Any:
    before = trainer.optimizer.state
    trainer.optimizer.load_state_dict(trainer.optimizer.state_dict())

    def undo() -> None:
        trainer.optimizer.state = before

    return undo


def _clear_optimizer_state(trainer: graphrt.Trainer) -> Any:
    p = trainer.model.get_parameter("head.weight")
    before = trainer.optimizer.state.pop(p)

    def undo() -> None:
        trainer.optimizer.state[p] = before

    return undo


def _swap_data(trainer: graphrt.Trainer) -> Any:
    """Both addresses are known ones, each at the other's place."""
    one, other = trainer.model.get_parameter("blocks.0.up.weight"), trainer.model.get_parameter("blocks.1.up.weight")

    def swap() -> None:
        one.data, other.data = other.data, one.data

    swap()
    return swap


def _move_buffer(trainer: graphrt.Trainer) -> Any:
    buffer = trainer.model.num_tokens
    assert isinstance(buffer, Tensor)
    before, buffer.data = buffer.data, buffer.data.clone()

    def undo() -> None:
        buffer.data = before

    return undo


def _add_parameter(trainer: graphrt.Trainer) -> Any:
    block = _submodule(trainer, "blocks.1")
    block.scale = nn.Parameter(torch.ones(1, device=trainer.device))

    def undo() -> None:
        del block.scale

    return undo


def _remove_buffer(trainer: graphrt.Trainer) -> Any:
    before = trainer.model._buffers.pop("num_tokens")

    def undo() -> None:
        trainer.model._buffers["num_tokens"] = before

    return undo


def _replace_moment(trainer: graphrt.Trainer) -> Any:
    state = trainer.optimizer.state[trainer.model.get_parameter("head.weight")]
    before, state["exp_avg"] = state["exp_avg"], state["exp_avg"].clone()
    return lambda: state.update(exp_avg=before)


def _add_hook(trainer: graphrt.Trainer) -> Any:
    return trainer.optimizer.register_step_post_hook(lambda *_: None).remove


def _add_global_hook(_trainer: graphrt.Trainer) -> Any:
    return register_optimizer_step_pre_hook(lambda *_: None).remove


def _replace_scales(trainer: graphrt.Trainer) -> Any:
    state = trainer.state
    before, state._scale = state._scale, state._scale.clone()  # type: ignore[union-attr]

    def undo() -> None:
        state._scale = before  # type: ignore[union-attr]

    return undo


CHANGES = {
    "eval": (_eval, r"training is False, but the step was captured with True"),
    "eval one": (_eval_one, r"blocks\.1\.dropout\.training is False"),
    "requires_grad_": (_freeze, r"blocks\.0\.up\.bias\.requires_grad is False, but the step was captured with True"),
    "add_param_group": (_add_group, r"2 param groups, but the step was captured with 1"),
    "betas": (_change_betas, r"param_groups\[0\]\['betas'\] is \(0\.8, 0\.9\), but the step was captured with \(0\.9, 0\.999\)"),
    "eps": (_change_eps, r"param_groups\[0\]\['eps'\] is 0\.001"),
    "p.data": (_rebind_data, r"head\.weight has moved to another address"),
    "parameter": (_rebind_parameter, r"blocks\.0\.norm\.weight is another tensor"),
    "buffer": (_rebind_buffer, r"num_tokens is another tensor"),
    "submodule": (_replace_submodule, r"blocks\.1\.norm is another object"),
    "new submodule": (_add_submodule, r"blocks\.1\.extra has appeared"),
    "swap": (_swap_data, r"blocks\.0\.up\.weight has moved to another address"),
    "buffer.data": (_move_buffer, r"num_tokens has moved to another address"),
    "new parameter": (_add_parameter, r"blocks\.1\.scale has appeared"),
    "no buffer": (_remove_buffer, r"num_tokens is gone"),
    "moment": (_replace_moment, r"optimizer\.state\[head\.weight\]\['exp_avg'\] is another tensor"),
    "hook": (_add_hook, r"AdamW has step hooks"),
    "hook of all optimizers": (_add_global_hook, r"AdamW has step hooks"),
    "scales": (_replace_scales, r"the quantization state's scale is another tensor"),
    "optimizer.load_state_dict": (_load_optimizer, r"trainer\.load_state_dict"),
    "optimizer state": (_clear_optimizer_state, r"optimizer\.state\[head\.weight\] is (gone|another object)"),
}


#: One of each kind runs in the fast suite.
FAST_CHANGES = ("eval", "betas", "p.data", "new parameter", "moment", "hook", "scales")


def _case(name: str) -> Any:
    return pytest.param(*CHANGES[name], id=name, marks=[] if name in FAST_CHANGES else pytest.mark.slow)


@functools.cache
def _eager_trajectory(device: torch.device) -> list[dict[str, Tensor]]:
    with make_trainer("eager", device, model={"dropout": 0.2}) as trainer:
        return run(trainer, token_batches(NUM_STEPS))


@pytest.mark.parametrize(("change", "message"), [_case(name) for name in CHANGES])
def test_a_change_after_the_capture_is_refused_by_name_and_undone_it_works_again(device: torch.device, change: Any, message: str) -> None:
    batches = token_batches(NUM_STEPS)
    expected = _eager_trajectory(device)
    with make_trainer("graph", device, model={"dropout": 0.2}) as trainer:
        actual = run(trainer, batches[:4])
        undo = change(trainer)
        before = values(trainer)
        with pytest.raises(graphrt.CaptureError, match=message):
            trainer.step(batches[4])
        assert_same_values(values(trainer), before)
        undo()
        actual += run(trainer, batches[4:])
        assert trainer.report().capture.num_graphs == 1  # type: ignore[union-attr]
    assert_same_trajectory(actual, expected)


def test_a_gradient_whose_data_is_rebound_leaves_its_memory_to_the_graph(device: torch.device) -> None:
    """Gradients are told by identity, so a replay writes where the data was: nobody else may get that memory."""
    with make_trainer("graph", device) as trainer:
        run(trainer, token_batches(4))
        p = trainer.model.get_parameter("head.weight")
        assert p.grad is not None
        p.grad.data = torch.zeros_like(p)
        others = [torch.full_like(p, 7.0) for _ in range(8)]
        trainer.step(token_batch(4))
        assert all(bool((other == 7.0).all()) for other in others)


@pytest.mark.skipif(sys.version_info < (3, 12), reason="CPython has dict watchers from 3.12 on")
def test_what_dicts_hold_is_compared_again_only_after_a_change(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    check_dicts = Fingerprint._check_dicts
    monkeypatch.setattr(Fingerprint, "_check_dicts", lambda self: (looks.append(1), check_dicts(self)))

    def num_looks(trainer: graphrt.Trainer) -> int:
        looks.clear()
        for batch in token_batches(3):
            trainer.step(batch)
        return len(looks)

    with make_trainer("graph", device) as trainer:
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(trainer.optimizer, T_max=NUM_STEPS)
        run(trainer, token_batches(4))
        num_looks(trainer)
        assert num_looks(trainer) == 0
        trainer.model.train()
        scheduler.step()
        trainer.optimizer.zero_grad()
        assert num_looks(trainer) == 0
        trainer.evaluate(token_batch(0))
        assert num_looks(trainer) == 1
        # A second fingerprint of the same model, ended.
        check_runner = trainer.make_captured()
        for batch in token_batches(4):
            trainer.step_with(check_runner, batch)
        check_runner.close()
        assert num_looks(trainer) == 1
        trainer.model.eval()
        for _ in range(2):
            with pytest.raises(graphrt.CaptureError, match="training is False"):
                trainer.step(token_batch(0))


def test_in_place_edits_of_parameters_between_captured_steps_are_honoured(device: torch.device) -> None:
    def edit(trainer: graphrt.Trainer, step: int) -> None:
        with torch.no_grad():
            trainer.model.get_parameter("head.weight").clamp_(-0.2, 0.2)
            if step == 4:
                trainer.model.load_state_dict({name: value * 0.5 for name, value in trainer.model.state_dict().items()})

    assert_captured_equals_eager(device, before_step=edit)


def test_evaluation_between_captured_steps_changes_nothing(device: torch.device) -> None:
    losses: dict[str, list[float]] = {"graph": [], "eager": []}

    def evaluate(trainer: graphrt.Trainer, step: int) -> None:
        if step:
            before = values(trainer)
            losses[trainer.mode].append(float(trainer.evaluate(token_batch(50 + step, batch_size=3, seq=7))))
            assert_same_values(values(trainer), before)

    with make_trainer("eager", device, model={"dropout": 0.3}) as trainer:
        expected = run(trainer, token_batches())
    assert_captured_equals_eager(device, model={"dropout": 0.3}, before_step=evaluate)
    with make_trainer("graph", device, model={"dropout": 0.3}) as trainer:
        assert_same_trajectory(run(trainer, token_batches(), evaluate), expected)
    assert losses["graph"] == losses["eager"] * 2
    assert len(set(losses["eager"])) == NUM_STEPS - 1


def test_counts_move_once_a_step_in_every_phase(device: torch.device) -> None:
    with make_trainer("graph", device, grad_accum_steps=2) as trainer:
        assert trainer.state is not None
        seen = []
        for batch in token_batches():
            trainer.step(batch)
            seen.append((trainer.state.forward_updates, trainer.state.backward_updates, trainer.state.backward_update_requested))
    # Calibration before step 1 is one update of each direction.
    assert seen == [(step + 2, step + 2, False) for step in range(NUM_STEPS)]


# -- after a failed capture


class Failing(nn.Module):
    """Raises in the forward it is told to, after the layers before it have run."""

    def __init__(self) -> None:
        super().__init__()
        self.fails_at, self.num_forwards = -1, 0

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            self.num_forwards += 1
            if self.num_forwards == self.fails_at:
                raise RuntimeError("the user's own failure")
        return x * 1.0


def failing_trainer(mode: str, device: torch.device, fails_at: int = -1) -> graphrt.Trainer:
    def add(model: nn.Module) -> None:
        model.get_submodule("blocks.1").dropout = nn.Sequential(nn.Dropout(0.3), Failing())

    trainer = make_trainer(mode, device, model={"dropout": 0.3}, prepare=add)
    failing = trainer.model.get_submodule("blocks.1.dropout.1")
    assert isinstance(failing, Failing)
    failing.fails_at = fails_at
    return trainer


@pytest.mark.parametrize("step", [0, 1, 2], ids=["first warmup", "observed warmup", "capture"])
def test_a_step_that_fails_on_the_way_to_a_graph_leaves_no_trace(device: torch.device, step: int) -> None:
    batches = token_batches()
    with failing_trainer("eager", device) as trainer:
        expected = run(trainer, batches)
    # Calibration is a forward too.
    with failing_trainer("graph", device, fails_at=step + 2) as trainer:
        actual = run(trainer, batches[:step])
        before = values(trainer)
        with pytest.raises((RuntimeError, graphrt.CaptureError), match="the user's own failure"):
            trainer.step(batches[step])
        assert_same_values(values(trainer), before)
        with trainer.eager():
            actual += run(trainer, batches[step : step + 1])
        actual += run(trainer, batches[step + 1 :])
    assert_same_trajectory(actual, expected)


def test_the_optimizer_is_put_back_when_python_state_is_found_after_the_recorded_step(device: torch.device) -> None:
    batches = token_batches()
    scale = {"factor": 1.0}

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return token_loss(model, batch)[0] * scale["factor"]

    with make_trainer("graph", device, loss_fn=loss_fn) as trainer:
        actual = run(trainer, batches[:2])
        before = values(trainer)
        scale["factor"] = 2.0
        with pytest.raises(graphrt.CaptureError, match=r"2\.0 in the next.*test_captured\.py"):
            trainer.step(batches[2])
        assert_same_values(values(trainer), before)
        scale["factor"] = 1.0
        actual += run(trainer, batches[2:])
    with make_trainer("eager", device, loss_fn=loss_fn) as trainer:
        assert_same_trajectory(actual, run(trainer, batches))


def test_a_swallowed_host_read_in_the_observed_warmup_leaves_the_optimizer_as_it_was(device: torch.device) -> None:
    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        loss = token_loss(model, batch)[0]
        if loss.is_cuda:
            torch.cuda._sleep(100_000_000)  # the optimizer is still to come when the error is raised
        with suppress(graphrt.CaptureError):
            float(loss.detach())
        return loss

    with make_trainer("graph", device, loss_fn=loss_fn) as trainer:
        run(trainer, token_batches(1))
        before = values(trainer)
        with pytest.raises(
            graphrt.CaptureError, match=r"aten::_local_scalar_dense reads a device value on the host \(.*test_captured\.py:\d+"
        ):
            trainer.step(token_batch(1))
        assert_same_values(values(trainer), before)


# -- optimizers


class Halving(torch.optim.Optimizer):
    """A custom optimizer: half the weight, minus the gradient."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["num"] = self.state[p].get("num", 0) + 1
                    p.mul_(0.9).sub_(p.grad, alpha=group["lr"])


OUTSIDE = {
    "custom": Halving,
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.01),
    "NAdam": lambda parameters: torch.optim.NAdam(parameters, lr=0.01),
    "SGD with dampening": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9, dampening=0.1),
}


@pytest.mark.parametrize("optimizer", OUTSIDE.values(), ids=OUTSIDE.keys())
def test_an_optimizer_off_the_list_runs_after_the_replay_and_equals_eager(device: torch.device, optimizer: Any) -> None:
    batches = token_batches()
    batches[4]["weight"] = torch.tensor(float("inf"))
    eager = assert_captured_equals_eager(device, optimizer=optimizer, batches=batches)
    assert [bool(values["is skipped"]) for values in eager] == [step == 4 for step in range(NUM_STEPS)]
    assert torch.equal(eager[3]["head.weight"], eager[4]["head.weight"])


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OUTSIDE.values(), ids=OUTSIDE.keys())
@pytest.mark.parametrize("modes", ["ge", "eg"])
def test_an_optimizer_off_the_list_resumes_bitwise(device: torch.device, optimizer: Any, modes: str) -> None:
    names = {"g": "graph", "e": "eager"}
    with make_trainer("eager", device, optimizer=optimizer) as trainer:
        expected = run(trainer, token_batches())
    with make_trainer(names[modes[0]], device, optimizer=optimizer) as trainer:
        actual = run(trainer, token_batches()[:3])
        saved = trainer.state_dict()
    with make_trainer(names[modes[1]], device, optimizer=optimizer, seed=5) as trainer:
        trainer.load_state_dict(saved)
        actual += run(trainer, token_batches()[3:])
    assert_same_trajectory(actual, expected)


def test_closing_twice_is_fine_and_a_closed_trainer_refuses_steps(device: torch.device) -> None:
    trainer = make_trainer("graph", device)
    run(trainer, token_batches(3))
    trainer.close()
    trainer.close()
    with pytest.raises(graphrt.GraphrtError, match="step was called on a closed Trainer"):
        trainer.step(token_batch(0))


# -- the diagnosis of a capture that failed without naming an operation


def test_a_diagnosis_names_the_operation_and_changes_nothing(device: torch.device) -> None:
    """As after an unobserved warmup on CUDA, where only the driver refuses: the step is run again and watched."""
    is_broken = [False]

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        loss = token_loss(model, batch)[0]
        return loss * 2 if is_broken[0] and loss.item() > 9 else loss

    with make_trainer("graph", device, loss_fn=loss_fn) as trainer:
        run(trainer, token_batches(2))
        runner = trainer._captured
        assert runner is not None
        graph = runner.select(batch_.plain(token_batch(2)))
        assert graph is not None
        before = values(trainer)
        assert graph.diagnose() is None
        is_broken[0] = True
        with trainer.everything_put_back():
            found = graph.diagnose()
            optimizer = {name: value for name, value in values(trainer).items() if name.startswith("optimizer")}
        assert re.search(r"reads a device value on the host.*test_captured\.py:\d+, loss\.item\(\)", str(found))
        assert_same_values(optimizer, {name: before[name] for name in optimizer})


@pytest.mark.gpu
def test_a_failed_capture_after_an_unobserved_warmup_names_the_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CapturedRunner, "can_observe", property(lambda self: False))

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        loss = token_loss(model, batch)[0]
        return loss * 2 if loss.item() > 9 else loss

    with make_trainer("graph", "cuda", loss_fn=loss_fn) as trainer:
        run(trainer, token_batches(2))
        before = values(trainer)
        with pytest.raises(graphrt.CaptureError, match=r"reads a device value on the host.*test_captured\.py:\d+, loss\.item\(\)"):
            trainer.step(token_batch(2))
        assert_same_values(values(trainer), before)
        with trainer.eager():
            trainer.step(token_batch(2))


@pytest.mark.gpu
def test_a_capture_that_cannot_fit_is_refused_before_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    with make_trainer("graph", "cuda") as trainer:
        run(trainer, token_batches(2))
        before = values(trainer)
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "mem_get_info", lambda device: (1, 1))
            with pytest.raises(graphrt.CaptureError, match=r"Capturing needs about .* GiB.*grad_accum_steps"):
                trainer.step(token_batch(2))
        assert_same_values(values(trainer), before)
        trainer.step(token_batch(2))
        assert trainer.report().capture.num_graphs == 1  # type: ignore[union-attr]
