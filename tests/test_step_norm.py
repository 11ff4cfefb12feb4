"""The norm of a captured step is added up beside its backward, with the bits of an eager one, and never too early."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from branching import Capture, Stream, capturing
from kernels import emulated
from stepping import TokenModel, assert_captured_equals_eager, deterministic, make_trainer, token_batch, token_batches, token_loss
from torch import Tensor, nn

import graphrt
from graphrt import optimizer, sinks, step
from graphrt.capture import norm as capture_norm
from graphrt.capture.runner import CapturedRunner
from graphrt.kernels import device as kernel_device
from graphrt.kernels import grad_norm as norm_kernel
from graphrt.kernels.grad_norm import NormTable
from graphrt.nn import embedding

#: In the order in which the backward writes them; biases, norms and the embedding come through autograd.
WRITTEN = ["head", "blocks.1.down", "blocks.1.up", "blocks.0.down", "blocks.0.up"]
#: What each launch beside the backward adds up, of 512 elements a weight.
PARTS = [["head"], ["blocks.1.down", "blocks.1.up"], ["blocks.0.down"]]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Any:
    if not emulated.is_available():
        pytest.skip("g++ is not installed")
    return emulated.build("grad_norm", tmp_path_factory.mktemp("grad_norm"))


class Issued:
    """The streams of a captured step on a CPU, the norm computed by the emulated kernel."""

    def __init__(self, streams: Capture) -> None:
        self.streams = streams
        self.names: dict[nn.Parameter, str] = {}

    def trainer(self, mode: str, **options: Any) -> graphrt.Trainer:
        trainer = make_trainer(mode, **options)
        self.names = {p: name.removesuffix(".weight") for name, p in trainer.model.named_parameters()}
        if trainer._captured is not None:
            trainer._captured.branch = self.streams.branch
        return trainer

    def issue(self, name: str) -> None:
        if self.streams.branch.is_open:
            self.streams.issue(f"{name} #{len(self.streams.edges)}")

    def norm(self, table: NormTable, out: Tensor) -> None:
        owners = {p.grad.data_ptr(): name for p, name in self.names.items() if p.grad is not None}
        self.issue("norm " + " ".join(owners[grad.data_ptr()] for grad in table.grads))
        table.write()
        norm_kernel._launch(table, out)

    def nodes(self, start: str) -> list[str]:
        return [node for node in self.streams.edges if node.startswith(start)]

    def node(self, start: str) -> str:
        [node] = self.nodes(f"{start} ")
        return node

    @property
    def parts(self) -> list[list[str]]:
        """What was added up beside the backward."""
        return [node.split()[1:-1] for node in self.streams.side_nodes]


@pytest.fixture
def issued(monkeypatch: pytest.MonkeyPatch, library: Any) -> Iterator[Issued]:
    with capturing(monkeypatch) as streams:
        issued = Issued(streams)
        write, adamw, capture_cpu = sinks._Sink.write, optimizer.adamw_, CapturedRunner._capture_cpu

        def logged_write(sink: Any, *args: Any) -> None:
            write(sink, *args)
            issued.issue(f"write {issued.names[sink.parameter]}")

        def logged_adamw(*args: Any, **options: Any) -> None:
            issued.issue("optimizer")
            adamw(*args, **options)

        def opened(runner: CapturedRunner, graph: Any) -> Any:
            with streams.branch.open():
                return capture_cpu(runner, graph)

        monkeypatch.setattr(sinks._Sink, "write", logged_write)
        monkeypatch.setattr(optimizer, "adamw_", logged_adamw)
        monkeypatch.setattr(CapturedRunner, "_capture_cpu", opened)
        for module in (capture_norm, step):
            monkeypatch.setattr(module, "grad_norm", issued.norm)
        monkeypatch.setattr(kernel_device, "launch", emulated.make_launch([library], is_reversed=False))
        monkeypatch.setattr(capture_norm, "_LAST_ELEMENTS", 500)
        yield issued


def norms(trainer: graphrt.Trainer, num_steps: int = 3) -> list[float]:
    """Of the warmup steps and the captured one. Replays of a recording would not run the emulated kernel."""
    return [float(trainer.step(token_batch(step)).grad_norm) for step in range(num_steps)]


@pytest.mark.parametrize("num", [1, 2])
def test_gradients_are_added_up_as_they_become_final(issued: Issued, num: int) -> None:
    with issued.trainer("eager", grad_accum_steps=num) as trainer:
        expected = norms(trainer)
    with issued.trainer("graph", grad_accum_steps=num) as trainer:
        assert norms(trainer) == expected
    streams = issued.streams
    assert issued.parts == PARTS
    writes = issued.nodes("write")
    assert [node.split()[1] for node in writes] == WRITTEN * num
    *beside, rest = issued.nodes("norm")
    assert streams.stream_of[rest] == "main"
    assert len(rest.split()) - 2 == len(issued.names) - 4
    last = dict(zip(WRITTEN, writes[-len(WRITTEN) :], strict=True))
    for node, part in zip(beside, PARTS, strict=True):
        final = writes.index(last[part[-1]])
        assert [streams.precedes(write, node) for write in writes] == [i <= final for i in range(len(writes))]
        assert not streams.precedes(node, writes[-1]), "the backward waits for the norm"
    [update, *_] = issued.nodes("optimizer")
    assert all(streams.precedes(node, update) for node in (*beside, rest))
    assert len(streams.edges[update]) == 2, "one join"
    assert streams.unjoined == set()


def test_a_small_model_has_one_launch(issued: Issued, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture_norm, "_LAST_ELEMENTS", 4 * 512 + 1)
    with issued.trainer("graph") as trainer:
        norms(trainer)
    assert issued.parts == []
    assert len(issued.nodes("norm")) == 1


def test_the_gradients_of_the_warmup_are_not_kept(issued: Issued) -> None:
    with issued.trainer("graph") as trainer:
        norms(trainer, 2)
        assert "gradients" in trainer._body.optimizer.tables._tables
        norms(trainer, 1)
        assert "gradients" not in trainer._body.optimizer.tables._tables


class SharingModel(TokenModel):
    """One weight gets a gradient through autograd too."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) + self.blocks[1].down.weight.sum()


