"""The node map: every node of a captured step has its module, direction and phase, and making it leaves no trace."""

import gc
import json
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from stepping import TokenModel, make_trainer, run, token_batch, token_batches, token_loss
from torch import Tensor, nn
from training import assert_same_trajectory

import graphrt
from graphrt import owners, ranges
from graphrt.capture.attribution import Attribution, Place, attributing
from graphrt.capture.costs import cost_of
from graphrt.capture.nodes import NodeMap
from graphrt.errors import GraphrtError
from graphrt.llama import Llama, is_block_linear, make_loss_fn
from graphrt.owners import working_for
from graphrt.presets import ModelShape

SHAPE = ModelShape(2, 32, 2, 48, 256)
LINEARS = ("attn.qkv", "attn.out", "ffn.w13", "ffn.w2")


def reentrant(fn: Callable[..., Any], *args: Any) -> Any:
    return graphrt.checkpoint(fn, *args, use_reentrant=True)


def captured_map(trainer: graphrt.Trainer, batches: list[Any]) -> NodeMap:
    for batch in batches:
        trainer.step(batch)
    assert trainer._captured is not None
    assert trainer._captured.latest is not None
    node_map = trainer._captured.latest.node_map
    assert node_map is not None
    return node_map


def token_map(device: torch.device | str = "cpu", **options: Any) -> NodeMap:
    with make_trainer("graph", device, **options) as trainer:
        return captured_map(trainer, token_batches(3))


def llama_map(device: torch.device | str = "cpu", checkpoint: Any = None, grad_accum: int = 1) -> NodeMap:
    torch.manual_seed(0)
    model = Llama(SHAPE, 16, checkpoint).to(device)
    graphrt.convert_to_float8_training(model, module_filter_fn=is_block_linear)
    kind = torch.device(device).type
    loss_fn = make_loss_fn(kind, torch.bfloat16 if kind == "cuda" else None)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batch = {name: torch.randint(256, (2, 16), device=device) for name in ("tokens", "labels")}
    with graphrt.Trainer(model, optimizer, loss_fn, mode="graph", max_grad_norm=1.0, grad_accum_steps=grad_accum) as trainer:
        return captured_map(trainer, [batch] * 3)


def gemms(node_map: NodeMap) -> Counter[tuple[str, str]]:
    """Number of matrix products by module and direction."""
    return Counter((node.place.module, node.place.direction) for node in node_map.nodes if node.kernel in ("aten::mm", "aten::addmm"))


def modules(node_map: NodeMap, direction: str) -> set[str]:
    return {node.place.module for node in node_map.nodes if node.place.direction == direction}


def test_every_gemm_of_a_fused_llama_belongs_to_its_linear(device):
    node_map = llama_map(device)
    if device.type == "cpu":
        expected = Counter({(f"blocks.{i}.{name}", "forward"): 1 for i in range(2) for name in LINEARS})
        expected.update({(f"blocks.{i}.{name}", "backward"): 2 for i in range(2) for name in LINEARS})
        expected.update({("head", "forward"): 1, ("head", "backward"): 2})
        assert gemms(node_map) == expected
    named = {f"blocks.{i}.{name}" for i in range(2) for name in (*LINEARS, "attn_norm", "ffn_norm")}
    for direction in ("forward", "backward"):
        assert modules(node_map, direction) >= {*named, "blocks.0", "blocks.1", "embed", "norm", "head"}
    # No gradient of this model is zeroed: each is written by what computes it.
    assert {node.place.phase for node in node_map.nodes} == {
        "quantize_weights", "forward", "backward", "scale_update", "clip", "optimizer", "results",
    }  # fmt: skip
    for node in node_map.nodes:
        assert (node.place.direction != "") == (node.place.phase in ("forward", "backward")), node


