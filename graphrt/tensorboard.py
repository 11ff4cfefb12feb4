"""A run's metrics as TensorBoard events, for those who have it installed."""

import os
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from graphrt.settings import InputError

__all__ = ["EventLog", "check_tensorboard"]

#: metrics.jsonl's keys -> TensorBoard's tags. Losses are in nats per token.
TAGS = {
    "loss": "train/loss", "grad_norm": "train/grad_norm", "lr": "train/lr", "skipped": "train/skipped", "val_loss": "validation/loss",
    "tokens_per_s": "speed/tokens_per_s", "step_ms": "speed/step_ms", "gap_share": "speed/gap_share",
}  # fmt: skip


def check_tensorboard(folder: Path) -> None:
    """Refuse to go on without the library, or with something else where the events go.

    Raises:
        InputError: the library is not installed, or ``folder`` is no folder that can be written.
    """
    if os.path.lexists(folder) and not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
        raise InputError(f"{folder} is no folder that can be written. Move it away, or leave --tensorboard out.")
    try:
        _import_writer()
    except ImportError as error:
        raise InputError(
            f"--tensorboard needs the tensorboard package: {error}. pip install 'graphrt[tensorboard]', or leave the option out."
        ) from error


def _import_writer() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its dependencies; nothing a user of graphrt could act on
        from torch.utils.tensorboard import SummaryWriter
    return SummaryWriter


class EventLog:
    """Writes rows of metrics as events. What an earlier part of the run wrote beyond ``step`` is hidden by TensorBoard.

    Args:
        folder: where event files go.
        step: number of steps done before.
    """

    def __init__(self, folder: Path, step: int) -> None:
        self._writer = _import_writer()(str(folder), purge_step=step + 1 if step else None)

    def add_rows(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write each number of each row under its tag, and hand it to the file system."""
        for row in rows:
            for key, tag in TAGS.items():
                if row.get(key) is not None:
                    self._writer.add_scalar(tag, float(row[key]), row["step"])
        self._writer.flush()

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._writer.close()
