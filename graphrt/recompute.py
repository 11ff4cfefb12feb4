"""Which forward a recompute repeats.

Activation checkpointing runs a forward twice: once for its output, once more in the backward for what the backward
needs. The second run must quantize with the scales of the first and leave no trace in amaxes, histories or counts. A
running backward alone does not tell the two apart (a hook may run a new forward), and "the last forward of this module"
is wrong as soon as forwards 1, 2, 3 come before backwards 1, 2, 3. So each checkpointed forward carries a `Forward`, a
note of what it ran under, and the recompute finds the note of the very forward it repeats:

* torch's non-reentrant checkpoint: on the ``_CheckpointFrame``, which the saved-tensor hooks of the forward and the
  ``unpack_hook`` that recomputes both hold;
* torch's reentrant checkpoint: on the ``ctx`` of ``CheckpointFunction``, the same object in forward and backward;
* a framework's own checkpoint: on the mark that `mark_forward` returned and `recompute_phase` names.

The note lives as long as the object it hangs on, which is as long as the autograd graph.
"""

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch.autograd.function import FunctionCtx
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode

from graphrt.errors import FlushError

__all__ = [
    "Forward",
    "Phase",
    "close_abandoned",
    "current_phase",
    "in_recompute",
    "is_reentrant_forward",
    "keep_with_graph",
    "may_be_checkpointed",
    "note_forward",
    "open_phase",
    "unseen_by_selective_checkpoints",
]

_NOTE = "_graphrt_forward"
_KEPT = "_graphrt_kept"


@dataclass(eq=False)
class Forward:
    """What one checkpointed forward ran under.

    ``ambient`` is the region context at its start. ``regions`` are the outermost regions opened inside it, in order; a
    recompute opens them again in the same order. One recompute is one ``token``; a graph may be recomputed twice.
    """

    ambient: Any
    regions: list[Any] = field(default_factory=list)
    _token: Any = None
    _num_reopened: int = 0

    def next_region(self, token: Any) -> Any:
        """The region that the recompute ``token`` opens next.

        Raises:
            FlushError: the recompute opens more regions than the forward did.
        """
        if token != self._token:
            self._token, self._num_reopened = token, 0
        if self._num_reopened >= len(self.regions):
            raise FlushError(
                f"A recompute opened outermost region number {self._num_reopened + 1}, but its forward opened {len(self.regions)}. "
                "Make the checkpointed function open the same regions each time it runs."
            )
        self._num_reopened += 1
        return self.regions[self._num_reopened - 1]


class Phase(NamedTuple):
    """A recompute under way: the forward it repeats, and a token that is the same throughout this one recompute."""

    forward: Forward
    token: Any


def _code_named(function: Any, name: str) -> int:
    """id of the code object of the function ``name`` defined inside ``function``; 0 if this torch has none."""
    for constant in function.__code__.co_consts:
        if isinstance(constant, types.CodeType) and constant.co_name == name:
            return id(constant)
    return 0


# Comparing ids of code objects: hashing a code object hashes all it holds, and a frame walk asks for each frame.
_UNPACK = _code_named(torch_checkpoint._checkpoint_hook.__init__, "unpack_hook")
_PACK_FORWARD = _code_named(torch_checkpoint._checkpoint_hook.__init__, "pack_hook")
_PACK_RECOMPUTE = _code_named(torch_checkpoint._recomputation_hook.__init__, "pack_hook")
_REENTRANT_FORWARD = id(torch_checkpoint.CheckpointFunction.forward.__code__)
_REENTRANT_BACKWARD = id(torch_checkpoint.CheckpointFunction.backward.__code__)
_BACKWARD_CALLS = {id(torch.autograd.backward.__code__), id(torch.autograd.grad.__code__)}

