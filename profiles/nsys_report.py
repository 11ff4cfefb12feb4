"""What is read of an nsys report: its SQLite export, as tables of device activities and of graphrt's ranges.

The names of tables and columns are those of nsys's published export schema. Tables are there only where nsys saw such an
event, and columns come and go between versions: what is missing reads as None. Times are nanoseconds.
"""

import sqlite3
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_PUSH_POP_RANGE, _DOMAIN_CREATE = 59, 75  # NVTX_EVENTS.eventType
_COPY_KINDS = {1: "host to device", 2: "device to host", 8: "device to device", 10: "device to other device"}
_ACTIVITIES = {
    "kernel": "CUPTI_ACTIVITY_KIND_KERNEL",
    "memcpy": "CUPTI_ACTIVITY_KIND_MEMCPY",
    "memset": "CUPTI_ACTIVITY_KIND_MEMSET",
    "graph": "CUPTI_ACTIVITY_KIND_GRAPH_TRACE",
}
DOMAIN = "graphrt"


class ReportError(Exception):
    """A file that is no nsys export, or holds nothing to summarize."""


@dataclass(eq=False)
class RangeEvent:
    """One entry of a range, with the range it is in on its thread."""

    name: str
    start: int
    end: int
    number: int | None
    parent: "RangeEvent | None" = None

    @property
    def chain(self) -> list["RangeEvent"]:
        """From the outermost to this."""
        return [*(self.parent.chain if self.parent else []), self]


@dataclass(eq=False)
class Activity:
    """One piece of work of the device. A "graph" is a whole replay, where nsys was told not to look inside."""

    kind: str
    name: str
    short_name: str
    mangled: str | None
    start: int
    end: int
    launch: tuple[int, int]  # process, correlation: equal for what one call launched
    node_id: int | None  # of the graph that launched it
    ranges: list[RangeEvent] = field(default_factory=list)  # that the launch was in, outermost first

    @property
    def ns(self) -> int:
        """How long it ran."""
        return self.end - self.start


@dataclass
class Report:
    """An nsys report."""

    activities: list[Activity]  # by start
    ranges: list[RangeEvent]  # by start
    original_nodes: dict[int, int]  # id of a node in an instantiated graph: id of the captured one
    device: str  # the GPU's name

    @property
    def steps(self) -> list[RangeEvent]:
        """The `step` ranges."""
        return [event for event in self.ranges if event.name == "step" and event.parent is None]


class _Thread:
    """The ranges of one thread, to look up what was open at some time."""

    def __init__(self, events: list[RangeEvent]) -> None:
        self.events = sorted(events, key=lambda event: (event.start, -event.end))
        self.starts = [event.start for event in self.events]
        open_events: list[RangeEvent] = []
        for event in self.events:
            while open_events and open_events[-1].end < event.end:
                open_events.pop()
            event.parent = open_events[-1] if open_events else None
            open_events.append(event)

    def at(self, time: int) -> list[RangeEvent]:
        """What was open at ``time``, outermost first."""
        index = bisect_right(self.starts, time) - 1
        event = self.events[index] if index >= 0 else None
        while event is not None and event.end < time:
            event = event.parent
        return event.chain if event is not None else []


def read_report(path: Path) -> Report:
    """Read an SQLite export.

    Raises:
        ReportError: ``path`` is none, or holds no work of a GPU.
    """
    if not path.is_file():
        raise ReportError(f"{path} is not there. Export a report with: nsys export --type sqlite -o {path} REPORT.nsys-rep")
    with path.open("rb") as file:
        is_sqlite = file.read(16) == b"SQLite format 3\0"
    if not is_sqlite:
        raise ReportError(f"{path} is no SQLite file. Export the report first: nsys export --type sqlite -o OUT.sqlite {path}")
    with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as database:
        database.row_factory = sqlite3.Row
        try:
            return _read(database, path)
        except sqlite3.DatabaseError as error:
            raise ReportError(f"{path} cannot be read as an nsys export: {error}. Export the report again.") from error


def _read(database: sqlite3.Connection, path: Path) -> Report:
    if not _columns(database, "StringIds"):
        raise ReportError(f"{path} is an SQLite file, but no nsys export: it has no table StringIds. Give the output of nsys export.")
    strings = {row["id"]: row["value"] for row in _rows(database, "StringIds", "id", "value")}
    activities = sorted(_activities(database, strings), key=lambda activity: (activity.start, activity.node_id or 0))
    if not activities:
        raise ReportError(
            f"{path} holds no work of a GPU. Profile with -t cuda,nvtx, and see that the window of steps was reached (graphrt.nsys_window)."
        )
    threads = {thread: _Thread(events) for thread, events in _range_events(database, strings).items()}
    _place(activities, threads, _calls(database))
    originals = _rows(database, "CUDA_GRAPH_NODE_EVENTS", "graphNodeId", "originalGraphNodeId")
    return Report(
        activities,
        sorted((event for thread in threads.values() for event in thread.events), key=lambda event: (event.start, -event.end)),
        {row["graphNodeId"]: row["originalGraphNodeId"] for row in originals if row["originalGraphNodeId"]},
        next((row["name"] for row in _rows(database, "TARGET_INFO_GPU", "name") if row["name"]), "a GPU"),
    )


