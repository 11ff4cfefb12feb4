"""Parity: proof that the captured step computes what the eager step computes.

From one snapshot the same batches are run twice, captured and eager, and everything a step leaves behind is compared bit
for bit: scales, amax histories, losses, gradients, parameters, optimizer state. Bitwise comparison needs deterministic
kernels, which a fast training graph does not use (the attention backward adds with atomics), so a strict graph of its own
is captured for it. The training graph is then compared with eager within a tolerance. Everything is put back at the end.
"""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graphrt import batch as batches_
from graphrt.capture.runner import CapturedRunner, Phase
from graphrt.errors import ParityError
from graphrt.snapshot import StepSnapshot
from graphrt.step import StepResult
from graphrt.trainer import Trainer

__all__ = ["ParityDifference", "ParityReport", "check_parity"]

#: How far the losses of the training graph may be from eager's: run-to-run noise of atomics in bf16 is well below it.
LOSS_RTOL = 1e-2
_WORKSPACE_CONFIGS = (":4096:8", ":16:8")


@dataclass(frozen=True)
class ParityDifference:
    """The first thing that differed.

    Attributes:
        step: 0-based step of the comparison.
        name: what differed: "loss", "scale of layers.0.qkv.input", a parameter's name.
        eager, captured: both values; of a tensor, its first differing element.
        amaxes_agreed: for a scale, whether the amaxes it was made from agreed; None for anything else.
    """

    step: int
    name: str
    eager: float
    captured: float
    amaxes_agreed: bool | None = None

    def __str__(self) -> str:
        amaxes = "" if self.amaxes_agreed is None else f"; the amaxes {'agreed' if self.amaxes_agreed else 'differed too'}"
        return f"step {self.step}: {self.name} is {self.eager!r} eager and {self.captured!r} captured{amaxes}"


@dataclass(frozen=True)
class ParityReport:
    """What `check_parity` found. True in a boolean context if both comparisons passed.

    Attributes:
        num_steps: steps each path ran.
        num_values: values compared bit for bit over all steps.
        difference: the first difference of the strict comparison, None if there was none.
        max_loss_difference: largest relative difference of the training graph's losses from eager's.
        loss_rtol: what it may be.
    """

    num_steps: int
    num_values: int
    difference: ParityDifference | None
    max_loss_difference: float
    loss_rtol: float = LOSS_RTOL

    @property
    def is_equal(self) -> bool:
        """Whether the strict comparison found every bit equal."""
        return self.difference is None

    @property
    def is_within_tolerance(self) -> bool:
        """Whether the training graph's losses are as close to eager's as they should be."""
        return self.max_loss_difference <= self.loss_rtol

    def __bool__(self) -> bool:
        return self.is_equal and self.is_within_tolerance

    def __str__(self) -> str:
        strict = f"{self.num_values:,} values bitwise equal" if self.is_equal else f"DIFFERENT: {self.difference}"
        verdict = "" if self.is_within_tolerance else "TOO FAR: "
        return (
            f"parity over {self.num_steps} steps, captured and eager from one snapshot\n"
            f"  strict graph (deterministic kernels)  {strict}\n"
            f"  training graph                        {verdict}losses within {self.max_loss_difference:.1e} of eager "
            f"(tolerance {self.loss_rtol:.0e})"
        )

    def raise_if_different(self) -> None:
        """Raise ParityError, with the report, unless both comparisons passed."""
        if not self:
            raise ParityError(f"The captured step differs from the eager one.\n{self}")


def check_parity(trainer: Trainer, batches: Sequence[Any]) -> ParityReport:
    """Run ``batches`` captured and eagerly from the trainer's present state, compare, and put everything back.

    Both graphs are captured for the comparison. They write gradients to the tensors that are there, where the trainer's own
    first graph makes them in its pool; apart from that they hold what it holds.

    Args:
        trainer: in any mode. Its model, optimizer and quantization state are as before afterwards, its RNG too.
        batches: one batch a step, different ones, of one shape; more than ``amax_history_len`` let the history wrap.

    Raises:
        ValueError: no batches.
        ParityError: the environment lacks what deterministic kernels need; the message has the line to add.
    """
    batches = [batches_.plain(batch) for batch in batches]
    if not batches:
        raise ValueError("check_parity got no batches. Pass at least one, better amax_history_len + 2 different ones.")
    _check_environment(trainer)
    trainer.check_usable("check_parity")
    with trainer.everything_put_back(), _plain_blocks(trainer):
        _prime(trainer, batches[0])
        start = trainer.snapshot()
        with _deterministic():
            eager = _run(trainer, start, trainer.step_eager, batches)
            captured = _run_captured(trainer, start, batches, trainer.make_captured())
        difference = _first_difference(trainer, eager, captured)
        is_exact = trainer.device.type != "cuda"
        loose = captured if is_exact else _run_captured(trainer, start, batches, trainer.make_captured())
        reference = eager if is_exact else _run(trainer, start, trainer.step_eager, batches)
    num_values = sum(value.numel() for trace in eager for value in trace.values())
    return ParityReport(len(batches), num_values, difference, _max_loss_difference(reference, loose))


