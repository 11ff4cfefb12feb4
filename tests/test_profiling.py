"""Profiles: what is matched with what, sums that add up, the files, and that nothing of a profile stays."""

import gc
import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from stepping import TokenModel, assert_same_values, make_trainer, step_values, token_batch, token_batches, token_loss, values

import graphrt
from graphrt.capture.attribution import Place
from graphrt.capture.nodes import GraphNode, NodeMap
from graphrt.errors import GraphrtError
from graphrt.profiling.events import Event, PathProfile, covered, kind_of_work, layer_of
from graphrt.profiling.kineto import DeviceActivity, Launch, Marker, _read, events_of
from graphrt.profiling.matching import demangled, is_same_kernel, match
from graphrt.profiling.trace import trace_events

# -- matching


def node(index: int, kernel: str | None = None, kind: str = "kernel", module: str = "", node_id: int | None = None) -> GraphNode:
    return GraphNode(index, kind, kernel, Place("forward", "forward", module or f"layer.{index}"), node_id)


def activity(name: str, start: int = 0, kind: str = "kernel", correlation: int = 1, node_id: int | None = None) -> DeviceActivity:
    return DeviceActivity(name, kind, start, 5, correlation, node_id)


def indices(found: list[GraphNode | None]) -> list[int | None]:
    return [None if one is None else one.index for one in found]


def test_small_copies_and_memsets_that_run_as_kernels_are_the_nodes_they_stand_for():
    nodes = [node(0, None, "memcpy"), node(1, "a"), node(2, None, "memset")]
    activities = [activity("memcpy32_post"), activity("a"), activity("memset8_post")]
    assert match(activities, nodes) == nodes
    assert match(activities[::-1], nodes) == [None, None, None]


def test_activities_are_matched_by_order_and_checked_by_name():
    nodes = [node(0, "a"), node(1, None, "memcpy"), node(2, "b"), node(3, "b")]
    activities = [activity("a"), activity("Memcpy DtoD", kind="memcpy"), activity("b"), activity("b")]
    assert indices(match(activities, nodes)) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("abxd", [0, 1, None, 3]),  # another kernel: only it is unknown
        ("abd", [0, 1, 3]),  # one missing: the start counts from the start, the end from the end
        ("abccd", [0, 1, 2, None, 3]),  # one too many
        ("xxxx", [None] * 4),
        ("", []),
    ],
)
def test_what_does_not_fit_is_not_guessed(names, expected):
    nodes = [node(i, name) for i, name in enumerate("abcd")]
    assert indices(match([activity(name) for name in names], nodes)) == expected


def test_of_several_alike_with_one_missing_none_is_counted_twice():
    nodes = [node(i, "a") for i in range(4)]
    found = [one for one in match([activity("a")] * 3, nodes) if one is not None]
    assert len({one.index for one in found}) == len(found)


def beside(index: int, kernel: str) -> GraphNode:
    return replace(node(index, kernel), is_beside=True)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("qaqbqcn", [0, 1, 2, 4, 3, 5, 6]),  # the branch is behind
        ("qqqanbc", [0, 2, 3, 1, 6, 4, 5]),  # the branch is ahead
        ("qaqqcn", [0, 1, 2, 3, 5, 6]),  # one of the chain missing
        ("qaqbcn", [0, 1, 2, 4, 5, 6]),  # one of the branch missing
        ("qaqbqxn", [0, 1, 2, 4, 3, None, 6]),  # another kernel in the chain
    ],
)
def test_a_branch_is_matched_in_an_order_of_its_own(names, expected):
    """The first q is on the chain, as the first weights are."""
    nodes = [node(0, "q"), node(1, "a"), beside(2, "q"), beside(3, "q"), node(4, "b"), node(5, "c"), beside(6, "n")]
    assert indices(match([activity(name) for name in names], nodes)) == expected


def test_nodes_are_told_apart_as_the_activities_are():
    """By name one of the branch could be another instantiation of its template, which is on the chain."""
    other = MANGLED.replace("Li4E", "Li2E")
    nodes = [node(0, other), node(1, "a"), beside(2, MANGLED), node(3, other), node(4, "b")]
    names = [other, "a", MANGLED, other, "b"]
    assert indices(match([activity(demangled(name)) for name in names], nodes)) == [0, 1, 2, 3, 4]


