"""Running the steps that are profiled, and putting everything back."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn

from graphrt import batch as batches
from graphrt.capture.garbage import no_garbage_collection
from graphrt.capture.recorder import Recording
from graphrt.capture.runner import CapturedRunner, Phase, StepGraph
from graphrt.errors import GraphrtError
from graphrt.profiling.cpu import watch_cpu, watch_recording
from graphrt.profiling.events import Event, PathProfile
from graphrt.profiling.kineto import watch_cuda
from graphrt.profiling.report import StepProfile
from graphrt.step import StepResult

__all__ = ["Profilable", "profile_step"]


class Profilable(Protocol):
    """What a profile needs of a trainer."""

    model: nn.Module
    device: torch.device

    def check_usable(self, verb: str) -> None: ...
    def everything_put_back(self) -> AbstractContextManager[None]: ...
    def make_captured(self) -> CapturedRunner: ...
    def step_eager(self, batch: Any) -> StepResult: ...
    def step_with(self, runner: CapturedRunner, batch: Any) -> StepResult: ...


def profile_step(trainer: Profilable, runner: CapturedRunner | None, batch: Any, num_steps: int) -> StepProfile:
    """Profile captured and eager steps of ``trainer`` from its present state, and put everything back.

    Args:
        runner: the trainer's own; None if its steps are eager, and then only those are profiled.
        batch: what each step gets; None for the last one that ``runner`` got.
        num_steps: of each path.

    Raises:
        ValueError: ``num_steps`` is below 1.
        GraphrtError: there is no batch to take, or a step cannot be taken here and now.
    """
    trainer.check_usable("profile")
    if not isinstance(num_steps, int) or isinstance(num_steps, bool) or num_steps < 1:
        raise ValueError(f"steps must be an int of at least 1, got {num_steps!r}.")
    batch = _last_batch(runner) if batch is None else batches.plain(batch)
    # A collection would show as time of whatever operation it interrupts.
    with trainer.everything_put_back(), no_garbage_collection():
        captured = None if runner is None else _profile_captured(trainer, runner, batch, num_steps)
        eager = _profile_eager(trainer, batch, num_steps)
    path, node_map = captured if captured is not None else (None, None)
    return StepProfile(_name_of(trainer.device), path, eager, node_map)


def _last_batch(runner: CapturedRunner | None) -> Any:
    """A copy of what the static inputs hold."""
    if runner is None:
        raise GraphrtError("profile got no batch, and an eager trainer keeps none. Pass one: trainer.profile(batch).")
    if runner.latest is None:
        raise GraphrtError("profile got no batch, and no step has been taken that left one. Take a step first, or pass batch=.")
    return batches.map_tensors(lambda x: x.clone(), runner.latest.inputs.batch)


def _profile_captured(trainer: Profilable, runner: CapturedRunner, batch: Any, num_steps: int) -> Any:
    """Through the graph that the trainer has for this batch; through one made for the purpose where it has none."""
    graph = runner.find(batch)
    if graph is not None and graph.phase is Phase.REPLAY:
        return _profile_graph(trainer, runner, graph, batch, num_steps)
    own = trainer.make_captured()
    try:
        while (graph := own.find(batch)) is None or graph.phase is not Phase.REPLAY:
            trainer.step_with(own, batch)
        return _profile_graph(trainer, own, graph, batch, num_steps)
    finally:
        own.close()


def _profile_graph(trainer: Profilable, runner: CapturedRunner, graph: StepGraph, batch: Any, num_steps: int) -> Any:
    node_map = graph.node_map
    assert node_map is not None

    def run_step() -> None:
        trainer.step_with(runner, batch)

    step_us = _time_steps(trainer.device, run_step, num_steps)
    notes: list[str] = []
    if isinstance(graph.graph, Recording):
        events = watch_recording(trainer.model, run_step, num_steps, graph.graph, node_map)
    else:
        events, notes = watch_cuda(trainer.model, run_step, num_steps, node_map)
    return _path("captured", num_steps, events, step_us, notes), node_map


def _profile_eager(trainer: Profilable, batch: Any, num_steps: int) -> PathProfile:
    def run_step() -> None:
        trainer.step_eager(batch)

    run_step()  # what a first eager step loads and allocates is no part of the others
    step_us = _time_steps(trainer.device, run_step, num_steps)
    if trainer.device.type == "cuda":
        events, notes = watch_cuda(trainer.model, run_step, num_steps, None)
    else:
        events, notes = watch_cpu(trainer.model, run_step, num_steps), []
    return _path("eager", num_steps, events, step_us, notes)


def _path(path: str, num_steps: int, events: list[Event], step_us: float, notes: list[str]) -> PathProfile:
    return PathProfile(path, num_steps, tuple(events), step_us, tuple(notes))


def _time_steps(device: torch.device, run_step: Callable[[], None], num_steps: int) -> float:
    """Microseconds a step takes when nobody watches it."""
    _synchronize(device)
    start = time.perf_counter()
    for _ in range(num_steps):
        run_step()
    _synchronize(device)
    return (time.perf_counter() - start) / num_steps * 1e6


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU, times of the host"
