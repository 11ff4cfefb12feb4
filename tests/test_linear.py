"""A converted linear: three FP8 GEMMs inside a region, a plain nn.Linear outside."""

import copy
import io
import itertools
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training import (
    NUM_STEPS,
    RECIPE,
    CastLog,
    Net,
    assert_same_trajectory,
    assert_same_values,
    counts,
    descend,
    grads,
    make_batch,
    make_net,
    same_bits,
    state_values,
    train,
)

import graphrt
from graphrt import kernels
from graphrt.recipe import FP8_MAX

MIN_OUTPUT_SQNR_DB, MIN_GRADIENT_SQNR_DB = 18.0, 17.0
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def sqnr_db(reference: Tensor, actual: Tensor) -> float:
    reference, actual = reference.detach().double(), actual.detach().double()
    return float(20 * torch.log10(reference.norm() / (reference - actual).norm()))


def make_linear(in_features: int = 32, out_features: int = 48, *, bias: bool = True, seed: int = 0, **factory: Any) -> Any:
    torch.manual_seed(seed)
    linear = nn.Linear(in_features, out_features, bias=bias).to(**factory) if factory else nn.Linear(in_features, out_features, bias=bias)
    return graphrt.convert_to_float8_training(linear, recipe=RECIPE)


def plain_copy(model: nn.Module) -> Any:
    return graphrt.convert_from_float8_training(copy.deepcopy(model))


def draw(*shape: int, seed: int = 0, device: Any = "cpu", dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device=device, dtype=dtype)


def calibrate(model: nn.Module, x: Tensor, dy: Tensor) -> None:
    with graphrt.fp8_autocast(calibrating=True):
        y = model(x)
    y.backward(dy)
    graphrt.quantization_state(model).flush()
    model.zero_grad()