def test_a_gradient_that_autograd_adds_to_is_added_up_at_the_end(issued: Issued) -> None:
    with issued.trainer("eager", model=SharingModel) as trainer:
        expected = norms(trainer)
    with issued.trainer("graph", model=SharingModel) as trainer:
        assert norms(trainer) == expected
    assert [name for part in issued.parts for name in part] == ["head", "blocks.1.up", "blocks.0.down"]


class EditingModel(TokenModel):
    """Doubles its head's gradient in the middle of the backward, from step ``first`` on."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.first, self.num_steps = first, 0

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.blocks[0](self.embedding(tokens))
        x.register_hook(self._edit)
        return self.head(self.blocks[1](x))

    def _edit(self, _grad: Tensor) -> None:
        grad = self.head.weight.grad
        self.num_steps += 1
        if grad is not None and self.num_steps > self.first:
            with torch.no_grad():
                grad.mul_(2)


def test_a_gradient_that_is_edited_in_every_step_is_added_up_at_the_end(issued: Issued) -> None:
    options: dict[str, Any] = {"model": lambda: EditingModel(0), "calibrate": False}
    with issued.trainer("eager", **options) as trainer:
        expected = norms(trainer)
    with issued.trainer("graph", **options) as trainer:
        assert norms(trainer) == expected
    assert "head" not in [name for part in issued.parts for name in part]


def test_a_gradient_that_the_captured_step_edits_is_refused_by_name(issued: Issued, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CapturedRunner, "can_observe", False)  # the comparison of the operations would find it first
    with issued.trainer("graph", model=lambda: EditingModel(2), calibrate=False) as trainer:
        norms(trainer, 2)
        before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
        with pytest.raises(graphrt.CaptureError, match=r"head\.weight\.grad was complete after 1 contributions in the last warmup step"):
            trainer.step(token_batch(2))
        assert all(torch.equal(p, before[name]) for name, p in trainer.model.named_parameters())
        trainer.model.first = 100
        trainer.step(token_batch(2))


def uses(numbers: list[int]) -> Any:
    """A loss that runs the second block as often as ``numbers`` says for each step."""
    number = iter(numbers)

    def loss_fn(model: Any, batch: dict[str, Tensor]) -> Tensor:
        x = model.blocks[0](model.embedding(batch["tokens"]))
        for _ in range(next(number)):
            x = model.blocks[1](x)
        return F.cross_entropy(model.head(x).flatten(0, 1).float(), batch["labels"].flatten())

    return loss_fn


@pytest.mark.parametrize("captured", [1, 3])
def test_another_number_of_contributions_gives_no_wrong_norm(issued: Issued, monkeypatch: pytest.MonkeyPatch, captured: int) -> None:
    """Too few leave the gradient for the end, too many are refused."""
    monkeypatch.setattr(CapturedRunner, "can_observe", False)
    numbers = [2, 2, captured]
    with issued.trainer("eager", loss_fn=uses(numbers), calibrate=False) as trainer:
        expected = norms(trainer)
    with issued.trainer("graph", loss_fn=uses(numbers), calibrate=False) as trainer:
        assert norms(trainer, 2) == expected[:2]
        if captured == 3:
            with pytest.raises(graphrt.CaptureError, match=r"blocks\.1\.(down|up)\.weight\.grad was complete after 2 contributions"):
                trainer.step(token_batch(2))
        else:
            assert float(trainer.step(token_batch(2)).grad_norm) == expected[2]
            assert issued.parts == [["head"], ["blocks.0.down"]]


class ForkingModel(TokenModel):
    """Writes one gradient on a stream of its own."""

    def __init__(self, streams: Capture) -> None:
        super().__init__()
        self.streams, self.other = streams, Stream("other")

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.blocks[0](self.embedding(tokens))
        y = self.blocks[1](x)
        x.register_hook(lambda _: self._switch(self.streams.main))
        y.register_hook(lambda _: self._switch(self.other))
        return self.head(y)

    def _switch(self, stream: Stream) -> None:
        stream.wait_stream(self.streams.current)
        self.streams.current = stream


def test_gradients_of_other_streams_are_added_up_at_the_end(issued: Issued) -> None:
    with issued.trainer("graph", model=lambda: ForkingModel(issued.streams)) as trainer:
        norms(trainer)
    assert issued.parts == [["head"], ["blocks.0.down"]]


@pytest.mark.parametrize("where", ["backward", "afterwards"])
def test_a_failed_capture_leaves_no_plan_and_the_next_one_is_right(issued: Issued, where: str) -> None:
    is_armed = False

    def fail(*_: Any) -> None:
        raise ArithmeticError("on purpose")

    def loss_fn(model: nn.Module, batch: Any) -> Any:
        if not is_armed or where != "backward":
            return token_loss(model, batch)
        # Between the backwards of the two blocks.
        handle = model.get_submodule("blocks.0").register_forward_hook(lambda _module, _args, out: out.register_hook(fail) and None)
        try:
            return token_loss(model, batch)
        finally:
            handle.remove()

    with issued.trainer("eager") as trainer:
        expected = norms(trainer)
    with issued.trainer("graph", loss_fn=loss_fn) as trainer, pytest.MonkeyPatch.context() as patch:
        assert norms(trainer, 2) == expected[:2]
        is_armed = True
        if where == "afterwards":
            patch.setattr(optimizer.StepOptimizer, "apply", fail)
        with pytest.raises(ArithmeticError):
            trainer.step(token_batch(2))
        assert issued.parts == PARTS[: 2 if where == "backward" else 3]
        assert trainer._captured is not None
        assert all(graph.norm._plan is None for graph in trainer._captured._graphs.values())
        is_armed = False
        patch.undo()
        assert float(trainer.step(token_batch(2)).grad_norm) == expected[2]


# -- in a CUDA graph


@pytest.fixture
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(capture_norm, "_LAST_ELEMENTS", 500)
    with deterministic():
        yield


CUDA_OPTIONS: list[dict[str, Any]] = [
    {},
    {"grad_accum_steps": 2},
    {"model": {"is_tied": True, "embed": embedding}},
    {"model": {"dropout": 0.3, "embed": embedding}},
    {"model": SharingModel},
    {"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1)},
    {"optimizer": lambda parameters: torch.optim.Adagrad(parameters)},
    {"dtype": torch.bfloat16},
]


@pytest.mark.gpu
@pytest.mark.usefixtures("_small_parts")
@pytest.mark.parametrize("options", CUDA_OPTIONS, ids=str)
def test_captured_norms_equal_eager_ones(options: dict[str, Any]) -> None:
    assert_captured_equals_eager("cuda", **options)


@pytest.mark.gpu
@pytest.mark.usefixtures("_small_parts")
def test_a_nonfinite_gradient_beside_the_backward_skips_the_step() -> None:
    batches = token_batches()
    batches[4]["weight"] = torch.tensor(float("inf"))
    eager = assert_captured_equals_eager("cuda", batches=batches)
    assert [bool(values["is skipped"]) for values in eager] == [i == 4 for i in range(len(batches))]


@pytest.mark.gpu
@pytest.mark.usefixtures("_small_parts")
def test_the_norm_is_on_the_branch_of_a_cuda_graph_and_in_its_phase() -> None:
    with make_trainer("graph", "cuda") as trainer:
        for batch in token_batches(3):
            trainer.step(batch)
        profile = trainer.profile(steps=2)
    assert profile.node_map is not None
    launches = [node for node in profile.node_map.nodes if node.kernel == "graphrt_grad_norm"]
    assert [node.is_beside for node in launches] == [True] * len(PARTS) + [False]
    assert {(node.place.phase, node.place.direction, node.place.module) for node in launches} == {("clip", "", "")}
    assert profile.captured is not None
    assert profile.captured.attributed_share == 1.0
    assert len([event for event in profile.captured.events if event.is_beside]) == 2 * len(PARTS)
