"""Small work beside the chain of a captured step: the same bits, and nobody reads it too early."""

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from branching import Capture, Stream, capturing
from stepping import WIDTH, TokenModel, assert_captured_equals_eager, deterministic, make_trainer, run, token_batch, token_batches
from torch import Tensor, nn
from training import assert_same_trajectory

import graphrt
from graphrt import kernels, optimizer, sinks, step
from graphrt import state as quantization
from graphrt.aside import aside, asides, join_asides
from graphrt.capture import branch as branches
from graphrt.capture import runner as runners
from graphrt.capture.nodes import NodeObserver
from graphrt.capture.results import StaticResults
from graphrt.capture.runner import CapturedRunner
from graphrt.kernels.norm import SumInto
from graphrt.nn import norm as norm_layer
from graphrt.nn import residual_rms_norm
from graphrt.sinks import GradientSinks, deliver

NUM_NORMS = 3


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[Capture]:
    with capturing(monkeypatch) as capture:
        yield capture


# -- what the branch holds


def test_operands_are_held_until_a_join(streams: Capture) -> None:
    tensors = [torch.zeros(4) for _ in range(2)]
    references = [weakref.ref(tensor) for tensor in tensors]
    with streams.branch.open(is_watched=True):
        for _ in range(2):
            with streams.branch.beside(tensors.pop()):
                streams.issue(f"sum {len(tensors)}")
        assert all(reference() is not None for reference in references)
        streams.branch.join()
        assert all(reference() is None for reference in references)
    assert streams.side_nodes == ["sum 1", "sum 0"]


def test_what_is_held_is_bounded(streams: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(branches, "_MAX_HELD_BYTES", 2 * 16)
    with streams.branch.open(is_watched=True):
        for i in range(5):
            streams.issue(f"backward {i}")
            with streams.branch.beside(torch.zeros(4)):
                streams.issue(f"sum {i}")
    assert [streams.precedes(f"sum {i}", "backward 4") for i in range(4)] == [True, True, True, False]
    assert streams.edges["backward 4"] == {"backward 3", "sum 2"}


def test_after_an_error_nothing_is_held(streams: Capture) -> None:
    references = []

    def fail() -> None:
        tensor = torch.zeros(4)
        references.append(weakref.ref(tensor))
        with streams.branch.open(is_watched=True), streams.branch.beside(tensor):
            streams.issue("sum")
            raise ArithmeticError("on purpose")

    with pytest.raises(ArithmeticError):
        fail()
    gc.collect()  # the error's traceback has the frame
    assert references[0]() is None
    assert streams.unjoined == set()


@pytest.mark.parametrize("touches", [True, False])
def test_an_operation_on_what_is_held_joins_first(streams: Capture, touches: bool) -> None:
    held, other = torch.zeros(2, 4), torch.zeros(2, 4)
    with streams.branch.open(is_watched=True):
        with streams.branch.beside(held):
            streams.branch.before_operation([held])  # of the work itself
            streams.issue("sum")
        streams.branch.before_operation([(held if touches else other)[1]])
        streams.issue("read")
    assert streams.precedes("sum", "read") is touches


def test_where_nobody_watches_work_on_tensors_is_issued_in_place(streams: Capture) -> None:
    with streams.branch.open():
        with streams.branch.beside(torch.zeros(4)):
            streams.issue("sum")
        with streams.branch.beside():
            streams.issue("update")
    assert streams.side_nodes == ["update"]


def test_work_on_tensors_of_another_stream_is_issued_there_after_the_branch(streams: Capture) -> None:
    other = Stream("other")
    tensor = torch.zeros(4)
    with streams.branch.open(is_watched=True):
        with streams.branch.beside(tensor):
            streams.issue("sum")
        with streams.on(other), streams.branch.beside(tensor):
            streams.issue("add")
        streams.issue("backward")
        assert not streams.precedes("sum", "backward")
        streams.main.wait_stream(other)
    assert streams.stream_of["add"] == "other"
    assert streams.precedes("sum", "add")
    assert streams.unjoined == set()


def test_without_a_side_work_is_issued_in_place(streams: Capture) -> None:
    with aside(torch.zeros(1)):
        streams.issue("sum")
    join_asides()
    with streams.branch.open(is_watched=True), asides(streams.branch), aside():
        streams.issue("update")
    assert streams.stream_of == {"sum": "main", "update": "side"}


# -- gradients


class Written:
    """A parameter of ones, and backwards that contribute 1, 2, 4, ... to its gradient."""

    def __init__(self, streams: Capture) -> None:
        self.streams = streams
        self.parameter = nn.Parameter(torch.ones(4))
        self.sinks = GradientSinks()
        self.value = 1.0

    def step(self, ways: str) -> None:
        """One step; a: aside, d: direct, g: by autograd."""
        for way in ways:
            out = _Deliver.apply(self.parameter, self, way) if way != "g" else self.parameter * self.value
            out.sum().backward()
            self.value *= 2

    def contribute(self, way: str) -> Tensor | None:
        value, streams = self.value, self.streams

        def compute(out: Tensor | None) -> Tensor:
            name = f"{way} {len(streams.edges)}"
            streams.issue(name)
            return torch.full((4,), value) if out is None else out.fill_(value)

        partials = torch.zeros(4)
        result = deliver(self.parameter, compute, reads=[partials] if way == "a" else None)
        streams.issue(f"backward {len(streams.edges)}")
        return result


class _Deliver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, written: Written, way: str) -> Tensor:
        ctx.written, ctx.way = written, way
        return parameter.clone()

    @staticmethod
    def backward(ctx: Any, *_grads: Tensor) -> Any:
        return ctx.written.contribute(ctx.way), None, None


