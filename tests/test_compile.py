"""Under torch.compile a region's entry and exit are never traced: the graph breaks there, or compilation refuses."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from training import NUM_STEPS, assert_same_trajectory, counts, descend, grads, make_batch, make_net, state_values

import graphrt

# Torch's compiler looks at the .grad of what it is handed.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

BACKENDS = pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])


@pytest.fixture(autouse=True)
def _nothing_compiled_before() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def region_inside(model: Any, x: Tensor) -> Tensor:
    with graphrt.fp8_autocast():
        y = model(x)
        return y.square().mean()


def regions_per_layer_inside(model: Any, x: Tensor) -> Tensor:
    with graphrt.fp8_autocast():
        for block in model.blocks:
            with graphrt.fp8_autocast():
                x = block(x.sin())
    return x.square().mean()


def checkpoint_inside(model: Any, x: Tensor) -> Tensor:
    with graphrt.fp8_autocast():
        for block in model.blocks:
            x = graphrt.checkpoint(block, x)
        return x.square().mean()


def backward_inside(model: Any, x: Tensor) -> Tensor:
    loss = region_inside(model, x)
    loss.backward()
    return loss.detach()


def flush_inside(model: Any, x: Tensor) -> Tensor:
    loss = region_inside(model, x)
    graphrt.quantization_state(model).flush()
    return loss * 1


def run(step: Callable[[Any, Tensor], Tensor], wrap: Callable[[Any], Any]) -> list[dict[str, Tensor]]:
    model = make_net(2)
    state, trajectory = graphrt.quantization_state(model), []
    compiled = wrap(step)
    for i in range(NUM_STEPS):
        loss = compiled(model, make_batch(i).requires_grad_())
        if loss.requires_grad:
            loss.backward()
        trajectory.append({"loss": loss.detach(), **grads(model), **state_values(state)})
        descend(model)
    state.flush()
    assert counts(state) == (NUM_STEPS, NUM_STEPS)
    return trajectory


@pytest.mark.slow
@BACKENDS
@pytest.mark.parametrize("step", [region_inside, regions_per_layer_inside, checkpoint_inside, backward_inside, flush_inside])
def test_a_region_inside_a_compiled_function_gives_the_scales_of_the_uncompiled_one(step, backend):
    assert_same_trajectory(run(step, lambda step: torch.compile(step, backend=backend)), run(step, lambda step: step))


@BACKENDS
def test_a_region_around_a_compiled_model_gives_the_scales_of_the_uncompiled_one(backend):
    def around(model: Any, x: Tensor) -> Tensor:
        with graphrt.fp8_autocast():
            return model(x).square().mean()

    def wrap(step: Any) -> Any:
        compiled: dict[int, Any] = {}
        return lambda model, x: step(compiled.setdefault(id(model), torch.compile(model, backend=backend)), x)

    assert_same_trajectory(run(around, wrap), run(around, lambda step: step))


@BACKENDS
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_around_a_compiled_block_gives_the_scales_of_the_uncompiled_one(use_reentrant, backend):
    def make(wrap: Callable[[Any], Any]) -> Callable[[Any, Tensor], Tensor]:
        blocks: dict[int, Any] = {}

        def step(model: Any, x: Tensor) -> Tensor:
            with graphrt.fp8_autocast():
                for i, block in enumerate(model.blocks):
                    x = graphrt.checkpoint(blocks.setdefault(i, wrap(block)), x, use_reentrant=use_reentrant)
                return x.square().mean()

        return step

    compiled = run(make(lambda block: torch.compile(block, backend=backend)), lambda step: step)
    assert_same_trajectory(compiled, run(make(lambda block: block), lambda step: step))


def test_fullgraph_refuses_a_region_inside_and_says_where_it_belongs():
    model = make_net(1)
    compiled = torch.compile(region_inside, backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="open the region outside"):
        compiled(model, make_batch(0))
    assert counts(graphrt.quantization_state(model)) == (0, 0)


def test_fullgraph_refuses_a_flush_inside():
    model = make_net(1)
    state = graphrt.quantization_state(model)
    region_inside(model, make_batch(0)).backward()

    @torch.compile(backend="eager", fullgraph=True)
    def flush(x: Tensor) -> Tensor:
        state.flush()
        return x + 1

    with pytest.raises(torch._dynamo.exc.Unsupported, match="flush between compiled functions"):
        flush(make_batch(0))
    assert state.backward_update_requested
    assert counts(state) == (1, 0)


def test_fullgraph_refuses_a_converted_linear_and_says_why():
    model = make_net(1)
    with graphrt.fp8_autocast(), pytest.raises(torch._dynamo.exc.Unsupported, match="asks at run time which region it is in"):
        torch.compile(model, backend="eager", fullgraph=True)(make_batch(0))
