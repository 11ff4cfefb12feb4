"""Fused layers equal what they fuse: outputs, gradients, amaxes and updates, checkpointed or not, on any kind of linear.

The composition is written here from torch's own operations around the same linears, called as modules.
"""

import copy
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from training import KINDS, assert_same_values, counts, plainly, state_values

import graphrt
from graphrt import nn as fused
from graphrt.linear import forget_weights
from graphrt.nn import feed_forward
from graphrt.nn import gemm as gemms

BATCH, TOKENS, WIDTH, HEADS, FFN = 2, 24, 64, 2, 48
EPS = 1e-5
MODES = ("plain", "outside", "calibrating", "fp8")

Values = dict[str, Tensor]
Layer = Callable[[Any, Tensor, Tensor], tuple[Tensor, ...]]


class Parts(nn.Module):
    """The parameters of one half of a block; its linears are ``first`` and ``second``."""

    cos: Tensor
    sin: Tensor

    def __init__(self, width: int = WIDTH, ffn: int = FFN, *, bias: bool = False, heads: int = HEADS) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.Parameter(1 + 0.2 * torch.randn(width))
        self.qkv = nn.Linear(width, 3 * width, bias=bias)
        self.w13, self.w2 = nn.Linear(width, 2 * ffn, bias=bias), nn.Linear(ffn, width, bias=bias)
        angles = torch.outer(torch.arange(TOKENS + 5), 1.0 / 10 ** torch.linspace(0, 3, width // heads // 2))
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())


def _norm(parts: Parts, residual: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    stream = residual + delta
    return stream, F.rms_norm(stream, stream.shape[-1:], parts.norm.to(stream.dtype), EPS)


def composed_norm(parts: Parts, residual: Tensor, delta: Tensor) -> tuple[Tensor, ...]:
    return _norm(parts, residual, delta)


def composed_qkv(parts: Parts, residual: Tensor, delta: Tensor) -> tuple[Tensor, ...]:
    stream, n = _norm(parts, residual, delta)
    query, key, value = (x.unflatten(-1, (parts.heads, -1)).transpose(1, 2) for x in parts.qkv(n).chunk(3, dim=-1))
    cos, sin = parts.cos[: residual.shape[1]], parts.sin[: residual.shape[1]]

    def turn(x: Tensor) -> Tensor:
        a, b = x.float().chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)

    return stream, turn(query), turn(key), value


def composed_ffn(parts: Parts, residual: Tensor, delta: Tensor) -> tuple[Tensor, ...]:
    stream, n = _norm(parts, residual, delta)
    gate, up = parts.w13(n).chunk(2, dim=-1)
    return stream, parts.w2((F.silu(gate.float()) * up.float()).to(n.dtype))


def fused_norm(parts: Parts, residual: Tensor, delta: Tensor) -> tuple[Tensor, ...]:
    return fused.residual_rms_norm(residual, delta, parts.norm, EPS)


def fused_qkv(parts: Parts, residual: Tensor, delta: Tensor) -> tuple[Tensor, ...]:
    return fused.rotary_qkv(residual, delta, parts.norm, parts.qkv, parts.cos, parts.sin, parts.heads, EPS)


def fused_ffn(parts: Parts, residual: Tensor, delta: Tensor) -> tuple[Tensor, ...]:
    return fused.swiglu_feed_forward(residual, delta, parts.norm, parts.w13, parts.w2, EPS)


def fused_block(parts: Parts, residual: Tensor, delta: Tensor) -> tuple[Tensor, ...]:
    stream, query, key, value = fused_qkv(parts, residual, delta)
    return fused_ffn(parts, stream, (query * key.mul(0.1) + value).transpose(1, 2).reshape(stream.shape))


LAYERS: dict[str, tuple[Layer, Layer, tuple[str, ...]]] = {
    "rotary_qkv": (fused_qkv, composed_qkv, ("qkv",)),
    "swiglu_feed_forward": (fused_ffn, composed_ffn, ("w13", "w2")),
}
every_layer = pytest.mark.parametrize("layer", LAYERS)
every_mode = pytest.mark.parametrize("mode", MODES)


def make_parts(
    mode: str,
    device: torch.device | str = "cpu",
    linears: tuple[str, ...] = ("qkv", "w13", "w2"),
    recipe: graphrt.DelayedScaling | None = None,
    **sizes: Any,
) -> Parts:
    """Parts whose scales, if they have some, come from a calibrating step of the composition."""
    torch.manual_seed(0)
    parts = Parts(**sizes).to(device)
    if mode == "plain":
        return parts
    recipe = recipe or graphrt.DelayedScaling()
    graphrt.convert_to_float8_training(parts, recipe=recipe, module_filter_fn=lambda _, name: name in linears)
    width = parts.norm.numel()
    residual, delta = make_inputs(1, torch.float32, device, width)
    with graphrt.fp8_autocast(calibrating=True):
        outputs = [*(composed_qkv(parts, residual, delta) if "qkv" in linears else ())]
        outputs += [*(composed_ffn(parts, residual, delta) if "w2" in linears else ())]
        _loss(outputs).backward()
    graphrt.quantization_state(parts).flush()
    parts.zero_grad()
    return parts


def make_inputs(seed: int, dtype: torch.dtype, device: torch.device | str, width: int = WIDTH) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(BATCH, TOKENS, width, generator=generator).to(device, dtype).requires_grad_() for _ in range(2))  # pyright: ignore