def test_node_ids_win_over_order():
    nodes = [node(0, "a", node_id=70), node(1, "b", node_id=71)]
    assert indices(match([activity("b", node_id=71), activity("a", node_id=70)], nodes)) == [1, 0]
    # Ids of another numbering: by order.
    assert indices(match([activity("a", node_id=1), activity("b", node_id=2)], nodes)) == [0, 1]


MANGLED = "_ZN2at6native18elementwise_kernelILi128ELi4EEEvif"
DEMANGLED = "void at::native::elementwise_kernel<128, 4>(int, float)"


def test_kernel_names_are_compared_demangled():
    assert demangled(MANGLED) == DEMANGLED
    assert demangled("graphrt_quantize") == "graphrt_quantize"
    assert demangled("_Zbroken") == "_Zbroken"
    assert is_same_kernel(MANGLED, DEMANGLED)
    assert is_same_kernel(MANGLED, MANGLED)
    assert is_same_kernel(MANGLED, "void at::native::elementwise_kernel<(int)128, (int)4>(int, float)")  # another demangler
    assert not is_same_kernel(MANGLED, "void at::native::reduce_kernel<128, 4>(int, float)")
    assert not is_same_kernel("plain", "other")


# -- events of a trace


COPY, REPLAY, RESULTS = Place("copy_inputs"), Place("replay"), Place("results")


def trace(num_steps: int = 2, replayed: tuple[str, ...] = ("a", "b")) -> tuple[list[DeviceActivity], dict[int, Launch], list[Marker]]:
    """Each step: a copy in, a graph launch of kernels, a copy out."""
    activities, launches, markers = [], {}, []
    for step in range(num_steps):
        t, c = 1000 * step, 10 * step
        launches |= {c: Launch("cudaMemcpyAsync", t), c + 1: Launch("cudaGraphLaunch", t + 20), c + 2: Launch("cudaLaunchKernel", t + 40)}
        activities.append(DeviceActivity("Memcpy HtoD", "memcpy", t + 100, 10, c, None, 64))
        activities += [DeviceActivity(name, "kernel", t + 120 + 20 * i, 10, c + 1) for i, name in enumerate(replayed)]
        activities.append(DeviceActivity("copy_kernel", "kernel", t + 300, 10, c + 2))
        markers += [Marker(t + 10, step, COPY), Marker(t + 30, step, REPLAY), Marker(t + 50, step, RESULTS)]
    return activities, launches, markers


NODE_MAP = NodeMap((node(0, "a"), node(1, None, "empty"), node(2, "b")))


def test_replayed_kernels_get_their_nodes_and_others_their_launches():
    activities, launches, markers = trace()
    events, notes = events_of(reversed(activities), launches, markers, NODE_MAP)
    assert notes == []
    assert [event.step for event in events] == [0] * 4 + [1] * 4
    places = [COPY, NODE_MAP.nodes[0].place, NODE_MAP.nodes[2].place, RESULTS]
    assert [event.place for event in events] == places * 2
    assert [event.is_in_graph for event in events] == [False, True, True, False] * 2
    assert events[0].start_us == 0
    assert events[0].num_bytes == 64


def test_kernels_of_a_branch_keep_their_place_and_do_not_cut_the_phases():
    activities, launches, markers = trace(1, ("a", "n", "b"))
    node_map = NodeMap((node(0, "a"), node(1, "b"), replace(node(2, "n"), place=Place("clip"), is_beside=True)))
    events, notes = events_of(activities, launches, markers, node_map)
    assert notes == []
    assert [event.place.phase for event in events if event.place] == ["copy_inputs", "forward", "clip", "forward", "results"]
    assert [event.is_beside for event in events] == [False, False, True, False, False]
    spans = trace_events(PathProfile("captured", 1, tuple(events), 400.0), 1)
    phases = [span["name"] for span in spans if span["ph"] == "X" and span["tid"] == 1]
    assert phases == ["copy_inputs", "forward", "results"]


def test_what_is_no_node_of_the_graph_is_reported_and_kept():
    activities, launches, markers = trace(1, ("a", "x"))
    events, notes = events_of(activities, launches, markers, NODE_MAP)
    assert [event.place for event in events] == [COPY, NODE_MAP.nodes[0].place, None, RESULTS]
    assert notes == ["1 kernels have no place: it is not the node that the graph has in its place."]
    del launches[2]
    events, notes = events_of(activities, launches, markers, NODE_MAP)
    assert len(events) == 4
    assert "recorded no launch" in notes[1]


