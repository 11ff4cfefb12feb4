"""Models, loaders and compilers of other people inside the captured step."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from stepping import (
    NUM_STEPS,
    TokenModel,
    assert_captured_equals_eager,
    assert_same_trajectory,
    deterministic,
    make_trainer,
    run,
    step_values,
    token_batch,
    token_batches,
    token_loss,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import graphrt
from graphrt.guards import is_capturing

try:
    import transformers
except ImportError:
    transformers = None

needs_transformers = pytest.mark.skipif(transformers is None, reason="transformers is not installed (the extra hf)")


@pytest.fixture(autouse=True)
def _bitwise() -> Iterator[None]:
    with deterministic():
        yield


# -- transformers

_SIZES = {"vocab_size": 64, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_WIDTHS = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}


def _llama(**options: Any) -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_SIZES, **_WIDTHS, **options))  # type: ignore[union-attr]


def _qwen2(**options: Any) -> nn.Module:
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**_SIZES, **_WIDTHS, **options))  # type: ignore[union-attr]


def _gpt2(**options: Any) -> nn.Module:
    config = transformers.GPT2Config(**_SIZES, n_embd=32, n_layer=2, n_head=2, loss_type="ForCausalLM", **options)  # type: ignore[union-attr]
    return transformers.GPT2LMHeadModel(config)  # type: ignore[union-attr]


FAMILIES: dict[str, Callable[..., nn.Module]] = {"llama": _llama, "gpt2": _gpt2, "qwen2": _qwen2}
every_family = pytest.mark.parametrize("make", FAMILIES.values(), ids=FAMILIES.keys())


def _loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch, use_cache=False).loss


def _text(step: int, mask: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(3, 64, (4, 16), generator=generator)
    attention_mask = torch.ones_like(ids)
    if mask == "padded":
        for row in range(4):
            attention_mask[row, 16 - (row + step) % 5 :] = 0
    labels = ids.masked_fill(attention_mask == 0, -100)
    return {"input_ids": ids.masked_fill(attention_mask == 0, 0), "attention_mask": attention_mask, "labels": labels}


def _texts(mask: str, num_steps: int = NUM_STEPS) -> list[dict[str, Tensor]]:
    return [_text(step, mask) for step in range(num_steps)]


def _trajectories(device: torch.device, make: Callable[[], nn.Module], batches: list[Any], loss_fn: Any = _loss, **options: Any) -> Any:
    with make_trainer("eager", device, model=lambda: make().train(), loss_fn=loss_fn, **options) as trainer:
        expected = run(trainer, batches)
    with make_trainer("graph", device, model=lambda: make().train(), loss_fn=loss_fn, **options) as trainer:
        actual = run(trainer, batches)
        assert trainer.report().capture.num_graphs == 1  # type: ignore[union-attr]
    assert len({float(values["loss"]) for values in expected}) == len(batches)
    return actual, expected


@pytest.mark.slow
@needs_transformers
@every_family
@pytest.mark.parametrize("mask", ["all ones", "padded"])
def test_a_transformers_model_trains_captured_as_it_does_eagerly(device: torch.device, make: Callable[..., nn.Module], mask: str) -> None:
    actual, expected = _trajectories(device, make, _texts(mask))
    assert_same_trajectory(actual, expected)


@needs_transformers
@pytest.mark.slow
@every_family
def test_padded_and_full_batches_share_one_graph_of_a_transformers_model(device: torch.device, make: Callable[..., nn.Module]) -> None:
    batches = [_text(step, "padded" if step % 2 else "all ones") for step in range(NUM_STEPS)]
    actual, expected = _trajectories(device, make, batches)
    assert_same_trajectory(actual, expected)


@needs_transformers
@pytest.mark.slow
@every_family
def test_a_transformers_model_trains_under_autocast_with_microbatches_and_its_own_checkpointing(
    device: torch.device, make: Callable[..., nn.Module]
) -> None:
    def autocast_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            return _loss(model, batch)

    def checkpointed() -> nn.Module:
        model: Any = make()
        # Renamed in transformers 5.
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
        return model

    actual, expected = _trajectories(device, checkpointed, _texts("padded"), autocast_loss, grad_accum_steps=2)
    assert_same_trajectory(actual, expected)


@needs_transformers
def test_the_loss_of_a_transformers_model_is_the_one_it_has_without_graphrt() -> None:
    """The captured answer makes transformers keep a mask it would drop: another kernel, the same loss."""
    batch = _text(0, "all ones")
    torch.manual_seed(0)
    plain = float(_loss(_llama().train(), batch).detach())
    with make_trainer("graph", model=lambda: _llama().train(), loss_fn=_loss, is_fp8=False) as trainer:
        assert float(trainer.step(batch).loss) == pytest.approx(plain, rel=1e-5)
        assert float(trainer.evaluate(batch)) != plain  # a step was taken meanwhile


@needs_transformers
def test_of_gpt2_only_the_head_is_converted_and_its_conv1d_layers_are_named() -> None:
    model = graphrt.convert_to_float8_training(_gpt2())
    report = graphrt.conversion_report(model)
    assert report.converted == ("lm_head",)
    assert any("Conv1D" in reason for _, reason in report.skipped)


@needs_transformers
@pytest.mark.slow
def test_what_a_tokenizer_returns_is_a_batch(device: torch.device) -> None:
    batches = [transformers.BatchEncoding(_text(step, "padded")) for step in range(NUM_STEPS)]  # type: ignore[union-attr]
    with make_trainer("graph", device, model=lambda: _llama().train(), loss_fn=_loss) as trainer:
        actual = run(trainer, batches)
    with make_trainer("graph", device, model=lambda: _llama().train(), loss_fn=_loss) as trainer:
        assert_same_trajectory(actual, run(trainer, _texts("padded")))


# -- libraries that ask whether a capture is under way


class Asking(TokenModel):
    """Computes something else while capturing, as libraries do; keeps the answers, and what graphrt's guard says."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.answers: list[bool] = []
        self.guards: list[bool] = []

    def forward(self, tokens: Tensor) -> Tensor:
        self.answers.append(torch.cuda.is_current_stream_capturing())
        self.guards.append(is_capturing())
        if self.answers[-1]:
            return super().forward(tokens) * 0.5
        # What transformers does with a mask that masks nothing: a host read, and another program.
        return super().forward(tokens) if bool((tokens >= 0).all()) else super().forward(tokens) * 0.0


