"""profiles/summarize.py on small SQLite files with nsys's published schema."""

import json
import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "profiles"))

import summarize

US = 1000  # nanoseconds
PROCESS = 7 << 24
MAIN, ENGINE = PROCESS + 1, PROCESS + 2

SCHEMA = """
CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE NVTX_EVENTS (
    start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, rangeId INTEGER, category INTEGER, color INTEGER, text TEXT,
    globalTid INTEGER, endGlobalTid INTEGER, textId INTEGER, domainId INTEGER, uint64Value INTEGER, int64Value INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (
    start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER, globalTid INTEGER, correlationId INTEGER, nameId INTEGER NOT NULL,
    returnValue INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (
    start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER, contextId INTEGER, streamId INTEGER, correlationId INTEGER,
    globalPid INTEGER, demangledName INTEGER NOT NULL, shortName INTEGER NOT NULL, mangledName INTEGER, graphNodeId INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (
    start INTEGER NOT NULL, end INTEGER NOT NULL, streamId INTEGER, correlationId INTEGER, globalPid INTEGER, bytes INTEGER NOT NULL,
    copyKind INTEGER NOT NULL, graphNodeId INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMSET (
    start INTEGER NOT NULL, end INTEGER NOT NULL, streamId INTEGER, correlationId INTEGER, globalPid INTEGER, value INTEGER NOT NULL,
    bytes INTEGER NOT NULL, graphNodeId INTEGER);
"""
GRAPH_SCHEMA = """
CREATE TABLE CUPTI_ACTIVITY_KIND_GRAPH_TRACE (
    start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, graphId INTEGER NOT NULL, originalGraphId INTEGER,
    streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, graphExecId INTEGER);
CREATE TABLE CUDA_GRAPH_NODE_EVENTS (
    start INTEGER NOT NULL, end INTEGER NOT NULL, nameId INTEGER NOT NULL, globalTid INTEGER, graphNodeId INTEGER NOT NULL,
    originalGraphNodeId INTEGER);
"""


class Export:
    """An export under construction. Times are in microseconds."""

    def __init__(self, path: Path, *, domain: str | None = "graphrt") -> None:
        self.path, self.strings, self.num_calls = path, {}, 0
        self.database = sqlite3.connect(path)
        self.database.executescript(SCHEMA + GRAPH_SCHEMA)
        if domain is not None:
            self.insert("NVTX_EVENTS", start=0, eventType=75, text=domain, globalTid=MAIN, domainId=3)

    def insert(self, table: str, **row: Any) -> None:
        marks = ", ".join("?" * len(row))
        self.database.execute(f"INSERT INTO {table} ({', '.join(row)}) VALUES ({marks})", tuple(row.values()))

    def string(self, text: str) -> int:
        if text not in self.strings:
            self.strings[text] = len(self.strings) + 1
            self.insert("StringIds", id=self.strings[text], value=text)
        return self.strings[text]

    def range(self, name: str, start: int, end: int, *, number: int | None = None, thread: int = MAIN, domain: int = 3) -> None:
        self.insert(
            "NVTX_EVENTS", start=start * US, end=end * US, eventType=59, textId=self.string(name), globalTid=thread, domainId=domain,
            int64Value=number,
        )  # fmt: skip

    def call(self, start: int, thread: int = MAIN) -> int:
        self.num_calls += 1
        self.insert(
            "CUPTI_ACTIVITY_KIND_RUNTIME", start=start * US, end=(start + 1) * US, globalTid=thread, correlationId=self.num_calls,
            nameId=self.string("cudaLaunch"), returnValue=0,
        )  # fmt: skip
        return self.num_calls

    def kernel(self, name: str, start: int, end: int, call: int, node: int | None = None, *, is_mangled: bool = True) -> None:
        self.insert(
            "CUPTI_ACTIVITY_KIND_KERNEL", start=start * US, end=end * US, correlationId=call, globalPid=PROCESS,
            demangledName=self.string(f"void {name}<float>(float*)"), shortName=self.string(name),
            mangledName=self.string(mangled(name)) if is_mangled else None, graphNodeId=node,
        )  # fmt: skip

    def copy(self, start: int, end: int, call: int, node: int | None = None) -> None:
        self.insert(
            "CUPTI_ACTIVITY_KIND_MEMCPY", start=start * US, end=end * US, correlationId=call, globalPid=PROCESS, bytes=4, copyKind=8,
            graphNodeId=node,
        )  # fmt: skip

    def close(self) -> Path:
        self.database.commit()
        self.database.close()
        return self.path