def test_a_kernel_without_a_recorded_launch_has_its_neighbours_place_if_they_agree():
    launches = {1: Launch("cudaLaunchKernel", 5), 3: Launch("cudaLaunchKernel", 7), 5: Launch("cudaLaunchKernel", 15)}
    markers = [Marker(10, 0, COPY), Marker(20, 0, RESULTS)]
    activities = [activity("k", 100 * correlation, correlation=correlation) for correlation in range(1, 6)]
    events, notes = events_of(activities, launches, markers, None)
    assert [event.place for event in events] == [COPY, COPY, COPY, None, RESULTS]
    assert len(notes) == 1


def test_a_path_without_a_graph_takes_all_places_from_markers():
    launches = {1: Launch("cudaLaunchKernel", 5), 2: Launch("cuLaunchKernelEx", 15), 3: Launch("cudaMemsetAsync", 25)}
    markers = [Marker(10, 0, COPY), Marker(20, 0, RESULTS), Marker(30, 1, COPY)]
    activities = [activity("k", 100, correlation=1), activity("l", 200, correlation=2), activity("m", 300, "memset", 3)]
    events, notes = events_of(activities, launches, markers, None)
    assert [(event.step, event.place) for event in events] == [(0, COPY), (0, RESULTS), (1, COPY)]
    assert not notes


class RawEvent:
    """As torch's profiler gives it."""

    def __init__(self, name: str, device: Any, start: int, correlation: int = 0, metadata: str = "") -> None:
        self._values = {"name": name, "device_type": device, "start_ns": start, "duration_ns": 7, "correlation_id": correlation}
        self._values["metadata_json"] = metadata

    def __getattr__(self, name: str) -> Any:
        return lambda: self._values[name]


def test_the_profilers_events_are_sorted_out():
    cpu, cuda = torch.autograd.DeviceType.CPU, torch.autograd.DeviceType.CUDA
    raw = [
        RawEvent("graphrt#0", cpu, 1),
        RawEvent("graphrt#0", cuda, 2),  # the same range again, over the kernels
        RawEvent("aten::mm", cpu, 2, 9),
        RawEvent("cudaLaunchKernel", cpu, 3, 9),
        RawEvent("cuLaunchKernelEx", cpu, 4, 10),
        RawEvent("gemm", cuda, 5, 9, '"stream": 7, "graph node id": 12'),
        RawEvent("Memcpy DtoD (Device -> Device)", cuda, 6, 10, '"bytes": 32'),
        RawEvent("Stream Wait Event", cuda, 6, 10),
    ]
    activities, launches, starts = _read(raw)
    assert starts == {0: 1}
    assert launches == {9: Launch("cudaLaunchKernel", 3), 10: Launch("cuLaunchKernelEx", 4)}
    assert activities == [
        DeviceActivity("gemm", "kernel", 5, 7, 9, 12, None),
        DeviceActivity("Memcpy DtoD (Device -> Device)", "memcpy", 6, 7, 10, None, 64),
    ]


# -- sums


def event(start: float, duration: float, module: str | None = "m", step: int = 0, name: str = "k") -> Event:
    place = None if module is None else Place("forward", "forward", module)
    return Event(step, name, "kernel", start, duration, place)


def test_gaps_are_what_no_kernel_covers():
    path = PathProfile("eager", 1, (event(0, 10), event(2, 3), event(8, 4, "n"), event(20, 5, "o"), event(26, 4)), step_us=60.0)
    assert [(gap.duration_us, gap.before.place, gap.after.place) for gap in path.gaps] == [
        (8, Place("forward", "forward", "n"), Place("forward", "forward", "o")),
        (1, Place("forward", "forward", "o"), Place("forward", "forward", "m")),
    ]
    assert path.kernel_us == 26
    assert path.span_us == 30
    assert path.busy_us == 21
    assert path.gap_share == pytest.approx(1 - 21 / 60)


def test_what_runs_side_by_side_is_busy_once():
    """A branch of two kernels under a chain of three with one gap, all but a piece of which the branch covers."""
    chain, branch = [event(0, 10), event(10, 10), event(30, 10)], [event(2, 20), event(22, 6)]
    path = PathProfile("captured", 1, tuple(sorted([*chain, *branch], key=lambda e: e.start_us)), step_us=40.0)
    assert path.kernel_us == 56
    assert path.busy_us == 38
    assert path.gap_share == pytest.approx(0.05)
    assert [gap.duration_us for gap in path.gaps] == [2]
    assert covered([]) == 0
    assert covered([(0, 1), (0, 3), (1, 2), (5, 5), (6, 7)]) == 4


