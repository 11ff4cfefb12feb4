"""Watching steps on CUDA: torch's profiler gives the kernels, markers on the host give the place each was launched from.

A marker is an empty ``record_function`` at each change of place, so that markers and launches have one clock: a kernel's
launch belongs to the place that the next marker leaves. The kernels of a replay were launched all at once, by one graph
launch; they get their places from the node map.
"""

import json
import os
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from graphrt.capture.attribution import Place, attributing
from graphrt.capture.nodes import GraphNode, NodeMap
from graphrt.profiling.events import Event
from graphrt.profiling.matching import match

__all__ = ["DeviceActivity", "Launch", "Marker", "events_of", "watch_cuda"]

_MARKER = "graphrt#"
_API_CALL = re.compile(r"(cuda|cu)[A-Z]\w*")
#: What the profiler reports of the device beside work: waits, and its own doings.
_NO_WORK = (
    "Context Sync", "Event Sync", "Stream Sync", "Stream Wait Event", "Activity Buffer Request", _MARKER, "graphrt:", "ProfilerStep",
)  # fmt: skip


@dataclass(frozen=True)
class DeviceActivity:
    """One kernel, copy or memset."""

    name: str
    kind: str
    start_ns: int
    duration_ns: int
    correlation: int  # with the host's call that launched it
    node_id: int | None = None
    num_bytes: int | None = None


@dataclass(frozen=True)
class Launch:
    """One call of the CUDA API."""

    name: str
    start_ns: int

    @property
    def is_graph(self) -> bool:
        """Whether it launches a whole graph."""
        return "GraphLaunch" in self.name


@dataclass(frozen=True)
class Marker:
    """What was issued since the marker before belongs to ``place`` in ``step``."""

    start_ns: int
    step: int
    place: Place


def watch_cuda(
    model: nn.Module, run_step: Callable[[], Any], num_steps: int, node_map: NodeMap | None
) -> tuple[list[Event], list[str]]:  # fmt: skip
    """Run steps under the profiler.

    Returns:
        The device's work, and notes on what could not be matched.
    """
    from torch.profiler import ProfilerActivity, profile, record_function

    # After a teardown CUPTI crashes when a process with CUDA graphs starts it again; torch sets the same for its own graphs.
    os.environ.setdefault("TEARDOWN_CUPTI", "0")
    os.environ.setdefault("DISABLE_CUPTI_LAZY_REINIT", "1")
    left: list[tuple[int, Place]] = []
    step = 0

    def mark(place: Place) -> None:
        with record_function(f"{_MARKER}{len(left)}"):
            left.append((step, place))

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as profiler:
        for step in range(num_steps):  # noqa: B007  (read by mark)
            with attributing(model, mark):
                run_step()
        torch.cuda.synchronize()
    results: Any = profiler.profiler
    activities, launches, starts = _read(results.kineto_results.events())
    markers = [Marker(starts[i], *left[i]) for i in sorted(starts) if i < len(left)]
    return events_of(activities, launches, markers, node_map)


def _read(raw_events: Iterable[Any]) -> tuple[list[DeviceActivity], dict[int, Launch], dict[int, int]]:
    """(work of the device, API calls by correlation, starts of the markers by number)."""
    activities: list[DeviceActivity] = []
    launches: dict[int, Launch] = {}
    starts: dict[int, int] = {}
    for raw in raw_events:
        name = raw.name()
        if raw.device_type() == torch.autograd.DeviceType.CUDA:
            if not name.startswith(_NO_WORK):
                activities.append(_activity(raw, name))
        elif name.startswith(_MARKER):
            starts[int(name.removeprefix(_MARKER))] = raw.start_ns()
        elif _API_CALL.fullmatch(name):
            launches[raw.correlation_id()] = Launch(name, raw.start_ns())
    return activities, launches, starts


def _activity(raw: Any, name: str) -> DeviceActivity:
    kind = "memcpy" if name.startswith("Memcpy") else "memset" if name.startswith("Memset") else "kernel"
    metadata = _metadata(raw)
    node_id = metadata.get("graph node id")
    num_bytes = metadata.get("bytes") if kind != "kernel" else None
    if num_bytes is not None:
        num_bytes = int(num_bytes) * (2 if kind == "memcpy" else 1)
    return DeviceActivity(
        name, kind, raw.start_ns(), raw.duration_ns(), raw.correlation_id(), int(node_id) if node_id else None, num_bytes
    )  # fmt: skip


