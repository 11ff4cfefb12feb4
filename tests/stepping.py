"""Trainers on small token models, and everything their steps leave behind, for bitwise comparison."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from training import KINDS, assert_same_trajectory, assert_same_values, plainly, state_values

import graphrt

HISTORY = 3
#: More than the history, so that it wraps, and more than two warmup steps and the capture.
NUM_STEPS = HISTORY + 3
WIDTH, SEQ, BATCH, VOCABULARY = 16, 16, 4, 32

Values = dict[str, Tensor]


class TokenBlock(nn.Module):
    """Attention-free transformer block: norm, two linears, dropout, residual."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class TokenModel(nn.Module):
    """Embedding, blocks, head. ``wrap`` calls each block: checkpointing goes there. ``embed`` looks tokens up."""

    def __init__(
        self,
        *,
        dropout: float = 0.0,
        is_tied: bool = False,
        has_unused: bool = False,
        wrap: Callable[..., Any] = plainly,
        embed: Callable[[Tensor, nn.Embedding], Tensor] = lambda tokens, module: module(tokens),
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(TokenBlock(dropout) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if is_tied:
            self.head.weight = self.embedding.weight
        if has_unused:
            self.unused = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("num_tokens", torch.zeros(()))
        self.wrap, self.embed = wrap, embed

    def forward(self, tokens: Tensor) -> Tensor:
        if self.training and torch.is_grad_enabled():
            self.num_tokens.add_(tokens.numel())
        x = self.embed(tokens, self.embedding)
        for block in self.blocks:
            x = self.wrap(block, x)
        return self.head(x)


def token_loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Cross entropy of the next token, scaled by the batch; the entropy as a metric."""
    logits = model(batch["tokens"])
    loss = F.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten()) * batch["weight"]
    return loss, {"spread": logits.detach().float().std()}


def token_batch(step: int, *, weight: float | None = None, batch_size: int = BATCH, seq: int = SEQ) -> dict[str, Tensor]:
    """Other tokens each step, on the CPU; ``weight`` scales the loss, differently each step by default."""
    generator = torch.Generator().manual_seed(500 + step)
    tokens = torch.randint(VOCABULARY, (batch_size, seq + 1), generator=generator)
    scale = torch.tensor(1.0 + 0.5 * step if weight is None else weight)
    return {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous(), "weight": scale}


def token_batches(num_steps: int = NUM_STEPS, **options: Any) -> list[dict[str, Tensor]]:
    return [token_batch(step, **options) for step in range(num_steps)]


OptimizerMaker = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def make_trainer(
    mode: str,
    device: torch.device | str = "cpu",
    *,
    model: dict[str, Any] | Callable[[], nn.Module] | None = None,
    dtype: torch.dtype | None = None,
    optimizer: OptimizerMaker = adamw,
    loss_fn: Any = token_loss,
    is_fp8: bool = True,
    recipe: graphrt.DelayedScaling | None = None,
    prepare: Callable[[nn.Module], Any] = lambda model: None,
    seed: int = 0,
    **options: Any,
) -> graphrt.Trainer:
    """A trainer of a fresh model; the same arguments give the same run, whatever ran before in the process."""
    torch.manual_seed(seed)
    net = model() if callable(model) else TokenModel(**(model or {}))
    net = net.to(device, dtype)
    if is_fp8:
        graphrt.convert_to_float8_training(net, recipe=recipe or graphrt.DelayedScaling(amax_history_len=HISTORY))
    prepare(net)
    options = {"max_grad_norm": 1.0, **options}
    trainer = graphrt.Trainer(net, optimizer([p for p in net.parameters() if p.requires_grad]), loss_fn, mode=mode, **options)
    torch.manual_seed(seed + 1)
    return trainer


def values(trainer: graphrt.Trainer) -> Values:
    """Copies of everything a step may change."""
    found = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    found.update({name: buffer.detach().clone() for name, buffer in trainer.model.named_buffers()})
    found.update({f"{name}.grad": p.grad.detach().clone() for name, p in trainer.model.named_parameters() if p.grad is not None})
    names = {id(p): name for name, p in trainer.model.named_parameters()}
    for p, state in trainer.optimizer.state.items():
        for key, value in state.items():
            value = value.detach().clone() if isinstance(value, Tensor) else torch.tensor(float(value or 0.0))
            found[f"optimizer {names.get(id(p))} {key}"] = value
    if trainer.state is not None:
        found.update({f"state {name}": value for name, value in state_values(trainer.state).items()})
    found["skipped steps"] = torch.tensor(trainer.num_skipped_steps)
    found["steps taken"] = torch.tensor(trainer.steps_taken)
    found["rng"] = torch.cuda.get_rng_state(trainer.device) if trainer.device.type == "cuda" else torch.get_rng_state()
    return found


def step_values(trainer: graphrt.Trainer, batch: Any) -> Values:
    """One step, and everything it returned and left behind."""
    result = trainer.step(batch)
    metrics = {f"metric {name}": value.clone() for name, value in result.metrics.items()}
    return {
        "loss": result.loss.clone(),
        "norm": result.grad_norm.clone(),
        "is skipped": result.skipped.clone(),
        **metrics,
        **values(trainer),
    }


def run(
    trainer: graphrt.Trainer, batches: Sequence[Any], before_step: Callable[[graphrt.Trainer, int], Any] = lambda trainer, step: None
) -> list[Values]:
    trajectory = []
    for step, batch in enumerate(batches):
        before_step(trainer, step)
        trajectory.append(step_values(trainer, batch))
    return trajectory


def assert_moves(trajectory: list[Values]) -> None:
    """A trajectory whose weights or scales stand still would compare equal to anything that does nothing."""
    assert not torch.equal(trajectory[0]["embedding.weight"], trajectory[-1]["embedding.weight"])
    assert trajectory[0]["loss"] != trajectory[1]["loss"]


def assert_captured_equals_eager(
    device: torch.device | str = "cpu",
    *,
    batches: Sequence[Any] | None = None,
    before_step: Callable[[graphrt.Trainer, int], Any] = lambda trainer, step: None,
    **options: Any,
) -> list[Values]:
    """Run the same steps captured and eagerly and compare every bit; returns the eager trajectory."""
    batches = token_batches() if batches is None else batches
    with make_trainer("eager", device, **options) as trainer:
        expected = run(trainer, batches, before_step)
    with make_trainer("graph", device, **options) as trainer:
        actual = run(trainer, batches, before_step)
        report = trainer.report()
        assert report.capture is not None
        assert report.capture.num_graphs == 1
    assert_same_trajectory(actual, expected)
    assert_moves(expected)
    return expected


@contextmanager
def deterministic() -> Iterator[None]:
    """What bitwise comparisons need on CUDA; the CPU kernels of these models are deterministic anyhow."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


__all__ = [
    "BATCH", "HISTORY", "KINDS", "NUM_STEPS", "SEQ", "VOCABULARY", "WIDTH", "TokenBlock", "TokenModel", "Values", "adamw",
    "assert_captured_equals_eager", "assert_moves", "assert_same_trajectory", "assert_same_values", "deterministic", "make_trainer", "run",
    "step_values", "token_batch", "token_batches", "token_loss", "values",
]  # fmt: skip
