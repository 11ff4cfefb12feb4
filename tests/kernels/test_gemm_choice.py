"""Which algorithm an FP8 product runs with: when it is timed, what is kept, and when torch's call is taken instead."""

import json
import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from graphrt.capture.recorder import compare, record
from graphrt.kernels import gemm, gemm_choice, scaled_mm
from graphrt.kernels.cublaslt import CublasLtError
from graphrt.kernels.cublaslt_gemm import Algorithm, GemmKey
from graphrt.kernels.gemm_cache import Choice, ChoiceFile, choice_path
from graphrt.kernels.gemm_choice import GemmChoices, Operands, choose, time_algorithms

E4M3 = torch.float8_e4m3fn
KEY = GemmKey(-1, 32, 48, 64, E4M3, E4M3, torch.bfloat16, fast_accum=True, has_bias=False)
ALGORITHMS = [Algorithm(bytes([i] * 64), 16 * i) for i in range(4)]


def make_operands(m: int = 32, n: int = 48, k: int = 64) -> Operands:
    generator = torch.Generator().manual_seed(0)
    a, b_t = (torch.randn(rows, k, generator=generator).to(E4M3) for rows in (m, n))
    return Operands(aligned(a), torch.tensor([0.5]), aligned(b_t), torch.tensor([0.25]), None)


def aligned(x: Tensor) -> Tensor:
    """A copy at an address that is a multiple of 256."""
    storage = torch.empty(x.numel() + 256, dtype=x.dtype)
    start = -storage.data_ptr() % 256 // x.element_size()
    return storage[start : start + x.numel()].view(x.shape).copy_(x)


OPERANDS = make_operands()


class Clock:
    """Times given by hand, one list a measurement; notes what was timed."""

    def __init__(self, *times: list[float]) -> None:
        self.times, self.asked = list(times), []

    def __call__(self, algorithms: Sequence[Algorithm]) -> list[float]:
        self.asked.append([algorithm.data[0] for algorithm in algorithms])
        return self.times.pop(0)


class FakeGemm:
    """Proposes `ALGORITHMS`, multiplies by the reference."""

    def __init__(self, accepted: bool = True) -> None:
        self.accepted, self.used = accepted, []

    def candidates(self, num: int) -> list[Algorithm]:
        return ALGORITHMS[:num]

    def accepts(self, algorithm: Algorithm) -> bool:
        return self.accepted

    def multiply(self, algorithm: Algorithm, a: Any, a_inv: Any, b_t: Any, b_inv: Any, bias: Any, out: Tensor) -> None:
        self.used.append(algorithm)
        out.copy_(gemm._reference(a, a_inv, b_t, b_inv, out.dtype, bias))


class Rig:
    """Choices with a `FakeGemm` and a clock set by hand: ``winner`` is fastest."""

    def __init__(self, path: Path | None, winner: int = 2, gemm: Any = None, error: Exception | None = None) -> None:
        self.gemm, self.winner, self.error, self.num_measured = gemm or FakeGemm(), winner, error, 0
        self.choices = GemmChoices(self._open, lambda index: "a GPU", self._measure, lambda: path)

    def _open(self, key: GemmKey) -> Any:
        if self.error is not None:
            raise self.error
        return self.gemm

    def _measure(self, gemm: Any, key: GemmKey, operands: Operands, algorithms: Sequence[Algorithm]) -> list[float]:
        self.num_measured += 1
        return [5.0 if algorithm == ALGORITHMS[self.winner] else 10.0 for algorithm in algorithms]

    def find(self, key: GemmKey = KEY) -> Algorithm | None:
        chosen = self.choices.find(key, OPERANDS)
        return None if chosen is None else chosen.algorithm

    def choose(self, key: GemmKey = KEY) -> Algorithm | None:
        with self.choices.choosing():
            return self.find(key)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "folder" / "choices.json"


@pytest.fixture
def rig(path):
    return Rig(path)


class TestChoosing:
    @pytest.mark.parametrize(
        ("times", "chosen", "asked"),
        [
            ([[10, 9, 8, 9], [10, 8]], 2, [[0, 1, 2, 3], [0, 2]]),
            ([[10, 11, 12, 13]], None, [[0, 1, 2, 3]]),
            ([[10, 9.9, 10, 10]], None, [[0, 1, 2, 3]]),  # within the noise
            ([[10, 10, 10, 8], [10, 9.9]], None, [[0, 1, 2, 3], [0, 3]]),  # won by luck
        ],
    )
    def test_the_winner_has_to_win_clearly_and_twice(self, times, chosen, asked):
        clock = Clock(*times)
        choice = choose(ALGORITHMS, clock)
        assert choice.algorithm == (None if chosen is None else ALGORITHMS[chosen])
        assert clock.asked == asked
        assert choice.chosen_us <= choice.first_us == 10

    def test_a_single_candidate_is_torchs(self):
        assert choose(ALGORITHMS[:1], Clock([10.0])).algorithm is None


