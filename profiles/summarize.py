"""Tables of an nsys report: steps and their gaps, ranges, kernels, and modules.

    nsys export --type sqlite -o node.sqlite node.nsys-rep
    python profiles/summarize.py node.sqlite [--node-map node_map.json] [--json] [--plot node.png]

Kernels on the second branch of a captured step wait for room most of their time: what they take has a column of its own
(beside_ms) and no share.

The node map that graphrt saves says which module, direction and phase a node of the captured graph is of. Replayed
activities are joined with it by node id where the ids are the same, else by order within a replay (the kernels of a second
branch in an order of their own); the kernel's name must agree either way. What finds no partner is listed. A file
node_map.json beside the report is taken by itself.
"""

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from difflib import SequenceMatcher
from itertools import pairwise
from pathlib import Path
from typing import Any

from nsys_report import Activity, RangeEvent, Report, ReportError, read_report

from graphrt.capture.attribution import Place
from graphrt.profiling.events import Event, PathProfile
from graphrt.profiling.plot import plot_profile

NUM_GAPS = 5  # longest ones shown a step
OUTSIDE = "(outside)"
_KEYS = {"index", "kind", "kernel", "module", "direction", "phase", "node_id"}  # of a node in the map's file


@dataclass
class StepRow:
    """One step on the device: from the end of the step before it, or its own first activity, to its last."""

    step: int | None
    host_ms: float
    device_ms: float
    busy_ms: float
    gap_share: float
    activities: int


@dataclass
class GapRow:
    """A time in which the device did nothing."""

    step: int | None
    at_ms: float  # into the step
    us: float
    after: str
    before: str


@dataclass
class SumRow:
    """Activities added up under some name."""

    name: str
    activities: int
    ms: float
    beside_ms: float  # on the graph's second branch; not in ms
    share: float  # of ms in the whole report


@dataclass
class RangeRow(SumRow):
    """As SumRow, for a range and what was launched in it but in no range inside it."""

    entries: int
    host_ms: float


@dataclass
class ModuleRow(SumRow):
    """As SumRow, for a module (the name) in one direction and phase."""

    phase: str
    direction: str


@dataclass
class Summary:
    """All tables."""

    steps: list[StepRow]
    gaps: list[GapRow]
    ranges: list[RangeRow]
    kernels: list[SumRow]
    modules: list[ModuleRow] = field(default_factory=list)
    unmatched: list[SumRow] = field(default_factory=list)  # replayed, and not in the node map
    unseen: list[str] = field(default_factory=list)  # in the node map, and never replayed
    notes: list[str] = field(default_factory=list)


# -- steps and gaps


def _busy(activities: Iterable[Activity]) -> list[tuple[int, int, str, str]]:
    """(start, end, first and last activity's name) of the times in which something ran; ``activities`` by start."""
    busy: list[tuple[int, int, str, str]] = []
    for activity in activities:
        if busy and activity.start <= busy[-1][1]:
            start, end, first, last = busy[-1]
            busy[-1] = (start, max(end, activity.end), first, activity.name if activity.end > end else last)
        else:
            busy.append((activity.start, activity.end, activity.name, activity.name))
    return busy


def step_tables(report: Report) -> tuple[list[StepRow], list[GapRow]]:
    """A row a step, and its longest gaps."""
    by_step: dict[RangeEvent, list[Activity]] = defaultdict(list)
    for activity in report.activities:
        if activity.ranges and activity.ranges[0].name == "step":
            by_step[activity.ranges[0]].append(activity)
    rows, gaps, last_end = [], [], None
    for step in report.steps:
        activities = by_step[step]
        host_ms = (step.end - step.start) / 1e6
        if not activities:
            rows.append(StepRow(step.number, host_ms, 0.0, 0.0, 0.0, 0))
            continue
        busy = _busy(activities)
        begin = busy[0][0] if last_end is None else min(last_end, busy[0][0])
        last_end = busy[-1][1]
        busy_ns = sum(end - start for start, end, _, _ in busy)
        rows.append(
            StepRow(step.number, host_ms, (last_end - begin) / 1e6, busy_ns / 1e6, 1 - busy_ns / max(1, last_end - begin), len(activities))
        )
        gaps += _gaps(step.number, begin, busy)
    return rows, gaps


def _gaps(step: int | None, begin: int, busy: list[tuple[int, int, str, str]]) -> list[GapRow]:
    times = [(begin, begin, "", "the step before"), *busy]
    gaps = [GapRow(step, (a[1] - begin) / 1e6, (b[0] - a[1]) / 1e3, a[3], b[2]) for a, b in pairwise(times) if b[0] > a[1]]
    return sorted(gaps, key=lambda gap: -gap.us)[:NUM_GAPS]


# -- sums