def _loss(outputs: Any) -> Tensor:
    """Another random weight for each element, so that every gradient is a full one."""
    generator = torch.Generator().manual_seed(9)
    return sum((y.float() * torch.randn(y.shape, generator=generator).to(y.device)).sum() for y in outputs)  # pyright: ignore


def region(mode: str) -> Any:
    return graphrt.fp8_autocast(enabled=mode in ("calibrating", "fp8"), calibrating=mode == "calibrating")


def run(
    layer: Layer, parts: Parts, mode: str, dtype: torch.dtype, device: torch.device | str = "cpu", kind: Callable[..., Any] = plainly
) -> tuple[Values, Values]:
    """One step on a copy of ``parts``; (outputs and gradients, the state before its flush)."""
    parts = copy.deepcopy(parts)
    residual, delta = make_inputs(2, dtype, device, parts.norm.numel())
    with region(mode), torch.autocast(str(torch.device(device).type), dtype=torch.bfloat16, enabled=dtype is torch.bfloat16):
        outputs = kind(lambda a, b: layer(parts, a, b), residual, delta)
    assert all(y.dtype is dtype for y in outputs)
    _loss(outputs).backward()
    found = {f"output {i}": y.detach() for i, y in enumerate(outputs)}
    found.update({"residual.grad": residual.grad, "delta.grad": delta.grad})  # pyright: ignore
    found.update({f"{name}.grad": p.grad for name, p in parts.named_parameters() if p.grad is not None})
    if mode == "plain":
        return found, {}
    state = graphrt.quantization_state(parts)
    before = counts(state)
    state.flush()
    is_training = mode in ("calibrating", "fp8")
    assert before == (1 + is_training, 1)  # the calibrating step made the first of each
    assert counts(state) == (1 + is_training, 1 + is_training)
    return found, state_values(state)


def sqnr(actual: Tensor, expected: Tensor) -> float:
    """Signal to noise in dB; infinite for equal tensors."""
    signal, noise = expected.double().square().sum().item(), (actual.double() - expected.double()).square().sum().item()
    return math.inf if noise == 0 else 10 * math.log10(signal / noise)


def assert_close_values(actual: Values, expected: Values, least: float) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert actual[name].shape == value.shape, name
        assert actual[name].dtype is value.dtype, name
    ratios = {name: sqnr(actual[name], value) for name, value in expected.items()}
    print({name: round(ratio, 1) for name, ratio in ratios.items()})
    assert min(ratios.values()) > least, ratios


def least_sqnr(mode: str, dtype: torch.dtype) -> float:
    """fp32 differs in the order of sums; bf16 in roundings, the norm's weight among them; in FP8 those move values to their neighbours."""
    if mode == "fp8":
        return 26.0 if dtype is torch.bfloat16 else 45.0
    return 38.0 if dtype is torch.bfloat16 else 110.0


def skip_unless_kernels_take(dtype: torch.dtype, device: torch.device) -> None:
    if device.type == "cuda" and dtype is not torch.bfloat16:
        pytest.skip("the CUDA kernels take bf16")


