"""Whose work is being issued, where no module's forward says so.

A fused layer issues the products of several linears itself, and its backward those of their gradients. Around each it names
the module or the parameter it works for; whoever tells a step's kernels apart (`graphrt.capture.attribution`) listens.
Without a listener the name is one look at an empty list.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch
from torch import Tensor, nn

__all__ = ["OwnerListener", "hearing_owners", "working_for"]

Owner = nn.Module | Tensor


class OwnerListener(Protocol):
    """Who hears of work begun and ended for a module or a parameter, on the thread that does it."""

    def enter_owner(self, owner: Owner) -> None: ...
    def exit_owner(self) -> None: ...


_listeners: list[OwnerListener] = []
_NOTHING: AbstractContextManager[None] = nullcontext()


def working_for(owner: Owner) -> AbstractContextManager[None]:
    """Work issued inside the block is ``owner``'s, whichever module's forward or backward issues it."""
    # A traced function asks for no listener: a capture, which has one, would find it changed and compile it again.
    return _naming(owner) if not torch.compiler.is_compiling() and _listeners else _NOTHING


@contextmanager
def _naming(owner: Owner) -> Iterator[None]:
    listeners = tuple(_listeners)
    for listener in listeners:
        listener.enter_owner(owner)
    try:
        yield
    finally:
        for listener in listeners:
            listener.exit_owner()


@contextmanager
def hearing_owners(listener: OwnerListener) -> Iterator[None]:
    """Inside the block ``listener`` hears of every owner."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
