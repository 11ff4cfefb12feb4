"""The quantization state of one converted model: scales, amax histories, and when they move.

[Note: the packed state]
All slots of a model share a few tensors, so that one launch updates all slots of a direction. The slots of the forward
direction (inputs and weights) come first, those of the backward direction (output gradients) after them; a slot is a
column. Row 0 of the history is the staging row: casts max-merge their amax into it, an update moves it into the history.
``scale_inv`` has a stride of 16 bytes a slot, which is what FP8 GEMMs ask of a scale's address.

[Note: two updates a step]
The forward direction updates when the outermost region exits. The backward direction cannot: its amaxes exist only once
a backward has run, which nothing in the forward can know. So each quantized backward *requests* the update, and the
request is flushed once, at the next top-level region entry with gradients. By then the previous backward is complete
whatever the shape of the autograd graph was, and no module owns the update.
"""

import itertools
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from graphrt import kernels
from graphrt.aside import aside
from graphrt.errors import FlushError
from graphrt.guards import is_capturing, is_compiling, is_in_backward, untraced
from graphrt.ranges import SCALE_UPDATE
from graphrt.recipe import FP8_MAX, DelayedScaling
from graphrt.recompute import in_recompute

__all__ = [
    "QuantizationState", "Scales", "SlotCounts", "StateSnapshot", "blocking_guard", "last_update", "num_ranks", "registered_states",
]  # fmt: skip

FORWARD, BACKWARD = 0, 1
_TENSORS = ("scale", "scale_inv", "amax_history", "num_nonfinite", "num_updates")

# Weak, so that a model's state goes when the model goes. In order of creation, which is the same on every rank.
_registry: "weakref.WeakValueDictionary[int, QuantizationState]" = weakref.WeakValueDictionary()
_serials = itertools.count()


def registered_states() -> list["QuantizationState"]:
    """All living states of the process, in order of creation."""
    return [state for reference in _registry.valuerefs() if (state := reference()) is not None]


def blocking_guard(*, may_capture: bool = False) -> str | None:
    """Why an update must not run now, as the end of a sentence; None when it may.

    Args:
        may_capture: the update is to become part of a graph that is being captured.
    """
    if is_compiling():
        return "while torch.compile is tracing"
    if in_recompute():
        return "in the recompute phase of activation checkpointing"
    if is_in_backward():
        return "inside a running backward"
    if is_capturing() and not may_capture:
        return "while a CUDA graph is being captured"
    return None


def num_ranks(group: Any) -> int:
    """Ranks in ``group`` (None: the default group); 1 without an initialised process group."""
    if not dist.is_available() or not dist.is_initialized():
        return 1
    return dist.get_world_size(group)


def last_update() -> AbstractContextManager[None]:
    """Surrounds a step's last update of a direction, which nothing in the step reads: it may run aside.

    With a process group it stays where it is: collectives have one order on all ranks.
    """
    return aside() if num_ranks(None) == 1 else nullcontext()


class Scales(NamedTuple):
    """Scales of all slots at one moment: ``scale`` [n] fp32 and ``scale_inv`` [n, 4] fp32."""

    scale: Tensor
    scale_inv: Tensor


class SlotCounts(NamedTuple):
    """What quantization did to the elements of one slot."""

    num_elements: int
    num_saturated: int  # finite, but beyond the format's largest value once scaled
    num_underflowed: int  # not zero before the cast, zero after it


@dataclass(frozen=True)
class StateSnapshot:
    """A copy of everything a `QuantizationState` holds; `QuantizationState.restore` puts it back."""

    tensors: dict[str, Tensor]
    host_updates: tuple[int, int]
    is_requested: bool
    has_replayed: bool
    group: Any


