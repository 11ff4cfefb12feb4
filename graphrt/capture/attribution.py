"""Which module, direction and phase a step's work belongs to, at the moment it is issued.

[Note: attribution]
Four things say it, none of which adds work to the device or keeps a tensor alive:

* the step body's ranges (`graphrt.ranges`): the phase;
* calls of modules: in a forward, the innermost module that is running; inside a backward such a call is a recompute;
* autograd nodes: each carries the number it was made with, and the calls of modules are known as stretches of those
  numbers, so a node belongs to the module whose call made it. A hook before each node says which one the engine runs.
  Gradients accumulated into a parameter belong to the module that holds it;
* owners (`graphrt.owners`), inside fused layers.

Modules are called through ``nn.Module.__call__``, which is replaced while listening: hooks of modules would make compiled
blocks compile again. A compiled block is one module then: no Python runs inside it.
"""

import functools
import sys
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from graphrt.owners import hearing_owners
from graphrt.ranges import listening

__all__ = ["Attribution", "Place", "attributing"]

P = ParamSpec("P")
T = TypeVar("T")

#: Ranges that are phases of a step; the others say nothing about what the work is for.
_PHASES = frozenset(
    {"snapshot", "zero_grad", "quantize_weights", "forward", "backward", "scale_update", "clip", "optimizer", "copy_inputs", "replay"}
)


@dataclass(frozen=True, slots=True)
class Place:
    """Where in a step a piece of work belongs.

    Attributes:
        phase: "snapshot" (an eager step's copies for the case that it fails), "zero_grad", "quantize_weights" (a captured
            step makes all FP8 weights at once), "forward", "backward", "scale_update", "clip", "optimizer", "copy_inputs",
            "replay" (what a replay issues beside the graph), or "results": loss, metrics and counts, made ready for the caller.
        direction: "forward", "backward", "recompute" (a checkpointed forward again), or "" for work of no layer.
        module: fully qualified name, "" for the root module and for work outside of modules.
        function: the autograd node that was running, such as "MmBackward0"; "" outside of a backward.
    """

    phase: str = "results"
    direction: str = ""
    module: str = ""
    function: str = ""


_eval_frame: Any = getattr(torch._C, "_dynamo").eval_frame  # noqa: B009  (the stubs do not know it)


_frames: list[Any] = []


