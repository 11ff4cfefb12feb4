"""`graphrt train --tensorboard`: events that TensorBoard's own reader gives back."""

import builtins
import json
import math

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from graphrt.cli import main
from graphrt.data import load_default_text
from graphrt.presets import PRESETS, ModelShape, Preset
from graphrt.tensorboard import TAGS, EventLog

NANO = Preset(ModelShape(1, 32, 2, 48, 256), seq_len=16, batch_size=4, steps=6, lr=3e-3, about="tests")


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs `graphrt train` on a nano model in one folder."""
    monkeypatch.setitem(PRESETS, "nano", NANO)
    (tmp_path / "text.txt").write_bytes(load_default_text().tokens[:4000].tobytes())

    def call(*args, code=0):
        source = () if "--resume" in args else ("--preset", "nano", "--text", str(tmp_path / "text.txt"))
        assert main(["train", "--out", str(tmp_path / "r"), *source, *args]) == code
        return tmp_path / "r"

    return call


def scalars(folder, tag):
    """(step, value) of a tag's events, as TensorBoard would draw them."""
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def metrics(folder, key):
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [(row["step"], row[key]) for row in rows if row.get(key) is not None]


def test_events_hold_what_the_metrics_do(run):
    folder = run("--tensorboard", "--eval-every", "3")
    for key in ("loss", "grad_norm", "lr", "val_loss", "tokens_per_s", "step_ms", "skipped"):
        expected = metrics(folder, key)
        assert expected
        assert scalars(folder, TAGS[key]) == [(step, pytest.approx(float(value), rel=1e-6)) for step, value in expected], key


def test_a_resumed_run_goes_on_with_its_events(run):
    folder = run("--tensorboard")
    run("--resume", "--steps", "9")
    assert scalars(folder, "train/loss") == [(step, pytest.approx(value)) for step, value in metrics(folder, "loss")]
    assert [step for step, _ in scalars(folder, "train/loss")] == list(range(1, 10))


def test_steps_done_again_are_shown_once(tmp_path):
    for first, loss in ((0, 1.0), (3, 2.0)):
        log = EventLog(tmp_path / "tensorboard", first)
        log.add_rows({"step": step, "loss": loss} for step in range(first + 1, first + 6))
        log.close()
        log.close()
    assert scalars(tmp_path, "train/loss") == [(1, 1), (2, 1), (3, 1), *((step, 2) for step in range(4, 9))]


def test_what_is_not_finite_is_left_out(tmp_path):
    log = EventLog(tmp_path / "tensorboard", 0)
    log.add_rows([{"step": 1, "loss": None, "lr": 0.5}, {"step": 2, "loss": 1.0, "lr": 0.5}])
    log.close()
    assert scalars(tmp_path, "train/loss") == [(2, 1.0)]
    assert not any(math.isnan(value) for _, value in scalars(tmp_path, "train/lr"))


def test_without_the_option_there_are_none(run):
    assert not (run() / "tensorboard").exists()


def test_without_the_library_it_is_refused_before_anything_is_written(run, tmp_path, capsys, monkeypatch):
    real_import = builtins.__import__

    def import_without_tensorboard(name, *args, **kwargs):
        if name.startswith("torch.utils.tensorboard"):
            raise ImportError("No module named 'tensorboard'")
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", import_without_tensorboard)
    run("--tensorboard", code=2)
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "pip install 'graphrt[tensorboard]'" in err
    assert not (tmp_path / "r").exists()
