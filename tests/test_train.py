"""The run: what it writes, how it stops and goes on, what it refuses, and how good the model gets."""

import builtins
import importlib.metadata
import io
import json
import math
import os
import shlex
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

import graphrt
from graphrt import train as train_module
from graphrt.cli import main
from graphrt.data import load_default_text
from graphrt.interrupt import StopRequest
from graphrt.jobsetup import build_trainer, resolve_device
from graphrt.presets import PRESETS, ModelShape, Preset
from graphrt.runlock import FolderLock
from graphrt.settings import InputError, Settings, change_settings, make_settings
from graphrt.summary import Quality, next_commands, print_quality

NANO = Preset(ModelShape(1, 32, 2, 48, 256), seq_len=16, batch_size=4, steps=6, lr=3e-3, about="tests")


@pytest.fixture(autouse=True)
def nano(monkeypatch):
    monkeypatch.setitem(PRESETS, "nano", NANO)


@pytest.fixture
def text_file(tmp_path):
    file = tmp_path / "text.txt"
    file.write_bytes(load_default_text().tokens[:4000].tobytes())
    return file


@pytest.fixture
def run(tmp_path, text_file):
    """Runs `graphrt train` on a nano model; the run folder by name, more arguments after it."""

    def call(out, *args, code=0):
        source = () if "--resume" in args else ("--preset", "nano", "--text", str(text_file))
        assert main(["train", "--out", str(tmp_path / out), *source, *args]) == code
        return tmp_path / out

    return call


def rows(folder, key):
    return [row[key] for row in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()) if key in row]


def slot_rows(folder):
    file = folder / "slots_history.jsonl"
    return file.read_text().splitlines() if file.exists() else None


def checkpoint(folder):
    return torch.load(folder / "checkpoint.pt", weights_only=True)


def assert_same(a, b):
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, list | tuple):
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    else:
        assert a == b


def send_signal_in_step(monkeypatch, step, *signals):
    """Send the process signals when the batch of a step (from 0) is made."""
    make_batch = train_module._training_batch

    def make_batch_and_signal(run):
        if run.step == step:
            for signum in signals:
                os.kill(os.getpid(), signum)
        return make_batch(run)

    monkeypatch.setattr(train_module, "_training_batch", make_batch_and_signal)


