"""The captured step makes its FP8 weights by one launch, with the bits, amaxes and scales of an eager step."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from branching import capturing
from stepping import (
    KINDS,
    NUM_STEPS,
    TokenModel,
    assert_captured_equals_eager,
    assert_same_trajectory,
    deterministic,
    make_trainer,
    plainly,
    run,
    token_batch,
    token_batches,
    token_loss,
)
from torch import Tensor, nn

import graphrt
from graphrt import kernels
from graphrt.capture import weights as capture_weights
from graphrt.capture.record_mode import uncompared
from graphrt.capture.recorder import compare, record
from graphrt.capture.runner import CapturedRunner
from graphrt.linear import Float8Linear


@pytest.fixture(autouse=True)
def _bitwise() -> Iterator[None]:
    with deterministic():
        yield


class WeightLog:
    """Slots of what each step quantizes: one by one, and of weights by one launch. Replays on a device issue nothing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.single: list[int] = []
        self.batched: list[list[int]] = []
        quantize, quantize_many = kernels.quantize, kernels.quantize_many

        def logged(x: Tensor, scale: Tensor, scale_inv: Tensor, slot: int, dtype: torch.dtype, **options: Any) -> Any:
            self.single.append(slot)
            return quantize(x, scale, scale_inv, slot, dtype, **options)

        def logged_many(table: kernels.QuantizeTable) -> None:
            self.batched.append([entry.to.slot for entry in table.entries])
            quantize_many(table)

        monkeypatch.setattr(kernels, "quantize", logged)
        monkeypatch.setattr(kernels, "quantize_many", logged_many)

    def take(self) -> tuple[list[int], list[list[int]]]:
        taken = self.single, self.batched
        self.single, self.batched = [], []
        return taken


def weight_slots(trainer: graphrt.Trainer) -> dict[str, int]:
    modules = trainer.model.named_modules()
    return {name: module.slots.weight for name, module in modules if isinstance(module, Float8Linear)}


def captured_slots(monkeypatch: pytest.MonkeyPatch, device: torch.device, **options: Any) -> tuple[list[str], list[list[str]]]:
    """Names of the linears whose weights the captured step made one by one, and by one launch."""
    log = WeightLog(monkeypatch)
    with make_trainer("graph", device, **options) as trainer:
        names = {slot: name for name, slot in weight_slots(trainer).items()}
        for step in range(2):
            trainer.step(token_batch(step))
            single, batched = log.take()
            assert not names.keys().isdisjoint(single)
            assert not batched
        trainer.step(token_batch(2))
        single, batched = log.take()
        trainer.step(token_batch(3))
        assert log.take() == ([], []), "a replay issued Python"
    return [names[slot] for slot in single if slot in names], [[names[slot] for slot in slots] for slots in batched]


LINEARS = ["blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down", "head"]


class ReversedModel(TokenModel):
    """Uses its second block first."""

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks[0](self.blocks[1](self.embedding(tokens))))


REVERSED = ["blocks.1.up", "blocks.1.down", "blocks.0.up", "blocks.0.down", "head"]


