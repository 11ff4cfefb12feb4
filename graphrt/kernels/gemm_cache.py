"""Choices of GEMM algorithms on disk, so that a later run on the same machine computes with the same ones.

A file of JSON: a machine (its GPU and its cuBLASLt), then a product, then what was chosen and the times that decided. It is
only ever an optimisation: whatever is wrong with it, the products are timed anew and the file is written anew.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphrt.kernels.compiler import cache_dir, replace_file
from graphrt.kernels.cublaslt import ALGORITHM_BYTES
from graphrt.kernels.cublaslt_gemm import Algorithm

__all__ = ["VARIABLE", "Choice", "ChoiceFile", "choice_path"]

#: Environment variable: "off" leaves every product to torch, anything else is the path of the file.
VARIABLE = "GRAPHRT_GEMM_CHOICES"

_FORMAT = 1


def choice_path() -> Path | None:
    """``$GRAPHRT_GEMM_CHOICES``, or ``gemm_choices.json`` beside the compiled kernels; None for "off"."""
    value = os.environ.get(VARIABLE)
    if value == "off":
        return None
    return Path(value) if value else cache_dir() / "gemm_choices.json"


@dataclass(frozen=True)
class Choice:
    """What a product was found to run fastest with.

    Attributes:
        algorithm: None for the one that torch takes.
        first_us: median time of the one that torch takes, in microseconds.
        chosen_us: median time of the chosen one.
    """

    algorithm: Algorithm | None
    first_us: float
    chosen_us: float


class ChoiceFile:
    """The choices of one machine in one file.

    Args:
        path: of the file; it need not exist.
        machine: names the GPU and the version of cuBLASLt.
    """

    def __init__(self, path: Path, machine: str) -> None:
        self.path, self.machine = path, machine
        self._choices = {product: _parse(entry) for product, entry in _read(path).get(machine, {}).items()}
        self._new: dict[str, Choice] = {}

    def get(self, product: str) -> Choice | None:
        """What is known of a product; None if nothing is."""
        return self._choices.get(product)

    def add(self, product: str, choice: Choice) -> None:
        """Take in a choice; `save` writes it."""
        self._choices[product] = self._new[product] = choice

    def save(self) -> None:
        """Write what is new beside what others have written in the meantime."""
        if not self._new:
            return
        machines = _read(self.path)
        entries = {product: _entry(choice) for product, choice in self._new.items()}
        machines[self.machine] = {**machines.get(self.machine, {}), **entries}
        replace_file(self.path, json.dumps({"format": _FORMAT, "machines": machines}, indent=1).encode())
        self._new.clear()


def _read(path: Path) -> dict[str, dict[str, Any]]:
    """The entries in the file, by machine and product, of a form that was checked; empty if it is damaged or of another format."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    if not isinstance(content, dict) or content.get("format") != _FORMAT or not isinstance(content.get("machines"), dict):
        return {}
    machines = content["machines"].items()
    return {
        machine: {product: entry for product, entry in entries.items() if _parse(entry) is not None}
        for machine, entries in machines
        if isinstance(entries, dict)
    }


def _entry(choice: Choice) -> dict[str, Any]:
    algorithm = choice.algorithm
    return {
        "algorithm": None if algorithm is None else algorithm.data.hex(),
        "workspace_bytes": 0 if algorithm is None else algorithm.workspace_bytes,
        "first_us": round(choice.first_us, 3),
        "chosen_us": round(choice.chosen_us, 3),
    }


def _parse(entry: Any) -> Choice | None:
    """The choice in an entry; None if it holds none."""
    try:
        data, times = entry["algorithm"], (float(entry["first_us"]), float(entry["chosen_us"]))
        algorithm = None if data is None else Algorithm(bytes.fromhex(data), int(entry["workspace_bytes"]))
    except (KeyError, TypeError, ValueError):
        return None
    return None if algorithm is not None and len(algorithm.data) != ALGORITHM_BYTES else Choice(algorithm, *times)