_graph_task_id = torch._C._current_graph_task_id
_autograd = getattr(torch._C, "_autograd")  # noqa: B009  (the stubs do not know it)
_top_hooks = _autograd._top_saved_tensors_default_hooks
_pop_hooks = _autograd._pop_saved_tensors_default_hooks
_push_hooks = _autograd._push_saved_tensors_default_hooks
_is_fwd_grad_enabled = torch._C._is_fwd_grad_enabled

_num_dispatch_modes = torch._C._len_torch_dispatch_stack
_SELECTIVE_MODES = (torch_checkpoint._CachingTorchDispatchMode, torch_checkpoint._CachedTorchDispatchMode)

# Opened by recompute_phase. Per process, not per thread: on CUDA the recompute runs in an autograd thread.
_phases: list[Phase] = []


def may_be_checkpointed() -> bool:
    """Whether anything hints at a checkpointed forward or its recompute; False is certain, and cheap (under 1 us)."""
    return bool(_phases) or _graph_task_id() != -1 or not _is_fwd_grad_enabled() or _top_hooks(True) is not None


def current_phase() -> Phase | None:
    """The recompute this thread is in, innermost first; None in any other forward.

    Raises:
        FlushError: a recompute is under way whose forward ran nothing that graphrt could note.
    """
    if not may_be_checkpointed():
        return None
    owner = _recomputing_owner()
    if owner is None:
        return _phases[-1] if _phases else None
    forward = getattr(owner[0], _NOTE, None)
    if forward is None:
        raise FlushError(
            "A recompute reached an FP8 layer or region, but the forward it repeats reached none. "
            "Make the checkpointed function run the same layers each time."
        )
    return Phase(forward, owner[1])


def in_recompute() -> bool:
    """Whether this thread is in the recompute of a checkpointed forward, whatever that forward ran."""
    return may_be_checkpointed() and (_recomputing_owner() is not None or bool(_phases))


def _recomputing_owner() -> tuple[Any, Any] | None:
    """(what carries the note, token) of the innermost recompute on this thread's stack."""
    frame = sys._getframe(2)
    while frame is not None:
        code = id(frame.f_code)
        if code == _UNPACK:
            return frame.f_locals["frame"], frame.f_locals["gid"]
        if code == _REENTRANT_BACKWARD:
            return frame.f_locals["ctx"], _graph_task_id()
        if code in _BACKWARD_CALLS:
            # A backward called from here: what it runs is new, unless a checkpoint further in says otherwise.
            return None
        frame = frame.f_back
    return None


def note_forward(ambient: Any) -> list[Forward]:
    """The notes of the checkpointed forwards this thread is in, innermost first; new ones say ``ambient``.

    Called wherever something happens that a recompute would have to repeat: an FP8 layer's forward, a region's entry.
    """
    owners = _frames_in_forward() + _reentrant_contexts()
    for owner in owners:
        if getattr(owner, _NOTE, None) is None:
            setattr(owner, _NOTE, Forward(ambient))
    return [getattr(owner, _NOTE) for owner in owners]


def _frames_in_forward() -> list[Any]:
    """The ``_CheckpointFrame`` of each non-reentrant checkpoint whose forward is under way, innermost first."""
    frames, popped = [], []
    try:
        while (hooks := _top_hooks(True)) is not None:
            code = id(getattr(hooks[0], "__code__", None))
            # Dynamo's disable wraps the recompute's hook; what it wraps stands in __wrapped__ or _torchdynamo_orig_callable.
            inner = getattr(hooks[0], "_torchdynamo_orig_callable", hooks[0])
            if code == _PACK_RECOMPUTE or id(getattr(inner, "__code__", None)) == _PACK_RECOMPUTE:
                break
            if code == _PACK_FORWARD:
                frames.append(_closure(hooks[0], "frame"))
            popped.append(hooks)
            _pop_hooks()
    finally:
        for pack, unpack in reversed(popped):
            _push_hooks(pack, unpack)
    return frames