@pytest.mark.parametrize("ways", ["a", "aa", "ad", "da", "ag", "ga", "aga", "adag"])
def test_contributions_add_up_in_order_whichever_way_they_come(streams: Capture, monkeypatch: pytest.MonkeyPatch, ways: str) -> None:
    before_autograd = sinks._Sink._before_autograd

    def logged(sink: Any, grad: Tensor | None) -> None:
        before_autograd(sink, grad)
        if grad is not None:
            streams.issue(f"g {len(streams.edges)}")

    monkeypatch.setattr(sinks._Sink, "_before_autograd", logged)
    written = Written(streams)
    with written.sinks.active():
        written.step("a")
    for num_steps in range(2):
        with streams.branch.open(is_watched=True), asides(streams.branch), written.sinks.active():
            written.value = 1.0
            first = len(streams.edges)
            written.step(ways)
            join_asides()
            streams.issue(f"norm {num_steps}")
        assert written.parameter.grad is not None
        assert written.parameter.grad.tolist() == [2.0 ** len(ways) - 1] * 4
        nodes = [node for node in list(streams.edges)[first:] if node[0] in "adg"]
        assert [node[0] for node in nodes] == list(ways)
        assert all(streams.precedes(a, b) for i, a in enumerate(nodes) for b in nodes[i + 1 :])
        assert all(streams.precedes(node, f"norm {num_steps}") for node in nodes)
        assert [streams.stream_of[node] for node in nodes] == ["side" if node[0] == "a" else "main" for node in nodes]


def test_the_gradient_is_made_on_the_main_stream(streams: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    empty, made_on = sinks._Sink._empty, []

    def logged(sink: Any) -> Tensor:
        made_on.append(streams.current.name)
        return empty(sink)

    monkeypatch.setattr(sinks._Sink, "_empty", logged)
    written = Written(streams)
    with streams.branch.open(is_watched=True), asides(streams.branch), written.sinks.active():
        written.step("aa")
    assert made_on == ["main", "main"]


# -- in a step


class NormedModel(TokenModel):
    """Fused norms before the blocks and the head; ``penalty`` says where in the forward one's weight is used without them."""

    def __init__(self, *, is_shared: bool = False, penalty: str = "", **options: Any) -> None:
        super().__init__(**options)
        weights = [nn.Parameter(torch.ones(WIDTH)) for _ in range(1 if is_shared else NUM_NORMS)]
        self.norms = nn.ParameterList(weights * NUM_NORMS if is_shared else weights)
        self.penalty = penalty
        self.on_backward: Callable[[], None] = lambda: None

    def forward(self, tokens: Tensor) -> Tensor:
        weight = self.norms[1]
        early = weight.square().sum() if self.penalty == "early" else 0.0
        stream = self.embed(tokens, self.embedding).bfloat16()
        delta = torch.zeros_like(stream)
        for norm, block in zip(self.norms, self.blocks, strict=False):
            stream, x = residual_rms_norm(stream, delta, norm, 1e-5)
            if x.requires_grad and block is self.blocks[1]:
                stream.register_hook(lambda _grad: self.on_backward())
            delta = self.wrap(block, x).bfloat16()
        _, x = residual_rms_norm(stream, delta, self.norms[-1], 1e-5)
        late = weight.square().sum() if self.penalty == "late" else 0.0
        return self.head(x) + early + late * x.float().mean()


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    with torch.autocast(batch["tokens"].device.type, torch.bfloat16):
        logits = model(batch["tokens"])
    loss = F.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten()) * batch["weight"]
    return loss, {"spread": logits.detach().float().std()}


