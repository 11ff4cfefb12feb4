"""What can still be read of a run's files, whatever has happened to them.

Each reader returns what is sound and a sentence about what is not: None for a file that is whole, or not there.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from graphrt.summary import SlotRow

__all__ = ["History", "first_slots", "read_history", "read_metrics", "read_slots", "read_summary", "rows_up_to"]

_METRICS = ("loss", "val_loss", "grad_norm", "lr", "tokens_per_s", "step_ms", "gap_share")
_MAX_COUNT = (1 << 53) - 1
_SMALLEST, _LARGEST = 1e-100, 1e100  # far beyond what training gives, and safe to add up and to draw


class History(NamedTuple):
    """What slots_history.jsonl holds: rows with a step, and as many scales and amaxes as there are slots."""

    slots: list[str]
    rows: list[dict[str, Any]]
    damage: str | None


def read_metrics(file: Path) -> tuple[list[dict[str, Any]], str | None]:
    """The rows with a step, whose values are numbers or None."""
    values, damage = _read_lines(file)
    rows = [value for value in values if _is_metrics_row(value)]
    return rows, damage or _left_out(file, len(values) - len(rows), "lines")


def read_history(file: Path) -> History:
    """The rows that fit the slots of the first line; none without that line."""
    values, damage = _read_lines(file)
    slots = _slots_of(values[0]) if values else None
    if slots is None:
        return History([], [], f"{file.name}: its first line does not name the slots, so its rows say nothing." if values else damage)
    rows = [_finite_row(value) for value in values[1:] if _is_history_row(value, len(slots))]
    return History(slots, rows, damage or _left_out(file, len(values) - 1 - len(rows), "lines"))


def read_summary(file: Path) -> tuple[dict[str, Any], str | None]:
    """The values that are what a summary holds under their names."""
    values, damage = _read_json(file)
    if damage is not None or values is None:
        return {}, damage
    if not isinstance(values, dict):
        return {}, f"{file.name} does not hold one JSON object."
    bad = [name for name, is_sound in _SUMMARY.items() if name in values and not is_sound(values[name])]
    sound = {name: value for name, value in values.items() if name not in bad}
    return sound, f"{file.name}: {', '.join(bad)} cannot be read." if bad else None


def read_slots(file: Path) -> tuple[list[SlotRow] | None, str | None]:
    """The rows of slots.json, in their order; None without a list of them."""
    values, damage = _read_json(file)
    if damage is not None or values is None:
        return None, damage
    if not isinstance(values, list):
        return None, f"{file.name} does not hold a list of slots."
    rows = [SlotRow(**value) for value in values if _is_slot_row(value)]
    return rows, _left_out(file, len(values) - len(rows), "slots")


def first_slots(file: Path) -> list[str] | None:
    """The slots that the first line of slots_history.jsonl names; None if it names none."""
    try:
        with open(file, encoding="utf-8", errors="replace") as opened:
            return _slots_of(_parsed(opened.readline()))
    except FileNotFoundError:
        return None


def rows_up_to(file: Path, step: int) -> str:
    """A file of lines without the rows of later steps and without what is no row."""
    lines = file.read_text(encoding="utf-8", errors="replace").split("\n")
    return "".join(f"{line}\n" for line in lines if _is_up_to(_parsed(line), step))


def _read_lines(file: Path) -> tuple[list[Any], str | None]:
    """The JSON value of each line, None for what is none. A last line that is being written is left out."""
    text, damage = _read_text(file)
    *lines, rest = text.split("\n")
    values = [_parsed(line) for line in lines if line.strip()]
    last = _parsed(rest)
    return values + ([] if last is None else [last]), damage


def _read_json(file: Path) -> tuple[Any, str | None]:
    text, damage = _read_text(file)
    value = _parsed(text)
    if damage is None and value is None and file.exists():
        damage = f"{file.name} holds nothing that can be read."
    return value, damage


def _read_text(file: Path) -> tuple[str, str | None]:
    try:
        return file.read_text(encoding="utf-8", errors="replace"), None
    except FileNotFoundError:
        return "", None
    except OSError as error:
        return "", f"{file.name} cannot be read: {error.strerror or error}."


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _left_out(file: Path, number: int, what: str) -> str | None:
    return f"{file.name}: {number:,} {what if number > 1 else what[:-1]} could not be read and {_are(number)} left out." if number else None


def _are(number: int) -> str:
    return "are" if number > 1 else "is"


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_COUNT


def _is_number(value: object) -> bool:
    """Whether a value can be reckoned with: JSON also has NaN, and integers beyond every float."""
    return isinstance(value, int | float) and not isinstance(value, bool) and (value == 0 or _SMALLEST < abs(value) < _LARGEST)


def _is_amount(value: object) -> bool:
    return _is_number(value) and isinstance(value, int | float) and value >= 0


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value.isprintable()


def _is_quality(value: object) -> bool:
    return isinstance(value, dict) and _is_number(value.get("bigram"))


_SUMMARY: Mapping[str, Callable[[object], bool]] = {
    "step": _is_count, "wall_s": _is_amount, "device": _is_text, "mode": _is_text, "num_skipped_steps": _is_count,
    "peak_memory_bytes": _is_amount, "quality": _is_quality,
}  # fmt: skip


def _is_metrics_row(value: Any) -> bool:
    is_row = isinstance(value, dict) and _is_count(value.get("step"))
    return is_row and all(value.get(name) is None or _is_number(value[name]) for name in _METRICS)


def _is_slot_row(value: Any) -> bool:
    names = [field.name for field in fields(SlotRow)]
    if not isinstance(value, dict) or value.keys() != set(names):
        return False
    numbers = (value[name] for name in names if name not in ("slot", "num_nonfinite"))
    return _is_text(value["slot"]) and _is_count(value["num_nonfinite"]) and all(map(_is_number, numbers))


def _slots_of(value: Any) -> list[str] | None:
    slots = value.get("slots") if isinstance(value, dict) else None
    if not isinstance(slots, list) or not all(map(_is_text, slots)) or len(set(slots)) < len(slots):
        return None
    return slots


def _is_history_row(value: Any, num_slots: int) -> bool:
    if not isinstance(value, dict) or not _is_count(value.get("step")):
        return False
    columns = [value.get(name) for name in ("scale", "amax")]
    return all(isinstance(column, list) and len(column) == num_slots and all(map(_is_value, column)) for column in columns)


def _is_value(value: object) -> bool:
    return _is_number(value) or (isinstance(value, float) and not math.isfinite(value))


def _finite_row(row: Mapping[str, Any]) -> dict[str, Any]:
    # A picture leaves NaN out, and an infinity would stretch it.
    columns = {name: [value if _is_number(value) else math.nan for value in row[name]] for name in ("scale", "amax")}
    return {**row, **columns}


def _is_up_to(value: Any, step: int) -> bool:
    found = value.get("step", 0) if isinstance(value, dict) else None
    return isinstance(found, int) and _is_count(found) and found <= step
