"""The report of a profile: tables, JSON, and the files of a folder."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphrt.capture.nodes import NodeMap
from graphrt.profiling.events import Event, Gap, PathProfile, Row, layer_of
from graphrt.profiling.matching import demangled
from graphrt.profiling.trace import write_trace

__all__ = ["PROFILE_FILES", "StepProfile", "Table"]

#: What a folder of a profile may hold.
PROFILE_FILES = ("profile.json", "trace.json", "node_map.json", "profile.png")

_NUM_ROWS, _NUM_GAPS = 20, 8
_FORMAT = 1


@dataclass(frozen=True)
class Table:
    """A title, column names (the first `num_labels` are labels, the others numbers), and rows of text."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    num_labels: int = 1

    def __str__(self) -> str:
        lines = [self.columns, *self.rows]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.columns))]
        texts = [
            "  ".join(cell.ljust(width) if i < self.num_labels else cell.rjust(width) for i, (cell, width) in enumerate(pairs)).rstrip()
            for pairs in (list(zip(line, widths, strict=True)) for line in lines)
        ]
        return "\n".join([self.title, *(f"  {text}" for text in texts)])


@dataclass(frozen=True)
class StepProfile:
    """What `Trainer.profile` found; prints as tables.

    Attributes:
        device: what the steps ran on.
        captured: the replayed steps; None for an eager trainer.
        eager: the same steps, eager.
        node_map: of the graph that was replayed; None for an eager trainer.
    """

    device: str
    captured: PathProfile | None
    eager: PathProfile
    node_map: NodeMap | None

    @property
    def paths(self) -> tuple[PathProfile, ...]:
        """The captured path if there is one, and the eager one."""
        return (self.eager,) if self.captured is None else (self.captured, self.eager)

    def tables(self) -> list[Table]:
        """What is printed: both paths side by side, then the first path by module, phase, kind and kernel, and its gaps."""
        path = self.paths[0]
        return [
            _overview(self),
            _by_layer(path),
            _table(f"{path.path} step by module", path, ("module", "direction"), _by_module),
            _table(f"{path.path} step by phase", path, ("phase",), _by_phase),
            _compare("both paths by kind of kernel", self.paths, "kind", lambda event: (event.work,)),
            _table(f"{path.path} step by kernel", path, ("kernel",), lambda event: (_short(event.name),)),
            *_gaps(path),
            *_unattributed(self.paths),
        ]

    def __str__(self) -> str:
        notes = [f"{path.path}: {note}" for path in self.paths for note in path.notes]
        return "\n\n".join([*map(str, self.tables()), *notes])

    def to_json(self) -> dict[str, Any]:
        """Plain values. Times in microseconds a step, FLOPs and bytes a step, None where unknown."""
        return {"format": _FORMAT, "device": self.device, "paths": [_path_to_json(path) for path in self.paths]}

    def save(self, folder: str | Path) -> list[Path]:
        """Write profile.json, trace.json (for ui.perfetto.dev), node_map.json, and profile.png where matplotlib is installed.

        A file of an earlier profile that this one does not have goes.

        Returns:
            The files written.
        """
        from graphrt.profiling.plot import plot_profile

        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        files = [folder / "profile.json", folder / "trace.json"]
        files[0].write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")
        write_trace(files[1], self.paths)
        if self.node_map is not None:
            files.append(folder / "node_map.json")
            self.node_map.save(files[-1])
        if plot_profile(folder / "profile.png", self.paths, self.device):
            files.append(folder / "profile.png")
        for name in PROFILE_FILES:
            if folder / name not in files:
                (folder / name).unlink(missing_ok=True)
        return files


def _by_module(event: Event) -> tuple[str, str]:
    if event.place is None:
        return "(unattributed)", ""
    if event.place.module:
        return event.place.module, event.place.direction or event.place.phase
    return ("(root and loss)", event.place.direction) if event.place.direction else (f"({event.place.phase})", "")


def _by_phase(event: Event) -> tuple[str]:
    if event.place is None:
        return ("(unattributed)",)
    return (event.place.direction if event.place.direction == "recompute" else event.place.phase,)