def mangled(name: str) -> str:
    return f"_Z{len(name)}{name}IfEvPT_"


def node(index: int, kernel: str | None, module: str, direction: str, phase: str, node_id: int | None = None, kind: str = "kernel") -> Any:
    name = mangled(kernel) if kernel else None
    return {
        "index": index, "kind": kind, "kernel": name, "module": module, "direction": direction, "phase": phase, "node_id": node_id
    }  # fmt: skip


#: gemm, norm, an empty node, gemm, a copy, adamw
NODES = [
    node(0, "gemm", "blocks.0.up", "forward", "forward", 100),
    node(1, "norm", "blocks.0", "forward", "forward", 101),
    node(2, None, "", "", "forward", 102, kind="empty"),
    node(3, "gemm", "blocks.0.up", "backward", "backward", 103),
    node(4, None, "", "", "clip", 104, kind="memcpy"),
    node(5, "adamw", "", "", "optimizer", 105),
]


#: The names of a replay of them, in order.
STEP = ("gemm", "norm", "gemm", None, "adamw")


def replayed(export: Export, start: int, *, ids: Any = (1, 2, 3, 4, 5), names: Any = STEP, **options: Any) -> None:
    """A step of 100 us whose replay runs for 10 us a node, with 5 us between the second and the third."""
    export.range("step", start, start + 20, number=start // 100 + 1)
    export.range("copy_inputs", start + 1, start + 4)
    export.copy(start + 10, start + 20, export.call(start + 2))
    export.range("replay", start + 5, start + 15)
    call, time = export.call(start + 6), start + 20
    for index, (node_id, name) in enumerate(zip(ids, names, strict=True)):
        time += 5 if index == 2 else 0
        if name is None:
            export.copy(time, time + 10, call, node_id)
        else:
            export.kernel(name, time, time + 10, call, node_id, **options)
        time += 10


def tables(export: Export, capsys: pytest.CaptureFixture[str], *options: str) -> Any:
    path = export.close()
    assert summarize.main([str(path), "--json", *options]) == 0
    return json.loads(capsys.readouterr().out)


def write_map(directory: Path, nodes: list[Any], name: str = "node_map.json") -> str:
    path = directory / name
    path.write_text(json.dumps(nodes))
    return str(path)


@pytest.fixture
def export(tmp_path):
    made = Export(tmp_path / "report.sqlite")
    yield made
    made.database.close()


def modules(found: Any) -> dict[tuple[str, str, str], tuple[int, float]]:
    return {(row["phase"], row["direction"], row["name"]): (row["activities"], row["ms"]) for row in found["modules"]}


EXPECTED = {
    ("forward", "forward", "blocks.0.up"): (1, 0.01),
    ("forward", "forward", "blocks.0"): (1, 0.01),
    ("backward", "backward", "blocks.0.up"): (1, 0.01),
    ("clip", "", "(outside)"): (1, 0.01),
    ("optimizer", "", "(outside)"): (1, 0.01),
}


def test_steps_and_their_gaps(export, capsys):
    replayed(export, 0)
    replayed(export, 100)
    found = tables(export, capsys)
    first, second = found["steps"]
    assert first == pytest.approx(
        {"step": 1, "host_ms": 0.02, "device_ms": 0.065, "busy_ms": 0.06, "gap_share": 5 / 65, "activities": 6}
    )  # fmt: skip
    # The second begins where the first ended, at 75 us.
    assert second == pytest.approx(
        {"step": 2, "host_ms": 0.02, "device_ms": 0.1, "busy_ms": 0.06, "gap_share": 0.4, "activities": 6}
    )  # fmt: skip
    gaps = [(gap["step"], gap["at_ms"], gap["us"]) for gap in found["gaps"]]
    assert gaps == [(1, 0.03, 5.0), (2, 0.0, 35.0), (2, 0.065, 5.0)]
    assert found["gaps"][0]["after"] == "void norm<float>(float*)"
    assert found["gaps"][1]["after"] == "the step before"


def test_activities_that_overlap_are_busy_once(export, capsys):
    export.range("step", 0, 20, number=4)
    call = export.call(1)
    export.kernel("long", 0, 100, call)
    export.kernel("short", 10, 20, call)
    export.kernel("late", 90, 110, call)
    (step,) = tables(export, capsys)["steps"]
    assert (step["device_ms"], step["busy_ms"], step["gap_share"]) == (0.11, 0.11, 0.0)


def test_device_time_goes_to_the_innermost_range_of_the_launch(export, capsys):
    replayed(export, 0)
    export.kernel("before", 0, 1, export.call(50))
    found = {row["name"]: row for row in tables(export, capsys)["ranges"]}
    assert {name: (row["activities"], row["ms"], row["entries"]) for name, row in found.items()} == {
        "step": (0, 0.0, 1),
        "step/copy_inputs": (1, 0.01, 1),
        "step/replay": (5, 0.05, 1),
        "(outside)": (1, 0.001, 0),
    }
    assert found["step/replay"]["host_ms"] == 0.01


def test_what_the_engines_thread_launches_is_in_the_step_of_the_main_thread(export, capsys):
    export.range("step", 0, 100, number=1)
    export.range("backward", 10, 90)
    export.range("head backward", 20, 30, thread=ENGINE)
    export.kernel("gemm", 200, 210, export.call(25, ENGINE))
    export.kernel("norm", 210, 220, export.call(35, ENGINE))
    found = tables(export, capsys)
    assert {row["name"]: row["activities"] for row in found["ranges"] if row["activities"]} == {
        "step/backward/head backward": 1,
        "step/backward": 1,
    }
    assert found["steps"][0]["activities"] == 2


def test_ranges_of_other_domains_are_left_out_unless_none_is_named(tmp_path, capsys):
    for name, domain, expected in (("own", "graphrt", ["step"]), ("none", None, ["step", "step/torch op"])):
        export = Export(tmp_path / f"{name}.sqlite", domain=domain)
        export.range("step", 0, 20, number=1)
        export.range("torch op", 1, 10, domain=0)
        export.kernel("gemm", 30, 40, export.call(2))
        assert [row["name"] for row in tables(export, capsys)["ranges"]] == expected


def test_kernels_are_added_up_by_name(export, capsys):
    replayed(export, 0)
    kernels = tables(export, capsys)["kernels"]
    assert {row["name"]: (row["activities"], row["ms"]) for row in kernels} == {
        "void gemm<float>(float*)": (2, 0.02),
        "memcpy, device to device": (2, 0.02),
        "void norm<float>(float*)": (1, 0.01),
        "void adamw<float>(float*)": (1, 0.01),
    }
    assert sum(row["share"] for row in kernels) == pytest.approx(1)


def test_a_replay_seen_as_a_whole_is_the_steps_work(export, capsys, tmp_path):
    write_map(tmp_path, NODES)
    export.range("step", 0, 20, number=9)
    export.range("replay", 5, 15)
    row = {"deviceId": 0, "graphId": 12, "streamId": 7, "correlationId": export.call(6), "globalPid": PROCESS}
    export.insert("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", start=20 * US, end=90 * US, **row)
    found = tables(export, capsys)
    assert (found["steps"][0]["device_ms"], found["steps"][0]["gap_share"]) == (0.07, 0.0)
    assert [row["name"] for row in found["kernels"]] == ["graph 12, as a whole"]
    assert found["modules"] == []
    assert "--cuda-graph-trace=node" in found["notes"][0]


# -- joining with the node map


def test_nodes_are_joined_by_id_in_any_order(export, capsys, tmp_path):
    # Two gemms of other modules changed places in time, which only the ids tell.
    nodes = [node(0, "gemm", "a", "forward", "forward", 100), node(1, "gemm", "b", "forward", "forward", 101)]
    export.range("step", 0, 20, number=1)
    call = export.call(1)
    export.kernel("gemm", 30, 40, call, 101)
    export.kernel("gemm", 40, 70, call, 100)
    found = tables(export, capsys, "--node-map", write_map(tmp_path, nodes, "other.json"))
    assert modules(found) == {("forward", "forward", "a"): (1, 0.03), ("forward", "forward", "b"): (1, 0.01)}
    assert found["unmatched"] == found["unseen"] == []


def test_nodes_are_joined_through_the_node_they_were_instantiated_from(export, capsys, tmp_path):
    write_map(tmp_path, NODES)
    replayed(export, 0, ids=(901, 902, 903, 904, 905))
    for clone, original in zip((901, 902, 903, 904, 905), (100, 101, 103, 104, 105), strict=True):
        export.insert(
            "CUDA_GRAPH_NODE_EVENTS", start=0, end=0, nameId=1, globalTid=MAIN, graphNodeId=clone, originalGraphNodeId=original
        )  # fmt: skip
    found = tables(export, capsys)
    assert modules(found) == EXPECTED
    assert found["unmatched"] == found["unseen"] == []


@pytest.mark.parametrize("is_mangled", [True, False])
def test_nodes_without_common_ids_are_joined_by_order(export, capsys, tmp_path, is_mangled):
    write_map(tmp_path, NODES)
    replayed(export, 0, is_mangled=is_mangled)
    replayed(export, 100, is_mangled=is_mangled)
    found = tables(export, capsys)
    assert modules(found) == {place: (2 * count, 2 * ms) for place, (count, ms) in EXPECTED.items()}
    assert found["unmatched"] == found["unseen"] == []


@pytest.mark.parametrize("is_mangled", [True, False])
@pytest.mark.parametrize("names", [("gemm", "norm", "gemm", None, "adamw", "sums"), ("gemm", "sums", "norm", "gemm", None, "adamw")])
def test_kernels_of_a_branch_are_joined_wherever_they_ran(export, capsys, tmp_path, is_mangled, names):
    write_map(tmp_path, [*NODES[:3], {**node(3, "sums", "", "", "clip"), "is_beside": True}, *NODES[3:]])
    replayed(export, 0, ids=range(1, 7), names=names, is_mangled=is_mangled)
    found = tables(export, capsys)
    assert modules(found) == EXPECTED | {("clip", "", "(outside)"): (2, 0.01)}
    assert found["unmatched"] == found["unseen"] == []


def test_what_runs_beside_is_told_apart_and_has_no_share(export, capsys, tmp_path):
    write_map(tmp_path, [*NODES[:3], {**node(3, "sums", "", "", "clip"), "is_beside": True}, *NODES[3:]])
    replayed(export, 0, ids=range(1, 7), names=("gemm", "norm", "gemm", None, "adamw", "sums"))
    path = export.close()
    assert summarize.main([str(path)]) == 0
    assert "beside_ms" in capsys.readouterr().out
    assert summarize.main([str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    for table, ms in {"ranges": 0.06, "kernels": 0.06, "modules": 0.05}.items():  # the copy of the inputs is not replayed
        assert sum(row["beside_ms"] for row in found[table]) == pytest.approx(0.01)
        assert sum(row["ms"] for row in found[table]) == pytest.approx(ms)
        assert sum(row["share"] for row in found[table]) == pytest.approx(ms / 0.06)
    (sums,) = (row for row in found["kernels"] if row["beside_ms"])
    assert ("sums" in sums["name"], sums["ms"], sums["share"]) == (True, 0.0, 0.0)


def test_the_longest_work_beside_is_among_the_first_rows(export, capsys, tmp_path):
    chain = [f"kernel{i}" for i in range(30)]
    nodes = [node(i, name, "", "", "forward", 100 + i) for i, name in enumerate(chain)]
    write_map(tmp_path, [*nodes, {**node(30, "quantize", "", "", "quantize_weights", 130), "is_beside": True}])
    call = export.call(0)
    for i, name in enumerate(chain):
        export.kernel(name, 10 + i, 11 + i, call, 100 + i)
    export.kernel("quantize", 10, 70, call, 130)
    assert summarize.main([str(export.close()), "--top", "3"]) == 0
    by_kernel = capsys.readouterr().out.partition("By kernel")[2].splitlines()
    assert by_kernel[2].split()[0:2] == ["void", "quantize<float>(float*)"]
    assert "0.060" in by_kernel[2]


def test_a_replay_without_the_maps_ids_is_of_another_graph(export, capsys, tmp_path):
    write_map(tmp_path, NODES)
    replayed(export, 0, ids=(100, 101, 103, 104, 105))
    replayed(export, 100, ids=(1, 2, 3, 4, 5))
    found = tables(export, capsys)
    assert modules(found) == EXPECTED
    assert sum(row["activities"] for row in found["unmatched"]) == 5


def test_without_a_branch_there_is_no_column_for_it(export, capsys, tmp_path):
    write_map(tmp_path, NODES)
    replayed(export, 0)
    assert summarize.main([str(export.close())]) == 0
    assert "beside" not in capsys.readouterr().out


def joined(export: Export, directory: Path) -> tuple[Any, Any]:
    report = summarize.read_report(export.close())
    path = directory / "node_map.json"
    return report, summarize.Join(report, summarize.NodeMap.read(path, {}) if path.is_file() else summarize.NodeMap([], {}))


def test_the_picture_has_all_steps_but_the_first_by_module(export, tmp_path):
    write_map(tmp_path, NODES)
    for start in (0, 100, 200):
        replayed(export, start)
    profile = summarize.path_profile(*joined(export, tmp_path))
    assert (profile.path, profile.num_steps) == ("captured", 2)
    assert [event.step for event in profile.events] == [1] * 6 + [0] * 6  # the last one is the one over time
    assert {event.place.module for event in profile.events} == {"blocks.0", "blocks.0.up", ""}
    assert {event.place.phase for event in profile.events} == {"copy_inputs", "forward", "backward", "clip", "optimizer"}
    assert profile.kernel_us == pytest.approx(60)
    assert profile.step_us == pytest.approx(100)


def test_the_picture_of_an_eager_step_is_by_range(export, tmp_path):
    export.range("step", 0, 50, number=1)
    export.range("forward", 1, 9)
    export.kernel("gemm", 12, 22, export.call(2))
    profile = summarize.path_profile(*joined(export, tmp_path))
    assert [(event.place.phase, event.step, event.duration_us) for event in profile.events] == [("forward", 0, 10.0)]
    assert profile.path == "steps"


def test_a_report_is_drawn(export, tmp_path, capsys):
    write_map(tmp_path, NODES)
    replayed(export, 0)
    picture = tmp_path / "step.png"
    assert summarize.main([str(export.close()), "--plot", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert not capsys.readouterr().err


def test_a_report_without_steps_is_not_drawn(export, tmp_path, capsys):
    export.kernel("gemm", 12, 22, export.call(2))
    picture = tmp_path / "step.png"
    assert summarize.main([str(export.close()), "--plot", str(picture)]) == 0
    assert not picture.is_file()
    assert capsys.readouterr().err == "No picture: the report has no step.\n"


def test_without_matplotlib_there_are_the_tables(export, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(summarize, "plot_profile", lambda *_: False)
    replayed(export, 0)
    assert summarize.main([str(export.close()), "--plot", str(tmp_path / "step.png")]) == 0
    printed = capsys.readouterr()
    assert "Steps on the device" in printed.out
    assert "pip install matplotlib" in printed.err


def test_what_does_not_match_is_listed(export, capsys, tmp_path):
    write_map(tmp_path, NODES)
    replayed(export, 0, names=("gemm", "norm", "gemm", None, "sgd"))
    found = tables(export, capsys)
    assert modules(found) == {place: numbers for place, numbers in EXPECTED.items() if place[0] != "optimizer"}
    assert [(row["name"], row["activities"]) for row in found["unmatched"]] == [("void sgd<float>(float*)", 1)]
    assert found["unseen"] == [f"5: {mangled('adamw')}"]


def test_equal_ids_of_other_kernels_do_not_match(export, capsys, tmp_path):
    # The ids are of another graph: each is of a node of another kernel here, but for one that is right by chance.
    active = [node for node in NODES if node["kind"] != "empty"]
    shifted = [{**node, "node_id": node_id} for node, node_id in zip(active, (3, 1, 5, 2, 4), strict=True)]
    write_map(tmp_path, shifted)
    replayed(export, 0)
    found = tables(export, capsys)
    assert modules(found) == EXPECTED


def test_a_replay_with_more_nodes_matches_around_them(export, capsys, tmp_path):
    write_map(tmp_path, NODES)
    replayed(export, 0, ids=(1, 2, 3, 4, 5, 6), names=("gemm", "cast", "norm", "gemm", None, "adamw"))
    found = tables(export, capsys)
    assert {place: count for place, (count, _) in modules(found).items()} == dict.fromkeys(EXPECTED, 1)
    assert [row["name"] for row in found["unmatched"]] == ["void cast<float>(float*)"]


# -- what is printed, and what is refused


def test_the_tables_are_printed(export, capsys, tmp_path):
    write_map(tmp_path, NODES)
    replayed(export, 0, names=("gemm", "norm", "gemm", None, "sgd"))
    assert summarize.main([str(export.close()), "--top", "2"]) == 0
    printed = capsys.readouterr().out
    for text in (
        "Steps on the device",
        "Longest gaps",
        "By range",
        "By kernel",
        "by module",
        "but not in the node map",
        "never replayed: 1",
    ):
        assert text in printed
    assert "blocks.0" in printed
    assert "more rows: --top" in printed


def refused(path: Path, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert summarize.main([str(path), *options]) == 2
    printed = capsys.readouterr()
    assert not printed.out
    assert printed.err.count("\n") == 1
    return printed.err


def test_what_is_no_export_is_refused(tmp_path, capsys):
    assert "is not there" in refused(tmp_path / "none.sqlite", capsys)
    report = tmp_path / "report.nsys-rep"
    report.write_bytes(b"QDSTREAM" * 10)
    assert "nsys export --type sqlite" in refused(report, capsys)
    other = tmp_path / "other.sqlite"
    with closing(sqlite3.connect(other)) as database:
        database.execute("CREATE TABLE runs (id INTEGER)")
        database.commit()
    assert "no table StringIds" in refused(other, capsys)
    torn = tmp_path / "torn.sqlite"
    torn.write_bytes(other.read_bytes()[:100] + b"\xff" * 2000)
    assert "cannot be read" in refused(torn, capsys)


def test_an_export_without_work_of_a_gpu_is_refused(export, capsys):
    export.range("step", 0, 10)
    assert "no work of a GPU" in refused(export.close(), capsys)


@pytest.mark.parametrize("content", ["not json", '{"nodes": 1}', '[{"index": 0}]', "[1]"])
def test_what_is_no_node_map_is_refused(export, capsys, tmp_path, content):
    replayed(export, 0)
    path = tmp_path / "map.json"
    path.write_text(content)
    assert "is no node map" in refused(export.close(), capsys, "--node-map", str(path))


def test_a_report_without_steps_says_so(export, capsys):
    export.kernel("gemm", 0, 10, export.call(0))
    found = tables(export, capsys)
    assert found["steps"] == []
    assert "No step ranges" in found["notes"][0]
