"""Scale and amax of every slot over a run, read from the device together with the losses."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from graphrt.runfolder import RunFolder
from graphrt.runpieces import read_history
from graphrt.state import QuantizationState

__all__ = ["SlotCurves", "SlotHistory", "load_slot_curves"]

_NUM_DIGITS = 6  # of a scale and an amax in the file: for looking at, not for resuming


class SlotHistory:
    """Takes scale and amax of all slots every few steps and adds them to slots_history.jsonl.

    Args:
        folder: of the run.
        state: the model's.
        every: steps between two rows; the last step has one in any case.
        num_steps: of the run.
    """

    def __init__(self, folder: RunFolder, state: QuantizationState, every: int, num_steps: int) -> None:
        self._folder, self._state, self._every, self._num_steps = folder, state, every, num_steps
        self._pending: list[tuple[int, Tensor]] = []

    def take(self, step: int) -> None:
        """Copy the values after step ``step``, counted from 1, if they are due; the host does not wait."""
        if step % self._every == 0 or step == self._num_steps:
            self._pending.append((step, torch.stack((self._state.scales.scale, self._state.newest_amaxes))))

    def flush(self) -> None:
        """Read what is pending with one wait for the device, and write it."""
        if not self._pending:
            return
        values = torch.stack([value for _, value in self._pending]).tolist()
        steps = [step for step, _ in self._pending]
        rows = [{"step": step, "scale": _short(scale), "amax": _short(amax)} for step, (scale, amax) in zip(steps, values, strict=True)]
        self._folder.append_slot_history(self._state.slots, rows)
        self._pending = []


def _short(values: Iterable[float]) -> list[float]:
    return [float(f"{value:.{_NUM_DIGITS}g}") for value in values]


@dataclass(frozen=True)
class SlotCurves:
    """What slots_history.jsonl holds: a list of values over ``steps`` for each slot."""

    steps: list[int]
    scale: dict[str, list[float]]
    amax: dict[str, list[float]]

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of the slots, in the state's order."""
        return tuple(self.scale)


def load_slot_curves(folder: RunFolder) -> SlotCurves | None:
    """The recorded curves; None if there are none. Rows that do not fit the slots are left out."""
    slots, rows, _ = read_history(folder.slots_history_file)
    if not slots or not rows:
        return None
    curves = {key: {slot: [row[key][i] for row in rows] for i, slot in enumerate(slots)} for key in ("scale", "amax")}
    return SlotCurves([row["step"] for row in rows], curves["scale"], curves["amax"])