class TestRun:
    def test_folder_holds_what_the_help_says(self, run):
        folder = run("r", "--eval-every", "3")
        names = {file.name for file in folder.iterdir()} - {".lock"}
        assert names == {"checkpoint.pt", "loss.png", "metrics.jsonl", "settings.json", "slots.json", "slots_history.jsonl", "summary.json"}
        assert len(rows(folder, "loss")) == 6
        assert len(rows(folder, "val_loss")) == 2
        assert len(json.loads((folder / "slots.json").read_text())) == 12
        assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
        assert json.loads((folder / "settings.json").read_text())["precision"] == "fp8"

    def test_ends_with_quality_slots_and_what_to_run_next(self, run, capsys):
        folder = run("r")
        out = capsys.readouterr().out
        for words in ("bits per byte", "bigram", "blocks.0.", "saturated", "graphrt train --out", "--resume --steps 12"):
            assert words in out
        assert str(folder) in out

    def test_long_tables_show_the_worst_and_name_the_file_with_all(self, run, capsys, monkeypatch):
        monkeypatch.setattr("graphrt.summary._NUM_SLOTS_SHOWN", 5)
        run("r")
        assert "and 7 more in" in capsys.readouterr().out
        run("all", "--all-slots")
        out = capsys.readouterr().out
        assert "more in" not in out
        assert "blocks.0.ffn.w2.grad_output" in out

    def test_the_slot_table_leaves_the_checkpoint_as_trained(self, run):
        assert checkpoint(run("r"))["trainer"]["counts"]["steps_taken"] == 6

    @pytest.mark.parametrize("args", [("--precision", "bf16"), ("--precision", "fp32"), ("--grad-accum", "2"), ("--mode", "eager")])
    def test_options_train(self, run, args):
        losses = rows(run("r", *args), "loss")
        assert losses[-1] < losses[0]

    def test_checkpointing_changes_no_bit(self, run):
        assert rows(run("a"), "loss") == rows(run("b", "--checkpointing", "block"), "loss")

    def test_seeds_differ(self, run):
        assert rows(run("a"), "loss") != rows(run("b", "--seed", "1"), "loss")

    def test_token_files_are_trained_on(self, tmp_path, capsys):
        import numpy as np

        file = tmp_path / "t.bin"
        (np.arange(3000) % 300).astype(np.uint16).tofile(file)
        args = ["train", "--preset", "nano", "--tokens", str(file), "--vocab-size", "300", "--out", str(tmp_path / "r")]
        assert main(args) == 0
        assert "bits per token" in capsys.readouterr().out

    def test_a_run_inside_its_text_is_resumed_and_never_trains_on_a_run(self, run, tmp_path, monkeypatch, capsys):
        with monkeypatch.context() as patch:
            send_signal_in_step(patch, 1, signal.SIGINT)
            run("r", "--text", str(tmp_path), code=130)
        run("r", "--resume")
        assert "Files left out of --text: " in capsys.readouterr().out
        run("other", "--text", f"{tmp_path}/**/*")
        assert checkpoint(tmp_path / "r")["corpus"] == checkpoint(tmp_path / "other")["corpus"]

    def test_without_matplotlib_it_says_what_to_install(self, run, capsys, monkeypatch):
        real_import = builtins.__import__

        def import_without_matplotlib(name, *args, **kwargs):
            if name.startswith("matplotlib"):
                raise ImportError(name)
            return real_import(name, *args, **kwargs)

        monkeypatch.setattr(builtins, "__import__", import_without_matplotlib)
        folder = run("r")
        assert "pip install 'graphrt[plot]'" in capsys.readouterr().out
        assert not (folder / "loss.png").exists()