def _short(name: str) -> str:
    """A kernel's name without its parameters, cut to the width of a table."""
    text = demangled(name).removeprefix("void ")
    depth = 0
    for at, letter in enumerate(text):
        depth += (letter == "<") - (letter == ">" and text[at - 1] != "-")
        if letter == "(" and depth == 0 and at and not text[at:].startswith("(anonymous namespace)"):
            text = text[:at]
            break
    text = text.replace("(anonymous namespace)::", "").replace("at::native::", "")
    return text if len(text) <= 72 else text[:69] + "..."


def _overview(profile: StepProfile) -> Table:
    rows = tuple(
        (
            path.path, _ms(path.step_us), _ms(path.span_us), _ms(path.chain_us), *_beside(path.beside_us, *profile.paths),
            f"{len(path.events) / path.num_steps:,.0f}", f"{path.gap_share:.1%}", f"{path.attributed_share:.2%}",
        )
        for path in profile.paths
    )  # fmt: skip
    columns = ("path", "step ms", "watched ms", "kernels ms", *_beside_column(*profile.paths), "kernels", "gaps", "attributed")
    return Table(f"{profile.device}: one step, mean of {profile.eager.num_steps}", columns, rows)


def _by_layer(path: PathProfile) -> Table:
    """A row a layer in the order of the step, a column a direction, and one for all that is beside others."""
    rows = {row.key: row for row in path.rows(lambda event: (layer_of(event.place), "" if event.place is None else event.place.direction))}
    layers = list(dict.fromkeys(layer_of(event.place) for event in path.events))
    directions = [name for name in ("forward", "recompute", "backward") if any(name == direction for _, direction in rows)]
    cells = tuple(_layer_cells(path, layer, [rows.get((layer, direction)) for direction in (*directions, "")]) for layer in layers)
    columns = ("layer", *(f"{name} ms" for name in directions), "other ms", *_beside_column(path), "share")
    return Table(f"{path.path} step by layer", columns, cells)


def _layer_cells(path: PathProfile, layer: str, rows: Sequence[Row | None]) -> tuple[str, ...]:
    beside_us = sum(row.beside_us for row in rows if row is not None)
    share = sum(row.share for row in rows if row is not None)
    return (layer, *("-" if row is None else _ms_or_none(row.chain_us) for row in rows), *_beside(beside_us, path), f"{share:.1%}")


def _table(title: str, path: PathProfile, labels: tuple[str, ...], key: Callable[[Event], tuple[str, ...]]) -> Table:
    rows = path.rows(key)
    shown = [_cells(path, row) for row in rows[:_NUM_ROWS]]
    rest = rows[_NUM_ROWS:]
    if rest:
        times = _ms_or_none(sum(row.chain_us for row in rest)), *_beside(sum(row.beside_us for row in rest), path)
        share, count = sum(row.share for row in rest), sum(row.num_kernels for row in rest)
        blank = ("",) * (len(labels) - 1)
        shown.append((f"({len(rest)} more)", *blank, *times, f"{share:.1%}", f"{count:,.0f}", "", ""))
    return Table(title, (*labels, "ms", *_beside_column(path), "share", "kernels", "GFLOP", "MB"), tuple(shown), len(labels))


def _cells(path: PathProfile, row: Row) -> tuple[str, ...]:
    times = _ms_or_none(row.chain_us), *_beside(row.beside_us, path)
    return (*row.key, *times, f"{row.share:.1%}", f"{row.num_kernels:,.0f}", *_costs(row))


def _costs(row: Row) -> tuple[str, str]:
    """What is known of the row's work, in 10^9 floating point operations and 10^6 bytes a step."""
    return "-" if row.flops is None else f"{row.flops / 1e9:,.3f}", "-" if row.num_bytes is None else f"{row.num_bytes / 1e6:,.3f}"


def _compare(title: str, paths: Sequence[PathProfile], label: str, key: Callable[[Event], tuple[str, ...]]) -> Table:
    by_path = [{row.key: row for row in path.rows(key)} for path in paths]
    keys = list(dict.fromkeys(row for rows in by_path for row in rows))
    cells = tuple(
        (*row, *(cell for path, rows in zip(paths, by_path, strict=True) for cell in _compared(path, rows.get(row)))) for row in keys
    )
    columns = (name for path in paths for name in (f"{path.path} ms", *_beside_column(path), "share"))
    return Table(title, (label, *columns), cells)