def test_what_runs_beside_others_has_a_column_of_its_own_and_no_share(tmp_path):
    """Two layers in the chain, 30 us and 10; a slow kernel of the first beside them, which is waiting for room most of its time."""
    chain = [event(0, 30, "a"), event(30, 10, "b")]
    branch = [replace(event(1, 35, "a", name="graphrt_quantize"), is_beside=True)]
    path = PathProfile("captured", 1, (chain[0], *branch, chain[1]), step_us=40.0)
    assert (path.kernel_us, path.beside_us, path.chain_us) == (75, 35, 40)
    first, second = path.rows(lambda event: (event.place.module,) if event.place else ("",))
    assert (first.key, first.time_us, first.chain_us, first.beside_us, first.share) == (("a",), 65, 30, 35, 0.75)
    assert (second.time_us, second.beside_us, second.share) == (10, 0, 0.25)
    profile = graphrt.StepProfile("a device", path, PathProfile("eager", 1, tuple(chain), 90.0), None)
    tables = {table.title.removeprefix("captured step "): table for table in profile.tables()}
    layers = tables["by layer"]
    assert layers.columns == ("layer", "forward ms", "other ms", "beside ms", "share")
    assert layers.rows == (("a", "0.030", "-", "0.035", "75.0%"), ("b", "0.010", "-", "-", "25.0%"))
    kinds = tables["both paths by kind of kernel"]
    assert kinds.columns == ("kind", "captured ms", "beside ms", "share", "eager ms", "share")
    assert ("quantize", "-", "0.035", "0.0%", "-", "-") in kinds.rows
    files = {file.name: file for file in profile.save(tmp_path)}
    rows = json.loads(files["profile.json"].read_text())["paths"][0]["rows"]
    assert [(row["module"], row["time_us"], row["beside_us"]) for row in rows] == [("a", 30, 0), ("b", 10, 0), ("a", 35, 35)]
    assert files["profile.png"].stat().st_size > 0


def test_unattributed_events_are_counted_and_listed():
    path = PathProfile("captured", 2, (event(0, 6), event(10, 2, None), event(20, 8, step=1)), step_us=10.0)
    assert path.attributed_share == pytest.approx(14 / 16)
    rows = path.rows(lambda event: (str(event.place),))
    assert sum(row.time_us for row in rows) == pytest.approx(path.kernel_us)
    assert sum(row.share for row in rows) == pytest.approx(1)
    text = str(graphrt.StepProfile("a device", path, path, None))
    assert "unattributed in the captured steps" in text
    assert "87.50%" in text


def test_an_empty_path_has_no_shares():
    path = PathProfile("eager", 1, (), step_us=1.0)
    assert (path.kernel_us, path.gap_share, path.attributed_share, path.gaps) == (0, 1.0, 1.0, ())
    assert "eager" in str(graphrt.StepProfile("a device", None, path, None))


@pytest.mark.parametrize(
    ("name", "work"),
    [
        ("nvjet_qqtst_128x256_128x4_2x1_v_bz_TNT", "gemm"),
        ("graphrt_quantize_transpose_bf16_e4m3", "quantize"),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop", "attention"),
        ("graphrt_update_scales", "scale update"),
        ("aten::mm", "gemm"),
        ("aten::mul", "elementwise"),
    ],
)
def test_kinds_of_work(name, work):
    assert kind_of_work(name, "operation" if "aten" in name else "kernel") == work


def test_layers():
    assert layer_of(Place("forward", "forward", "model.layers.3.attn.qkv")) == "model.layers.3"
    assert layer_of(Place("forward", "forward", "embed")) == "embed"
    assert layer_of(Place("clip")) == "(clip)"
    assert layer_of(None) == "(unattributed)"


# -- a trainer's profile


@pytest.fixture(scope="module")
def profile() -> graphrt.StepProfile:
    with make_trainer("graph") as trainer:
        for batch in token_batches(3):
            trainer.step(batch)
        return trainer.profile(steps=2)