def run(model: nn.Module, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    x = x.detach().requires_grad_()
    with graphrt.fp8_autocast():
        y = model(x)
    y.backward(dy)
    assert x.grad is not None
    result = {"y": y.detach(), "x.grad": x.grad, **grads(model)}
    model.zero_grad()
    return result


# -- numerics


@DTYPES
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("shape", [(64,), (4, 24), (2, 3, 5), (7,), ()], ids=str)
def test_signal_to_noise_against_the_unconverted_linear(shape, bias, dtype, device):
    linear = make_linear(64, 96, bias=bias, device=device, dtype=dtype)
    plain = plain_copy(linear)
    x, dy = draw(*shape, 64, device=device, dtype=dtype), draw(*shape, 96, seed=1, device=device, dtype=dtype)
    calibrate(linear, x.requires_grad_(), dy)
    actual, expected = run(linear, x, dy), run(plain, x, dy)
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        assert value.dtype is expected[name].dtype is dtype
        assert value.shape == expected[name].shape
        assert not same_bits(value, expected[name]) or name == "bias.grad"
        assert sqnr_db(expected[name], value) >= (MIN_OUTPUT_SQNR_DB if name == "y" else MIN_GRADIENT_SQNR_DB), name


@pytest.mark.parametrize("tokens", [1, 3, 15, 16, 17, 31, 33])
def test_any_token_count_gives_the_gemms_written_out(tokens, device):
    """The result is the product of the quantized operands, whatever padding the weight gradient needs."""
    linear = make_linear(device=device)
    x, dy = draw(tokens, 32, device=device), draw(tokens, 48, seed=1, device=device)
    calibrate(linear, x.requires_grad_(), dy)
    scale = [linear.quantization_state.scale(kind).clone() for kind in ("input", "weight", "grad_output")]

    def quantized(t: Tensor, i: int, dtype: torch.dtype) -> Tensor:
        return (t.detach() * scale[i]).clamp(-FP8_MAX[dtype], FP8_MAX[dtype]).to(dtype).double() / scale[i].double()

    q_x, q_w = quantized(x, 0, torch.float8_e4m3fn), quantized(linear.weight, 1, torch.float8_e4m3fn)
    q_dy = quantized(dy, 2, torch.float8_e5m2)
    result = run(linear, x, dy)
    tolerance: dict[str, Any] = {"rtol": 2e-3, "atol": 2e-3} if device.type == "cuda" else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(result["y"].double(), q_x @ q_w.t() + linear.bias.double(), **tolerance)
    torch.testing.assert_close(result["x.grad"].double(), q_dy @ q_w, **tolerance)
    torch.testing.assert_close(result["weight.grad"].double(), q_dy.t() @ q_x, **tolerance)
    torch.testing.assert_close(result["bias.grad"], dy.sum(0))


@pytest.mark.parametrize("fp8_format", graphrt.Format)
def test_the_recipes_format_decides_the_dtypes(fp8_format):
    linear = graphrt.convert_to_float8_training(nn.Linear(32, 48), recipe=graphrt.DelayedScaling(fp8_format=fp8_format))
    dtypes = []
    quantize = kernels.quantize

    def logged(x: Tensor, scale: Tensor, scale_inv: Tensor, slot: int, dtype: torch.dtype, **options: Any) -> Any:
        dtypes.append((slot, dtype))
        return quantize(x, scale, scale_inv, slot, dtype, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "quantize", logged)
        run(linear, draw(16, 32), draw(16, 48))
    gradient = torch.float8_e5m2 if fp8_format is graphrt.Format.HYBRID else torch.float8_e4m3fn
    assert sorted(dtypes, key=str) == sorted([(0, torch.float8_e4m3fn), (1, torch.float8_e4m3fn), (2, gradient)], key=str)


def test_margin_leaves_headroom():
    linear = graphrt.convert_to_float8_training(nn.Linear(32, 48), recipe=graphrt.DelayedScaling(margin=3))
    x = draw(16, 32)
    run(linear, x, draw(16, 48))
    assert same_bits(graphrt.quantization_state(linear).scale("input"), torch.tensor(448.0) / x.abs().max() / 8)


def test_outside_a_region_a_converted_linear_is_a_plain_one(device):
    linear = make_linear(device=device)
    plain = plain_copy(linear)
    x, dy = draw(5, 32, device=device), draw(5, 48, seed=1, device=device)
    before = state_values(linear.quantization_state)
    results = []
    for model in (linear, plain):
        leaf = x.clone().requires_grad_()
        y = model(leaf)
        y.backward(dy)
        results.append({"y": y.detach(), "x.grad": leaf.grad, **grads(model)})
    assert_same_values(results[0], results[1])
    assert_same_values(state_values(linear.quantization_state), before)


def test_an_fp8_tensor_keeps_the_scale_inv_it_was_made_with():
    linear = make_linear()
    x, dy = draw(16, 32), draw(16, 48, seed=1)
    expected = run(linear, x, dy)
    other = make_linear()
    leaf = x.clone().requires_grad_()
    with graphrt.fp8_autocast():
        y = other(leaf)
    with graphrt.fp8_autocast():
        other(100 * x)
    y.backward(dy)
    assert leaf.grad is not None
    assert same_bits(leaf.grad, expected["x.grad"])
    assert same_bits(other.weight.grad, expected["weight.grad"])


# -- shapes and kinds of use


@pytest.mark.parametrize("shape", [(0,), (0, 4), (3, 0, 2)], ids=str)
def test_an_empty_batch_gives_empty_outputs_and_zero_gradients(shape, device):
    linear = make_linear(device=device)
    x = torch.zeros(*shape, 32, device=device, requires_grad=True)
    with graphrt.fp8_autocast():
        y = linear(x)
    assert y.shape == (*shape, 48)
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == x.shape
    assert linear.weight.grad.eq(0).all()
    state = linear.quantization_state
    state.flush()
    assert same_bits(state.amax_history("input").cpu(), torch.zeros(3))
    assert state.scale("input") == 1


@pytest.mark.parametrize("calibrating", [False, True])
@pytest.mark.parametrize("shape", [(16, 32), (2, 8, 32), (32,)], ids=str)
def test_the_output_may_be_edited_in_place_like_a_linears(shape, calibrating):
    def gradient(model: nn.Module) -> dict[str, Tensor]:
        x = draw(*shape).requires_grad_()
        with graphrt.fp8_autocast(calibrating=calibrating):
            y = model(x)
            y += 1
            y.relu_()
        y.sum().backward()
        assert x.grad is not None
        return {"y": y.detach(), "x.grad": x.grad, **grads(model)}

    linear = make_linear()
    in_place = gradient(linear)
    x = draw(*shape).requires_grad_()
    other = make_linear()
    with graphrt.fp8_autocast(calibrating=calibrating):
        y = (other(x) + 1).relu()
    y.sum().backward()
    assert x.grad is not None
    assert_same_values(in_place, {"y": y.detach(), "x.grad": x.grad, **grads(other)})


def test_non_contiguous_inputs_and_gradients_give_the_same_as_contiguous_ones():
    linear = make_linear()
    x, dy = draw(32, 24).t(), draw(48, 24, seed=1).t()
    assert not x.is_contiguous()
    strided, contiguous = run(linear, x, dy), run(make_linear(), x.contiguous(), dy.contiguous())
    # Not quantized, and summed in the order of memory.
    torch.testing.assert_close(strided.pop("bias.grad"), contiguous.pop("bias.grad"))
    assert_same_values(strided, contiguous)


def test_an_expanded_gradient_is_quantized_like_a_full_one():
    linear, other = make_linear(), make_linear()
    x = draw(16, 32).requires_grad_()
    with graphrt.fp8_autocast():
        y = linear(x)
    y.sum().backward()
    assert_same_values(grads(linear), {k: v for k, v in run(other, x, torch.ones(16, 48)).items() if k not in ("y", "x.grad")})


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(48, 32)
        self.head = nn.Linear(32, 48, bias=False)
        self.also = nn.Linear(32, 48, bias=False)
        self.head.weight = self.embed.weight
        self.also.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x) + self.also(2 * x)


