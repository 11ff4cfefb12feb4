"""What a conversion changes, what it leaves, and why."""

import copy
import gc
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training import NUM_STEPS, RECIPE, Net, assert_same_trajectory, assert_same_values, counts, make_batch, make_net, train

import graphrt
from graphrt.errors import RecipeError


class Conv1D(nn.Module):
    """A linear whose weight is stored transposed, as GPT-2's."""

    def __init__(self, out_features: int, in_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(in_features, out_features))
        self.bias = nn.Parameter(torch.zeros(out_features))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class Zoo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(48, 32)
        self.good = nn.Linear(32, 64)
        self.attention = nn.MultiheadAttention(32, 2)
        self.conv = Conv1D(32, 32)
        self.odd_in = nn.Linear(30, 32)
        self.odd_out = nn.Linear(32, 10)
        self.double = nn.Linear(32, 32).double()
        self.subclass = Special(32, 32)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(32, 32))
        self.lazy = nn.LazyLinear(32)
        self.norm = nn.LayerNorm(32)
        self.stack = nn.Sequential(nn.Linear(64, 32, bias=False), nn.GELU())


class Special(nn.Linear):
    pass


REASONS = {
    "attention": "nn.MultiheadAttention multiplies by its parameters itself",
    "attention.out_proj": "NonDynamicallyQuantizableLinear, not exactly nn.Linear",
    "conv": "Conv1D is not an nn.Linear",
    "odd_in": "in_features=30, out_features=32",
    "odd_out": "in_features=32, out_features=10",
    "double": "torch.float64",
    "subclass": "Special, not exactly nn.Linear",
    "normed": "ParametrizedLinear, not exactly nn.Linear",
    "lazy": "LazyLinear, not exactly nn.Linear",
}


def test_what_is_converted_and_what_is_left_and_why():
    model: Any = graphrt.convert_to_float8_training(Zoo())
    report = graphrt.conversion_report(model)
    assert report.converted == ("good", "stack.0")
    left = dict(report.skipped)
    assert left.keys() == REASONS.keys()
    for name, reason in REASONS.items():
        assert reason in left[name]
    for name, module in model.named_modules():
        assert isinstance(module, graphrt.Float8Linear) == (name in report.converted)


def test_the_report_is_logged(caplog):
    with caplog.at_level(logging.INFO, logger="graphrt"):
        graphrt.convert_to_float8_training(Zoo())
    assert "converted 2 linears to FP8, left 9 modules" in caplog.text
    assert "left conv: Conv1D is not an nn.Linear" in caplog.text


def test_slots_are_named_by_the_module_and_forward_ones_come_first():
    state = graphrt.quantization_state(graphrt.convert_to_float8_training(Zoo()))
    assert state.slots == ("good.input", "good.weight", "stack.0.input", "stack.0.weight", "good.grad_output", "stack.0.grad_output")
    bare = graphrt.quantization_state(graphrt.convert_to_float8_training(nn.Linear(32, 32)))
    assert bare.slots == ("input", "weight", "grad_output")


def test_the_model_comes_back_changed_in_place():
    model: Any = Net()
    linear, weight = model.blocks[0].up, model.blocks[0].up.weight
    names = [name for name, _ in model.named_modules()]
    assert graphrt.convert_to_float8_training(model) is model
    assert model.blocks[0].up is linear
    assert model.blocks[0].up.weight is weight
    assert isinstance(linear, nn.Linear)
    assert [name for name, _ in model.named_modules()] == names


def test_without_a_recipe_the_default_one_holds():
    assert graphrt.quantization_state(graphrt.convert_to_float8_training(Net())).recipe == graphrt.DelayedScaling()


def test_a_filter_sees_each_linear_with_its_name_and_decides():
    seen = []

    def only_up(module: nn.Linear, name: str) -> bool:
        seen.append((type(module), name))
        return name.endswith("up")

    model = graphrt.convert_to_float8_training(Net(2), module_filter_fn=only_up)
    assert seen == [(nn.Linear, f"blocks.{i}.{name}") for i in range(2) for name in ("up", "down")]
    report = graphrt.conversion_report(model)
    assert report.converted == ("blocks.0.up", "blocks.1.up")
    assert report.skipped == tuple((f"blocks.{i}.down", "module_filter_fn left it") for i in range(2))
    assert len(train(model, lambda model, x: model(x))) == NUM_STEPS + 1


def test_a_filter_that_accepts_odd_dimensions_is_refused_by_name_and_nothing_changes():
    model = Zoo()
    with pytest.raises(RecipeError, match=r"accepted odd_in, but in_features=30.*filter return False"):
        graphrt.convert_to_float8_training(model, module_filter_fn=lambda _module, _name: True)
    assert not any(isinstance(module, graphrt.Float8Linear) for module in model.modules())