def test_both_paths_are_attributed_and_add_up(profile):
    assert profile.captured is not None
    for path in profile.paths:
        assert path.attributed_share == 1.0
        by_module = path.rows(lambda event: (str(event.place),))
        assert sum(row.time_us for row in by_module) == pytest.approx(path.kernel_us, rel=0.01)
        assert {event.step for event in path.events} == {0, 1}
        assert {event.place.phase for event in path.events} >= {"forward", "backward", "scale_update", "clip", "optimizer"}
    in_graph = [event for event in profile.captured.events if event.is_in_graph]
    assert len(in_graph) == 2 * len(profile.node_map)
    assert {event.place.phase for event in profile.captured.events if not event.is_in_graph} == {"copy_inputs"}


def test_eager_and_captured_products_are_the_same(profile):
    def products(path: PathProfile) -> dict[tuple[str, ...], float]:
        events = tuple(event for event in path.events if event.flops)
        rows = PathProfile(path.path, path.num_steps, events, 1.0).rows(lambda event: (event.place.module, event.place.direction))
        return {row.key: row.flops for row in rows}

    assert products(profile.captured) == products(profile.eager)


def test_files(profile, tmp_path):
    files = {file.name: file for file in profile.save(tmp_path / "new" / "folder")}
    assert set(files) == {"profile.json", "trace.json", "node_map.json", "profile.png"}
    assert files["profile.png"].read_bytes()[:4] == b"\x89PNG"
    report = json.loads(files["profile.json"].read_text())
    for path in report["paths"]:
        assert sum(row["time_us"] for row in path["rows"]) == pytest.approx(path["kernel_us"])
        assert all(row["is_attributed"] and set(row) >= {"module", "direction", "phase", "kernel", "flops"} for row in path["rows"])
        assert {"duration_us", "step", "after", "before"} <= set(path["gaps"][0])
    assert len(json.loads(files["node_map.json"].read_text())) == len(profile.node_map)


def test_a_picture_needs_matplotlib(profile, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    assert "profile.png" not in {file.name for file in profile.save(tmp_path)}


def test_the_trace_has_a_process_a_path_and_a_row_a_layer(profile):
    events = list(trace_events(profile.captured, 1))
    rows = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert list(rows.values())[:2] == ["steps", "phases"]
    assert {"blocks.0", "blocks.1", "embedding", "head", "(optimizer)"} <= set(rows.values())
    kernels = [e for e in events if e["ph"] == "X" and "args" in e]
    assert len(kernels) == len(profile.captured.events)
    for e in kernels:
        assert e["dur"] >= 0
        assert e["ts"] >= 0
        assert rows[e["tid"]] == layer_of(Place(e["args"]["phase"], e["args"]["direction"], e["args"]["module"]))
    assert any(e["name"].startswith("blocks.0.up forward") for e in kernels)
    assert [e["name"] for e in events if e["ph"] == "X" and e["tid"] == 0] == ["step 0", "step 1"]


def test_tables_name_layers(profile):
    text = str(profile)
    for words in ("captured step by layer", "captured step by module", "blocks.1.up", "both paths by kind", "longest gaps", "100.00%"):
        assert words in text


@pytest.mark.parametrize("mode", ["graph", "eager"])
@pytest.mark.parametrize("num_steps", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)])
def test_everything_is_put_back(mode, num_steps):
    """Before the first step, between warmup and capture, and after it."""
    batches = token_batches(6)
    options: dict[str, Any] = {"model": {"dropout": 0.1}}
    with make_trainer(mode, **options) as trainer:
        expected = [step_values(trainer, batch) for batch in batches]
    with make_trainer(mode, **options) as trainer:
        for batch in batches[:num_steps]:
            trainer.step(batch)
        before = values(trainer)
        trainer.profile(token_batch(77), steps=1)
        assert_same_values(values(trainer), before)
        actual = [step_values(trainer, batch) for batch in batches[num_steps:]]
    for one, other in zip(actual, expected[num_steps:], strict=True):
        assert_same_values(one, other)


@pytest.mark.parametrize("was_enabled", [True, False])
def test_pythons_garbage_collection_is_no_part_of_a_profiled_step(was_enabled):
    states = []

    def loss_fn(model, batch):
        states.append(gc.isenabled())
        return token_loss(model, batch)

    with make_trainer("eager", loss_fn=loss_fn) as trainer:
        trainer.step(token_batch(0))
        states.clear()
        try:
            (gc.enable if was_enabled else gc.disable)()
            trainer.profile(token_batch(1), steps=1)
            assert gc.isenabled() is was_enabled
        finally:
            gc.enable()
    assert states
    assert not any(states)