class TestStopAndResume:
    @pytest.mark.parametrize(
        ("args", "signum", "code"),
        [
            ((), signal.SIGINT, 130),
            (("--precision", "bf16"), signal.SIGTERM, 143),
            (("--checkpointing", "block", "--grad-accum", "2"), signal.SIGINT, 130),
        ],
    )
    def test_stopped_and_resumed_equals_straight_bit_for_bit(self, run, monkeypatch, capsys, args, signum, code):
        straight = run("straight", *args)
        with monkeypatch.context() as patch:
            send_signal_in_step(patch, 2, signum)
            folder = run("stopped", *args, code=code)
        assert checkpoint(folder)["step"] == 3
        assert f"--out {folder} --resume" in capsys.readouterr().out
        run("stopped", "--resume")
        assert rows(folder, "loss") == rows(straight, "loss")
        assert slot_rows(folder) == slot_rows(straight)
        assert_same(checkpoint(folder), checkpoint(straight))

    def test_signal_handlers_are_put_back(self, run, monkeypatch):
        before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
        send_signal_in_step(monkeypatch, 0, signal.SIGINT)
        run("r", code=130)
        assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before

    def test_a_second_interrupt_aborts_and_keeps_the_last_checkpoint(self, run, monkeypatch, capsys):
        send_signal_in_step(monkeypatch, 4, signal.SIGINT, signal.SIGINT)
        folder = run("r", "--save-every", "2", code=130)
        assert checkpoint(folder)["step"] == 4
        assert "Aborted" in capsys.readouterr().err

    def test_steps_after_the_checkpoint_are_not_recorded_twice(self, run, monkeypatch):
        with monkeypatch.context() as patch:
            send_signal_in_step(patch, 5, signal.SIGINT, signal.SIGINT)
            patch.setattr("graphrt.progress._FLUSH_INTERVAL_S", 0)
            folder = run("r", "--save-every", "4", "--eval-every", "99", code=130)
        assert rows(folder, "step") == [1, 2, 3, 4, 5]
        run("r", "--resume")
        assert rows(folder, "step") == [1, 2, 3, 4, 5, 6, 6]
        assert [json.loads(line).get("step") for line in slot_rows(folder)] == [None, 1, 2, 3, 4, 5, 6]

    def test_a_finished_run_goes_on_with_more_steps(self, run):
        folder = run("r")
        run("r", "--resume", "--steps", "8")
        assert len(rows(folder, "loss")) == 8
        assert json.loads((folder / "settings.json").read_text())["steps"] == 8

    def test_wall_time_adds_up_over_resumes(self, run):
        folder = run("r")
        first = json.loads((folder / "summary.json").read_text())
        run("r", "--resume", "--steps", "7")
        second = json.loads((folder / "summary.json").read_text())
        assert second["wall_s"] > first["wall_s"] > 0
        assert (first["step"], second["step"]) == (6, 7)

    def test_a_run_from_sources_that_are_not_installed(self, run, monkeypatch):
        def refuse(name):
            raise importlib.metadata.PackageNotFoundError(name)

        monkeypatch.setattr(importlib.metadata.Distribution, "from_name", refuse)
        summary = json.loads((run("r") / "summary.json").read_text())
        assert summary["graphrt"] == graphrt.__version__

    def test_a_run_of_before_slots_were_recorded_goes_on(self, run):
        folder = run("r")
        settings = json.loads((folder / "settings.json").read_text())
        del settings["slots_every"]
        (folder / "settings.json").write_text(json.dumps(settings))
        (folder / "slots_history.jsonl").unlink()
        run("r", "--resume", "--steps", "8")
        assert [json.loads(line).get("step") for line in slot_rows(folder)] == [None, 7, 8]

    @pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
    def test_signals_that_are_no_key_are_named(self, run, monkeypatch, capsys, signum):
        before = signal.signal(signum, signal.SIG_DFL)  # under nohup it would be ignored
        try:
            send_signal_in_step(monkeypatch, 2, signum)
            folder = run("r", code=128 + signum)
        finally:
            signal.signal(signum, before)
        out = capsys.readouterr().out
        assert f"{signum.name}: stopping after this step" in out
        assert "Ctrl-C" not in out
        assert checkpoint(folder)["step"] == 3

    def test_a_hangup_that_is_ignored_stays_ignored(self, run, monkeypatch):
        before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
        try:
            send_signal_in_step(monkeypatch, 2, signal.SIGHUP)
            run("r")
        finally:
            signal.signal(signal.SIGHUP, before)

    @pytest.mark.parametrize("phase", ["_evaluate", "_measure_slots", "check_parity"])
    @pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
    def test_a_signal_after_the_last_checkpoint_stops_at_once(self, run, monkeypatch, capsys, phase, signum):
        def interrupted(*args):
            os.kill(os.getpid(), signum)
            raise AssertionError("it went on")

        with monkeypatch.context() as patch:
            patch.setattr(train_module, phase, interrupted)
            folder = run("r", "--check-parity", "2", "--eval-every", "99", code=128 + signum)
        out = capsys.readouterr().out
        assert "Stopped after step 6 of 6; the checkpoint is written." in out
        assert "after this step" not in out
        run("r", "--resume")
        assert checkpoint(folder)["step"] == 6

    def test_a_run_that_stopped_before_it_had_anything_starts_anew(self, run, monkeypatch, capsys):
        with monkeypatch.context() as patch:
            send_signal_in_step(patch, 0, signal.SIGINT, signal.SIGINT)
            folder = run("r", code=130)
        assert "There is no checkpoint yet. Run the same command to start anew." in capsys.readouterr().err
        (folder / "metrics.jsonl").touch()
        (folder / "checkpoint.pt.1.tmp").touch()
        run("r", "--resume", code=2)
        assert "Leave out --resume to start it anew" in capsys.readouterr().err
        assert not list(run("r").glob("*.tmp"))

    def test_a_run_with_rows_and_no_checkpoint_says_what_to_delete(self, run, monkeypatch, capsys):
        with monkeypatch.context() as patch:
            send_signal_in_step(patch, 3, signal.SIGINT, signal.SIGINT)
            patch.setattr("graphrt.progress._FLUSH_INTERVAL_S", 0)
            folder = run("r", "--save-every", "99", code=130)
        assert f"Delete it with rm -r {folder}." in capsys.readouterr().err
        for more in ([], ["--resume"]):
            run("r", *more, code=2)
            assert f"Delete it with rm -r {folder}" in capsys.readouterr().err
        assert rows(folder, "loss")

    def test_more_steps_say_what_they_do_to_the_learning_rate(self, run, capsys):
        run("r", "--lr", "0.01")
        capsys.readouterr()
        run("r", "--resume", "--steps", "12")
        out = " ".join(capsys.readouterr().out.split())
        before = train_module.learning_rate(make_settings({"preset": "nano", "lr": 0.01}), 5)
        now = train_module.learning_rate(make_settings({"preset": "nano", "lr": 0.01, "steps": 12, "warmup": 0}), 6)
        assert f"--steps was 6, it is 12: the learning rate was {before:.2e}, it goes on at {now:.2e}" in out
        assert "already finished" not in out

    def test_a_finished_run_says_that_it_is(self, run, capsys):
        run("r")
        capsys.readouterr()
        run("r", "--resume")
        assert "already finished its 6 steps" in " ".join(capsys.readouterr().out.split())

    def test_a_request_outlives_a_terminate_after_an_interrupt(self):
        with StopRequest(lambda line: None) as stop:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.exit_code == 130


