"""What a run folder tells, finished or not: a summary to print, and which pieces are missing and why."""

import fnmatch
import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from graphrt.runfolder import RunFolder
from graphrt.runpieces import read_history, read_metrics, read_slots, read_summary
from graphrt.runplot import draw_run
from graphrt.settings import InputError, Settings
from graphrt.slothistory import SlotCurves, load_slot_curves
from graphrt.summary import SlotRow, print_slots

__all__ = ["RunReport", "choose_slots", "collect_report", "report_run"]

_NUM_LAST_STEPS = 10
_NUM_SLOTS_DRAWN = 4
_SPARK = "▁▂▃▄▅▆▇█"
_SPARK_WIDTH = 40
_SLOT_SAMPLING = "sampled: one step, eager, at the end of the run"
_WHY_MISSING = {
    "metrics": "metrics.jsonl: no step has been recorded yet.",
    "summary": "summary.json (wall time, memory, device): it is written with the first checkpoint.",
    "slots": "slots.json (saturation, underflow): it is written when a run ends, from one step sampled eagerly.",
    "history": "slots_history.jsonl (scale and amax over time): none has been recorded.",
}


@dataclass(frozen=True)
class RunReport:
    """A run as its folder shows it. Losses in nats per token; None for what is not known.

    Attributes:
        step: the last step recorded.
        idle_s: since the last step was recorded.
        wall_s: of the whole run, evaluations and resumed parts included, up to its last checkpoint or end.
        last_loss: mean over the last ten steps, over half of them in a run of fewer than twenty.
        tokens_per_s, step_ms, gap_share: medians over the steps.
        gap_share: share of the device's time that lay between two replays (`graphrt.stepclock`).
        slots: worst first; shares are of one sampled step.
        missing: the pieces that are not there, a sentence each.
        damaged: what of the pieces could not be read, a sentence each.
    """

    path: str
    settings: Settings
    step: int
    idle_s: float | None
    wall_s: float | None
    first_loss: float | None
    last_loss: float | None
    best_val_loss: float | None
    best_val_step: int | None
    last_val_loss: float | None
    bigram_loss: float | None
    tokens_per_s: float | None
    step_ms: float | None
    gap_share: float | None
    num_skipped: int
    peak_memory_bytes: int | None
    device: str | None
    mode: str | None
    losses: list[float] = field(repr=False)
    slots: list[SlotRow] = field(repr=False)
    missing: tuple[str, ...] = ()
    damaged: tuple[str, ...] = ()
    plot: str | None = None

    @property
    def is_finished(self) -> bool:
        """Whether all steps that the settings ask for are recorded."""
        return self.step >= self.settings.steps

    @property
    def unit(self) -> str:
        """What losses are shown in."""
        return "bits per byte" if self.settings.tokens is None else "bits per token"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, without the loss of every step."""
        values = {**asdict(self), "is_finished": self.is_finished, "slots_measured": _SLOT_SAMPLING}
        del values["losses"]
        return values


def report_run(path: Path, console: Console, *, patterns: Sequence[str] = (), out: Path | None = None, as_json: bool = False) -> None:
    """Print the report of the run in ``path`` and draw it.

    Args:
        path: the run folder.
        console: where to print.
        patterns: which slots to show and draw, as a shell matches file names; without any, the worst.
        out: the picture, .png, .svg or .pdf; report.png in the run folder by default.
        as_json: print one JSON object instead.

    Raises:
        InputError: there is no run, a pattern matches nothing, or ``out`` cannot be written.
    """
    folder = RunFolder(path)
    report = collect_report(folder)
    curves = load_slot_curves(folder)
    chosen = choose_slots(report, curves, patterns)
    if patterns:
        report = replace(report, slots=[row for row in report.slots if row.slot in chosen])
    report = _draw(report, folder, curves, chosen, out)
    if as_json:
        console.print_json(data=report.to_dict(), ensure_ascii=True)  # a path may have bytes that are no characters
    else:
        _print_report(report, folder, console, show_all=bool(patterns))


def collect_report(folder: RunFolder) -> RunReport:
    """Read what the folder holds.

    Raises:
        InputError: it is no run folder.
    """
    settings = folder.read_settings()
    rows, rows_damage = read_metrics(folder.metrics_file)
    summary, summary_damage = read_summary(folder.summary_file)
    slots, slots_damage = read_slots(folder.slots_file)
    history = read_history(folder.slots_history_file)
    damages = {"metrics": rows_damage, "summary": summary_damage, "slots": slots_damage, "history": history.damage}
    is_empty = {"metrics": not rows, "summary": not summary, "slots": slots is None, "history": not history.slots}
    steps = [row for row in rows if "loss" in row]
    losses = _values(steps, "loss")
    evaluations = [row for row in rows if row.get("val_loss") is not None]
    best = min(evaluations, key=lambda row: row["val_loss"], default={})
    return RunReport(
        path=str(folder.path),
        settings=settings,
        step=max((row["step"] for row in steps), default=0),
        idle_s=round(max(0.0, time.time() - folder.metrics_file.stat().st_mtime), 1) if rows else None,
        wall_s=summary.get("wall_s"),
        first_loss=losses[0] if losses else None,
        last_loss=math.fsum(last := losses[-min(_NUM_LAST_STEPS, (len(losses) + 1) // 2) :]) / len(last) if losses else None,
        best_val_loss=best.get("val_loss"),
        best_val_step=best.get("step"),
        last_val_loss=evaluations[-1]["val_loss"] if evaluations else None,
        bigram_loss=(summary.get("quality") or {}).get("bigram"),
        tokens_per_s=_median(steps, "tokens_per_s"),
        step_ms=_median(steps, "step_ms"),
        gap_share=_median(steps, "gap_share"),
        num_skipped=sum(bool(row.get("skipped")) for row in steps),
        peak_memory_bytes=summary.get("peak_memory_bytes"),
        device=summary.get("device"),
        mode=summary.get("mode"),
        losses=losses,
        slots=slots or [],
        missing=tuple(_missing(settings, [name for name in damages if is_empty[name] and damages[name] is None])),
        damaged=tuple(damage for damage in damages.values() if damage is not None),
    )


def choose_slots(report: RunReport, curves: SlotCurves | None, patterns: Sequence[str]) -> list[str]:
    """Names of the slots to show: those that match, or else the worst few.

    Raises:
        InputError: a pattern matches none.
    """
    known = list(curves.slots) if curves is not None else [row.slot for row in report.slots]
    if not patterns:
        worst = [row.slot for row in report.slots if row.slot in known]
        return (worst or sorted(known, key=lambda slot: -_range(curves, slot)))[:_NUM_SLOTS_DRAWN]
    if not known:
        raise InputError(f"--slot {patterns[0]} cannot be shown: {report.path} has recorded no FP8 slots. Leave the option out.")
    for pattern in patterns:
        if not fnmatch.filter(known, pattern):
            raise InputError(f"--slot {pattern} matches none of the run's {len(known)} slots. They have names like {known[0]}.")
    return [slot for slot in known if any(fnmatch.fnmatchcase(slot, pattern) for pattern in patterns)]


def _range(curves: SlotCurves | None, slot: str) -> float:
    """How far a slot's amax has moved: the ratio of its largest to its smallest."""
    amaxes = [amax for amax in (curves.amax[slot] if curves is not None else []) if amax > 0]
    return max(amaxes) / min(amaxes) if amaxes else 0.0


