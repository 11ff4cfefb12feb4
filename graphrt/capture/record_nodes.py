"""What a recording knows of each operation: its name, where it was issued, what it was given and what it gave."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from graphrt.capture.record_location import Location

__all__ = ["OpNode", "Plain", "TensorSpec", "name_of", "plain_value", "storage_key", "tensors_in"]

# A Python value as it is compared between two steps: scalars as they are, sequences as tuples, other objects by type name.
Plain = Any


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor argument or output.

    address: where its data is, for a tensor made before the step; None for one the step made itself.
    value: what it held, for a host constant (which a graph freezes); None otherwise.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    address: int | None = None
    value: Plain = None


@dataclass(frozen=True, slots=True, eq=False)
class OpNode:
    """One operation of a step, in the order of issue."""

    name: str  # "aten::mm"
    where: Location | None
    module: str  # name of the submodule whose forward issued it, "" outside of one
    arguments: tuple[tuple[str, Plain], ...]  # by name in the schema; tensors as TensorSpec
    outputs: tuple[TensorSpec | None, ...]
    is_replayed: bool  # False for views, metadata changes and uninitialised factories
    is_compared: bool = True  # False for what the runner itself issues elsewhere in the captured step

    @property
    def location(self) -> str:
        """ "file.py:42", or "" when no code of the user's was on the stack."""
        return "" if self.where is None else str(self.where)

    @property
    def source(self) -> str:
        """The expression at `location`."""
        return "" if self.where is None else self.where.source


def name_of(operation: Any) -> str:
    """ "aten::add_" for `torch.ops.aten.add_.Tensor`: the overload says little to a reader."""
    schema = getattr(operation, "_schema", None)
    return schema.name if schema is not None else str(operation)


def tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors among arguments or outputs; operator schemas nest them one list deep, custom ones may nest deeper."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)


def storage_key(tensor: torch.Tensor) -> int:
    """Identity of the storage, shared by all views of it, unique while it lives."""
    return tensor.untyped_storage()._cdata


_KEPT = (int, float, bool, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format, type(None))


def plain_value(value: Any) -> Plain:
    """`value` in a form that compares between two steps and keeps nothing alive."""
    if isinstance(value, (list, tuple)):
        return tuple(plain_value(item) for item in value)
    return value if isinstance(value, _KEPT) else type(value).__name__
