"""Random module graphs under random checkpoints equal the same graphs without any, bit for bit."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from training import (
    KINDS,
    NUM_STEPS,
    RECIPE,
    WIDTH,
    assert_same_trajectory,
    counts,
    descend,
    flush_all,
    grads,
    make_batch,
    state_values,
)

import graphrt

pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")

NUM_LINEARS = 4
MAX_USES = 2  # of one linear: a sum of two gradients does not depend on their order, one of three does


@dataclass(frozen=True)
class Linear:
    index: int


@dataclass(frozen=True)
class Chain:
    parts: tuple[Any, ...]


@dataclass(frozen=True)
class Sum:
    left: Any
    right: Any


@dataclass(frozen=True)
class DeadBranch:
    dead: Any
    live: Any


@dataclass(frozen=True)
class Checkpoint:
    kind: str
    inner: Any


@dataclass(frozen=True)
class Region:
    enabled: bool
    inner: Any


def wrap(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.builds(Chain, st.tuples(inner, inner)),
        st.builds(Sum, inner, inner),
        st.builds(DeadBranch, inner, inner),
        st.builds(Checkpoint, st.sampled_from(list(KINDS)), inner),
        st.builds(Checkpoint, st.sampled_from(list(KINDS)), inner),
        st.builds(Region, st.sampled_from([True, True, False]), inner),
    )


linears = st.builds(Linear, st.integers(0, NUM_LINEARS - 1))
graphs = st.recursive(st.builds(Chain, st.tuples(linears, linears)), wrap, max_leaves=6)


class Model(nn.Module):
    """Runs a graph; with ``is_checkpointed`` False every checkpoint is a plain call."""

    def __init__(self, graph: Any, is_checkpointed: bool) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LINEARS))
        self.is_checkpointed = is_checkpointed
        self.run = self.build(graph, Counter())

    def build(self, node: Any, uses: Counter[int]) -> Callable[[Tensor], Tensor]:
        if isinstance(node, Linear):
            uses[node.index] += 1
            return self.use_linear(node.index) if uses[node.index] <= MAX_USES else torch.tanh
        if isinstance(node, Chain):
            parts = [self.build(part, uses) for part in node.parts]
            return lambda x: parts[1](parts[0](x))
        if isinstance(node, Sum):
            left, right = self.build(node.left, uses), self.build(node.right, uses)
            return lambda x: (lambda x: left(x) + right(x))(x.clone())
        if isinstance(node, DeadBranch):
            dead, live = self.build(node.dead, uses), self.build(node.live, uses)
            return lambda x: (dead(x), live(x))[1]
        inner = self.build(node.inner, uses)
        if isinstance(node, Checkpoint):
            kind = KINDS[node.kind]
            return (lambda x: kind(inner, x)) if self.is_checkpointed else inner
        return lambda x: self.in_region(node.enabled, inner, x)

    def use_linear(self, index: int) -> Callable[[Tensor], Tensor]:
        return lambda x: torch.tanh(self.linears[index](x)) * 2

    def in_region(self, enabled: bool, inner: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        with graphrt.fp8_autocast(enabled=enabled):
            return inner(x)


def follow(graph: Any, has_region: bool, order: tuple[int, ...], is_checkpointed: bool) -> list[dict[str, Tensor]]:
    """Steps of ``len(order)`` forwards each, whose backwards follow in that order."""
    torch.manual_seed(0)
    model = graphrt.convert_to_float8_training(Model(graph, is_checkpointed), recipe=RECIPE)
    state, trajectory = graphrt.quantization_state(model), []
    for step in range(NUM_STEPS):
        flush_all()
        xs = [make_batch(len(order) * step + i).requires_grad_() for i in range(len(order))]
        losses = []
        for x in xs:
            if has_region:
                with graphrt.fp8_autocast():
                    losses.append(model.run(x).square().mean())
            else:
                losses.append(model.run(x).square().mean())
        before = state.backward_updates
        for i in order:
            losses[i].backward()
            trajectory.append({"loss": losses[i].detach(), "x.grad": xs[i].grad, **grads(model), **state_values(state)})
            if i == order[-1]:
                descend(model)
            model.zero_grad()
        state.flush()
        assert state.backward_updates - before <= 1
        if has_region:
            used = trajectory[-1]["num_updates"][0] > 0
            assert counts(state)[0] == (len(order) * (step + 1) if used else 0)
    return [*trajectory, state_values(state)]


RUNS = {"graph": graphs, "has_region": st.booleans(), "order": st.sampled_from([(0,), (0, 1), (1, 0)])}


@settings(max_examples=15, deadline=None, derandomize=True)
@given(**RUNS)
def test_random_graphs_under_random_checkpoints_equal_the_plain_run(graph, has_region, order):
    assert_same_trajectory(follow(graph, has_region, order, True), follow(graph, has_region, order, False))


@pytest.mark.slow
@settings(max_examples=60, deadline=None, derandomize=True)
@given(**RUNS)
def test_many_random_graphs_under_random_checkpoints_equal_the_plain_run(graph, has_region, order):
    assert_same_trajectory(follow(graph, has_region, order, True), follow(graph, has_region, order, False))
