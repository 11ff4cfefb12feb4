"""Three facts about the process that decide whether a delayed update may run now.

Each is asked of whoever knows it (the driver, the autograd engine, the compiler) at the moment it matters; graphrt keeps
no flag of its own that could disagree. The answers come from references taken at import: code that patches the public
names of torch, so that libraries see a capture, does not change them.
"""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, overload

import torch

__all__ = ["is_capturing", "is_compiling", "is_in_backward", "untraced"]

P = ParamSpec("P")
T = TypeVar("T")

# Absent on builds without CUDA, where nothing can be capturing.
_is_stream_capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)
_graph_task_id = torch._C._current_graph_task_id


def is_capturing() -> bool:
    """Whether the current CUDA stream is being captured into a graph. False on machines without CUDA."""
    if _is_stream_capturing is None or not torch.cuda.is_initialized():
        return False
    return _is_stream_capturing()


def is_in_backward() -> bool:
    """Whether the autograd engine is running a backward in this thread (a hook, a recompute, a custom backward)."""
    return _graph_task_id() != -1


def is_compiling() -> bool:
    """Whether torch.compile or torch.export is tracing the caller."""
    return torch.compiler.is_compiling()


@overload
def untraced(function: Callable[P, T], *, reason: str = ...) -> Callable[P, T]: ...
@overload
def untraced(*, reason: str = ...) -> Callable[[Callable[P, T]], Callable[P, T]]: ...
def untraced(function: Callable[P, T] | None = None, *, reason: str = "it asks at run time which FP8 region it is in") -> Any:
    """Decorator: torch.compile never traces the function. The graph breaks there; under fullgraph=True it raises with ``reason``.

    As ``torch.compiler.disable``, which would import the compiler along with graphrt.
    """
    if function is None:
        return functools.partial(untraced, reason=reason)
    disabled = torch._disable_dynamo(function)
    disabled.__dict__.update(_torchdynamo_disable=True, _torchdynamo_disable_msg=reason)
    return disabled
