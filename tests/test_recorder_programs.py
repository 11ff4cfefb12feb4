"""Replays of single operations and of random programs equal eager with new inputs."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from graphrt.capture.recorder import Recording, record


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Tensors this small are slower on several."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_dropout_draws_from_the_default_generator_at_replay() -> None:
    x = torch.ones(1000)
    recording, out = record(lambda: F.dropout(x, 0.5))
    torch.manual_seed(9)
    recording.replay()
    masks = [out.clone()]
    recording.replay()
    masks.append(out.clone())
    torch.manual_seed(9)
    assert torch.equal(masks[0], F.dropout(x, 0.5))
    assert torch.equal(masks[1], F.dropout(x, 0.5))
    assert not torch.equal(masks[0], masks[1])


def test_a_cloned_generator_state_is_followed() -> None:
    def body() -> tuple[Tensor, Tensor]:
        state = torch.get_rng_state().clone()
        first = torch.rand(4)
        torch.set_rng_state(state)
        return first, torch.rand(4)

    recording, (first, second) = record(body)
    seen = first.clone()
    recording.replay()
    assert torch.equal(first, second)
    assert not torch.equal(first, seen)
    assert [node.name for node in recording.nodes if node.name.startswith("graphrt")] == ["graphrt::rng_save", "graphrt::rng_restore"]


def test_gradients_made_by_the_step_are_written_at_replay() -> None:
    weight = nn.Parameter(torch.ones(3))
    x = torch.ones(3)

    def body() -> None:
        weight.grad = None
        (weight * x * x).sum().backward()

    recording, _ = record(body)
    x.fill_(3.0)
    recording.replay()
    assert weight.grad is not None
    assert weight.grad.tolist() == [9.0, 9.0, 9.0]


def test_double_backward() -> None:
    x = torch.ones(3, requires_grad=True)

    def body() -> Tensor:
        (grad,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(grad.square().sum(), x)
        return second

    recording, out = record(body)
    with torch.no_grad():
        x.fill_(2.0)
    recording.replay()
    assert torch.equal(out, body())


def check_replay(body: Callable[[Tensor], Any], x: Tensor, new: Tensor) -> Recording:
    """Record on one input, replay on another, compare with eager on a copy of it."""
    static, expected = x.clone(), body(new.clone())
    recording, outputs = record(lambda: body(static))
    for _ in range(2):
        static.copy_(new)
        recording.replay()
        for a, b in zip(outputs, expected, strict=True):
            assert torch.equal(a, b)
    return recording


def test_metadata_changed_after_an_operation_does_not_change_the_operation() -> None:
    def body(x: Tensor) -> list[Tensor]:
        y = x * 2
        z = y + 1
        y.transpose_(0, 1)
        y.add_(1)
        first = y.contiguous()
        y.data = first * 3
        y.mul_(2)
        return [y, z, first]

    check_replay(body, torch.randn(3, 2), torch.randn(3, 2))


def test_out_variants_lists_none_outputs_and_empty_tensors() -> None:
    aten = torch.ops.aten

    def body(x: Tensor) -> list[Tensor]:
        out = torch.empty(0)
        torch.mm(x, x, out=out)
        torch.add(out, 1, out=out)
        parts = [part.clone() for part in out.split(2)]
        aten._foreach_mul_(parts, 2.0)
        norms = aten._foreach_norm(parts)
        grad, _, bias = aten.convolution_backward(
            x[None, None], x[None, None], torch.ones(1, 1, 1, 1), [1], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, False, True]
        )
        empty = x[:0] * 2
        split = aten._foreach_add(parts, 1.0)
        return [out, *parts, *norms, grad, bias, empty, torch.cat([empty, x]), *split, x.to(x.dtype), x.contiguous(), x.T.contiguous()]

    check_replay(body, torch.randn(4, 4), torch.randn(4, 4))


def test_fp8_and_bit_casts() -> None:
    def body(x: Tensor) -> list[Tensor]:
        low = (x * 4).clamp(-448, 448).to(torch.float8_e4m3fn)
        bits = x.abs().view(torch.int32).amax()
        return [low.view(torch.uint8), low.float(), bits.view(torch.float32), torch.view_as_real(torch.fft.fft(x).conj() * 2)]

    check_replay(body, torch.randn(4, 4), torch.randn(4, 4))


def test_a_constant_of_torchs_own_is_made_anew() -> None:
    """`x[i] = 2.0` makes a constant; changing what it was written to leaves it as it was."""

    def body(x: Tensor) -> list[Tensor]:
        y = x.clone()
        y[0] = 2.0
        y.mul_(3)
        return [y]

    check_replay(body, torch.randn(4), torch.randn(4))


def test_expanded_results_of_a_custom_operator() -> None:
    @torch.library.custom_op("recorder_tests::spread", mutates_args=())
    def spread(value: Tensor) -> Tensor:
        return value.sum().clone().expand(3)

    check_replay(lambda x: [spread(x), spread(x) + 1], torch.randn(4), torch.randn(4))


def test_tensor_subclasses_and_inference_mode() -> None:
    def subclass(x: Tensor) -> list[Tensor]:
        both: Any = TwoTensor(x, x * 2) + 1
        return [both.a, both.b]

    def inference(x: Tensor) -> list[Tensor]:
        with torch.inference_mode():
            y = F.linear(x, x)
            y.add_(1)
            return [y, y.reshape(-1), F.layer_norm(x, (4,))]

    for body in (subclass, inference):
        check_replay(body, torch.randn(4, 4), torch.randn(4, 4))


def test_replay_ignores_the_callers_autocast_and_grad_mode() -> None:
    a, b = torch.randn(4, 4), torch.randn(4, 4)
    recording, out = record(lambda: a @ b)
    with torch.autocast("cpu", torch.bfloat16):
        recording.replay()
    assert torch.equal(out, a @ b)
    with torch.enable_grad():
        recording.replay()
    assert not out.requires_grad


Program = list[tuple[str, int, int]]
STEPS: dict[str, Callable[[list[Tensor], Tensor, Tensor], Tensor | None]] = {
    "add": lambda _, a, b: a + b,
    "mul": lambda _, a, b: a * b.sigmoid(),
    "matmul": lambda _, a, b: (a @ b).tanh(),
    "where": lambda _, a, b: torch.where(a > b, a, b * 0.5),
    "cat": lambda _, a, b: torch.cat([a[:2], b[2:]]),
    "transpose": lambda _, a, b: a.t(),
    "slice": lambda _, a, b: a[1:3].repeat(2, 1),
    "flip view": lambda _, a, b: a.view_as(a).narrow(0, 0, 4),
    "reshape": lambda _, a, b: a.reshape(2, 8).reshape(4, 4),
    "expand": lambda _, a, b: a[:1].expand(4, 4),
    "norm": lambda _, a, b: F.layer_norm(a.contiguous(), (4,)),
    "noise": lambda _, a, b: F.dropout(a, 0.3),
    # What is read may be the transpose of what is written: torch refuses to do that without a copy.
    "add_": lambda _, a, b: a.add_(b.clone()) if is_writable(a) else None,
    "row mul_": lambda _, a, b: a[1].mul_(b[2].tanh()).view(1, 4).expand(4, 4) if is_writable(a) else None,
    "column copy_": lambda _, a, b: a[:, :2].copy_(b[:, 2:].clone()).repeat(1, 2) if is_writable(a) else None,
    "fill": lambda _, a, b: a.__setitem__((slice(None), 2), b[:, 0].clone()) if is_writable(a) else None,
    "index_put": lambda _, a, b: a.index_add(0, torch.arange(4), b),
}


def is_writable(tensor: Tensor) -> bool:
    return 0 not in tensor.stride()


def run_program(program: Program, x: Tensor, y: Tensor) -> list[Tensor]:
    values = [x, y]
    for name, i, j in program:
        result = STEPS[name](values, values[i % len(values)], values[j % len(values)])
        if result is not None:
            values.append(result)
    return values


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=12))
def test_any_program_replays_like_eager(program: Program) -> None:
    inputs = [torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    x, y = inputs[0].clone().unbind()
    recording, outputs = record(lambda: run_program(program, x, y))
    for values in inputs[1:]:
        x.copy_(values[0])
        y.copy_(values[1])
        torch.manual_seed(1)
        recording.replay()
        torch.manual_seed(1)
        expected = run_program(program, *values.clone().unbind())
        for a, b in zip(outputs, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def test_deep_copies_of_a_module_inside_the_step() -> None:
    model = nn.Linear(2, 2)
    recording, copied = record(lambda: copy.deepcopy(model).weight)
    with torch.no_grad():
        model.weight.fill_(7.0)
    recording.replay()
    assert copied.flatten().tolist() == [7.0] * 4