def _columns(database: sqlite3.Connection, table: str) -> set[str]:
    return {row["name"] for row in database.execute(f"PRAGMA table_info({table})")}


def _rows(database: sqlite3.Connection, table: str, *names: str) -> Iterator[sqlite3.Row]:
    """The named columns of a table, None for those that are not there; nothing of a table that is not there."""
    there = _columns(database, table)
    if there:
        columns = [f'"{name}"' if name in there else f'NULL AS "{name}"' for name in names]
        yield from database.execute(f"SELECT {', '.join(columns)} FROM {table}")


def _process(global_id: int | None) -> int:
    """The process of a globalPid or globalTid, whose low 24 bits are the thread's."""
    return (global_id or 0) >> 24


def _activities(database: sqlite3.Connection, strings: dict[int, str]) -> Iterator[Activity]:
    columns = (
        "start", "end", "correlationId", "globalPid", "graphNodeId", "demangledName", "shortName", "mangledName", "copyKind", "graphId",
    )  # fmt: skip
    for kind, table in _ACTIVITIES.items():
        for row in _rows(database, table, *columns):
            name, short_name = _names(kind, row, strings)
            yield Activity(
                kind=kind,
                name=name,
                short_name=short_name,
                mangled=strings.get(row["mangledName"]),
                start=row["start"],
                end=row["end"],
                launch=(_process(row["globalPid"]), row["correlationId"]),
                node_id=row["graphNodeId"] or None,
            )


def _names(kind: str, row: sqlite3.Row, strings: dict[int, str]) -> tuple[str, str]:
    """(name to show, name without namespace and arguments)."""
    if kind == "kernel":
        short_name = strings.get(row["shortName"], "?")
        return strings.get(row["demangledName"], short_name), short_name
    if kind == "memcpy":
        return f"memcpy, {_COPY_KINDS.get(row['copyKind'], 'other')}", kind
    return ("memset" if kind == "memset" else f"graph {row['graphId']}, as a whole"), kind


def _range_events(database: sqlite3.Connection, strings: dict[int, str]) -> dict[int, list[RangeEvent]]:
    """graphrt's ranges by thread; of every domain, in a report that names none."""
    rows = list(_rows(database, "NVTX_EVENTS", "start", "end", "eventType", "text", "textId", "globalTid", "domainId", "int64Value"))

    def text(row: sqlite3.Row) -> str:
        return row["text"] or strings.get(row["textId"], "?")

    # A domain has its number in each process.
    domains = {(_process(row["globalTid"]), row["domainId"]): text(row) for row in rows if row["eventType"] == _DOMAIN_CREATE}
    has_own = DOMAIN in domains.values()
    threads: dict[int, list[RangeEvent]] = {}
    for row in rows:
        is_own = domains.get((_process(row["globalTid"]), row["domainId"])) == DOMAIN
        if row["eventType"] == _PUSH_POP_RANGE and row["end"] is not None and (is_own or not has_own):
            event = RangeEvent(text(row), row["start"], row["end"], row["int64Value"])
            threads.setdefault(row["globalTid"], []).append(event)
    return threads


def _calls(database: sqlite3.Connection) -> dict[tuple[int, int], tuple[int, int]]:
    """(process, correlation) of each call to CUDA: (thread, start)."""
    rows = _rows(database, "CUPTI_ACTIVITY_KIND_RUNTIME", "start", "globalTid", "correlationId")
    return {(_process(row["globalTid"]), row["correlationId"]): (row["globalTid"], row["start"]) for row in rows}


def _place(activities: list[Activity], threads: dict[int, _Thread], calls: dict[tuple[int, int], Any]) -> None:
    """Say in which ranges each activity was launched. A backward runs on a thread of the engine: the step is on another."""
    for activity in activities:
        if activity.launch not in calls:
            continue
        own_thread, time = calls[activity.launch]
        own = threads[own_thread].at(time) if own_thread in threads else []
        if not own or own[0].name != "step":
            around = (threads[thread].at(time) for thread in threads if thread != own_thread and _process(thread) == _process(own_thread))
            own = next((chain for chain in around if chain and chain[0].name == "step"), []) + own
        activity.ranges = own
