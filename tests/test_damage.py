"""Run folders that something has damaged: every command says so in a line, and uses what is left."""

import json
import os
import shutil

import pytest
import torch

from graphrt import profile_job
from graphrt.cli import main
from graphrt.data import load_default_text
from graphrt.presets import PRESETS, ModelShape, Preset
from graphrt.runfolder import RunFolder, replacing
from graphrt.runpieces import read_history
from graphrt.settings import InputError
from graphrt.slothistory import load_slot_curves

NANO = Preset(ModelShape(1, 32, 2, 48, 256), seq_len=16, batch_size=4, steps=6, lr=3e-3, about="tests")
HUGE = 10**400
NESTED = "[" * 100_000
LONG = "x" * 300
COMMANDS = {
    "report": lambda folder: ["report", str(folder)],
    "resume": lambda folder: ["train", "--resume", "--out", str(folder)],
    "profile": lambda folder: ["profile", str(folder), "--steps", "1"],
}
PIECES = ["metrics.jsonl", "summary.json", "slots.json", "slots_history.jsonl"]


def shown(value):
    """A parameter in a test's name."""
    return repr(value)[:30]


@pytest.fixture(autouse=True)
def nano(monkeypatch):
    monkeypatch.setitem(PRESETS, "nano", NANO)
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr("graphrt.runplot._DPI", 20)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run, made once."""
    folder = tmp_path_factory.mktemp("made")
    text = folder / "text.txt"
    text.write_bytes(load_default_text().tokens[:4000].tobytes())
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PRESETS, "nano", NANO)
        assert main(["train", "--preset", "nano", "--text", str(text), "--device", "cpu", "--out", str(folder / "run")]) == 0
    return folder / "run"


@pytest.fixture
def run(finished, tmp_path):
    """A copy of it to damage."""
    return shutil.copytree(finished, tmp_path / "run")


@pytest.fixture
def refused(capsys):
    """The one line that a command is refused with."""

    def call(*args):
        capsys.readouterr()
        assert main(list(args)) == 2
        out, err = capsys.readouterr()
        assert not out
        assert err.startswith("graphrt: ")
        assert err.count("\n") == 1
        return err

    return call


@pytest.fixture
def reported(run, capsys, monkeypatch):
    """What `graphrt report` prints, as text and as JSON, without drawing."""
    monkeypatch.setattr("graphrt.runreport.draw_run", lambda *args: None)

    def call():
        capsys.readouterr()
        assert main(["report", str(run), "--json"]) == 0
        values = json.loads(capsys.readouterr().out)
        assert main(["report", str(run)]) == 0
        return capsys.readouterr().out, values

    return call


def replace_line(file, number, text):
    lines = file.read_text().splitlines()
    lines[number] = text
    file.write_text("\n".join(lines) + "\n")


def change_line(file, number, **changes):
    replace_line(file, number, json.dumps({**json.loads(file.read_text().splitlines()[number]), **changes}))


def change_json(file, **changes):
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def contents(folder):
    return {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def make_folder(file):
    file.unlink()
    file.mkdir()


@pytest.mark.parametrize("command", COMMANDS)
class TestSettings:
    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("preset", "gone"), ("preset", ["tiny"]), ("preset", None), ("text", [3]), ("text", "abc"), ("text", None), ("tokens", 3),
            ("tokens", ["a"]), ("token_dtype", None), ("seed", 1.5), ("seed", True), ("seed", HUGE), ("steps", "6"), ("steps", HUGE),
            ("batch_size", 4.0), ("vocab_size", HUGE), ("warmup", None), ("warmup", 0.5), ("warmup", HUGE), ("lr", "x"), ("lr", [1]),
            ("lr", HUGE), ("lr", float("nan")), ("lr", float("inf")), ("mode", []), ("precision", {}), ("device", 3),
        ],
        ids=shown,
    )  # fmt: skip
    def test_a_value_that_is_none(self, run, refused, command, name, value):
        change_json(run / "settings.json", **{name: value})
        before = contents(run)
        err = refused(*COMMANDS[command](run))
        assert "settings.json does not hold the settings of a run: " in err
        assert name in err or "--" + name.replace("_", "-") in err
        assert len(err) < 500
        assert contents(run) == before

    @pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", NESTED, '{"preset": "tiny"}', '{"steps": "x"}', "9" * 5000], ids=shown)
    def test_another_text(self, run, refused, command, text):
        (run / "settings.json").write_text(text)
        assert "settings.json does not hold the settings of a run: " in refused(*COMMANDS[command](run))

    def test_a_missing_preset_is_named_with_those_there_are(self, run, refused, command):
        change_json(run / "settings.json", preset="gone")
        assert "there is no preset 'gone', only tiny" in refused(*COMMANDS[command](run))


BAD_METRICS = [
    "", "x", "3", "null", "[]", NESTED, '{"step": 3, "loss": ' + "9" * 5000 + "}", '{"loss": 3.0}', "\\ud800",
    *(json.dumps({"step": 3, "loss": loss}) for loss in ("x", [1], {}, True, HUGE, float("nan"), float("-inf"), 1e300)),
    *(json.dumps({"step": step, "loss": 3.0}) for step in ("3", None, 3.5, -1, True, [3], HUGE)),
    *(json.dumps({"step": 3, "loss": 3.0, name: "x"}) for name in ("val_loss", "grad_norm", "lr", "tokens_per_s", "step_ms", "gap_share")),
]  # fmt: skip
BAD_HISTORY = [
    "x", "3", NESTED,
    *(
        json.dumps({"step": 1, "scale": scale, "amax": [1.0] * 12})
        for scale in (None, 3, "x" * 12, [], [1.0] * 11, ["x"] * 12, [HUGE] * 12)
    ),
    *(json.dumps({"step": step, "scale": [1.0] * 12, "amax": [1.0] * 12}) for step in ("3", None, -1, [])),
]  # fmt: skip
BAD_HEADERS = [
    "x", "{}", "3", NESTED, *(json.dumps({"slots": slots}) for slots in (5, None, "ab", [["a"]], [3], ["a", "a"], {"a": 1}, ["\ud800"]))
]  # fmt: skip


class TestReport:
    @pytest.mark.parametrize("line", BAD_METRICS, ids=shown)
    def test_a_line_of_metrics(self, reported, run, line):
        replace_line(run / "metrics.jsonl", 2, line)
        out, values = reported()
        assert "state            finished, step 6 of 6" in out
        if line:
            assert "Damaged: metrics.jsonl: 1 line could not be read and is left out." in out
            assert values["damaged"] == ["metrics.jsonl: 1 line could not be read and is left out."]

    def test_all_lines_of_metrics(self, reported, run):
        lines = [line for line in BAD_METRICS if line]
        (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        out, values = reported()
        assert f"metrics.jsonl: {len(lines)} lines could not be read and are left out." in out
        assert values["step"] == 0
        assert not values["missing"]

    @pytest.mark.parametrize("line", BAD_HISTORY, ids=shown)
    def test_a_line_of_the_slot_history(self, reported, run, line):
        replace_line(run / "slots_history.jsonl", 2, line)
        assert "Damaged: slots_history.jsonl: 1 line could not be read" in reported()[0]
        curves = load_slot_curves(RunFolder(run))
        assert curves is not None
        assert curves.steps == [1, 3, 4, 5, 6]

    @pytest.mark.parametrize("line", BAD_HEADERS, ids=shown)
    def test_the_first_line_of_the_slot_history(self, reported, run, line):
        replace_line(run / "slots_history.jsonl", 0, line)
        out, values = reported()
        assert "Damaged: slots_history.jsonl: its first line does not name the slots" in out
        assert not values["missing"]

    def test_a_slot_history_without_its_first_line(self, reported, run):
        file = run / "slots_history.jsonl"
        file.write_text("".join(file.read_text().splitlines(keepends=True)[1:]))
        assert "Damaged: slots_history.jsonl: its first line does not name the slots" in reported()[0]

    @pytest.mark.parametrize("value", [3, "x", None, [], {"bigram": "x"}, {"bigram": None}, {"bigram": float("nan")}, {}])
    def test_the_quality_of_the_summary(self, reported, run, value):
        change_json(run / "summary.json", quality=value)
        out, values = reported()
        assert "Damaged: summary.json: quality cannot be read." in out
        assert values["bigram_loss"] is None
        assert values["wall_s"] > 0

    @pytest.mark.parametrize("name", ["wall_s", "peak_memory_bytes", "device", "mode"])
    @pytest.mark.parametrize("value", [None, [3], {}, "\ud800", HUGE, -1, float("inf"), True], ids=shown)
    def test_a_value_of_the_summary(self, reported, run, name, value):
        change_json(run / "summary.json", **{name: value})
        out, values = reported()
        assert f"Damaged: summary.json: {name} cannot be read." in out
        assert values[name] is None

    @pytest.mark.parametrize("name", ["slot", "scale", "last_amax", "saturated", "underflowed", "num_nonfinite"])
    @pytest.mark.parametrize("value", [None, [], HUGE], ids=shown)
    def test_a_slot(self, reported, run, name, value):
        rows = json.loads((run / "slots.json").read_text())
        rows[3][name] = value
        (run / "slots.json").write_text(json.dumps(rows))
        out, values = reported()
        assert "Damaged: slots.json: 1 slot could not be read" in out
        assert len(values["slots"]) == 11

    @pytest.mark.parametrize("name", PIECES)
    @pytest.mark.parametrize(
        "content", [b"3\n[]\nnull\n", b"\xff{\n", b'{"step": 1}\n{"step": "x"}\n', b"null\n", NESTED.encode() + b"\n"], ids=shown
    )
    def test_other_bytes(self, reported, run, name, content):
        (run / name).write_bytes(content)
        out, values = reported()
        assert "6" in out
        assert all(damage.startswith(name) for damage in values["damaged"])
        assert values["damaged"] or name == "summary.json"

    @pytest.mark.parametrize("name", PIECES)
    def test_a_folder_in_its_place(self, reported, run, name):
        make_folder(run / name)
        out, values = reported()
        assert f"Damaged: {name} cannot be read: Is a directory." in out
        assert not values["missing"]

    def test_an_empty_log_is_not_damaged(self, reported, run):
        for name in ("metrics.jsonl", "slots_history.jsonl"):
            (run / name).write_text("")
        _, values = reported()
        assert values["damaged"] == []
        assert len(values["missing"]) == 2

    def test_what_is_left_is_drawn(self, run, capsys):
        for line in (line for line in BAD_METRICS if line):
            (run / "metrics.jsonl").write_text((run / "metrics.jsonl").read_text() + line + "\n")
        for column in ([float("inf")] * 12, [float("nan")] * 12, [0.0] * 12, [-1.0] * 12, [1e99] * 12):
            line = json.dumps({"step": 7, "scale": column, "amax": column})
            (run / "slots_history.jsonl").write_text((run / "slots_history.jsonl").read_text() + line + "\n")
        assert main(["report", str(run)]) == 0
        assert f"{sum(map(bool, BAD_METRICS))} lines could not be read" in capsys.readouterr().out
        assert (run / "report.png").is_file()
        assert len(read_history(run / "slots_history.jsonl").rows) == 11


class TestResume:
    def resume(self, run):
        return main(["train", "--resume", "--out", str(run), "--steps", "7"])

    @pytest.mark.parametrize("line", BAD_METRICS, ids=shown)
    def test_a_line_of_metrics_does_not_hinder(self, run, line):
        replace_line(run / "metrics.jsonl", 2, line)
        folder = RunFolder(run)
        folder.drop_rows_after(4)
        assert [row["step"] for row in folder.read_metrics() if "loss" in row] == [1, 3, 4]

    @pytest.mark.parametrize("line", [*BAD_HEADERS, json.dumps({"slots": ["another"]}), json.dumps({"step": 1}), ""], ids=shown)
    def test_a_history_without_names_begins_anew(self, run, line):
        folder = RunFolder(run)
        names = read_history(folder.slots_history_file).slots
        replace_line(folder.slots_history_file, 0, line)
        folder.drop_rows_after(4)
        folder.append_slot_history(names, [{"step": 5, "scale": [1.0] * 12, "amax": [1.0] * 12}])
        history = read_history(folder.slots_history_file)
        assert (history.slots, [row["step"] for row in history.rows], history.damage) == (names, [5], None)

    @pytest.mark.parametrize("line", BAD_HISTORY, ids=shown)
    def test_a_line_of_the_history_does_not_hinder(self, run, line):
        folder = RunFolder(run)
        replace_line(folder.slots_history_file, 2, line)
        folder.drop_rows_after(4)
        assert [row["step"] for row in read_history(folder.slots_history_file).rows] == [1, 3, 4]

    @pytest.mark.parametrize("wall_s", ["x", None, [], HUGE], ids=shown)
    def test_a_run_with_all_damage_goes_on(self, run, wall_s):
        for number, step in ((1, "3"), (2, None), (3, HUGE)):
            change_line(run / "metrics.jsonl", number, step=step)
            change_line(run / "slots_history.jsonl", number + 1, step=step)
        change_line(run / "metrics.jsonl", 4, loss="x")
        replace_line(run / "slots_history.jsonl", 0, "{}")
        change_json(run / "summary.json", wall_s=wall_s, quality=3)
        assert self.resume(run) == 0
        history = read_history(run / "slots_history.jsonl")
        assert [row["step"] for row in history.rows] == [7]
        assert RunFolder(run).read_summary()["wall_s"] > 0

    @pytest.mark.parametrize("name", [*PIECES, "loss.png"])
    def test_a_folder_in_a_files_place_is_refused_first(self, run, refused, name):
        make_folder(run / name)
        before = contents(run)
        assert f"{run / name} is not a file. Move it away" in refused("train", "--resume", "--out", str(run), "--steps", "7")
        assert contents(run) == before

    def test_tensorboard_in_a_files_place_is_refused_first(self, run, refused):
        (run / "tensorboard").write_text("")
        before = contents(run)
        assert f"{run / 'tensorboard'} is no folder" in refused("train", "--resume", "--tensorboard", "--out", str(run), "--steps", "7")
        assert contents(run) == before


@pytest.mark.parametrize("command", ["resume", "profile"])
@pytest.mark.parametrize(
    ("name", "value"),
    [("step", "x"), ("step", -3), ("step", None), ("step", 1.0), ("format", "1"), ("shape", torch.ones(2)), ("corpus", torch.ones(2)),
     ("trainer", 3), ("trainer", None), ("trainer", {}), ("trainer/model", 3), ("trainer/model", {}), ("trainer/model/embed.weight", None),
     ("trainer/counts", {"steps_taken": float("inf")}), ("trainer/quantization_state", {"recipe": 3}), ("trainer/optimizer", [])],
)  # fmt: skip
def test_a_value_of_the_checkpoint(run, capsys, command, name, value):
    file = run / "checkpoint.pt"
    checkpoint = torch.load(file, weights_only=True)
    *parents, last = name.split("/")
    place = checkpoint
    for parent in parents:
        place = place[parent]
    place[last] = value
    torch.save(checkpoint, file)
    before = contents(run)
    assert main(COMMANDS[command](run)) == 2
    err = capsys.readouterr().err
    assert "checkpoint.pt" in err
    assert err.count("\n") == 1
    assert contents(run) == before


class TestPlaces:
    @pytest.mark.parametrize(
        "args",
        [("report", LONG), ("report", "a/" * 3000), ("profile", LONG), ("train", "--resume", "--out", LONG), ("train", "--out", LONG),
         ("train", "--out", f"{LONG}/{LONG}"), ("profile", "nano", "--out", LONG)],
        ids=lambda args: " ".join(args)[:20],
    )  # fmt: skip
    def test_a_name_that_is_too_long(self, refused, tmp_path, monkeypatch, args):
        monkeypatch.chdir(tmp_path)
        assert "File name too long" in refused(*args)
        assert not list(tmp_path.iterdir())

    def test_a_picture_with_a_name_that_is_too_long(self, run, refused):
        assert "File name too long. Choose another --out." in refused("report", str(run), "--out", f"{LONG}.png")

    @pytest.mark.parametrize("command", COMMANDS)
    def test_a_file_is_called_a_file(self, tmp_path, refused, command):
        (tmp_path / "x.txt").write_text("")
        assert "x.txt is a file. Give the folder of a" in refused(*COMMANDS[command](tmp_path / "x.txt"))

    def test_a_temporary_file_is_not_named(self, tmp_path):
        (tmp_path / "summary.json").mkdir()
        with pytest.raises(OSError) as caught:
            RunFolder(tmp_path).save_summary({})
        assert caught.value.filename == str(tmp_path / "summary.json")
        assert ".tmp" not in str(caught.value)
        with pytest.raises(OSError) as caught, replacing(tmp_path / "no" / "file") as temporary:
            temporary.write_text("")
        assert caught.value.filename == str(tmp_path / "no" / "file")
        assert [file.name for file in tmp_path.iterdir()] == ["summary.json"]


class TestProfileOut:
    @pytest.fixture(autouse=True)
    def not_measured(self, monkeypatch):
        monkeypatch.setattr(profile_job, "build_trainer", lambda *args: pytest.fail("measured before the output was looked at"))

    @pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc")
    def test_a_folder_that_cannot_be_made(self, refused):
        assert "/proc/x cannot be written" in refused("profile", "nano", "--out", "/proc/x")

    @pytest.mark.parametrize("name", ["trace.json", "node_map.json", "profile.png"])
    def test_a_folder_in_a_files_place(self, tmp_path, refused, name):
        (tmp_path / "profile.json").write_text("{}")
        (tmp_path / name).mkdir()
        assert f"{tmp_path / name} is no file that can be written" in refused("profile", "nano", "--out", str(tmp_path))

    def test_looking_leaves_nothing_behind(self, tmp_path):
        profile_job.plan_profile("nano", {}, 1, tmp_path / "a" / "b")
        (tmp_path / "c").mkdir()
        profile_job.plan_profile("nano", {}, 1, tmp_path / "c")
        assert [file.name for file in tmp_path.rglob("*")] == ["c"]

    def test_a_mode_that_the_help_does_not_name(self, tmp_path):
        with pytest.raises(InputError, match="--mode must be one of graph, eager, got 'auto'"):
            profile_job.plan_profile("nano", {"mode": "auto"}, 1, tmp_path)