@pytest.mark.parametrize("kind", ["plain", "checkpointed"])
def test_eager_warmup_recorded_and_captured_steps_take_the_branch_of_a_capture(device: torch.device, kind: str) -> None:
    def loss_fn(model: nn.Module, batch: Any) -> Any:
        if kind == "plain":
            return token_loss(model, batch)
        logits = graphrt.checkpoint(model, batch["tokens"])
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()) * batch["weight"]

    with make_trainer("eager", device, model=Asking, loss_fn=loss_fn) as trainer:
        expected = run(trainer, token_batches())
        assert isinstance(trainer.model, Asking)
        assert all(trainer.model.answers)
        assert not any(trainer.model.guards)
    with make_trainer("graph", device, model=Asking, loss_fn=loss_fn) as trainer:
        actual = run(trainer, token_batches())
        assert isinstance(trainer.model, Asking)
        assert all(trainer.model.answers)
        # On CUDA the driver says yes in the captured step alone; on the recorder nothing is ever captured.
        per_step = 2 if kind == "checkpointed" else 1
        assert sum(trainer.model.guards) == (per_step if device.type == "cuda" else 0)
        trainer.evaluate(token_batch(0))
        assert trainer.model.answers[-1]
    assert_same_trajectory(actual, expected)


def test_outside_a_step_the_answer_is_the_truth(device: torch.device) -> None:
    asked: list[Any] = [torch.cuda.is_current_stream_capturing]
    with make_trainer("graph", device, model=Asking) as trainer:
        run(trainer, token_batches(4))
        assert torch.cuda.is_current_stream_capturing is asked[0]
        assert not is_capturing()


