"""The profile job: build a run's or a preset's trainer, take a few steps, and show where their time goes."""

import contextlib
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable
from torch import Tensor

from graphrt.data import Split, sample_windows, split_corpus
from graphrt.jobsetup import build_trainer, resolve_device
from graphrt.presets import PRESETS
from graphrt.profiling.report import PROFILE_FILES, StepProfile, Table
from graphrt.runfolder import RunFolder, naming
from graphrt.settings import InputError, Settings, as_sentence, make_settings
from graphrt.train import load_corpus
from graphrt.trainer import Trainer

__all__ = ["ProfileJob", "plan_profile", "run_profile"]

#: Options that may differ from what a run was trained with.
_CHANGEABLE = ("device", "checkpointing", "mode", "backward_accum", "weight_transpose")
_MODES = ("graph", "eager")
_MIN_ATTRIBUTED = 0.99


@dataclass(frozen=True)
class ProfileJob:
    """What to profile and where to write.

    Attributes:
        run: the folder whose checkpoint to load; None for fresh weights.
        num_steps: steps of each path.
        out: the folder to write.
    """

    settings: Settings
    run: RunFolder | None
    num_steps: int
    out: Path


def plan_profile(target: str | None, options: Mapping[str, Any], num_steps: int, out: Path | None) -> ProfileJob:
    """A job from what the command line says.

    Args:
        target: a run folder, or the name of a preset; None for the preset in ``options``.
        options: settings by field name, None where not given.
        num_steps: steps of each path.
        out: folder to write; None for one beside the run, or under runs/.

    Raises:
        InputError: something given cannot be used; nothing was written.
    """
    if num_steps < 1:
        raise InputError(f"--steps must be a whole number of at least 1, got {num_steps}.")
    given = {name: value for name, value in options.items() if value is not None}
    if given.get("mode", "graph") not in _MODES:
        raise InputError(f"--mode must be one of {', '.join(_MODES)}, got {given['mode']!r}.")
    if target is None or (target in PRESETS and not Path(target).is_dir()):
        if target is not None and given.setdefault("preset", target) != target:
            raise InputError(f"{target} and --preset {given['preset']} are both given. Choose one.")
        settings, run = make_settings({"mode": "graph", **given}), None
    else:
        settings, run = _settings_of_run(Path(target), given)
    out = out or (Path("runs") / f"{settings.preset}-profile" if run is None else run.path / "profile")
    _check_out(out)
    return ProfileJob(settings, run, num_steps, out)


def _settings_of_run(path: Path, given: Mapping[str, Any]) -> tuple[Settings, RunFolder]:
    folder = RunFolder(path)
    fixed = next((name for name in given if name not in _CHANGEABLE), None)
    if fixed is not None:
        raise InputError(f"--{fixed.replace('_', '-')} cannot be changed for {path}, a run that has its settings. Leave it out.")
    folder.check_folder(f"Give the folder of a graphrt train run, or one of {', '.join(PRESETS)}.")
    if not folder.settings_file.is_file():
        fact = f"{path} has no settings.json" if path.is_dir() else f"There is no folder {path}"
        raise InputError(f"{fact}. Give the folder of a graphrt train run, or one of {', '.join(PRESETS)}.")
    settings = folder.read_settings()
    # Checked again: an option of the command line may be one that does not exist.
    checked = make_settings({name: value for name, value in given.items() if value is not None})
    return replace(settings, **{"mode": "graph", "device": "auto", **{name: getattr(checked, name) for name in given}}), folder


def _check_out(out: Path) -> None:
    """Refuse a folder with something else in it than an earlier profile, or that cannot be written."""
    try:
        if out.exists() and not (out.is_dir() and (not any(out.iterdir()) or (out / "profile.json").is_file())):
            raise InputError(f"{out} exists already and holds no profile. Choose another --out.")
        _try_out(out)
    except OSError as error:
        raise InputError(f"{out} cannot be written: {error.strerror or error}. Choose another --out.") from error
    for file in (out / name for name in PROFILE_FILES):
        if os.path.lexists(file) and not (file.is_file() and os.access(file, os.W_OK)):
            raise InputError(f"{file} is no file that can be written. Move it away, or choose another --out.")


