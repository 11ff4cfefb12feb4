"""Regions: where FP8 is on, whose scales a forward uses, and when the forward direction updates.

A region nests. The outermost *enabled* one is the unit of delayed scaling: it has one `RegionRecord`, its exit is one
forward update. Region and depth belong to the process, not the thread: on CUDA the Python of a backward runs in
another thread than the one that opened the region.

In the recompute of a checkpointed forward the stack of open regions says nothing: what counts is what the repeated
forward ran under (`graphrt.recompute`). Regions opened by the recompute go on the same stack, tagged with its token.
"""

import enum
import itertools
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any, NamedTuple

import torch

from graphrt.errors import FlushError
from graphrt.guards import untraced
from graphrt.recompute import (
    Forward,
    Phase,
    close_abandoned,
    current_phase,
    is_reentrant_forward,
    keep_with_graph,
    may_be_checkpointed,
    note_forward,
    open_phase,
    unseen_by_selective_checkpoints,
)
from graphrt.state import QuantizationState, Scales, registered_states

__all__ = [
    "Context",
    "ForwardMark",
    "Mode",
    "Region",
    "RegionRecord",
    "current_context",
    "is_region_open",
    "mark_forward",
    "recompute_phase",
]


class Mode(enum.Enum):
    """What a converted linear does."""

    PLAIN = enum.auto()  # what nn.Linear does
    QUANTIZE = enum.auto()  # FP8 GEMMs
    CALIBRATE = enum.auto()  # nn.Linear's arithmetic, amaxes recorded


class RegionRecord:
    """One outermost region: what its forwards, and their recomputes, have in common.

    While it is open its scales are the live ones, for nothing updates them before its exit. At exit, before the update,
    they are copied: a recompute quantizes with the scales of the forward it repeats.
    """

    _serials = itertools.count()

    def __init__(self, mode: Mode, has_gradients: bool, group: Any) -> None:
        self.serial = next(self._serials)
        self.mode = mode
        self.has_gradients = has_gradients
        self.group = group
        self.states: dict[QuantizationState, bool] = {}  # those used in the region; True: in a training forward
        self._scales: dict[QuantizationState, Scales] | None = None
        _records.add(self)

    def note_use(self, state: QuantizationState, is_training: bool) -> None:
        """Say that a forward in the region uses ``state``."""
        if is_training or state not in self.states:
            self.states[state] = is_training or self.states.get(state, False)
            if is_training and not torch.is_grad_enabled():
                # No node of a layer holds this record: a checkpoint with reentrant autograd will repeat the forward.
                keep_with_graph(self)

    def scales(self, state: QuantizationState) -> Scales:
        """The scales of ``state`` in this region, also after its exit.

        Raises:
            FlushError: the region never used the state, and is closed.
        """
        if self._scales is None:
            return state.scales
        if state not in self._scales:
            raise FlushError(
                "A recompute uses a model that took no part in the forward it repeats. "
                "Make the checkpointed function run the same layers each time."
            )
        return self._scales[state]

    @property
    def is_closed(self) -> bool:
        """Whether the region has exited."""
        return self._scales is not None

    def close(self, *, keep_scales: bool = True) -> None:
        """Keep the scales for recomputes to come, unless there can be none."""
        self._scales = {state: state.copy_scales() for state in self.states} if keep_scales else {}


# Alive while an autograd graph, a checkpoint's note or a mark holds them: the forwards still in flight.
_records: "weakref.WeakSet[RegionRecord]" = weakref.WeakSet()


class Context(NamedTuple):
    """What a forward runs under. ``record`` is the outermost enabled region's, also inside a disabled one within it."""

    mode: Mode
    record: RegionRecord | None
    phase_token: Any = None  # of the recompute that opened this region
    graph_task: int = -1  # of the backward that opened this region
    in_recompute: bool = False


# A compiled graph would bake one update in, or lose them all.
_untraced = untraced(reason="entering or leaving graphrt.fp8_autocast updates scales on the host; open the region outside")

_OUTSIDE = Context(Mode.PLAIN, None)
_stack: list[Context] = []
_graph_task_id = torch._C._current_graph_task_id


def is_region_open() -> bool:
    """Whether any region is open in the process, enabled or not."""
    return bool(_stack)


def current_context() -> Context:
    """What a converted linear called now runs under.

    Raises:
        FlushError: a backward is running and it cannot be known whether this forward repeats an earlier one.
    """
    top = _stack[-1] if _stack else _OUTSIDE
    if not may_be_checkpointed():
        return top
    phase = current_phase()
    if phase is None:
        _refuse_unknown_repeat(top)
        note_forward(top)
        return top
    context = _context_in(phase)
    note_forward(context)
    return context._replace(in_recompute=True)


def _context_in(phase: Phase) -> Context:
    top = _stack[-1] if _stack else _OUTSIDE
    return top if top.phase_token == phase.token else phase.forward.ambient


def _refuse_unknown_repeat(top: Context) -> None:
    task = _graph_task_id()
    if task != -1 and torch.is_grad_enabled() and top.graph_task != task:
        raise FlushError(
            "A converted model runs with gradients inside a backward, and it cannot be known whether this repeats an earlier forward. "
            "Around a recompute of your own open graphrt.recompute_phase(of=mark); around a new forward open graphrt.fp8_autocast()."
        )