def test_tied_weights_stay_tied_and_both_linears_have_slots_of_their_own():
    torch.manual_seed(0)
    model: Any = graphrt.convert_to_float8_training(Tied(), recipe=RECIPE)
    assert model.head.weight is model.also.weight is model.embed.weight
    state = graphrt.quantization_state(model)
    assert set(state.slots) == {f"{name}.{kind}" for name in ("head", "also") for kind in ("input", "weight", "grad_output")}
    for step in range(NUM_STEPS):
        x = make_batch(step).requires_grad_()
        with graphrt.fp8_autocast():
            y = model(x)
        y.square().mean().backward()
        descend(model)
    state.flush()
    assert counts(state) == (NUM_STEPS, NUM_STEPS)
    assert same_bits(state.amax_history("head.weight"), state.amax_history("also.weight"))
    assert same_bits(2 * state.amax_history("head.input"), state.amax_history("also.input"))


def test_a_module_used_twice_merges_its_amaxes_and_updates_once():
    linear = make_linear(32, 32)
    state = linear.quantization_state
    small, large = draw(16, 32), 5 * draw(16, 32, seed=1)
    for x, y in ((small, large), (large, small)):
        with graphrt.fp8_autocast():
            out = linear(x), linear(y)
        (out[0].sum() + 3 * out[1].sum()).backward()
        state.flush()
        assert state.amax_history("input")[-1] == large.abs().max()
        assert state.amax_history("grad_output")[-1] == 3
    assert counts(state) == (2, 2)


def test_a_linear_under_two_names_is_converted_once():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(32, 32)
            self.b = self.a

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x))

    model: Any = graphrt.convert_to_float8_training(Twice(), recipe=RECIPE)
    assert model.a is model.b
    assert graphrt.quantization_state(model).slots == ("a.input", "a.weight", "a.grad_output")
    run(model, draw(16, 32), draw(16, 32, seed=1))


@pytest.mark.parametrize(
    ("x_needs", "w_needs", "b_needs"), [need for need in itertools.product([True, False], repeat=3) if any(need)], ids=str
)
def test_only_what_needs_a_gradient_gets_one_and_it_is_the_same(x_needs, w_needs, b_needs):
    expected = run(make_linear(), draw(16, 32), draw(16, 48, seed=1))
    linear = make_linear()
    linear.weight.requires_grad_(w_needs)
    linear.bias.requires_grad_(b_needs)
    x = draw(16, 32).requires_grad_(x_needs)
    log = CastLog()
    with graphrt.fp8_autocast():
        y = linear(x)
    with log.open() as casts:
        y.backward(draw(16, 48, seed=1))
    assert len(casts) == int(x_needs or w_needs)
    assert linear.quantization_state.backward_update_requested == (x_needs or w_needs)
    for tensor, name, needs in ((x, "x.grad", x_needs), (linear.weight, "weight.grad", w_needs), (linear.bias, "bias.grad", b_needs)):
        assert (tensor.grad is not None) == needs
        assert not needs or same_bits(tensor.grad, expected[name])


def test_a_frozen_base_in_a_training_step_calibrates():
    linear = make_linear()
    linear.requires_grad_(False)
    linear.eval()
    with graphrt.fp8_autocast():
        y = linear(draw(16, 32))
    assert not y.requires_grad
    assert counts(linear.quantization_state) == (1, 0)
    assert linear.quantization_state.scale("input") != 1
    with graphrt.fp8_autocast(calibrating=True):
        assert not linear(draw(16, 32)).requires_grad
    assert counts(linear.quantization_state) == (2, 0)


