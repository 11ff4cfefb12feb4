"""What a backward gets of its forward, freed as it is used.

Autograd holds the tensors that a forward saved until its backward has returned. Where that backward makes tensors as large
as those it has read for the last time, the step's peak is the sum of both.
"""

from typing import Any

import torch
from torch import Tensor

__all__ = ["is_graph_retained", "take_saved"]


def take_saved(ctx: Any) -> list[Any]:
    """What ``ctx.save_for_backward`` was given; each is freed when the caller drops it, unless the graph is retained."""
    saved: list[Tensor | None] = list(ctx.saved_tensors)
    ctx.maybe_clear_saved_tensors()
    return saved


def is_graph_retained() -> bool:
    """Whether the backward under way leaves its graph for another one."""
    return torch._C._autograd._get_current_graph_task_keep_graph()  # pyright: ignore[reportAttributeAccessIssue]