class TestLostOutput:
    """Whatever becomes of the output, the run stops between two steps, with a checkpoint and one line."""

    @pytest.fixture
    def closed_pipe(self):
        read_end, write_end = os.pipe()
        os.close(read_end)
        stream = os.fdopen(write_end, "w")
        yield stream
        stream.close()

    def test_a_closed_pipe(self, run, monkeypatch, capsys, closed_pipe):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", closed_pipe)
            folder = run("r", code=141)
        err = capsys.readouterr().err
        assert (
            err == f"graphrt: The output cannot be written: Broken pipe. Run graphrt train --out {folder} --resume to go on from the "
            "last checkpoint.\n"
        )
        run("r", "--resume")
        assert len(rows(folder, "loss")) == 6

    @pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
    def test_a_full_disk_below_the_output(self, run, monkeypatch, capsys):
        with open("/dev/full", "w") as full, monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", full)
            run("r", code=1)
        err = capsys.readouterr().err
        assert err.startswith("graphrt: The output cannot be written: No space left on device.")
        assert err.count("\n") == 1

    def test_a_full_disk_below_the_run_folder(self, run, monkeypatch, capsys):
        def fail(*args, **kwargs):
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(Path, "write_text", fail)
            patch.setattr("graphrt.runfolder.RunFolder.create", lambda self, settings, lock: self.path.mkdir())
            folder = run("r", code=1)
        # The first file of the run that is written whole.
        assert capsys.readouterr().err == f"graphrt: {folder}/slots_history.jsonl cannot be used: No space left on device.\n"