@DTYPES
def test_weight_gradients_have_the_parameters_dtype_under_autocast(dtype):
    if dtype is torch.float16:
        pytest.skip("parameters in fp16 are not mixed with bf16 autocast here")
    linear = make_linear(dtype=dtype)
    x = draw(16, 32, dtype=torch.float32).requires_grad_()
    with graphrt.fp8_autocast(), torch.autocast("cpu", torch.bfloat16):
        y = linear(x)
    assert y.dtype is torch.bfloat16
    y.float().square().mean().backward()
    assert linear.weight.grad.dtype is linear.bias.grad.dtype is dtype
    assert x.grad is not None
    assert x.grad.dtype is torch.float32


def test_under_autocast_the_signal_to_noise_holds():
    linear = make_linear(64, 96)
    plain = plain_copy(linear)
    x, dy = draw(48, 64), draw(48, 96, seed=1, dtype=torch.bfloat16)
    results = []
    with torch.autocast("cpu", torch.bfloat16):
        calibrate(linear, x.requires_grad_(), dy)
    for model in (plain, linear):
        leaf = x.detach().requires_grad_()
        with graphrt.fp8_autocast(), torch.autocast("cpu", torch.bfloat16):
            y = model(leaf)
        y.backward(dy)
        results.append({"y": y.detach(), "x.grad": leaf.grad, **grads(model)})
    for name, value in results[0].items():
        assert sqnr_db(value, results[1][name]) >= MIN_GRADIENT_SQNR_DB
        assert value.dtype is results[1][name].dtype


def test_an_input_of_another_dtype_is_refused_by_name():
    linear = make_linear(dtype=torch.bfloat16)
    with graphrt.fp8_autocast(), pytest.raises(ValueError, match=r"input of torch.float32 with weights of torch.bfloat16.*autocast"):
        linear(draw(16, 32))


def test_an_input_of_another_width_is_refused():
    linear = make_linear()
    with graphrt.fp8_autocast(), pytest.raises((ValueError, RuntimeError), match=r"K = 16 .* K = 32"):
        linear(draw(16, 16))


def test_tensors_on_two_devices_are_refused_by_name():
    linear = make_linear()
    with graphrt.fp8_autocast(), pytest.raises(ValueError, match="input on meta with its weight on cpu"):
        linear(torch.empty(16, 32, device="meta"))


# -- weights are quantized once a step


def casts_of_weight(linear: Any, log: CastLog) -> int:
    return sum(slot == linear.slots.weight for slot, *_ in log.casts)


def test_the_weight_is_quantized_once_a_region():
    linear = make_linear()
    log = CastLog()
    with log.open():
        with graphrt.fp8_autocast():
            for _ in range(3):
                linear(draw(16, 32))
        assert casts_of_weight(linear, log) == 1
        with graphrt.fp8_autocast():
            linear(draw(16, 32))
        assert casts_of_weight(linear, log) == 2


EDITS = {
    "in place": lambda linear: linear.weight.mul_(2),
    "clamp": lambda linear: linear.weight.clamp_(-0.01, 0.01),
    "load_state_dict": lambda linear: linear.load_state_dict({k: v.clone() * 2 for k, v in linear.state_dict().items()}),
    "assigned": lambda linear: linear.load_state_dict({k: v.clone() * 2 for k, v in linear.state_dict().items()}, assign=True),
    "data": lambda linear: setattr(linear.weight, "data", linear.weight.data * 2),
    "rebound": lambda linear: setattr(linear, "weight", nn.Parameter(linear.weight * 2)),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS.keys())
@pytest.mark.parametrize("within", [False, True], ids=["between regions", "within one"])
@torch.no_grad()
def test_an_edited_weight_is_quantized_anew(edit, within):
    linear = make_linear()
    x = draw(16, 32)
    with graphrt.fp8_autocast():
        before = linear(x)
        if within:
            edit(linear)
            after = linear(x)
    if not within:
        edit(linear)
        with graphrt.fp8_autocast():
            after = linear(x)
    assert not same_bits(before, after)
    fresh = graphrt.convert_to_float8_training(plain_copy(linear), recipe=RECIPE)
    with graphrt.fp8_autocast():
        assert same_bits(fresh(x), after)


