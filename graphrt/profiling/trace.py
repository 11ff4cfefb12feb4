"""A trace for ui.perfetto.dev or chrome://tracing: a process a path, a row a layer, each kernel under its module's name."""

import json
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from graphrt.profiling.events import Event, PathProfile, layer_of

__all__ = ["trace_events", "write_trace"]

_STEPS, _PHASES = "steps", "phases"  # the first two rows


def write_trace(file: Path, paths: Sequence[PathProfile]) -> None:
    """Write the events of both paths, each from time 0, in the trace event format."""
    events = [event for pid, path in enumerate(paths, start=1) for event in trace_events(path, pid)]
    file.write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": events}) + "\n", encoding="utf-8")


def trace_events(path: PathProfile, pid: int) -> Iterator[dict[str, Any]]:
    """The events of one path as process ``pid``; times in microseconds."""
    rows = [_STEPS, _PHASES, *dict.fromkeys(layer_of(event.place) for event in path.events)]
    numbers = {row: number for number, row in enumerate(rows)}
    yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": f"{path.path} step"}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}
    for row, number in numbers.items():
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": number, "args": {"name": row}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": number, "args": {"sort_index": number}}
    for step, group in groupby(path.events, key=lambda event: event.step):
        yield _span(f"step {step}", list(group), pid, numbers[_STEPS])
    # A branch runs across the phases of the chain; its kernels are in the rows of their own phases.
    chain = [event for event in path.events if not event.is_beside]
    for (_, phase), group in groupby(chain, key=lambda event: (event.step, _phase(event))):
        yield _span(phase, list(group), pid, numbers[_PHASES])
    for event in path.events:
        yield _kernel(event, pid, numbers[layer_of(event.place)])


def _phase(event: Event) -> str:
    return "(unattributed)" if event.place is None else event.place.phase


def _span(name: str, events: Sequence[Event], pid: int, tid: int) -> dict[str, Any]:
    start, end = events[0].start_us, max(event.end_us for event in events)
    return {"ph": "X", "name": name, "pid": pid, "tid": tid, "ts": start, "dur": end - start}


def _kernel(event: Event, pid: int, tid: int) -> dict[str, Any]:
    place = event.place
    where = ["(unattributed)"] if place is None else [place.module or f"({place.phase})", place.direction]
    args: dict[str, Any] = {"kernel": event.name, "step": event.step, "in graph": event.is_in_graph}
    if place is not None:
        args |= {"module": place.module, "direction": place.direction, "phase": place.phase, "autograd": place.function}
    if event.reason:
        args["why unattributed"] = event.reason
    args |= {name: value for name, value in (("flops", event.flops), ("bytes", event.num_bytes)) if value is not None}
    name = " ".join(part for part in (*where, event.work) if part)
    return {
        "ph": "X",
        "cat": event.kind,
        "name": name,
        "pid": pid,
        "tid": tid,
        "ts": event.start_us,
        "dur": event.duration_us,
        "args": args,
    }
