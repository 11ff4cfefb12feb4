"""Named ranges: what a profiler is told of a step, what a range costs without one, and a window of steps for nsys.

The record is a real one: NVTX loads nvtx_recorder.c, built here, into a process that trains, as it would load nsys.
"""

import os
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
import torch
from stepping import make_trainer, token_batches

import graphrt
from graphrt import ranges
from graphrt.ranges import CLIP, OPTIMIZER, STEP, Range, listening

HERE = Path(__file__).parent
_SIGNED_64_BIT = 2  # how NVTX numbers the types of payloads


@dataclass
class Push:
    """A range that was entered."""

    path: str  # the names of the ranges it is in on its thread, and its own
    domain: int
    is_registered: bool
    payload: tuple[int, int]


@dataclass
class Section:
    """What the profiler heard between two lines of the record."""

    pushes: list[Push] = field(default_factory=list)
    depth: dict[str, int] = field(default_factory=dict)  # at its end, by thread

    @property
    def paths(self) -> list[str]:
        return [push.path for push in self.pushes]


@dataclass
class Record:
    """All that the profiler heard."""

    domains: dict[int, str] = field(default_factory=dict)
    strings: dict[int, tuple[int, str]] = field(default_factory=dict)
    sections: dict[str, Section] = field(default_factory=dict)
    destroyed_at: int | None = None
    last_push_at: int = 0


def read(lines: list[str]) -> Record:
    """Parse the record; a pop of nothing fails."""
    record, section, stacks = Record(), Section(), {}
    for number, line in enumerate(lines):
        kind, *words = line.split()
        if kind == "domain":
            record.domains[int(words[0])] = words[1]
        elif kind == "string":
            assert int(words[1]) not in record.strings
            record.strings[int(words[1])] = int(words[0]), " ".join(words[2:])
        elif kind == "destroy":
            record.destroyed_at = number
        elif kind == "begin":
            section = record.sections[" ".join(words)] = Section()
        elif kind == "end":
            section.depth = {thread: len(stack) for thread, stack in stacks.items()}
            section = Section()
        elif kind == "push":
            thread, domain, handle, payload_type, payload = words
            stack = stacks.setdefault(thread, [])
            stack.append(record.strings.get(int(handle), (0, "?"))[1])
            record.last_push_at = number
            section.pushes.append(Push("/".join(stack), int(domain), int(handle) != 0, (int(payload_type), int(payload))))
        else:
            assert kind == "pop"
            stacks[words[0]].pop()
    return record