class Issued:
    """The streams of a captured step on a CPU, and what is issued on them."""

    def __init__(self, streams: Capture, patch: pytest.MonkeyPatch) -> None:
        self.streams = streams
        capture_cpu = CapturedRunner._capture_cpu

        def opened(runner: CapturedRunner, graph: Any) -> Any:
            with streams.branch.open(is_watched=True), asides(streams.branch):
                return capture_cpu(runner, graph)

        patch.setattr(CapturedRunner, "_capture_cpu", opened)
        patch.setattr(runners, "NodeObserver", lambda num_nodes: NodeObserver(num_nodes, streams.branch.before_operation))
        for owner, function, node in (
            (SumInto, "__call__", "sum"),
            (norm_layer, "rms_norm_input_grad", "backward"),
            (kernels, "update_scales_", "update"),
            (step, "grad_norm", "norm"),
            (StaticResults, "write", "results"),
            (optimizer, "adamw_", "optimizer"),
        ):
            patch.setattr(owner, function, self._logged(getattr(owner, function), node))

    def _logged(self, function: Callable[..., Any], node: str) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            self.issue(node)
            return function(*args, **kwargs)

        return run

    def issue(self, node: str) -> None:
        if self.streams.branch.is_open:
            self.streams.issue(f"{node} {len(self.nodes(node))}")

    def nodes(self, start: str) -> list[str]:
        return [node for node in self.streams.edges if node.split()[0] == start]

    def trainer(self, **options: Any) -> graphrt.Trainer:
        trainer = make_trainer("graph", loss_fn=loss_fn, **{"model": NormedModel, **options})
        assert trainer._captured is not None
        trainer._captured.branch = self.streams.branch
        return trainer


@pytest.fixture
def issued(streams: Capture, monkeypatch: pytest.MonkeyPatch) -> Issued:
    return Issued(streams, monkeypatch)


@pytest.mark.parametrize("num", [1, 2])
def test_small_work_is_beside_the_chain_with_one_join_before_the_norm(issued: Issued, num: int) -> None:
    batches = token_batches(5)
    with make_trainer("eager", loss_fn=loss_fn, model=NormedModel, grad_accum_steps=num) as trainer:
        expected = run(trainer, batches)
    with issued.trainer(grad_accum_steps=num) as trainer:
        assert_same_trajectory(run(trainer, batches), expected)
    streams = issued.streams
    sums, backwards, updates = issued.nodes("sum"), issued.nodes("backward"), issued.nodes("update")
    [norm], [results], [update] = issued.nodes("norm"), issued.nodes("results"), issued.nodes("optimizer")
    assert streams.side_nodes == [*sums, *updates, results]
    assert (len(sums), len(backwards), len(updates)) == (num * NUM_NORMS, num * NUM_NORMS, 2)
    for i, sums_node in enumerate(sums):
        assert [streams.precedes(backward, sums_node) for backward in backwards] == [j <= i for j in range(len(backwards))]
        assert not any(streams.precedes(sums_node, backward) for backward in backwards)
    assert streams.edges[norm] == {backwards[-1], sums[-1]}, "one join"
    assert streams.edges[update] == {norm}
    assert all(streams.precedes(backwards[-1], node) and not streams.precedes(node, norm) for node in updates)
    assert streams.precedes(norm, results)
    assert streams.unjoined == set()


