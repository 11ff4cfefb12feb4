"""What the recorder refuses, with the user's file and line, and that the process is as before afterwards."""

import contextlib
import os
import random
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from random import random as imported_random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.random import rand as imported_rand
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint

from graphrt.capture import hazards
from graphrt.capture.record_location import find_location
from graphrt.capture.recorder import record
from graphrt.errors import CaptureError

x = torch.linspace(-1, 1, 12).view(4, 3)
mask = x > 0
STATE = torch.get_rng_state()


def branch() -> None:
    if x.sum() > 0:
        x.mul(2)


def branch_inverted() -> None:
    assert x.sum() < 100


def set_item_from_mask() -> None:
    x.clone()[mask] = torch.zeros(int(mask.numel()))[:6]


def set_item_from_device_scalar() -> None:
    x.clone()[mask] = x.sum()


def restore_outer_state() -> None:
    torch.set_rng_state(STATE)


def in_hook() -> None:
    weight = torch.ones(3, requires_grad=True)
    weight.register_hook(lambda grad: grad.tolist())
    (x * weight).sum().backward()


def in_recompute() -> None:
    calls = []

    def block(value: Tensor) -> Tensor:
        calls.append(value)
        if len(calls) == 2:
            value.numpy()
        return value.sin().cos()

    checkpoint(block, torch.ones(3, requires_grad=True), use_reentrant=False).sum().backward()


class Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value * 2

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        (grad,) = grad_outputs
        return grad * grad.max().item()


def in_custom_backward() -> None:
    Doubling.apply(torch.ones(3, requires_grad=True)).sum().backward()


def sparse_gradient() -> None:
    out = F.embedding(x.argmax(1), torch.ones(4, 2, requires_grad=True), sparse=True)
    out.sum().backward()


def checked_clipping() -> None:
    weight = nn.Parameter(x)
    weight.grad = x
    nn.utils.clip_grad_norm_([weight], 1.0, error_if_nonfinite=True)


def constant_under_a_default_device() -> None:
    with torch.device("cpu"):
        torch.tensor([1.0])


def compiled_item() -> None:
    torch.compile(lambda value: value.item(), backend="eager")(x.sum())


