"""DelayedScaling(keep_weight_transpose=False): the transposed FP8 weights that backwards make again are those that were kept."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernels.cases import SCALES, SHAPES, SLOT, assert_same_bits, make_input, make_scales
from stepping import HISTORY, TokenModel, deterministic, make_trainer, token_batch, values
from test_nn import MODES, Parts, fused_block, fused_ffn, fused_qkv, make_inputs, make_parts
from test_nn import run as run_layer
from training import KINDS, assert_same_trajectory, assert_same_values, every_kind, make_batch, make_net, train

import graphrt
from graphrt import kernels
from graphrt.errors import GraphrtError
from graphrt.kernels.quantized import FP8_DTYPES, INPUT_DTYPES

AGAIN = graphrt.DelayedScaling(amax_history_len=HISTORY, keep_weight_transpose=False)
KEPT = graphrt.DelayedScaling(amax_history_len=HISTORY)


@pytest.mark.parametrize("shape", [*SHAPES, (0, 16), (16, 0)], ids=lambda shape: f"{shape[0]}x{shape[1]}")
@pytest.mark.parametrize("dtype", INPUT_DTYPES, ids=str)
def test_the_copy_alone_is_the_one_beside_the_other(shape, dtype, device):
    for i, fp8 in enumerate(FP8_DTYPES):
        x = torch.empty(shape, dtype=dtype, device=device) if 0 in shape else make_input(*shape, dtype, nonfinite=True, device=str(device))
        scales = make_scales(SCALES[i], str(device))
        expected = kernels.quantize(x, *scales, SLOT, fp8, transpose=True).transposed
        assert_same_bits(kernels.quantize_transposed(x, *scales, SLOT, fp8), expected, "transposed")
        strided = torch.stack((x, x), dim=-1)[..., 0]
        assert_same_bits(kernels.quantize_transposed(strided, *scales, SLOT, fp8), expected, "transposed of a view")


def test_what_cannot_be_quantized_is_refused():
    with pytest.raises(ValueError, match="slot is 99"):
        kernels.quantize_transposed(torch.ones(16, 16), *make_scales(1.0), 99, torch.float8_e4m3fn)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@every_kind
def test_linears_train_alike(kind, dtype, device):
    if device.type == "cuda" and dtype is torch.float32:
        pytest.skip("FP8 GEMMs of the GPU give 16 bits to the next layer")

    def forward(model: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            return kind(model.blocks[0], model.blocks[1](x)) + model.blocks[2](x)

    runs = [train(make_net(recipe=recipe, device=device, dtype=dtype), forward, device=device, dtype=dtype) for recipe in (KEPT, AGAIN)]
    assert_same_trajectory(*runs)


@pytest.mark.parametrize("layer", [fused_qkv, fused_ffn, fused_block], ids=["qkv", "ffn", "block"])
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "plain"])
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if name == "graphrt" else pytest.mark.slow, id=name) for name, kind in KINDS.items()]
)
def test_fused_layers_compute_alike(layer, mode, kind, device):
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    kept, again = (run_layer(layer, make_parts(mode, device, recipe=recipe), mode, dtype, device, kind) for recipe in (KEPT, AGAIN))
    for actual, expected in zip(again, kept, strict=True):
        assert_same_values(actual, expected)


def weights_saved(y: torch.Tensor) -> list[torch.Size]:
    """Shapes of the one-byte tensors that the graph behind ``y`` has saved."""
    found, nodes = [], [y.grad_fn]
    while nodes:
        node: Any = nodes.pop()
        if node is not None:
            nodes += [before for before, _ in node.next_functions]
            found += [saved.shape for saved in getattr(node, "saved_tensors", ()) if saved is not None and saved.element_size() == 1]
    return found


@pytest.mark.parametrize(("recipe", "num"), [(KEPT, 2), (AGAIN, 0)], ids=["kept", "again"])
def test_the_graph_holds_it_only_if_it_is_kept(recipe, num):
    parts = make_parts("fp8", recipe=recipe)
    with graphrt.fp8_autocast():
        assert len(weights_saved(fused_ffn(parts, *make_inputs(2, torch.float32, "cpu"))[1])) == num
    linear = graphrt.convert_to_float8_training(torch.nn.Linear(32, 48), recipe=recipe)
    with graphrt.fp8_autocast():
        linear(torch.randn(8, 32, requires_grad=True))
    with graphrt.fp8_autocast():
        assert (weights_saved(linear(torch.randn(8, 32, requires_grad=True))).count(torch.Size((32, 48)))) == num / 2


def retained(
    make: Callable[[graphrt.DelayedScaling], tuple[Any, Callable[[torch.Tensor], torch.Tensor]]], recipe: Any
) -> list[torch.Tensor]:
    """Gradients of several backwards through one forward, the first of weights alone, while the scales move on."""
    model, forward = make(recipe)
    x = make_batch(0, shape=(24, 64)).requires_grad_()
    weights = [p for p in model.parameters() if p.dim() == 2]
    with graphrt.fp8_autocast():
        loss = forward(x).square().mean()
    found = [*torch.autograd.grad(loss, weights, retain_graph=True, allow_unused=True)]
    with graphrt.fp8_autocast():
        forward(30 * x)
    for retain in (True, False):
        found += torch.autograd.grad(loss, [x, *weights], retain_graph=retain, allow_unused=True)
    return [grad for grad in found if grad is not None]


def make_linear_model(recipe: graphrt.DelayedScaling) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = graphrt.convert_to_float8_training(
        torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 32)), recipe=recipe
    )
    return model, model


def make_fused_model(recipe: graphrt.DelayedScaling) -> tuple[Parts, Any]:
    parts = make_parts("fp8", recipe=recipe)
    return parts, lambda x: fused_block(parts, x[None], x[None])[-1]


@pytest.mark.parametrize("make", [make_linear_model, make_fused_model], ids=["linears", "fused"])
def test_a_retained_graph_has_it_for_every_backward(make):
    kept, again = retained(make, KEPT), retained(make, AGAIN)
    assert len(kept) == len(again) > 4
    for actual, expected in zip(again, kept, strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("is_fused", [False, True], ids=["linear", "fused"])
def test_a_weight_changed_before_its_backward_is_refused(is_fused):
    model, forward = (make_fused_model if is_fused else make_linear_model)(AGAIN)
    for _ in range(2):
        with graphrt.fp8_autocast():
            loss = forward(make_batch(0, shape=(24, 64)).requires_grad_()).square().mean()
    weight = model.w2.weight if is_fused else model[2].weight
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(GraphrtError, match=r"weight \[\d+, \d+\] was changed in place after its forward.*keep_weight_transpose=True"):
        loss.backward()


@pytest.mark.parametrize(
    "options", [{}, {"grad_accum_steps": 2}, {"model": {"wrap": graphrt.checkpoint}}], ids=["plain", "microbatches", "checkpoint"]
)
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_steps_are_alike(mode, options, device):
    def take_steps(recipe: graphrt.DelayedScaling) -> dict[str, torch.Tensor]:
        with make_trainer(mode, device, recipe=recipe, **options) as trainer:
            for step in range(HISTORY + 2):
                trainer.step(token_batch(step))
            return values(trainer)

    with deterministic():
        assert_same_values(take_steps(AGAIN), take_steps(KEPT))


def test_a_captured_step_makes_its_weights_in_one_launch_as_ever(device, monkeypatch):
    tables: list[kernels.QuantizeTable] = []
    quantize_many = kernels.quantize_many
    monkeypatch.setattr(kernels, "quantize_many", lambda table: (tables.append(table), quantize_many(table)))
    with make_trainer("graph", device, recipe=AGAIN, model=TokenModel) as trainer:
        for step in range(4):
            trainer.step(token_batch(step))
    [table] = tables
    assert [entry.to.transpose for entry in table.entries] == [False] * 5


def test_a_state_loads_whether_it_is_kept_or_not():
    saved = graphrt.quantization_state(make_net(recipe=AGAIN)).state_dict()
    graphrt.quantization_state(make_net(recipe=KEPT)).load_state_dict(saved)
    del saved["recipe"]["keep_weight_transpose"]  # of before there was a choice
    assert graphrt.DelayedScaling.from_dict(saved["recipe"]).keep_weight_transpose
    graphrt.quantization_state(make_net(recipe=AGAIN)).load_state_dict(saved)
