"""check_parity: both paths from one snapshot; what differs is named, and everything is put back."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from stepping import HISTORY, TokenModel, assert_same_trajectory, assert_same_values, make_trainer, run, token_batch, token_batches, values
from torch import Tensor, nn

import graphrt
from graphrt.capture.recorder import Recording

BATCHES = token_batches(HISTORY + 2)


@pytest.mark.parametrize(
    ("mode", "num_before"),
    [("eager", 0), ("graph", 4), *(pytest.param(*case, marks=pytest.mark.slow) for case in (("eager", 4), ("graph", 0), ("graph", 1)))],
)
def test_parity_holds_and_the_run_goes_on_as_if_nothing_had_been(device: torch.device, mode: str, num_before: int) -> None:
    with make_trainer(mode, device, model={"dropout": 0.3}) as trainer:
        expected = run(trainer, token_batches(7))
    with make_trainer(mode, device, model={"dropout": 0.3}) as trainer:
        actual = run(trainer, token_batches(7)[:num_before])
        before = values(trainer)
        report = graphrt.check_parity(trainer, BATCHES)
        assert_same_values(values(trainer), before)
        actual += run(trainer, token_batches(7)[num_before:])
    assert report
    assert report.is_equal
    assert report.is_within_tolerance
    assert report.num_steps == len(BATCHES)
    assert report.num_values > 1000
    assert "bitwise equal" in str(report)
    report.raise_if_different()
    assert_same_trajectory(actual, expected)


@pytest.mark.parametrize("options", [{"grad_accum_steps": 2}, {"optimizer": lambda p: torch.optim.Adagrad(p)}, {"is_fp8": False}])
def test_parity_holds_for_other_trainers(options: dict[str, Any]) -> None:
    with make_trainer("graph", model={"dropout": 0.3, "is_tied": True}, **options) as trainer:
        before = values(trainer)
        graphrt.check_parity(trainer, BATCHES).raise_if_different()
        assert_same_values(values(trainer), before)


def test_parity_of_an_eager_trainer_with_compiled_blocks_compares_one_program() -> None:
    torch._dynamo.reset()

    def compiled() -> nn.Module:
        model = TokenModel()
        for block in model.blocks:
            block.compile(backend="aot_eager")
        return model

    with make_trainer("eager", model=compiled) as trainer:
        assert graphrt.check_parity(trainer, BATCHES[:2])


@contextmanager
def _after_replays(monkeypatch: pytest.MonkeyPatch, change: Any) -> Iterator[None]:
    """Replays that leave something else behind than the step they repeat."""
    replay = Recording.replay
    num = [0]

    def changed(self: Recording) -> None:
        replay(self)
        num[0] += 1
        change(num[0])

    with monkeypatch.context() as patch:
        patch.setattr(Recording, "replay", changed)
        yield


def _last_bit(x: Tensor) -> None:
    x.view(torch.int32).add_(1)


def _bump_scale(trainer: graphrt.Trainer) -> None:
    assert trainer.state is not None
    _last_bit(trainer.state._scale[3])


def _bump_history(trainer: graphrt.Trainer) -> None:
    assert trainer.state is not None
    _last_bit(trainer.state._amax_history[1, 2])


def _bump_parameter(trainer: graphrt.Trainer) -> None:
    _last_bit(trainer.model.get_parameter("blocks.0.norm.bias").data[:1])


def _bump_momentum(trainer: graphrt.Trainer) -> None:
    _last_bit(trainer.optimizer.state[trainer.model.get_parameter("head.weight")]["exp_avg"][0])


def _draw(_trainer: graphrt.Trainer) -> None:
    torch.rand(1)


CHANGES: dict[str, tuple[Any, str, bool | None]] = {
    "scale": (_bump_scale, "scale of blocks.0.down.weight", True),
    "history": (_bump_history, "amax_history of blocks.0.down.input", None),
    "parameter": (_bump_parameter, "checksum of blocks.0.norm.bias", None),
    "momentum": (_bump_momentum, "checksum of optimizer state exp_avg of head.weight", None),
    "RNG": (_draw, "RNG state", None),
}


@pytest.mark.parametrize(("change", "name", "agreed"), CHANGES.values(), ids=CHANGES.keys())
def test_one_bit_that_a_replay_leaves_otherwise_is_found_and_named(
    monkeypatch: pytest.MonkeyPatch, change: Any, name: str, agreed: bool | None
) -> None:
    with make_trainer("graph") as trainer:
        run(trainer, token_batches(2))
        before = values(trainer)
        # The capturing call records for real, so the first replay is step 0 of the comparison.
        with _after_replays(monkeypatch, lambda num: change(trainer) if num == 3 else None):
            report = graphrt.check_parity(trainer, BATCHES)
        assert_same_values(values(trainer), before)
    assert not report
    assert report.difference is not None
    assert (report.difference.step, report.difference.name) == (2, name)
    assert report.difference.amaxes_agreed is agreed
    assert report.difference.eager != report.difference.captured
    assert name in str(report)
    with pytest.raises(graphrt.ParityError, match="The captured step differs from the eager one"):
        report.raise_if_different()


def test_losses_far_from_eagers_fail_the_second_comparison() -> None:
    report = graphrt.ParityReport(num_steps=3, num_values=10, difference=None, max_loss_difference=0.5)
    assert report.is_equal
    assert not report
    assert "TOO FAR" in str(report)


def test_a_loss_that_is_nan_on_one_path_only_fails_the_second_comparison() -> None:
    from graphrt.parity import _max_loss_difference

    one, nan = {"loss": torch.tensor(1.0)}, {"loss": torch.tensor(float("nan"))}
    for pair in ((one, nan), (nan, one)):
        assert not graphrt.ParityReport(1, 1, None, _max_loss_difference([pair[0]], [pair[1]])).is_within_tolerance
    assert graphrt.ParityReport(1, 1, None, _max_loss_difference([nan], [nan])).is_within_tolerance


def test_a_step_that_cannot_be_captured_is_refused_and_put_back() -> None:
    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        loss = F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())
        return loss * 2 if loss.item() > 9 else loss

    with make_trainer("eager", loss_fn=loss_fn) as trainer:
        run(trainer, token_batches(2))
        before = values(trainer)
        with pytest.raises(graphrt.CaptureError, match=r"test_parity\.py"):
            graphrt.check_parity(trainer, BATCHES)
        assert_same_values(values(trainer), before)


def test_bad_arguments_are_refused() -> None:
    with make_trainer("eager") as trainer:
        with pytest.raises(ValueError, match="got no batches"):
            graphrt.check_parity(trainer, [])
        with graphrt.fp8_autocast(), pytest.raises(graphrt.GraphrtError, match="check_parity was called inside an fp8_autocast region"):
            graphrt.check_parity(trainer, BATCHES)
        before = values(trainer)
        with pytest.raises(graphrt.StaticInputError, match=r"has shape \[2, 16\], but the step was captured with \[4, 16\]"):
            graphrt.check_parity(trainer, [token_batch(0), token_batch(1, batch_size=2)])
        assert_same_values(values(trainer), before)


def test_determinism_is_put_back_as_it_was() -> None:
    with make_trainer("eager") as trainer:
        for was in (False, True):
            torch.use_deterministic_algorithms(was, warn_only=was)
            try:
                graphrt.check_parity(trainer, BATCHES[:2])
                assert torch.are_deterministic_algorithms_enabled() == was
                assert torch.is_deterministic_algorithms_warn_only_enabled() == was
            finally:
                torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
def test_the_missing_environment_is_named_with_the_line_to_add(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    with make_trainer("eager", "cuda") as trainer, pytest.raises(graphrt.ParityError, match="export CUBLAS_WORKSPACE_CONFIG=:4096:8"):
        graphrt.check_parity(trainer, BATCHES)
