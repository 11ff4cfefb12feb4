"""Watching steps on a CPU: each operation is timed on the host."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from graphrt.capture.attribution import Attribution, attributing
from graphrt.capture.costs import Cost, cost_of, is_known
from graphrt.capture.nodes import GraphNode, NodeMap
from graphrt.capture.recorder import Recording
from graphrt.profiling.events import Event

__all__ = ["watch_cpu", "watch_recording"]

_NO_WORK = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "alias"})


def watch_cpu(model: nn.Module, run_step: Callable[[], Any], num_steps: int) -> list[Event]:
    """Run steps, timing each operation where it is issued; views and metadata are left out."""
    events: list[Event] = []
    for step in range(num_steps):
        with attributing(model, lambda _: None) as attribution, _TimingMode(attribution, step, events):
            run_step()
    return _from_zero(events)


def watch_recording(model: nn.Module, run_step: Callable[[], Any], num_steps: int, recording: Recording, node_map: NodeMap) -> list[Event]:
    """Run steps that replay ``recording``: its nodes are timed one by one, what is issued beside it like eager operations."""
    events: list[Event] = []
    replays: list[list[tuple[int, int]]] = []
    for step in range(num_steps):
        with attributing(model, lambda _: None) as attribution, _TimingMode(attribution, step, events), recording.timing() as times:
            run_step()
        replays.append(times)
    for step, times in enumerate(replays):
        events.extend(_node_event(step, node, *span) for node, span in zip(node_map.nodes, times, strict=True))
    return _from_zero(events)


def _node_event(step: int, node: GraphNode, start_ns: int, end_ns: int) -> Event:
    return Event(step, node.kernel or "", node.kind, *_span(start_ns, end_ns), node.place, True, node.flops, node.num_bytes)


def _span(start_ns: int, end_ns: int) -> tuple[float, float]:
    return start_ns / 1e3, (end_ns - start_ns) / 1e3


def _from_zero(events: list[Event]) -> list[Event]:
    ordered = sorted(events, key=lambda event: event.start_us)
    base = ordered[0].start_us if ordered else 0.0
    return [replace(event, start_us=event.start_us - base) for event in ordered]


class _TimingMode(TorchDispatchMode):
    """Times every operation issued under it."""

    def __init__(self, attribution: Attribution, step: int, events: list[Event]) -> None:
        super().__init__()
        self._attribution, self._step, self._events = attribution, step, events

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if any(kind.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        start = time.perf_counter_ns()
        result = func(*args, **kwargs)
        end = time.perf_counter_ns()
        if _does_work(func):
            cost: Cost = cost_of(func, args, kwargs, result) if is_known(func) else (None, None)
            name = func._schema.name if hasattr(func, "_schema") else str(func)
            self._events.append(Event(self._step, name, "operation", *_span(start, end), self._attribution.place, False, *cost))
        return result


def _does_work(operation: Any) -> bool:
    name = getattr(getattr(operation, "overloadpacket", None), "__name__", "")
    is_metadata = torch.Tag.inplace_view in getattr(operation, "tags", ())
    return name not in _NO_WORK and not is_metadata and not getattr(operation, "is_view", False)
