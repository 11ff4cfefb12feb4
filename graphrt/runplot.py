"""One picture of a run: loss, gradient norm, step time, and scale and amax of chosen slots over its steps."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from graphrt.runfolder import replacing
from graphrt.settings import InputError
from graphrt.slothistory import SlotCurves

__all__ = ["draw_run"]

_FORMATS = ("png", "svg", "pdf")
_NUM_SLOTS_NAMED = 12
_DPI = 120

Rows = Sequence[Mapping[str, Any]]


def draw_run(file: Path, title: str, unit: str, rows: Rows, curves: SlotCurves | None, slots: Sequence[str]) -> None:
    """Write the picture to ``file``; what is not recorded leaves its panel empty.

    Args:
        file: its ending says the format: .png, .svg or .pdf.
        title: of the whole.
        unit: of losses: "bits per byte" or "bits per token".
        rows: of metrics.jsonl.
        curves: of slots_history.jsonl.
        slots: which of them to draw.

    Raises:
        InputError: the ending is another one.
        ImportError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    file_format = file.suffix.removeprefix(".").lower()
    if file_format not in _FORMATS:
        raise InputError(f"--out {file} must end in {', '.join('.' + name for name in _FORMATS)}. Rename it.")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 9), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    panels = figure.subplots(3, 2)
    _draw_losses(panels[0][0], rows, unit)
    _draw_norms(panels[0][1], rows)
    _draw_speed(panels[1][0], rows, "step_ms", "step, ms")
    _draw_speed(panels[1][1], rows, "gap_share", "share of device time between replays", top=1.0)
    for axes, name in zip(panels[2], ("scale", "amax"), strict=True):
        _draw_slots(axes, name, curves, slots)
    with replacing(file) as temporary:
        figure.savefig(temporary, format=file_format, dpi=_DPI)


def _draw_losses(axes: Any, rows: Rows, unit: str) -> None:
    for key, label, marker in (("loss", "training", ""), ("val_loss", "validation", "o")):
        _plot(axes, [(row["step"], row[key] / math.log(2)) for row in rows if row.get(key) is not None], label=label, marker=marker)
    _finish(axes, f"loss, {unit}", has_legend=True)


def _draw_norms(axes: Any, rows: Rows) -> None:
    points = [(row["step"], row["grad_norm"]) for row in rows if row.get("grad_norm") is not None]
    _plot(axes, points)
    if points and min(norm for _, norm in points) > 0:
        axes.set_yscale("log")
    skipped = [row["step"] for row in rows if row.get("skipped")]
    if skipped:
        # A skipped step has no finite norm: marked along the lower edge.
        style = {"marker": "x", "linestyle": "", "color": "tab:red", "transform": axes.get_xaxis_transform()}
        _plot(axes, [(step, 0.02) for step in skipped], label=f"skipped steps: {len(skipped)}", **style)
    _finish(axes, "gradient norm", has_legend=bool(skipped))


def _draw_speed(axes: Any, rows: Rows, key: str, label: str, top: float | None = None) -> None:
    points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
    _plot(axes, points)
    axes.set_ylim(bottom=0, top=top)
    if not points:
        axes.text(0.5, 0.5, "not measured in this run", transform=axes.transAxes, ha="center", va="center", color="gray")
    _finish(axes, label)


def _draw_slots(axes: Any, name: str, curves: SlotCurves | None, slots: Sequence[str]) -> None:
    drawn = [] if curves is None else [slot for slot in slots if slot in curves.scale]
    for i, slot in enumerate(drawn):
        assert curves is not None
        values = getattr(curves, name)[slot]
        points = [(step, value) for step, value in zip(curves.steps, values, strict=True) if value > 0]
        _plot(axes, points, label=slot if i < _NUM_SLOTS_NAMED else "_unnamed", marker=".")
    if drawn:
        axes.set_yscale("log", base=2 if name == "scale" else 10)
    _finish(axes, name, has_legend=bool(drawn))


def _plot(axes: Any, points: Sequence[tuple[float, float]], **style: Any) -> None:
    axes.plot([step for step, _ in points], [value for _, value in points], linewidth=1, **style)


def _finish(axes: Any, label: str, *, has_legend: bool = False) -> None:
    axes.set(xlabel="step", ylabel=label)
    axes.grid(alpha=0.3)
    if has_legend:
        axes.legend(fontsize="small")