@pytest.mark.parametrize(
    ("model", "match"),
    [
        (nn.LayerNorm(32), "holds no nn.Linear"),
        (nn.Linear(30, 32), "in_features=30"),
        (nn.Sequential(nn.Linear(32, 10)), "0: in_features=32, out_features=10"),
        (nn.Linear(32, 32, dtype=torch.float64), "torch.float64"),
    ],
    ids=["no linear", "odd", "odd inside", "double"],
)
def test_nothing_to_convert_is_refused_with_the_reason(model, match):
    with pytest.raises(RecipeError, match=match):
        graphrt.convert_to_float8_training(model)


def test_a_recipe_of_another_type_is_refused():
    with pytest.raises(RecipeError, match="dict"):
        graphrt.convert_to_float8_training(Net(), recipe={})  # pyright: ignore[reportArgumentType]


def test_a_second_conversion_is_refused_and_changes_nothing():
    model = make_net()
    state = graphrt.quantization_state(model)
    with pytest.raises(ValueError, match=r"blocks.0.up is a Float8Linear already.*convert_from_float8_training"):
        graphrt.convert_to_float8_training(model)
    with pytest.raises(ValueError, match="already"):
        graphrt.convert_to_float8_training(nn.Sequential(nn.Linear(32, 32), model))
    assert graphrt.quantization_state(model) is state


def test_the_way_back_gives_the_model_it_was():
    model: Any = make_net()
    train(model, lambda model, x: model(x), num_steps=2)
    parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    linear = model.blocks[0].up
    assert graphrt.convert_from_float8_training(model) is model
    assert model.blocks[0].up is linear
    assert all(type(module) is not graphrt.Float8Linear for module in model.modules())
    assert linear.__dict__.keys() == nn.Linear(1, 1).__dict__.keys()
    assert_same_values({name: p.detach() for name, p in model.named_parameters()}, parameters)
    with pytest.raises(ValueError, match="convert_to_float8_training"):
        graphrt.quantization_state(model)
    with pytest.raises(ValueError, match="holds no Float8Linear"):
        graphrt.convert_from_float8_training(model)
    with graphrt.fp8_autocast():
        inside = model(make_batch(0))
    assert_same_values({"y": inside.detach()}, {"y": model(make_batch(0)).detach()})


def test_converting_again_after_the_way_back_starts_anew():
    model = make_net()
    train(model, lambda model, x: model(x), num_steps=2)
    again = graphrt.convert_to_float8_training(graphrt.convert_from_float8_training(model), recipe=RECIPE)
    fresh = make_net()
    fresh.load_state_dict(again.state_dict())
    assert_same_trajectory(train(again, lambda model, x: model(x)), train(fresh, lambda model, x: model(x)))


def test_the_state_of_a_model_converted_back_is_gone():
    from graphrt.state import registered_states

    model = make_net()
    serial = graphrt.quantization_state(model).serial
    graphrt.convert_from_float8_training(model)
    gc.collect()
    assert serial not in [state.serial for state in registered_states()]


def test_parts_converted_separately_have_no_single_state():
    model = nn.Sequential(make_net(1), make_net(1))
    with pytest.raises(ValueError, match="2 quantization states"):
        graphrt.quantization_state(model)
    assert graphrt.quantization_state(model[0]) is not graphrt.quantization_state(model[1])


def test_a_model_on_meta_is_converted_and_filled_later():
    with torch.device("meta"):
        model = Net()
    graphrt.convert_to_float8_training(model, recipe=RECIPE)
    state = graphrt.quantization_state(model)
    assert next(model.parameters()).is_meta
    assert state.device.type == "cpu"
    model.to_empty(device="cpu")
    reference = make_net(seed=3)
    model.load_state_dict(reference.state_dict())
    assert graphrt.quantization_state(model) is state
    assert_same_trajectory(train(model, lambda model, x: model(x)), train(reference, lambda model, x: model(x)))


def test_a_converted_model_goes_to_meta_and_back():
    model = make_net()
    train(model, lambda model, x: model(x), num_steps=2)
    weights = copy.deepcopy(model.state_dict())
    expected = copy.deepcopy(model)
    model.to("meta").to_empty(device="cpu").load_state_dict(weights)
    assert_same_trajectory(train(model, lambda model, x: model(x)), train(expected, lambda model, x: model(x)))
    assert counts(graphrt.quantization_state(model)) == (2 + NUM_STEPS, 2 + NUM_STEPS)


@pytest.mark.parametrize("wrapper", ["DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DataParallel"])
def test_a_wrapped_model_is_refused_by_name(wrapper):
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = Net()

    Wrapped.__name__ = wrapper
    with pytest.raises(RecipeError, match=rf"wrapped in {wrapper}.*not supported yet"):
        graphrt.convert_to_float8_training(nn.Sequential(Wrapped()))


def test_data_parallel_itself_is_refused():
    with pytest.raises(RecipeError, match="DataParallel"):
        graphrt.convert_to_float8_training(nn.DataParallel(Net()))


def test_a_transformer_layer_trains_with_its_attention_left_plain():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
    graphrt.convert_to_float8_training(layer, recipe=RECIPE)
    assert graphrt.conversion_report(layer).converted == ("linear1", "linear2")
    trajectory = train(layer, lambda model, x: model(x), shape=(2, 8, 32))
    assert int(trajectory[-1]["updates"][1]) == NUM_STEPS
