"""`graphrt doctor`: what it finds, and that nothing it finds can stop it."""

import getpass
import importlib.metadata
import json
import os
import time
from pathlib import Path

import pytest
import torch

from graphrt import doctor, probes
from graphrt.cli import main
from graphrt.errors import GraphrtError
from graphrt.probes import ABSENT, BROKEN, PROBES, WORKS, Outcome, run_probes

PROGRAM = """
import json, os, signal, sys, time
for name in sys.argv[1:]:
    if name == "hang":
        time.sleep(600)
    if name == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if name == "leave":
        print("cannot go on", file=sys.stderr)
        sys.exit(3)
    if name == "half":
        print('{"name": "half"', end="", flush=True)
        os._exit(1)
    print(json.dumps({"name": name, "status": "works", "fact": "fine.", "remedy": "", "seconds": 0.0}), flush=True)
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Probes named "hang", "die" and so on, in place of the real ones."""
    (tmp_path / "program.py").write_text(PROGRAM)
    monkeypatch.setattr(doctor, "_PROGRAM", str(tmp_path / "program.py"))


@pytest.fixture(scope="module")
def findings():
    """The real ones, found once."""
    return doctor.find_all()


@pytest.mark.slow
class TestOnThisMachine:
    def test_every_probe_has_an_outcome_in_order(self, findings):
        assert [probe.name for probe in findings.probes] == list(PROBES)
        for probe in findings.probes:
            assert probe.status in (WORKS, ABSENT, BROKEN)
            assert probe.fact.endswith(".")
            assert bool(probe.remedy) == (probe.status != WORKS), probe

    def test_what_needs_no_gpu_works(self, findings):
        status = {probe.name: probe.status for probe in findings.probes}
        for name in ("import", "compiler", "FP8 GEMM", "captured step", "plots", "tensorboard"):
            assert status[name] == WORKS, findings

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
    def test_what_needs_one_is_absent_and_says_why(self, findings):
        for probe in findings.probes:
            if probe.name in ("device", "capture", "torch.profiler"):
                assert probe.status == ABSENT
                assert "no CUDA device" in probe.fact or "without CUDA" in probe.fact or "sees no device" in probe.fact

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
    def test_a_compiler_that_is_not_installed_is_absent(self, monkeypatch):
        def refuse(*_args, **_options):
            raise GraphrtError("NVRTC could not be loaded.")

        def refuse_package(name):
            raise importlib.metadata.PackageNotFoundError(name)

        monkeypatch.setattr("graphrt.kernels.compiler.compile_source", refuse)
        assert probes.probe_compile().status == BROKEN  # it is installed here
        monkeypatch.setattr(importlib.metadata.Distribution, "from_name", refuse_package)
        outcome = probes.probe_compile()
        assert outcome.status == ABSENT
        assert "pip install nvidia-cuda-nvrtc" in str(outcome)

    @pytest.mark.gpu
    def test_with_a_gpu_all_that_trains_works(self, findings):
        status = {probe.name: probe.status for probe in findings.probes}
        for name in ("device", "compiler", "capture", "FP8 GEMM", "captured step", "torch.profiler"):
            assert status[name] == WORKS, findings

    def test_nothing_is_broken(self, findings):
        assert findings.num_broken == 0, str(findings)

    def test_versions_are_there(self, findings):
        assert findings.versions["torch"] == torch.__version__
        for name in ("graphrt", "python", "platform", "cuda-core", "cuda-bindings", "nvtx", "numpy"):
            assert findings.versions[name] != "not installed"

    def test_it_is_a_list_to_paste(self, findings):
        lines = str(findings).splitlines()
        assert lines[0] == "### graphrt doctor"
        assert all(not line or line.startswith(("- ", "#")) for line in lines)
        assert "\x1b" not in str(findings)

    def test_no_home_and_no_user_is_in_it(self, findings):
        assert str(Path.home()) not in str(findings)
        assert f"/{getpass.getuser()}/" not in str(findings)


class TestCommand:
    @pytest.fixture(autouse=True)
    def found(self, monkeypatch):
        monkeypatch.setattr(doctor, "find_all", lambda: self.findings)

    findings = doctor.Findings({"python": "3"}, [doctor.Finding("a", WORKS, "Fine.", "", 0.0)])

    def test_exit_code_0_when_nothing_is_broken(self, capsys):
        assert main(["doctor"]) == 0
        assert "- a: Fine." in capsys.readouterr().out

    def test_exit_code_1_when_something_is(self, capsys, monkeypatch):
        broken = doctor.Finding("b", BROKEN, "It fails.", "Mend it.", 0.0)
        monkeypatch.setattr(doctor, "find_all", lambda: doctor.Findings({}, [broken]))
        assert main(["doctor"]) == 1
        assert "#### Broken\n\n- b: It fails. Mend it." in capsys.readouterr().out

    def test_json(self, capsys):
        assert main(["doctor", "--json"]) == 0
        values = json.loads(capsys.readouterr().out)
        assert values["probes"][0] == {"name": "a", "status": "works", "fact": "Fine.", "remedy": "", "seconds": 0.0}
        assert values["num_broken"] == 0


