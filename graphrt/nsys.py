"""A window of steps for an external profiler: nsys with ``-c cudaProfilerApi``, ncu with ``--profile-from-start off``.

Both wait for cudaProfilerStart and stop at cudaProfilerStop. The window calls them around whole `step` ranges, with the
device idle: what a step launched is inside, what the steps around it launched is not.
"""

import logging
from types import TracebackType

import torch

from graphrt.errors import GraphrtError
from graphrt.ranges import STEP, listening

__all__ = ["NsysWindow", "nsys_window"]

logger = logging.getLogger("graphrt")


class NsysWindow:
    """A context manager, entered once; made by `nsys_window`."""

    def __init__(self, start: int, stop: int, device: torch.device) -> None:
        self.start, self.stop, self.device = start, stop, device
        self._is_profiling = self._is_over = False
        self._listening = listening(self)

    def __enter__(self) -> "NsysWindow":
        if not torch.cuda.is_available():
            raise GraphrtError(
                "nsys_window starts and stops the CUDA profiler, and this process has no CUDA device. "
                "Run it on a machine with an NVIDIA GPU."
            )
        if self._is_over:
            raise GraphrtError(f"nsys_window({self.start}, {self.stop}) was entered a second time. Make a new one.")
        self._listening.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._listening.__exit__(kind, error, traceback)
        has_run = self._is_profiling or self._is_over
        self._close()
        self._is_over = True
        if not has_run and error is None:
            logger.warning("nsys_window: none of the steps %d to %d ran inside the block, so nothing was profiled", self.start, self.stop)

    def enter_range(self, name: str) -> None:
        """Before a step that is in the window: the profiler is on."""
        if name == STEP.name and not self._is_profiling and not self._is_over and self._holds(STEP.number):
            torch.cuda.synchronize(self.device)
            torch.cuda.profiler.start()
            self._is_profiling = True

    def exit_range(self, name: str) -> None:
        """After the last step of the window: the profiler is off."""
        if name == STEP.name and STEP.number == self.stop:
            self._close()

    def _holds(self, step: int | None) -> bool:
        return step is not None and self.start <= step <= self.stop

    def _close(self) -> None:
        """Stop the profiler, once all that was launched has run."""
        if not self._is_profiling:
            return
        self._is_profiling, self._is_over = False, True
        try:
            torch.cuda.synchronize(self.device)
        finally:
            torch.cuda.profiler.stop()


def nsys_window(start: int, stop: int, *, device: torch.device | str | int | None = None) -> NsysWindow:
    """Profile steps ``start`` to ``stop``, both included, of the Trainer that runs inside the block.

        with graphrt.nsys_window(10, 12):
            for batch in batches:
                trainer.step(batch)

    Run the program under ``nsys profile -t cuda,nvtx -c cudaProfilerApi --capture-range-end=stop``. A window opens once; a
    run that starts in the middle of it (a resumed one) is profiled from there, and a step that raises counts as run. The
    device is waited for before the first and after the last of these steps, nowhere else. With several Trainers in the
    block the first step of any of them with such a number opens the window.

    Args:
        start: number of the first step, from 1, as the payload of the `step` ranges counts (`Trainer.steps_taken` + 1).
        stop: number of the last.
        device: the CUDA device to wait for; None is the current one.

    Raises:
        ValueError: not 1 <= start <= stop, or ``device`` is no CUDA device.
        GraphrtError: entered in a process without a CUDA device, or a second time.
    """
    for name, value in (("start", start), ("stop", stop)):
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError(f"{name} must be the number of a step, an int, got {value!r}.")
    if not 1 <= start <= stop:
        raise ValueError(f"nsys_window needs 1 <= start <= stop, got start={start} and stop={stop}. Steps count from 1.")
    return NsysWindow(start, stop, torch.device("cuda") if device is None else _cuda_device(device))


def _cuda_device(device: torch.device | str | int) -> torch.device:
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device must be a CUDA device, got {device!r}. Leave it out for the current one.") from error
    if found.type != "cuda":
        raise ValueError(f"device must be a CUDA device, got {device!r}. Leave it out for the current one.")
    return found
