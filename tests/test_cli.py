"""The command line around the commands: help, version, mistakes."""

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import graphrt
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
        (["trian"], "'trian'. Did you mean 'train'? Run graphrt --help for the commands."),
        (["bogus"], "'bogus'. Run graphrt --help for the commands."),
        (["check"], "Run graphrt check --help for the options."),
        (["train", "--batchsize", "3"], "--batch-size"),
        (["train", "--text", "", "--out", "no-such-folder"], "--text is given an empty name"),
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


INTERRUPTED = """
import os, signal, sys

signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background inherits that it is ignored

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder())
from graphrt_command import main
sys.argv[1:] = ["train", "--out", "no-such-folder"]
sys.exit(main())
"""


@pytest.mark.parametrize("module", ["torch", "graphrt.train"])
def test_ctrl_c_during_the_imports_is_one_line(module, tmp_path):
    script, root = INTERRUPTED.format(module=module), str(Path(graphrt.__file__).parent.parent)
    environment = {**os.environ, "PYTHONPATH": root}
    result = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 130
    assert result.stderr.strip() == "graphrt: Stopped by Ctrl-C."
    assert result.stdout == ""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
@pytest.mark.parametrize("args", [["presets"], ["--version"], ["train", "--help"]])
def test_a_full_disk_below_the_output_is_one_line(monkeypatch, capsys, args):
    with open("/dev/full", "w") as full, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", full)
        assert main(args) == 1
    assert capsys.readouterr().err == "graphrt: The output cannot be written: No space left on device.\n"


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

number = 3
calls = []

def fail_in_loss(model, batch):
    raise KeyError("no labels")

def make_failing():
    return make(fail_in_loss)

def count(model, batch):
    calls.append(1)
    return model(batch).square().mean()

def make_counting():
    return make(count)

def make_counting_fp8():
    trainer, batch = make(count)
    graphrt.convert_to_float8_training(trainer.model)
    return graphrt.Trainer(trainer.model, trainer.optimizer, count, grad_accum_steps=2, mode="eager"), torch.randn(32, 16)

def raising():
    return helper()

def helper():
    return 1 / 0

def leaving():
    raise SystemExit("bye")

class ReadsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * float(grad.sum())

def make_hazard_in_backward():
    return make(lambda model, batch: ReadsInBackward.apply(model(batch)).mean())

def make_varying():
    return make(lambda model, batch: model(batch).masked_select(batch > torch.rand(()) * 2).mean())

def fail(grad):
    raise ValueError("in a hook")

def hooked(model, batch):
    y = model(batch)
    y.register_hook(fail)
    return y.mean()

def make_failing_hook():
    return make(hooked)

def make_without_gradient():
    return make(lambda model, batch: batch.sum())
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


def test_check_puts_the_failure_and_no_count_behind_what_cannot_be(checked_module, capsys):
    assert main(["check", f"{checked_module}:make_failing"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("The step cannot be captured:\n  it failed  KeyError: 'no labels' (graphrt_checked.py:")
    assert "operations" not in out


def test_check_names_a_line_of_the_users_own_backward(checked_module, capsys):
    assert main(["check", f"{checked_module}:make_hazard_in_backward"]) == 1
    out = capsys.readouterr().out
    assert "float(grad.sum())" in out
    assert "typer" not in out


def test_check_names_the_line_of_the_forward_for_what_autograd_issues(checked_module, capsys):
    assert main(["check", f"{checked_module}:make_varying"]) == 1
    out = capsys.readouterr().out
    assert "(in the backward of graphrt_checked.py:" in out
    assert "typer" not in out
    assert "cli.py" not in out


def test_check_tells_of_a_backward_that_fails_in_one_line(checked_module, capsys):
    assert main(["check", f"{checked_module}:make_failing_hook"]) == 1
    out, err = capsys.readouterr()
    assert "it failed  ValueError: in a hook (graphrt_checked.py:" in out
    assert len(out.splitlines()) == 2
    assert err == ""


@pytest.mark.parametrize(("function", "num_calls"), [("make_counting", 3), ("make_counting_fp8", 3 * 2 + 2)])
def test_check_calls_the_loss_function_as_often_as_its_help_says(checked_module, capsys, function, num_calls):
    assert main(["check", f"{checked_module}:{function}"]) == 0
    assert len(sys.modules[checked_module].calls) == num_calls


def test_check_tells_of_a_step_that_trains_nothing(checked_module, capsys):
    assert main(["check", f"{checked_module}:make_without_gradient"]) == 1
    assert "Traceback" not in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("code", "lines"),
    [
        (
            "import os\nvalue = (1 +\n",
            ["graphrt: broken cannot be imported: SyntaxError: '(' was never closed", "  broken.py:2: value = (1 +"],
        ),
        ("import os\n1 / 0\n", ["graphrt: broken cannot be imported: ZeroDivisionError: division by zero", "  broken.py:2: 1 / 0"]),
        (
            "import no_such_library\n",
            [
                "graphrt: broken cannot be imported: ModuleNotFoundError: No module named 'no_such_library'",
                "  broken.py:1: import no_such_library",
            ],
        ),
    ],
)
def test_check_shows_the_users_frames_of_a_module_that_fails(tmp_path, monkeypatch, capsys, code, lines):
    (tmp_path / "broken.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert main(["check", "broken:make"]) == 2
    assert capsys.readouterr().err.splitlines() == lines


def test_check_shows_the_users_frames_of_a_function_that_fails(checked_module, capsys):
    assert main(["check", f"{checked_module}:raising"]) == 2
    first, outer, inner = capsys.readouterr().err.splitlines()
    assert first == "graphrt: graphrt_checked:raising cannot be called: ZeroDivisionError: division by zero"
    assert outer.endswith(": helper()")
    assert inner.endswith(": 1 / 0")
    assert main(["check", f"{checked_module}:leaving"]) == 2
    assert "SystemExit: bye" in capsys.readouterr().err


def test_check_names_types_without_an_article(checked_module, capsys):
    assert main(["check", f"{checked_module}:number"]) == 2
    assert "graphrt_checked:number is of type int, expected a function" in capsys.readouterr().err


@pytest.mark.parametrize("target", ["graphrt_checked", "nowhere:make", "graphrt_checked:absent", "graphrt_checked:make_nothing"])
def test_check_answers_a_wrong_target_in_one_line(checked_module, capsys, target):
    assert main(["check", target]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