def _missing(settings: Settings, absent: Sequence[str]) -> list[str]:
    missing = [_WHY_MISSING[name] for name in ("metrics", "summary") if name in absent]
    if settings.precision != "fp8":
        return [*missing, f"slots: a run in {settings.precision} has none."]
    return missing + [_WHY_MISSING[name] for name in ("slots", "history") if name in absent]


def _values(rows: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    return [row[key] for row in rows if row.get(key) is not None]


def _median(rows: Sequence[Mapping[str, Any]], key: str) -> float | None:
    values = _values(rows, key)
    return median(values) if values else None


def _draw(report: RunReport, folder: RunFolder, curves: SlotCurves | None, chosen: list[str], out: Path | None) -> RunReport:
    """The report with the name of its picture, or with why there is none."""
    file = folder.report_file if out is None else out
    try:
        draw_run(file, report.path, report.unit, folder.read_metrics(), curves, chosen)
    except ImportError:
        why = "the picture: matplotlib is not installed. pip install 'graphrt[plot]' adds it."
    except OSError as error:
        why = f"the picture: {file} cannot be written: {error.strerror or error}. Give another place by --out."
        if out is not None:
            raise InputError(f"{file} cannot be written: {error.strerror or error}. Choose another --out.") from error
    else:
        return replace(report, plot=str(file))
    return replace(report, missing=(*report.missing, why))


# -- printing


def _print_report(report: RunReport, folder: RunFolder, console: Console, show_all: bool) -> None:
    def show(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    for name, value in _lines(report):
        show(f"{name:<17}{value}")
    if len(report.losses) > 1:
        show(f"{'loss, over steps':<17}{_sparkline(report.losses)}")
    if report.slots:
        print_slots(console, report.slots, folder.slots_file, show_all, "--slot '*'")
    for piece in report.missing:
        show(f"Not there: {piece}")
    for damage in report.damaged:
        show(f"Damaged: {damage}")
    if report.plot is not None:
        show(f"Drawn: {report.plot}")


def _lines(report: RunReport) -> list[tuple[str, str]]:
    settings = report.settings
    val, best = _bits(report.last_val_loss), _bits(report.best_val_loss)
    lines = [
        ("run", report.path),
        ("state", _state(report)),
        ("model", f"{settings.preset}, {settings.shape.num_parameters / 1e6:.1f} M parameters, {settings.arithmetic}"),
        ("batch", _batch(settings)),
        ("ran on", f"{report.device or '-'}, {report.mode or settings.mode} mode"),
        ("wall time", "-" if report.wall_s is None else f"{report.wall_s:,.0f} s"),
        ("training loss", f"{_bits(report.first_loss)} at first, {_bits(report.last_loss)} over the last steps ({report.unit})"),
        ("validation loss", f"{val} at last, best {best}" + ("" if report.best_val_step is None else f" at step {report.best_val_step}")),
        ("bigram baseline", _bits(report.bigram_loss)),
        ("tokens/s", "-" if report.tokens_per_s is None else f"{report.tokens_per_s:,.0f} (median)"),
        ("step", "-" if report.step_ms is None else f"{report.step_ms:,.2f} ms (median)"),
        ("skipped steps", str(report.num_skipped)),
        ("peak memory", "-" if report.peak_memory_bytes is None else f"{report.peak_memory_bytes / 2**30:.2f} GiB"),
    ]
    if report.gap_share is not None:
        lines.insert(-2, ("between replays", f"{report.gap_share:.1%} of the device's time (median)"))
    return lines


def _state(report: RunReport) -> str:
    done = f"step {report.step:,} of {report.settings.steps:,}"
    if report.is_finished:
        return f"finished, {done}"
    return f"not finished, {done}" + ("" if report.idle_s is None else f", last written {report.idle_s:,.0f} s ago")


def _batch(settings: Settings) -> str:
    parts = f"{settings.batch_size} x {settings.seq_len} = {settings.tokens_per_step:,} tokens a step"
    return parts + (f" in {settings.grad_accum} microbatches" if settings.grad_accum > 1 else "")


def _bits(nats: float | None) -> str:
    return "-" if nats is None else f"{nats / math.log(2):.3f}"


def _sparkline(values: Sequence[float]) -> str:
    """A bar of eighths for each stretch of the values, its mean."""
    width = min(_SPARK_WIDTH, len(values))
    bounds = [i * len(values) // width for i in range(width + 1)]
    means = [math.fsum(values[a:b]) / (b - a) for a, b in itertools.pairwise(bounds)]
    low, span = min(means), (max(means) - min(means)) or 1.0
    return "".join(_SPARK[round((mean - low) / span * (len(_SPARK) - 1))] for mean in means)