# The body, the start of the message, and the expression it must quote.
HAZARDS: list[tuple[Callable[[], Any], str, str]] = [
    (lambda: x.sum().item(), "aten::_local_scalar_dense reads a device value on the host", "x.sum().item()"),
    (lambda: float(x.sum()), "aten::_local_scalar_dense reads", "float(x.sum())"),
    (lambda: int(x.sum()), "aten::_local_scalar_dense reads", "int(x.sum())"),
    (lambda: bool(x.sum() > 0), "aten::_local_scalar_dense reads", "bool(x.sum() > 0)"),
    (lambda: f"{x.sum():.3f}", "aten::_local_scalar_dense reads", "{x.sum():.3f}"),
    (lambda: [0] * x.argmax(), "aten::_local_scalar_dense reads", "[0] * x.argmax()"),
    (branch, "aten::_local_scalar_dense reads a device value on the host to branch on it", "x.sum() > 0"),
    (branch_inverted, "aten::_local_scalar_dense reads a device value on the host to branch on it", "x.sum() < 100"),
    (lambda: torch.equal(x, x), "aten::equal reads", "torch.equal(x, x)"),
    (lambda: torch.allclose(x, x), "aten::allclose reads", "torch.allclose(x, x)"),
    (lambda: torch.linalg.cholesky(torch.eye(2)), "aten::_linalg_check_errors reads", "torch.linalg.cholesky(torch.eye(2))"),
    (checked_clipping, "aten::_local_scalar_dense reads", "nn.utils.clip_grad_norm_([weight]"),
    (lambda: x.tolist(), "Tensor.tolist reads", "x.tolist()"),
    (lambda: x.numpy(), "Tensor.numpy reads", "x.numpy()"),
    (lambda: np.asarray(x), "Tensor.__array__ reads", "np.asarray(x)"),
    (lambda: np.exp(x), "Tensor.__array__ reads", "np.exp(x)"),
    (lambda: print(x), "Tensor.__repr__ reads", "print(x)"),
    (lambda: f"{x}", "Tensor.__repr__ reads", "{x}"),
    (lambda: repr(nn.Parameter(x)), "Tensor.__repr__ reads", "repr(nn.Parameter(x))"),
    (lambda: x.cpu(), "Tensor.cpu copies from the device to the host", "x.cpu()"),
    (lambda: torch.save(x, os.devnull), "torch.save reads", "torch.save(x, os.devnull)"),
    (lambda: torch.cuda.synchronize(), "torch.cuda.synchronize makes the host wait", "torch.cuda.synchronize()"),
    (lambda: x.untyped_storage().resize_(0), "UntypedStorage.resize_ resizes", "x.untyped_storage().resize_(0)"),
    (lambda: x.to("meta"), "aten::_to_copy copies between devices, from cpu to meta", 'x.to("meta")'),
    (lambda: torch.empty(4, 3, device="meta").copy_(x), "aten::copy_ copies between devices, from cpu to meta", "copy_(x)"),
    (lambda: torch.tensor([1.0, 2.0]), "aten::lift_fresh makes a tensor from host values", "torch.tensor([1.0, 2.0])"),
    (lambda: x * torch.tensor(2.0), "aten::lift_fresh makes", "torch.tensor(2.0)"),
    (lambda: torch.as_tensor(np.ones(3)), "aten::lift_fresh makes", "torch.as_tensor(np.ones(3))"),
    (lambda: torch.from_numpy(np.ones(3)), "aten::lift_fresh makes", "torch.from_numpy(np.ones(3))"),
    (lambda: x.new_tensor([1]), "aten::lift_fresh makes", "x.new_tensor([1])"),
    (lambda: x[[0, 2]], "aten::lift_fresh makes", "x[[0, 2]]"),
    (constant_under_a_default_device, "aten::lift_fresh makes", "torch.tensor([1.0])"),
    (lambda: x[mask], "aten::index indexes with a boolean mask", "x[mask]"),
    (set_item_from_mask, "aten::index_put_ indexes with a boolean mask", "x.clone()[mask]"),
    (set_item_from_device_scalar, "aten::index_put_ indexes with a boolean mask", "x.clone()[mask]"),
    (lambda: x.nonzero(), "aten::nonzero has an output whose shape depends on values", "x.nonzero()"),
    (lambda: torch.where(mask), "aten::nonzero has", "torch.where(mask)"),
    (lambda: x.unique(), "aten::_unique2 has", "x.unique()"),
    (lambda: x.masked_select(mask), "aten::masked_select has", "x.masked_select(mask)"),
    (lambda: x.repeat_interleave(x.argmax(1), dim=0), "aten::repeat_interleave has", "x.repeat_interleave(x.argmax(1), dim=0)"),
    (lambda: x.argmax(1).bincount(), "aten::bincount has", "x.argmax(1).bincount()"),
    (lambda: F.one_hot(x.argmax(1)), "aten::_local_scalar_dense reads", "F.one_hot(x.argmax(1))"),
    (lambda: torch.cond(mask.any(), lambda v: v + 1, lambda v: v - 1, (x,)), "cond runs Python", "torch.cond("),
    (lambda: x.to_sparse(), "", "x.to_sparse()"),
    (sparse_gradient, "aten::_sparse_coo_tensor_with_dims_and_tensors works on a tensor that is not strided", "backward()"),
    (lambda: torch.manual_seed(1), "torch.manual_seed seeds the generator", "torch.manual_seed(1)"),
    (lambda: torch.random.seed(), "torch.seed seeds the generator", "torch.random.seed()"),
    (restore_outer_state, "torch.set_rng_state restores a generator state", "torch.set_rng_state(STATE)"),
    (lambda: random.random(), "random.random draws on the host", "random.random()"),
    (lambda: random.seed(1), "random.seed draws on the host", "random.seed(1)"),
    (lambda: np.random.rand(3), "numpy.random.rand draws on the host", "np.random.rand(3)"),
    (lambda: imported_random(), "random moved its generator during the step: it draws on the host", ""),
    (lambda: imported_rand(), "numpy.random moved its generator during the step: it draws", ""),
    (in_hook, "Tensor.tolist reads", "grad.tolist()"),
    (in_recompute, "Tensor.numpy reads", "value.numpy()"),
    (in_custom_backward, "aten::_local_scalar_dense reads", "grad.max().item()"),
    (compiled_item, "aten::_local_scalar_dense reads", "value.item()"),
]


def process_state() -> list[Any]:
    """Everything a recording replaces."""
    owners = (Tensor, torch.cuda, torch.accelerator, torch.UntypedStorage, torch.random, random, np.random, F)
    names = [dict(vars(owner)) for owner in owners]
    num_hooks = len(nn.modules.module._global_forward_hooks)
    return [*names, torch.save, len(_get_current_dispatch_mode_stack()), torch.is_grad_enabled(), num_hooks]


@pytest.fixture(scope="module", autouse=True)
def _imported_by_the_first_recording() -> None:
    """torch imports its compiler with the first recording, which adds names to the modules looked at."""
    record(lambda: x.add(1))


@pytest.mark.parametrize(("body", "start", "expression"), HAZARDS, ids=[f"{i}-{start[:30]}" for i, (_, start, _) in enumerate(HAZARDS)])
@pytest.mark.parametrize("keep_outputs", [True, False])
def test_refused_with_the_line_and_nothing_left_behind(body: Callable[[], Any], start: str, expression: str, keep_outputs: bool) -> None:
    before = process_state()
    with pytest.raises(CaptureError) as caught:
        record(body, keep_outputs=keep_outputs)
    assert process_state() == before
    message = str(caught.value)
    assert message.startswith(start)
    if expression:
        assert expression in message
        assert "test_recorder_hazards.py:" in message
    assert message.endswith(".")
    weight = torch.ones(3, requires_grad=True)
    (x * weight).sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == pytest.approx(x.sum(0).tolist())


