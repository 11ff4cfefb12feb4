"""Small inputs that a capture gets silently wrong, or has to refuse. Silent mismatches first.

Each test names one input and what must come of it. They run on the recorder everywhere, and in a CUDA graph on a GPU.
"""

import gc
import random
import re
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from stepping import (
    KINDS,
    NUM_STEPS,
    VOCABULARY,
    TokenModel,
    adamw,
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
from training import flush_all

import graphrt
from graphrt import guards

HERE = r"test_footguns\.py:\d+"


@pytest.fixture(autouse=True)
def _bitwise() -> Iterator[None]:
    with deterministic():
        yield


def plain_loss(model: nn.Module, batch: Any) -> Tensor:
    return token_loss(model, batch)[0]


# -- silent: the step runs, and computes something else


def test_losses_kept_in_a_list_are_not_overwritten_by_the_next_replay(device: torch.device) -> None:
    with make_trainer("graph", device, is_fp8=False) as trainer:
        run(trainer, token_batches(3))
        losses = [trainer.step(token_batch(step)).loss for step in range(3)]
    assert len({float(loss) for loss in losses}) == 3


def test_a_new_batch_tensor_is_read_and_not_the_captured_one(device: torch.device) -> None:
    with make_trainer("graph", device, is_fp8=False, optimizer=lambda p: torch.optim.SGD(p, lr=0.0)) as trainer:
        run(trainer, token_batches(3))
        loss = float(trainer.step(token_batch(20)).loss)
        assert loss == float(trainer.step({name: value.clone() for name, value in token_batch(20).items()}).loss)
        assert loss != float(trainer.step(token_batch(21)).loss)


def test_a_batch_that_would_broadcast_is_refused(device: torch.device) -> None:
    with make_trainer("graph", device, is_fp8=False) as trainer:
        run(trainer, token_batches(3))
        batch = token_batch(3)
        one_row = {**batch, "tokens": batch["tokens"][:1], "labels": batch["labels"][:1]}
        with pytest.raises(
            graphrt.StaticInputError, match=r'batch\["tokens"\] has shape \[1, 16\], but the step was captured with \[4, 16\]'
        ):
            trainer.step(one_row)


def test_fewer_microbatches_are_refused_and_not_run_on_stale_ones(device: torch.device) -> None:
    with make_trainer("graph", device, is_fp8=False, grad_accum_steps=4) as trainer:
        run(trainer, [[token_batch(step + i) for i in range(4)] for step in range(3)])
        with pytest.raises(graphrt.StaticInputError):
            trainer.step([token_batch(0), token_batch(1)])


@pytest.mark.parametrize("mode", ["graph", "eager"])
def test_four_microbatches_of_the_constant_1_give_a_bias_the_gradient_1(device: torch.device, mode: str) -> None:
    model = nn.Linear(16, 16)

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).sum(-1).mean()

    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

    with make_trainer(mode, device, model=lambda: model, loss_fn=loss_fn, optimizer=sgd, grad_accum_steps=4, max_grad_norm=None) as trainer:
        for _ in range(4):
            loss = trainer.step(torch.ones(16, 16)).loss
            assert model.bias.grad is not None
            assert model.bias.grad.tolist() == [1.0] * 16
        assert loss.shape == ()


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "RMSprop", "Muon"])
def test_a_learning_rate_set_to_zero_after_the_capture_stops_the_weights(device: torch.device, name: str) -> None:
    if not hasattr(torch.optim, name):
        pytest.skip(f"this torch has no {name}")

    def make(parameters: Any) -> torch.optim.Optimizer:
        matrices = [p for p in parameters if p.dim() == 2]
        return getattr(torch.optim, name)(matrices, lr=1.0, weight_decay=0.1)

    with make_trainer("graph", device, is_fp8=False, optimizer=make) as trainer:
        run(trainer, token_batches(4))
        trainer.optimizer.param_groups[0]["lr"] = 0.0
        before = [p.detach().clone() for p in trainer.model.parameters()]
        trainer.step(token_batch(4))
        assert all(torch.equal(p, old) for p, old in zip(trainer.model.parameters(), before, strict=True))
        trainer.optimizer.param_groups[0]["lr"] = 0.1
        trainer.step(token_batch(5))
        assert not torch.equal(trainer.model.get_parameter("head.weight"), before[-1])


