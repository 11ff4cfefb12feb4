"""What one operation has to compute and to move, where its kind says so."""

import functools
from typing import Any

import torch
from torch import Tensor

from graphrt.capture.record_nodes import tensors_in

__all__ = ["Cost", "cost_of", "is_known"]

#: (floating point operations, bytes read and written); None where the kind of operation does not say.
Cost = tuple[int | None, int | None]

# Read and write each element once, like what torch itself tags as pointwise.
_COPIES = frozenset({"copy_", "_to_copy", "clone", "fill_", "zero_", "cat"})


@functools.cache
def _formulas() -> dict[Any, Any]:
    from torch.utils.flop_counter import flop_registry

    return flop_registry


@functools.cache
def is_known(operation: Any) -> bool:
    """Whether `cost_of` can tell anything about operations of this kind."""
    return _packet(operation) in _formulas() or _moves_once(operation)


def cost_of(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Cost:
    """Of a matrix product, convolution or attention the FLOPs (attention as if not causal), of a pointwise operation the bytes."""
    flops = _flops(operation, args, kwargs, result)
    num_bytes = _num_bytes((*args, *kwargs.values()), result) if _moves_once(operation) else None
    return flops, num_bytes


def _flops(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int | None:
    formula = _formulas().get(_packet(operation))
    if formula is None:
        return None
    try:
        return int(formula(*args, **kwargs, out_val=result))
    except Exception:
        # A formula that does not take this overload's arguments must not end a capture.
        return None


def _packet(operation: Any) -> Any:
    return getattr(operation, "overloadpacket", operation)


def _moves_once(operation: Any) -> bool:
    tags = getattr(operation, "tags", ())
    return torch.Tag.pointwise in tags or getattr(_packet(operation), "__name__", "") in _COPIES


def _num_bytes(inputs: tuple[Any, ...], result: Any) -> int:
    read = list(tensors_in(inputs))
    return sum(map(_extent_bytes, read)) + sum(map(_extent_bytes, tensors_in((result,))))


def _extent_bytes(x: Tensor) -> int:
    """What the tensor's elements take; those of an expanded one once."""
    num_elements = 1
    for size, stride in zip(x.shape, x.stride(), strict=True):
        num_elements *= size if stride or size == 0 else 1
    return num_elements * x.element_size()