def record_steps(directory: Path, device: str) -> Record:
    """Build the profiler, run ranged_steps.py under it, and read what it wrote."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler is installed")
    library, log = directory / "nvtx_recorder.so", directory / "record.txt"
    flags = ["-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    subprocess.run([compiler, *flags, "-o", str(library), str(HERE / "nvtx_recorder.c")], check=True, timeout=60)
    paths = [str(Path(graphrt.__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "NVTX_INJECTION64_PATH": str(library),
        "GRAPHRT_NVTX_LOG": str(log),
    }
    command = [sys.executable, "-W", "error", str(HERE / "ranged_steps.py"), str(log), device]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return read(log.read_text().splitlines())


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Record:
    return record_steps(tmp_path_factory.mktemp("nvtx"), "cpu")


def below(prefix: str, names: str) -> list[str]:
    return [f"{prefix}/{name}" for name in names.split()]


MICROBATCH = "microbatch microbatch/forward microbatch/backward"
BODY = f"zero_grad {MICROBATCH} scale_update scale_update clip optimizer"
CAPTURED_BODY = BODY.replace("zero_grad", "zero_grad quantize_weights")
CALIBRATION = below("step", "scale_update scale_update")


# -- what a profiler is told


def test_all_ranges_are_in_one_domain_under_names_registered_once(record):
    assert list(record.domains.values()) == ["graphrt"]
    (domain,) = record.domains
    pushes = [push for section in record.sections.values() for push in section.pushes]
    assert len(pushes) > 100
    assert all(push.domain == domain and push.is_registered for push in pushes)
    assert {owner for owner, _ in record.strings.values()} == {domain}
    names = Counter(name for _, name in record.strings.values())
    assert set(names.values()) == {1}
    expected = "step copy_inputs replay results warmup capture instantiate microbatch forward backward flush scale_update clip optimizer"
    assert set(expected.split()) <= set(names)


def test_domain_and_names_live_as_long_as_ranges_are_entered(record):
    assert record.destroyed_at is None or record.destroyed_at > record.last_push_at


def test_every_section_is_left_as_deep_as_it_was_entered(record):
    assert {name for name, section in record.sections.items() if any(section.depth.values())} == set()


def test_only_steps_are_numbered_and_a_failed_step_keeps_its_number(record):
    numbers = {
        name: [push.payload[1] for push in section.pushes if push.payload[0] == _SIGNED_64_BIT] for name, section in record.sections.items()
    }
    assert [numbers[f"captured {number}"] for number in range(1, 6)] == [[1], [2], [3], [4], [5]]
    assert [numbers["eager 1"], numbers["eager 2"]] == [[1], [2]]
    assert [numbers["capture fails"], numbers["capture after"]] == [[3], [3]]
    assert all(push.payload[0] == 0 for section in record.sections.values() for push in section.pushes if push.path != "step")


def test_captured_steps_warm_up_capture_once_and_replay(record):
    warmup = ["step", "step/snapshot", "step/copy_inputs", "step/warmup", *below("step/warmup", BODY)]
    captured = [record.sections[f"captured {number}"].paths for number in range(1, 6)]
    assert captured[0] == ["step", "step/snapshot", *CALIBRATION, *warmup[2:]]
    assert captured[1] == warmup
    assert captured[2] == ["step", "step/snapshot", "step/copy_inputs", "step/capture", *below("step/capture", CAPTURED_BODY)]
    assert captured[3] == captured[4] == ["step", *below("step", "copy_inputs replay results")]


def test_eager_steps_have_every_part_of_the_body(record):
    body = f"zero_grad {MICROBATCH} {MICROBATCH} scale_update scale_update clip optimizer"
    assert record.sections["eager 1"].paths == ["step", "step/snapshot", *CALIBRATION, *below("step", body)]
    assert record.sections["eager 2"].paths == ["step", "step/snapshot", *below("step", body)]


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_eager_step_that_raises_leaves_its_ranges(record, where):
    failed = record.sections[f"eager {where} fails"]
    assert f"step/microbatch/{where}" in failed.paths
    assert "step/optimizer" not in failed.paths
    assert record.sections[f"eager after {where}"].paths == ["step", "step/snapshot", *below("step", BODY)]


def test_a_warmup_and_a_capture_that_raise_leave_their_ranges(record):
    assert record.sections["warmup fails"].paths[-1] == "step/warmup/scale_update"
    assert "step/capture/microbatch/backward" in record.sections["capture fails"].paths
    assert "step/capture/optimizer" not in record.sections["capture fails"].paths
    warmup, capture = record.sections["warmup after"].paths, record.sections["capture after"].paths
    assert warmup == ["step", "step/snapshot", "step/copy_inputs", "step/warmup", *below("step/warmup", BODY)]
    assert capture == ["step", "step/snapshot", "step/copy_inputs", "step/capture", *below("step/capture", CAPTURED_BODY)]


def test_a_region_by_hand_flushes_what_is_pending(record):
    assert record.sections["by hand 1"].paths == ["scale_update"]
    assert record.sections["by hand 2"].paths == record.sections["by hand 3"].paths == ["flush", "flush/scale_update", "scale_update"]


FORWARDS = (
    "embedding blocks.0 blocks.0/blocks.0.norm blocks.0/blocks.0.up blocks.0/blocks.0.down blocks.0/blocks.0.dropout "
    "blocks.1 blocks.1/blocks.1.norm blocks.1/blocks.1.up blocks.1/blocks.1.down blocks.1/blocks.1.dropout head"
)
# The residual is the block's own node, and so is what it puts between its linears.
BACKWARDS = ["head"] + [
    f"blocks.{block}{part}" for block in (1, 0) for part in ("", ".down", "", ".up", ".norm")
] + ["embedding"]  # fmt: skip


def test_modules_have_ranges_in_forward_and_backward_when_asked_for(record):
    paths = record.sections["modules"].paths
    forward, backward = "step/microbatch/forward", "step/microbatch/backward"
    assert [path for path in paths if path.startswith(f"{forward}/")] == [
        f"{forward}/TokenModel", *below(f"{forward}/TokenModel", FORWARDS)
    ]  # fmt: skip
    assert [path for path in paths if path.startswith(f"{backward}/")] == [f"{backward}/{module} backward" for module in BACKWARDS]
    assert record.sections["modules over"].paths == ["step", "step/snapshot", *below("step", BODY)]


@pytest.mark.gpu
def test_a_graph_is_instantiated_once_and_then_replayed(tmp_path):
    record = record_steps(tmp_path, "cuda")
    captured = record.sections["captured 3"].paths
    assert captured == [
        "step", "step/snapshot", "step/copy_inputs", "step/capture", *below("step/capture", CAPTURED_BODY), "step/capture/instantiate",
        "step/replay", "step/results",
    ]  # fmt: skip
    assert record.sections["captured 4"].paths == ["step", *below("step", "copy_inputs replay results")]
    assert {name for name, section in record.sections.items() if any(section.depth.values())} == set()
    backwards = [path for path in record.sections["modules"].paths if path.endswith(" backward")]
    assert [path.rpartition("/")[2] for path in backwards] == [f"{module} backward" for module in BACKWARDS]


# -- without a profiler


def test_without_a_profiler_an_entry_allocates_nothing_that_stays_and_calls_no_listener():
    assert not ranges._listeners
    assert CLIP._attributes is None

    def enter(times: int) -> None:
        for _ in repeat(None, times):
            with CLIP:
                pass

    enter(100)
    before = sys.getallocatedblocks()
    enter(10_000)
    assert sys.getallocatedblocks() - before < 10


class Listener:
    """Writes down what it hears, and that it is left in the order it was entered."""

    def __init__(self) -> None:
        self.open: list[str] = []
        self.paths: list[str] = []

    def enter_range(self, name: str) -> None:
        self.open.append(name)
        self.paths.append("/".join(self.open))

    def exit_range(self, name: str) -> None:
        assert self.open.pop() == name


def test_listeners_hear_entries_and_exits_while_they_listen():
    first, second = Listener(), Listener()
    with listening(first), CLIP, listening(second), OPTIMIZER:
        pass
    with CLIP:
        pass
    assert first.paths == ["clip", "clip/optimizer"]
    assert second.paths == ["optimizer"]
    assert not first.open
    assert not second.open


# -- a window of steps


class Calls:
    """Stands in for CUDA's profiler and NVTX, and writes down the order of what they are told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.heard: list[str] = []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: self.heard.append("wait"))
        monkeypatch.setattr(torch.cuda.profiler, "start", lambda: self.heard.append("start"))
        monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: self.heard.append("stop"))
        monkeypatch.setattr(ranges, "_domain", self)

    def push_range(self, _attributes: Any) -> None:
        self.heard.append(f"push {STEP.number}")

    def pop_range(self) -> None:
        self.heard.append("pop")


