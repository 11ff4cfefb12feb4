"""`graphrt profile`: runs and presets, what it writes, and what it refuses."""

import io
import json

import pytest
from rich.console import Console

import graphrt
from graphrt import profile_job
from graphrt.capture.attribution import Place
from graphrt.cli import main
from graphrt.data import load_default_text
from graphrt.presets import PRESETS, ModelShape, Preset
from graphrt.profiling.events import Event, PathProfile


@pytest.fixture(autouse=True)
def nano(monkeypatch, tmp_path):
    monkeypatch.setitem(PRESETS, "nano", Preset(ModelShape(1, 32, 2, 48, 256), seq_len=16, batch_size=4, steps=6, lr=3e-3, about="tests"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "150")


@pytest.mark.slow
def test_a_preset(capsys, tmp_path):
    assert main(["profile", "nano", "--steps", "1", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    for words in ("Profiling nano", "captured step by layer", "blocks.0.ffn.w13", "eager", "longest gaps", "trace.json", "perfetto"):
        assert words in out
    folder = tmp_path / "runs" / "nano-profile"
    assert {file.name for file in folder.iterdir()} == {"profile.json", "trace.json", "node_map.json", "profile.png"}
    paths = json.loads((folder / "profile.json").read_text())["paths"]
    assert [path["path"] for path in paths] == ["captured", "eager"]
    assert all(path["attributed_share"] == 1.0 for path in paths)
    # Again, over the earlier profile, and with checkpointing.
    assert main(["profile", "--preset", "nano", "--steps", "1", "--device", "cpu", "--checkpointing", "block", "--mode", "eager"]) == 0
    assert "recompute" in capsys.readouterr().out
    assert {file.name for file in folder.iterdir()} == {"profile.json", "trace.json", "profile.png"}  # not the earlier node map


@pytest.mark.parametrize("is_terminal", [True, False])
def test_names_stay_whole_where_no_terminal_cuts_them(is_terminal):
    module = "blocks.0." + "inner." * 20 + "end"
    events = tuple(Event(0, "k", "kernel", 2.0 * i, 1.0, Place("forward", "forward", name)) for i, name in enumerate([module, "[b]"]))
    profile = graphrt.StepProfile("a device", None, PathProfile("eager", 1, events, 4.0), None)
    file = io.StringIO()
    profile_job._show(profile, Console(file=file, force_terminal=is_terminal, width=60, color_system=None))
    lines = file.getvalue().splitlines()
    assert any(module in line for line in lines) is not is_terminal
    assert is_terminal is (max(map(len, lines)) <= 60)
    assert any("[b]" in line for line in lines)
    assert [line for line in lines if line.startswith("eager step by")] == [
        f"eager step by {name}" for name in ("layer", "module", "phase", "kernel")
    ]


@pytest.mark.slow
def test_a_run_with_its_checkpoint(capsys, tmp_path):
    text = tmp_path / "text.txt"
    text.write_bytes(load_default_text().tokens[:4000].tobytes())
    assert main(["train", "--preset", "nano", "--text", str(text), "--device", "cpu", "--out", "run"]) == 0
    before = {file.name: file.read_bytes() for file in (tmp_path / "run").iterdir()}
    assert main(["profile", "run", "--steps", "1", "--device", "cpu"]) == 0
    assert (tmp_path / "run" / "profile" / "trace.json").is_file()
    assert {file.name: file.read_bytes() for file in (tmp_path / "run").iterdir() if file.is_file()} == before
    capsys.readouterr()
    assert main(["profile", "run", "--batch-size", "2"]) == 2
    assert "--batch-size cannot be changed for run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--steps", "0"], "--steps must be"),
        (["--steps", "many"], "--steps"),
        (["no-such-run"], "There is no folder no-such-run"),
        (["--preset", "huge"], "'huge'"),
        (["nano", "--preset", "tiny"], "nano and --preset tiny are both given"),
        (["nano", "--device", "cuda:77"], "cuda:77"),
        (["nano", "--precision", "fp4"], "--precision must be one of"),
        (["nano", "--out", "taken"], "taken exists already and holds no profile"),
    ],
)
def test_mistakes_are_one_line_and_write_nothing(capsys, tmp_path, args, words):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "thesis.tex").write_text("")
    assert main(["profile", *args]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert words in err
    assert not (tmp_path / "runs").exists()


def test_help_teaches(capsys):
    assert main(["profile", "--help"]) == 0
    out = capsys.readouterr().out
    for words in ("Examples", "graphrt profile runs/first", "--steps", "--checkpointing", "perfetto"):
        assert words in out