def is_fused(output: Tensor) -> bool:
    function = getattr(type(output.grad_fn), "_forward_cls", None)
    return function is not None and function.__module__.startswith("graphrt.nn.")


dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@every_layer
@every_mode
@dtypes
def test_a_fused_layer_equals_its_composition(layer, mode, dtype, device):
    skip_unless_kernels_take(dtype, device)
    run_fused, run_composed, linears = LAYERS[layer]
    parts = make_parts(mode, device, linears)
    actual, state = run(run_fused, parts, mode, dtype, device)
    expected, expected_state = run(run_composed, parts, mode, dtype, device)
    assert_close_values(actual, expected, least_sqnr(mode, dtype))
    assert state.keys() == expected_state.keys()
    if state:
        rtol = 1e-4 if dtype is torch.float32 and mode != "fp8" else 2.0**-6
        torch.testing.assert_close(state["amax_history"], expected_state["amax_history"], rtol=rtol, atol=0)
        torch.testing.assert_close(state["scale"], expected_state["scale"], rtol=rtol, atol=0)
        assert not state["amax_history"][0].any()
        assert not state["num_nonfinite"].any()


@every_layer
def test_a_layer_computes_in_fp8_only_where_it_should(layer):
    """A composition compared with itself would agree: the modes have to differ where they differ, and agree elsewhere."""
    run_fused, _, linears = LAYERS[layer]
    results = {mode: run(run_fused, make_parts(mode, "cpu", linears), mode, torch.float32)[0] for mode in MODES}
    assert_same_values(results["outside"], results["plain"])
    assert_same_values(results["calibrating"], results["plain"])
    for name in ("output 1", "delta.grad", f"{linears[0]}.weight.grad"):
        assert 15 < sqnr(results["fp8"][name], results["plain"][name]) < 45


@dtypes
def test_the_norm_equals_its_composition(dtype, device):
    parts = make_parts("plain", device)
    actual, _ = run(fused_norm, parts, "plain", dtype, device)
    expected, _ = run(composed_norm, parts, "plain", dtype, device)
    assert_close_values(actual, expected, least_sqnr("plain", dtype))


@every_layer
def test_layers_are_fused_on_bare_linears(layer):
    run_fused, run_composed, _ = LAYERS[layer]
    parts = make_parts("fp8")
    inputs = make_inputs(2, torch.float32, "cpu")
    for mode in MODES[1:]:
        with region(mode):
            assert all(is_fused(y) for y in run_fused(parts, *inputs))
            assert not any(is_fused(y) for y in run_composed(parts, *inputs)[:1])
    graphrt.quantization_state(parts).flush()


@pytest.mark.parametrize("mode", MODES[1:])
@pytest.mark.parametrize("frozen", ["norm", "qkv.weight", "w13.weight", "w2.weight"])
def test_a_frozen_parameter_gets_no_gradient_and_changes_no_other(frozen, mode):
    parts = make_parts(mode)
    expected, state = run(fused_block, parts, mode, torch.float32)
    parts.get_parameter(frozen).requires_grad_(False)
    actual, frozen_state = run(fused_block, parts, mode, torch.float32)
    assert expected.pop(f"{frozen}.grad") is not None
    assert_same_values(actual, expected)
    assert_same_values(frozen_state, state)


@every_mode
def test_without_gradients_nothing_is_recorded(mode):
    parts = make_parts(mode)
    before = {} if mode == "plain" else state_values(graphrt.quantization_state(parts))
    residual, delta = make_inputs(2, torch.float32, "cpu")
    with region(mode), torch.no_grad():
        outputs = fused_block(parts, residual, delta)
    with region(mode):
        expected = fused_block(copy.deepcopy(parts), residual, delta)
    assert all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))
    if before:
        after = state_values(graphrt.quantization_state(parts))
        names = ("scale", "amax_history", "num_updates")
        assert_same_values({name: after[name] for name in names}, {name: before[name] for name in names})