@pytest.mark.gpu
def test_larger_models_have_a_few_launches_in_the_order_of_use(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda")
    monkeypatch.setattr(capture_weights, "_FIRST_ELEMENTS", 1)
    single, batched = captured_slots(monkeypatch, device, model=ReversedModel)
    assert single == []
    assert batched == [REVERSED[:1], REVERSED[1:3], REVERSED[3:]]
    monkeypatch.undo()
    monkeypatch.setattr(capture_weights, "_FIRST_ELEMENTS", 1)
    assert_captured_equals_eager(device, model=ReversedModel, grad_accum_steps=2)


def test_without_a_branch_there_is_one_launch(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture_weights, "_FIRST_ELEMENTS", 1)
    log = WeightLog(monkeypatch)
    with make_trainer("graph", device, model=ReversedModel) as trainer:
        runner = trainer.make_captured(has_branch=False)
        for step in range(3):
            trainer.step_with(runner, token_batch(step))
        assert [len(slots) for slots in log.batched] == [len(LINEARS)]
        runner.close()


def test_a_forward_waits_once_for_each_launch_and_the_scale_update_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The edges of the graph, on streams that stand in for a GPU's."""
    monkeypatch.setattr(capture_weights, "_FIRST_ELEMENTS", 1)
    quantize_many, note_read = kernels.quantize_many, capture_weights._WeightUses.note_read
    update_scales, capture_cpu = kernels.update_scales_, CapturedRunner._capture_cpu
    with capturing(monkeypatch) as capture, make_trainer("graph", model=ReversedModel, grad_accum_steps=2) as trainer:
        names = {slot: name for name, slot in weight_slots(trainer).items()}

        def issue(name: str) -> None:
            if capture.branch.is_open:
                capture.issue(f"{name} #{len(capture.edges)}")

        def logged_many(table: kernels.QuantizeTable) -> None:
            issue("make " + " ".join(names[entry.to.slot] for entry in table.entries))
            quantize_many(table)

        def logged_read(uses: Any, quantized: kernels.QuantizedTensor) -> None:
            note_read(uses, quantized)
            issue("use " + next(name for name, m in trainer.model.named_modules() if getattr(m, "weight_watch", None) is uses))

        def logged_update(*args: Any, **options: Any) -> None:
            issue("update")
            update_scales(*args, **options)

        def opened(runner: CapturedRunner, graph: Any) -> Any:
            with capture.branch.open():
                return capture_cpu(runner, graph)

        monkeypatch.setattr(kernels, "quantize_many", logged_many)
        monkeypatch.setattr(kernels, "update_scales_", logged_update)
        monkeypatch.setattr(capture_weights._WeightUses, "note_read", logged_read)
        monkeypatch.setattr(CapturedRunner, "_capture_cpu", opened)
        assert trainer._captured is not None
        trainer._captured.branch = capture.branch
        for step in range(3):
            trainer.step(token_batch(step))

    makes = [node for node in capture.edges if node.startswith("make")]
    assert [capture.stream_of[node] for node in makes] == ["main", "side", "side"]
    uses = [node for node in capture.edges if node.startswith("use")]
    assert [node.split()[1] for node in uses] == REVERSED * 2
    for use in uses:
        assert all(capture.precedes(make, use) == (makes.index(make) <= _latest(makes, uses, use)) for make in makes)
    assert [len(capture.edges[use]) for use in uses] == [1, 2, 1, 2, 1, *[1] * 5], "one join a launch"
    first_update = next(node for node in capture.edges if node.startswith("update"))
    assert all(capture.precedes(make, first_update) for make in makes)
    assert capture.unjoined == set()


def _latest(makes: list[str], uses: list[str], use: str) -> int:
    """The number of the last launch that this use and those before it need."""
    before = [node.split()[1] for node in uses[: uses.index(use) + 1]]
    return max(i for i, make in enumerate(makes) for name in before if name in make.split())


@pytest.mark.parametrize("num", [1, 2])
def test_the_captured_step_holds_one_launch_for_all_weights(device: torch.device, num: int, monkeypatch: pytest.MonkeyPatch) -> None:
    single, batched = captured_slots(monkeypatch, device, grad_accum_steps=num)
    assert single == []
    assert [sorted(names) for names in batched] == [sorted(LINEARS)]


@pytest.mark.parametrize("kind", ["graphrt", "graphrt-reentrant", "own"])
def test_checkpointed_layers_are_in_the_launch(device: torch.device, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    single, batched = captured_slots(monkeypatch, device, model={"wrap": KINDS[kind]})
    assert single == []
    assert [sorted(names) for names in batched] == [sorted(LINEARS)]


def test_an_unused_weight_gets_no_amax(device: torch.device) -> None:
    options: dict[str, Any] = {"model": {"has_unused": True}}
    assert_captured_equals_eager(device, **options)
    with make_trainer("graph", device, **options) as trainer:
        run(trainer, token_batches())
        assert trainer.state is not None
        assert not trainer.state.amax_history("unused.weight").any()
        assert trainer.state.amax_history("head.weight")[1:].all()


class TeacherModel(TokenModel):
    """With a linear used without gradients only, one used so first, one used so last, and one in a disabled region."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher, self.plain = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        with torch.no_grad():
            target = self.teacher(x) + self.blocks[0](x)
        with graphrt.fp8_autocast(enabled=False):
            x = x + self.plain(x)
        x = self.blocks[1](self.blocks[0](x)) + target
        with torch.no_grad():
            target = self.teacher(x) + self.blocks[1](x)
        return self.head(x + target)


def test_only_weights_of_plain_training_forwards_are_in_the_launch(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    single, batched = captured_slots(monkeypatch, device, model=TeacherModel)
    assert [sorted(names) for names in batched] == [["blocks.1.down", "blocks.1.up", "head"]]
    assert {"teacher", "blocks.0.up", "blocks.0.down"} == set(single)
    monkeypatch.undo()
    assert_captured_equals_eager(device, model=TeacherModel)


class EditingModel(TokenModel):
    """Edits the weight of its head before each use."""

    def forward(self, tokens: Tensor) -> Tensor:
        with torch.no_grad():
            self.head.weight.clamp_(-0.1, 0.1)
        return super().forward(tokens)


def test_a_weight_edited_in_the_step_before_its_use_is_not_in_the_launch(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    single, batched = captured_slots(monkeypatch, device, model=EditingModel)
    assert single == ["head"]
    assert [sorted(names) for names in batched] == [sorted(LINEARS[:-1])]
    monkeypatch.undo()
    assert_captured_equals_eager(device, model=EditingModel)


class FlippingModel(TokenModel):
    """Uses its head's weight twice, the second time negated."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = super().forward(tokens)
        with torch.no_grad():
            self.blocks[0].up.weight.neg_()
        x = x + self.head(self.blocks[0](self.embedding(tokens)))
        with torch.no_grad():
            self.blocks[0].up.weight.neg_()
        return x


def test_a_weight_quantized_twice_in_a_step_keeps_what_the_first_backward_needs(device: torch.device) -> None:
    # High precision saves the weight itself, which may not change before the backward: no calibration.
    assert_captured_equals_eager(device, model=FlippingModel, calibrate=False)


class TiedModel(TokenModel):
    """Two linears, with slots of their own, share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].up.weight = self.blocks[0].up.weight


def test_linears_that_share_a_weight_quantize_it_each(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    single, batched = captured_slots(monkeypatch, device, model=TiedModel)
    assert single == []
    assert [sorted(names) for names in batched] == [sorted(LINEARS)]
    monkeypatch.undo()
    assert_captured_equals_eager(device, model=TiedModel)


def test_microbatches_with_checkpoints_and_tied_weights_equal_eager(device: torch.device) -> None:
    assert_captured_equals_eager(device, model={"wrap": KINDS["graphrt"], "is_tied": True, "dropout": 0.2}, grad_accum_steps=2)


class LengthModel(TokenModel):
    """Longer sequences take another layer."""

    def __init__(self) -> None:
        super().__init__()
        self.short, self.long = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + (self.short if tokens.shape[1] <= 16 else self.long)(x)
        return self.head(self.blocks[0](x))


def test_each_shape_has_its_own_set(device: torch.device) -> None:
    batches = [token_batch(step, seq=32 if step % 2 else 16) for step in range(2 * NUM_STEPS)]
    with make_trainer("eager", device, model=LengthModel) as trainer:
        expected = run(trainer, batches)
    with make_trainer("graph", device, model=LengthModel, max_graphs=2) as trainer:
        actual = run(trainer, batches)
        report = trainer.report()
        assert report.capture is not None
        assert report.capture.num_graphs == 2
    assert_same_trajectory(actual, expected)


class FirstStepModel(TokenModel):
    """Uses a layer in its first two calls (calibration and the first warmup step) only."""

    def __init__(self) -> None:
        super().__init__(has_unused=True)
        self.num_calls = 0

    def forward(self, tokens: Tensor) -> Tensor:
        self.num_calls += 1
        if self.num_calls <= 2:
            return super().forward(tokens) + 0.0 * self.unused(self.embedding(tokens)).sum()
        return super().forward(tokens)


def test_a_layer_of_the_first_warmup_step_only_is_not_in_the_launch(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    single, batched = captured_slots(monkeypatch, device, model=FirstStepModel)
    assert single == []
    assert [sorted(names) for names in batched] == [sorted(LINEARS)]
    monkeypatch.undo()
    assert_captured_equals_eager(device, model=FirstStepModel)


def test_a_weight_that_the_captured_step_does_not_use_is_refused(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a comparison of the operations, as for models with compiled parts."""
    monkeypatch.setattr(CapturedRunner, "can_observe", False)
    is_used = [True]

    def loss_fn(model: Any, batch: dict[str, Tensor]) -> Tensor:
        x = model.blocks[0](model.embedding(batch["tokens"]))
        x = model.blocks[1](x) if is_used[0] else x + 0.0 * sum(p.sum() for p in model.blocks[1].parameters())
        return F.cross_entropy(model.head(x).flatten(0, 1).float(), batch["labels"].flatten())

    with make_trainer("graph", device, loss_fn=loss_fn) as trainer:
        trainer.step(token_batch(0))
        trainer.step(token_batch(1))
        is_used[0] = False
        before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
        with pytest.raises(
            graphrt.CaptureError, match=r"blocks\.1\.up\.weight was used 1 times in the last warmup .* not used in the captured"
        ):
            trainer.step(token_batch(2))
        assert all(torch.equal(p, before[name]) for name, p in trainer.model.named_parameters())
        is_used[0] = True
        trainer.step(token_batch(2))


def test_weights_edited_between_replays_are_quantized_anew(device: torch.device) -> None:
    def edit(trainer: graphrt.Trainer, step: int) -> None:
        if step > 2:
            with torch.no_grad():
                trainer.model.get_parameter("head.weight").mul_(1.25)

    assert_captured_equals_eager(device, before_step=edit)


def test_the_comparison_of_steps_leaves_out_what_is_issued_elsewhere() -> None:
    x = torch.ones(4)

    def step(is_first: bool) -> None:
        if is_first:
            with uncompared():
                x.mul_(2)
        x.add_(1)
        if not is_first:
            with uncompared():
                x.mul_(2)

    first, second = record(lambda: step(True))[0], record(lambda: step(False))[0]
    assert compare(first, second) == []
    assert first.num_nodes == second.num_nodes == 2
    x.fill_(1)
    second.replay()
    assert x.tolist() == [4.0] * 4


def test_a_parametrized_weight_is_not_computed_for_the_watch(device: torch.device) -> None:
    """Once a forward, as in a model that nobody watches."""

    class Doubled(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            num_computed[0] += 1
            return 2 * weight

    def prepare(model: nn.Module) -> None:
        nn.utils.parametrize.register_parametrization(model.get_submodule("head"), "weight", Doubled())

    num_computed = [0]
    counts = {}
    for mode in ("eager", "graph"):
        with make_trainer(mode, device, prepare=prepare, calibrate=False) as trainer:
            num_computed[0] = 0
            trainer.step(token_batch(0))
            counts[mode] = num_computed[0]
    assert counts["graph"] == counts["eager"] > 0


def test_a_failed_step_leaves_no_quantized_weight_behind(device: torch.device) -> None:
    def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Any:
        token_loss(model, batch)
        raise ZeroDivisionError

    for mode in ("eager", "graph"):
        with make_trainer(mode, device, loss_fn=loss_fn, calibrate=False) as trainer:
            with pytest.raises(ZeroDivisionError):
                trainer.step(token_batch(0))
            assert all(module._weight_cache is None for module in trainer.model.modules() if isinstance(module, Float8Linear))


def test_no_step_leaves_a_quantized_weight_behind(device: torch.device) -> None:
    """Warmups, captures and replays, eager steps and evaluations: the next step makes its own."""
    with make_trainer("graph", device) as trainer:
        linears = [module for module in trainer.model.modules() if isinstance(module, Float8Linear)]
        for step in range(4):
            trainer.step(token_batch(step))
            assert all(linear._weight_cache is None and linear.weight_watch is None for linear in linears)
        with trainer.eager():
            trainer.step(token_batch(4))
        assert all(linear._weight_cache is None for linear in linears)
        trainer.evaluate(token_batch(5))
        assert all(linear._weight_cache is None for linear in linears)


@pytest.mark.parametrize("num", [1, 2])
@pytest.mark.parametrize("kind", ["plain", "graphrt", "graphrt-reentrant"])
def test_the_last_forward_of_the_captured_step_lets_the_weight_go(kind: str, num: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the forward multiplies with goes back to the pool then; a recompute is a forward too."""
    alive: list[tuple[Float8Linear, bool, bool]] = []  # at each use: whether it was expected to be the last, whether it is kept
    quantized_weight = Float8Linear._quantized_weight

    def watched(linear: Float8Linear, *args: Any) -> kernels.QuantizedTensor:
        quantized = quantized_weight(linear, *args)
        uses = linear.weight_watch
        assert uses is not None
        alive.append((linear, uses.is_last_use, linear._weight_cache is not None))
        return quantized

    monkeypatch.setattr(Float8Linear, "_quantized_weight", watched)
    with make_trainer("graph", "cpu", model={"wrap": KINDS.get(kind, plainly)}, grad_accum_steps=num) as trainer:
        linears = [module for module in trainer.model.modules() if isinstance(module, Float8Linear)]
        for step in range(3):
            alive.clear()
            trainer.step(token_batch(step))
            for linear in linears:
                uses = [(is_last, is_kept) for other, is_last, is_kept in alive if other is linear]
                if step == 0:  # nothing is known yet
                    assert all(is_kept for _, is_kept in uses)
                else:
                    assert uses == [*[(False, True)] * (len(uses) - 1), (True, False)]
                assert len(uses) in (num, 2 * num)


def test_a_weight_used_once_more_than_in_the_step_before_is_quantized_again(device: torch.device) -> None:
    """Warmup steps only: a captured step that differs is refused."""

    def loss_fn(model: Any, batch: dict[str, Tensor]) -> Tensor:
        x = model.embedding(batch["tokens"])
        for _ in range(num_passes[0]):
            x = model.blocks[0](x)
        return F.cross_entropy(model.head(x).flatten(0, 1).float(), batch["labels"].flatten())

    def trajectory(mode: str) -> list[Any]:
        with make_trainer(mode, device, loss_fn=loss_fn, warmup_steps=3) as trainer:
            found = []
            for step, num in enumerate((1, 2, 2, 2, 2)):
                num_passes[0] = num
                found += run(trainer, [token_batch(step)])
            return found

    num_passes = [1]
    assert_same_trajectory(trajectory("graph"), trajectory("eager"))


def test_a_weight_that_another_stream_reads_is_kept_to_the_end_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Freed at its last use, its memory would go to what the capture stream gets next, with nothing to wait for the other."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    quantized = kernels.allocate(torch.zeros(16, 16), torch.float8_e4m3fn, True)
    stream = "capture"
    uses = capture_weights._WeightUses(None, 3, [], is_on_gpu=True)
    with uses.writing(capture_weights.WeightKey(0, 0, 0, True), is_recording=True):
        pass
    uses.note_read(quantized)
    assert uses.kept is None
    stream = "the user's"
    uses.note_read(quantized)
    assert uses.is_last_use
    assert uses.kept is quantized


@pytest.mark.gpu
def test_quantized_weights_of_a_captured_step_are_in_the_pool() -> None:
    """The pool is smaller than with all of them alive to the end of the step, and nothing of them is outside."""
    device, width, num = torch.device("cuda", 0), 4096, 8
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(num))).to(device)
    graphrt.convert_to_float8_training(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with graphrt.Trainer(model, optimizer, lambda model, x: model(x).square().mean(), mode="graph") as trainer:
        for _ in range(4):
            trainer.step(torch.randn(64, width, device=device))
        torch.cuda.synchronize()
        num_bytes = num * width * width  # of one copy of all weights
        outside = torch.cuda.memory_allocated(device) - sum(p.numel() * 4 for p in model.parameters())
        # Gradients are 4 bytes a weight, and cuBLAS has workspaces of 32 MiB; FP8 weights would be 2 bytes more.
        assert outside < 5.5 * num_bytes