def _unseen(function: Callable[P, T]) -> Callable[P, T]:
    """Decorator: a compiled block that calls the function, after a graph break, does not look into it and compile it."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        before = _eval_frame.set_eval_frame(None)
        try:
            return function(*args, **kwargs)
        finally:
            _eval_frame.set_eval_frame(before)

    _frames.append(run)
    return run


def _hide(frames: Iterable[Any]) -> None:
    """Let the compiler, if it is loaded, pass over these functions and look at what they call."""
    decorators = sys.modules.get("torch._dynamo.decorators")
    skip_code = getattr(decorators, "skip_code", None)
    if skip_code is not None:
        for function in frames:
            skip_code(function.__code__)


class Attribution:
    """Listens to a step and knows its `place`. Used by `attributing`.

    Args:
        root: the model.
        before_change: called before `place` changes: what was issued since the last call belongs to the old one.
    """

    def __init__(self, root: nn.Module, before_change: Callable[[Place], None]) -> None:
        self._root = root  # held, so that the ids below stay its modules'
        self._modules = {id(module): _plain_name(name) for name, module in root.named_modules()}
        self._parameters = _parameter_owners(root)
        self._parameter_data = {p.data_ptr(): self._parameters[id(p)] for p in reversed(list(root.parameters()))}
        self._before_change = before_change
        self.place = Place()
        self._phases: list[str] = []
        self._running: list[str] = []  # modules whose forward runs, innermost last
        self._num_running: list[int] = [0]  # how many of them ran when each backward under way began
        self._owners: list[str] = []
        self._node = ("", "")  # (module, name) of the autograd node that runs
        self._stretches: dict[int, tuple[list[int], list[str]]] = {}  # by thread: numbers of nodes, and the module from there on
        self._handles: list[Any] = []
        self._is_closed = False

    def _update(self) -> None:
        place = self._current()
        if place != self.place:
            self._before_change(self.place)
            self.place = place

    def _current(self) -> Place:
        phase = self._phases[-1] if self._phases else "results"
        if phase not in ("forward", "backward"):
            return Place(phase, "", self._owners[-1] if self._owners else "")
        direction, module, function = "forward", "", ""
        running, is_in_backward = self._running[self._num_running[-1] :], len(self._num_running) > 1
        if running:
            module, direction = running[-1], "recompute" if is_in_backward else "forward"
        elif is_in_backward:
            (module, function), direction = self._node, "backward"
        return Place(phase, direction, self._owners[-1] if self._owners else module, function)

    # -- ranges and owners

    @_unseen
    def enter_range(self, name: str) -> None:
        if name not in _PHASES:
            return
        self._phases.append(name)
        if name == "backward":
            self._num_running.append(len(self._running))
            self._node = ("", "")
        self._update()

    @_unseen
    def exit_range(self, name: str) -> None:
        if name not in _PHASES:
            return
        self._phases.pop()
        if name == "backward":
            self._num_running.pop()
        self._update()

    @_unseen
    def enter_owner(self, owner: nn.Module | Tensor) -> None:
        if isinstance(owner, Tensor):
            # A recompute hands its backward other tensor objects on the same data.
            name = self._parameters.get(id(owner)) or self._parameter_data.get(owner.data_ptr())
        else:
            name = self._modules.get(id(owner))
        self._owners.append(self.place.module if name is None else name)
        self._update()

    @_unseen
    def exit_owner(self) -> None:
        self._owners.pop()
        self._update()

    # -- modules and autograd nodes

    @contextmanager
    def listening_to_modules(self) -> Iterator[None]:
        """Replace ``nn.Module.__call__`` by one that tells of the root's modules."""
        original = nn.Module.__call__

        def call(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            name = self._modules.get(id(module))
            if name is None:
                return original(module, *args, **kwargs)
            self._enter_module(name)
            try:
                return original(module, *args, **kwargs)
            finally:
                self._exit_module()

        _hide([call, *_frames])
        nn.Module.__call__ = call
        try:
            yield
        finally:
            nn.Module.__call__ = original

    @_unseen
    def _enter_module(self, name: str) -> None:
        self._running.append(name)
        self._begin_stretch(name)
        self._update()

    @_unseen
    def _exit_module(self) -> None:
        self._running.pop()
        self._begin_stretch(self._running[-1] if self._running else "")
        self._update()

    def _begin_stretch(self, name: str) -> None:
        numbers, names = self._stretches.setdefault(threading.get_ident(), ([], []))
        numbers.append(_next_node_number())
        names.append(name)

    @contextmanager
    def listening_to_backwards(self) -> Iterator[None]:
        """Replace the two functions that start a backward by ones that put hooks on its nodes."""
        originals = torch.autograd.backward, torch.autograd.grad

        def watched(original: Callable[..., Any], keyword: str) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                roots = args[0] if args else kwargs.get(keyword)
                node, running = self._node, len(self._running)
                self._hook(roots)
                self._num_running.append(running)
                try:
                    return original(*args, **kwargs)
                finally:
                    # A backward inside a backward, as reentrant checkpoints start: the outer node goes on.
                    self._num_running.pop()
                    self._enter_node(node)

            return run

        torch.autograd.backward, torch.autograd.grad = watched(originals[0], "tensors"), watched(originals[1], "outputs")
        try:
            yield
        finally:
            torch.autograd.backward, torch.autograd.grad = originals

    def _hook(self, roots: Any) -> None:
        """Put a hook before each node that a backward from ``roots`` can reach."""
        roots = (roots,) if isinstance(roots, Tensor) else tuple(roots or ())
        pending = [root.grad_fn for root in roots if isinstance(root, Tensor) and root.grad_fn is not None]
        seen = set(pending)
        numbers, names = self._stretches.get(threading.get_ident(), ([], []))
        while pending:
            node: Any = pending.pop()
            self._handles.append(node.register_prehook(self._hook_of(node, numbers, names)))
            for following, _ in node.next_functions:
                if following is not None and following not in seen:
                    seen.add(following)
                    pending.append(following)

    def _hook_of(self, node: Any, numbers: list[int], names: list[str]) -> Callable[..., None]:
        variable = getattr(node, "variable", None)
        if variable is not None:
            module = self._parameters.get(id(variable), "")
        else:
            at = bisect_right(numbers, node._sequence_nr()) - 1
            module = names[at] if at >= 0 else ""
        label = (module, node.name().rsplit("::", 1)[-1])

        def before(*_gradients: Any) -> None:
            self._enter_node(label)

        return before

    def _enter_node(self, label: tuple[str, str]) -> None:
        if not self._is_closed:
            self._node = label
            self._update()

    def close(self) -> None:
        """Say the last change, and take all hooks off again."""
        self._before_change(self.place)
        self._is_closed = True
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


@contextmanager
def attributing(root: nn.Module, before_change: Callable[[Place], None]) -> Iterator[Attribution]:
    """Know the place of all work issued inside the block; nothing is left hooked afterwards.

    Args:
        root: the model whose modules are named.
        before_change: called with the place that is left, each time another one is entered, and at the end.
    """
    attribution = Attribution(root, before_change)
    with ExitStack() as stack:
        stack.callback(attribution.close)
        stack.enter_context(attribution.listening_to_modules())
        stack.enter_context(attribution.listening_to_backwards())
        stack.enter_context(hearing_owners(attribution))
        stack.enter_context(listening(attribution))
        yield attribution


_next_node_number: Callable[[], int] = getattr(torch.autograd, "_get_sequence_nr")  # noqa: B009  (the stubs do not know it)


def _plain_name(name: str) -> str:
    """Without what a compiled module wraps its original in."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def _parameter_owners(root: nn.Module) -> dict[int, str]:
    """The module that holds each parameter, by the parameter's id; of several the first."""
    owners: dict[int, str] = {}
    for name, module in root.named_modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), _plain_name(name))
    return owners
