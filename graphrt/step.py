"""The step body: one optimizer step, written once, issued by both paths.

It is in a form that a CUDA graph can hold: no host reads, no branch on a tensor, gradients accumulated into tensors
that stay. What differs between the paths is handed in: the region (the eager one flushes at its entry, the captured one
does not), and when the body runs.
"""

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from graphrt.aside import aside, join_asides
from graphrt.batch import map_tensors
from graphrt.errors import CaptureError, GraphrtError
from graphrt.kernels.grad_norm import NORM_DTYPES, NormTable, grad_norm
from graphrt.linear import forget_weights
from graphrt.optimizer import Norms, StepOptimizer, scale_
from graphrt.ranges import BACKWARD, CLIP, FORWARD, MICROBATCH, OPTIMIZER, ZERO_GRAD
from graphrt.region import Region
from graphrt.sinks import GradientSinks
from graphrt.state import QuantizationState, last_update

__all__ = ["Gradients", "StepBody", "StepResult"]

LossFn = Callable[[nn.Module, Any], Any]
#: Copies results to where they stay; in a capture without allocating anything.
Publish = Callable[["StepResult"], None]
_get_grad = operator.attrgetter("grad")


@dataclass(frozen=True)
class StepResult:
    """What one step produced: device tensors that the caller owns, read when and if it wants to.

    Attributes:
        loss: 0-dim fp32, the mean over the microbatches.
        grad_norm: 0-dim fp32, the global L2 norm before clipping.
        skipped: 0-dim bool, whether a non-finite gradient made the optimizer leave everything as it was.
        metrics: what ``loss_fn`` returned beside the loss, means over the microbatches.
    """

    loss: Tensor
    grad_norm: Tensor
    skipped: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)

    def clone(self) -> "StepResult":
        """A copy in storage of its own."""
        metrics = {name: value.clone() for name, value in self.metrics.items()}
        return StepResult(self.loss.clone(), self.grad_norm.clone(), self.skipped.clone(), metrics)


class Gradients:
    """The ``.grad`` tensors of a step: made by the first backward, zeroed in place ever after, but for `release`.

    Args:
        named: the parameters that may get a gradient, by name.
    """

    def __init__(self, named: dict[str, nn.Parameter]) -> None:
        self.named = named
        self.owned: dict[str, Tensor] = {}
        self.sinks = GradientSinks()
        self._released: list[str] = []  # owned, and made anew by the next step
        self._closed_reason: str | None = None

    @property
    def released(self) -> list[str]:
        """The parameters whose gradient the next step makes anew."""
        return list(self._released)

    @property
    def names(self) -> list[str]:
        """The parameters that have a gradient, or had one and get it back in the next step."""
        return [*self.owned, *self._released]

    @contextmanager
    def closed(self, reason: str) -> Iterator[None]:
        """Inside the block a first gradient is refused: "<name> got its first gradient <reason>"."""
        self._closed_reason = reason
        try:
            yield
        finally:
            self._closed_reason = None

    def attach(self) -> None:
        """Put the owned tensors back where the user set ``.grad`` to None.

        Raises:
            GraphrtError: a ``.grad`` is another tensor than the owned one.
        """
        named = self.named
        if all(map(operator.is_, map(_get_grad, map(named.__getitem__, self.owned)), self.owned.values())):
            return
        for name, owned in self.owned.items():
            grad = named[name].grad
            if grad is owned:
                continue
            if grad is not None:
                raise GraphrtError(
                    f"{name}.grad is another tensor than the one the Trainer accumulates into. Set it to None, or write into it in place."
                )
            named[name].grad = owned

    def release(self) -> None:
        """Free the tensors that the next step overwrites: it makes new ones, where its backward first writes them.

        In a captured step that is in the graph's pool, from memory that activations have left. After a step that failed it
        frees what that one has made.
        """
        self._released = [name for name in self.names if self.named[name] in self.sinks]
        for name in self._released:
            self.owned.pop(name, None)
            self.sinks.release(self.named[name])

    def restore(self, owned: dict[str, Tensor | None], released: list[str]) -> None:
        """Own what was owned; None stands for a tensor that may have been released since, with its values in ``.grad`` again.

        Args:
            released: what `released` was.
        """
        self._released = list(released)
        for name in released:
            self.sinks.release(self.named[name])
        self.owned.clear()
        for name, grad in owned.items():
            found = self.named[name].grad if grad is None else grad
            assert found is not None
            self.owned[name] = found

    def forget(self, name: str) -> None:
        """The parameter has no gradient from now on."""
        self.owned.pop(name, None)
        self._released = [other for other in self._released if other != name]
        self.sinks.forget(self.named[name])
        self.named[name].grad = None

    def adopt(self) -> None:
        """Own the ``.grad`` tensors that exist now.

        Raises:
            GraphrtError: a gradient is sparse.
            CaptureError: a gradient appears where none may.
        """
        for name, p in self.named.items():
            if p.grad is not None and name not in self.owned:
                if self._closed_reason is not None and name not in self._released:
                    raise CaptureError(f"{name} got its first gradient {self._closed_reason}")
                if p.grad.layout is not torch.strided:
                    raise GraphrtError(f"{name}.grad is {p.grad.layout}, which is not supported. Use dense gradients (sparse=False).")
                self.owned[name] = p.grad
        self._released = []

    def zero(self) -> None:
        """Zero the owned tensors in place, but for those that the step overwrites; drop what a backward of the user's left."""
        for name, p in self.named.items():
            if p.grad is not None and name not in self.owned:
                p.grad = None
        stale = [grad for name, grad in self.owned.items() if self.named[name] not in self.sinks]
        if stale:
            torch._foreach_zero_(stale)

    def tensors(self) -> list[Tensor]:
        """The owned tensors, in the order of the parameters."""
        return [self.owned[name] for name in self.named if name in self.owned]


