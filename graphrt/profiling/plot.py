"""The picture of a profile: what each layer costs, by kind of kernel, and one step over time."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from graphrt.profiling.events import Event, PathProfile, layer_of

__all__ = ["plot_profile"]

_MAX_LAYERS = 24
_REST = "(other layers)"
_PALE = 0.3  # how opaque what runs beside others is


def plot_profile(file: Path, paths: Sequence[PathProfile], device: str) -> bool:
    """Draw a column for each path: stacked bars by layer above, the first watched step over time below.

    Returns:
        Whether matplotlib was there to draw it.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError:
        return False
    layers = _layers(paths)
    colors = _colors(paths)
    height = 2 + 0.28 * len(layers)
    figure = Figure(figsize=(8 * len(paths), 2 * height), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"one training step on {device}")
    axes = figure.subplots(2, len(paths), squeeze=False)
    for column, path in enumerate(paths):
        _draw_bars(axes[0][column], path, layers, colors)
        _draw_step(axes[1][column], path, layers, colors)
    handles, labels = axes[0][0].get_legend_handles_labels()
    if any(path.beside_us for path in paths):
        handles, labels = [*handles, Patch(facecolor="gray", alpha=_PALE)], [*labels, "pale: beside others"]
    figure.legend(handles, labels, loc="outside lower center", ncols=4 * len(paths), fontsize="small")
    figure.savefig(file, format="png", dpi=110)
    return True


def _layers(paths: Sequence[PathProfile]) -> list[str]:
    """The layers that cost most, in the order of the step; the others together as the last."""
    times: dict[str, float] = {}
    for event in (event for path in paths for event in path.events):
        times[layer_of(event.place)] = times.get(layer_of(event.place), 0.0) + event.duration_us
    kept = set(sorted(times, key=lambda layer: -times[layer])[:_MAX_LAYERS])
    return [layer for layer in times if layer in kept] + ([_REST] if len(times) > len(kept) else [])


def _colors(paths: Sequence[PathProfile]) -> dict[str, Any]:
    """A color for each kind of kernel, the costliest first."""
    from matplotlib import colormaps

    times: dict[str, float] = {}
    for event in (event for path in paths for event in path.events):
        times[event.work] = times.get(event.work, 0.0) + event.duration_us
    palette = colormaps["tab20"]
    return {work: palette(i % 20) for i, work in enumerate(sorted(times, key=lambda work: -times[work]))}


def _by_work(events: Iterable[Event], layers: Sequence[str]) -> dict[tuple[str, int], list[Event]]:
    """Events by (kind of work, row of their layer)."""
    numbers = {layer: number for number, layer in enumerate(layers)}
    grouped: dict[tuple[str, int], list[Event]] = {}
    for event in events:
        grouped.setdefault((event.work, numbers.get(layer_of(event.place), len(layers) - 1)), []).append(event)
    return grouped


def _draw_bars(axes: Any, path: PathProfile, layers: Sequence[str], colors: dict[str, Any]) -> None:
    starts = [0.0] * len(layers)
    for is_beside in (False, True) if path.beside_us else (False,):
        grouped = _by_work((event for event in path.events if event.is_beside is is_beside), layers)
        for work, color in colors.items():
            widths = [sum(event.duration_us for event in grouped.get((work, row), ())) / path.num_steps / 1e3 for row in range(len(layers))]
            look = {"alpha": _PALE} if is_beside else {"label": work}
            axes.barh(range(len(layers)), widths, left=starts, color=color, **look)
            starts = [start + width for start, width in zip(starts, widths, strict=True)]
    beside = f" and {path.beside_us / 1e3:.2f} beside them" if path.beside_us else ""
    title = f"{path.path}: {path.chain_us / 1e3:.2f} ms of kernels{beside} in {path.step_us / 1e3:.2f} ms a step, {path.gap_share:.0%} gaps"
    axes.set(title=title, xlabel="ms a step, all kernels of the layer")
    _label_rows(axes, layers)


def _draw_step(axes: Any, path: PathProfile, layers: Sequence[str], colors: dict[str, Any]) -> None:
    events = [event for event in path.events if event.step == 0]
    base = events[0].start_us if events else 0.0
    for is_beside in (False, True):
        grouped = _by_work((event for event in events if event.is_beside is is_beside), layers)
        for (work, row), group in grouped.items():
            spans = [((event.start_us - base) / 1e3, event.duration_us / 1e3) for event in group]
            axes.broken_barh(spans, (row - 0.4, 0.8), facecolors=colors[work], alpha=_PALE if is_beside else None)
    axes.set(title=f"{path.path}: one step over time", xlabel="ms")
    _label_rows(axes, layers)


def _label_rows(axes: Any, layers: Sequence[str]) -> None:
    axes.set_yticks(range(len(layers)), layers, fontsize="small")
    axes.set_ylim(len(layers) - 0.5, -0.5)
    axes.grid(axis="x", alpha=0.3)