def test_attention_belongs_to_its_block():
    places = {(n.place.module, n.place.direction) for n in llama_map().nodes if n.kernel and "dot_product" in n.kernel}
    assert places == {(f"blocks.{i}", direction) for i in range(2) for direction in ("forward", "backward")}


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", [graphrt.checkpoint, reentrant])
def test_a_recompute_is_one(checkpoint):
    plain, checkpointed = llama_map(), llama_map(checkpoint=checkpoint)
    found = gemms(checkpointed)
    recomputed = Counter({key: number for key, number in found.items() if key[1] == "recompute"})
    # The last product of a block is saved by nobody, so torch stops before it; the reentrant kind repeats everything.
    assert {module for module, _ in recomputed} >= {f"blocks.{i}.{name}" for i in range(2) for name in LINEARS[:3]}
    assert found - recomputed == gemms(plain)
    assert {n.place.phase for n in checkpointed.nodes if n.place.direction == "recompute"} == {"backward"}
    assert not modules(plain, "recompute")


@pytest.mark.slow
def test_microbatches_double_the_layers_and_nothing_else():
    one, two = gemms(llama_map()), gemms(llama_map(grad_accum=2))
    assert two == one + one


@pytest.mark.parametrize("wrap", [graphrt.checkpoint, reentrant])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_unfused_layers(wrap, dropout):
    model = {"wrap": wrap, "dropout": dropout}
    node_map = token_map(model=model)
    expected = {f"blocks.{i}.{name}" for i in range(2) for name in ("norm", "up", "down")}
    for direction in ("forward", "recompute", "backward"):
        assert modules(node_map, direction) >= expected - ({"blocks.0.down", "blocks.1.down"} if direction == "recompute" else set())
    assert (("blocks.0.dropout" in modules(node_map, "forward")) and ("blocks.0.dropout" in modules(node_map, "backward"))) == bool(dropout)
    layer_norms = [n.place.module for n in node_map.nodes if n.kernel == "aten::native_layer_norm_backward"]
    assert layer_norms == ["blocks.1.norm", "blocks.0.norm"]


def test_a_tied_weight_belongs_to_the_first_module_that_holds_it_and_its_products_to_who_computes_them():
    node_map = token_map(model={"is_tied": True}, is_fp8=False)
    assert {("head", "forward"), ("head", "backward")} <= set(gemms(node_map))
    accumulations = {n.place.module for n in node_map.nodes if n.place.function == "AccumulateGrad"}
    assert "embedding" in accumulations
    assert "head" not in accumulations


class Twice(nn.Module):
    """Calls one layer two times, a custom function in between, and nothing at its root level."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer, self.gate = nn.Embedding(32, 16), nn.Linear(16, 16), Gate()
        self.head = nn.Linear(16, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layer(self.gate(self.layer(self.embedding(tokens)))))


class Gate(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return _Cube.apply(x)


class _Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grads[0] * 3 * x.square()


def test_a_layer_called_twice_and_a_custom_function():
    node_map = token_map(model=Twice, is_fp8=False)
    assert gemms(node_map)[("layer", "forward")] == 2
    assert gemms(node_map)[("layer", "backward")] == 4
    gate = [n for n in node_map.nodes if n.place.module == "gate"]
    assert [n.kernel for n in gate if n.place.direction == "forward"] == ["aten::mul", "aten::mul"]
    backward = [n for n in gate if n.place.direction == "backward"]
    assert {n.place.function for n in backward} == {"_CubeBackward"}
    assert [n.kernel for n in backward] == ["aten::mul", "aten::pow", "aten::mul"]


def test_a_gradient_penalty_in_the_forward_runs_backwards_there():
    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        x = model.embedding(batch["tokens"])
        loss = model.head(x).square().mean()
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + grad.square().mean()

    node_map = token_map(model=TokenModel, is_fp8=False, loss_fn=loss_fn)
    inside = {n.place.module for n in node_map.nodes if n.place.phase == "forward" and n.place.direction == "backward"}
    assert "head" in inside


def test_the_map_is_saved_and_loaded(tmp_path):
    first, *rest = token_map().nodes
    node_map = NodeMap((replace(first, is_beside=True), *rest))
    node_map.save(tmp_path / "map.json")
    loaded = NodeMap.load(tmp_path / "map.json")
    assert [(n.index, n.kind, n.kernel, n.place.module, n.place.direction, n.place.phase, n.is_beside) for n in loaded.nodes] == [
        (n.index, n.kind, n.kernel, n.place.module, n.place.direction, n.place.phase, n.is_beside) for n in node_map.nodes
    ]
    rows = [{key: value for key, value in row.items() if key != "is_beside"} for row in json.loads((tmp_path / "map.json").read_text())]
    (tmp_path / "map.json").write_text(json.dumps(rows))  # as before there were branches
    assert not any(node.is_beside for node in NodeMap.load(tmp_path / "map.json").nodes)
    (tmp_path / "other.json").write_text('[{"index": 0}]')
    with pytest.raises(GraphrtError, match="does not hold a node map"):
        NodeMap.load(tmp_path / "other.json")


def test_a_recording_has_a_node_for_each_operation_it_replays():
    with make_trainer("graph") as trainer:
        node_map = captured_map(trainer, token_batches(3))
        assert trainer._captured is not None
        assert trainer._captured.latest is not None
        recording = trainer._captured.latest.graph
        assert [node.kernel for node in node_map.nodes] == [node.name for node in recording.nodes]
        assert trainer._captured.stats.num_nodes_by_kind == {"operation": len(node_map)}


def hooks_left(trainer: graphrt.Trainer) -> list[Any]:
    nodes = [torch.autograd.graph.get_gradient_edge(p).node for p in trainer.named_parameters.values() if p.requires_grad]
    return [
        *owners._listeners,
        *ranges._listeners,
        *(name for name in ("backward", "grad") if getattr(torch.autograd, name).__module__ != "torch.autograd"),
        *([nn.Module.__call__] if nn.Module.__call__.__name__ != "_wrapped_call_impl" else []),
        *(node for node in nodes if _num_prehooks(node)),
    ]


def _num_prehooks(node: Any) -> int:
    """A probe's own hook comes after those that are there."""
    handle = node.register_prehook(lambda *_: None)
    try:
        return len(handle.hooks_dict_ref()) - 1
    finally:
        handle.remove()


