"""What a run shows and records while it trains: numbers, slots over time, the time between replays."""

import io
import json
import math
import time

import pytest
import torch
from rich.console import Console
from training import HISTORY, make_batch, make_net

import graphrt
from graphrt import ranges
from graphrt.progress import MetricsLog, make_progress
from graphrt.runfolder import RunFolder
from graphrt.slothistory import SlotHistory, load_slot_curves
from graphrt.step import StepResult
from graphrt.stepclock import ReplayClock


def make_result(loss=2.0, norm=0.5, skipped=False):
    return StepResult(torch.tensor(loss), torch.tensor(norm), torch.tensor(skipped))


def make_console(width=100, *, is_terminal=True):
    return Console(file=io.StringIO(), width=width, force_terminal=is_terminal, color_system=None)


def printed(console):
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.fixture
def rows():
    return []


@pytest.fixture
def make_log(rows):
    """A log of ten steps of 100 tokens, with the bar it moves, not started."""

    def call(console=None, **options):
        progress = make_progress(console or make_console())
        return MetricsLog(rows.extend, progress, 0, 10, 100, **options), progress

    return call


class TestNumbers:
    def test_a_row_has_what_was_measured(self, make_log, rows):
        log, _ = make_log()
        log.add(1, 0.1, make_result())
        time.sleep(0.02)
        log.add(2, 0.1, make_result(skipped=True))
        log.flush()
        assert [row["step"] for row in rows] == [1, 2]
        assert [row["skipped"] for row in rows] == [False, True]
        assert rows[0]["step_ms"] >= 10
        assert rows[0]["tokens_per_s"] == pytest.approx(100e3 / rows[0]["step_ms"], rel=0.01)
        assert "gap_share" not in rows[0]

    def test_the_line_has_all_of_them(self, make_log):
        log, progress = make_log(num_skipped=3)
        log.add(1, 0.1, make_result(skipped=True))
        log.flush()
        for words in ("loss 2.885 bits", "grad norm 0.5", "tokens/s", "ms/step", "skipped 4"):
            assert words in progress.numbers
        assert "gap" not in progress.numbers

    def test_a_loss_that_is_not_finite_is_null_in_the_file_and_said(self, make_log, rows):
        log, progress = make_log()
        log.add(1, 0.1, make_result(loss=float("nan"), norm=float("inf"), skipped=True))
        log.flush()
        json.dumps(rows, allow_nan=False)
        assert "loss not finite" in progress.numbers

    @pytest.mark.parametrize("width", [40, 80, 160])
    def test_the_view_fits_the_terminal(self, make_log, width):
        console = make_console(width)
        log, progress = make_log(console)
        log.add(1, 0.1, make_result())
        log.flush()
        console.print(progress.get_renderable())
        lines = printed(console).splitlines()
        assert max(map(len, lines)) <= width
        assert len(lines) <= (2 if width >= 80 else 4)

    def test_a_file_gets_the_numbers_at_each_evaluation(self, make_log):
        console = make_console(is_terminal=False)
        log, _ = make_log(console)
        log.add(1, 0.1, make_result())
        log.flush()
        log.add_evaluation(1, 1.5 * math.log(2), "bits per byte")
        first, second = printed(console).splitlines()
        assert first == "step 1: validation 1.500 bits per byte"
        assert "ms/step" in second

    def test_time_in_a_pause_is_nobodys(self, make_log, rows):
        log, _ = make_log()
        log.add(1, 0.1, make_result())
        with log.paused():
            assert len(rows) == 1
            time.sleep(0.5)
        log.add(2, 0.1, make_result())
        log.flush()
        assert rows[1]["step_ms"] < 400


class Event:
    """A timing event of a device whose clock the test sets."""

    def __init__(self, ms):
        self.ms = ms

    def elapsed_time(self, end):
        return end.ms - self.ms


@pytest.fixture
def clock():
    """A clock, and a function that runs replays given as (start, end) in ms."""
    times = []
    clock = ReplayClock(lambda: Event(times.pop(0)))

    def replay(*spans):
        for span in spans:
            times.extend(span)
            with ranges.STEP, ranges.REPLAY:
                pass

    with ranges.listening(clock):
        yield clock, replay
    assert not times