@pytest.mark.usefixtures("program")
class TestIsolation:
    def status(self, *names, timeout_s=60.0):
        return [(probe.name, probe.status) for probe in doctor.find_all(names, timeout_s).probes]

    def test_a_probe_that_hangs_is_given_up_and_the_rest_goes_on(self):
        start = time.perf_counter()
        assert self.status("a", "hang", "b", timeout_s=3.0) == [("a", WORKS), ("hang", BROKEN), ("b", WORKS)]
        assert time.perf_counter() - start < 30

    @pytest.mark.parametrize(("name", "words"), [("die", "signal 9"), ("leave", "exit code 3. cannot go on"), ("half", "exit code 1")])
    def test_a_probe_that_takes_the_process_down_is_named(self, name, words):
        found = doctor.find_all(("a", name, "b")).probes
        assert [probe.status for probe in found] == [WORKS, BROKEN, WORKS]
        assert words in found[1].fact

    def test_all_of_them_may_die(self):
        assert self.status("die", "leave", "die") == [("die", BROKEN), ("leave", BROKEN), ("die", BROKEN)]


class TestProbes:
    def test_an_exception_is_an_outcome(self, monkeypatch):
        def fail():
            raise RuntimeError("two\nlines")

        monkeypatch.setitem(PROBES, "fails", fail)
        lines = []
        run_probes(["fails"], lines.append)
        assert lines[0]["status"] == BROKEN
        assert lines[0]["fact"] == "RuntimeError: two lines"

    def test_what_libraries_print_does_not_mix_with_outcomes(self, capfd):
        with probes._own_stdout() as stdout:
            os.write(1, b"noise")
            print("outcome", file=stdout, flush=True)
        assert capfd.readouterr() == ("outcome\n", "noise")

    @pytest.mark.parametrize(
        ("cuda", "driver", "status", "words"),
        [
            (None, None, ABSENT, "without CUDA; driver: none"),
            (None, "580.1", ABSENT, "Install a CUDA build"),
            ("13.0", None, ABSENT, "sees no device; driver: none"),
            ("13.0", "580.1", BROKEN, "nvidia-smi"),
        ],
    )
    def test_without_a_device_it_says_what_is_missing(self, cuda, driver, status, words):
        outcome = probes._without_device("2.13", cuda, driver)
        assert outcome.status == status
        assert words in f"{outcome.fact} {outcome.remedy}"

    def test_a_cache_that_cannot_be_written(self, tmp_path, monkeypatch):
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
        outcome = probes.probe_cache()
        assert outcome.status == ABSENT
        assert "XDG_CACHE_HOME" in outcome.remedy

    def test_a_cache_is_counted(self, tmp_path, monkeypatch):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        (tmp_path / "graphrt").mkdir()
        (tmp_path / "graphrt" / "a.cubin").write_bytes(bytes(1 << 20))
        assert "holds 1 cubins, 1.0 MiB" in probes.probe_cache().fact
        assert [file.name for file in (tmp_path / "graphrt").iterdir()] == ["a.cubin"]

    @pytest.mark.parametrize(
        ("script", "status"), [("echo Tool version 7.1", WORKS), ("exit 1", BROKEN), (None, ABSENT)], ids=["works", "fails", "none"]
    )
    def test_a_tool_is_asked_for_its_version(self, tmp_path, monkeypatch, script, status):
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        if script is not None:
            (tmp_path / "sometool").write_text(f"#!/bin/sh\n{script}\n")
            (tmp_path / "sometool").chmod(0o755)
        outcome = probes._probe_tool("sometool", "tests", remedy="Install it.")()
        assert outcome.status == status
        if status == WORKS:
            assert outcome == Outcome(WORKS, "Tool version 7.1 (tests).")

    def test_a_missing_extra_says_how_to_install_it(self):
        outcome = probes._probe_extra("no_such_package", "plot", "tests")()
        assert outcome == Outcome(ABSENT, "tests: No module named 'no_such_package'.", "pip install 'graphrt[plot]'")

    @pytest.mark.parametrize(("value", "status"), [("", ABSENT), (":4096:8", WORKS), (":1:1", ABSENT)])
    def test_the_users_own_cublas_setting_is_looked_at(self, monkeypatch, value, status):
        monkeypatch.setenv("GRAPHRT_DOCTOR_CUBLAS_WORKSPACE_CONFIG", value)
        assert probes.probe_cublas().status == status


def test_paths_lose_the_home_and_the_user(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setattr(getpass, "getuser", lambda: "someone")
    assert doctor._anonymous("/home/someone/.cache and /scratch/someone/x") == "~/.cache and /scratch/USER/x"
    monkeypatch.setenv("HOME", "/")
    assert doctor._anonymous("/a/b") == "/a/b"
