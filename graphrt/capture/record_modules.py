"""Which submodule's forward is running, for the names of recorded operations."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

__all__ = ["module_names"]


@contextmanager
def module_names(root: nn.Module | None) -> Iterator[Callable[[], str]]:
    """Yield a function that names the innermost submodule of `root` whose forward is running, "" outside of them."""
    if root is None:
        yield str
        return
    names = {id(module): name for name, module in root.named_modules()}
    running: list[str] = []

    def enter(module: nn.Module, _: Any) -> None:
        if id(module) in names:
            running.append(names[id(module)])

    def leave(module: nn.Module, *_: Any) -> None:
        if id(module) in names and running:
            running.pop()

    # A hook that is always called keeps the names right when a forward raises, as the early stop of a recompute does.
    handles = (register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True))
    try:
        yield lambda: running[-1] if running else ""
    finally:
        for handle in handles:
            handle.remove()