class TestValidation:
    def count_evaluations(self, monkeypatch, run, *args):
        sizes = []
        evaluate = train_module.Trainer.evaluate

        def counted(trainer, batch):
            sizes.append(batch["tokens"].numel())
            return evaluate(trainer, batch)

        monkeypatch.setattr(train_module.Trainer, "evaluate", counted)
        run("r", *args)
        return sizes

    def test_small_batches_are_validated_in_large_ones(self, run, monkeypatch, tmp_path):
        (tmp_path / "long.txt").write_bytes(load_default_text().tokens[:300_000].tobytes())
        text = ("--text", str(tmp_path / "long.txt"))
        sizes = self.count_evaluations(monkeypatch, run, "--batch-size", "1", "--eval-every", "3", *text)
        assert sizes == [2048, 2048, 2048, 2048, 2048]  # one on the way, four at the end

    def test_settings_decide_how_many_tokens_validate(self):
        tiny = make_settings({})
        assert train_module._tokens_on_the_way(tiny) == 8192
        assert train_module._final_tokens(tiny) == 1 << 16

    def test_without_a_terminal_lines_tell_of_progress(self, run, monkeypatch, capsys):
        monkeypatch.setattr("graphrt.progress._LINE_INTERVAL_S", 0.0)
        monkeypatch.setattr("graphrt.progress._FLUSH_INTERVAL_S", 0.0)
        run("r", "--eval-every", "3")
        out = capsys.readouterr().out
        assert "step 2: loss" in out
        assert "validating: 1 of 1 batches" in out