def test_a_scheduler_and_a_weight_decay_schedule_are_followed(device: torch.device) -> None:
    def trajectory(mode: str) -> list[dict[str, Tensor]]:
        with make_trainer(mode, device, is_fp8=False) as trainer:
            scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(trainer.optimizer, T_max=NUM_STEPS)
            found = []
            for step, batch in enumerate(token_batches()):
                trainer.optimizer.param_groups[0]["weight_decay"] = 0.3 * step
                found.append(step_values(trainer, batch))
                scheduler.step()
            assert scheduler.get_last_lr()[0] < 1e-6
            assert isinstance(trainer.optimizer.param_groups[0]["lr"], float)
        return found

    assert_same_trajectory(trajectory("graph"), trajectory("eager"))


def test_a_gradient_that_is_set_to_none_is_accumulated_all_the_same(device: torch.device) -> None:
    def forget(trainer: graphrt.Trainer, _step: int) -> None:
        for p in trainer.model.parameters():
            p.grad = None

    assert_captured_equals_eager(device, is_fp8=False, before_step=forget)


def test_a_rebound_gradient_is_refused_by_name(device: torch.device) -> None:
    with make_trainer("graph", device, is_fp8=False) as trainer:
        run(trainer, token_batches(3))
        p = trainer.model.get_parameter("head.weight")
        p.grad = torch.ones_like(p)
        with pytest.raises(graphrt.GraphrtError, match=r"head\.weight\.grad is another tensor"):
            trainer.step(token_batch(3))


def test_a_parameter_that_takes_no_part_is_not_decayed(device: torch.device) -> None:
    def heavy(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=0.1, weight_decay=1.0)

    with make_trainer("graph", device, is_fp8=False, optimizer=heavy, model={"has_unused": True}) as trainer:
        before = trainer.model.get_parameter("unused.weight").detach().clone()
        run(trainer, token_batches())
        after = trainer.model.get_parameter("unused.weight")
        assert torch.equal(after, before)
        assert after.grad is None


def test_dropout_masks_differ_from_step_to_step_and_equal_eagers(device: torch.device) -> None:
    def losses(mode: str) -> list[float]:
        frozen: dict[str, Any] = {"optimizer": lambda p: torch.optim.SGD(p, lr=0.0), "model": {"dropout": 0.5}}
        with make_trainer(mode, device, is_fp8=False, **frozen) as trainer:
            return [float(trainer.step(token_batch(0)).loss) for _ in range(NUM_STEPS)]

    captured = losses("graph")
    assert captured == losses("eager")
    assert len(set(captured)) == NUM_STEPS