class QuantizationState:
    """Scales and amax histories of every slot of a converted model.

    Args:
        recipe: how scales follow from amaxes.
        forward_slots: names of the input and weight slots.
        backward_slots: names of the output gradient slots.
        device: where the packed tensors live; `to` moves them.

    A slot's name is ``"<module fqn>.input"``, ``".weight"`` or ``".grad_output"``.
    """

    def __init__(
        self, recipe: DelayedScaling, forward_slots: Sequence[str], backward_slots: Sequence[str], device: torch.device | str = "cpu"
    ) -> None:
        self.recipe = recipe
        self.slots: tuple[str, ...] = (*forward_slots, *backward_slots)
        self._num_forward = len(forward_slots)
        self._index = {name: i for i, name in enumerate(self.slots)}
        n = len(self.slots)
        self._scale = torch.ones(n, device=device)
        self._scale_inv = torch.ones(n, 4, device=device)
        self._amax_history = torch.zeros(recipe.amax_history_len, n, device=device)
        self._num_nonfinite = torch.zeros(n, dtype=torch.int32, device=device)
        self._num_updates = torch.zeros(2, dtype=torch.int64, device=device)
        self._host_updates = [0, 0]
        self._has_replayed = False
        self._is_requested = False
        self._group: Any = None
        self._saturation: dict[str, SlotCounts] | None = None
        self.conversion: Any = None  # the ConversionReport, for whoever asks later
        self._register()

    def __repr__(self) -> str:
        return f"QuantizationState({len(self.slots)} slots on {self.device}, {self.recipe})"

    # -- copies: a deepcopied or unpickled state never runs __init__, but has to be found by the flush all the same

    def _register(self) -> None:
        self.serial = next(_serials)
        _registry[self.serial] = self

    def __getstate__(self) -> dict[str, Any]:
        # Process groups do not pickle, and a saturation count belongs to the block that opened it.
        return {**self.__dict__, "_group": None, "_saturation": None}

    def __setstate__(self, values: dict[str, Any]) -> None:
        self.__dict__.update(values)
        self._register()

    # -- reading

    @property
    def device(self) -> torch.device:
        """Where the packed tensors live."""
        return self._scale.device

    def slot_index(self, slot: str) -> int:
        """Column of ``slot`` in the packed tensors.

        Raises:
            ValueError: no such slot.
        """
        if slot not in self._index:
            raise ValueError(f"There is no slot {slot!r} among the {len(self.slots)} of this state. Take a name from state.slots.")
        return self._index[slot]

    def scale(self, slot: str) -> Tensor:
        """The slot's scale, a 0-dim fp32 view."""
        return self._scale[self.slot_index(slot)]

    def scale_inv(self, slot: str) -> Tensor:
        """1 / scale, a 0-dim fp32 view."""
        return self._scale_inv[self.slot_index(slot), 0]

    def amax_history(self, slot: str) -> Tensor:
        """The slot's amaxes, an ``[amax_history_len]`` fp32 view: row 0 staging, rows 1.. oldest to newest."""
        return self._amax_history[:, self.slot_index(slot)]

    def nonfinite_amaxes(self, slot: str) -> int:
        """How many updates found an inf or NaN staged in the slot. Reads the device."""
        return int(self._num_nonfinite[self.slot_index(slot)])

    @property
    def forward_updates(self) -> int:
        """Updates of the forward direction since creation. Reads the device after replays."""
        return self._updates()[FORWARD]

    @property
    def backward_updates(self) -> int:
        """Updates of the backward direction since creation. Reads the device after replays."""
        return self._updates()[BACKWARD]

    def _updates(self) -> list[int]:
        if self._has_replayed:
            self._host_updates = self._num_updates.tolist()
            self._has_replayed = False
        return self._host_updates

    def note_replay(self) -> None:
        """Say that a graph has updated this state on the device, so that the host's counts are out of date."""
        if not self._has_replayed:  # Captured steps look again at what a write may have changed.
            self._has_replayed = True

    @property
    def backward_update_requested(self) -> bool:
        """Whether a backward update is due."""
        return self._is_requested

    @property
    def in_recompute_phase(self) -> bool:
        """Whether the caller is inside the recompute of a checkpointed forward."""
        return in_recompute()

    @property
    def scales(self) -> Scales:
        """The live scales of all slots."""
        return Scales(self._scale, self._scale_inv)

    def copy_scales(self) -> Scales:
        """A copy that later updates leave alone."""
        return Scales(self._scale.clone(), self._scale_inv.clone())

    @property
    def staging_row(self) -> Tensor:
        """Row 0 of the history, [n] fp32: the amaxes since the last update."""
        return self._amax_history[0]

    @property
    def newest_amaxes(self) -> Tensor:
        """The newest row of the history, [n] fp32: the amax of each slot's last update (zeros where the history has one row only)."""
        return self._amax_history[-1]

    # -- updating

    def request_backward_quantization_update(self, group: Any = None) -> None:
        """Make the backward update due; the next top-level region entry with gradients flushes it.

        Args:
            group: the amax reduction group of the region that asks.
        """
        self._is_requested = True
        self._group = group

    @untraced(reason="a scale update on the host; flush between compiled functions")
    def flush(self) -> None:
        """Run the backward update if it is due, now. With nothing due, nothing happens.

        With ``reduce_amax`` and a process group of several ranks this is a collective: call it on all of them.

        Raises:
            FlushError: in the recompute phase, inside a running backward, under capture or under torch.compile tracing.
        """
        if not self._is_requested:
            return
        reason = blocking_guard()
        if reason is not None:
            raise FlushError(
                f"The backward update cannot be flushed {reason}. It stays pending: call flush() after that, "
                "or leave it to the next fp8_autocast entry."
            )
        self._update(BACKWARD, self._group)
        self._is_requested = False

    @untraced(reason="a scale update on the host; call it between compiled functions")
    def reduce_and_update_quantization_state(self, forward: bool) -> None:
        """Update one direction now, whether or not an update is due; a backward update consumes the request.

        Under a CUDA graph capture the update becomes part of the graph: that is how a step captured by hand gets its
        backward update, after the backward and inside the capture.

        Args:
            forward: the forward direction (inputs and weights) or the backward one (output gradients).

        Raises:
            FlushError: in the recompute phase, inside a running backward, or under torch.compile tracing.
        """
        reason = blocking_guard(may_capture=True)
        if reason is not None:
            raise FlushError(f"The scales cannot be updated {reason}. Call it between steps, or after the backward inside a capture.")
        self._update(FORWARD if forward else BACKWARD, self._group)
        if not forward:
            self._is_requested = False

    #: The method under the name other libraries know.
    reduce_and_update_fp8_tensors = reduce_and_update_quantization_state

    def update_forward(self, group: Any) -> None:
        """Update the forward direction; for a region's exit, which has asked the guards already."""
        self._update(FORWARD, group)

    def _update(self, direction: int, group: Any) -> None:
        with SCALE_UPDATE:
            self._reduce_and_update(direction, group)

    def _reduce_and_update(self, direction: int, group: Any) -> None:
        start, end = (0, self._num_forward) if direction == FORWARD else (self._num_forward, len(self.slots))
        if self.reduces_over(group):
            # Integer maximum over the bits: a float MAX keeps or loses a NaN by the order of the ranks.
            dist.all_reduce(self._amax_history[0, start:end].view(torch.int32), dist.ReduceOp.MAX, group=group)
        fmt = self.recipe.fp8_format
        dtype = fmt.forward_dtype if direction == FORWARD else fmt.backward_dtype
        kernels.update_scales_(
            self._amax_history,
            self._scale,
            self._scale_inv,
            self._num_nonfinite,
            self._num_updates,
            start=start,
            end=end,
            direction=direction,
            fp8_max=FP8_MAX[dtype],
            margin=self.recipe.margin,
            algo=self.recipe.amax_compute_algo,
        )
        self._host_updates[direction] += 1

    def reduces_over(self, group: Any) -> bool:
        """Whether updates take the maximum over the ranks of ``group``."""
        return self.recipe.reduce_amax and num_ranks(group) > 1

    # -- moving, saving

    def to(self, device: torch.device | str) -> "QuantizationState":
        """Move the packed tensors, in place; returns self. Tensors already there keep their addresses."""
        for name in _TENSORS:
            setattr(self, f"_{name}", getattr(self, f"_{name}").to(device))
        return self

    def state_dict(self) -> dict[str, Any]:
        """Copies of all tensors, with the recipe and the slot names. Flushes first, so that it never holds half a step.

        Raises:
            FlushError: an update is due that needs other ranks, or that a guard forbids now.
        """
        if self._is_requested and self.reduces_over(self._group):
            raise FlushError(
                "state_dict() found a backward update due that has to be reduced over all ranks. Call state.flush() on every rank first."
            )
        self.flush()
        tensors = {name: getattr(self, f"_{name}").clone() for name in _TENSORS}
        return {"recipe": self.recipe.to_dict(), "slots": list(self.slots), **tensors}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy a `state_dict` in, in place: captured addresses stay valid. A pending request is dropped.

        Raises:
            ValueError: keys, slots, recipe or shapes differ; nothing has been changed.
        """
        self._check_state_dict(state_dict)
        for name in _TENSORS:
            getattr(self, f"_{name}").copy_(state_dict[name])
        self._host_updates = [int(count) for count in state_dict["num_updates"]]
        self._has_replayed = self._is_requested = False

    def _check_state_dict(self, state_dict: dict[str, Any]) -> None:
        missing = [key for key in ("recipe", "slots", *_TENSORS) if key not in state_dict]
        if missing:
            raise ValueError(f"The quantization state dict lacks {', '.join(missing)}. Pass what QuantizationState.state_dict() returned.")
        slots = list(state_dict["slots"])
        if slots != list(self.slots):
            first = next((pair for pair in itertools.zip_longest(self.slots, slots) if pair[0] != pair[1]), None)
            expected, got = first or (None, None)
            raise ValueError(
                f"The quantization state dict has {len(slots)} slots, this state {len(self.slots)}; the first difference: expected "
                f"{expected!r}, got {got!r}. Convert the same layers before loading."
            )
        theirs, ours = state_dict["recipe"], self.recipe.scaling_fields
        for field, value in ours.items():
            if theirs.get(field) != value:
                raise ValueError(
                    f"The quantization state dict was saved with {field}={theirs.get(field)!r}, this state has {value!r}. "
                    "Convert the model with the recipe it was saved with."
                )
        for name in _TENSORS:
            expected, got = getattr(self, f"_{name}"), state_dict[name]
            if expected.shape != got.shape or expected.dtype != got.dtype:
                raise ValueError(
                    f"The quantization state dict's {name} is {got.dtype} {list(got.shape)}, expected {expected.dtype} "
                    f"{list(expected.shape)}. The file is damaged, or of another version."
                )

    def snapshot(self) -> StateSnapshot:
        """A copy of tensors, counts and the pending request, without flushing."""
        return StateSnapshot(
            tensors={name: getattr(self, f"_{name}").clone() for name in _TENSORS},
            host_updates=(self._host_updates[0], self._host_updates[1]),
            is_requested=self._is_requested,
            has_replayed=self._has_replayed,
            group=self._group,
        )

    def restore(self, snapshot: StateSnapshot) -> None:
        """Put a snapshot back, in place."""
        for name, value in snapshot.tensors.items():
            getattr(self, f"_{name}").copy_(value)
        self._host_updates = list(snapshot.host_updates)
        self._is_requested, self._has_replayed, self._group = snapshot.is_requested, snapshot.has_replayed, snapshot.group

    # -- watching

    @contextmanager
    def count_saturation(self) -> Iterator[dict[str, SlotCounts]]:
        """Count what quantization clamps and flushes to zero, slot by slot, in training steps run eagerly inside the block.

        A sampled view: it reads each quantized tensor once more and the host waits for it, so wrap a step now and then.
        The dict that the block receives fills while it runs.
        """
        previous, self._saturation = self._saturation, {}
        try:
            yield self._saturation
        finally:
            self._saturation = previous

    @property
    def is_counting_saturation(self) -> bool:
        """Whether a `count_saturation` block is open."""
        return self._saturation is not None

    def add_saturation(self, index: int, x: Tensor, quantized: Tensor, fp8_max: float) -> None:
        """Add the counts of one cast of slot ``index``: ``x`` before, ``quantized`` after."""
        if self._saturation is None:
            return
        scaled = x.detach().float().abs() * self._scale[index]
        saturated = int(((scaled > fp8_max) & scaled.isfinite()).sum())
        underflowed = int(((quantized.float() == 0) & (scaled > 0)).sum())
        name = self.slots[index]
        old = self._saturation.get(name, SlotCounts(0, 0, 0))
        self._saturation[name] = SlotCounts(old.num_elements + x.numel(), old.num_saturated + saturated, old.num_underflowed + underflowed)
