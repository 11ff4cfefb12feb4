"""Trainer: one call a step, captured or eager, on the same state."""

import logging
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from graphrt import batch as batches
from graphrt.capture.record_query import capture_answer
from graphrt.capture.recorder import Recording
from graphrt.capture.runner import CapturedRunner, Phase, StepGraph
from graphrt.checkpointing import load_trainer_state, trainer_state_dict
from graphrt.convert import quantization_state, wrapped_part
from graphrt.eager.autocast import FlushManager
from graphrt.eager.runner import EagerRunner
from graphrt.errors import GraphrtError, StaticInputError
from graphrt.guards import is_capturing
from graphrt.kernels.gemm_choice import choices
from graphrt.linear import Float8Linear
from graphrt.optimizer import StepOptimizer
from graphrt.profiling import StepProfile, profile_step
from graphrt.ranges import SNAPSHOT, STEP
from graphrt.recompute import close_abandoned
from graphrt.region import is_region_open
from graphrt.report import TrainerReport
from graphrt.snapshot import RngSnapshot, StepSnapshot
from graphrt.step import Gradients, LossFn, StepBody, StepResult

__all__ = ["Trainer"]

logger = logging.getLogger("graphrt")

_MODES = ("auto", "graph", "eager")


@dataclass(frozen=True)
class _Counts:
    """What a step may change besides what a `StepSnapshot` holds."""

    steps_taken: int
    num_skipped: Tensor
    should_calibrate: bool
    owned: dict[str, Tensor | None]  # gradients; None for one whose tensor the snapshot does not hold
    released: list[str]  # those that the next step makes anew


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
        warmup_steps: eager steps before the capture, at least 2; real steps. The last of them is compared with the captured one.
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
        for name, value, least in (
            ("grad_accum_steps", grad_accum_steps, 1),
            ("warmup_steps", warmup_steps, 2),
            ("max_graphs", max_graphs, 1),
        ):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name} must be an int of at least {least}, got {value!r}.")
        _refuse_unsupported(model, optimizer)
        self.model, self.optimizer, self.loss_fn = model, optimizer, loss_fn
        self.grad_accum_steps, self.warmup_steps, self.max_graphs = grad_accum_steps, warmup_steps, max_graphs
        self.named_parameters = _named_parameters(model, optimizer)
        self.device = _only_device(self.named_parameters)
        self.mode = self._choose_mode(mode)
        self.state = quantization_state(model) if _is_converted(model) else None
        self._calibrates = calibrate and self.state is not None
        self._should_calibrate = self._calibrates
        self.steps_taken = 0
        self._is_closed = False
        self._is_forced_eager = False
        self._num_choosing_steps = warmup_steps  # that may time GEMMs, from here on
        self._max_grad_norm: float | None = None
        self._body = self._make_body()
        self._eager = EagerRunner(self._body)
        self._captured = self.make_captured(has_own_gradients=True) if self.mode == "graph" else None
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
            gradients=Gradients(self.named_parameters),
            states=[] if self.state is None else [self.state],
            max_grad_norm=torch.full((), math.inf, device=self.device),
            num_skipped=torch.zeros((), dtype=torch.int64, device=self.device),
            surroundings=self._surroundings,
        )

    def make_captured(self, *, has_own_gradients: bool = False, has_branch: bool = True) -> CapturedRunner:
        """A runner for captured steps of this trainer's body, with graphs of its own.

        Args:
            has_own_gradients: its first graph makes new ``.grad`` tensors, in its pool. One beside the trainer's own writes to
                those that are there.
            has_branch: as `CapturedRunner` has it.
        """
        return CapturedRunner(
            self._body,
            self.device,
            num_microbatches=self.grad_accum_steps,
            num_warmup_steps=self.warmup_steps,
            max_graphs=self.max_graphs,
            has_own_gradients=has_own_gradients,
            has_branch=has_branch,
        )

    @contextmanager
    def _surroundings(self) -> Iterator[None]:
        """What forward and backward of every step of this trainer see, so that all of them run one program.

        Libraries ask whether a capture is under way and compute something else then: all steps get the captured answer.
        On a CPU a compiled block is recorded as the operations it was compiled from, so every step runs those.
        The first steps choose the GEMMs' algorithms for all.
        """
        with ExitStack() as stack:
            if torch.is_grad_enabled() and self._num_choosing_steps > 0:
                stack.enter_context(choices.choosing())
            stack.enter_context(capture_answer(True))
            stack.enter_context(_refusing_grad_scaler())
            if self.mode == "graph" and self.device.type != "cuda":
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            yield

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
        self.check_usable("step")
        with STEP.numbered(self.steps_taken + 1):
            result = self._step(batches.plain(batch))
        self.steps_taken += 1
        self._num_choosing_steps = max(0, self._num_choosing_steps - 1)
        return result

    def _step(self, batch: Any) -> StepResult:
        graph = self._select(batch)
        if graph is None:
            return self.step_eager(batch)
        assert self._captured is not None
        return self._step_graph(self._captured, graph, batch)

    def _select(self, batch: Any) -> StepGraph | None:
        """The graph that runs this step; None for a step that runs eagerly."""
        if self._captured is None or self._is_forced_eager:
            return None
        graph = self._captured.select(batch)
        if graph is None:
            self._captured.stats.num_eager_fallbacks += 1
        return graph

    def step_eager(self, batch: Any) -> StepResult:
        """One eager step on this trainer's state, not counted; the building block of `step`, for comparisons."""
        microbatches = batches.split(self._to_device(batch), self.grad_accum_steps)
        self._body.gradients.attach()
        with self._atomic(with_optimizer_values=not self._body.optimizer.is_in_step):
            self._prepare(microbatches)
            with self._on_step_stream():
                result = self._eager.step(microbatches)
        return result.clone()

    def _on_step_stream(self) -> AbstractContextManager[None]:
        """The capture stream, if there is one: autograd ties a parameter's accumulation to the stream of its first step."""
        return nullcontext() if self._captured is None else self._captured.on_capture_stream()

    def step_with(self, runner: CapturedRunner, batch: Any) -> StepResult:
        """One step through another runner than the trainer's own, not counted; for comparisons."""
        graph = runner.select(batch)
        if graph is None:
            raise StaticInputError("The batch has another shape than the one this runner captured. Pass batches of one shape.")
        return self._step_graph(runner, graph, batch)

    def watch_with(self, runner: CapturedRunner, batch: Any) -> Recording:
        """One step through ``runner``, not counted and never refused, recorded to be looked at."""
        graph = runner.select(batch)
        assert graph is not None
        self._body.gradients.attach()
        with self._atomic(with_optimizer_values=True):
            self._prepare(batches.split(self._to_device(batch), self.grad_accum_steps))
            return graph.watch(batch)

    def _step_graph(self, runner: CapturedRunner, graph: StepGraph, batch: Any) -> StepResult:
        """Warm up, capture or replay. A replay cannot fail after its checks, so nothing is copied for the case that it does."""
        if graph.phase is not Phase.REPLAY:
            self._body.gradients.attach()
        runner.check()
        if graph.phase is Phase.REPLAY and runner.has_optimizer and not self._should_calibrate:
            FlushManager().flush()
            self._body.optimizer.refresh()
            return runner.step(graph, batch)
        num_warmups = graph.num_warmups
        try:
            with_values = not self._body.optimizer.is_in_step or graph.is_checked_afterwards
            # A few steps only, but at the memory peak of the run: their copies go to the host.
            is_before_replays = graph.phase is not Phase.REPLAY
            with self._atomic(with_optimizer_values=with_values, on_host=is_before_replays, holds_grads=not runner.makes_gradients):
                self._prepare(batches.split(self._to_device(batch), self.grad_accum_steps))
                result = runner.step(graph, batch)
                self._body.finish(result)
        except BaseException:
            # The step has not happened, and so has its warmup not.
            graph.num_warmups = num_warmups
            runner.drop_unused()
            raise
        return result.clone()

    def _prepare(self, microbatches: list[Any]) -> None:
        """What comes before a step: what others left pending, scales for the first one, the live hyper-parameters."""
        FlushManager().flush()
        self._calibrate_once(microbatches)
        self._body.optimizer.refresh()

    def check_usable(self, verb: str, *, needs_gradients: bool = True) -> None:
        """Raise GraphrtError unless ``verb`` may be called here and now."""
        if needs_gradients and not torch.is_grad_enabled():
            raise GraphrtError(f"{verb} was called under torch.no_grad or inference_mode. Steps need gradients: call it outside.")
        if self._is_closed:
            raise GraphrtError(f"{verb} was called on a closed Trainer. Make a new one.")
        if is_capturing():
            raise GraphrtError(f"{verb} was called under a CUDA graph capture. The Trainer captures by itself: call it outside.")
        if is_region_open():
            raise GraphrtError(f"{verb} was called inside an fp8_autocast region. The Trainer opens its own: call it outside.")
        if torch.is_autocast_enabled(self.device.type) or torch.is_autocast_enabled("cpu"):
            raise GraphrtError(f"{verb} was called inside torch.autocast. Open torch.autocast in loss_fn instead.")

    def _to_device(self, batch: Any) -> Any:
        return batches.map_tensors(lambda x: x.to(self.device, non_blocking=True), batches.plain(batch))

    @contextmanager
    def _atomic(self, *, with_optimizer_values: bool, on_host: bool = False, holds_grads: bool = True) -> Iterator[None]:
        """Put everything back if the block raises."""
        with SNAPSHOT:
            snapshot = self.snapshot(with_optimizer_values=with_optimizer_values, on_host=on_host, holds_grads=holds_grads)
            counts = self.save_counts(holds_grads=holds_grads)
        stream = torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None
        try:
            yield
        except BaseException as error:
            close_abandoned(error.__traceback__)
            if stream is not None:
                torch.cuda.set_stream(stream)
            snapshot.restore()
            self.restore_counts(counts)
            raise

    def snapshot(self, *, with_optimizer_values: bool = True, on_host: bool = False, holds_grads: bool = True) -> StepSnapshot:
        """A copy of everything a step may change, on the device or the host; see `StepSnapshot.take`."""
        return StepSnapshot.take(
            self.model,
            self.named_parameters.values(),
            self.optimizer,
            self._body.states,
            self.device,
            with_optimizer_values=with_optimizer_values,
            on_host=on_host,
            holds_grads=holds_grads,
        )

    @contextmanager
    def everything_put_back(self) -> Iterator[None]:
        """Whatever steps the block takes, the trainer's tensors, counts and RNG are as before it afterwards."""
        before, counts = self.snapshot(), self.save_counts()
        try:
            yield
        finally:
            before.restore()
            self.restore_counts(counts)

    def save_counts(self, *, holds_grads: bool = True) -> "_Counts":
        """What a snapshot does not hold: counts, and which gradients the trainer owns."""
        owned = {name: grad if holds_grads else None for name, grad in self._body.gradients.owned.items()}
        return _Counts(self.steps_taken, self._body.num_skipped.clone(), self._should_calibrate, owned, self._body.gradients.released)

    def restore_counts(self, counts: "_Counts") -> None:
        """Put back what `save_counts` returned, after the snapshot taken with it."""
        self.steps_taken, self._should_calibrate = counts.steps_taken, counts.should_calibrate
        self._body.gradients.restore(counts.owned, counts.released)
        self._body.num_skipped.copy_(counts.num_skipped)

    def _calibrate_once(self, microbatches: list[Any]) -> None:
        """Scales from a pass in high precision, everything else as before; only for a state that never updated."""
        if not self._should_calibrate or self.state is None:
            return
        self._should_calibrate = False
        if self.state.forward_updates or self.state.backward_updates:
            return
        before = self.snapshot(with_optimizer_values=not self._body.optimizer.is_in_step, on_host=self._captured is not None)
        with self._on_step_stream():
            # Copies: what loss_fn writes into its batch is not there for the step that follows.
            self._eager.calibrate([batches.map_tensors(torch.clone, microbatch) for microbatch in microbatches])
        before.restore(keep_states=True)

    def evaluate(self, batch: Any) -> Tensor:
        """The loss of ``batch`` in eval mode, without gradients: any shape, no microbatches, training state and RNG untouched.

        Returns:
            0-dim tensor that the caller owns.
        """
        self.check_usable("evaluate", needs_gradients=False)
        batch = self._to_device(batch)
        list(batches.leaves(batch))
        flags = [(module, module.training) for module in self.model.modules()]
        buffers = [(module, name, buffer, _copy_of(buffer)) for module in self.model.modules() for name, buffer in module._buffers.items()]
        rng = RngSnapshot.take(self.device)
        try:
            self.model.eval()
            return self._eager.evaluate(batch)
        finally:
            for module, flag in flags:
                module.training = flag
            for module, name, buffer, (copy, version) in buffers:
                module._buffers[name] = buffer
                if buffer is not None and copy is not None and buffer._version != version:
                    buffer.copy_(copy)
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
        return trainer_state_dict(self.model, self.optimizer, self.state, self._body.gradients, self.device, self._counts())

    def _counts(self) -> dict[str, int]:
        return {"steps_taken": self.steps_taken, "num_skipped": self.num_skipped_steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy a `state_dict` in, in place: tensors keep their addresses.

        Raises:
            ValueError: it is of another model, optimizer or recipe; nothing has been changed.
        """
        body = self._body
        is_captured = self._captured is not None and self._captured.is_captured
        if self._captured is not None:
            self._captured.drop_unfinished()
        counts = load_trainer_state(
            state_dict, self.model, body.optimizer, self.state, body.gradients, self.device, is_captured=is_captured
        )
        # Does nothing unless the saved state never updated either.
        self._should_calibrate = self._calibrates
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
            num_parameters=sum(p.numel() for p in self.named_parameters.values()),
            fp8_gemms=str(choices) if self.state is not None and self.device.type == "cuda" else None,
            capture=None if self._captured is None else self._captured.stats,
        )

    def profile(self, batch: Any = None, *, steps: int = 3) -> StepProfile:
        """What the kernels of a step cost, by module: captured and eager side by side. Everything is put back afterwards.

        On a CPU the times are the host's. Prints as tables; `StepProfile.save` writes a folder.

        Args:
            batch: what the steps get; None for the last captured step's.
            steps: of each path.

        Raises:
            ValueError: ``steps`` is below 1.
            GraphrtError: no batch was given and none is left of a step, the trainer is closed, or the call is inside a
                region, torch.autocast or torch.no_grad.
        """
        return profile_step(self, self._captured, batch, steps)

    def recapture(self) -> None:
        """Drop all graphs, and the gradients in their pool: the next steps warm up and capture again, with everything as it is then."""
        self._num_choosing_steps = self.warmup_steps
        if self._captured is not None:
            self._captured.close()

    def close(self) -> None:
        """Free graphs, their pool and the gradients in it; a second call does nothing. Call it before a process group is destroyed."""
        self._is_closed = True
        if self._captured is not None:
            self._captured.close()
        self._body.gradients.sinks.close()
        self._body.optimizer.tables.clear()

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()


@contextmanager
def _refusing_grad_scaler() -> Iterator[None]:
    """A scaled loss would make gradients that nothing unscales."""
    original = torch.amp.GradScaler.scale

    def scale(self: Any, outputs: Any) -> Any:
        if self.is_enabled():
            raise GraphrtError("loss_fn scales the loss with a GradScaler, which is not supported. Return the plain loss; use bf16.")
        return original(self, outputs)

    torch.amp.GradScaler.scale = scale
    try:
        yield
    finally:
        torch.amp.GradScaler.scale = original


def _copy_of(buffer: Tensor | None) -> tuple[Tensor | None, int]:
    """A copy of a buffer, and the version it is of."""
    return (None, 0) if buffer is None else (buffer.detach().clone(), buffer._version)


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
    wrapped = wrapped_part(model)
    if wrapped is not None:
        raise GraphrtError(f"{wrapped[0]} is wrapped in {wrapped[1]}, which is not supported yet. Pass the plain model.")
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