@pytest.mark.parametrize("kind", ["graphrt", "graphrt-reentrant", "torch", "torch-reentrant"])
def test_a_recompute_draws_the_mask_of_its_forward_at_every_replay(device: torch.device, kind: str) -> None:
    """The gradient of sum(dropout(p)) is 0 where the mask is 0: a recompute with another mask shows at once."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.p = nn.Parameter(torch.ones(256))

        def forward(self, x: Tensor) -> Tensor:
            # The product saves its input, so that the recompute's mask is what the backward multiplies with.
            return KINDS[kind](lambda p: F.dropout(p, 0.5) * p, self.p * x)

    def loss_fn(model: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        y = model(x)
        return y.sum(), {"y": y.detach()}

    def still(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.0)

    with make_trainer("graph", device, is_fp8=False, model=Masked, loss_fn=loss_fn, optimizer=still, max_grad_norm=None) as trainer:
        masks = []
        for _ in range(NUM_STEPS):
            y = trainer.step(torch.ones(())).metrics["y"]
            grad = trainer.model.get_parameter("p").grad
            assert grad is not None
            assert torch.equal(grad, 2 * y)
            masks.append(y > 0)
        assert not any(torch.equal(one, other) for one, other in pairwise(masks))


@pytest.mark.slow
@pytest.mark.parametrize("wrap", ["nested", "per layer", "branch without a gradient"])
@pytest.mark.parametrize("kind", ["graphrt", "graphrt-reentrant"])
def test_a_checkpointed_captured_step_updates_once_and_leaves_the_scales_of_a_plain_one(device: torch.device, wrap: str, kind: str) -> None:
    checkpoint = KINDS[kind]

    def nested(block: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(lambda y: checkpoint(block, y), x)

    def with_dead_branch(block: nn.Module, x: Tensor) -> Tensor:
        checkpoint(block, x)
        return checkpoint(block, x)

    def dead_branch_plain(block: nn.Module, x: Tensor) -> Tensor:
        block(x)
        return block(x)

    wraps = {"nested": nested, "per layer": checkpoint, "branch without a gradient": with_dead_branch}
    plain = {"branch without a gradient": {"wrap": dead_branch_plain}}.get(wrap, {})
    with make_trainer("graph", device, model={"dropout": 0.2, **plain}) as trainer:
        expected = run(trainer, token_batches())
    with make_trainer("graph", device, model={"dropout": 0.2, "wrap": wraps[wrap]}) as trainer:
        assert trainer.state is not None
        actual = run(trainer, token_batches())
        assert (trainer.state.forward_updates, trainer.state.backward_updates) == (NUM_STEPS + 1, NUM_STEPS + 1)
    assert_same_trajectory(actual, expected)


def test_an_overflow_does_not_freeze_a_scale(device: torch.device) -> None:
    with make_trainer("graph", device) as trainer:
        assert trainer.state is not None
        run(trainer, token_batches(4))
        slot = "head.grad_output"
        scale, history = trainer.state.scale(slot).clone(), trainer.state.amax_history(slot).clone()
        assert bool(trainer.step(token_batch(4, weight=float("inf"))).skipped)
        assert torch.equal(trainer.state.scale(slot), scale)
        assert torch.equal(trainer.state.amax_history(slot), history)
        assert trainer.state.nonfinite_amaxes(slot) == 1
        trainer.step(token_batch(5, weight=1e4))
        assert float(trainer.state.scale(slot)) < float(scale)
        assert bool(trainer.state.scales.scale.isfinite().all())


@pytest.mark.parametrize("weight", [0.0, 1e-45, 1e-30], ids=["zero", "subnormal", "tiny"])
def test_gradients_next_to_nothing_leave_finite_scales(device: torch.device, weight: float) -> None:
    with make_trainer("graph", device) as trainer:
        assert trainer.state is not None
        run(trainer, token_batches(3))
        before = trainer.state.scale("head.grad_output").clone()
        for step in range(NUM_STEPS):
            trainer.step(token_batch(step, weight=weight))
        assert bool(trainer.state.scales.scale.isfinite().all())
        assert (weight < 1e-40) == torch.equal(trainer.state.scale("head.grad_output"), before)


def test_a_history_of_one_row_is_captured(device: torch.device) -> None:
    def trajectory(mode: str) -> list[dict[str, Tensor]]:
        torch.manual_seed(0)
        model = TokenModel().to(device)
        graphrt.convert_to_float8_training(model, recipe=graphrt.DelayedScaling(amax_history_len=1, amax_compute_algo="most_recent"))
        with make_trainer(mode, device, model=lambda: model, is_fp8=False) as trainer:
            return run(trainer, token_batches())

    assert_same_trajectory(trajectory("graph"), trajectory("eager"))


def test_a_module_that_a_later_step_does_not_use_keeps_its_scale_and_its_history(device: torch.device) -> None:
    """Mixed with captured steps: the eager step takes another path through the model."""

    class Branching(TokenModel):
        is_short = False

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embedding(tokens)
            for block in self.blocks[:1] if self.is_short else self.blocks:
                x = block(x)
            return self.head(x)

    with make_trainer("graph", device, model=Branching) as trainer:
        assert trainer.state is not None
        run(trainer, token_batches(4))
        slots = [slot for slot in trainer.state.slots if slot.startswith("blocks.1")]
        before = [(trainer.state.scale(slot).clone(), trainer.state.amax_history(slot).clone()) for slot in slots]
        with trainer.eager():
            trainer.model.is_short = True  # type: ignore[assignment]
            trainer.step(token_batch(4))
            trainer.model.is_short = False  # type: ignore[assignment]
        for slot, (scale, history) in zip(slots, before, strict=True):
            assert torch.equal(trainer.state.scale(slot), scale)
            assert torch.equal(trainer.state.amax_history(slot), history)
        trainer.step(token_batch(5))
        assert not torch.equal(trainer.state.amax_history(slots[0]), before[0][1])


def test_eval_forwards_between_steps_leave_amaxes_and_histories(device: torch.device) -> None:
    def peek(trainer: graphrt.Trainer, step: int) -> None:
        if step:
            tokens = token_batch(70 + step)["tokens"].to(device)
            trainer.model.eval()
            with torch.no_grad(), graphrt.fp8_autocast():
                trainer.model(tokens)
            trainer.model.train()
            if device.type == "cuda":
                torch.cuda.empty_cache()

    with make_trainer("eager", device) as trainer:
        expected = run(trainer, token_batches())
    with make_trainer("graph", device) as trainer:
        assert_same_trajectory(run(trainer, token_batches(), peek), expected)


def test_a_training_step_by_hand_between_captured_steps_is_flushed_before_the_next(device: torch.device) -> None:
    """Its backward update is pending when the next step comes, whose replay runs no Python that could flush."""

    def by_hand(trainer: graphrt.Trainer, step: int) -> None:
        if step == 4:
            with graphrt.fp8_autocast():
                loss = plain_loss(trainer.model, {name: value.to(device) for name, value in token_batch(80).items()})
            loss.backward()
            assert trainer.state is not None
            assert trainer.state.backward_update_requested

    assert_captured_equals_eager(device, before_step=by_hand)


def test_a_checkpoint_file_goes_on_bitwise_captured_eager_and_across(device: torch.device, tmp_path: Any) -> None:
    with make_trainer("eager", device, model={"dropout": 0.1}) as trainer:
        expected = run(trainer, token_batches(5))
    for saving in ("graph", "eager"):
        with make_trainer(saving, device, model={"dropout": 0.1}) as trainer:
            run(trainer, token_batches(3))
            torch.save(trainer.state_dict(), tmp_path / "three.pt")
        for loading in ("graph", "eager"):
            with make_trainer(loading, device, model={"dropout": 0.1}, seed=123) as trainer:
                trainer.load_state_dict(torch.load(tmp_path / "three.pt", weights_only=True))
                assert_same_trajectory(run(trainer, token_batches(5)[3:]), expected[3:])


# -- Python state: what a graph would freeze


class Counting(TokenModel):
    def __init__(self) -> None:
        super().__init__()
        self.n = 0
        self.register_buffer("ema", torch.zeros(VOCABULARY))

    def scaled(self, loss: Tensor) -> Tensor:
        self.n += 1
        return loss * (1.0 + 0.1 * self.n)

    def averaged(self, logits: Tensor) -> Tensor:
        self.ema = self.ema * 0.5 + logits.detach().mean((0, 1))
        return self.ema


def _counted(model: Any, batch: Any) -> Tensor:
    return model.scaled(plain_loss(model, batch))


def _rebound_buffer(model: Any, batch: Any) -> Tensor:
    return plain_loss(model, batch) + model.averaged(model(batch["tokens"])).sum()


def _from_random(model: Any, batch: Any) -> Tensor:
    return plain_loss(model, batch) * random.random()


def _from_numpy(model: Any, batch: Any) -> Tensor:
    return plain_loss(model, batch) * float(np.random.rand())


def _from_the_clock(model: Any, batch: Any) -> Tensor:
    return plain_loss(model, batch) * time.perf_counter()


def _alternating(model: Any, batch: Any) -> Tensor:
    model.n += 1
    loss = plain_loss(model, batch)
    return loss.exp() if model.n % 2 else loss.sin()


PYTHON_STATE = {
    "counter": (_counted, rf"aten::mul got .* in one step and .* in the next.*{HERE}, loss \* \(1\.0 \+ 0\.1 \* self\.n\)"),
    "buffer": (_rebound_buffer, rf"aten::mul reads argument 'self' at another address.*{HERE}, self\.ema \* 0\.5"),
    "random": (_from_random, rf"random\.random draws on the host.*{HERE}, random\.random\(\)"),
    "numpy": (_from_numpy, rf"numpy\.random\.rand draws on the host.*{HERE}"),
    "clock": (_from_the_clock, rf"aten::mul got .* in one step and .* in the next.*{HERE}"),
    "branch": (_alternating, rf"aten::(exp|sin) was issued.*{HERE}.* where the step before issued aten::(exp|sin)"),
}


@pytest.mark.parametrize(("loss_fn", "message"), PYTHON_STATE.values(), ids=PYTHON_STATE.keys())
def test_python_state_that_a_graph_would_freeze_is_refused_with_its_line(device: torch.device, loss_fn: Any, message: str) -> None:
    with make_trainer("graph", device, model=Counting, loss_fn=loss_fn, is_fp8=False) as trainer:
        with pytest.raises(graphrt.CaptureError, match=message):
            run(trainer, token_batches(4))
        with trainer.eager():
            assert bool(trainer.step(token_batch(4)).loss.isfinite())


FLAGS: dict[str, tuple[Callable[[graphrt.Trainer], Any], str]] = {
    "eval": (lambda trainer: trainer.model.eval(), "training is False"),
    "requires_grad_": (lambda trainer: trainer.model.get_submodule("head").requires_grad_(False), r"head\.weight\.requires_grad is False"),
    "add_param_group": (
        lambda trainer: trainer.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3, device=trainer.device))]}),
        "2 param groups",
    ),
    "betas": (lambda trainer: trainer.optimizer.param_groups[0].update(betas=(0.5, 0.5)), r"param_groups\[0\]\['betas'\]"),
}


@pytest.mark.parametrize(("change", "message"), FLAGS.values(), ids=FLAGS.keys())
def test_a_flag_or_a_hyper_parameter_changed_after_the_capture_is_refused_by_name(device: torch.device, change: Any, message: str) -> None:
    with make_trainer("graph", device, is_fp8=False) as trainer:
        run(trainer, token_batches(3))
        change(trainer)
        with pytest.raises(graphrt.CaptureError, match=message + r".*trainer\.recapture\(\)"):
            trainer.step(token_batch(3))


# -- inputs that do not fit


def _int32(batch: dict[str, Tensor]) -> Any:
    return {**batch, "tokens": batch["tokens"].int()}


def _without_labels(batch: dict[str, Tensor]) -> Any:
    return {name: value for name, value in batch.items() if name != "labels"}


MISFITS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "shorter": (lambda batch: {**batch, "tokens": batch["tokens"][:, :-1]}, r'batch\["tokens"\] has shape \[4, 15\], .* with \[4, 16\]'),
    "dtype": (_int32, r'batch\["tokens"\] has dtype torch\.int32, .* with torch\.int64'),
    "missing": (_without_labels, r'batch\["labels"\] is missing'),
    "new": (lambda batch: {**batch, "mask": batch["tokens"]}, r'batch\["mask"\] is new'),
    "number": (lambda batch: {**batch, "temperature": 0.5}, r'batch\["temperature"\] is 0\.5, .* with 1\.0'),
    "kind": (lambda batch: {**batch, "weight": 1.0}, r'batch\["weight"\] is of type float, .* with type Tensor'),
    "structure": (lambda batch: [batch], r"batch"),
    "array": (
        lambda batch: {**batch, "tokens": batch["tokens"].numpy()},
        r'batch\["tokens"\] is of type ndarray, expected a tensor or a constant',
    ),
}


@pytest.mark.parametrize(("change", "message"), MISFITS.values(), ids=MISFITS.keys())
@pytest.mark.parametrize("num_steps", [1, 3], ids=["warmup", "replay"])
def test_a_batch_that_does_not_fit_is_refused_with_expected_and_got(
    device: torch.device, change: Any, message: str, num_steps: int
) -> None:
    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return plain_loss(model, batch) / batch["temperature"]

    batches = [{**batch, "temperature": 1.0} for batch in token_batches()]
    with make_trainer("graph", device, is_fp8=False, loss_fn=loss_fn) as trainer:
        run(trainer, batches[:num_steps])
        before = values(trainer)
        with pytest.raises(graphrt.StaticInputError, match=message):
            trainer.step(change(batches[num_steps]))
        assert_same_values(values(trainer), before)
        trainer.step(batches[num_steps])


# -- host reads, and whatever else a graph cannot hold


def _item(model: Any, batch: Any) -> Tensor:
    loss = plain_loss(model, batch)
    if loss.item() > 9:
        loss = loss * 2
    return loss


def _boolean(model: Any, batch: Any) -> Tensor:
    loss = plain_loss(model, batch)
    return loss * 2 if bool(loss > 9) else loss


def _implicit_boolean(model: Any, batch: Any) -> Tensor:
    loss = plain_loss(model, batch)
    return loss * 2 if loss > 9 else loss


def _mask(model: Any, batch: Any) -> Tensor:
    logits = model(batch["tokens"])
    keep = batch["labels"] > 3
    return F.cross_entropy(logits[keep], batch["labels"][keep])


def _nonzero(model: Any, batch: Any) -> Tensor:
    logits = model(batch["tokens"]).flatten(0, 1)
    keep = (batch["labels"].flatten() > 3).nonzero().squeeze(1)
    return F.cross_entropy(logits[keep], batch["labels"].flatten()[keep])


def _tolist(model: Any, batch: Any) -> Tensor:
    loss = plain_loss(model, batch)
    loss.detach().reshape(1).tolist()
    return loss


def _numpy(model: Any, batch: Any) -> Tensor:
    loss = plain_loss(model, batch)
    loss.detach().cpu().numpy()
    return loss


def _formatted(model: Any, batch: Any) -> Tensor:
    loss = plain_loss(model, batch)
    f"{loss.detach()}"
    return loss


def _constant(model: Any, batch: Any) -> Tensor:
    weights = torch.tensor([1.0, 2.0]).to(batch["tokens"].device)
    return plain_loss(model, batch) * weights.sum()


def _python_indices(model: Any, batch: Any) -> Tensor:
    return plain_loss(model, batch) + model(batch["tokens"])[[0, 1]].mean()


def _seeded(model: Any, batch: Any) -> Tensor:
    torch.manual_seed(3)
    return plain_loss(model, batch) + F.dropout(model(batch["tokens"]), 0.5).mean()


def _in_backward(model: Any, batch: Any) -> Tensor:
    logits = model(batch["tokens"])
    logits.register_hook(lambda grad: grad * 2 if grad.abs().max().item() > 1e9 else grad)
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def _in_recompute(model: Any, batch: Any) -> Tensor:
    def branch(x: Tensor) -> Tensor:
        return x * 2 if x.sum().item() > 1e9 else x.sin() * x

    logits = graphrt.checkpoint(branch, model(batch["tokens"]))
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


HAZARDS = {
    "item": (_item, r"reads a device value on the host.*loss\.item\(\)"),
    "bool": (_boolean, r"reads a device value on the host.*bool\(loss > 9\)"),
    "if": (_implicit_boolean, r"reads a device value on the host to branch on it"),
    "mask": (_mask, r"boolean mask.*logits\[keep\]"),
    "nonzero": (_nonzero, r"output whose shape depends on values.*nonzero\(\)"),
    "tolist": (_tolist, r"Tensor\.tolist reads a device value on the host.*tolist\(\)"),
    "numpy": (_numpy, r"Tensor\.(cpu|numpy) (copies|reads).*loss\.detach\(\)\.cpu\(\)"),
    "format": (_formatted, r"reads a (tensor|device value) on the host"),
    "constant": (_constant, r"(copy from the host|copies between devices).*torch\.tensor\(\[1\.0, 2\.0\]\)"),
    "list index": (_python_indices, r"(copy from the host|copies between devices|host)"),
    "manual_seed": (_seeded, r"torch\.manual_seed seeds the generator inside the step"),
    "backward hook": (_in_backward, r"reads a device value on the host.*\.item\(\)"),
    "recompute": (_in_recompute, r"reads a device value on the host.*x\.sum\(\)\.item\(\)"),
}


@pytest.mark.parametrize(("loss_fn", "message"), HAZARDS.values(), ids=HAZARDS.keys())
def test_what_a_graph_cannot_hold_is_refused_with_the_line_and_leaves_the_process_as_it_was(
    device: torch.device, loss_fn: Any, message: str
) -> None:
    batches = token_batches(4)
    with make_trainer("eager", device, loss_fn=loss_fn, model={"dropout": 0.1}) as trainer:
        fresh = run(trainer, batches)
    with make_trainer("graph", device, loss_fn=loss_fn, model={"dropout": 0.1}) as trainer:
        actual = []
        with pytest.raises(graphrt.CaptureError, match=message) as caught:  # noqa: PT012
            for batch in batches:
                before, process = values(trainer), _process(device)
                actual.append(step_values(trainer, batch))
        assert re.search(HERE, str(caught.value))
        assert_same_values(values(trainer), before)
        assert _process(device) == process
        # The very step that was refused, and those after it, run eagerly as if nothing had happened.
        with trainer.eager():
            actual += run(trainer, batches[len(actual) :])
    assert_same_trajectory(actual, fresh)


def _process(device: torch.device) -> tuple[Any, ...]:
    """What a failed capture could leave behind in the process, beyond tensors."""
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
    functions = (Tensor.numpy, Tensor.tolist, torch.save, random.random, np.random.rand, torch.random.default_generator)
    queries = (torch.cuda.is_current_stream_capturing, torch.amp.GradScaler.scale, torch.cuda.get_rng_state, torch.cuda.set_rng_state)
    flags = (gc.isenabled(), torch.is_grad_enabled(), torch.is_autocast_enabled(device.type), torch.compiler.is_compiling())
    modes = torch.utils._python_dispatch._len_torch_dispatch_stack()  # type: ignore[attr-defined]
    return (stream, functions, queries, flags, modes, random.getstate(), np.random.get_state()[1].tobytes(), threading.active_count())


def test_indexing_by_a_mask_is_allowed_where_torch_fills_and_where_shapes_stay(device: torch.device) -> None:
    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        logits = model(batch["tokens"])
        weights = torch.ones_like(logits)
        weights[batch["labels"] > 3] = 0.5
        return (logits * weights).square().mean() * torch.where(batch["weight"] > 1, 2.0, 1.0)

    assert_captured_equals_eager(device, loss_fn=loss_fn)


# -- exceptions


class _UsersError(Exception):
    pass


def _raise_once(counter: dict[str, int], x: Tensor) -> Tensor:
    counter["left"] -= 1
    if counter["left"] == 0:
        raise _UsersError
    return x.sin() * x


PLACES: dict[str, Callable[[nn.Module, Any, Callable[[Tensor], Tensor]], Tensor]] = {
    "forward": lambda model, batch, fail: fail(model(batch["tokens"])),
    "checkpointed forward": lambda model, batch, fail: graphrt.checkpoint(lambda x: fail(x) * 1.0, model(batch["tokens"])),
    "reentrant forward": lambda model, batch, fail: graphrt.checkpoint(lambda x: fail(x) * 1.0, model(batch["tokens"]), use_reentrant=True),
    "region inside": lambda model, batch, fail: _inside_region(model, batch, fail),
}


def _inside_region(model: nn.Module, batch: Any, fail: Callable[[Tensor], Tensor]) -> Tensor:
    with graphrt.fp8_autocast():
        return fail(model(batch["tokens"]))


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("at", [2, 3, 4], ids=["warmup", "observed warmup", "capture"])
def test_an_exception_of_the_users_leaves_the_next_step_right(device: torch.device, place: str, at: int) -> None:
    """Calibration is the first call, then one a step; a checkpoint's recompute counts as well."""
    counter = {"left": -1}

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        logits = PLACES[place](model, batch, lambda x: _raise_once(counter, x))
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    batches = token_batches()
    with make_trainer("eager", device, loss_fn=loss_fn) as trainer:
        expected = run(trainer, batches)
    with make_trainer("graph", device, loss_fn=loss_fn) as trainer:
        actual = run(trainer, batches[: at - 2])
        counter["left"] = 2 if at == 2 and "checkpointed" not in place and "reentrant" not in place else 1
        before = values(trainer)
        with pytest.raises(_UsersError if device.type == "cpu" else (_UsersError, graphrt.CaptureError)):
            trainer.step(batches[at - 2])
        counter["left"] = -1
        assert_same_values(values(trainer), before)
        actual += run(trainer, batches[at - 2 :])
    assert_same_trajectory(actual, expected)


