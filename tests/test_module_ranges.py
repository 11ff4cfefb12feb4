"""Ranges by module: who is inside whom, in forward and backward, and that nothing else changes."""

import _thread
import itertools
import operator
import threading
from typing import Any

import pytest
import torch
from stepping import TokenModel, make_trainer, run, token_batches
from test_ranges import Listener
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from training import assert_same_trajectory

import graphrt
from graphrt.module_ranges import _ModuleRanges
from graphrt.ranges import BACKWARD, Range, listening

WIDTH = 8


class FailsBackward(torch.autograd.Function):
    """Identity, whose backward raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        raise ValueError("told to fail")


class Block(nn.Module):
    """A linear between operations of the block's own; returns a dict."""

    def __init__(self, *, fails: bool = False) -> None:
        super().__init__()
        self.linear, self.fails = nn.Linear(WIDTH, WIDTH), fails

    def forward(self, x: Tensor) -> dict[str, list[Tensor]]:
        x = self.linear(x * 2).tanh()
        return {"out": [FailsBackward.apply(x) if self.fails else x]}


def loss_of(model: nn.Module) -> Tensor:
    torch.manual_seed(0)
    return model(torch.randn(4, WIDTH, requires_grad=True))["out"][0].sum()


def test_a_node_belongs_to_the_innermost_module_that_made_it():
    # The linear has two: its product, and the transposed view of its weight.
    model, listener = Block(), Listener()
    with listening(listener), graphrt.module_ranges(model):
        loss_of(model).backward()
    assert listener.paths == ["Block", "Block/linear", "Block backward", *["linear backward"] * 2, "Block backward"]
    assert not listener.open


def test_modules_of_another_model_have_no_ranges():
    model, other, listener = Block(), Block(), Listener()
    with listening(listener), graphrt.module_ranges(model):
        loss_of(other).backward()
    assert listener.paths == []


def test_after_the_block_no_hook_of_modules_is_left_and_those_of_nodes_do_nothing():
    model, listener = Block(), Listener()
    hooks = (torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks)
    before = [len(kind) for kind in hooks]
    with graphrt.module_ranges(model):
        loss = loss_of(model)
    assert [len(kind) for kind in hooks] == before
    with listening(listener):
        loss.backward()
        loss_of(model).backward()
    assert listener.paths == []
    assert model.linear.weight.grad is not None


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("checkpointing", [None, False, True], ids=["plain", "non-reentrant", "reentrant"])
def test_steps_compute_the_same_bit_for_bit(mode, checkpointing):
    wraps = {} if checkpointing is None else {"wrap": lambda block, x: graphrt.checkpoint(block, x, use_reentrant=checkpointing)}
    options = {"model": {"dropout": 0.1, **wraps}}
    with make_trainer(mode, **options) as trainer:
        expected = run(trainer, token_batches())
    listener = Listener()
    with make_trainer(mode, **options) as trainer, listening(listener), graphrt.module_ranges(trainer.model):
        actual = run(trainer, token_batches())
    assert_same_trajectory(actual, expected)
    assert not listener.open
    names = [path.rpartition("/")[2] for path in listener.paths]
    assert "blocks.1.up" in names
    assert "blocks.1.up backward" in names
    recomputed = [path for path in listener.paths if path.endswith("backward/blocks.1/blocks.1.up")]
    assert bool(recomputed) == (checkpointing is not None)


def test_a_replay_has_no_ranges_by_module():
    listener = Listener()
    with make_trainer("graph") as trainer, graphrt.module_ranges(trainer.model):
        batches = token_batches()
        for batch in batches[:3]:
            trainer.step(batch)
        with listening(listener):
            trainer.step(batches[3])
    assert listener.paths == ["step", "step/copy_inputs", "step/replay", "step/results"]


def test_what_a_failed_backward_left_open_is_closed_by_the_next_forward():
    model, listener = Block(fails=True), Listener()
    with listening(listener), graphrt.module_ranges(model):
        with pytest.raises(ValueError, match="told to fail"):
            loss_of(model).backward()
        assert listener.open == ["Block backward"]
        model.fails = False
        loss_of(model).backward()
        assert not listener.open
    assert listener.paths[3:] == ["Block", "Block/linear", "Block backward", *["linear backward"] * 2, "Block backward"]


def test_what_a_failed_backward_left_open_is_closed_with_the_range_around_it():
    model = Block(fails=True)
    depths: list[int] = []

    class Depth:
        def enter_range(self, name: str) -> None:
            depths.append((depths[-1] if depths else 0) + 1)

        def exit_range(self, name: str) -> None:
            depths.append(depths[-1] - 1)

    with graphrt.module_ranges(model), listening(Depth()):
        with pytest.raises(ValueError, match="told to fail"), BACKWARD:
            loss_of(model).backward()
        assert depths[-1] == 0
    assert depths[-1] == 0


def test_what_a_failed_backward_left_open_is_closed_with_the_block():
    model, listener = Block(fails=True), Listener()
    with listening(listener):
        with pytest.raises(ValueError, match="told to fail"), graphrt.module_ranges(model):
            loss_of(model).backward()
        assert not listener.open


def test_a_forward_that_raises_leaves_its_ranges():
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("told to fail")

    model, listener = nn.Sequential(nn.Linear(WIDTH, WIDTH), Fails()), Listener()
    with listening(listener), graphrt.module_ranges(model):
        with pytest.raises(ValueError, match="told to fail"):
            model(torch.ones(1, WIDTH))
        assert not listener.open
    assert listener.paths == ["Sequential", "Sequential/0", "Sequential/1"]


class FakeNode:
    """Keeps the two hooks, to be called by hand."""

    def register_prehook(self, hook: Any) -> None:
        self.enter = hook

    def register_hook(self, hook: Any) -> None:
        self.leave = hook


def test_a_thread_of_the_engine_closes_what_an_earlier_backward_left_there():
    listener, module_ranges, done = Listener(), _ModuleRanges(nn.Linear(1, 1)), threading.Event()
    left, following = FakeNode(), FakeNode()
    module_ranges._watch(left, Range("left backward"))  # pyright: ignore[reportArgumentType]
    module_ranges._watch(following, Range("following backward"))  # pyright: ignore[reportArgumentType]
    calls = map(operator.call, [left.enter, following.enter, lambda _: done.set()], itertools.repeat(None))
    with listening(listener):
        # All of `any` and `map` is C: the hooks find no Python below them, as on the engine's threads.
        _thread.start_new_thread(any, (calls,))
        assert done.wait(timeout=30)
    assert listener.paths == ["left backward", "following backward"]
    assert listener.open == ["following backward"]


def test_a_compiled_model_has_no_ranges_and_the_same_result():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())
    x = torch.ones(2, WIDTH)
    expected = model(x)
    listener = Listener()
    with listening(listener), graphrt.module_ranges(model):
        model.compile(backend="eager")
        actual = model(x)
        actual.sum().backward()
    assert torch.equal(actual, expected)
    assert listener.paths == []


def test_what_is_no_module_is_refused():
    with pytest.raises(TypeError, match=r"nn\.Module"), graphrt.module_ranges(TokenModel):  # pyright: ignore[reportArgumentType]
        pass
