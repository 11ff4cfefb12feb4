"""Batches: their tensors by name, and their split into microbatches.

A batch is a tensor, or any dict, tuple or list of tensors and constants (numbers, strings, None). A tensor of it is
named the way one would write it: ``batch["tokens"]``, ``batch[0]["mask"]``, ``batch``.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from graphrt.errors import StaticInputError

__all__ = ["leaves", "map_tensors", "plain", "split"]

_CONSTANTS = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device)


def plain(batch: Any) -> Any:
    """The batch with mappings of other types (a tokenizer's, say) as dicts, all the way down."""
    if isinstance(batch, Mapping) and type(batch) is not dict:
        batch = dict(batch)
    if isinstance(batch, dict):
        return {key: plain(value) for key, value in batch.items()}
    if type(batch) in (list, tuple):
        return type(batch)(plain(value) for value in batch)
    return batch


def leaves(batch: Any) -> Iterator[tuple[str, Any]]:
    """(name, leaf) of every tensor and constant.

    Raises:
        StaticInputError: something that is neither, or a tensor that requires a gradient.
    """
    for path, leaf in pytree.tree_flatten_with_path(batch)[0]:
        name = "batch" + "".join(_key(key) for key in path)
        if not isinstance(leaf, (Tensor, *_CONSTANTS)):
            raise StaticInputError(f"{name} is of type {type(leaf).__name__}, expected a tensor or a constant. Convert it before the step.")
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            raise StaticInputError(
                f"{name} requires a gradient, which a step does not give to its batch. Pass {name}.detach(), and call requires_grad_() "
                "on a copy in loss_fn where the gradient is needed."
            )
        yield name, leaf


def _key(key: Any) -> str:
    if isinstance(key, pytree.MappingKey):
        return f'["{key.key}"]' if isinstance(key.key, str) else f"[{key.key!r}]"
    if isinstance(key, pytree.SequenceKey):
        return f"[{key.idx}]"
    return f".{getattr(key, 'name', key)}"


def map_tensors(fn: Any, batch: Any) -> Any:
    """The batch with ``fn`` applied to its tensors."""
    return pytree.tree_map_only(Tensor, fn, batch)


def split(batch: Any, num_microbatches: int) -> list[Any]:
    """Views of the microbatches of a batch.

    Each tensor is split along dim 0 into equal parts; 0-dim tensors and constants are shared. A list of exactly
    ``num_microbatches`` (more than one) is a list of microbatches already.

    Raises:
        StaticInputError: a tensor's dim 0 is not divisible.
    """
    batch = plain(batch)
    list(leaves(batch))
    if num_microbatches == 1:
        return [batch]
    if type(batch) is list and len(batch) == num_microbatches:
        return batch
    for name, leaf in leaves(batch):
        if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] % num_microbatches:
            raise StaticInputError(
                f"{name} has shape {list(leaf.shape)}, and dim 0 does not divide into grad_accum_steps={num_microbatches} equal parts. "
                "Change the batch size or grad_accum_steps."
            )
    return [map_tensors(lambda x, i=i: _part(x, i, num_microbatches), batch) for i in range(num_microbatches)]


def _part(x: Tensor, i: int, num_parts: int) -> Tensor:
    if x.dim() == 0:
        return x
    size = x.shape[0] // num_parts
    return x.narrow(0, i * size, size)