# -- a capture by the user's own hand


def test_a_region_under_the_users_own_capture_flushes_nothing_and_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    flush_all()
    torch.manual_seed(0)
    model = graphrt.convert_to_float8_training(TokenModel())
    state = graphrt.quantization_state(model)
    with graphrt.fp8_autocast():
        loss = plain_loss(model, token_batch(0))
    loss.backward()
    monkeypatch.setattr(guards, "_is_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.warns(UserWarning, match=r"state\.reduce_and_update_quantization_state\(forward=False\)"), graphrt.fp8_autocast():
        loss = plain_loss(model, token_batch(1))
    loss.backward()
    assert (state.forward_updates, state.backward_updates) == (2, 0)
    state.reduce_and_update_quantization_state(forward=False)
    assert (state.backward_updates, state.backward_update_requested) == (1, False)
    with pytest.raises(graphrt.GraphrtError, match="step was called under a CUDA graph capture"):
        graphrt.Trainer(model, adamw(model.parameters()), plain_loss, mode="eager").step(token_batch(0))


@pytest.mark.gpu
def test_a_region_under_the_users_own_cuda_graph_flushes_nothing_and_says_how() -> None:
    flush_all()
    torch.manual_seed(0)
    model = graphrt.convert_to_float8_training(TokenModel().cuda())
    state = graphrt.quantization_state(model)
    batch = {name: value.cuda() for name, value in token_batch(0).items()}
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            with graphrt.fp8_autocast():
                loss = plain_loss(model, batch)
            loss.backward()
    torch.cuda.current_stream().wait_stream(side)
    before = state.backward_updates
    graph = torch.cuda.CUDAGraph()
    with warnings.catch_warnings(record=True) as caught, torch.cuda.graph(graph):
        warnings.simplefilter("always")
        with graphrt.fp8_autocast():
            loss = plain_loss(model, batch)
        loss.backward()
        state.reduce_and_update_quantization_state(forward=False)
    assert any("reduce_and_update_quantization_state(forward=False)" in str(warning.message) for warning in caught)
    assert state.backward_updates == before + 1
    assert not state.backward_update_requested


# -- rounds: nothing accumulates


def _memory(device: torch.device) -> int:
    """Reserved bytes on CUDA, living tensors on the CPU."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(device)
    return sum(type(thing) in (Tensor, nn.Parameter) for thing in gc.get_objects())


def _square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def _small_trainer(device: torch.device, loss_fn: Any = _square) -> graphrt.Trainer:
    return make_trainer("graph", device, model=lambda: nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.1)), loss_fn=loss_fn)


def _run_small(trainer: graphrt.Trainer) -> None:
    for step in range(4):
        trainer.step(torch.full((16, 16), 1.0 + step))


@pytest.mark.slow
def test_twenty_captures_and_closes_leave_memory_flat(device: torch.device) -> None:
    sizes = []
    for _ in range(20):
        with _small_trainer(device) as trainer:
            _run_small(trainer)
        del trainer
        sizes.append(_memory(device))
    assert len(set(sizes[2:])) == 1, sizes


@pytest.mark.slow
def test_twenty_recaptures_of_one_trainer_leave_memory_flat(device: torch.device) -> None:
    with _small_trainer(device) as trainer:
        sizes = []
        for _ in range(20):
            _run_small(trainer)
            sizes.append(_memory(device))
            trainer.recapture()
    assert len(set(sizes[2:])) == 1, sizes


@pytest.mark.slow
def test_twenty_failed_captures_leave_memory_flat(device: torch.device) -> None:
    is_broken = [True]

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        loss = _square(model, x)
        return loss if not is_broken[0] or loss.item() < 9 else loss * 2

    x = torch.ones(16, 16)
    with _small_trainer(device, loss_fn) as trainer:
        trainer.step(x)
        sizes = []
        for _ in range(20):
            with pytest.raises(graphrt.CaptureError):
                trainer.step(x)
            sizes.append(_memory(device))
        assert len(set(sizes[2:])) == 1, sizes
        is_broken[0] = False
        _run_small(trainer)
        assert trainer.report().capture.num_graphs == 1  # type: ignore[union-attr]


def test_a_closed_trainer_that_is_dropped_frees_its_model(device: torch.device) -> None:
    with make_trainer("graph", device) as trainer:
        run(trainer, token_batches(4))
    model = weakref.ref(trainer.model)
    del trainer
    gc.collect()
    assert model() is None