class _Sums:
    """Adds up activities; knows which of them ran on the second branch of a graph."""

    def __init__(self, activities: Sequence[Activity], beside: set[int]) -> None:
        self._beside = beside  # by id()
        self._total_ns = sum(activity.ns for activity in activities if id(activity) not in beside)

    def by(self, key: Callable[[Activity], Any], activities: Iterable[Activity]) -> list[tuple[Any, dict[str, Any]]]:
        """(key, the numbers of a SumRow) of the activities of each key, longest first."""
        groups: dict[Any, list[Activity]] = defaultdict(list)
        for activity in activities:
            groups[key(activity)].append(activity)
        rows = [(name, self._numbers(group)) for name, group in groups.items()]
        return sorted(rows, key=lambda row: -row[1]["ms"] - row[1]["beside_ms"])

    def _numbers(self, activities: list[Activity]) -> dict[str, Any]:
        beside_ns = sum(activity.ns for activity in activities if id(activity) in self._beside)
        ns = sum(activity.ns for activity in activities) - beside_ns
        return {"activities": len(activities), "ms": ns / 1e6, "beside_ms": beside_ns / 1e6, "share": ns / max(1, self._total_ns)}


def _path(events: Sequence[RangeEvent]) -> str:
    return "/".join(event.name for event in events) or OUTSIDE


def range_table(report: Report, sums: _Sums) -> list[RangeRow]:
    """A row a range, those inside another after it."""
    found = dict(sums.by(lambda activity: _path(activity.ranges), report.activities))
    entries: dict[str, list[int]] = defaultdict(list)
    for event in report.ranges:
        entries[_path(event.chain)].append(event.end - event.start)
    nothing = {"activities": 0, "ms": 0.0, "beside_ms": 0.0, "share": 0.0}
    names = [*entries, *(name for name in found if name not in entries)]
    return [RangeRow(name, **found.get(name, nothing), entries=len(entries[name]), host_ms=sum(entries[name]) / 1e6) for name in names]


# -- modules


class NodeMap:
    """The nodes of a captured step that show in a profile, in the order of launch; see the README for the file."""

    def __init__(self, nodes: list[dict[str, Any]], original_nodes: dict[int, int]) -> None:
        self.nodes = [node for node in nodes if node["kind"] in ("kernel", "memcpy", "memset")]
        self._original_nodes = original_nodes
        self._index_of_id = {node["node_id"]: index for index, node in enumerate(self.nodes) if node["node_id"] is not None}
        self._by_order: dict[tuple[Any, ...], list[int | None]] = {}
        # Of kernels that run beside others, wherever else they run too. Maps of older versions know of none.
        self._beside = {_key(node): node for node in self.nodes if node.get("is_beside")}

    @classmethod
    def read(cls, path: Path, original_nodes: dict[int, int]) -> "NodeMap":
        """Read the file.

        Raises:
            ReportError: it is no node map.
        """
        try:
            nodes = json.loads(path.read_text(encoding="utf-8"))
            for node in nodes:
                if missing := _KEYS - set(node):
                    raise ValueError(f"an entry has no {sorted(missing)[0]}")
            return cls(nodes, original_nodes)
        except (OSError, ValueError, TypeError) as error:
            raise ReportError(f"{path} is no node map: {error}. Save it from the run that nsys watched.") from error

    def match(self, replays: list[list[Activity]]) -> list[list[int | None]]:
        """The index of each activity's node, None where there is none. Each replay is of one launch, by start."""
        by_id = [[self._with_id(activity) for activity in replay] for replay in replays]
        # Where one replay has the map's ids, one that has none of them is of another graph.
        are_ids_known = any(None not in indices for indices in by_id)
        return [
            indices
            if None not in indices or (are_ids_known and not any(index is not None for index in indices))
            else self._best(indices, replay)
            for indices, replay in zip(by_id, replays, strict=True)
        ]

    def _best(self, by_id: list[int | None], replay: list[Activity]) -> list[int | None]:
        in_order = self._in_order(replay)
        # Ids of another run agree by chance at most.
        return by_id if by_id.count(None) <= in_order.count(None) else in_order

    def _with_id(self, activity: Activity) -> int | None:
        for node_id in (activity.node_id, self._original_nodes.get(activity.node_id or 0)):
            index = self._index_of_id.get(node_id)
            if index is not None and _agree(self.nodes[index], activity):
                return index
        return None

    def _in_order(self, replay: list[Activity]) -> list[int | None]:
        key = tuple((activity.kind, activity.mangled or activity.name) for activity in replay)
        if key not in self._by_order:
            self._by_order[key] = self._align(replay)
        return self._by_order[key]

    def _align(self, replay: list[Activity]) -> list[int | None]:
        has_name = [any(_agree(node, activity) for node in self._beside.values()) for activity in replay]
        # A short name may be that of several kernels: nodes are told apart as the activities are.
        alike = {(one.kind, one.mangled or one.name): one for one, value in zip(replay, has_name, strict=True) if value}.values()
        is_named = [_key(node) in self._beside or any(_agree(node, activity) for activity in alike) for node in self.nodes]
        found: list[int | None] = [None] * len(replay)
        for is_beside in (False, True):
            places = [place for place, value in enumerate(has_name) if value is is_beside]
            indices = [index for index, value in enumerate(is_named) if value is is_beside]
            pairs = _align_in_order([self.nodes[index] for index in indices], [replay[place] for place in places])
            for ours, theirs in pairs:
                found[places[theirs]] = indices[ours]
        return found