def _metadata(raw: Any) -> dict[str, Any]:
    """What some releases tell beside the rest."""
    read = getattr(raw, "metadata_json", None)
    text = read() if read is not None else ""
    try:
        return json.loads("{" + text.strip().strip("{}") + "}") if text else {}
    except ValueError:
        return {}


def events_of(
    activities: Iterable[DeviceActivity], launches: dict[int, Launch], markers: Sequence[Marker], node_map: NodeMap | None
) -> tuple[list[Event], list[str]]:
    """Give each activity its place: those of a graph's replay from the node map, the others from their launch.

    Args:
        launches: by correlation.
        markers: in order.
        node_map: of the graph; None for steps without one.
    """
    ordered = sorted(activities, key=lambda activity: activity.start_ns)
    nodes = _nodes_of_replays(ordered, launches, node_map)
    left = _markers_of(ordered, launches, markers)
    base = ordered[0].start_ns if ordered else 0
    events = [
        _event(activity, launches.get(activity.correlation), marker, nodes.get(id(activity)), base)
        for activity, marker in zip(ordered, left, strict=True)
    ]
    return events, _notes(events)


def _markers_of(ordered: Sequence[DeviceActivity], launches: dict[int, Launch], markers: Sequence[Marker]) -> list[Marker | None]:
    """The marker after each activity's launch. One stream runs work in the order of launch, so an activity whose launch was
    not recorded was launched between its neighbours: it has their marker if they agree.
    """
    times = [marker.start_ns for marker in markers]
    known: list[int | None] = []
    for activity in ordered:
        launch = launches.get(activity.correlation)
        known.append(None if launch is None or not markers else min(bisect_left(times, launch.start_ns), len(markers) - 1))
    before, after = _filled(known), _filled(known[::-1])[::-1]
    agreed = [one if one == other else None for one, other in zip(before, after, strict=True)]
    return [None if at is None else markers[at] for at in agreed]


def _filled(values: Sequence[int | None]) -> list[int | None]:
    """Each None replaced by the last value before it."""
    filled: list[int | None] = []
    for value in values:
        filled.append(value if value is not None or not filled else filled[-1])
    return filled


def _nodes_of_replays(
    ordered: Sequence[DeviceActivity], launches: dict[int, Launch], node_map: NodeMap | None
) -> dict[int, GraphNode]:  # fmt: skip
    """The node of each activity that a graph launch started, by the activity's id()."""
    replays: dict[int, list[DeviceActivity]] = {}
    for activity in ordered:
        launch = launches.get(activity.correlation)
        if launch is not None and launch.is_graph:
            replays.setdefault(activity.correlation, []).append(activity)
    found: dict[int, GraphNode] = {}
    for replay in replays.values():
        matched = match(replay, node_map.active) if node_map is not None else [None] * len(replay)
        found.update((id(activity), node) for activity, node in zip(replay, matched, strict=True) if node is not None)
    return found


def _event(activity: DeviceActivity, launch: Launch | None, marker: Marker | None, node: GraphNode | None, base_ns: int) -> Event:
    is_in_graph = launch is not None and launch.is_graph
    place, reason = None if marker is None else marker.place, ""
    if marker is None:
        reason = "the profiler recorded no launch of it"
    elif is_in_graph:
        place = None if node is None else node.place
        reason = "it is not the node that the graph has in its place" if node is None else ""
    return Event(
        step=0 if marker is None else marker.step,
        name=activity.name,
        kind=activity.kind,
        start_us=(activity.start_ns - base_ns) / 1e3,
        duration_us=activity.duration_ns / 1e3,
        place=place,
        is_in_graph=is_in_graph,
        is_beside=node is not None and node.is_beside,
        flops=None if node is None else node.flops,
        num_bytes=activity.num_bytes if node is None or node.num_bytes is None else node.num_bytes,
        reason=reason,
    )


def _notes(events: Sequence[Event]) -> list[str]:
    counts: dict[str, int] = {}
    for event in events:
        if event.place is None:
            counts[event.reason] = counts.get(event.reason, 0) + 1
    return [f"{count:,} kernels have no place: {reason}." for reason, count in counts.items()]
