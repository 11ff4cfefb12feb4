"""The CPU generator while a step is recorded.

Activation checkpointing reads the generator's state in the forward and puts it back for the recompute. Neither is an
operation, so a dispatch mode sees neither, and a replay without them would draw other dropout masks in the recompute than
in the forward. While recording, `torch.random` therefore works on a stand-in for its default generator: reading the state
becomes a node that writes the state of *this replay* into a static tensor, putting it back a node that reads that tensor.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from graphrt.capture.hazards import Hazard, Watcher, replaced

__all__ = ["RngWatcher", "recorded_rng"]

_SEED = Hazard("seeds the generator inside the step", "Seed it before the step.")
_FOREIGN = Hazard(
    "restores a generator state that was not read inside the step, which a graph would freeze",
    "Read the state inside the step (torch.get_rng_state, torch.random.fork_rng), or restore it before the step.",
)


class RngWatcher(Watcher, Protocol):
    """A recording that also takes reads and writes of the generator's state."""

    def has_made(self, tensor: Tensor) -> bool: ...
    def add_rng_save(self, generator: torch.Generator, state: Tensor) -> None: ...
    def add_rng_restore(self, generator: torch.Generator, state: Tensor) -> None: ...


class _RecordedGenerator:
    """What torch.random calls its default generator during a recording. Other threads reach the generator itself."""

    def __init__(self, generator: torch.Generator, watcher: RngWatcher) -> None:
        self._generator = generator
        self._watcher = watcher

    def get_state(self) -> Tensor:
        state = self._generator.get_state()
        if self._watcher.is_watching():
            self._watcher.add_rng_save(self._generator, state)
        return state

    def set_state(self, state: Tensor) -> torch.Generator:
        if self._watcher.is_watching():
            if not self._watcher.has_made(state):
                self._watcher.refuse("torch.set_rng_state", _FOREIGN)
            else:
                self._watcher.add_rng_restore(self._generator, state)
        return self._generator.set_state(state)

    def manual_seed(self, seed: int) -> torch.Generator:
        self._refuse_seed("torch.manual_seed")
        return self._generator.manual_seed(seed)

    def seed(self) -> int:
        self._refuse_seed("torch.seed")
        return self._generator.seed()

    def _refuse_seed(self, name: str) -> None:
        if self._watcher.is_watching():
            self._watcher.refuse(name, _SEED)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator, name)


@contextmanager
def recorded_rng(watcher: RngWatcher) -> Iterator[None]:
    """For the time of a block, make `torch.random`'s functions report to `watcher`, however they were imported."""
    stand_in = _RecordedGenerator(torch.default_generator, watcher)
    with replaced(torch.random, "default_generator", stand_in):
        yield