def _try_out(out: Path) -> None:
    """Make the folder and a file in it, and take away again what was made."""
    new = [folder for folder in (out, *out.absolute().parents) if not folder.exists()]
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=out):
            pass
    finally:
        for folder in new:
            with contextlib.suppress(OSError):
                folder.rmdir()


def run_profile(job: ProfileJob, console: Console) -> StepProfile:
    """Profile, print the tables, and write the files.

    Raises:
        InputError: the text, the device or the run's checkpoint cannot be used.
    """
    settings = job.settings
    corpus = load_corpus(settings)
    split = split_corpus(corpus, settings.seq_len)
    device = resolve_device(settings)
    saved = None
    if job.run is not None and job.run.checkpoint_file.is_file():
        saved = job.run.load_checkpoint(settings, corpus.fingerprint())
    console.print(
        f"Profiling [bold]{settings.preset}[/] ({settings.shape.num_parameters / 1e6:.1f} M parameters) in {settings.arithmetic} on "
        f"{device}: {job.num_steps} steps of each path, {settings.tokens_per_step:,} tokens a step."
    )
    with build_trainer(settings, device) as trainer:
        if saved is not None:
            _load(trainer, saved, job.run)
        for step in range(trainer.warmup_steps + 1):
            trainer.step(_batch(split, settings, device, step))
        profile = trainer.profile(_batch(split, settings, device, trainer.warmup_steps + 1), steps=job.num_steps)
    _show(profile, console)
    with naming(job.out):
        files = profile.save(job.out)
    console.print(f"Written to {job.out}: {', '.join(file.name for file in files)}", markup=False, highlight=False, soft_wrap=True)
    if not any(file.suffix == ".png" for file in files):
        console.print("No picture: matplotlib is not installed. pip install 'graphrt[plot]' adds it.", markup=False, highlight=False)
    console.print("Open trace.json at https://ui.perfetto.dev (it stays on your machine): a row a layer.", highlight=False)
    return profile


def _load(trainer: Trainer, saved: dict[str, Any], run: RunFolder | None) -> None:
    try:
        trainer.load_state_dict(saved["trainer"])
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise InputError(
            f"{run and run.checkpoint_file} does not fit the run's model: {as_sentence(str(error))} Give another run."
        ) from error


def _batch(split: Split, settings: Settings, device: torch.device, step: int) -> dict[str, Tensor]:
    windows = sample_windows(split.train, settings.seq_len, settings.batch_size, settings.seed, step)
    tensors = (torch.from_numpy(array.copy()).to(device) for array in windows)
    return dict(zip(("tokens", "labels"), tensors, strict=True))


def _show(profile: StepProfile, console: Console) -> None:
    for table in profile.tables():
        if not console.is_terminal:
            # A file has no width to fit into: names stay whole, for whoever searches it.
            console.print(f"{table}\n", markup=False, highlight=False, soft_wrap=True)
            continue
        # A table's own title is wrapped to the table's width, however narrow.
        console.print(f"[italic]{escape(table.title)}[/]", highlight=False, soft_wrap=True)
        console.print(_rich(table))
    for path in profile.paths:
        for note in path.notes:
            console.print(f"{path.path}: {note}", markup=False, highlight=False)
        if path.attributed_share < _MIN_ATTRIBUTED:
            console.print(f"{path.path}: only {path.attributed_share:.1%} of the kernels' time has a module or a phase.", highlight=False)


def _rich(table: Table) -> RichTable:
    shown = RichTable(box=SIMPLE_HEAD)
    for i, name in enumerate(table.columns):
        is_label = i < table.num_labels
        shown.add_column(name, justify="left" if is_label else "right", no_wrap=not is_label, overflow="fold" if is_label else "ellipsis")
    for row in table.rows:
        shown.add_row(*map(escape, row))
    return shown
