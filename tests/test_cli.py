"""The command line around the commands: help, version, mistakes."""

import subprocess
import sys
from importlib.metadata import version

import pytest

from graphrt.cli import main
from graphrt.presets import PRESETS


def test_help_teaches(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    for words in ("train", "presets", "--version", "graphrt train --out"):
        assert words in out


def test_no_arguments_show_the_help(capsys):
    assert main([]) == 2
    assert "Usage" in capsys.readouterr().out


def test_train_help_has_examples_and_defaults(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["train", "--help"]) == 0
    out = capsys.readouterr().out
    for words in ("Examples", "--resume", "fp8|bf16|fp32", "tiny|micro|125m|1b|8bslice", "--tokens corpus.bin", "Ctrl-C", "runs/PRESET"):
        assert words in out


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"graphrt {version('graphrt')}\n"


def test_presets_are_listed(capsys):
    assert main(["presets"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in PRESETS)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["trian"], "trian"),
        (["train", "--stps", "3"], "--stps"),
        (["train", "--steps", "1.5"], "--steps"),
        (["train", "--steps", "many"], "--steps"),
        (["train", "--lr", "fast"], "--lr"),
        (["train", "--steps"], "--steps"),
        (["train", "notes.txt"], "'notes.txt' is not an option"),
        (["train", "--preset", "huge"], "'huge'"),
        (["train", "--text", "no-such-file.txt", "--out", "no-such-folder"], "no-such-file.txt"),
        (["train", "--tokens", "no-such-file.bin", "--out", "no-such-folder"], "no-such-file.bin"),
    ],
)
def test_mistakes_are_one_line_that_names_them(capsys, args, words):
    assert main(args) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err
    assert err.startswith("graphrt: ")
    assert err.count("\n") == 1


def test_files_after_the_first_are_text_too(capsys, tmp_path):
    (tmp_path / "a.txt").write_text("a" * 10)
    (tmp_path / "b.txt").write_text("b" * 10)
    assert main(["train", "--text", str(tmp_path / "a.txt"), str(tmp_path / "b.txt"), "--out", str(tmp_path / "r")]) == 2
    assert "2 files" in capsys.readouterr().err


def test_the_console_script_exits_with_the_code():
    script = "import sys; from graphrt.cli import main; sys.exit(main())"
    result = subprocess.run([sys.executable, "-c", script, "train", "--preset", "huge"], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr.startswith("graphrt: There is no preset 'huge'")
    assert "Traceback" not in result.stderr


CHECKED = """
import torch
from torch import nn
import graphrt

def make(loss_fn=lambda model, batch: model(batch).square().mean()):
    model = nn.Linear(16, 16)
    return graphrt.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, mode="eager"), torch.randn(4, 16)

def make_hazard():
    return make(lambda model, batch: model(batch).mean() * float(batch.sum()))

def make_nothing():
    return None
"""


@pytest.fixture
def checked_module(tmp_path, monkeypatch):
    (tmp_path / "graphrt_checked.py").write_text(CHECKED)
    monkeypatch.chdir(tmp_path)
    yield "graphrt_checked"
    sys.modules.pop("graphrt_checked", None)
    sys.path[:] = [entry for entry in sys.path if entry != str(tmp_path)]


def test_check_says_that_a_step_can_be_captured(checked_module, capsys):
    assert main(["check", f"{checked_module}:make"]) == 0
    assert capsys.readouterr().out


def test_check_names_the_line_of_a_hazard(checked_module, capsys):
    assert main(["check", f"{checked_module}:make_hazard"]) == 1
    printed = capsys.readouterr().out
    assert "reads a device value on the host" in printed
    assert "graphrt_checked.py" in printed


@pytest.mark.parametrize("target", ["graphrt_checked", "nowhere:make", "graphrt_checked:absent", "graphrt_checked:make_nothing"])
def test_check_answers_a_wrong_target_in_one_line(checked_module, capsys, target):
    assert main(["check", target]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