def _key(node: dict[str, Any]) -> tuple[str, str | None]:
    return node["kind"], node["kernel"] if node["kind"] == "kernel" else None


def _align_in_order(nodes: list[dict[str, Any]], replay: list[Activity]) -> list[tuple[int, int]]:
    """Pairs (index of a node, index of its activity)."""
    if len(replay) == len(nodes) and all(map(_agree, nodes, replay)):
        return [(i, i) for i in range(len(nodes))]
    # Something is missing, more, or elsewhere: the longest common runs of names.
    theirs = [(activity.kind, activity.mangled) for activity in replay]
    blocks = SequenceMatcher(None, [_key(node) for node in nodes], theirs, autojunk=False).get_matching_blocks()
    return [(block.a + i, block.b + i) for block in blocks for i in range(block.size)]


def _agree(node: dict[str, Any], activity: Activity) -> bool:
    """Whether both can be the same node. Some reports have no mangled names: the short one is a part of it."""
    if node["kind"] != activity.kind:
        return False
    if activity.kind != "kernel":
        return True
    return node["kernel"] == activity.mangled if activity.mangled else activity.short_name in (node["kernel"] or "")


class Join:
    """The replayed activities of a report, and their nodes; a map of no nodes joins none."""

    def __init__(self, report: Report, node_map: NodeMap) -> None:
        replays: dict[tuple[int, int], list[Activity]] = defaultdict(list)
        for activity in report.activities:
            if activity.node_id is not None:
                replays[activity.launch].append(activity)
        self.nodes = node_map.nodes
        self.replayed = [activity for replay in replays.values() for activity in replay]
        self._indices: dict[int, int | None] = {}  # by id() of the activity
        for replay, indices in zip(replays.values(), node_map.match(list(replays.values())), strict=True):
            self._indices.update((id(activity), index) for activity, index in zip(replay, indices, strict=True))

    def node_of(self, activity: Activity) -> dict[str, Any] | None:
        """Its node, None for an activity without one."""
        index = self._indices.get(id(activity))
        return None if index is None else self.nodes[index]

    @property
    def beside(self) -> set[int]:
        """The id() of every activity on the second branch."""
        return {id(activity) for activity in self.replayed if (self.node_of(activity) or {}).get("is_beside")}

    @property
    def unseen(self) -> list[dict[str, Any]]:
        """Nodes that were never replayed."""
        seen = set(self._indices.values())
        return [node for index, node in enumerate(self.nodes) if index not in seen]


def _add_modules(summary: Summary, join: Join, sums: _Sums) -> None:
    """Fill the tables that need a node map."""
    if not join.replayed:
        summary.notes.append("No nodes of a graph are in the report: modules need --cuda-graph-trace=node.")
        return
    nodes = {id(activity): node for activity in join.replayed if (node := join.node_of(activity)) is not None}

    def place(activity: Activity) -> tuple[str, str, str]:
        node = nodes[id(activity)]
        return node["module"], node["direction"], node["phase"]

    matched = [activity for activity in join.replayed if id(activity) in nodes]
    unmatched = [activity for activity in join.replayed if id(activity) not in nodes]
    summary.modules = [
        ModuleRow(module or OUTSIDE, **numbers, direction=direction, phase=phase)
        for (module, direction, phase), numbers in sums.by(place, matched)
    ]
    summary.unmatched = [SumRow(name, **numbers) for name, numbers in sums.by(lambda activity: activity.name, unmatched)]
    summary.unseen = [f"{node['index']}: {node['kernel'] or node['kind']}" for node in join.unseen]


def summarize(report: Report, node_map: NodeMap | None, join: Join) -> Summary:
    """All tables of a report."""
    sums = _Sums(report.activities, join.beside)
    steps, gaps = step_tables(report)
    kernels = [SumRow(name, **numbers) for name, numbers in sums.by(lambda activity: activity.name, report.activities)]
    summary = Summary(steps, gaps, range_table(report, sums), kernels)
    if not steps:
        summary.notes.append("No step ranges are in the report: it needs -t cuda,nvtx, and a window that opens before a step.")
    if node_map is not None:
        _add_modules(summary, join, sums)
    return summary