def test_a_chain_alone_has_all_in_place(issued: Issued, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(issued.streams.branch, "_streams", None)
    with issued.trainer() as trainer:
        run(trainer, token_batches(3))
    assert issued.streams.side_nodes == []


def test_with_a_process_group_the_scale_updates_stay_where_they_are(issued: Issued, monkeypatch: pytest.MonkeyPatch) -> None:
    with issued.trainer() as trainer:
        run(trainer, token_batches(2))
        with monkeypatch.context() as patch:
            patch.setattr(quantization, "num_ranks", lambda group: 2)
            patch.setattr(graphrt.QuantizationState, "reduces_over", lambda state, group: False)
            trainer.step(token_batch(2))
    assert [issued.streams.stream_of[node] for node in issued.nodes("update")] == ["main", "main"]
    assert {issued.streams.stream_of[node] for node in issued.nodes("sum")} == {"side"}


def test_a_hook_of_the_users_that_reads_a_gradient_waits_for_it(issued: Issued) -> None:
    with issued.trainer() as trainer:
        model: Any = trainer.model

        def read() -> None:
            grad = model.norms[2].grad
            if grad is not None:
                grad.sum()
                issued.issue("read")

        model.on_backward = read
        run(trainer, token_batches(3))
    streams = issued.streams
    [read_node], [first, *others] = issued.nodes("read"), issued.nodes("sum")
    assert streams.precedes(first, read_node)
    assert [streams.precedes(other, read_node) for other in others] == [False] * (NUM_NORMS - 1)


@pytest.mark.parametrize("penalty", ["early", "late"])
@pytest.mark.parametrize("is_shared", [False, True], ids=["own", "shared"])
def test_a_norm_weight_that_autograd_adds_to_gets_the_bits_of_an_eager_step(issued: Issued, penalty: str, is_shared: bool) -> None:
    batches = token_batches(4)
    model = lambda: NormedModel(is_shared=is_shared, penalty=penalty)  # noqa: E731
    with make_trainer("eager", loss_fn=loss_fn, model=model) as trainer:
        expected = run(trainer, batches)
    with issued.trainer(model=model) as trainer:
        assert_same_trajectory(run(trainer, batches), expected)
    assert issued.streams.unjoined == set()


# -- in a CUDA graph

CUDA_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "microbatches": {"grad_accum_steps": 2},
    "shared": {"model": lambda: NormedModel(is_shared=True)},
    "shared, microbatches": {"model": lambda: NormedModel(is_shared=True), "grad_accum_steps": 2},
    "autograd first": {"model": lambda: NormedModel(penalty="late")},
    "autograd last": {"model": lambda: NormedModel(penalty="early")},
    "shared, autograd last": {"model": lambda: NormedModel(is_shared=True, penalty="early"), "grad_accum_steps": 2},
    "dropout": {"model": lambda: NormedModel(dropout=0.3)},
    "checkpointed": {"model": lambda: NormedModel(wrap=graphrt.checkpoint)},
    "sgd": {"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)},
    "optimizer outside": {"optimizer": lambda parameters: torch.optim.Adagrad(parameters)},
    "no fp8": {"is_fp8": False},
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", CUDA_OPTIONS)
def test_captured_steps_equal_eager_ones(name: str) -> None:
    with deterministic():
        assert_captured_equals_eager("cuda", loss_fn=loss_fn, **{"model": NormedModel, **CUDA_OPTIONS[name]})


@pytest.mark.gpu
def test_a_nonfinite_gradient_skips_the_step_and_is_counted() -> None:
    batches = token_batches()
    batches[4]["weight"] = torch.tensor(float("inf"))
    with deterministic():
        eager = assert_captured_equals_eager("cuda", loss_fn=loss_fn, model=NormedModel, batches=batches)
    assert [bool(values["is skipped"]) for values in eager] == [i == 4 for i in range(len(batches))]
    assert int(eager[-1]["skipped steps"]) == 1


@pytest.mark.gpu
def test_the_kernels_of_a_cuda_graphs_branch_keep_their_layer_and_phase() -> None:
    with make_trainer("graph", "cuda", loss_fn=loss_fn, model=NormedModel) as trainer:
        for batch in token_batches(3):
            trainer.step(batch)
        profile = trainer.profile(steps=2)
    assert profile.node_map is not None
    nodes = profile.node_map.nodes
    sums = [node for node in nodes if node.kernel == "graphrt_rms_norm_sum_partials"]
    updates = [node for node in nodes if node.kernel == "graphrt_update_scales"]
    results = [node for node in nodes if node.is_beside and node.place.phase == "results"]
    assert [node.place.phase for node in sums] == ["backward"] * NUM_NORMS
    assert {(node.place.direction, node.place.module) for node in sums} == {("backward", "norms")}
    assert [node.place.phase for node in updates] == ["scale_update"] * 2
    assert len(results) == 5, "loss, norm, skipped, one metric, and the count"
    assert [node for node in nodes if node.is_beside] == [*sums, *updates, *results]
    [norm] = [node for node in nodes if node.kernel == "graphrt_grad_norm"]
    assert not norm.is_beside
    assert profile.captured is not None
    assert profile.captured.attributed_share == 1.0
    assert len([event for event in profile.captured.events if event.is_beside]) == 2 * (NUM_NORMS + 2 + 5)
