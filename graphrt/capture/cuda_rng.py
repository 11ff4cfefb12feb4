"""The rewinds of activation checkpointing inside a CUDA graph.

A checkpoint reads the device generator's state in the forward and puts it back for the recompute, so that dropout draws
the same masks. Under capture neither has an effect on what a graph draws: inside a graph the offset of a draw is its
place in the graph, added at replay to an offset the host gives. A rewound recompute would silently draw other masks.

So the last warmup step records where the generator stood at each read and write. Under capture a write that rewinds
switches the default generator to another generator state, registered with the graph, that starts at the offset to go back
to; a write that returns switches back. Before each replay the host sets those states to the step's base offset plus their
place. A step that draws nothing in its recomputes needs none of this.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from graphrt.errors import CaptureError

__all__ = ["CudaRng", "RngTrace", "observed_rng"]


@dataclass
class RngTrace:
    """Reads and writes of the generator in one step, as offsets from where it stood at the start."""

    events: list[tuple[int, int]] = field(default_factory=list)  # (offset before, offset after)
    end: int = 0


@contextmanager
def observed_rng(device: torch.device) -> Iterator[RngTrace]:
    """Record the reads and writes of the device's default generator that torch.cuda's functions make inside the block."""
    trace = RngTrace()
    generator = _default_generator(device)
    base = generator.get_offset()

    def get(original: Any, where: Any) -> Tensor:
        offset = generator.get_offset() - base
        trace.events.append((offset, offset))
        return original(where)

    def put(original: Any, state: Tensor, where: Any) -> None:
        before = generator.get_offset() - base
        original(state, where)
        trace.events.append((before, generator.get_offset() - base))

    with _replaced(device, get, put):
        yield trace
    trace.end = generator.get_offset() - base


def _default_generator(device: torch.device) -> torch.Generator:
    index = device.index if device.index is not None else torch.cuda.current_device()
    return torch.cuda.default_generators[index]


@contextmanager
def _replaced(device: torch.device, get: Any, put: Any) -> Iterator[None]:
    """torch.cuda.get_rng_state and set_rng_state, as checkpoints and fork_rng call them, for one device."""
    original_get, original_put = torch.cuda.get_rng_state, torch.cuda.set_rng_state

    def is_ours(where: Any) -> bool:
        where = torch.device("cuda", where) if isinstance(where, int) else torch.device(where)
        index = torch.cuda.current_device() if where.index is None else where.index
        return index == (device.index if device.index is not None else torch.cuda.current_device())

    def get_rng_state(device: Any = "cuda") -> Tensor:
        return get(original_get, device) if is_ours(device) else original_get(device)

    def set_rng_state(new_state: Tensor, device: Any = "cuda") -> None:
        put(original_put, new_state, device) if is_ours(device) else original_put(new_state, device)

    torch.cuda.get_rng_state, torch.cuda.set_rng_state = get_rng_state, set_rng_state
    try:
        yield
    finally:
        torch.cuda.get_rng_state, torch.cuda.set_rng_state = original_get, original_put


@dataclass(frozen=True)
class _Plan:
    """Which generator state draws when.

    starts[k]: place of the k-th extra state; switches[i]: state to be on after event i (0 is the default one; event -1 is
    the start); default_end: where the default state stands at the end.
    """

    starts: list[int]
    switches: dict[int, int]
    default_end: int


def plan_switches(trace: RngTrace) -> _Plan:
    """Which generator state each stretch between two events has to draw from."""
    places = [0]  # where each state stands; the default one starts at the base
    starts: list[int] = []
    switches: dict[int, int] = {}
    current = 0
    stretches = [(-1, 0), *((i, after) for i, (_, after) in enumerate(trace.events))]
    ends = [*(before for before, _ in trace.events), trace.end]
    for (event, begin), end in zip(stretches, ends, strict=True):
        if end == begin:
            continue  # draws nothing, so it does not matter where
        # The default state goes on whenever it can, so that it ends where the step's generator does.
        if places[current] != begin or (current != 0 and places[0] == begin):
            if begin not in places:
                places.append(begin)
                starts.append(begin)
            current = places.index(begin)
            switches[event] = current
        places[current] = end
    return _Plan(starts, switches, places[0])


class CudaRng:
    """Generator states of one captured graph.

    Args:
        trace: what the last warmup step did.
        device: the graph's device.
    """

    def __init__(self, trace: RngTrace, device: torch.device) -> None:
        self._trace, self._device = trace, device
        self._plan = plan_switches(trace)
        self._default = _default_generator(device)
        self._extra = [torch.Generator(device) for _ in self._plan.starts]
        self._base = 0

    def register(self, graph: torch.cuda.CUDAGraph) -> None:
        """Make the extra states known to the graph; before its capture begins."""
        for generator in self._extra:
            graph.register_generator_state(generator)

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Answer reads and writes of the generator while the step is captured.

        Raises:
            CaptureError: the step reads or writes the generator elsewhere than the warmup step did.
        """
        states = [self._default.graphsafe_get_state(), *(generator.graphsafe_get_state() for generator in self._extra)]
        num_events = 0

        def advance() -> None:
            nonlocal num_events
            if num_events >= len(self._trace.events):
                raise CaptureError("The captured step reads or writes the RNG state more often than the warmup step. Make all steps alike.")
            state = self._plan.switches.get(num_events)
            if state is not None:
                self._default.graphsafe_set_state(states[state])
            num_events += 1

        def get(original: Any, where: Any) -> Tensor:
            advance()
            return original(where)

        def put(_original: Any, _state: Tensor, _where: Any) -> None:
            advance()

        try:
            with _replaced(self._device, get, put):
                yield
        finally:
            self._default.graphsafe_set_state(states[0])
        if num_events != len(self._trace.events):
            raise CaptureError("The captured step reads or writes the RNG state less often than the warmup step. Make all steps alike.")

    def prepare_replay(self) -> None:
        """Set the extra states to their places in the step that is about to be replayed; host work only."""
        if not self._extra and not self._has_to_move_default:
            return
        seed, base = self._default.initial_seed(), self._default.get_offset()
        self._base = base
        for generator, start in zip(self._extra, self._plan.starts, strict=True):
            if generator.initial_seed() != seed:
                generator.manual_seed(seed)
            generator.set_offset(base + start)

    def finish_replay(self) -> None:
        """Leave the default state where an eager step leaves it: a replay moves it by what the graph drew from it."""
        if self._has_to_move_default:
            self._default.set_offset(self._base + self._trace.end)

    @property
    def _has_to_move_default(self) -> bool:
        return self._plan.default_end != self._trace.end