@pytest.mark.parametrize("kind", ["graphrt", "graphrt-reentrant", "torch-reentrant", "own"])
@every_mode
@dtypes
def test_checkpointing_changes_no_bit(kind, mode, dtype, device):
    skip_unless_kernels_take(dtype, device)
    parts = make_parts(mode, device)
    expected, expected_state = run(fused_block, parts, mode, dtype, device)
    actual, state = run(fused_block, parts, mode, dtype, device, KINDS[kind])
    assert_same_values(actual, expected)
    assert_same_values(state, expected_state)


# ---- who watches, or does not fit


def check_falls_back(layer: str, parts: Parts, mode: str = "fp8") -> None:
    run_fused, run_composed, _ = LAYERS[layer]
    inputs = make_inputs(2, torch.float32, "cpu", parts.norm.numel())
    with region(mode):
        assert not any(is_fused(y) for y in run_fused(copy.deepcopy(parts), *inputs))
    expected, _ = run(run_composed, parts, mode, torch.float32)
    actual, _ = run(run_fused, parts, mode, torch.float32)
    assert_close_values(actual, expected, least_sqnr(mode, torch.float32))


HOOKS: dict[str, Callable[[nn.Linear, list[str]], Any]] = {
    "forward": lambda linear, seen: linear.register_forward_hook(lambda *_: seen.append("forward")),
    "forward pre": lambda linear, seen: linear.register_forward_pre_hook(lambda *_: seen.append("forward pre")),
    "full backward": lambda linear, seen: linear.register_full_backward_hook(lambda *_: seen.append("full backward")),
    "full backward pre": lambda linear, seen: linear.register_full_backward_pre_hook(lambda *_: seen.append("full backward pre")),
}


@pytest.mark.parametrize("name", HOOKS)
@pytest.mark.parametrize(("layer", "hooked"), [("rotary_qkv", "qkv"), ("swiglu_feed_forward", "w13"), ("swiglu_feed_forward", "w2")])
def test_hooks_of_a_linear_run(layer, hooked, name):
    run_fused, _, linears = LAYERS[layer]
    parts = make_parts("fp8", "cpu", linears)
    expected, expected_state = run(run_fused, parts, "fp8", torch.float32)
    seen: list[str] = []
    handle = HOOKS[name](parts.get_submodule(hooked), seen)  # pyright: ignore
    actual, state = run(run_fused, parts, "fp8", torch.float32)
    assert seen == [name]
    assert_close_values(actual, expected, least_sqnr("fp8", torch.float32))
    torch.testing.assert_close(state["amax_history"], expected_state["amax_history"], rtol=2.0**-6, atol=0)
    handle.remove()
    with region("fp8"):
        assert all(is_fused(y) for y in run_fused(parts, *make_inputs(2, torch.float32, "cpu")))


@every_layer
@pytest.mark.parametrize("mode", ["plain", "fp8"])
def test_a_bias_is_added(layer, mode):
    check_falls_back(layer, make_parts(mode, "cpu", LAYERS[layer][2], bias=True), mode)


@every_layer
def test_odd_sizes_are_computed_as_composed(layer):
    check_falls_back(layer, make_parts("plain", width=40, ffn=20, heads=5), "plain")


def test_heads_that_the_rotation_does_not_take_are_computed_as_composed():
    for heads, width in ((8, 64), (1, 272)):
        check_falls_back("rotary_qkv", make_parts("fp8", "cpu", ("qkv",), width=width, heads=heads))


@every_layer
def test_a_subclass_of_linear_is_called(layer):
    class Other(nn.Linear):
        pass

    parts = make_parts("plain")
    for linear in (parts.qkv, parts.w2):
        linear.__class__ = Other
    check_falls_back(layer, parts, "plain")


@every_layer
def test_saturation_is_counted(layer):
    run_fused, _, linears = LAYERS[layer]
    parts = make_parts("fp8", "cpu", linears)
    state = graphrt.quantization_state(parts)
    with state.count_saturation() as seen, region("fp8"):
        outputs = run_fused(parts, *make_inputs(2, torch.float32, "cpu"))
        assert not any(is_fused(y) for y in outputs)
        _loss(outputs).backward()
    assert set(seen) == set(state.slots)
    assert seen[f"{linears[0]}.input"].num_elements == BATCH * TOKENS * WIDTH
    with region("fp8"):
        assert all(is_fused(y) for y in run_fused(parts, *make_inputs(2, torch.float32, "cpu")))


