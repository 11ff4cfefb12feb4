"""Which of cuBLASLt's algorithms an FP8 product runs with.

cuBLASLt proposes several for a product, in the order in which it expects them to be fast; torch takes the first. Here they
are timed, once for each shape, and another one is kept where it is clearly faster. All of them add up the same
products, in another order: results differ as those of two versions of cuBLASLt do.

*When.* Timing waits for the device, so it happens only inside `choosing`, which a Trainer opens around the forward and the
backward of its first steps, and never under a capture. What was chosen then serves the whole process: steps that are captured,
replayed or eager run one program. Outside of it, a product that nobody has chosen for is torch's.

*Reproducible.* A choice is kept on disk for the GPU and the version of cuBLASLt (`graphrt.kernels.gemm_cache`), and what
is on disk is not timed again. Under ``torch.use_deterministic_algorithms`` every product is torch's.

*What is timed.* The caller's operands, which are only read, so that values, and with them power and clocks, are those of
the step; into an output of its own. The L2 cache is overwritten before each run: in a step most weights have left it since they
were last used. Candidates take turns, so that a clock that moves is everybody's; the winner has to win a second time, against
torch's alone, because the best of several noisy times is too good.
"""

import logging
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from graphrt.guards import is_capturing
from graphrt.kernels import cublaslt
from graphrt.kernels.cublaslt import CublasLtError
from graphrt.kernels.cublaslt_gemm import Algorithm, Gemm, GemmKey
from graphrt.kernels.gemm_cache import VARIABLE, Choice, ChoiceFile, choice_path

__all__ = ["ChosenGemm", "GemmChoices", "Operands", "TimedGemm", "choices", "choose", "time_algorithms"]

logger = logging.getLogger("graphrt")

NUM_CANDIDATES = 8
#: A candidate is kept if it takes less than this share of the first one's time: below are differences that repeat by chance.
KEPT_BELOW = 0.98

_BUDGET_US = 20_000.0  # of one measurement, the first round aside
_MIN_ROUNDS, _MAX_ROUNDS = 3, 9
_HEAD_START_CYCLES = 125_000  # some 70 us on the device: more than the host takes to issue one timed run

#: Times of algorithms on one product, in microseconds, in their order.
Measure = Callable[[Sequence[Algorithm]], list[float]]


class Operands(NamedTuple):
    """What is multiplied, as `graphrt.kernels.scaled_mm` takes it."""

    a: Tensor
    a_scale_inv: Tensor
    b_t: Tensor
    b_scale_inv: Tensor
    bias: Tensor | None


class TimedGemm(Protocol):
    """What choosing needs of a product (`graphrt.kernels.cublaslt_gemm.Gemm`)."""

    def candidates(self, num: int) -> list[Algorithm]: ...
    def accepts(self, algorithm: Algorithm) -> bool: ...
    def multiply(
        self, algorithm: Algorithm, a: Tensor, a_scale_inv: Tensor, b_t: Tensor, b_scale_inv: Tensor, bias: Tensor | None, out: Tensor
    ) -> None: ...


class ChosenGemm(NamedTuple):
    """A product that runs with another algorithm than torch's."""

    gemm: TimedGemm
    algorithm: Algorithm

    def multiply(self, operands: Operands, out: Tensor) -> None:
        """Write the product into ``out`` [M, N], contiguous and at an address that is a multiple of 256."""
        self.gemm.multiply(self.algorithm, *operands, out)


def choose(candidates: Sequence[Algorithm], measure: Measure) -> Choice:
    """The fastest of ``candidates``, if it clearly beats the first, twice."""
    times = measure(candidates)
    best = min(range(len(times)), key=times.__getitem__)
    if times[best] >= KEPT_BELOW * times[0]:
        return Choice(None, times[0], times[0])
    first_us, best_us = measure([candidates[0], candidates[best]])
    return Choice(candidates[best] if best_us < KEPT_BELOW * first_us else None, first_us, min(first_us, best_us))


def time_algorithms(gemm: TimedGemm, key: GemmKey, operands: Operands, algorithms: Sequence[Algorithm]) -> list[float]:
    """Median times of ``algorithms`` in microseconds, the operands not in the L2 cache. Waits for the device."""
    device = operands.a.device
    out = torch.empty((key.m, key.n), dtype=key.out, device=device)
    evicting = torch.empty(torch.cuda.get_device_properties(device).L2_cache_size, dtype=torch.uint8, device=device)

    def run_round() -> list[tuple[torch.cuda.Event, torch.cuda.Event]]:
        torch.cuda._sleep(_HEAD_START_CYCLES * len(algorithms))  # from here on the device never waits for the host
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in algorithms]
        for algorithm, (start, end) in zip(algorithms, events, strict=True):
            evicting.zero_()
            start.record()
            gemm.multiply(algorithm, *operands, out)
            end.record()
        return events

    def read(events: list[tuple[torch.cuda.Event, torch.cuda.Event]]) -> list[float]:
        events[-1][1].synchronize()
        return [start.elapsed_time(end) * 1e3 for start, end in events]

    read(run_round())  # loads the kernels
    num_rounds = int(_BUDGET_US / sum(read(run_round())))
    rounds = [run_round() for _ in range(min(max(num_rounds, _MIN_ROUNDS), _MAX_ROUNDS))]
    return [statistics.median(times) for times in zip(*map(read, rounds), strict=True)]


