"""profiles/host_cost.py; run_nsys.py and run_ncu.py, with stand-ins for nsys and ncu that write down how they were called."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from test_nsys_report import NODES, Export, replayed

sys.path.insert(0, str(Path(__file__).parent.parent / "profiles"))

import bench
import growth
import host_cost
import run_ncu
import run_nsys
import windowed_steps

from graphrt.settings import make_settings

PROFILES = Path(__file__).parent.parent / "profiles"
STAND_IN = """#!{python}
import json, shutil, sys
with open({calls!r}, "a") as file:
    file.write(json.dumps(sys.argv) + "\\n")
if "export" in sys.argv:
    shutil.copy({export!r}, sys.argv[sys.argv.index("-o") + 1])
sys.exit({exit_code})
"""


@pytest.fixture
def tool(tmp_path, monkeypatch):
    """Put a stand-in into PATH; returns a function that reads its calls."""

    def install(name: str, *, export: Path | None = None, exit_code: int = 0) -> Any:
        calls = tmp_path / "calls"
        script = tmp_path / "bin" / name
        script.parent.mkdir(exist_ok=True)
        script.write_text(STAND_IN.format(python=sys.executable, calls=str(calls), export=str(export), exit_code=exit_code))
        script.chmod(0o755)
        monkeypatch.setenv("PATH", f"{script.parent}{os.pathsep}{os.environ['PATH']}")
        return lambda: [json.loads(line) for line in calls.read_text().splitlines()]

    return install


SCRIPTS = sorted(path.name for path in PROFILES.glob("*.py") if "__main__" in path.read_text())


def test_every_script_is_in_the_table():
    table = (PROFILES / "README.md").read_text()
    assert [name for name in SCRIPTS if f"`profiles/{name}`" not in table] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_says_what_it_measures(name):
    done = subprocess.run([sys.executable, str(PROFILES / name), "--help"], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage:")
    assert len(done.stdout.splitlines()) > 4


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_profiled_steps_need_a_gpu_and_say_so(capsys):
    assert windowed_steps.main([]) == 2
    assert capsys.readouterr().err == "windowed_steps.py needs an NVIDIA GPU, and there is none.\n"


@pytest.mark.parametrize(("script", "name"), [(run_nsys, "nsys"), (run_ncu, "ncu")])
def test_without_the_tool_the_script_says_how_to_get_it_and_what_there_is(script, name, monkeypatch, capsys):
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert script.main([]) == 2
    said = capsys.readouterr().err
    for text in (f"{name} is not installed", "https://developer.nvidia.com/", "`graphrt profile`"):
        assert text in said


def test_nsys_is_run_both_ways_exported_and_summarized(tool, tmp_path, capsys):
    export = Export(tmp_path / "made.sqlite")
    replayed(export, 0)
    calls = tool("nsys", export=export.close())
    out = tmp_path / "out"
    out.mkdir()
    (out / "node_map.json").write_text(json.dumps(NODES))
    assert run_nsys.main(["--preset", "125m", "--start", "6", "--stop", "7", "--out", str(out)]) == 0
    profiles = [call[1:] for call in calls() if call[1] == "profile"]
    assert [call[call.index("-t") + 1] for call in profiles] == ["cuda,nvtx"] * 2
    assert [call[call.index("-c") + 1] for call in profiles] == ["cudaProfilerApi"] * 2
    for call, trace in zip(profiles, ("node", "graph"), strict=True):
        assert {"--capture-range-end=stop", f"--cuda-graph-trace={trace}", "--cpuctxsw=none"} <= set(call)
        assert call[call.index("-s") + 1] == "none"
        job = call[call.index(sys.executable) :]
        assert Path(job[1]).name == "windowed_steps.py"
        assert [job[job.index(name) + 1] for name in ("--start", "--stop", "--preset")] == ["6", "7", "125m"]
    printed = capsys.readouterr().out
    assert printed.count("Steps on the device") == 2
    assert "blocks.0.up" in printed
    assert [path.name for path in out.glob("*.png")] == ["node.png"]


def test_nsys_that_fails_ends_the_script(tool, tmp_path, capsys):
    tool("nsys", exit_code=3)
    assert run_nsys.main(["--out", str(tmp_path / "out")]) == 3
    assert "nsys profile failed with exit code 3" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, []),
        ({"preset": "8bslice"}, ["again"]),
        ({"preset": "8bslice", "weight_transpose": "kept"}, []),
        ({"preset": "8bslice", "precision": "bf16"}, []),
        ({"backward_accum": "fast", "weight_transpose": "again"}, ["fast", "again"]),
    ],
)
def test_a_row_of_the_benchmark_names_what_is_unusual_in_fp8(options, expected):
    assert bench._fp8_options(make_settings(options)) == expected


@pytest.mark.parametrize("axis", growth.AXES)
def test_the_quick_points_of_an_axis_differ(axis):
    first, second = (growth._shrunk(point).value(axis) for point in growth.AXES[axis][:2])
    assert first < second


PEER = """import sys
print('{"ms": 1.5, "tok_s": 7}')
if "--profile" in sys.argv:
    print("cudnn_generated_fort_native_sdpa_sm90_flash_fprop")