def _compared(path: PathProfile, row: Row | None) -> tuple[str, ...]:
    if row is None:
        return ("-", *_beside(0.0, path), "-")
    return (_ms_or_none(row.chain_us), *_beside(row.beside_us, path), f"{row.share:.1%}")


def _beside_column(*paths: PathProfile) -> tuple[str, ...]:
    """Its name, where anything is beside others."""
    return ("beside ms",) if any(path.beside_us for path in paths) else ()


def _beside(time_us: float, *paths: PathProfile) -> tuple[str, ...]:
    """What stands in it."""
    return (_ms_or_none(time_us),) if _beside_column(*paths) else ()


def _gaps(path: PathProfile) -> list[Table]:
    if not path.gaps:
        return []
    rows = tuple((_where(gap.before), _where(gap.after), str(gap.after.step), f"{gap.duration_us:.1f}") for gap in path.gaps[:_NUM_GAPS])
    return [Table(f"longest gaps of the {path.path} steps", ("after", "before", "step", "us"), rows, 2)]


def _where(event: Event) -> str:
    module, direction = _by_module(event)
    return f"{module} {direction}".strip() + f": {_short(event.name)[:40]}"


def _unattributed(paths: Sequence[PathProfile]) -> list[Table]:
    tables = []
    for path in paths:
        groups = PathProfile(path.path, path.num_steps, path.unattributed, path.step_us).rows(
            lambda event: (_short(event.name), event.reason)
        )
        rows = tuple((*row.key, _ms(row.time_us), f"{row.num_kernels:.1f}") for row in groups)
        if rows:
            tables.append(Table(f"unattributed in the {path.path} steps", ("kernel", "why", "ms", "kernels"), rows, 2))
    return tables


def _ms(time_us: float) -> str:
    return f"{time_us / 1e3:.3f}"


def _ms_or_none(time_us: float) -> str:
    return _ms(time_us) if time_us else "-"


def _path_to_json(path: PathProfile) -> dict[str, Any]:
    return {
        "path": path.path,
        "num_steps": path.num_steps,
        "step_us": path.step_us,
        "span_us": path.span_us,
        "kernel_us": path.kernel_us,
        "beside_us": path.beside_us,
        "busy_us": path.busy_us,
        "num_kernels": len(path.events) / path.num_steps,
        "gap_share": path.gap_share,
        "attributed_share": path.attributed_share,
        "rows": [_row_to_json(row) for row in path.rows(_full_key)],
        "gaps": [_gap_to_json(gap) for gap in path.gaps[:_NUM_ROWS]],
        "unattributed": [
            {"kernel": event.name, "step": event.step, "start_us": event.start_us, "time_us": event.duration_us, "reason": event.reason}
            for event in path.unattributed
        ],
        "notes": list(path.notes),
    }


def _full_key(event: Event) -> tuple[str, ...]:
    place = event.place
    known = ("", "", "", "") if place is None else (place.phase, place.direction, place.module, place.function)
    return (*known, event.kind, event.work, demangled(event.name), "" if place is not None else event.reason or "unknown")


def _row_to_json(row: Row) -> dict[str, Any]:
    phase, direction, module, function, kind, work, kernel, unattributed = row.key
    return {
        "module": module, "direction": direction, "phase": phase, "function": function, "kernel": kernel, "kind": kind, "work": work,
        "is_attributed": not unattributed, "time_us": row.time_us, "beside_us": row.beside_us, "share": row.share,
        "num_kernels": row.num_kernels, "flops": row.flops, "bytes": row.num_bytes,
    }  # fmt: skip


def _gap_to_json(gap: Gap) -> dict[str, Any]:
    ends = {
        name: {"module": module, "direction": direction, "kernel": demangled(event.name)}
        for name, event in (("after", gap.before), ("before", gap.after))
        for module, direction in (_by_module(event),)
    }
    return {"duration_us": gap.duration_us, "step": gap.after.step, **ends}