class TestWhen:
    def test_only_inside_choosing(self, rig):
        assert rig.find() is None
        assert rig.num_measured == 0
        assert rig.choose() == ALGORITHMS[2]
        assert rig.find() == ALGORITHMS[2]
        assert rig.num_measured == 2  # all, then the best two

    def test_once_for_each_key(self, rig):
        other = KEY._replace(out=torch.float32)
        with rig.choices.choosing():
            for _ in range(3):
                rig.find()
                rig.find(other)
        assert rig.choices.num_timed == 2

    def test_a_product_that_torch_does_best_is_timed_once_too(self, path):
        rig = Rig(path, winner=0)
        assert rig.choose() is None
        assert rig.choose() is None
        assert rig.choices.num_timed == 1

    def test_never_under_a_capture(self, rig, monkeypatch):
        monkeypatch.setattr(gemm_choice, "is_capturing", lambda: True)
        assert rig.choose() is None
        assert rig.num_measured == 0
        monkeypatch.setattr(gemm_choice, "is_capturing", lambda: False)
        assert rig.choose() == ALGORITHMS[2]
        monkeypatch.setattr(gemm_choice, "is_capturing", lambda: True)
        assert rig.find() == ALGORITHMS[2]  # what was chosen before serves the capture

    @pytest.mark.parametrize("warn_only", [False, True])
    def test_deterministic_mode_is_torchs_and_leaves_the_key_open(self, rig, warn_only):
        torch.use_deterministic_algorithms(True, warn_only=warn_only)
        try:
            assert rig.choose() is None
        finally:
            torch.use_deterministic_algorithms(False)
        assert rig.num_measured == 0
        assert rig.choose() == ALGORITHMS[2]
        torch.use_deterministic_algorithms(True, warn_only=warn_only)
        try:
            assert rig.find() is None
        finally:
            torch.use_deterministic_algorithms(False)

    def test_another_thread_chooses_too_while_the_first_one_is_inside(self, rig):
        found = []
        with rig.choices.choosing():
            thread = threading.Thread(target=lambda: found.append(rig.find()))
            thread.start()
            thread.join()
        assert found == [ALGORITHMS[2]]

    def test_an_error_inside_ends_choosing_and_keeps_what_was_chosen(self, rig, path):
        def fail() -> None:
            with rig.choices.choosing():
                rig.find()
                raise KeyError

        with pytest.raises(KeyError):
            fail()
        assert path.exists()
        assert rig.find(KEY._replace(m=64)) is None

    def test_off_never_asks(self):
        rig = Rig(None)
        assert rig.choose() is None
        assert rig.num_measured == 0
        assert str(rig.choices) == "torch's algorithms, because GRAPHRT_GEMM_CHOICES is off"

    def test_what_was_timed_is_logged_in_one_line(self, rig, caplog):
        with caplog.at_level(logging.INFO, "graphrt"), rig.choices.choosing():
            rig.find()
            rig.find(KEY._replace(m=64))
        (line,) = caplog.messages
        assert line.startswith("FP8 GEMMs: timed 2 in ")
        assert line.endswith("2 of 2 products run with another algorithm than torch's")

    @pytest.mark.parametrize("error", [CublasLtError("cublasLtCreate returned X."), torch.OutOfMemoryError("Out of memory.\nMore.")])
    def test_what_cannot_be_timed_is_torchs_and_said_once(self, path, caplog, error):
        rig = Rig(path, error=error)
        reason = str(error).splitlines()[0]
        with caplog.at_level(logging.WARNING, "graphrt"):
            assert rig.choose() is None
            assert rig.choose(KEY._replace(m=64)) is None
        assert caplog.messages == [f"FP8 GEMMs run with torch's algorithms where no other can be timed: {reason}"]
        assert str(rig.choices) == f"0 of 2 products run with another algorithm than torch's ({reason})"
        rig.error = None
        assert rig.choose() is None  # steps to come do as this one did


class FakeEvent:
    """A CUDA event of a device on which algorithm number n takes n + 1 us, and ten times as long in the first round."""

    now_us = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at_us = FakeEvent.now_us

    def synchronize(self) -> None:
        """Nothing is late."""

    def elapsed_time(self, end: "FakeEvent") -> float:
        return (end.at_us - self.at_us) / 1e3


class TimedFake(FakeGemm):
    def multiply(self, algorithm: Algorithm, *args: Any) -> None:
        self.used.append((algorithm.data[0], args))
        is_first = [number for number, _ in self.used].count(algorithm.data[0]) == 1
        FakeEvent.now_us += (algorithm.data[0] + 1) * (10 if is_first else 1)