def test_an_evaluation_in_a_training_region_does_not_hide_the_weights_amax():
    linear = make_linear()
    with graphrt.fp8_autocast():
        with torch.no_grad():
            linear(draw(16, 32))
        linear(draw(16, 32))
    assert linear.quantization_state.amax_history("weight")[-1] == linear.weight.detach().abs().max()


def test_an_evaluation_after_another_layer_has_trained_does_not_hide_the_weights_amax():
    model = graphrt.convert_to_float8_training(nn.ModuleList([nn.Linear(32, 32), nn.Linear(32, 32)]), recipe=RECIPE)
    x = draw(16, 32)
    with graphrt.fp8_autocast():
        model[0](x)
        with torch.no_grad():
            model[1](x)
        model[1](x)
    state = graphrt.quantization_state(model)
    for i in range(2):
        assert state.amax_history(f"{i}.weight")[-1] == model[i].weight.detach().abs().max()


def test_weights_that_take_each_others_place_in_memory_are_told_apart():
    linear = make_linear()
    x, weight = draw(64, 32), linear.weight.detach()
    norms = []
    with graphrt.fp8_autocast():
        for factor in (1.0, 2.0, 4.0):
            replaced = {"weight": weight * factor}
            norms.append(torch.func.functional_call(linear, replaced, (x,)).norm().item())
            del replaced
    assert norms[1] == pytest.approx(2 * norms[0], rel=0.05)
    assert norms[2] == pytest.approx(4 * norms[0], rel=0.05)


def test_a_parametrized_weight_is_computed_once_a_forward():
    class Masked(nn.Module):
        num_calls = 0

        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            self.num_calls += 1
            return torch.nn.functional.dropout(weight, 0.5)

    model = graphrt.convert_to_float8_training(nn.Sequential(nn.Linear(64, 32, bias=False)), recipe=RECIPE)
    linear = model[0]
    nn.init.ones_(linear.weight)  # nothing of it underflows
    torch.nn.utils.parametrize.register_parametrization(linear, "weight", masked := Masked())
    masked.num_calls = 0
    with graphrt.fp8_autocast():
        y = model(torch.eye(64))  # each row of y is a column of the weight
    y.sum().backward()
    assert masked.num_calls == 1
    original = linear.parametrizations.weight.original
    assert torch.equal(original.grad != 0, y.detach().t() != 0)


# -- copies, files, moves


@pytest.mark.parametrize(
    "copied",
    [
        copy.deepcopy,
        lambda model: pickle.loads(pickle.dumps(model)),
        lambda model: torch.load(save(model), weights_only=False),
    ],
    ids=["deepcopy", "pickle", "torch.save"],
)
@pytest.mark.parametrize("pending", [False, True])
def test_a_copied_models_state_updates_like_the_originals(copied, pending):
    model = make_net()
    train(model, lambda model, x: model(x), num_steps=2)
    if pending:
        with graphrt.fp8_autocast():
            loss = model(make_batch(7)).square().mean()
        loss.backward()
        model.zero_grad()
    other = copied(model)
    state, state_of_other = graphrt.quantization_state(model), graphrt.quantization_state(other)
    assert state_of_other is not state
    assert len({id(module.quantization_state) for module in other.modules() if isinstance(module, graphrt.Float8Linear)}) == 1
    assert_same_values(state_values(state_of_other), state_values(state))
    assert graphrt.conversion_report(other) == graphrt.conversion_report(model)
    first = train(model, lambda model, x: model(x))
    assert_same_trajectory(train(other, lambda model, x: model(x)), first)
    assert counts(state) == counts(state_of_other)


def save(value: Any) -> io.BytesIO:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return buffer


def test_state_dict_keys_are_those_before_the_conversion_and_load_either_way():
    torch.manual_seed(0)
    plain = Net()
    keys = list(plain.state_dict())
    model = make_net(seed=5)
    assert list(model.state_dict()) == keys
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert model.load_state_dict(plain.state_dict()).missing_keys == []
    assert_same_values(dict(model.state_dict()), dict(plain.state_dict()))
    model = make_net(seed=6)
    plain.load_state_dict(torch.load(save(model.state_dict()), weights_only=True))
    assert_same_values(dict(model.state_dict()), dict(plain.state_dict()))