# -- the picture


def path_profile(report: Report, join: Join) -> PathProfile:
    """The steps of a report as `graphrt profile` has them, the last one first: it is what a picture shows over time.

    The first of several is left out: it has the profiler's start in it.
    """
    numbers = {step: number for number, step in enumerate(reversed(report.steps[1:] or report.steps))}
    events = []
    for activity in report.activities:
        step = numbers.get(activity.ranges[0]) if activity.ranges else None
        if step is not None:
            node = join.node_of(activity)
            place = _place(activity, node)
            is_beside = bool((node or {}).get("is_beside"))
            times = activity.start / 1e3, activity.ns / 1e3
            events.append(Event(step, activity.name, activity.kind, *times, place, activity.node_id is not None, is_beside=is_beside))
    rows = step_tables(report)[0][-len(numbers) :]
    step_us = sum(row.device_ms for row in rows) / max(1, len(rows)) * 1e3
    return PathProfile("captured" if join.replayed else "steps", max(1, len(rows)), tuple(events), step_us)


def draw(report: Report, join: Join, file: Path) -> str:
    """Draw the picture; returns why there is none, "" if there is."""
    profile = path_profile(report, join)
    if not profile.events:
        return "the report has no step."
    if not plot_profile(file, [profile], report.device):
        return "matplotlib is not installed. Install it with: pip install matplotlib"
    return ""


def _place(activity: Activity, node: dict[str, Any] | None) -> Place:
    """Where the activity belongs: by its node, or by the innermost range it was launched in."""
    if node is None:
        return Place(phase=activity.ranges[-1].name)
    return Place(node["phase"], node["direction"], node["module"])


# -- output


def _show(title: str, rows: Sequence[Any], top: int) -> None:
    if not rows:
        return
    # Only a graph with two branches has something beside.
    columns = [name for name in asdict(rows[0]) if name != "beside_ms" or any(row.beside_ms for row in rows)]
    shown = [[_cell(column, getattr(row, column)) for column in columns] for row in rows[:top]]
    widths = [max(len(column), *(len(cells[i]) for cells in shown)) for i, column in enumerate(columns)]
    print(f"\n{title}")
    for cells in [columns, *shown]:
        print(
            "  "
            + "  ".join(cell.rjust(width) if i else cell.ljust(width) for i, (cell, width) in enumerate(zip(cells, widths, strict=True)))
        )
    if len(rows) > top:
        print(f"  and {len(rows) - top} more rows: --top {len(rows)}")


def _cell(column: str, value: Any) -> str:
    if "share" in column:
        return f"{value:.1%}"
    if isinstance(value, float):
        return f"{value:.3f}"
    text = "-" if value is None else str(value)
    return text if len(text) <= 90 else f"{text[:87]}..."


def show(summary: Summary, top: int) -> None:
    """Print all tables, ``top`` rows of each."""
    _show("Steps on the device", summary.steps, top)
    _show("Longest gaps", sorted(summary.gaps, key=lambda gap: -gap.us), top)
    _show("By range of the launch", summary.ranges, top)
    _show("By kernel", summary.kernels, top)
    _show("Replayed, by module", summary.modules, top)
    _show("Replayed, but not in the node map", summary.unmatched, top)
    if summary.unseen:
        print(f"\nIn the node map, but never replayed: {len(summary.unseen)} nodes")
        print("\n".join(f"  {line}" for line in summary.unseen[:top]))
    for note in summary.notes:
        print(f"\n{note}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables, or one line of what is wrong with the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path, help="SQLite export of an nsys report")
    parser.add_argument("--node-map", type=Path, help="default: node_map.json beside the report, if it is there")
    parser.add_argument("--json", action="store_true", help="all rows of all tables, as one JSON object")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw device time by layer, and the last step over time")
    parser.add_argument("--top", type=int, default=25, help="rows shown of each table (default: %(default)s)")
    options = parser.parse_args(arguments)
    beside = options.report.parent / "node_map.json"
    path = options.node_map or (beside if beside.is_file() else None)
    try:
        report = read_report(options.report)
        node_map = NodeMap.read(path, report.original_nodes) if path else None
    except ReportError as error:
        print(error, file=sys.stderr)
        return 2
    join = Join(report, node_map or NodeMap([], {}))
    summary = summarize(report, node_map, join)
    if options.plot is not None and (reason := draw(report, join, options.plot)):
        print(f"No picture: {reason}", file=sys.stderr)
    if options.json:
        print(json.dumps(asdict(summary)))
    else:
        show(summary, options.top)
    return 0


if __name__ == "__main__":
    sys.exit(main())