def test_nothing_stays_hooked():
    with make_trainer("graph") as trainer:
        captured_map(trainer, token_batches(3))
        assert hooks_left(trainer) == []


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_failed_capture_leaves_nothing_hooked_and_no_map(where):
    is_armed = False

    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            if is_armed and where == "forward":
                raise ArithmeticError("on purpose")
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            if is_armed and where == "backward":
                raise ArithmeticError("on purpose")
            return grads[0].clone()

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return Failing.apply(token_loss(model, batch)[0])

    with make_trainer("graph", loss_fn=loss_fn) as trainer:
        for step in range(2):
            trainer.step(token_batch(step))
        is_armed = True
        with pytest.raises(ArithmeticError, match="on purpose"):
            trainer.step(token_batch(2))
        assert hooks_left(trainer) == []
        assert trainer._captured is not None
        assert all(graph.node_map is None for graph in trainer._captured._graphs.values())
        is_armed = False
        trainer.step(token_batch(2))
        assert hooks_left(trainer) == []


@pytest.mark.parametrize("wrap", [graphrt.checkpoint, reentrant])
def test_an_attributed_step_computes_the_same_bits(wrap):
    options: dict[str, Any] = {"model": {"wrap": wrap, "dropout": 0.1}}
    with make_trainer("eager", **options) as trainer:
        expected = run(trainer, token_batches())
    with make_trainer("eager", **options) as trainer, attributing(trainer.model, lambda _: None):
        actual = run(trainer, token_batches())
    assert_same_trajectory(actual, expected)


class _Witness:
    """Dies with the graph that holds it."""


class _Holding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, witness: _Witness) -> Tensor:
        ctx.witness = witness
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0].clone(), None


def test_the_graph_of_a_watched_backward_dies_with_its_loss():
    model, witness = TokenModel(), _Witness()
    alive = weakref.ref(witness)
    gc.disable()
    try:
        with attributing(model, lambda _: None), ranges.BACKWARD:
            loss = _Holding.apply(token_loss(model, token_batch(0))[0], witness)
            del witness
            loss.backward()
            assert alive() is not None
            del loss
            assert alive() is None
    finally:
        gc.enable()