class TestRefusals:
    """One line on stderr that names what is wrong, exit code 2, and nothing written."""

    @pytest.fixture
    def refuse(self, tmp_path, capsys):
        def call(*args):
            before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
            assert main(["train", *args]) == 2
            out, err = capsys.readouterr()
            assert out == ""
            assert err.startswith("graphrt: ")
            assert err.count("\n") == 1
            assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before
            return err

        return call

    @pytest.fixture
    def finished(self, run, capsys):
        folder = run("finished", "--steps", "1")
        capsys.readouterr()
        return folder

    def test_text_shorter_than_a_sequence(self, refuse, tmp_path):
        (tmp_path / "short.txt").write_text("short")
        assert "There are 5 tokens in" in refuse("--preset", "nano", "--text", str(tmp_path / "short.txt"), "--out", str(tmp_path / "r"))
        assert not (tmp_path / "r").exists()

    def test_a_run_folder_that_exists(self, refuse, finished):
        assert "exists already. Go on with it by --resume" in refuse("--out", str(finished))

    def test_a_run_folder_that_is_a_file(self, refuse, text_file):
        assert "text.txt exists already" in refuse("--out", str(text_file))

    def test_a_run_folder_below_a_file(self, refuse, text_file):
        assert "cannot be made" in refuse("--out", str(text_file / "r"))

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
    def test_a_run_folder_that_cannot_be_written(self, refuse, tmp_path):
        (tmp_path / "locked").mkdir(mode=0o500)
        assert "cannot be made" in refuse("--out", str(tmp_path / "locked/r"))

    def test_a_resume_without_a_run(self, refuse, tmp_path):
        assert "no settings.json to resume from" in refuse("--resume", "--out", str(tmp_path / "nothing"))

    def test_a_resume_without_a_checkpoint(self, refuse, finished):
        (finished / "checkpoint.pt").unlink()
        assert "no checkpoint.pt to resume from" in refuse("--resume", "--out", str(finished))

    def test_settings_that_are_damaged(self, refuse, finished):
        (finished / "settings.json").write_text('{"preset": ')
        assert "settings.json does not hold" in refuse("--resume", "--out", str(finished))

    @pytest.mark.parametrize("num_bytes", [0, 100, -100])
    def test_a_checkpoint_cut_short(self, refuse, finished, num_bytes):
        file = finished / "checkpoint.pt"
        file.write_bytes(file.read_bytes()[:num_bytes])
        assert "checkpoint.pt cannot be read: it is cut short" in refuse("--resume", "--out", str(finished))

    @pytest.mark.parametrize("what", ["torch.load", "pathlib.Path.read_text", "pathlib.Path.is_file"])
    def test_files_that_may_not_be_read(self, refuse, finished, monkeypatch, what):
        def denied(*args, **kwargs):
            raise PermissionError(13, "Permission denied")

        with monkeypatch.context() as patch:
            patch.setattr(what, denied)
            patch.setattr(Path, "rglob", lambda self, pattern: [])
            err = refuse("--resume", "--out", str(finished))
        assert "cannot be read: Permission denied. Make it readable" in err
        assert "new run" not in err

    def test_a_folder_in_which_another_run_trains(self, refuse, finished, tmp_path, text_file):
        new = tmp_path / "new"
        new.mkdir()
        (new / "settings.json").write_text(make_settings({}).to_json())
        begun = tmp_path / "begun"
        begun.mkdir()
        (begun / "settings.json").write_text(make_settings({}).to_json())
        (begun / "metrics.jsonl").write_text('{"step": 1}\n')
        for folder in (finished, new, begun):
            with FolderLock(folder) as lock:
                lock.acquire()
                for args in (("--resume",), ("--preset", "nano", "--text", str(text_file))):
                    assert f"{folder} is in use by another graphrt train" in refuse("--out", str(folder), *args)

    def test_a_checkpoint_that_is_something_else(self, refuse, finished):
        torch.save({"weights": torch.zeros(1)}, finished / "checkpoint.pt")
        assert "is not a checkpoint of graphrt train" in refuse("--resume", "--out", str(finished))

    def test_a_checkpoint_of_another_model(self, refuse, finished):
        torch.save({**checkpoint(finished), "shape": "ModelShape(num_layers=9)"}, finished / "checkpoint.pt")
        assert "is of another model" in refuse("--resume", "--out", str(finished))

    def test_a_checkpoint_whose_tensors_do_not_fit(self, refuse, finished):
        saved = checkpoint(finished)
        saved["trainer"]["model"].popitem()
        torch.save(saved, finished / "checkpoint.pt")
        assert "does not fit the run's model" in refuse("--resume", "--out", str(finished))

    def test_a_text_that_has_changed(self, refuse, finished, text_file):
        text_file.write_bytes(text_file.read_bytes()[::-1])
        assert "The text has changed" in refuse("--resume", "--out", str(finished))

    def test_a_resume_as_another_run(self, refuse, finished):
        assert "has --seed 0, got 5" in refuse("--resume", "--out", str(finished), "--seed", "5")

    def test_a_resume_to_fewer_steps(self, refuse, run, capsys):
        folder = run("r", "--steps", "3")
        capsys.readouterr()
        assert "has done 3 steps, more than --steps 2" in refuse("--resume", "--out", str(folder), "--steps", "2")

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
    def test_a_gpu_where_there_is_none(self, refuse, tmp_path):
        assert "--device cuda is not there" in refuse("--device", "cuda", "--out", str(tmp_path / "r"))

    @pytest.mark.parametrize("device", ["gpu", "meta", "cuda:x"])
    def test_an_unknown_device(self, refuse, tmp_path, device):
        assert "--device must be auto, cpu, cuda or cuda:N" in refuse("--device", device, "--out", str(tmp_path / "r"))