"""


def test_a_peers_attention_is_read_off_its_kernels(tmp_path, capsys):
    script = tmp_path / "peer.py"
    script.write_text(PEER)
    command = [sys.executable, str(script), "micro", "graph"]
    assert bench.run_process(command, "peer", is_shown=False) == {"ms": 1.5, "tok_s": 7}
    assert bench.run_process([*command, "--profile"], "peer", is_shown=False) == {"ms": 1.5, "tok_s": 7, "attention": "cudnn+flash"}
    assert capsys.readouterr().err == ""
    script.write_text("raise SystemExit('out of memory')")
    assert bench.run_process(command, "peer") is None
    assert "peer failed: ['out of memory']" in capsys.readouterr().err


def ncu(tmp_path: Path, *options: str) -> int:
    node_map = tmp_path / "node_map.json"
    node_map.write_text(json.dumps(NODES))
    return run_ncu.main(["--node-map", str(node_map), "--out", str(tmp_path / "out"), *options])


def test_ncu_gets_the_kernels_of_a_layer_in_one_step(tool, tmp_path, capsys):
    calls = tool("ncu")
    assert ncu(tmp_path, "--module", "blocks.0.up", "--direction", "backward", "--step", "6") == 0
    ((_, *call),) = calls()
    assert [call[call.index(name) + 1] for name in ("--profile-from-start", "--graph-profiling")] == ["off", "node"]
    assert [call[call.index(name) + 1] for name in ("--kernel-name-base", "--start", "--stop")] == ["mangled", "6", "6"]
    pattern = call[call.index("--kernel-name") + 1].removeprefix("regex:")
    matches = [node["index"] for node in NODES if node["kernel"] and re.search(pattern, node["kernel"])]
    # Both gemms pass; the second of them is the one that was asked for.
    assert matches == [0, 3]
    assert [call[call.index(name) + 1] for name in ("--launch-skip", "--launch-count")] == ["1", "1"]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["*", "0", "backward"]


def test_ncu_runs_once_for_each_direction_of_a_layer(tool, tmp_path, capsys):
    calls = tool("ncu")
    assert ncu(tmp_path, "--module", "blocks.0") == 0
    directions = list(dict.fromkeys(node["direction"] for node in NODES if run_ncu.is_wanted(node, "blocks.0", None)))
    assert len(directions) == 2
    runs = [call[1:] for call in calls()]
    assert [Path(call[call.index("-o") + 1]).name for call in runs] == [f"step-{direction}" for direction in directions]
    marked = [line.split()[2] for line in capsys.readouterr().out.splitlines() if line.startswith("*")]
    assert sorted(marked) == sorted(node["direction"] for node in NODES if run_ncu.is_wanted(node, "blocks.0", None))


def test_ncu_profiles_from_the_first_kernel_of_the_layer_to_the_last():
    def kernel(module: str, name: str) -> dict[str, object]:
        return {"kind": "kernel", "kernel": name, "module": module, "direction": "forward"}

    nodes = [kernel("a", "gemm"), kernel("b", "gemm"), kernel("a", "norm"), kernel("a", "gemm"), kernel("b", "norm"), kernel("c", "gemm")]
    selection = run_ncu.select(nodes, [node for node in nodes if run_ncu.is_wanted(node, "b", None)])
    assert selection.num_before == 1
    assert selection.nodes == nodes[1:5]


def test_a_module_is_matched_by_its_whole_name():
    inside = [node["index"] for node in NODES if run_ncu.is_wanted(node, "blocks.0", None)]
    assert inside == [0, 1, 3]
    assert not any(run_ncu.is_wanted(node, "blocks.0.u", None) for node in NODES)


def test_a_layer_that_is_not_there_is_refused(tool, tmp_path, capsys):
    tool("ncu")
    assert ncu(tmp_path, "--module", "blocks.9") == 2
    assert "'blocks.9'" in capsys.readouterr().err


def test_the_host_cost_of_each_part_is_printed_for_each_size(capsys):
    assert host_cost.main(["--device", "cpu", "--layers", "1,2", "--evict-mib", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line[:22] for line in lines if not line.startswith(" ")] == ["1 layers: 9 parameters", "2 layers: 15 parameter"]
    parts = [line for line in lines if line.startswith("  fingerprint ")]
    assert len(parts) == 2
    assert all(float(time) > 0 for line in parts for time in line.split()[1::2])


@pytest.mark.gpu
def test_the_profiled_job_runs(tmp_path):
    assert windowed_steps.main(["--preset", "micro", "--start", "4", "--stop", "5"]) == 0