def _open_gemm(key: GemmKey) -> TimedGemm:
    return Gemm(cublaslt.load(), key)


def _on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Streams and events are those of the current device, which need not be the operands'."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _name_machine(index: int) -> str:
    gpu = torch.cuda.get_device_properties(index)
    return f"{gpu.name}, {gpu.multi_processor_count} SMs, cuBLASLt {cublaslt.load().version}"


class GemmChoices:
    """What was chosen in this process.

    Args:
        open_gemm: makes the product of a key; raises CublasLtError where there is none.
        name_machine: names GPU and library of a device index.
        measure: times algorithms of a product.
        path: where choices are kept; None for "off". Read at the first use.
    """

    def __init__(
        self,
        open_gemm: Callable[[GemmKey], TimedGemm] = _open_gemm,
        name_machine: Callable[[int], str] = _name_machine,
        measure: Callable[[TimedGemm, GemmKey, Operands, Sequence[Algorithm]], list[float]] = time_algorithms,
        path: Callable[[], Path | None] = choice_path,
    ) -> None:
        self._open_gemm, self._name_machine, self._measure, self._path = open_gemm, name_machine, measure, path
        self._chosen: dict[GemmKey, ChosenGemm | None] = {}
        self._files: dict[int, ChoiceFile] = {}  # by device
        self._lock = threading.Lock()
        self._num_choosing = 0  # per process: a backward chooses in a thread of autograd's
        self._warnings: list[str] = []
        self._num_reported = 0
        self._timed_s = 0.0
        self.num_timed = 0

    @contextmanager
    def choosing(self) -> Iterator[None]:
        """Inside the block a product that nobody has chosen for is timed; at the end what was chosen is kept on disk."""
        self._num_choosing += 1
        try:
            yield
        finally:
            self._num_choosing -= 1
            if self.num_timed != self._num_reported:
                self._report()

    @property
    def is_choosing(self) -> bool:
        """Whether a product that nobody has chosen for is timed now."""
        return self._num_choosing > 0 and not is_capturing()

    def find(self, key: GemmKey, operands: Operands) -> ChosenGemm | None:
        """The product to run instead of torch's; None for torch's.

        Args:
            key: what is multiplied; M, N and K multiples of 16.
            operands: at addresses as `graphrt.kernels.cublaslt_gemm.Gemm.multiply` takes them.
        """
        if torch._C._get_deterministic_algorithms():
            return None
        chosen = self._chosen.get(key)
        if chosen is None and key not in self._chosen and self.is_choosing:
            return self._choose(key, operands)
        return chosen

    def __str__(self) -> str:
        """One line for a report."""
        if self._path() is None:
            return f"torch's algorithms, because {VARIABLE} is off"
        if not self._chosen:
            return "torch's algorithms, no product chosen for"
        num = sum(chosen is not None for chosen in self._chosen.values())
        reasons = f" ({' '.join(self._warnings)})" if self._warnings else ""
        return f"{num} of {len(self._chosen)} products run with another algorithm than torch's{reasons}"

    def _choose(self, key: GemmKey, operands: Operands) -> ChosenGemm | None:
        # Work of no step: a recorder of operations is not shown it.
        with self._lock, _disable_current_modes():
            if key not in self._chosen:
                self._chosen[key] = self._decide(key, operands)
            return self._chosen[key]

    def _decide(self, key: GemmKey, operands: Operands) -> ChosenGemm | None:
        path = self._path()
        if path is None:
            return None
        try:
            with _on_device(operands.a.device):
                gemm = self._open_gemm(key)
                choice = self._choice(gemm, key, operands, path)
        except (CublasLtError, torch.OutOfMemoryError) as error:
            self._warn(str(error).partition("\n")[0])
            return None
        return None if choice.algorithm is None else ChosenGemm(gemm, choice.algorithm)

    def _choice(self, gemm: TimedGemm, key: GemmKey, operands: Operands, path: Path) -> Choice:
        """What the disk knows, or what a clock says."""
        if key.device not in self._files:
            self._files[key.device] = ChoiceFile(path, self._name_machine(key.device))
        file = self._files[key.device]
        known = file.get(str(key))
        if known is not None and (known.algorithm is None or gemm.accepts(known.algorithm)):
            return known
        start = time.perf_counter()
        choice = choose(gemm.candidates(NUM_CANDIDATES), lambda algorithms: self._measure(gemm, key, operands, algorithms))
        self._timed_s += time.perf_counter() - start
        self.num_timed += 1
        file.add(str(key), choice)
        return choice

    def _warn(self, reason: str) -> None:
        """Once for each reason."""
        if reason not in self._warnings:
            self._warnings.append(reason)
            logger.warning("FP8 GEMMs run with torch's algorithms where no other can be timed: %s", reason)

    def _report(self) -> None:
        for file in self._files.values():
            file.save()
        logger.info("FP8 GEMMs: timed %d in %.2f s; %s", self.num_timed - self._num_reported, self._timed_s, self)
        self._num_reported, self._timed_s = self.num_timed, 0.0


#: Those of the process.
choices = GemmChoices()