class TestReplayClock:
    def test_the_share_is_of_the_time_from_first_start_to_last_end(self, clock):
        clock, replay = clock
        replay((0, 8), (10, 18), (20, 28))
        assert clock.read() == pytest.approx(4 / 28)

    def test_a_read_goes_on_where_the_last_one_ended(self, clock):
        clock, replay = clock
        replay((0, 10), (10, 20))
        assert clock.read() == 0
        replay((25, 30))
        assert clock.read() == pytest.approx(5 / 10)

    def test_a_restart_leaves_out_what_came_between(self, clock):
        clock, replay = clock
        replay((0, 10), (10, 20))
        clock.read()
        clock.restart()
        replay((1000, 1010), (1010, 1020))
        assert clock.read() == 0

    def test_one_replay_alone_says_nothing(self, clock):
        clock, replay = clock
        assert clock.read() is None
        replay((0, 10))
        assert clock.read() is None
        replay((12, 20))
        assert clock.read() == pytest.approx(0.2)

    def test_steps_that_are_not_replayed_leave_no_marks(self, clock):
        clock, _ = clock
        with ranges.STEP, ranges.WARMUP:
            pass
        assert clock.read() is None

    def test_the_log_records_and_shows_it(self, clock, make_log, rows):
        clock, replay = clock
        log, progress = make_log(clock=clock)
        replay((0, 9), (10, 19), (20, 29))
        log.add(1, 0.1, make_result())
        log.flush()
        assert rows[0]["gap_share"] == pytest.approx(2 / 29, abs=1e-4)
        assert "gap 6.9%" in progress.numbers

    @pytest.mark.gpu
    def test_a_captured_trainers_replays_are_timed(self):
        model = make_net(device="cuda")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        clock = ReplayClock()
        with (
            graphrt.Trainer(model, optimizer, lambda model, x: model(x).square().mean()) as trainer,
            ranges.listening(clock),
        ):
            for step in range(6):
                trainer.step(make_batch(step, device="cuda"))
            time.sleep(0.2)
            trainer.step(make_batch(6, device="cuda"))
            torch.cuda.synchronize()
            assert 0.5 < (clock.read() or 0) < 1


@pytest.fixture
def state():
    model = make_net(1)
    state = graphrt.quantization_state(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with graphrt.Trainer(model, optimizer, lambda model, x: model(x).square().mean()) as trainer:
        yield state, trainer


class TestSlotHistory:
    def test_values_are_those_after_each_step_that_is_due(self, tmp_path, state):
        state, trainer = state
        folder = RunFolder(tmp_path)
        history = SlotHistory(folder, state, every=2, num_steps=5)
        expected = {}
        for step in range(1, 6):
            trainer.step(make_batch(step))
            history.take(step)
            expected[step] = {slot: (float(state.scale(slot)), float(state.amax_history(slot)[HISTORY - 1])) for slot in state.slots}
            if step == 3:
                history.flush()
        history.flush()
        curves = load_slot_curves(folder)
        assert curves is not None
        assert curves.steps == [2, 4, 5]
        assert curves.slots == state.slots
        for slot in state.slots:
            assert curves.scale[slot] == pytest.approx([expected[step][slot][0] for step in curves.steps], rel=1e-5)
            assert curves.amax[slot] == pytest.approx([expected[step][slot][1] for step in curves.steps], rel=1e-5)
            assert len(set(curves.amax[slot])) == 3

    def test_taking_reads_nothing_on_the_host(self, tmp_path, state, monkeypatch):
        state, _ = state
        history = SlotHistory(RunFolder(tmp_path), state, every=1, num_steps=9)
        monkeypatch.setattr(torch.Tensor, "tolist", lambda self: pytest.fail("a host read"))
        monkeypatch.setattr(torch.Tensor, "item", lambda self: pytest.fail("a host read"))
        history.take(1)
        assert not (tmp_path / "slots_history.jsonl").exists()

    def test_rows_after_a_step_are_dropped_and_the_names_stay(self, tmp_path, state):
        state, _ = state
        folder = RunFolder(tmp_path)
        for first in (1, 3):
            history = SlotHistory(folder, state, every=1, num_steps=9)
            for step in range(first, first + 4):
                history.take(step)
            history.flush()
            folder.drop_rows_after(first + 1)
        curves = load_slot_curves(folder)
        assert curves is not None
        assert curves.steps == [1, 2, 3, 4]
        assert (tmp_path / "slots_history.jsonl").read_text().count("slots") == 1

    def test_there_are_none_without_a_file(self, tmp_path):
        assert load_slot_curves(RunFolder(tmp_path)) is None