def _check_environment(trainer: Trainer) -> None:
    if trainer.device.type == "cuda" and os.environ.get("CUBLAS_WORKSPACE_CONFIG") not in _WORKSPACE_CONFIGS:
        raise ParityError(
            "check_parity needs deterministic cuBLAS, and CUBLAS_WORKSPACE_CONFIG is not set. "
            "Start the program with: export CUBLAS_WORKSPACE_CONFIG=:4096:8"
        )


def _plain_blocks(trainer: Trainer) -> AbstractContextManager[Any]:
    """The recorder runs a compiled block as the operations it was compiled from, so the steps beside it have to as well."""
    return nullcontext() if trainer.device.type == "cuda" else torch.compiler.set_stance("force_eager")


@contextmanager
def _deterministic() -> Iterator[None]:
    was_enabled, was_warn_only = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_enabled, warn_only=was_warn_only)


def _prime(trainer: Trainer, batch: Any) -> None:
    """One step of a trainer that never took one, so that scales, gradients and optimizer state exist for both paths alike."""
    if trainer.steps_taken == 0:
        trainer.step_eager(batch)


Trace = dict[str, Tensor]


def _run(trainer: Trainer, start: StepSnapshot, step: Callable[[Any], StepResult], batches: Sequence[Any]) -> list[Trace]:
    start.restore()
    return [_trace(trainer, step(batch)) for batch in batches]


def _run_captured(trainer: Trainer, start: StepSnapshot, batches: Sequence[Any], runner: CapturedRunner) -> list[Trace]:
    """As `_run`, every step of it a replay: warmup and capture come before, and are undone."""
    try:
        while (graph := runner.select(batches[0])) is None or graph.phase is not Phase.REPLAY:
            trainer.step_with(runner, batches[0])
        return _run(trainer, start, lambda batch: trainer.step_with(runner, batch), batches)
    finally:
        runner.close()


@torch.no_grad()
def _trace(trainer: Trainer, result: StepResult) -> Trace:
    """What one step left behind; of large tensors a checksum of the bits."""
    trace = {"loss": result.loss.clone(), "grad_norm": result.grad_norm.clone(), "skipped": result.skipped.clone()}
    if trainer.state is not None:
        snapshot = trainer.state.snapshot().tensors
        trace.update({name: snapshot[name] for name in ("amax_history", "scale", "scale_inv", "num_nonfinite", "num_updates")})
    for name, p in trainer.named_parameters.items():
        trace[name] = _checksum(p)
        if p.grad is not None:
            trace[f"{name}.grad"] = _checksum(p.grad)
        for key, value in trainer.optimizer.state.get(p, {}).items():
            if isinstance(value, Tensor):
                trace[f"optimizer state {key} of {name}"] = _checksum(value)
    trace["RNG state"] = torch.cuda.get_rng_state(trainer.device) if trainer.device.type == "cuda" else torch.get_rng_state()
    return trace


def _checksum(x: Tensor) -> Tensor:
    """Two integers that change with the bits of ``x``: their sum, and their sum weighted by position."""
    bits = x.detach().contiguous().view(torch.uint8 if x.element_size() == 1 else torch.int16 if x.element_size() == 2 else torch.int32)
    bits = bits.flatten().to(torch.int64)
    weights = torch.arange(bits.numel(), device=bits.device) % 8191 + 1
    return torch.stack([bits.sum(), (bits * weights).sum()])


def _first_difference(trainer: Trainer, eager: list[Trace], captured: list[Trace]) -> ParityDifference | None:
    for step, (one, other) in enumerate(zip(eager, captured, strict=True)):
        for name in [*one, *(name for name in other if name not in one)]:
            if name not in one or name not in other or not _same_bits(one[name], other[name]):
                return _difference(trainer, step, name, one, other)
    return None


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8))


def _difference(trainer: Trainer, step: int, name: str, one: Trace, other: Trace) -> ParityDifference:
    if name not in one or name not in other:
        return ParityDifference(step, f"{name} (present on one path only)", float(name in one), float(name in other))
    a, b = one[name].flatten(), other[name].flatten()
    at = int((a.view(torch.uint8) != b.view(torch.uint8)).nonzero()[0]) // a.element_size()
    label, agreed = name, None
    if trainer.state is not None and name in ("amax_history", "scale", "scale_inv", "num_nonfinite"):
        slot = at // 4 if name == "scale_inv" else at % len(trainer.state.slots)
        label = f"{name} of {trainer.state.slots[slot]}"
        if name.startswith("scale"):
            agreed = _same_bits(one["amax_history"][:, slot].clone(), other["amax_history"][:, slot].clone())
    elif name in trainer.named_parameters or name.endswith(".grad") or name.startswith("optimizer state"):
        label = f"checksum of {name}"
    return ParityDifference(step, label, a[at].item(), b[at].item(), agreed)


def _max_loss_difference(eager: list[Trace], captured: list[Trace]) -> float:
    pairs = [(float(a["loss"]), float(b["loss"])) for a, b in zip(eager, captured, strict=True)]
    return max(_relative_difference(a, b) for a, b in pairs)


def _relative_difference(a: float, b: float) -> float:
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    difference = abs(a - b) / max(abs(a), 1e-30)
    return math.inf if math.isnan(difference) else difference