@pytest.mark.parametrize(
    "move",
    [
        lambda m: m.half(),
        lambda m: m.to(torch.bfloat16),
        lambda m: m.double().float(),
        lambda m: m.to("cpu", torch.float16),
        lambda m: m.cpu(),
    ],
)
def test_casting_a_model_leaves_its_scales_in_fp32(move):
    model = make_net()
    train(model, lambda model, x: model(x), num_steps=2)
    state = graphrt.quantization_state(model)
    before = state_values(state)
    move(model)
    assert graphrt.quantization_state(model) is state
    assert_same_values(state_values(state), before)
    dtype = next(model.parameters()).dtype
    assert len(train(model, lambda model, x: model(x), dtype=dtype)) == NUM_STEPS + 1


@pytest.mark.gpu
def test_a_model_moved_to_the_gpu_and_back_takes_its_scales_along():
    model = make_net()
    train(model, lambda model, x: model(x), num_steps=2)
    before = state_values(graphrt.quantization_state(model))
    model.cuda()
    state = graphrt.quantization_state(model)
    assert state.device.type == "cuda"
    assert_same_values({name: value.cpu() for name, value in state_values(state).items()}, before)
    train(model, lambda model, x: model(x), device="cuda")
    model.cpu()
    train(model, lambda model, x: model(x))
    assert counts(state) == (2 + 2 * NUM_STEPS, 2 + 2 * NUM_STEPS)


# -- hooks, printing


def test_hooks_of_every_kind_still_run():
    linear = make_linear()
    seen = []
    linear.register_forward_pre_hook(lambda *_: seen.append("pre"))
    linear.register_forward_hook(lambda *_: seen.append("forward"))
    linear.register_full_backward_hook(lambda *_: seen.append("backward"))
    linear.register_full_backward_pre_hook(lambda *_: seen.append("backward pre"))
    linear.weight.register_hook(lambda _grad: seen.append("weight"))
    linear.weight.register_post_accumulate_grad_hook(lambda _p: seen.append("accumulated"))
    hooked = run(linear, draw(16, 32), draw(16, 48, seed=1))
    assert seen == ["pre", "forward", "backward pre", "weight", "accumulated", "backward"]
    assert_same_values(hooked, run(make_linear(), draw(16, 32), draw(16, 48, seed=1)))


def test_hooks_registered_before_the_conversion_survive_it():
    linear = nn.Linear(32, 48)
    seen = []
    linear.register_forward_hook(lambda *_: seen.append(1))
    run(graphrt.convert_to_float8_training(linear), draw(16, 32), draw(16, 48))
    assert seen == [1]


def test_functional_call_with_other_weights_uses_them():
    linear, other = make_linear(), make_linear(seed=1)
    x = draw(16, 32)
    parameters = {name: p.detach().clone() for name, p in other.named_parameters()}
    with graphrt.fp8_autocast():
        actual = torch.func.functional_call(linear, parameters, (x,))
    with graphrt.fp8_autocast():
        assert same_bits(actual, other(x))


def test_the_format_is_in_the_representation():
    assert "fp8=hybrid" in repr(make_linear())


def test_a_second_derivative_is_refused():
    linear = make_linear()
    x = draw(16, 32).requires_grad_()
    with graphrt.fp8_autocast():
        y = linear(x).square().mean()
    (gradient,) = torch.autograd.grad(y, x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_saturation_is_counted_slot_by_slot():
    linear = make_linear()
    state = linear.quantization_state
    x = draw(16, 32)
    x[0, 0], x[0, 1], x[0, 2] = 1e4, -1e4, 1e-6
    assert not state.is_counting_saturation
    with state.count_saturation() as found:
        run(linear, x, draw(16, 48))
    assert set(found) == {"input", "weight", "grad_output"}
    assert found["input"].num_elements == 16 * 32
    assert found["input"].num_saturated == 2
    assert found["input"].num_underflowed >= 1
    assert found["weight"].num_saturated == 0
    assert not state.is_counting_saturation


@pytest.mark.parametrize("is_fast", [True, False])
def test_the_recipe_says_how_gradients_accumulate(is_fast, monkeypatch):
    flags = []
    scaled_mm = kernels.scaled_mm

    def watched(*args, fast_accum, **options):
        flags.append(fast_accum)
        return scaled_mm(*args, fast_accum=fast_accum, **options)

    monkeypatch.setattr(kernels, "scaled_mm", watched)
    model = nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 16))
    graphrt.convert_to_float8_training(model, recipe=graphrt.DelayedScaling(backward_fast_accum=is_fast))
    with graphrt.fp8_autocast():
        loss = model(torch.randn(16, 32, requires_grad=True)).square().mean()
    loss.backward()
    assert flags == [True, True, *[is_fast] * 4]