# ---- linear


@pytest.mark.parametrize("shape", [(7, 32), (2, 3, 32)], ids=str)
@dtypes
def test_a_linear_equals_torchs(shape, dtype, device):
    skip_unless_kernels_take(dtype, device)
    torch.manual_seed(0)
    module = nn.Linear(32, 48, bias=False).to(device)
    results = []
    for call in (lambda x: fused.linear(x, module), module):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(device, dtype).requires_grad_()
        module.weight.grad = None
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype is torch.bfloat16):
            y = call(x)
        _loss([y]).backward()
        results.append({"y": y.detach(), "x.grad": x.grad, "weight.grad": module.weight.grad})
    assert is_fused(fused.linear(x.detach(), module))
    assert_close_values(results[0], results[1], least_sqnr("plain", dtype))


def test_a_linear_with_bias_or_hooks_or_converted_is_called():
    x, seen = torch.randn(4, 32), []
    module = nn.Linear(32, 48)
    assert torch.equal(fused.linear(x, module), module(x))
    module = nn.Linear(32, 48, bias=False)
    module.register_forward_hook(lambda *_: seen.append(1))
    fused.linear(x, module)
    assert seen == [1]
    module = graphrt.convert_to_float8_training(nn.Linear(32, 48, bias=False))
    with graphrt.fp8_autocast():
        fused.linear(x, module).sum().backward()
    state = graphrt.quantization_state(module)
    state.flush()
    assert counts(state) == (1, 1)


# ---- embedding


def make_tokens(device: torch.device | str = "cpu", *, rows: int = 30, seed: int = 0) -> Tensor:
    """[3, 40], every token several times, none more often than a segment of the sum is long."""
    return torch.randint(rows, (3, 40), generator=torch.Generator().manual_seed(seed)).to(device)


def make_embedding(device: torch.device | str = "cpu", **options: Any) -> nn.Embedding:
    torch.manual_seed(0)
    return nn.Embedding(30, 16, **options).to(device)


def look_up(call: Callable[[Tensor], Tensor], tokens: Tensor, module: nn.Embedding) -> tuple[Tensor, Tensor]:
    """The rows, and the gradient of the table."""
    module.weight.grad = None
    rows = call(tokens)
    _loss([rows]).backward()
    assert module.weight.grad is not None
    return rows.detach(), module.weight.grad.to_dense()


@pytest.mark.parametrize("padding_idx", [None, 4])
@pytest.mark.parametrize("index_dtype", [torch.int64, torch.int32], ids=["int64", "int32"])
@dtypes
def test_an_embedding_equals_torchs(index_dtype, padding_idx, dtype, device):
    module, tokens = make_embedding(device, padding_idx=padding_idx), make_tokens(device).to(index_dtype)
    actual = look_up(lambda t: fused.embedding(t, module, dtype), tokens, module)
    assert is_fused(fused.embedding(tokens, module, dtype))
    assert actual[0].dtype is dtype
    expected = look_up(lambda t: module(t).to(dtype), tokens, module)
    assert torch.equal(actual[0], expected[0])
    assert actual[1].dtype is torch.float32
    if device.type == "cpu":
        assert torch.equal(actual[1], expected[1])
    torch.testing.assert_close(actual[1], expected[1])
    again = look_up(lambda t: fused.embedding(t, module, dtype), tokens, module)
    assert torch.equal(actual[1], again[1])


def test_an_embedding_of_other_shapes_of_tokens():
    module = make_embedding()
    for tokens in (torch.tensor(3), torch.tensor([], dtype=torch.int64), make_tokens().t(), make_tokens()[:1, :1].expand(2, 5)):
        actual = look_up(lambda t: fused.embedding(t, module), tokens, module)
        expected = look_up(module, tokens, module)
        assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_an_embedding_without_gradients_and_frozen():
    module, tokens = make_embedding(), make_tokens()
    with torch.no_grad():
        assert torch.equal(fused.embedding(tokens, module, torch.bfloat16), module(tokens).bfloat16())
    assert not fused.embedding(tokens, module.requires_grad_(False)).requires_grad


def test_an_embedding_refuses_tokens_out_of_range():
    with pytest.raises(IndexError):
        fused.embedding(torch.tensor([30]), make_embedding())