# -- loaders


class _Tokens(Dataset):
    def __len__(self) -> int:
        return 4 * NUM_STEPS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        batch = token_batch(100 + index, batch_size=1, weight=1.0)
        return {"tokens": batch["tokens"][0], "labels": batch["labels"][0]}


def _plain_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())


def test_a_loader_with_two_workers_feeds_the_step_while_it_is_captured(device: torch.device) -> None:
    expected_batches = list(DataLoader(_Tokens(), batch_size=4))
    with make_trainer("eager", device, loss_fn=_plain_loss) as trainer:
        expected = run(trainer, expected_batches)
    loader = DataLoader(_Tokens(), batch_size=4, num_workers=2, pin_memory=device.type == "cuda", multiprocessing_context="fork")
    actual = []
    with make_trainer("graph", device, loss_fn=_plain_loss) as trainer:
        state = torch.get_rng_state()
        batches = iter(loader)  # draws its base seed
        torch.set_rng_state(state)
        for batch in batches:
            actual.append(step_values(trainer, batch))
    assert_same_trajectory(actual, expected)


# -- torch.compile


def _compiled() -> nn.Module:
    model = TokenModel()
    for block in model.blocks:
        block.compile(backend="aot_eager")
    return model


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo's own, under warnings as errors
def test_captured_steps_with_compiled_blocks_equal_eager_ones(device: torch.device) -> None:
    torch._dynamo.reset()
    with make_trainer("graph", device, model=_compiled) as trainer, trainer.eager():
        expected = run(trainer, token_batches())
    with make_trainer("graph", device, model=_compiled) as trainer:
        actual = run(trainer, token_batches())
        assert trainer.report().capture.num_graphs == 1  # type: ignore[union-attr]
    assert_same_trajectory(actual, expected)
    with make_trainer("eager", device, model=_compiled) as trainer:
        compiled = run(trainer, token_batches())
    losses, compiled_losses = ([float(values["loss"]) for values in one] for one in (actual, compiled))
    assert losses == pytest.approx(compiled_losses, rel=1e-3)


def test_a_compiled_loss_function_is_captured(device: torch.device) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(F.gelu, backend="aot_eager")

    def loss_fn(model: nn.Module, batch: Any) -> Any:
        loss, metrics = token_loss(model, batch)
        return compiled(loss), metrics

    with make_trainer("graph", device, loss_fn=loss_fn) as trainer:
        losses = [float(values["loss"]) for values in run(trainer, token_batches())]
    with make_trainer("graph", device) as trainer:
        plain = [F.gelu(values["loss"]) for values in run(trainer, token_batches(1))]
    assert losses[0] == pytest.approx(float(plain[0]), rel=1e-5)
    assert len(set(losses)) == NUM_STEPS


@pytest.mark.gpu
@pytest.mark.slow
def test_blocks_compiled_by_inductor_in_the_warmup_are_captured() -> None:
    torch._dynamo.reset()

    def compiled() -> nn.Module:
        model = TokenModel()
        for block in model.blocks:
            block.compile()
        return model

    assert_captured_equals_eager("cuda", model=compiled)


@pytest.mark.gpu
def test_compiling_during_the_capture_is_refused() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: x.sin() * 2.0)
    calls = {"num": 0}

    def loss_fn(model: nn.Module, batch: Any) -> Any:
        calls["num"] += 1
        loss, metrics = token_loss(model, batch)
        return (compiled(loss) if calls["num"] >= 3 else loss.sin() * 2.0), metrics

    # Marked as torch.compile marks what it wraps: steps with compiled parts are not watched, for that would run them plain.
    loss_fn._torchdynamo_orig_callable = loss_fn
    with make_trainer("graph", "cuda", loss_fn=loss_fn, is_fp8=False) as trainer:
        run(trainer, token_batches(2))
        with pytest.raises(graphrt.CaptureError):
            trainer.step(token_batch(2))
        with trainer.eager():
            trainer.step(token_batch(2))
