"""What a finished run tells: its quality beside a baseline, how its slots use FP8, and what to run next."""

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from graphrt.settings import Settings, options_of
from graphrt.state import QuantizationState

__all__ = ["Quality", "SlotRow", "next_commands", "print_quality", "print_slots", "rows_to_json", "slot_rows"]

_NUM_SLOTS_SHOWN = 12


@dataclass(frozen=True)
class Quality:
    """Validation losses in nats per token."""

    model: float
    bigram: float
    num_tokens: int
    is_bytes: bool

    @property
    def unit(self) -> str:
        """What losses are shown in."""
        return "bits per byte" if self.is_bytes else "bits per token"


@dataclass(frozen=True)
class SlotRow:
    """How one slot uses FP8: its scale, its last and largest amax, and shares of the elements of one step."""

    slot: str
    scale: float
    last_amax: float
    max_amax: float
    saturated: float  # share clamped to the format's maximum
    underflowed: float  # share of non-zero values that became 0
    num_nonfinite: int  # steps whose amax was inf or NaN


def slot_rows(state: QuantizationState, counts: Mapping[str, tuple[int, int, int]]) -> list[SlotRow]:
    """A row for each slot, worst first: by non-finite amaxes, then by the share of elements clamped or flushed to zero.

    Args:
        state: the model's.
        counts: (num_elements, num_saturated, num_underflowed) by slot, from `state.count_saturation()`.
    """
    rows = [_slot_row(state, slot, *counts.get(slot, (0, 0, 0))) for slot in state.slots]
    return sorted(rows, key=lambda row: (-row.num_nonfinite, -(row.saturated + row.underflowed)))


def _slot_row(state: QuantizationState, slot: str, num_elements: int, num_saturated: int, num_underflowed: int) -> SlotRow:
    history: Tensor = state.amax_history(slot)
    num = max(1, num_elements)
    return SlotRow(
        slot, float(state.scale(slot)), float(history[-1]), float(history.max()), num_saturated / num, num_underflowed / num,
        int(state.nonfinite_amaxes(slot)),
    )  # fmt: skip


def rows_to_json(rows: Sequence[SlotRow]) -> list[dict[str, Any]]:
    """Plain values for slots.json."""
    return [asdict(row) for row in rows]


def print_quality(console: Console, quality: Quality) -> None:
    """The model's validation loss beside the bigram model's."""
    model, bigram = quality.model / math.log(2), quality.bigram / math.log(2)
    _print_title(console, f"Validation on {quality.num_tokens:,} tokens")
    table = Table(box=SIMPLE_HEAD)
    table.add_column("model")
    table.add_column(quality.unit, justify="right")
    table.add_row("this run", f"[bold]{model:.3f}[/]")
    table.add_row("bigram counts of the training text", f"{bigram:.3f}")
    console.print(table)
    console.print(_compare(model, bigram))


def _compare(model: float, bigram: float) -> str:
    if not math.isfinite(model):
        return "The model's loss is not finite. Try a smaller --lr."
    share = f"{abs(model / bigram - 1):.1%}"
    if share == "0.0%":
        return "The model is as good as the bigram counts: train longer, or on more text."
    return f"The model is {share} better." if model < bigram else f"The model is {share} worse: train longer, or on more text."


def _print_title(console: Console, title: str) -> None:
    # A table's own title is wrapped to the table's width, however narrow.
    console.print(f"[italic]{escape(title)}[/]", highlight=False, soft_wrap=True)


def print_slots(console: Console, rows: Sequence[SlotRow], slots_file: Path, show_all: bool, option: str = "--all-slots") -> None:
    """The slots that use FP8 worst, or all; ``option`` is what shows all."""
    shown = rows if show_all else rows[:_NUM_SLOTS_SHOWN]
    _print_title(console, "FP8 slots, worst first (shares are sampled: one step, eager)")
    table = Table(box=SIMPLE_HEAD)
    table.add_column("slot", no_wrap=True)
    for name in ("scale", "amax", "saturated", "underflow"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in shown:
        table.add_row(escape(row.slot), f"{row.scale:.4g}", f"{row.last_amax:.3g}", f"{row.saturated:.3%}", f"{row.underflowed:.3%}")
    console.print(table)
    if len(shown) < len(rows):
        more = f"... and {len(rows) - len(shown)} more in {slots_file} ({option} shows them here)."
        console.print(more, markup=False, highlight=False, soft_wrap=True)
    num_nonfinite = sum(row.num_nonfinite for row in rows)
    if num_nonfinite:
        dropped = f"Amaxes that were inf or NaN and did not enter a history: {num_nonfinite}, by slot in {slots_file}."
        console.print(dropped, markup=False, highlight=False, soft_wrap=True)


def next_commands(settings: Settings, out: Path, device_type: str) -> list[tuple[str, str]]:
    """(command, what it is for) to try after this run on a device of that type ("cpu" or "cuda")."""
    reference = "bf16" if device_type == "cuda" else "fp32"  # most CPUs emulate bf16 slowly
    other = reference if settings.precision == "fp8" else "fp8"
    left_out = {"--precision"} if other == "fp8" else {"--precision", "--backward-accum", "--weight-transpose"}
    options = [option for option in options_of(settings) if option[0] not in left_out]
    options += [("--precision", other), ("--out", f"{out}-{other}")]
    again = " ".join(f"{flag} {shlex.quote(value)}" for flag, value in options)
    train_on = f"train on, with the learning-rate schedule of {2 * settings.steps} steps"
    commands = [
        (f"graphrt train --out {shlex.quote(str(out))} --resume --steps {2 * settings.steps}", train_on),
        (f"graphrt train {again}", f"the same run in {other}"),
    ]
    if settings.tokens is None and not settings.text:
        commands.append(("graphrt train --text YOUR_FILES --out runs/mine", "train on your own text"))
    return commands
