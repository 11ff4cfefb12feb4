"""A range a module, in forward and backward, for who asks.

Forward: hooks around every submodule's call. Backward: autograd runs nodes, not modules, so each node is given to the
innermost module whose forward made it: after a module's forward its outputs' graph is walked back, and the nodes younger
than the start of that forward that no submodule has taken are its own. Hooks on a node enter and leave the module's range.
They only see gradients pass: no operation is added, so the numbers stay what they are.

[Note: ranges left open]
Ranges nest on a thread, and a node whose backward raises never reaches its second hook. What it left open is closed at the
next sign that it is over: the end of the named range around it, a forward while this thread runs no backward, a node that
the engine runs on a thread of its own (no Python below), or the end of the block.
"""

import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from graphrt.guards import is_compiling, is_in_backward
from graphrt.ranges import Range, listening

__all__ = ["module_ranges"]

_TAKEN = "graphrt module range"  # a key in the metadata of a node that has been given to a module
_LEAF = 2**64 - 1  # autograd's sequence number of nodes that accumulate into a leaf, and belong to no forward


@dataclass(eq=False)
class _Open:
    """Something under way on a thread."""

    owner: object  # a module, a node's token, or the name of a named range
    range: Range | None = None  # to leave; None for a named range, which leaves itself
    is_node: bool = False
    first_sequence_nr: int = 0  # the age of a module's oldest node


class _Thread(threading.local):
    """What is under way on the current thread, outermost first."""

    def __init__(self) -> None:
        self.under_way: list[_Open] = []
        self.is_moving = False  # a module's range is being entered or left, which listeners hear of

    @contextmanager
    def _moving(self) -> Iterator[None]:
        self.is_moving = True
        try:
            yield
        finally:
            self.is_moving = False

    def open(self, entry: _Open) -> None:
        if entry.range is not None:
            with self._moving():
                entry.range.__enter__()
        self.under_way.append(entry)

    def close(self, owner: object) -> _Open | None:
        """Close the innermost entry of ``owner`` and what is left open inside it; None if there is none."""
        for index in reversed(range(len(self.under_way))):
            if self.under_way[index].owner is owner:
                entry = self.under_way[index]
                self.close_from(index)
                return entry
        return None

    def close_from(self, index: int) -> None:
        """Close the entry at ``index`` and all inside it."""
        while len(self.under_way) > index:
            entry = self.under_way.pop()
            if entry.range is not None:
                with self._moving():
                    entry.range.__exit__(None, None, None)

    def close_nodes(self) -> None:
        """Close the outermost node, and all inside it."""
        for index, entry in enumerate(self.under_way):
            if entry.is_node:
                self.close_from(index)
                return


class _ModuleRanges:
    """The hooks of one `module_ranges` block. As a listener it hears of the named ranges that its own must not outlive."""

    def __init__(self, model: nn.Module) -> None:
        names = {module: name or type(model).__name__ for name, module in model.named_modules()}
        self.forward_ranges = {module: Range(name) for module, name in names.items()}
        self.backward_ranges = {module: Range(f"{name} backward") for module, name in names.items()}
        self.thread = _Thread()
        self.is_over = False

    def enter_range(self, name: str) -> None:
        """Note a named range."""
        if not self.thread.is_moving:
            self.thread.open(_Open(name))

    def exit_range(self, name: str) -> None:
        """Close what is left open inside a named range."""
        if not self.thread.is_moving:
            self.thread.close(name)

    def enter_module(self, module: nn.Module, _inputs: Any) -> None:
        """Before a forward. Compiled code has no ranges: it does not run module by module."""
        if is_compiling() or module not in self.forward_ranges:
            return
        if not is_in_backward():
            self.thread.close_nodes()
        self.thread.open(_Open(module, self.forward_ranges[module], first_sequence_nr=torch.autograd._get_sequence_nr()))

    def leave_module(self, module: nn.Module, _inputs: Any, output: Any) -> None:
        """After a forward, also one that raised."""
        if is_compiling() or module not in self.forward_ranges:
            return
        entry = self.thread.close(module)
        if entry is not None:
            self._take_nodes(self.backward_ranges[module], output, entry.first_sequence_nr)

    def _take_nodes(self, backward_range: Range, output: Any, first_sequence_nr: int) -> None:
        """Give the nodes that ``output`` was made with, and no submodule has, to a module."""
        found = {tensor.grad_fn for tensor in _tensors(output) if tensor.grad_fn is not None}
        pending = list(found)
        while pending:
            node = pending.pop()
            if not first_sequence_nr <= node._sequence_nr() < _LEAF:
                continue
            metadata = cast(dict[str, Any], node.metadata)  # a property, which torch's stubs call a method
            if _TAKEN not in metadata:
                metadata[_TAKEN] = True
                self._watch(node, backward_range)
            parents = {parent for parent, _ in node.next_functions if parent is not None} - found
            found |= parents
            pending.extend(parents)

    def _watch(self, node: Node, backward_range: Range) -> None:
        entry = _Open(object(), backward_range, is_node=True)

        def enter(_grad_outputs: Any) -> None:
            if self.is_over:
                return
            if sys._getframe().f_back is None:
                self.thread.close_from(0)
            self.thread.open(entry)

        def leave(_grad_inputs: Any, _grad_outputs: Any) -> None:
            self.thread.close(entry.owner)

        node.register_prehook(enter)
        node.register_hook(leave)

    def close(self) -> None:
        """Close what this thread has left open; the nodes' hooks do nothing from here on."""
        self.is_over = True
        self.thread.close_from(0)


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in what a module returned."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


@contextmanager
def module_ranges(model: nn.Module) -> Iterator[None]:
    """Inside the block every submodule of ``model`` has a range in profilers, in forward and backward.

        with graphrt.module_ranges(model), trainer.eager():
            trainer.step(batch)

    The ranges are named ``blocks.0.up`` and ``blocks.0.up backward`` after `Module.named_modules` (the model itself after
    its class), in the NVTX domain ``graphrt``. The backward of a module has a range for each autograd node of it, in the
    order the engine runs them; accumulating into ``.grad`` belongs to none. Results are the same, bit for bit.

    A module that is not called has no range: the linears that a fused layer of `graphrt.nn` takes run in their block's.

    For steps that run as Python: eager ones, warmup and capture. A replay runs none, and a block under `torch.compile` is
    one piece, without ranges inside. Open the block before the first step of such a model: a hook that comes later compiles
    it anew. Hooks of torch's are there for the length of the block only.

    Raises:
        TypeError: ``model`` is no nn.Module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"module_ranges needs an nn.Module, got {type(model).__name__}. Pass the model itself.")
    ranges = _ModuleRanges(model)
    with ExitStack() as stack:
        stack.callback(ranges.close)
        stack.enter_context(listening(ranges))
        stack.callback(register_module_forward_pre_hook(ranges.enter_module).remove)
        # One that is always called leaves the range when a forward raises, as the early stop of a recompute does.
        stack.callback(register_module_forward_hook(ranges.leave_module, always_call=True).remove)
        yield