class Region(AbstractContextManager["Region"]):
    """A region of converted linears; the base of the eager path's and the captured path's own.

    Subclasses say what happens before an outermost region with gradients (`before_outermost`) and how its record closes.

    Args:
        enabled: False makes converted linears plain inside.
        calibrating: high precision arithmetic, amaxes recorded.
        amax_reduction_group: process group of the all-reduce; None is the default group.
    """

    def __init__(self, enabled: bool = True, calibrating: bool = False, amax_reduction_group: Any = None) -> None:
        if calibrating and not enabled:
            raise ValueError(
                "fp8_autocast got calibrating=True with enabled=False. Pass calibrating=True alone: it already runs in high precision."
            )
        self._mode = Mode.PLAIN if not enabled else Mode.CALIBRATE if calibrating else Mode.QUANTIZE
        self._group = amax_reduction_group
        # One object may be entered again while open; each entry knows whether it was an outermost one.
        self._entries: list[tuple[Context, bool]] = []
        #: States with a training forward in the last outermost region that this object was.
        self.used_states: list[QuantizationState] = []

    # Never traced: a compiled graph would bake one update in, or lose them all.
    @_untraced
    def __enter__(self) -> "Region":
        phase = current_phase()
        top = _stack[-1] if _stack else _OUTSIDE
        ambient = top if phase is None else _context_in(phase)
        notes = note_forward(ambient) if may_be_checkpointed() else []
        record = ambient.record
        is_outermost = self._mode is not Mode.PLAIN and record is None
        if is_outermost:
            record = phase.forward.next_region(phase.token) if phase else self._open()
            marked = [forward for forward, token in _open_marks.items() if token == (phase.token if phase else None)]
            for forward in notes + marked:
                forward.regions.append(record)
        entered = Context(self._mode, record, phase.token if phase else None, _graph_task_id())
        self._entries.append((entered, is_outermost and phase is None))
        _stack.append(entered)
        return self

    def _open(self) -> RegionRecord:
        has_gradients = torch.is_grad_enabled() or is_reentrant_forward()
        if has_gradients:
            with unseen_by_selective_checkpoints():
                self.before_outermost()
        record = RegionRecord(self._mode, has_gradients, self._group)
        if has_gradients:
            _make_backward_due_everywhere(record)
        self.open_record(record)
        return record

    @_untraced
    def __exit__(self, _type: object, _error: object, traceback: TracebackType | None) -> None:
        close_abandoned(traceback)
        context, is_outermost = self._entries.pop()
        _remove(context)
        if is_outermost and context.record is not None:
            self._close(context.record)

    def _close(self, record: RegionRecord) -> None:
        self.used_states = [state for state, is_training in record.states.items() if is_training]
        with unseen_by_selective_checkpoints():
            self.close_record(record)
            for state in registered_states() if record.has_gradients else []:
                if record.states.get(state) or state.reduces_over(record.group):
                    self.update(state, record.group)

    def before_outermost(self) -> None:
        """Called before an outermost region with gradients opens."""

    def open_record(self, record: RegionRecord) -> None:
        """Called when an outermost region opens, before its first forward."""

    def close_record(self, record: RegionRecord) -> None:
        """Called when an outermost region exits, before its forward update."""
        record.close()

    def update(self, state: QuantizationState, group: Any) -> None:
        """The forward update of one state, at an outermost region's exit."""
        state.update_forward(group)


def _remove(context: Context) -> None:
    """Take ``context`` off the stack; it is the top, unless regions were closed out of order."""
    for i in reversed(range(len(_stack))):
        if _stack[i] is context:
            del _stack[i]
            return


def _make_backward_due_everywhere(record: RegionRecord) -> None:
    """A rank that ran no quantized backward still has to join the all-reduce of those that did."""
    for state in registered_states():
        if state.reduces_over(record.group):
            state.request_backward_quantization_update(record.group)


# -- recompute by frameworks with a checkpoint of their own


class ForwardMark:
    """Names one forward, for `recompute_phase`. Made by `mark_forward`; hold it as long as the forward may be repeated."""

    def __init__(self, forward: Forward) -> None:
        self._forward = forward

    @property
    def forward(self) -> Forward:
        """What the marked forward ran under."""
        return self._forward


# Marks taken outside any region, and the token of the recompute they were taken in: regions opened later, in the same
# recompute or outside any, belong to the marked forward.
_open_marks: "weakref.WeakKeyDictionary[Forward, Any]" = weakref.WeakKeyDictionary()


def mark_forward() -> ForwardMark:
    """Name the forward that is about to run, so that `recompute_phase` can say which one it repeats.

    Take it where the forward starts, inside or outside a region, and keep it beside what the recompute will need.
    """
    phase = current_phase()
    top = _stack[-1] if _stack else _OUTSIDE
    forward = Forward(top if phase is None else _context_in(phase))
    if forward.ambient.record is None:
        _open_marks[forward] = phase.token if phase else None
    return ForwardMark(forward)


@contextmanager
def recompute_phase(of: ForwardMark | None = None) -> Iterator[None]:
    """Everything inside repeats a marked forward: its scales, bit for bit, and no trace in amaxes, histories or counts.

    Args:
        of: the mark taken in that forward. None is allowed while exactly one outermost region is in flight.

    Raises:
        TypeError: ``of`` is no mark.
        FlushError: ``of`` is None and no forward, or more than one, is in flight.
    """
    if of is not None and not isinstance(of, ForwardMark):
        raise TypeError(
            f"recompute_phase expects of= a mark from graphrt.mark_forward(), got {type(of).__name__}. Take the mark in the forward."
        )
    with open_phase(of.forward if of is not None else _only_forward()):
        yield


def _only_forward() -> Forward:
    in_flight = [record for record in _records if record.has_gradients and (any(record.states.values()) or not record.is_closed)]
    if len(in_flight) != 1:
        raise FlushError(
            f"recompute_phase(of=None) needs exactly one forward in flight, and there are {len(in_flight)}. "
            "Take mark = graphrt.mark_forward() in the forward and pass of=mark."
        )
    return Forward(Context(in_flight[0].mode, in_flight[0]))