def _closure(function: Any, name: str) -> Any:
    return function.__closure__[function.__code__.co_freevars.index(name)].cell_contents


def _reentrant_contexts() -> list[Any]:
    """The ``ctx`` of each of torch's reentrant checkpoints whose first forward is under way in this thread, innermost first."""
    return [ctx for ctx, is_checkpoint in _function_contexts() if is_checkpoint]


def _function_contexts() -> list[tuple[Any, bool]]:
    """(ctx, whether torch's checkpoint) of each autograd function whose forward is under way in this thread, innermost first."""
    if _is_fwd_grad_enabled():
        return []
    contexts, frame = [], sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if id(code) == _REENTRANT_FORWARD:
            contexts.append((frame.f_locals["ctx"], True))
        elif id(code) in (_UNPACK, _REENTRANT_BACKWARD) or id(code) in _BACKWARD_CALLS:
            break
        elif code.co_name == "forward" and code.co_argcount and isinstance(ctx := frame.f_locals.get(code.co_varnames[0]), FunctionCtx):
            contexts.append((ctx, False))
        frame = frame.f_back
    return contexts


def is_reentrant_forward() -> bool:
    """Whether this is the first forward of a reentrant checkpoint that will be repeated in a backward.

    Such a forward runs with grad mode off, inside an ``autograd.Function.forward``, which is where forward-mode grad is
    off as well; under a user's ``no_grad`` it is on. The function's node tells more: called under ``no_grad`` it has no
    edges although an input requires grad, and nothing will ever be repeated.
    """
    if torch.is_grad_enabled() or _is_fwd_grad_enabled() or torch.is_inference_mode_enabled():
        return False
    contexts = [ctx for ctx, _ in _function_contexts()]
    if not contexts or any(ctx.next_functions for ctx in contexts):
        return True
    # Nested functions never have edges; the outermost one speaks for all.
    return not any(contexts[-1].needs_input_grad)


def keep_with_graph(item: Any) -> None:
    """Let ``item`` live as long as the graph that the autograd functions whose forward is under way will be part of."""
    for ctx, _ in _function_contexts():
        if getattr(ctx, _KEPT, None) is None:
            setattr(ctx, _KEPT, set())
        getattr(ctx, _KEPT).add(item)


def close_abandoned(traceback: types.TracebackType | None) -> None:
    """Leave the checkpoints that an exception has left half-way.

    Older torch suspends a non-reentrant checkpoint in a generator and, when the function raises, leaves the generator to
    the garbage collector: as long as the traceback lives, every later forward saves its tensors into the dead checkpoint.
    """
    frames = []
    while traceback is not None:
        frames.append(traceback.tb_frame)
        traceback = traceback.tb_next
    for frame in reversed(frames):
        if frame.f_code.co_filename == torch_checkpoint.__file__:
            for value in frame.f_locals.values():
                if isinstance(value, types.GeneratorType) and not value.gi_running:
                    value.close()


@contextmanager
def open_phase(forward: Forward) -> Iterator[None]:
    """Everything inside repeats ``forward``."""
    _phases.append(Phase(forward, object()))
    try:
        yield
    finally:
        _phases.pop()


@contextmanager
def unseen_by_selective_checkpoints() -> Iterator[None]:
    """For work that a recompute does otherwise than its forward: amaxes are recorded once, a cast weight may be at hand.

    A selective checkpoint counts the operations it sees and hands out what it kept by that count.
    """
    modes = _get_current_dispatch_mode_stack() if _num_dispatch_modes() else []
    others = [mode for mode in modes if not isinstance(mode, _SELECTIVE_MODES)]
    if len(others) == len(modes):
        yield
        return
    _replace_modes(modes, others)
    try:
        yield
    finally:
        _replace_modes(others, modes)


def _replace_modes(old: list[Any], new: list[Any]) -> None:
    for _ in old:
        _pop_mode()
    for mode in new:
        _push_mode(mode)