def test_the_message_has_file_line_expression_and_remedy() -> None:
    def body() -> float:
        loss = x.sum()
        return loss.item()

    line = body.__code__.co_firstlineno + 2
    with pytest.raises(CaptureError) as caught:
        record(body)
    place = f"test_recorder_hazards.py:{line}, loss.item()"
    message = str(caught.value).replace("tests/", "")
    assert message == f"aten::_local_scalar_dense reads a device value on the host ({place}). Return the tensor and read it after the step."


def test_a_swallowed_refusal_is_raised_all_the_same() -> None:
    def body() -> None:
        with contextlib.suppress(CaptureError):
            x.sum().item()

    def body_with_other_error() -> None:
        try:
            x.sum().item()
        except CaptureError:
            raise KeyError("something else") from None

    for swallowing in (body, body_with_other_error):
        with pytest.raises(CaptureError, match="_local_scalar_dense"):
            record(swallowing)


def test_exceptions_of_the_body_pass_through() -> None:
    def body() -> None:
        x.add(1)
        raise KeyError("mine")

    before = process_state()
    with pytest.raises(KeyError, match="mine"):
        record(body, on_module=nn.Linear(2, 2))
    assert process_state() == before


def test_what_looks_alike_is_legal() -> None:
    indices = torch.tensor([0, 2])

    def body() -> list[Tensor]:
        y = x.clone()
        y[0] = 2.0
        y[1:3] = 0
        y[mask] = -1.0
        y[indices] = 3.0
        out = [y, x[indices], x.masked_fill(mask, 0.0), torch.where(mask, x, 0.0), F.one_hot(indices, 3)]
        out += [torch.full((2,), 1.5), torch.zeros(2), torch.ones(2), torch.arange(3), torch.linspace(0, 1, 3)]
        out += [
            x.repeat_interleave(2, dim=0),
            x[:2].repeat_interleave(indices, dim=0, output_size=2),
            x.topk(2).values,
            torch.scalar_tensor(2.0),
        ]
        assert x.shape == (4, 3)
        assert x.is_floating_point()
        with torch.profiler.record_function("named"):
            return [value.contiguous() for value in out]

    eager = body()
    recording, outputs = record(body)
    for output in outputs:
        output.fill_(0)
    recording.replay()
    for value, output in zip(eager, outputs, strict=True):
        assert torch.equal(value, output)


def test_reading_a_generator_of_the_host_without_drawing_is_legal() -> None:
    record(lambda: (random.getstate(), np.random.get_state(), random.Random(1).random(), np.random.default_rng(1).random()))


def test_other_threads_keep_their_functions() -> None:
    done: list[Any] = []

    def elsewhere() -> None:
        torch.random.fork_rng(devices=[])
        done.extend([x.tolist(), random.random(), np.random.rand(), repr(x), torch.get_rng_state()])

    def body() -> None:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()

    record(body)
    assert len(done) == 5


def test_two_recordings_at_once_are_refused() -> None:
    with pytest.raises(CaptureError, match="under way"):
        record(lambda: record(lambda: x.add(1)))
    record(lambda: x.add(1))


def test_a_custom_operator_is_one_operation_whatever_it_does_inside() -> None:
    @torch.library.custom_op("recorder_tests::peek", mutates_args=())
    def peek(value: Tensor) -> Tensor:
        return value * (2.0 if sum(value.flatten().tolist()) > 0 else 3.0)

    source = torch.ones(3)
    recording, out = record(lambda: peek(source))
    source.fill_(-1.0)
    recording.replay()
    assert out.tolist() == [-3.0, -3.0, -3.0]
    assert [node.name for node in recording.nodes] == ["recorder_tests::peek"]


def test_an_operator_tagged_unsafe_is_refused() -> None:
    @torch.library.custom_op("recorder_tests::unsafe", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
    def unsafe(value: Tensor) -> Tensor:
        return value.clone()

    with pytest.raises(CaptureError, match="recorder_tests::unsafe is tagged as unsafe"):
        record(lambda: unsafe(x))


def test_a_thread_of_the_autograd_engine_names_the_line_its_owner_waits_at() -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(find_location, threading.get_ident())
        location = waiting.result()
    assert location is not None
    assert location.path == __file__
    assert find_location() is not None


def test_work_on_another_device_is_not_part_of_the_step() -> None:
    recording, _ = record(lambda: torch.empty(3, device="meta").add(1).sum())
    assert recording.operations == ()


def test_the_private_names_the_host_generators_are_found_by_exist() -> None:
    names = {f"{owner.__name__}.{name}" for owner, name, _ in hazards._host_draws()}
    assert {"random.random", "random.shuffle", "random.seed", "numpy.random.rand", "numpy.random.seed", "numpy.random.permutation"} <= names
    assert "numpy" in sys.modules