@dataclass
class StepBody:
    """One optimizer step over given microbatches.

    Attributes:
        max_grad_norm: 0-dim fp32 on the device, inf for no clipping; written by the host between steps.
        num_skipped: 0-dim int64 on the device, the steps skipped so far.
        surroundings: entered around forward and backward, whoever issues them.
    """

    model: nn.Module
    loss_fn: LossFn
    optimizer: StepOptimizer
    gradients: Gradients
    states: list[QuantizationState]
    max_grad_norm: Tensor
    num_skipped: Tensor
    surroundings: Callable[[], AbstractContextManager[Any]] = nullcontext

    def run(self, microbatches: Sequence[Any], region: Region, publish: Publish = lambda result: None) -> StepResult:
        """Forward and backward of all microbatches, scale updates, gradient norm, clipping and optimizer.

        Args:
            microbatches: what ``loss_fn`` gets, one after the other; ``region`` spans them all.
            publish: copies the results somewhere, aside, as soon as they are known: before the optimizer.
        """
        with ZERO_GRAD:
            self.gradients.zero()
        try:
            with self.gradients.sinks.active(), self.surroundings(), region:
                loss, metrics = self._accumulate(microbatches)
                join_asides()  # before the scale updates are aside: the norm needs gradients, and does not wait for those
        finally:
            forget_weights(self.model)
        self.adopt_states(region)
        self.update_backward()
        return self._update(loss, metrics, publish)

    @torch.no_grad()
    def _update(self, loss: Tensor, metrics: dict[str, Tensor], publish: Publish) -> StepResult:
        """Gradient norm, clipping, results, optimizer."""
        self.gradients.adopt()
        self.optimizer.prepare()
        with CLIP:
            norms = Norms(self._grad_norm(), self.max_grad_norm)
            if not self.optimizer.is_in_step:
                scale_(self.gradients.tensors(), norms.clip_coef)
        result = StepResult(loss, norms.grad_norm, norms.is_skipped, metrics)
        with aside():
            self.num_skipped.add_(result.skipped)
            publish(result)
        if self.optimizer.is_in_step:
            with OPTIMIZER:
                self.optimizer.apply(norms)
        return result

    def _accumulate(self, microbatches: Sequence[Any]) -> tuple[Tensor, dict[str, Tensor]]:
        """Gradients of the mean loss into ``.grad``; the mean loss and metrics."""
        num = len(microbatches)
        losses, metrics = [], []
        for microbatch in microbatches:
            with MICROBATCH:
                with FORWARD:
                    loss, extra = self.evaluate(microbatch)
                with BACKWARD:
                    (loss / num if num > 1 else loss).backward()
                losses.append(loss.detach().float())
                metrics.append({name: value.detach() for name, value in extra.items()})
        return _mean(losses), _mean_metrics(metrics)

    def evaluate(self, microbatch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss and the metrics of one microbatch, checked.

        Raises:
            GraphrtError: ``loss_fn`` returned something else than a scalar loss, or a loss and a dict of tensors.
        """
        # Containers of its own: what loss_fn takes out of a dict is there again for the next pass.
        out = self.loss_fn(self.model, map_tensors(lambda x: x, microbatch))
        loss, metrics = out if isinstance(out, tuple) and len(out) == 2 else (out, {})
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            raise GraphrtError(f"loss_fn returned {_describe(loss)} as the loss, expected a floating scalar tensor. Reduce it in loss_fn.")
        if not isinstance(metrics, dict) or not all(isinstance(value, Tensor) for value in metrics.values()):
            raise GraphrtError(f"loss_fn returned {_describe(metrics)} as metrics, expected a dict of tensors. Return (loss, dict).")
        return loss.reshape(()), metrics

    def finish(self, result: StepResult) -> None:
        """Run an optimizer that the body could not issue. One host read: whether the step is skipped."""
        if not self.optimizer.is_in_step and not bool(result.skipped):
            with OPTIMIZER:
                self.optimizer.optimizer.step()

    def adopt_states(self, region: Region) -> None:
        """Take in the states of other converted models that ``loss_fn`` uses (a critic, say): they are part of the step."""
        self.states.extend(state for state in region.used_states if state not in self.states)

    def update_backward(self) -> None:
        """Consume the backward requests of this step's own backwards."""
        for state in self.states:
            if state.backward_update_requested:
                with last_update():
                    state.reduce_and_update_quantization_state(forward=False)

    def _grad_norm(self) -> Tensor:
        grads = self.gradients.tensors()
        if not grads:
            raise GraphrtError("No parameter got a gradient. Check that the loss depends on parameters with requires_grad=True.")
        if any(grad.dtype not in NORM_DTYPES for grad in grads):
            return torch.nn.utils.get_total_norm(grads, foreach=True).float()
        norm = torch.empty((), device=grads[0].device)
        grad_norm(self.optimizer.tables.get("gradients", grads, make=NormTable.whole), norm)
        return norm


def _mean(values: list[Tensor]) -> Tensor:
    return torch.stack(values).mean(0) if len(values) > 1 else values[0].clone()


def _mean_metrics(metrics: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    if any(set(one) != set(metrics[0]) for one in metrics):
        raise GraphrtError(
            f"loss_fn returned metrics {sorted(metrics[0])} for one microbatch and others for the next. Return the same names each time."
        )
    return {name: _mean([_averageable(one[name]) for one in metrics]) for name in metrics[0]}


def _averageable(x: Tensor) -> Tensor:
    return x if x.is_floating_point() or x.is_complex() else x.float()


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a {value.dtype} tensor of shape {list(value.shape)}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {type(item).__name__}" for key, item in value.items()) + "}"
    return f"a {type(value).__name__}"
