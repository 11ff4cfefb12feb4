"""Replays of whole training steps equal eager steps bit for bit."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from graphrt.capture.recorder import Recording, compare, record

NUM_STEPS = 12
WIDTH, TOKENS, VOCABULARY = 16, 8, 11


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Tensors this small are slower on several."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Block(nn.Module):
    """Pre-norm attention and MLP with dropout."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 32), nn.GELU(), nn.Dropout(dropout), nn.Linear(32, WIDTH))
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class Transformer(nn.Module):
    """Token model with a tied head; `wrap` calls each block (checkpointing goes there)."""

    def __init__(self, dropout: float = 0.0, wrap: Callable[..., Tensor] = lambda block, x: block(x)) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(2))
        self.wrap = wrap

    def forward(self, batch: Tensor) -> Tensor:
        x = self.embedding(batch[:, :-1])
        for block in self.blocks:
            x = self.wrap(block, x)
        logits = F.linear(x, self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


class WithBatchNorm(nn.Module):
    """Convolution and batch norm: buffers updated in forward, integer buffers too."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.MaxPool1d(2), nn.Flatten(), nn.LazyLinear(1))

    def forward(self, batch: Tensor) -> Tensor:
        return self.body(batch.unsqueeze(1).float()).square().mean()


class Step:
    """A whole training step on one static batch: forward, backward, clipping, optimizer, of `num_microbatches` parts."""

    def __init__(self, model: nn.Module, optimizer: str = "adamw", num_microbatches: int = 1, autocast: bool = False) -> None:
        self.model, self.num_microbatches, self.autocast = model, num_microbatches, autocast
        self.batch = batches(1)[0]
        model(self.batch)  # lazy modules
        parameters = list(model.parameters())
        self.lr = torch.tensor(1e-2)
        kinds: dict[str, Callable[[], torch.optim.Optimizer]] = {
            "adamw": lambda: torch.optim.AdamW(parameters, lr=self.lr, fused=True),
            "sgd": lambda: torch.optim.SGD(parameters, lr=self.lr, momentum=0.9, fused=True),
            "none": lambda: torch.optim.SGD(parameters, lr=0.0),
        }
        self.optimizer, self.has_optimizer = kinds[optimizer](), optimizer != "none"
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)

    def __call__(self) -> tuple[Tensor, Tensor]:
        self.optimizer.zero_grad(set_to_none=False)
        total = torch.zeros(())
        for part in self.batch.chunk(self.num_microbatches):
            with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
                loss = self.model(part) / self.num_microbatches
            loss.backward()
            total += loss.detach()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        if self.has_optimizer:
            self.optimizer.step()
        return total, norm

    def tensors(self) -> list[Tensor]:
        """Parameters, gradients, buffers and optimizer state."""
        values = [*self.model.parameters(), *(p.grad for p in self.model.parameters() if p.grad is not None), *self.model.buffers()]
        for state in self.optimizer.state.values():
            values += [value for value in state.values() if isinstance(value, Tensor)]
        return [value.detach() for value in values]


def batches(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, VOCABULARY, (4, TOKENS + 1), generator=generator) for _ in range(count)]


def run_eager(step: Step) -> list[list[Tensor]]:
    """Loss, norm and all tensors after each step."""
    history = []
    for index, batch in enumerate(batches(NUM_STEPS)):
        step.batch.copy_(batch)
        step.lr.fill_(1e-2 / (index + 1))
        results = step()
        history.append([value.clone() for value in (*results, *step.tensors())])
    return history


def run_recorded(step: Step, num_warmup: int = 1) -> list[list[Tensor]]:
    """The same through one recording: warm up, record (which is a real step here), replay."""
    history: list[list[Tensor]] = []
    recording: Recording | None = None
    results: Iterable[Tensor] = ()
    for index, batch in enumerate(batches(NUM_STEPS)):
        step.batch.copy_(batch)
        step.lr.fill_(1e-2 / (index + 1))
        if index < num_warmup:
            results = step()
        elif recording is None:
            recording, results = record(step)
        else:
            recording.replay()
        history.append([value.clone() for value in (*results, *step.tensors())])
    return history


def reentrant(block: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(block, x, use_reentrant=True)


def non_reentrant(block: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(block, x, use_reentrant=False)


def nested(block: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(lambda y: checkpoint(block, y, use_reentrant=False) * 1.0, x, use_reentrant=False)


def in_fork(block: nn.Module, x: Tensor) -> Tensor:
    """The block's draws leave no trace in the generator."""
    with torch.random.fork_rng(devices=[]):
        return block(x)


class Sine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        (grad,) = grad_outputs
        (x,) = ctx.saved_tensors
        return grad * x.cos()


def with_custom_function(block: nn.Module, x: Tensor) -> Tensor:
    return Sine.apply(block(x))


def with_compiled_blocks() -> Transformer:
    model = Transformer(0.1)
    for block in model.blocks:
        block.compile(backend="eager")
    return model


CASES: dict[str, Callable[[], Step]] = {
    "plain": lambda: Step(Transformer()),
    "dropout": lambda: Step(Transformer(0.5)),
    "sgd": lambda: Step(Transformer(0.1), "sgd"),
    "no optimizer": lambda: Step(Transformer(0.1), "none"),
    "microbatches": lambda: Step(Transformer(0.1), num_microbatches=4),
    "autocast": lambda: Step(Transformer(0.1), num_microbatches=2, autocast=True),
    "checkpoint reentrant": lambda: Step(Transformer(0.5, reentrant)),
    "checkpoint": lambda: Step(Transformer(0.5, non_reentrant), num_microbatches=2),
    "checkpoint nested": lambda: Step(Transformer(0.5, nested)),
    "fork_rng": lambda: Step(Transformer(0.5, in_fork)),
    "custom function": lambda: Step(Transformer(0.1, with_custom_function)),
    "compiled": lambda: Step(with_compiled_blocks()),
    "batch norm": lambda: Step(WithBatchNorm()),
}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's compiler looks at it
@pytest.mark.parametrize("name", CASES)
def test_replays_equal_eager_bit_for_bit(name: str) -> None:
    histories = []
    for run in (run_eager, run_recorded):
        torch.manual_seed(3)
        histories.append(run(CASES[name]()))
    for index, (eager, recorded) in enumerate(zip(*histories, strict=True)):
        for position, (a, b) in enumerate(zip(eager, recorded, strict=True)):
            assert torch.equal(a, b), f"step {index}, tensor {position}"


@pytest.mark.parametrize("wrap", [reentrant, non_reentrant, nested])
def test_recompute_draws_the_masks_of_its_forward_at_each_replay(wrap: Callable[..., Tensor]) -> None:
    """Gradients of checkpointed and plain replays are the same for the same draws, and differ from replay to replay."""
    gradients = []
    for call in (wrap, lambda block, x: block(x)):
        torch.manual_seed(3)
        step = Step(Transformer(0.5, call), "none")
        recording, _ = record(step)
        gradients.append([])
        for _ in range(3):
            recording.replay()
            gradients[-1].append(torch.cat([p.grad.flatten() for p in step.model.parameters() if p.grad is not None]))
    for checkpointed, plain in zip(*gradients, strict=True):
        torch.testing.assert_close(checkpointed, plain, rtol=1e-5, atol=1e-7)
    assert not torch.equal(gradients[0][0], gradients[0][1])


def test_addresses_are_static_and_outputs_are_the_bodys_own() -> None:
    step = Step(Transformer())
    made: list[Tensor] = []

    def body() -> Tensor:
        made.append(step()[0])
        return made[0]

    recording, loss = record(body)
    assert loss is made[0]
    assert recording.outputs is loss
    addresses = [value.data_ptr() for value in (loss, *step.tensors())]
    before = loss.clone()
    recording.replay()
    assert [value.data_ptr() for value in (loss, *step.tensors())] == addresses
    assert not torch.equal(loss, before)
    assert len(made) == 1


def test_whole_training_steps_compare_equal_and_a_moved_gradient_does_not() -> None:
    step = Step(Transformer(0.5, non_reentrant), num_microbatches=2)
    step()
    first, second = (record(step, keep_outputs=False)[0] for _ in range(2))
    assert compare(first, second) == []
    assert first.num_nodes == record(step)[0].num_nodes
    parameter = next(step.model.parameters())
    assert parameter.grad is not None
    kept, parameter.grad = parameter.grad, parameter.grad.clone()
    assert {difference.kind for difference in compare(second, record(step, keep_outputs=False)[0])} == {"rebound"}
    del kept


@pytest.mark.parametrize("name", sorted(set(CASES) - {"compiled"}))
def test_a_step_that_is_only_compared_issues_what_a_recorded_one_does(name: str) -> None:
    step = CASES[name]()
    step()
    first, second = record(step, keep_outputs=False)[0], record(step)[0]
    assert [str(difference) for difference in compare(first, second)] == []


def test_names_of_modules_survive_the_early_stop_of_a_recompute() -> None:
    step = Step(Transformer(0.5, non_reentrant), "none")
    recording, _ = record(step, on_module=step.model)
    modules = {node.module for node in recording.nodes}
    assert {"embedding", "blocks.0.qkv", "blocks.1.mlp.3", ""} <= modules
    assert recording.nodes[-1].module == ""
