"""Trainer: one call a step, captured or eager, on the same state."""

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from graphrt import batch as batches
from graphrt.checkpointing import load_trainer_state, trainer_state_dict
from graphrt.convert import quantization_state
from graphrt.eager.autocast import FlushManager
from graphrt.eager.runner import EagerRunner
from graphrt.errors import GraphrtError
from graphrt.linear import Float8Linear
from graphrt.optimizer import StepOptimizer
from graphrt.region import is_region_open
from graphrt.report import TrainerReport
from graphrt.snapshot import RngSnapshot, StepSnapshot
from graphrt.step import Gradients, LossFn, StepBody, StepResult

__all__ = ["Trainer"]

logger = logging.getLogger("graphrt")

_MODES = ("auto", "graph", "eager")
_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DataParallel")


class Trainer:
    """Trains a model of static shapes, one optimizer step a call.

    Args:
        model: any module; converted by `graphrt.convert_to_float8_training` it computes in FP8, else as it is.
        optimizer: any torch optimizer over its parameters. Its ``param_groups`` stay the place to change learning rate
            and weight decay; torch's schedulers work unchanged.
        loss_fn: called as ``loss_fn(model, batch)``; returns a scalar loss, or (loss, dict of tensors). Open
            ``torch.autocast`` in it, not around `step`.
        mode: "graph" captures the step once and replays it, "eager" runs it kernel by kernel, "auto" is "graph" on CUDA.
        grad_accum_steps: microbatches an optimizer step. Tensors of a batch are split along dim 0; a list of this many
            batches (more than one) is taken as it is. Loss, metrics and gradients are means over them.
        max_grad_norm: clip the global gradient norm to this; None never clips. `max_grad_norm` can be set at any time.
        warmup_steps: eager steps before the capture, at least 1; real steps.
        calibrate: run one pass in high precision on the first batch, so that the first step has scales.
        max_graphs: batch shapes to keep a graph for; beyond that many, steps run eagerly.

    Raises:
        ValueError, TypeError: an argument is out of range or of the wrong type.
        GraphrtError: the model or optimizer is of a kind that is not supported, by name.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss_fn: LossFn,
        *,
        mode: str = "auto",
        grad_accum_steps: int = 1,
        max_grad_norm: float | None = None,
        warmup_steps: int = 2,
        calibrate: bool = True,
        max_graphs: int = 1,
    ) -> None:
        _check_types(model, optimizer, loss_fn, mode)
        for name, value in (("grad_accum_steps", grad_accum_steps), ("warmup_steps", warmup_steps), ("max_graphs", max_graphs)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be an int of at least 1, got {value!r}.")
        _refuse_unsupported(model, optimizer)
        self.model, self.optimizer, self.loss_fn = model, optimizer, loss_fn
        self.grad_accum_steps, self.warmup_steps, self.max_graphs = grad_accum_steps, warmup_steps, max_graphs
        self._named = _named_parameters(model, optimizer)
        self.device = _only_device(self._named)
        self.mode = self._choose_mode(mode)
        self.state = quantization_state(model) if _is_converted(model) else None
        self._should_calibrate = calibrate and self.state is not None
        self.steps_taken = 0
        self._is_closed = False
        self._is_forced_eager = False
        self._max_grad_norm: float | None = None
        self._body = self._make_body()
        self._eager = EagerRunner(self._body)
        self.max_grad_norm = max_grad_norm

    def _choose_mode(self, mode: str) -> str:
        if mode != "auto":
            return mode
        chosen = "graph" if self.device.type == "cuda" else "eager"
        logger.info("mode='auto': steps run in %s mode, because the model is on %s", chosen, self.device)
        return chosen

    def _make_body(self) -> StepBody:
        return StepBody(
            model=self.model,
            loss_fn=self.loss_fn,
            optimizer=StepOptimizer(self.optimizer, self.device),
            gradients=Gradients(self._named),
            states=[] if self.state is None else [self.state],
            max_grad_norm=torch.full((), math.inf, device=self.device),
            num_skipped=torch.zeros((), dtype=torch.int64, device=self.device),
        )

    # -- stepping

    def step(self, batch: Any) -> StepResult:
        """One optimizer step over ``batch``, without waiting for the device.

        After an exception parameters, buffers, gradients, optimizer, quantization state, counts and RNG are as before.

        Returns:
            StepResult of device tensors that the caller owns.

        Raises:
            StaticInputError: the batch does not fit.
            GraphrtError: the trainer is closed, or the call is inside a region or torch.autocast.
        """
        self._check_usable("step")
        microbatches = batches.split(self._to_device(batch), self.grad_accum_steps)
        self._body.gradients.attach()
        with self._atomic():
            FlushManager().flush()
            self._calibrate_once(microbatches)
            self._body.optimizer.refresh()
            result = self._eager.step(microbatches)
        self.steps_taken += 1
        return result

    def _check_usable(self, verb: str) -> None:
        if self._is_closed:
            raise GraphrtError(f"{verb} was called on a closed Trainer. Make a new one.")
        if is_region_open():
            raise GraphrtError(f"{verb} was called inside an fp8_autocast region. The Trainer opens its own: call it outside.")
        if torch.is_autocast_enabled(self.device.type) or torch.is_autocast_enabled("cpu"):
            raise GraphrtError(f"{verb} was called inside torch.autocast. Open torch.autocast in loss_fn instead.")

    def _to_device(self, batch: Any) -> Any:
        return batches.map_tensors(lambda x: x.to(self.device, non_blocking=True), batches.plain(batch))

    @contextmanager
    def _atomic(self) -> Iterator[None]:
        """Put everything back if the block raises."""
        snapshot = self._snapshot()
        owned, num_skipped = dict(self._body.gradients.owned), self._body.num_skipped.clone()
        should_calibrate = self._should_calibrate
        stream = torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None
        try:
            yield
        except BaseException:
            if stream is not None:
                torch.cuda.set_stream(stream)
            snapshot.restore()
            self._body.gradients.owned = owned
            self._body.num_skipped.copy_(num_skipped)
            self._should_calibrate = should_calibrate
            raise

    def _snapshot(self) -> StepSnapshot:
        return StepSnapshot.take(
            self.model,
            self._named.values(),
            self.optimizer,
            self._body.states,
            self.device,
            with_optimizer_values=not self._body.optimizer.is_in_step,
        )

    def _calibrate_once(self, microbatches: list[Any]) -> None:
        """Scales from a pass in high precision, everything else as before; only for a state that never updated."""
        if not self._should_calibrate or self.state is None:
            return
        self._should_calibrate = False
        if self.state.forward_updates or self.state.backward_updates:
            return
        before = self._snapshot()
        self._eager.calibrate(microbatches)
        before.restore(keep_states=True)

    def evaluate(self, batch: Any) -> Tensor:
        """The loss of ``batch`` in eval mode, without gradients: any shape, no microbatches, training state and RNG untouched.

        Returns:
            0-dim tensor that the caller owns.
        """
        self._check_usable("evaluate")
        batch = self._to_device(batch)
        list(batches.leaves(batch))
        flags = [(module, module.training) for module in self.model.modules()]
        rng = RngSnapshot.take(self.device)
        try:
            self.model.eval()
            return self._eager.evaluate(batch)
        finally:
            for module, flag in flags:
                module.training = flag
            rng.restore()

    @contextmanager
    def eager(self) -> Iterator["Trainer"]:
        """Steps inside the block run eagerly, on the same state; steps after it go on from there."""
        previous, self._is_forced_eager = self._is_forced_eager, True
        try:
            yield self
        finally:
            self._is_forced_eager = previous

    # -- settings and state

    @property
    def max_grad_norm(self) -> float | None:
        """The norm gradients are clipped to, None for no clipping; follows an assignment from the next step on."""
        return self._max_grad_norm

    @max_grad_norm.setter
    def max_grad_norm(self, value: float | None) -> None:
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not value > 0):
            raise ValueError(f"max_grad_norm must be a positive number or None, got {value!r}.")
        self._max_grad_norm = value
        self._body.max_grad_norm.fill_(math.inf if value is None else value)

    @property
    def num_skipped_steps(self) -> int:
        """Steps whose gradient was not finite. Reads the device."""
        return int(self._body.num_skipped)

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs, as plain CPU copies: model, optimizer, quantization state, RNG, counts.

        ``torch.load(..., weights_only=True)`` reads it back.
        """
        return trainer_state_dict(self.model, self.optimizer, self.state, self.device, self._counts())

    def _counts(self) -> dict[str, int]:
        return {"steps_taken": self.steps_taken, "num_skipped": self.num_skipped_steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy a `state_dict` in, in place: tensors keep their addresses.

        Raises:
            ValueError: it is of another model, optimizer or recipe; nothing has been changed.
        """
        counts = load_trainer_state(state_dict, self.model, self.optimizer, self.state, self.device)
        self.steps_taken = counts["steps_taken"]
        self._body.num_skipped.fill_(counts["num_skipped"])

    def report(self) -> TrainerReport:
        """What ran how, and what did not run as asked and why."""
        return TrainerReport(
            mode=self.mode,
            device=str(self.device),
            steps_taken=self.steps_taken,
            num_skipped_steps=self.num_skipped_steps,
            optimizer=type(self.optimizer).__name__,
            optimizer_outside_reason=self._body.optimizer.reason_outside,
            num_fp8_linears=0 if self.state is None else len(self.state.slots) // 3,
            num_parameters=sum(p.numel() for p in self._named.values()),
        )

    def close(self) -> None:
        """Let go of everything the trainer holds on the device; a second call does nothing."""
        self._is_closed = True

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()


def _is_converted(model: nn.Module) -> bool:
    return any(isinstance(module, Float8Linear) for module in model.modules())


def _check_types(model: Any, optimizer: Any, loss_fn: Any, mode: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}.")
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}.")
    if not callable(loss_fn):
        raise TypeError(f"loss_fn must be callable as loss_fn(model, batch), got {type(loss_fn).__name__}.")
    if mode not in _MODES:
        raise ValueError(f"mode must be one of {', '.join(_MODES)}, got {mode!r}.")


def _refuse_unsupported(model: nn.Module, optimizer: Optimizer) -> None:
    for name, module in model.named_modules():
        wrapper = next((cls.__name__ for cls in type(module).__mro__ if cls.__name__ in _WRAPPERS), None)
        if wrapper is not None:
            raise GraphrtError(f"{name or 'The model'} is wrapped in {wrapper}, which is not supported yet. Pass the plain model.")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise GraphrtError("LBFGS calls the model several times a step, which a Trainer cannot do. Use a first-order optimizer.")


def _named_parameters(model: nn.Module, optimizer: Optimizer) -> dict[str, nn.Parameter]:
    """Parameters that may get a gradient, by name: the model's, then what only the optimizer holds."""
    named = dict(model.named_parameters())
    known = {id(p) for p in named.values()}
    for i, group in enumerate(optimizer.param_groups):
        for j, p in enumerate(group["params"]):
            if id(p) not in known:
                named[f'optimizer.param_groups[{i}]["params"][{j}]'] = p
    if not any(p.requires_grad for p in named.values()):
        raise ValueError("No parameter of the model or the optimizer requires a gradient. Nothing would be trained.")
    return named


def _only_device(named: dict[str, nn.Parameter]) -> torch.device:
    devices = sorted({str(p.device) for p in named.values()})
    if len(devices) != 1:
        raise ValueError(
            f"The parameters are on {', '.join(devices)}, expected one device. Move the whole model there before the optimizer is made."
        )
    if devices[0] == "meta":
        raise ValueError("The parameters are on the meta device. Materialize the model first.")
    return torch.device(devices[0])