@pytest.mark.parametrize("options", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}, {"dtype": torch.bfloat16}], ids=str)
def test_an_embedding_with_other_rules_is_called(options):
    module, tokens = make_embedding(**options), make_tokens()
    assert not is_fused(fused.embedding(tokens, module))
    actual = look_up(lambda t: fused.embedding(t, module, torch.bfloat16), tokens, module)
    expected = look_up(lambda t: module(t).bfloat16(), tokens, module)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_an_embedding_with_hooks_or_of_a_subclass_is_called():
    class Other(nn.Embedding):
        pass

    module, tokens, seen = make_embedding(), make_tokens(), []
    handle = module.register_forward_hook(lambda *_: seen.append(1))
    assert not is_fused(fused.embedding(tokens, module))
    assert seen == [1]
    handle.remove()
    assert is_fused(fused.embedding(tokens, module))
    module.__class__ = Other
    assert not is_fused(fused.embedding(tokens, module))


@pytest.mark.parametrize("kind", ["graphrt", "graphrt-reentrant", "torch-reentrant"])
def test_checkpointing_an_embedding_changes_no_bit(kind):
    module, tokens = make_embedding(), make_tokens()
    scale = torch.ones(16, requires_grad=True)
    expected = look_up(lambda t: fused.embedding(t, module) * scale, tokens, module)
    actual = look_up(lambda t: KINDS[kind](lambda s: fused.embedding(t, module) * s, scale), tokens, module)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


# ---- cross-entropy


def make_head(dtype: torch.dtype, device: torch.device, classes: int = 50) -> tuple[Tensor, Tensor, Tensor]:
    """hidden [3, 8, 16] and weight, both leaves, and labels [3, 8]."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 8, 16, generator=generator).to(device, dtype).requires_grad_()
    weight = (torch.randn(16, classes, generator=generator) / 4).to(device, dtype).requires_grad_()
    return hidden, weight, torch.randint(classes, (3, 8), generator=generator).to(device)


@pytest.mark.parametrize("ignore_index", [-100, 3])
@pytest.mark.parametrize("ignored", ["none", "some", "all"])
@dtypes
def test_cross_entropy_equals_torchs(ignored, ignore_index, dtype, device):
    results = []
    for function in (fused.cross_entropy, None):
        hidden, weight, labels = make_head(dtype, device)
        labels = torch.where(labels == ignore_index, 4, labels)
        labels = labels if ignored == "none" else labels.flatten().index_fill(0, torch.arange(0, 24, 3, device=device), ignore_index)
        labels = torch.full_like(labels, ignore_index) if ignored == "all" else labels
        logits, labels = hidden @ weight, labels.view(3, 8)
        if function is None:
            loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=ignore_index)
        else:
            loss = function(logits, labels, ignore_index)
        assert loss.dtype is torch.float32
        assert loss.shape == ()
        (loss * 3).backward()
        results.append((loss.detach(), hidden.grad, weight.grad))
    if ignored == "all":
        assert results[0][0].isnan()
        assert results[1][0].isnan()
        return
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-5, atol=1e-6)
    for actual, expected in zip(results[0][1:], results[1][1:], strict=True):
        assert actual is not None
        assert expected is not None
        assert sqnr(actual, expected) > (110 if dtype is torch.float32 else 40)


@dtypes
def test_the_gradient_of_the_logits_lies_where_they_were(dtype, device):
    hidden, weight, labels = make_head(dtype, device)
    logits = hidden @ weight
    fused.cross_entropy(logits, labels).backward()
    reference = (hidden @ weight).detach().float().flatten(0, 1).requires_grad_()
    F.cross_entropy(reference, labels.flatten()).backward()
    assert reference.grad is not None
    assert sqnr(logits.detach().flatten(0, 1), reference.grad) > 40


@pytest.mark.parametrize("retain", [False, True])
def test_a_second_backward_through_cross_entropy_raises(retain, device):
    hidden, weight, labels = make_head(torch.bfloat16, device)
    loss = fused.cross_entropy(hidden @ weight, labels)
    loss.backward(retain_graph=retain)
    before = weight.grad.clone()
    with pytest.raises(RuntimeError, match="inplace operation" if retain else "second time"):
        loss.backward()
    assert torch.equal(weight.grad, before)


def test_a_node_that_kept_the_logits_is_refused_instead_of_reading_gradients(device):
    hidden, weight, labels = make_head(torch.bfloat16, device)
    logits = hidden @ weight
    penalty = logits.square().mean()  # keeps the logits, and its backward comes after that of the loss
    loss = penalty + fused.cross_entropy(logits, labels)
    with pytest.raises(RuntimeError, match="inplace operation"):
        loss.backward()


# ---- what the feed-forward computes again


@pytest.mark.parametrize("is_inside", [True, False], ids=["inside the region", "after it"])
def test_a_retained_graph_gives_the_composed_layers_gradients_twice(is_inside):
    """The forward's scales are live until the region exits, and gone after the first backward."""

    def run(layer: Layer) -> list[Tensor]:
        torch.manual_seed(0)
        parts = Parts()
        graphrt.convert_to_float8_training(parts)
        x = torch.randn(BATCH, TOKENS, WIDTH, requires_grad=True)
        inputs = [parts.w13.weight, parts.w2.weight]

        def gradients(y: Tensor, *, retain: bool) -> list[Tensor]:
            return [grad.clone() for grad in torch.autograd.grad(y.square().mean(), inputs, retain_graph=retain)]

        with graphrt.fp8_autocast():
            y = layer(parts, x, x)[1]
            first = gradients(y, retain=True) if is_inside else []
        with graphrt.fp8_autocast():  # the scales move on
            layer(parts, 30 * x, x)
        return [*first, *([] if is_inside else gradients(y, retain=True)), *gradients(y, retain=False)]

    for actual, expected in zip(run(fused_ffn), run(composed_ffn), strict=True):
        assert torch.equal(actual, expected)