class TestTiming:
    @pytest.fixture(autouse=True)
    def _fake_device(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
        monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(L2_cache_size=1024))

    def test_candidates_take_turns_and_the_first_round_does_not_count(self):
        timed = TimedFake()
        assert time_algorithms(timed, KEY, OPERANDS, ALGORITHMS) == pytest.approx([1, 2, 3, 4])
        numbers = [number for number, _ in timed.used]
        assert numbers == [0, 1, 2, 3] * (len(numbers) // 4)
        assert len(numbers) // 4 == 2 + gemm_choice._MAX_ROUNDS

    def test_long_ones_are_timed_less_often(self, monkeypatch):
        monkeypatch.setattr(gemm_choice, "_BUDGET_US", 50.0)
        timed = TimedFake()
        time_algorithms(timed, KEY, OPERANDS, ALGORITHMS)
        assert len(timed.used) // 4 == 2 + 5
        monkeypatch.setattr(gemm_choice, "_BUDGET_US", 0.0)
        timed = TimedFake()
        time_algorithms(timed, KEY, OPERANDS, ALGORITHMS)
        assert len(timed.used) // 4 == 2 + gemm_choice._MIN_ROUNDS

    def test_the_operands_are_the_callers_and_the_output_is_not(self):
        timed = TimedFake()
        time_algorithms(timed, KEY, OPERANDS, ALGORITHMS[:1])
        *operands, out = timed.used[0][1]
        assert all(mine is theirs for mine, theirs in zip(operands, OPERANDS, strict=True))
        assert (out.shape, out.dtype) == ((32, 48), torch.bfloat16)


class TestFile:
    def test_a_later_process_makes_the_same_choices_and_times_nothing(self, rig, path):
        best = KEY._replace(n=64)
        rig.choose()
        rig.winner = 0
        rig.choose(best)
        later = Rig(path, winner=3)
        assert later.choose() == ALGORITHMS[2]
        assert later.choose(best) is None
        assert later.num_measured == 0

    def test_it_says_what_was_measured(self, rig, path):
        rig.choose()
        entry = json.loads(path.read_text())["machines"]["a GPU"][str(KEY)]
        assert entry == {"algorithm": "02" * 64, "workspace_bytes": 32, "first_us": 10.0, "chosen_us": 5.0}

    def test_another_machine_times_anew_and_both_are_kept(self, rig, path):
        rig.choose()
        other = ChoiceFile(path, "another GPU")
        assert other.get(str(KEY)) is None
        other.add(str(KEY), Choice(None, 1.0, 1.0))
        other.save()
        assert ChoiceFile(path, "another GPU").get(str(KEY)) == Choice(None, 1.0, 1.0)
        assert ChoiceFile(path, "a GPU").get(str(KEY)) == Choice(ALGORITHMS[2], 10.0, 5.0)

    def test_two_that_write_keep_both_choices(self, path):
        files = [ChoiceFile(path, "a GPU") for _ in range(2)]
        for i, file in enumerate(files):
            file.add(str(i), Choice(ALGORITHMS[i], 2.0, 1.0))
            file.save()
        assert [ChoiceFile(path, "a GPU").get(str(i)) for i in range(2)] == [Choice(ALGORITHMS[i], 2.0, 1.0) for i in range(2)]

    def test_an_algorithm_that_cublaslt_no_longer_accepts_is_timed_anew(self, rig, path):
        rig.choose()
        later = Rig(path, winner=3, gemm=FakeGemm(accepted=False))
        assert later.choose() == ALGORITHMS[3]
        assert ChoiceFile(path, "a GPU").get(str(KEY)) == Choice(ALGORITHMS[3], 10.0, 5.0)

    @pytest.mark.parametrize(
        "damaged",
        [
            b"", b"{", b"\xff\xfe", b"[]", b"null", b'{"format": 2, "machines": {}}', b'{"format": 1}', b'{"format": 1, "machines": []}',
            b'{"format": 1, "machines": {"a GPU": 3}}', b'{"format": 1, "machines": {"a GPU": {"KEY": {}}}}',
            b'{"format": 1, "machines": {"a GPU": {"KEY": {"algorithm": "zz", "workspace_bytes": 0, "first_us": 1, "chosen_us": 1}}}}',
            b'{"format": 1, "machines": {"a GPU": {"KEY": {"algorithm": "00", "workspace_bytes": 0, "first_us": 1, "chosen_us": 1}}}}',
            b'{"format": 1, "machines": {"a GPU": {"KEY": {"algorithm": null, "first_us": "x", "chosen_us": 1}}}}',
        ],
    )  # fmt: skip
    def test_a_damaged_file_is_ignored_and_rewritten(self, path, damaged):
        path.parent.mkdir()
        path.write_bytes(damaged.replace(b"KEY", str(KEY).encode()))
        rig = Rig(path)
        assert rig.choose() == ALGORITHMS[2]
        assert rig.num_measured == 2
        assert Rig(path, winner=3).choose() == ALGORITHMS[2]

    def test_a_file_that_cannot_be_written_is_no_error(self, tmp_path):
        (tmp_path / "file").write_text("")
        rig = Rig(tmp_path / "file" / "choices.json")
        assert rig.choose() == ALGORITHMS[2]

    def test_where_it_is(self, monkeypatch, tmp_path):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.delenv("GRAPHRT_GEMM_CHOICES")
        assert choice_path() == tmp_path / "graphrt" / "gemm_choices.json"
        monkeypatch.setenv("GRAPHRT_GEMM_CHOICES", str(tmp_path / "mine.json"))
        assert choice_path() == tmp_path / "mine.json"
        monkeypatch.setenv("GRAPHRT_GEMM_CHOICES", "off")
        assert choice_path() is None


class TestProduct:
    """What scaled_mm does on a GPU, on CPU tensors."""

    @pytest.fixture(autouse=True)
    def _choices(self, rig, monkeypatch):
        rig.choose()
        monkeypatch.setattr(gemm, "choices", rig.choices)

    @staticmethod
    def find(operands: Operands = OPERANDS, out_dtype: torch.dtype = torch.bfloat16, out: Tensor | None = None) -> Any:
        return gemm._find_chosen(operands, out_dtype, True, out)

    def test_the_key_is_of_what_is_multiplied(self):
        assert self.find() is not None
        assert self.find(out_dtype=torch.float16) is None
        assert gemm._find_chosen(OPERANDS, torch.bfloat16, False, None) is None
        assert self.find(OPERANDS._replace(bias=aligned(torch.zeros(48, dtype=torch.bfloat16)))) is None
        assert self.find(make_operands(n=32, m=48)) is None

    def test_rows_that_are_no_multiple_of_16_are_torchs(self, rig):
        operands = make_operands(m=40)
        with rig.choices.choosing():
            assert self.find(operands) is None
        assert rig.choices.num_timed == 1

    def test_unaligned_tensors_are_torchs(self):
        a = torch.empty(32 * 64 + 256 + 16, dtype=E4M3)
        start = -a.data_ptr() % 256 + 16
        assert self.find(OPERANDS._replace(a=a[start : start + 32 * 64].view(32, 64))) is None
        assert self.find(OPERANDS._replace(b_t=OPERANDS.b_t)) is not None

    @pytest.mark.parametrize(
        "out", [torch.zeros(32, 48), torch.zeros(48, 32, dtype=torch.bfloat16).t(), torch.zeros(32, 64, dtype=torch.bfloat16)]
    )
    def test_an_out_of_another_form_is_left_to_torch(self, out):
        assert self.find(out=out) is None

    def test_who_counts_operations_sees_torchs(self):
        with FlopCounterMode(display=False):
            assert self.find() is None

    @pytest.mark.parametrize("has_out", [False, True])
    def test_it_multiplies(self, rig, has_out):
        out = aligned(torch.full((32, 48), torch.nan, dtype=torch.bfloat16)) if has_out else None
        chosen = self.find(out=out)
        product = gemm._multiply_by_choice(chosen, OPERANDS, torch.bfloat16, True, out)
        assert out is None or product is out
        assert torch.equal(product, scaled_mm(*OPERANDS[:4], torch.bfloat16, fast_accum=True))
        assert rig.gemm.used == [ALGORITHMS[2]]

    @pytest.mark.parametrize("has_out", [False, True])
    def test_a_recording_shows_the_operation_with_its_operands(self, has_out):
        out = aligned(torch.zeros(32, 48, dtype=torch.bfloat16)) if has_out else None

        def run(operands: Operands) -> Tensor:
            chosen = self.find(operands, out=out)
            assert chosen is not None
            return gemm._multiply_by_choice(chosen, operands, torch.bfloat16, True, out)

        others = make_operands()
        recordings = [
            record(lambda operands=operands: run(operands), device_type="cpu", keep_outputs=False)[0]
            for operands in (OPERANDS, OPERANDS, others)
        ]
        names = [operation.name for operation in recordings[0].operations]
        assert names == ["aten::t", "aten::_scaled_mm"]
        assert not compare(recordings[0], recordings[1])
        assert compare(recordings[0], recordings[2]), "other operands, at other addresses"


def test_a_step_without_a_gpu_chooses_nothing(rig, monkeypatch):
    monkeypatch.setattr(gemm, "choices", rig.choices)
    with rig.choices.choosing():
        scaled_mm(*OPERANDS[:4], torch.bfloat16, fast_accum=True)
    assert rig.choices.num_timed == 0