def test_an_owner_is_found_by_module_parameter_and_data():
    model = TokenModel()
    attribution = Attribution(model, lambda _: None)
    weight = model.blocks[1].up.weight
    for owner in (model.blocks[1].up, weight, weight.detach()):
        attribution.enter_range("forward")
        attribution.enter_owner(owner)
        assert attribution.place == Place("forward", "forward", "blocks.1.up")
        attribution.exit_owner()
        attribution.exit_range("forward")
    assert working_for(weight) is working_for(model)  # nobody listens: one shared context


def test_costs_of_known_operations():
    a, b = torch.randn(4, 8), torch.randn(8, 2)
    assert cost_of(torch.ops.aten.mm.default, (a, b), {}, a @ b) == (2 * 4 * 8 * 2, None)
    assert cost_of(torch.ops.aten.mul.Tensor, (a, a), {}, a * a) == (None, 3 * 4 * 8 * 4)
    wide = torch.randn(1, 8).expand(4, 8)
    assert cost_of(torch.ops.aten.add.Tensor, (a, wide), {}, a + wide) == (None, (2 * 32 + 8) * 4)
    assert cost_of(torch.ops.aten.sum.default, (a,), {}, a.sum()) == (None, None)


@pytest.mark.gpu
@pytest.mark.parametrize("checkpoint", [None, graphrt.checkpoint, reentrant])
def test_cuda_nodes_are_named(checkpoint):
    node_map = llama_map("cuda", checkpoint)
    kernels = [node for node in node_map.nodes if node.kind == "kernel"]
    assert len(kernels) > 50
    assert all(node.kernel for node in kernels)
    weights = [n.place for n in kernels if n.kernel and n.kernel.startswith("graphrt_quantize_many")]
    assert [place.phase for place in weights] == ["quantize_weights"]
    counts = Counter((n.place.module, n.place.direction) for n in kernels)
    for i in range(2):
        for name in LINEARS:  # a product forward, two backward
            assert counts[(f"blocks.{i}.{name}", "forward")] >= 1, counts
            assert counts[(f"blocks.{i}.{name}", "backward")] >= 2, counts
    assert {n.place.phase for n in kernels if n.kernel and "adam" in n.kernel.lower()} == {"optimizer"}
    assert {n.place.phase for n in kernels if n.kernel == "graphrt_update_scales"} == {"scale_update"}
    assert bool(modules(node_map, "recompute")) == (checkpoint is not None)
    flops = sum(node.flops or 0 for node in node_map.nodes if node.place.module == "head")
    assert flops == 3 * 2 * 32 * SHAPE.width * SHAPE.vocab


class Compiled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x)).relu()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("how", ["block.compile", "broken", "torch.compile", "loss"])
def test_attribution_makes_nothing_compile_again(how):
    torch._dynamo.reset()
    # A block of torch's own modules alone breaks the graph at once: what is called from there must not be compiled anew either.
    model = nn.Sequential(*(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)) if how == "broken" else Compiled() for _ in range(2)))
    loss_fn: Callable[[nn.Module, Tensor], Tensor] = lambda model, x: model(x).sum()  # noqa: E731
    if how in ("block.compile", "broken"):
        for block in model:
            block.compile(backend="aot_eager")
    elif how == "torch.compile":
        model = nn.Sequential(*(torch.compile(block, backend="aot_eager") for block in model))
    else:
        loss_fn = torch.compile(loss_fn, backend="aot_eager")
    x, places = torch.randn(4, 8), []
    for _ in range(2):
        loss_fn(model, x).backward()
    with torch.compiler.set_stance("fail_on_recompile"), attributing(model, places.append):
        with ranges.FORWARD:
            loss = loss_fn(model, x)
        with ranges.BACKWARD:
            loss.backward()
    compiled = {place.module for place in places if place.function == "CompiledFunctionBackward"}
    assert compiled == {"loss": {""}, "broken": set()}.get(how, {"0", "1"})
    torch._dynamo.reset()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")
def test_a_compiled_block_is_one_module():
    torch._dynamo.reset()
    model = TokenModel().to("cuda")
    for block in model.blocks:
        block.compile()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with graphrt.Trainer(model, optimizer, token_loss, mode="graph") as trainer:
        node_map = captured_map(trainer, token_batches(3))
    for direction in ("forward", "backward"):
        assert modules(node_map, direction) >= {"blocks.0", "blocks.1", "embedding", "head"}
    torch._dynamo.reset()