class TestSettings:
    @pytest.mark.parametrize(
        ("name", "value", "field", "expected"),
        [
            ("backward_accum", "accurate", "backward_fast_accum", False),
            ("backward_accum", "fast", "backward_fast_accum", True),
            ("weight_transpose", "kept", "keep_weight_transpose", True),
            ("weight_transpose", "again", "keep_weight_transpose", False),
        ],
    )
    def test_how_products_are_computed_is_the_recipes(self, name, value, field, expected):
        settings = make_settings({"preset": "nano", name: value, "device": "cpu"})
        with build_trainer(settings, torch.device("cpu")) as trainer:
            assert trainer.state is not None
            assert getattr(trainer.state.recipe, field) is expected

    @pytest.mark.parametrize("name", ["backward_accum", "weight_transpose"])
    def test_settings_of_before_there_was_a_choice_load(self, name, tmp_path):
        saved = {key: value for key, value in json.loads(make_settings({}).to_json()).items() if key != name}
        assert Settings.from_json(json.dumps(saved), tmp_path / "settings.json") == make_settings({})

    def test_what_is_left_out_comes_from_the_preset(self):
        settings = make_settings({"preset": "1b", "steps": None})
        assert (settings.steps, settings.seq_len, settings.vocab_size) == (2000, 2048, 32768)
        assert settings.save_every == settings.eval_every == 400
        assert settings.slots_every == 10

    def test_weights_that_take_much_of_the_memory_are_transposed_again(self):
        assert {name: make_settings({"preset": name}).weight_transpose for name in ("micro", "125m", "1b", "8bslice")} == {
            "micro": "kept", "125m": "kept", "1b": "kept", "8bslice": "again"
        }  # fmt: skip
        assert make_settings({"preset": "8bslice", "weight_transpose": "kept"}).weight_transpose == "kept"

    def test_json_gives_them_back(self):
        settings = make_settings({"text": ("a", "b"), "lr": 1e-3})
        assert Settings.from_json(settings.to_json(), Path("s.json")) == settings

    def test_paths_hold_from_any_directory(self):
        assert make_settings({"text": ("a.txt",)}).text == (str(Path.cwd() / "a.txt"),)

    def test_a_resume_may_change_what_does_not_change_the_run(self):
        settings = make_settings({})
        assert change_settings(settings, {"steps": 999, "mode": "eager"}).steps == 999
        assert change_settings(settings, {"seed": 0, "preset": "tiny"}) == settings

    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"preset": "nano", "steps": 6},
            {"batch_size": 4, "seq_len": 64, "grad_accum": 2, "lr": 1.5e-4, "warmup": 7, "vocab_size": 300, "seed": 3},
            {"steps": 1000, "checkpointing": "block", "mode": "eager", "device": "cpu", "eval_every": 9},
            {"tokens": "my tokens.bin", "token_dtype": "uint32", "save_every": 7, "slots_every": 2},
            {"text": ("a b.txt", "c/*.py")},
        ],
    )
    def test_the_same_run_that_is_suggested_is_the_same_run(self, options, monkeypatch):
        given = []
        monkeypatch.setattr("graphrt.cli._run_training", lambda options, *rest: given.append(options) or 0)
        settings = make_settings(options)
        (again,) = (command for command, purpose in next_commands(settings, Path("r"), "cpu") if purpose == "the same run in fp32")
        assert main(shlex.split(again)[1:]) == 0
        assert make_settings(given[0]) == replace(settings, precision="fp32")

    def test_what_is_of_fp8_alone_is_not_suggested_for_another_precision(self):
        settings = make_settings({"backward_accum": "fast", "weight_transpose": "again"})
        assert settings.arithmetic == "fp8 (accumulating fast, transposed weights made again)"
        assert next_commands(settings, Path("r"), "cpu")[1][0] == "graphrt train --preset tiny --precision fp32 --out r-fp32"
        other = replace(settings, precision="bf16")
        assert other.arithmetic == "bf16"
        again = next_commands(other, Path("r"), "cpu")[1][0]
        assert again == "graphrt train --preset tiny --backward-accum fast --weight-transpose again --precision fp8 --out r-fp8"

    def test_the_same_run_names_only_what_differs_from_the_preset(self):
        again = next_commands(make_settings({"lr": 1.0, "batch_size": 8}), Path("r"), "cpu")[1][0]
        assert again == "graphrt train --preset tiny --lr 1.0 --precision fp32 --out r-fp32"

    def test_learning_rate_rises_then_falls_to_a_tenth(self):
        settings = make_settings({"steps": 100, "warmup": 10, "lr": 1.0})
        rates = [train_module.learning_rate(settings, step) for step in range(100)]
        assert rates[0] == pytest.approx(0.1)
        assert rates[9] == rates[10] == 1.0
        assert rates[10:] == sorted(rates[10:], reverse=True)
        assert rates[-1] == pytest.approx(0.1, abs=0.01)

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"preset": "huge"}, "no preset 'huge'. Choose one of tiny"),
            ({"seq_len": 100}, "--seq-len must be a multiple of 16, which FP8 GEMMs need, got 100. Try 96"),
            ({"seq_len": 7}, "Try 16"),
            ({"steps": 0}, "--steps must be a whole number of at least 1, got 0"),
            ({"steps": -3}, "--steps"),
            ({"batch_size": 0}, "--batch-size"),
            ({"slots_every": 0}, "--slots-every must be a whole number of at least 1"),
            ({"grad_accum": 3}, "--grad-accum 3"),
            ({"lr": 0.0}, "--lr"),
            ({"lr": math.nan}, "--lr"),
            ({"warmup": 500, "steps": 10}, "--warmup"),
            ({"seed": -1}, "--seed"),
            ({"precision": "fp4"}, "--precision must be one of fp8, bf16, fp32"),
            ({"mode": "graphs"}, "--mode"),
            ({"checkpointing": "all"}, "--checkpointing"),
            ({"backward_accum": "slow"}, "--backward-accum must be one of accurate, fast"),
            ({"token_dtype": "uint8", "tokens": "x"}, "--token-dtype"),
            ({"token_dtype": "uint16"}, "--token-dtype uint16 goes with --tokens"),
            ({"vocab_size": 100}, "--vocab-size must be at least 256 for text"),
            ({"text": ("a",), "tokens": "b"}, "--text and --tokens"),
            ({"text": ("a", "")}, "--text is given an empty name"),
            ({"tokens": ""}, "--tokens is given an empty name"),
        ],
    )
    def test_what_cannot_be_is_named(self, options, words):
        with pytest.raises(InputError) as caught:
            make_settings(options)
        assert words in str(caught.value)