def test_a_gradient_asked_for_later_finds_the_product_again():
    """The first backward wants no weight gradient, and is the last one that has the scales."""

    def run(layer: Layer) -> list[Tensor]:
        torch.manual_seed(0)
        parts = Parts()
        graphrt.convert_to_float8_training(parts)
        x = torch.randn(BATCH, TOKENS, WIDTH, requires_grad=True)
        with graphrt.fp8_autocast():
            loss = layer(parts, x, x)[1].square().mean()
        torch.autograd.grad(loss, x, retain_graph=True)
        return list(torch.autograd.grad(loss, [parts.w13.weight, parts.w2.weight]))

    for actual, expected in zip(run(fused_ffn), run(composed_ffn), strict=True):
        assert torch.equal(actual, expected)


def test_a_retained_graph_gives_the_gradients_of_the_projection_twice():
    torch.manual_seed(0)
    parts = Parts()
    graphrt.convert_to_float8_training(parts)
    x = torch.randn(BATCH, TOKENS, WIDTH, requires_grad=True)
    with graphrt.fp8_autocast():
        _, query, key, value = fused_qkv(parts, x, x)
    loss = (query + key + value).square().mean()
    first = torch.autograd.grad(loss, parts.qkv.weight, retain_graph=True)[0]
    with graphrt.fp8_autocast():  # the scales move on
        fused_qkv(parts, 30 * x, x)
    # The scale of the output gradient may have moved too: that alone makes a difference.
    second = torch.autograd.grad(loss, parts.qkv.weight)[0]
    assert sqnr(second, first) > 20


@pytest.mark.parametrize("layer", [fused_qkv, fused_ffn], ids=["qkv", "ffn"])
def test_no_quantized_activation_is_kept_for_the_backward(layer, device):
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    parts = Parts().to(device)
    graphrt.convert_to_float8_training(parts)
    x = torch.randn(BATCH, TOKENS, WIDTH, device=device, dtype=dtype, requires_grad=True)
    with graphrt.fp8_autocast():
        y = layer(parts, x, x)[1]
    node = y.grad_fn
    while node is not None and not hasattr(node, "saved_tensors"):
        node = node.next_functions[0][0]
    assert node is not None
    kept = {tuple(tensor.shape) for tensor in node.saved_tensors if tensor is not None and tensor.element_size() == 1}
    assert kept == ({(WIDTH, 3 * WIDTH)} if layer is fused_qkv else {(WIDTH, 2 * FFN), (FFN, WIDTH)}), "weights alone"


