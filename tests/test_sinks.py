"""Gradients written straight into ``.grad`` equal autograd's, whoever else contributes, in whatever order."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from stepping import TokenModel, make_trainer, run, token_batches
from torch import Tensor, nn
from training import assert_same_trajectory, same_bits

import graphrt
from graphrt import nn as fused
from graphrt.sinks import GradientSinks, deliver

WIDTH, CLASSES, TOKENS = 32, 48, 16


class Model(nn.Module):
    """An embedding and a head, two parameters that may be one."""

    def __init__(self, is_tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)
        if is_tied:
            self.head.weight = self.embedding.weight

    def project(self, x: Tensor) -> Tensor:
        return fused.linear(x, self.head)


# One backward each: a loss of the model and of two seeded tensors.
Loss = Callable[[Model, Tensor, Tensor], Tensor]


def through_linear(model: Model, x: Tensor, c: Tensor) -> Tensor:
    return (model.project(x) * c).sum()


def through_linear_twice(model: Model, x: Tensor, c: Tensor) -> Tensor:
    return (model.project(x) * c).sum() + model.project(2 * x).square().sum()


def through_autograd(model: Model, x: Tensor, c: Tensor) -> Tensor:
    return (model.head.weight * (c.t() @ x)).sum()


def through_both(model: Model, x: Tensor, c: Tensor) -> Tensor:
    return through_autograd(model, x, c.square()) + through_linear(model, x, c)


def through_both_swapped(model: Model, x: Tensor, c: Tensor) -> Tensor:
    return through_linear(model, x, c) + through_autograd(model, x, c.square())


def through_embedding_and_head(model: Model, x: Tensor, c: Tensor) -> Tensor:
    tokens = (x[:, 0].abs() * 20).long() % CLASSES
    return (model.project(model.embedding(tokens) + x) * c).sum()


def tokens_of(x: Tensor) -> Tensor:
    return (x.detach()[:, 0].abs() * 20).long() % CLASSES


def embed(model: Model, x: Tensor) -> Tensor:
    return fused.embedding(tokens_of(x), model.embedding)


def through_embedding(model: Model, x: Tensor, c: Tensor) -> Tensor:
    return (embed(model, x) * c[:, :WIDTH]).sum()


def through_fused_embedding_and_head(model: Model, x: Tensor, c: Tensor) -> Tensor:
    return (model.project(embed(model, x) + x) * c).sum()


def through_reentrant_checkpoint(model: Model, x: Tensor, c: Tensor) -> Tensor:
    return (graphrt.checkpoint(model.project, x, use_reentrant=True) * c).sum()


def through_nothing(model: Model, x: Tensor, c: Tensor) -> Tensor:
    return (x * c[:, :WIDTH]).sum()


#: The backwards of each step, one list a step; the last list is repeated.
PROGRAMS: dict[str, list[list[Loss]]] = {
    "linear only": [[through_linear]],
    "twice in one backward": [[through_linear_twice]],
    "two microbatches": [[through_linear, through_linear]],
    "autograd first": [[through_autograd, through_linear]],
    "autograd last": [[through_linear, through_autograd]],
    "autograd alone in some steps": [[through_linear], [through_autograd], [through_linear], [through_autograd, through_linear]],
    "both in one backward": [[through_both]],
    "both in one backward, swapped": [[through_both_swapped]],
    "unused in some steps": [[through_linear], [through_nothing], [through_linear], [through_nothing]],
    "unused at first": [[through_nothing], [through_linear]],
    "embedding and head": [[through_embedding_and_head]],
    "reentrant checkpoint": [[through_reentrant_checkpoint]],
    "reentrant checkpoint and autograd": [[through_reentrant_checkpoint, through_autograd]],
}
KINDS = ("plain", "fp8", "bf16")
every_program = pytest.mark.parametrize("program", PROGRAMS)
every_kind = pytest.mark.parametrize("kind", KINDS)


def make_model(kind: str, device: torch.device | str = "cpu", *, is_tied: bool = False) -> Model:
    torch.manual_seed(0)
    model = Model(is_tied).to(device, torch.bfloat16 if kind == "bf16" else None)
    if kind == "fp8":
        graphrt.convert_to_float8_training(model)
    return model


def make_tensors(seed: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors = (torch.randn(TOKENS, width, generator=generator).to(device, dtype) for width in (WIDTH, CLASSES))
    return tuple(tensors)  # pyright: ignore


def step(model: Model, losses: list[Loss], number: int) -> None:
    """The backwards of one step, in a region of their own."""
    weight = model.head.weight
    with graphrt.fp8_autocast():
        for i, loss in enumerate(losses):
            x, c = make_tensors(10 * number + i, weight.device, weight.dtype)
            loss(model, x.requires_grad_(), c).float().backward()


def zero(model: Model) -> None:
    for p in model.parameters():
        if p.grad is not None:
            p.grad.zero_()


def gradient(model: Model, name: str = "head") -> Tensor | None:
    grad = model.get_parameter(f"{name}.weight").grad  # of a tied weight the same one by either name
    return None if grad is None else grad.clone()


Between = Callable[[Model, int], Any]


def assert_equal_to_autograd(
    direct: Model,
    steps: list[list[Loss]],
    *,
    sinks: GradientSinks | None = None,
    between: Between = lambda model, number: None,
    name: str = "head",
) -> None:
    """Run the same steps with gradients written directly and through autograd; ``between`` is called on both before each step."""
    sinks, plain = sinks or GradientSinks(), copy.deepcopy(direct)
    for number in range(max(4, len(steps))):
        losses = steps[min(number, len(steps) - 1)]
        for model in (direct, plain):
            between(model, number)
        zero(plain)
        step(plain, losses, number)
        for p in direct.parameters():
            if p not in sinks and p.grad is not None:
                p.grad.zero_()
        with sinks.active():
            step(direct, losses, number)
        actual, expected = gradient(direct, name), gradient(plain, name)
        assert (actual is None) == (expected is None), number
        if actual is not None and expected is not None:
            assert same_bits(actual, expected), number
    assert GradientSinks._active is None


@every_program
@every_kind
def test_gradients_equal_autograds(program, kind, device):
    if kind == "plain" and device.type == "cuda":
        pytest.skip("the CUDA kernels take bf16")
    assert_equal_to_autograd(make_model(kind, device), PROGRAMS[program])


@pytest.mark.parametrize("kind", ["plain", "bf16"])
def test_a_tied_embedding_and_head_add_up(kind, device):
    if kind == "plain" and device.type == "cuda":
        pytest.skip("the CUDA kernels take bf16")
    model = make_model(kind, device, is_tied=True)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        assert_equal_to_autograd(model, [[through_embedding_and_head]])
    finally:
        torch.use_deterministic_algorithms(before)


#: Backwards through a tied table. The head's gradient comes before the embedding's, or after it, or in another microbatch.
TIED_PROGRAMS: dict[str, list[list[Loss]]] = {
    "embedding only": [[through_embedding]],
    "embedding twice": [[through_embedding, through_embedding]],
    "head first": [[through_fused_embedding_and_head]],
    "head in a microbatch before": [[through_linear, through_embedding]],
    "embedding in a microbatch before": [[through_embedding, through_linear]],
    "torch's embedding before": [[through_embedding_and_head, through_embedding]],
    "autograd before": [[through_autograd, through_embedding]],
    "embedding in some steps": [[through_embedding], [through_linear], [through_nothing], [through_embedding]],
}


@pytest.mark.parametrize("program", TIED_PROGRAMS)
@pytest.mark.parametrize("is_tied", [False, True])
def test_an_embedding_adds_up_with_whatever_else_its_table_does(program, is_tied):
    model = make_model("plain", is_tied=is_tied)
    assert_equal_to_autograd(model, TIED_PROGRAMS[program], name="embedding")


def test_two_microbatches_of_a_tied_table_add_up():
    """Autograd adds the two gradients of a backward to each other first, so the sums are the same but for their rounding."""
    model, plain = make_model("plain", is_tied=True), make_model("plain", is_tied=True)
    losses: list[Loss] = [through_fused_embedding_and_head, through_fused_embedding_and_head]
    sinks = GradientSinks()
    for number in range(3):
        zero(plain)
        step(plain, losses, number)
        with sinks.active():
            step(model, losses, number)
        actual, expected = gradient(model), gradient(plain)
        assert actual is not None
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_an_embedding_replaces_what_the_step_before_left():
    model, sinks = make_model("plain"), GradientSinks()
    with sinks.active():
        step(model, [through_embedding], 0)
    grad = model.embedding.weight.grad
    assert grad is not None
    grad.fill_(torch.nan)
    with sinks.active():
        step(model, [through_embedding, through_embedding], 1)
    assert model.embedding.weight.grad is grad
    expected = make_model("plain")
    step(expected, [through_embedding, through_embedding], 1)
    assert expected.embedding.weight.grad is not None
    assert same_bits(grad, expected.embedding.weight.grad)


@every_kind
def test_a_step_without_the_parameter_leaves_zeros(kind):
    model, sinks = make_model(kind), GradientSinks()
    for losses in ([through_linear], [through_nothing]):
        with sinks.active():
            step(model, losses, 1)
    grad = gradient(model)
    assert grad is not None
    assert not grad.any()


@every_program
def test_gradients_set_to_none_between_steps_come_again(program):
    def drop(model: Model, _number: int) -> None:
        model.head.weight.grad = None

    assert_equal_to_autograd(make_model("plain"), PROGRAMS[program], between=drop)


def test_the_tensor_stays_and_its_old_values_do_not_matter():
    model, sinks = make_model("fp8"), GradientSinks()
    with sinks.active():
        step(model, [through_linear], 0)
    grad = model.head.weight.grad
    assert grad is not None
    grad.fill_(torch.nan)
    with sinks.active():
        step(model, [through_linear, through_autograd], 1)
    assert model.head.weight.grad is grad
    assert grad.isfinite().all()


@pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout contract")
def test_a_gradient_in_another_layout_is_kept_in_it():
    def transpose(model: Model, number: int) -> None:
        if number == 2 and model.head.weight.grad is not None:
            model.head.weight.grad = model.head.weight.grad.t().contiguous().t()

    assert_equal_to_autograd(make_model("plain"), [[through_linear]], between=transpose)


def test_outside_a_step_autograd_accumulates():
    model, sinks = make_model("plain"), GradientSinks()
    with sinks.active():
        step(model, [through_linear], 0)
    first = gradient(model)
    step(model, [through_linear], 1)
    second = make_model("plain")
    step(second, [through_linear], 1)
    assert first is not None
    assert same_bits(gradient(model), first + gradient(second))  # pyright: ignore


def test_without_a_parameter_the_gradient_is_returned():
    weight = torch.zeros(2, 2)
    with GradientSinks().active():
        assert torch.equal(deliver(weight, lambda out: weight + 1 if out is None else out), weight + 1)  # pyright: ignore
        assert weight.grad is None


# ---- hooks of the user's


@contextmanager
def logged(parameter: nn.Parameter, how: str) -> Iterator[list[Tensor]]:
    seen: list[Tensor] = []
    if how == "tensor hook":
        handle = parameter.register_hook(lambda grad: seen.append(grad.detach().clone()))
    else:
        handle = parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    try:
        yield seen
    finally:
        handle.remove()


@pytest.mark.parametrize("how", ["tensor hook", "post-accumulate hook"])
@pytest.mark.parametrize("first", [0, 2], ids=["from the start", "after two steps"])
@every_program
def test_a_hook_on_the_parameter_sees_what_it_sees_without_sinks(program, first, how):
    """Installed for two steps, and taken off again."""
    steps = PROGRAMS[program]
    seen = []
    for is_direct in (True, False):
        model, sinks = make_model("plain"), GradientSinks()
        for number in range(5):
            if not is_direct or model.head.weight not in sinks:
                zero(model)
            is_hooked = first <= number < first + 2
            with logged(model.head.weight, how) if is_hooked else nullcontext([]) as log:
                with sinks.active() if is_direct else nullcontext():
                    step(model, steps[min(number, len(steps) - 1)], number)
                grad = gradient(model)
                seen.append((is_direct, [*log, torch.zeros(0) if grad is None else grad]))
    direct, plain = ([log for which, log in seen if which is wanted] for wanted in (True, False))
    for one, other in zip(direct, plain, strict=True):
        assert len(one) == len(other)
        assert all(same_bits(a, b) for a, b in zip(one, other, strict=True))


def test_a_hook_that_changes_the_gradient_is_obeyed():
    model = make_model("fp8")
    expected = copy.deepcopy(model)
    step(expected, [through_linear], 1)
    sinks = GradientSinks()
    with sinks.active():
        step(model, [through_linear], 0)
    handle = model.head.weight.register_hook(lambda grad: 2 * grad)
    model_state = graphrt.quantization_state(model)
    model_state.load_state_dict(graphrt.quantization_state(make_model("fp8")).state_dict())
    with sinks.active():
        step(model, [through_linear], 1)
    handle.remove()
    assert same_bits(gradient(model), 2 * gradient(expected))  # pyright: ignore


# ---- the end, planned or not


def test_close_takes_the_hooks_off():
    model, sinks = make_model("plain"), GradientSinks()
    with sinks.active():
        step(model, [through_linear], 0)
    assert model.head.weight in sinks
    assert len(model.head.weight._backward_hooks or ()) == 1
    sinks.close()
    assert model.head.weight not in sinks
    assert not model.head.weight._backward_hooks
    assert_equal_to_autograd(model, [[through_linear], [through_autograd]], sinks=GradientSinks())


def test_two_trainers_of_one_model_do_not_disturb_each_other():
    model, others = make_model("plain"), GradientSinks()
    with others.active():
        step(model, [through_linear], 0)
    # The other's hook is one more on the parameter: gradients go through autograd, and it has nothing to zero.
    assert_equal_to_autograd(model, [[through_linear], [through_autograd, through_linear]])
    others.close()


class Fail(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        raise ArithmeticError("on purpose")


def failing(model: Model, x: Tensor, c: Tensor) -> Tensor:
    return (model.project(Fail.apply(x)) * c).sum()


@pytest.mark.parametrize("next_step", [[through_linear], [through_autograd], [through_nothing]], ids=["linear", "autograd", "unused"])
@pytest.mark.parametrize("num_before", [0, 1])
def test_after_an_exception_in_the_backward_the_next_step_is_right(num_before, next_step):
    model, sinks = make_model("plain"), GradientSinks()
    for number in range(num_before):
        with sinks.active():
            step(model, [through_linear], number)
    with pytest.raises(ArithmeticError, match="on purpose"), sinks.active():
        step(model, [through_autograd, failing], 7)
    assert GradientSinks._active is None
    with sinks.active():
        step(model, next_step, 8)
    expected = make_model("plain")
    expected.head.weight.grad = torch.zeros_like(expected.head.weight)
    step(expected, next_step, 8)
    assert same_bits(gradient(model), expected.head.weight.grad)  # pyright: ignore


# ---- in a Trainer

TRAINERS: dict[str, dict[str, Any]] = {
    "tied": {"model": {"is_tied": True}},
    "unused layer": {"model": {"has_unused": True}},
    "two microbatches": {"grad_accum_steps": 2},
    "bf16": {"dtype": torch.bfloat16},
}


@pytest.mark.parametrize("options", TRAINERS.values(), ids=TRAINERS.keys())
def test_a_trainer_takes_the_steps_it_takes_without_sinks(options, monkeypatch):
    with make_trainer("eager", **options) as trainer:
        actual = run(trainer, token_batches())
        assert any(p in trainer._body.gradients.sinks for p in trainer.model.parameters())
    monkeypatch.setattr(GradientSinks, "sink", lambda self, parameter: None)
    with make_trainer("eager", **options) as trainer:
        expected = run(trainer, token_batches())
    assert_same_trajectory(actual, expected)


def test_a_closed_trainer_leaves_no_hooks():
    with make_trainer("eager") as trainer:
        trainer.step(token_batches()[0])
        model = trainer.model
        assert any(p._backward_hooks for p in model.parameters())
    assert isinstance(model, TokenModel)
    assert not any(p._backward_hooks for p in model.parameters())


# ---- gradients that are asked for, and not accumulated


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_the_input_alone_leave_the_parameters_alone(kind):
    model = make_model(kind)
    weight = model.head.weight
    x, c = make_tensors(0, weight.device, weight.dtype)
    with GradientSinks().active(), graphrt.fp8_autocast():
        [found] = torch.autograd.grad(through_linear(model, x.requires_grad_(), c), x)
    assert found.any()
    assert weight.grad is None


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_a_parameter_can_be_asked_for(kind):
    model = make_model(kind)
    weight = model.head.weight
    x, c = make_tensors(0, weight.device, weight.dtype)
    with GradientSinks().active(), graphrt.fp8_autocast():
        [found] = torch.autograd.grad(through_linear(model, x.requires_grad_(), c), weight)
    assert found.any()
    assert weight.grad is None