@pytest.fixture
def calls(monkeypatch):
    return Calls(monkeypatch)


def run_steps(*numbers: int) -> None:
    for number in numbers:
        with STEP.numbered(number):
            pass


def test_a_window_holds_whole_steps_with_the_device_idle_around_them(calls):
    with graphrt.nsys_window(2, 3):
        run_steps(1, 2, 3, 4)
    run_steps(2)
    assert calls.heard == [
        "push 1", "pop", "wait", "start", "push 2", "pop", "push 3", "pop", "wait", "stop", "push 4", "pop", "push 2", "pop",
    ]  # fmt: skip


def test_a_window_opens_once_in_its_middle_too(calls):
    with graphrt.nsys_window(2, 4):
        run_steps(3, 4, 4, 2)
    assert calls.heard == ["wait", "start", "push 3", "pop", "push 4", "pop", "wait", "stop", "push 4", "pop", "push 2", "pop"]


def test_a_window_closes_with_its_block(calls):
    with pytest.raises(ZeroDivisionError), graphrt.nsys_window(1, 9), STEP.numbered(1):
        raise ZeroDivisionError
    assert calls.heard == ["wait", "start", "push 1", "pop", "wait", "stop"]
    assert not ranges._listeners


def test_a_window_that_no_step_reached_says_so(calls, caplog):
    window = graphrt.nsys_window(5, 6)
    with window:
        run_steps(1)
    assert calls.heard == ["push 1", "pop"]
    assert "none of the steps 5 to 6 ran" in caplog.text
    with pytest.raises(graphrt.GraphrtError, match="a second time"), window:
        pass


@pytest.mark.parametrize(("start", "stop"), [(0, 1), (3, 2), (True, 2), (1, 2.0)])
def test_a_window_of_no_steps_is_refused(start, stop):
    with pytest.raises(ValueError, match=r"[Ss]tep"):
        graphrt.nsys_window(start, stop)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("device", ["cpu", "nonsense"])
def test_a_window_on_another_kind_of_device_is_refused(device):
    with pytest.raises(ValueError, match="device must be a CUDA device"):
        graphrt.nsys_window(1, 2, device=device)


def test_a_window_without_a_cuda_device_is_refused():
    with pytest.raises(graphrt.GraphrtError, match="no CUDA device"), graphrt.nsys_window(1, 2):
        pass
    assert not ranges._listeners


@pytest.mark.gpu
def test_a_window_around_replays_changes_nothing():
    with make_trainer("graph", "cuda") as trainer:
        expected = [trainer.step(batch).loss.item() for batch in token_batches()]
    with make_trainer("graph", "cuda") as trainer, graphrt.nsys_window(4, 5):
        assert [trainer.step(batch).loss.item() for batch in token_batches()] == expected


def test_a_range_of_ones_own_is_named_as_it_says():
    listener = Listener()
    with listening(listener), Range("mine"):
        pass
    assert listener.paths == ["mine"]