@pytest.mark.parametrize("is_converted", [True, False])
def test_a_backward_frees_what_it_has_read_for_the_last_time(is_converted, monkeypatch):
    parts = Parts()
    if is_converted:
        graphrt.convert_to_float8_training(parts)
    read: dict[str, weakref.ref[Tensor]] = {}
    left: list[set[str]] = []
    input_grads = iter(["w2", "w13"])

    def watch(owner: Any, attribute: str, before: Callable[..., object]) -> None:
        call = getattr(owner, attribute)

        def watched(*args: Any, **options: Any) -> Any:
            before(*args)
            return call(*args, **options)

        monkeypatch.setattr(owner, attribute, watched)

    def note(**tensors: Tensor) -> None:
        read.update((name, weakref.ref(tensor)) for name, tensor in tensors.items())

    def note_input_grad(_gemm: Any, grad: Any, saved: list[Any]) -> None:
        name = next(input_grads)
        note(**{f"{name}'s weight": saved[2]} | ({f"gradient behind {name}": grad.data} if is_converted else {}))

    kind = gemms.Fp8Gemm if is_converted else gemms.PlainGemm
    watch(kind, "grad_input", note_input_grad)
    watch(kind, "weight_grad", lambda *_: left.append({name for name, tensor in read.items() if tensor() is not None}))
    swiglu_backward = "swiglu_backward_with_output" if is_converted else "swiglu_backward"
    watch(feed_forward, swiglu_backward, lambda h, grad_a: note(h=h, grad_a=grad_a))
    x = torch.randn(BATCH, TOKENS, WIDTH, requires_grad=True)
    with graphrt.fp8_autocast():
        loss = fused_ffn(parts, x, x)[1].square().mean()
    if is_converted:
        forget_weights(parts)  # as a captured step does after their last use
    loss.backward()
    assert left == [set(), set()]
    assert len(read) == (6 if is_converted else 4)


@pytest.mark.parametrize("is_fast", [True, False])
def test_the_recipe_says_how_fused_gradients_accumulate(is_fast, monkeypatch):
    flags = []
    scaled_mm = graphrt.kernels.scaled_mm

    def watched(*args: Any, fast_accum: bool, **options: Any) -> Tensor:
        flags.append(fast_accum)
        return scaled_mm(*args, fast_accum=fast_accum, **options)

    monkeypatch.setattr(graphrt.kernels, "scaled_mm", watched)
    parts = Parts()
    graphrt.convert_to_float8_training(parts, recipe=graphrt.DelayedScaling(backward_fast_accum=is_fast))
    with graphrt.fp8_autocast():
        x = torch.randn(BATCH, TOKENS, WIDTH, requires_grad=True)
        fused_ffn(parts, x, x)[1].square().mean().backward()
    assert flags == [True, True, *[is_fast] * 4]


# ---- known gaps


def test_a_norm_of_an_odd_width_is_computed_as_composed():
    x = torch.randn(2, 24)
    assert fused.residual_rms_norm(x, x, torch.ones(24), EPS)[1].shape == (2, 24)


def test_a_wide_feed_forward_is_computed_as_composed():
    x, w13, w2 = torch.randn(2, 16), nn.Linear(16, 2 * 16400, bias=False), nn.Linear(16400, 16, bias=False)
    assert fused.swiglu_feed_forward(x, x, torch.ones(16), w13, w2, EPS)[1].shape == (2, 16)


@pytest.mark.parametrize("mode", ["plain", "fp8"])
def test_selective_checkpointing_changes_no_bit(mode):
    def keep_all(*_args: Any, **_options: Any) -> CheckpointPolicy:
        return CheckpointPolicy.PREFER_SAVE

    def selective(function: Any, *args: Any) -> Any:
        return graphrt.checkpoint(function, *args, context_fn=lambda: create_selective_checkpoint_contexts(keep_all))

    parts = make_parts(mode)
    expected, state = run(fused_block, parts, mode, torch.float32)
    actual, actual_state = run(fused_block, parts, mode, torch.float32, kind=selective)
    assert_same_values(actual, expected)
    assert_same_values(actual_state, state)
