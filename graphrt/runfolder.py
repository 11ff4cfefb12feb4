"""The folder of a run: settings.json, metrics.jsonl, checkpoint.pt, slots.json, slots_history.jsonl, summary.json, loss.png.

Files are written beside their place and moved there whole, so that a stop at any moment leaves the last good one.
"""

import contextlib
import errno
import json
import math
import os
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from graphrt import runpieces
from graphrt.runlock import LOCK_NAME, check_idle
from graphrt.settings import InputError, Settings, as_sentence, is_settings_file

__all__ = ["RunFolder", "naming", "replacing"]

_CHECKPOINT_TYPES = {"format": int, "step": int, "shape": str, "corpus": str, "trainer": dict}
_FORMAT = 1
_NUM_NAME_CHARACTERS = 40  # of a file's name in its temporary's, which must not grow too long
_PLOT_REMEDY = "No loss curve: matplotlib is not installed. pip install 'graphrt[plot]' adds it."


class RunFolder:
    """Where a run keeps what it writes.

    Args:
        path: the folder. Nothing is made or read until a method is called.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.settings_file = path / "settings.json"
        self.metrics_file = path / "metrics.jsonl"
        self.checkpoint_file = path / "checkpoint.pt"
        self.slots_file = path / "slots.json"
        self.slots_history_file = path / "slots_history.jsonl"
        self.summary_file = path / "summary.json"
        self.plot_file = path / "loss.png"
        self.report_file = path / "report.png"
        self.tensorboard_folder = path / "tensorboard"

    def check_new(self) -> None:
        """Refuse a folder that is already there or cannot be made, without making it.

        Raises:
            InputError: it exists and is not an empty folder, or its parent cannot be written.
        """
        check_idle(self.path)  # nobody is told to delete what a run is writing
        self._check_startable()

    def _check_startable(self) -> None:
        if os.path.lexists(self.path) and not self.is_startable():
            if is_settings_file(self.settings_file) and not self.checkpoint_file.exists():
                raise InputError(f"{self.path} holds a run without a checkpoint. {self.restart_remedy()}, or choose another --out.")
            remedy = "Go on with it by --resume, or choose another --out." if self.checkpoint_file.exists() else "Choose another --out."
            raise InputError(f"{self.path} exists already. {remedy}")
        try:
            parent = next(folder for folder in (self.path, *self.path.absolute().parents) if folder.exists())
        except OSError as error:
            raise InputError(f"{self.path} cannot be made: {error.strerror or error}. Choose another --out.") from error
        if not (parent.is_dir() and os.access(parent, os.W_OK | os.X_OK)):
            raise InputError(f"{self.path} cannot be made: {parent} is no folder that can be written. Choose another --out.")

    def is_startable(self) -> bool:
        """Whether a run may start here: there is no folder, an empty one, or what a run leaves that stopped before it had results."""
        if not os.path.lexists(self.path):
            return True
        if not self.path.is_dir():
            return False
        files = [file for file in self.path.iterdir() if file.name != LOCK_NAME]
        return all(self._is_worthless(file) for file in files) and (not files or is_settings_file(self.settings_file))

    def _is_worthless(self, file: Path) -> bool:
        is_empty_log = file in (self.metrics_file, self.slots_history_file) and file.stat().st_size == 0
        return file == self.settings_file or is_empty_log or (file.suffix == ".tmp" and file.is_file())

    def restart_remedy(self) -> str:
        """How to start anew a run that has no checkpoint, as a sentence without its full stop."""
        return "Run the same command to start anew" if self.is_startable() else f"Delete it with rm -r {shlex.quote(str(self.path))}"

    def create(self, settings: Settings, lock: Callable[[], None]) -> None:
        """Make the folder and write the settings.

        Args:
            settings: of the run.
            lock: called when the folder is there; raises InputError if another run has it.

        Raises:
            InputError: the file system refuses, or another run was faster.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock()
            self._check_startable()
            for file in self.path.glob("*.tmp"):
                file.unlink()
            self._write(self.settings_file, settings.to_json())
        except OSError as error:
            raise InputError(f"{self.path} cannot be written: {error.strerror}. Choose another --out.") from error

    def save_settings(self, settings: Settings) -> None:
        """Write the settings again, after a resume changed some."""
        self._write(self.settings_file, settings.to_json())

    def check_folder(self, remedy: str) -> None:
        """Refuse a name that no folder can have, or a file has.

        Raises:
            InputError: it is one.
        """
        try:
            is_file = not self.settings_file.is_file() and self.path.is_file()
        except PermissionError as error:
            raise _unreadable(self.settings_file, error) from error
        except OSError as error:
            raise InputError(f"{self.path} cannot be looked into: {error.strerror or error}. {remedy}") from error
        if is_file:
            raise InputError(f"{self.path} is a file. {remedy}")

    def _check_pieces(self) -> None:
        """Refuse to resume a run that could not write a file where something else is."""
        files = (self.metrics_file, self.slots_history_file, self.summary_file, self.slots_file, self.plot_file)
        for file in files:
            if file.exists() and not file.is_file():
                raise InputError(f"{file} is not a file. Move it away to resume the run.")

    def load_settings(self) -> Settings:
        """The settings of the run to resume.

        Raises:
            InputError: there is no run here, or no checkpoint, or it cannot be written on.
        """
        self.check_folder("Give the folder of a run by --out.")
        if not _is_file(self.settings_file):
            raise InputError(f"{self.path} has no settings.json to resume from. Check --out, or leave out --resume to start a new run.")
        check_idle(self.path)
        if not _is_file(self.checkpoint_file):
            remedy = "Leave out --resume to start it anew." if self.is_startable() else f"{self.restart_remedy()} to start it anew."
            raise InputError(f"{self.path} has no checkpoint.pt to resume from. {remedy}")
        if not os.access(self.path, os.W_OK | os.X_OK):
            raise InputError(f"{self.path} cannot be written. Change its permissions to resume the run.")
        self._check_pieces()
        return self._parse_settings("Start a new run with another --out.")

    def read_settings(self) -> Settings:
        """The settings of the run here, finished or not, to look at.

        Raises:
            InputError: there is no run here, or its settings are damaged.
        """
        self.check_folder("Give the folder of a run: the --out of a graphrt train.")
        if not _is_file(self.settings_file):
            is_folder = self.path.is_dir()
            fact = f"{self.path} is no run folder: it has no settings.json" if is_folder else f"There is no folder {self.path}"
            raise InputError(f"{fact}. Give the --out of a graphrt train.")
        return self._parse_settings("Give the folder of another run.")

    def _parse_settings(self, remedy: str) -> Settings:
        try:
            return Settings.from_json(self.settings_file.read_text(encoding="utf-8"), self.settings_file, remedy)
        except OSError as error:
            raise _unreadable(self.settings_file, error) from error
        except UnicodeDecodeError as error:
            raise InputError(f"{self.settings_file} cannot be read: {as_sentence(str(error))} {remedy}") from error

    def save_checkpoint(self, step: int, settings: Settings, corpus: str, trainer_state: Mapping[str, Any]) -> None:
        """Replace the checkpoint by one after `step` steps, at once.

        Args:
            step: number of optimizer steps done.
            settings: of the run.
            corpus: fingerprint of the text.
            trainer_state: `Trainer.state_dict()`.
        """
        checkpoint = {"format": _FORMAT, "step": step, "shape": str(settings.shape), "corpus": corpus, "trainer": trainer_state}
        with replacing(self.checkpoint_file) as temporary:
            try:
                torch.save(checkpoint, temporary)
            except RuntimeError as error:  # how torch says that the disk is full
                raise OSError(errno.ENOSPC, "the disk may be full", str(self.checkpoint_file)) from error

    def load_checkpoint(self, settings: Settings, corpus: str) -> dict[str, Any]:
        """The checkpoint, with its tensors on the CPU.

        Raises:
            InputError: it is cut short, of another model, or of a run on other text.
        """
        file, restart = self.checkpoint_file, "Start a new run with another --out."
        try:
            checkpoint = torch.load(file, map_location="cpu", weights_only=True)
        except OSError as error:
            raise _unreadable(file, error) from error
        except Exception as error:  # torch raises whatever its zip and pickle readers do
            raise InputError(f"{file} cannot be read: it is cut short or no checkpoint. {restart}") from error
        if not _is_checkpoint(checkpoint):
            raise InputError(f"{file} is not a checkpoint of graphrt train, format {_FORMAT}. {restart}")
        if checkpoint["shape"] != str(settings.shape):
            raise InputError(f"{file} is of another model: it has {checkpoint['shape']}, the run {settings.shape}. {restart}")
        if checkpoint["corpus"] != corpus:
            raise InputError(f"The text has changed since {file} was written: it was {checkpoint['corpus']}, it is {corpus}. {restart}")
        return checkpoint

    def append_metrics(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add a line of JSON for each row to metrics.jsonl."""
        _append_lines(self.metrics_file, rows)

    def read_metrics(self) -> list[dict[str, Any]]:
        """The rows so far; what is no row, such as a last line that was cut short, is left out."""
        return runpieces.read_metrics(self.metrics_file)[0]

    def append_slot_history(self, slots: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
        """Add a line of JSON for each row to slots_history.jsonl, whose first line names the slots.

        Without that line the rows before say nothing, and the file begins anew.
        """
        if runpieces.first_slots(self.slots_history_file) != list(slots):
            self._write(self.slots_history_file, json.dumps({"slots": list(slots)}) + "\n")
        _append_lines(self.slots_history_file, rows)

    def drop_rows_after(self, step: int) -> None:
        """Forget rows of steps that a resumed run does again."""
        for file in (self.metrics_file, self.slots_history_file):
            if file.exists():
                self._write(file, runpieces.rows_up_to(file, step))

    def save_summary(self, values: Mapping[str, Any]) -> None:
        """Write summary.json: what a run tells about itself beside its metrics."""
        self._write(self.summary_file, json.dumps(values, indent=2) + "\n")

    def read_summary(self) -> dict[str, Any]:
        """What `save_summary` wrote; without what cannot be read."""
        return runpieces.read_summary(self.summary_file)[0]

    def save_slots(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write one JSON object a slot."""
        self._write(self.slots_file, json.dumps(list(rows), indent=2) + "\n")

    def plot_loss(self, unit: str) -> str:
        """Draw training and validation loss over steps.

        Args:
            unit: of the vertical axis: "bits per byte" or "bits per token".

        Returns:
            One line to show: where the curve is, or what to install for one.
        """
        try:
            from matplotlib.backends.backend_agg import FigureCanvasAgg
            from matplotlib.figure import Figure
        except ImportError:
            return _PLOT_REMEDY
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot(xlabel="step", ylabel=unit, title=self.path.name)
        rows = self.read_metrics()
        for key, label, marker in (("loss", "training", ""), ("val_loss", "validation", "o")):
            points = [(row["step"], row[key] / math.log(2)) for row in rows if row.get(key) is not None]
            axes.plot([step for step, _ in points], [loss for _, loss in points], label=label, marker=marker, linewidth=1)
        axes.grid(alpha=0.3)
        axes.legend()
        with replacing(self.plot_file) as temporary:
            figure.savefig(temporary, format="png", dpi=120)
        return f"Loss curve: {self.plot_file}"

    def _write(self, file: Path, text: str) -> None:
        with replacing(file) as temporary:
            temporary.write_text(text, encoding="utf-8")


def _append_lines(file: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    with naming(file), open(file, "a", encoding="utf-8") as opened:
        opened.writelines(json.dumps(row) + "\n" for row in rows)


def _is_checkpoint(value: object) -> bool:
    if not isinstance(value, dict) or not all(type(value.get(name)) is kind for name, kind in _CHECKPOINT_TYPES.items()):
        return False
    return value["format"] == _FORMAT and value["step"] >= 0


def _is_file(file: Path) -> bool:
    try:
        return file.is_file()
    except OSError as error:  # the folder may not be looked into
        raise _unreadable(file, error) from error


def _unreadable(file: Path, error: OSError) -> InputError:
    return InputError(f"{file} cannot be read: {error.strerror or error}. Make it readable, and try again.")


@contextlib.contextmanager
def naming(file: Path) -> Iterator[None]:
    """Give an error the file's name: a write that fails does not know it."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(file)
        raise


@contextlib.contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """A name to write to; what is there takes the file's place when the body ends well, and goes when it does not."""
    temporary = file.with_name(f"{file.name[:_NUM_NAME_CHARACTERS]}.{os.getpid()}.tmp")
    try:
        yield temporary
        os.replace(temporary, file)
    except OSError as error:
        if str(error.filename) in ("None", str(temporary)):  # the user knows the file
            error.filename, error.filename2 = str(file), None
        raise
    finally:
        with contextlib.suppress(OSError):  # a folder that is no more
            temporary.unlink(missing_ok=True)