@pytest.mark.parametrize(
    ("model", "words"), [(2.0, "0.0%"), (1.0, "50.0% better."), (3.0, "50.0% worse: train longer"), (math.nan, "not finite")]
)
def test_quality_is_told_in_words_that_fit(model, words):
    console = Console(file=io.StringIO(), width=80)
    print_quality(console, Quality(model, 2.0, 100, True))
    printed = console.file.getvalue()
    assert ("as good as" in printed and words not in printed) if words == "0.0%" else words in printed


def test_titles_are_one_line_of_a_narrow_terminal(run, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    run("r")
    assert "FP8 slots, worst first (shares are sampled: one step, eager)\n" in capsys.readouterr().out


@pytest.mark.slow
def test_fp8_ends_within_two_percent_of_bf16(tmp_path, monkeypatch):
    monkeypatch.setitem(PRESETS, "nano", Preset(ModelShape(2, 64, 2, 176, 256), 64, 8, 150, 2e-3, "tests"))
    losses = {}
    for precision in ("fp8", "bf16"):
        folder = tmp_path / precision
        assert main(["train", "--preset", "nano", "--precision", precision, "--out", str(folder)]) == 0
        losses[precision] = rows(folder, "val_loss")[-1]
    assert losses["fp8"] == pytest.approx(losses["bf16"], rel=0.02)


def test_the_gpu_is_named_with_its_index(monkeypatch):
    made_current = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "set_device", made_current.append)
    for name, index in (("auto", 1), ("cuda", 1), ("cuda:0", 0)):
        assert resolve_device(make_settings({"preset": "nano", "device": name})) == torch.device("cuda", index)
        assert made_current[-1] == torch.device("cuda", index)


def test_a_run_ends_with_a_proof_if_asked(run, capsys):
    run("proven", "--check-parity", "2")
    assert "values bitwise equal" in capsys.readouterr().out
