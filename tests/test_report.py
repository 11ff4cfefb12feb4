"""`graphrt report`: what it shows of a run, finished or not, and what it refuses."""

import builtins
import json
import math
import shutil

import pytest

from graphrt.cli import main
from graphrt.data import load_default_text
from graphrt.presets import PRESETS, ModelShape, Preset
from graphrt.runfolder import RunFolder
from graphrt.runreport import choose_slots, collect_report
from graphrt.settings import InputError
from graphrt.slothistory import load_slot_curves
from graphrt.summary import SlotRow

NANO = Preset(ModelShape(1, 32, 2, 48, 256), seq_len=16, batch_size=4, steps=6, lr=3e-3, about="tests")
NUM_SLOTS = 12
PNG = b"\x89PNG"


@pytest.fixture(autouse=True)
def nano(monkeypatch):
    monkeypatch.setitem(PRESETS, "nano", NANO)
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr("graphrt.runplot._DPI", 20)  # draws sooner


@pytest.fixture(autouse=True)
def drawing(request, monkeypatch):
    """A picture takes seconds: drawn where one is looked at."""
    if request.node.get_closest_marker("draws") is None:
        monkeypatch.setattr("graphrt.runreport.draw_run", lambda *args: None)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run, made once."""
    folder = tmp_path_factory.mktemp("made")
    text = folder / "text.txt"
    text.write_bytes(load_default_text().tokens[:4000].tobytes())
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PRESETS, "nano", NANO)
        assert main(["train", "--preset", "nano", "--text", str(text), "--out", str(folder / "run"), "--eval-every", "3"]) == 0
    return folder / "run"


@pytest.fixture
def run(finished, tmp_path):
    """A copy of it to damage."""
    return shutil.copytree(finished, tmp_path / "run")


@pytest.fixture
def report(run, capsys):
    """Runs `graphrt report` on the copy; what it printed."""

    def call(*args, code=0):
        capsys.readouterr()
        assert main(["report", str(run), *args]) == code
        out, err = capsys.readouterr()
        return err if code else out

    return call


def change_json(file, **changes):
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


class TestShown:
    def test_the_summary_has_what_the_run_measured(self, report, run):
        out = report()
        rows = RunFolder(run).read_metrics()
        best = min(row["val_loss"] for row in rows if "val_loss" in row)
        for words in (
            "finished, step 6 of 6", "nano", "fp8", "4 x 16 = 64 tokens a step", "cpu, eager mode", "bits per byte",
            f"best {best / math.log(2):.3f}", "bigram baseline", "tokens/s", "ms (median)", "skipped steps    0", "GiB", "▁", "█",
            "sampled: one step, eager", "blocks.0.", f"Drawn: {run / 'report.png'}",
        ):  # fmt: skip
            assert words in out, words
        assert "Not there" not in out
        assert "Damaged" not in out

    def test_json_is_one_object_with_the_same(self, report, run):
        values = json.loads(report("--json"))
        rows = [row for row in RunFolder(run).read_metrics() if "loss" in row]
        assert values["step"] == len(rows) == 6
        assert values["first_loss"] == rows[0]["loss"]
        assert values["last_loss"] == pytest.approx(sum(row["loss"] for row in rows[3:]) / 3)  # not of the first steps too
        assert values["step_ms"] > 0
        assert values["gap_share"] is None
        assert values["wall_s"] > 0
        assert values["peak_memory_bytes"] > 1 << 20
        assert values["is_finished"]
        assert len(values["slots"]) == NUM_SLOTS
        assert values["missing"] == values["damaged"] == []

    def test_slots_come_worst_first(self, report):
        slots = json.loads(report("--json"))["slots"]
        shares = [slot["saturated"] + slot["underflowed"] for slot in slots]
        assert shares == sorted(shares, reverse=True)

    def test_patterns_choose_slots(self, report):
        slots = json.loads(report("--json", "--slot", "*.w2.input", "--slot", "blocks.0.attn.*.grad_output"))["slots"]
        names = {slot["slot"] for slot in slots}
        assert names == {"blocks.0.ffn.w2.input", "blocks.0.attn.qkv.grad_output", "blocks.0.attn.out.grad_output"}

    def test_all_chosen_slots_are_shown(self, report, monkeypatch):
        monkeypatch.setattr("graphrt.summary._NUM_SLOTS_SHOWN", 5)
        assert "and 7 more in" in (out := report())
        assert "--slot '*' shows them here" in out
        assert "more in" not in report("--slot", "*")

    @pytest.mark.slow
    @pytest.mark.draws
    @pytest.mark.parametrize(("name", "start"), [("a.pdf", b"%PDF"), ("a.PNG", PNG)])
    def test_the_picture_goes_where_it_is_asked(self, report, run, tmp_path, name, start):
        report("--out", str(tmp_path / name))
        assert (tmp_path / name).read_bytes().startswith(start)
        assert not (run / "report.png").exists()

    @pytest.mark.draws
    def test_skipped_steps_are_counted_and_drawn(self, report, run):
        rows = RunFolder(run).read_metrics()
        rows[2].update(skipped=True, grad_norm=None, loss=None)
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        assert "skipped steps    1" in report("--out", str(run / "report.svg"))
        assert (run / "report.svg").read_bytes().startswith(b"<?xml")
        assert "grad" in (run / "report.svg").read_text()

    def test_gaps_are_shown_where_they_were_measured(self, report, run):
        rows = [{**row, "gap_share": 0.25} for row in RunFolder(run).read_metrics()]
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        assert "between replays  25.0% of the device's time" in report()


class TestUnfinished:
    def test_a_run_in_progress_says_how_far_it_is(self, report, run):
        change_json(run / "settings.json", steps=99)
        assert "not finished, step 6 of 99, last written" in report()

    @pytest.mark.draws
    def test_a_run_that_has_just_begun(self, report, run):
        for file in run.iterdir():
            if file.name != "settings.json":
                file.unlink()
        out = report()
        assert "not finished, step 0 of 6" in out
        for name in ("metrics.jsonl", "summary.json", "slots.json", "slots_history.jsonl"):
            assert f"Not there: {name}" in out
        assert (run / "report.png").read_bytes().startswith(PNG)

    @pytest.mark.parametrize("name", ["metrics.jsonl", "summary.json", "slots.json", "slots_history.jsonl"])
    def test_a_missing_piece_is_named_alone(self, report, run, name):
        (run / name).unlink()
        missing = json.loads(report("--json"))["missing"]
        assert len(missing) == 1
        assert missing[0].startswith(name)

    def test_a_line_being_written_is_left_out(self, report, run):
        for name in ("metrics.jsonl", "slots_history.jsonl"):
            file = run / name
            file.write_bytes(file.read_bytes()[:-10])
        assert json.loads(report("--json"))["best_val_step"] == 3

    def test_a_run_without_fp8_has_no_slots(self, report, run):
        change_json(run / "settings.json", precision="bf16")
        for name in ("slots.json", "slots_history.jsonl"):
            (run / name).unlink()
        assert "Not there: slots: a run in bf16 has none." in report()
        assert "has recorded no FP8 slots" in report("--slot", "*", code=2)

    @pytest.mark.draws
    def test_without_matplotlib_it_says_what_to_install(self, report, run, monkeypatch):
        real_import = builtins.__import__

        def import_without_matplotlib(name, *args, **kwargs):
            if name.startswith("matplotlib"):
                raise ImportError(name)
            return real_import(name, *args, **kwargs)

        monkeypatch.setattr(builtins, "__import__", import_without_matplotlib)
        out = report()
        assert "pip install 'graphrt[plot]'" in out
        assert "finished, step 6 of 6" in out
        assert not (run / "report.png").exists()

    @pytest.mark.draws
    def test_a_folder_that_cannot_be_written_costs_the_picture_only(self, report, run):
        (run / "report.png").mkdir()
        out = report()
        assert "Not there: the picture" in out
        assert "finished, step 6 of 6" in out


class TestRefusals:
    """One line on stderr, exit code 2, nothing written."""

    def check(self, err, words):
        assert err.startswith("graphrt: ")
        assert err.count("\n") == 1
        assert words in err

    def test_no_such_folder(self, tmp_path, capsys):
        assert main(["report", str(tmp_path / "nothing")]) == 2
        self.check(capsys.readouterr().err, "There is no folder")

    def test_a_folder_without_a_run(self, tmp_path, capsys):
        assert main(["report", str(tmp_path)]) == 2
        self.check(capsys.readouterr().err, "is no run folder: it has no settings.json")
        assert not list(tmp_path.iterdir())

    def test_no_folder_at_all(self, capsys):
        assert main(["report"]) == 2
        self.check(capsys.readouterr().err, "Run graphrt report --help")

    def test_damaged_settings(self, report, run):
        (run / "settings.json").write_text("[]")
        self.check(report(code=2), "settings.json does not hold the settings")

    def test_a_pattern_that_matches_nothing(self, report, run):
        self.check(report("--slot", "*.w2.*", "--slot", "w9*", code=2), "--slot w9* matches none of the run's 12 slots")
        assert not (run / "report.png").exists()

    @pytest.mark.draws
    def test_a_picture_of_another_kind(self, report, tmp_path):
        self.check(report("--out", str(tmp_path / "a.txt"), code=2), "must end in .png, .svg, .pdf")

    @pytest.mark.draws
    def test_a_picture_in_no_folder(self, report, tmp_path):
        self.check(report("--out", str(tmp_path / "no" / "a.png"), code=2), "cannot be written")


def test_without_a_sample_the_slots_that_moved_most_are_chosen(run):
    folder = RunFolder(run)
    (run / "slots.json").unlink()
    rows = [json.loads(line) for line in folder.slots_history_file.read_text().splitlines()]
    names = rows[0]["slots"]
    for step, row in enumerate(rows[1:]):
        row["amax"] = [1.0] * NUM_SLOTS
        row["amax"][7] = 10.0**step
    (run / "slots_history.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    chosen = choose_slots(collect_report(folder), load_slot_curves(folder), ())
    assert chosen[0] == names[7]


def test_slots_are_chosen_from_the_sample_where_no_history_is(run):
    (run / "slots_history.jsonl").unlink()
    report = collect_report(RunFolder(run))
    assert choose_slots(report, None, ("*.w13.weight",)) == ["blocks.0.ffn.w13.weight"]
    assert all(isinstance(row, SlotRow) for row in report.slots)
    with pytest.raises(InputError):
        choose_slots(report, None, ("nothing",))