@pytest.mark.parametrize("mode", ["graph", "eager"])
def test_a_profile_without_gradients_is_refused(mode):
    with make_trainer(mode) as trainer:
        trainer.step(token_batch(0))
        with torch.no_grad(), pytest.raises(graphrt.GraphrtError, match=r"profile was called under torch\.no_grad"):
            trainer.profile(token_batch(1))


def test_a_batch_that_failed_is_not_profiled():
    def loss_fn(model: Any, batch: Any) -> Any:
        raise ValueError("told to fail")

    with make_trainer("graph", loss_fn=loss_fn) as trainer:
        with pytest.raises(ValueError, match="told to fail"):
            trainer.step(token_batch(0))
        with pytest.raises(graphrt.GraphrtError, match="no step has been taken"):
            trainer.profile()


def test_an_optimizer_outside_the_graph_has_its_phase():
    with make_trainer("graph", optimizer=lambda parameters: torch.optim.Adagrad(parameters)) as trainer:
        for batch in token_batches(3):
            trainer.step(batch)
        profile = trainer.profile(steps=1)
    assert profile.captured is not None
    outside = {event.place.phase for event in profile.captured.events if not event.is_in_graph}
    assert "optimizer" in outside


def test_an_eager_trainer_is_profiled_eagerly(tmp_path):
    with make_trainer("eager") as trainer:
        profile = trainer.profile(token_batch(0), steps=1)
        assert profile.captured is None
        assert profile.node_map is None
        assert {file.name for file in profile.save(tmp_path)} == {"profile.json", "trace.json", "profile.png"}
        with pytest.raises(GraphrtError, match=r"an eager trainer keeps none\. Pass one"):
            trainer.profile()


def test_mistakes_are_refused():
    with make_trainer("graph") as trainer:
        with pytest.raises(GraphrtError, match="no step has been taken"):
            trainer.profile()
        with pytest.raises(ValueError, match="at least 1, got 0"):
            trainer.profile(token_batch(0), steps=0)
        with graphrt.fp8_autocast(), pytest.raises(GraphrtError, match="profile was called inside"):
            trainer.profile(token_batch(0))
    with pytest.raises(GraphrtError, match="closed"):
        trainer.profile(token_batch(0))


# -- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("wrap", ["plain", "checkpoint"])
def test_on_cuda_the_times_are_attributed(wrap, tmp_path):
    model = {"wrap": graphrt.checkpoint} if wrap == "checkpoint" else {}
    with make_trainer("graph", "cuda", model=model, grad_accum_steps=2) as trainer:
        for batch in token_batches(4):
            trainer.step(batch)
        before = values(trainer)
        profile = trainer.profile(steps=3)
        assert_same_values(values(trainer), before)
    assert profile.captured is not None
    for path in profile.paths:
        assert path.attributed_share > 0.99, path.notes
        assert {event.step for event in path.events} == {0, 1, 2}
    assert profile.captured.notes == ()
    in_graph = [event for event in profile.captured.events if event.is_in_graph]
    assert len(in_graph) == 3 * len(profile.node_map.active)
    profile.save(tmp_path)


@pytest.mark.gpu
def test_on_cuda_eager_kernels_have_the_places_of_captured_ones():
    """Two independent ways: by node of the graph, and by the time of the launch."""
    with make_trainer("graph", "cuda", model=TokenModel) as trainer:
        for batch in token_batches(4):
            trainer.step(batch)
        profile = trainer.profile(steps=1)

    def count(path: PathProfile) -> dict[tuple[str, str, str], int]:
        found: dict[tuple[str, str, str], int] = {}
        for one in path.events:
            if "graphrt_quantize" in one.name and one.place is not None:
                key = (one.place.module, one.place.direction, one.name)
                found[key] = found.get(key, 0) + 1
        return found

    assert profile.captured is not None
    captured, eager = count(profile.captured), count(profile.eager)
    assert captured.pop(("", "", "graphrt_quantize_many_fp32_e4m3")) == 1
    for module, direction, name in list(eager):
        if direction == "forward":  # where an eager forward quantizes its weight beside its input
            eager[module, direction, name] -= 1
    assert captured == eager
