"""Two steps compared operation by operation: what differs is Python state, which a graph would freeze."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from graphrt.capture.record_location import in_parentheses
from graphrt.capture.record_nodes import OpNode, TensorSpec

__all__ = ["Difference", "compare_operations"]

_REMEDIES = {
    "operation": "Make every step issue the same operations: decide with torch.where, or outside the step.",
    "shape": "Make every step work on the same shapes and dtypes.",
    "value": "Keep the value in a tensor that the step updates in place, or pass it with the batch.",
    "rebound": "Update the tensor in place (copy_, mul_, lerp_) instead of assigning a new one.",
}


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing two steps of the same body did differently. `str()` gives the fact and the remedy."""

    kind: str  # "operation", "shape", "value" or "rebound"
    node: OpNode  # the operation of the second step; of the first where the second has none
    fact: str  # follows the operation's name; holds the place
    first: Any
    second: Any

    @property
    def name(self) -> str:
        return self.node.name

    @property
    def location(self) -> str:
        return self.node.location

    def __str__(self) -> str:
        return f"{self.node.name} {self.fact}. {_REMEDIES[self.kind]}"


def compare_operations(first: Sequence[OpNode], second: Sequence[OpNode]) -> list[Difference]:
    """The differences in order of issue, one a place and kind. After the first other operation nothing can be aligned."""
    first, second = ([node for node in nodes if node.is_compared] for nodes in (first, second))
    found: dict[tuple[Any, ...], Difference] = {}
    for before, after in zip(first, second, strict=False):
        if before.name != after.name:
            found[("operation",)] = _operation(before, after)
            break
        for difference in _differences(before, after):
            found.setdefault((difference.kind, after.name, after.where), difference)
    else:
        if len(first) != len(second):
            found[("operation",)] = _length(first, second)
    return list(found.values())


def _operation(before: OpNode, after: OpNode) -> Difference:
    fact = f"was issued{_place(after)} where the step before issued {before.name}{_place(before)}"
    return Difference("operation", after, fact, before.name, after.name)


def _length(first: Sequence[OpNode], second: Sequence[OpNode]) -> Difference:
    shared = min(len(first), len(second))
    extra, which = (second[shared], "second") if len(second) > shared else (first[shared], "first")
    fact = f"was issued{_place(extra)} in the {which} of two steps only ({len(first)} and {len(second)} operations)"
    return Difference("operation", extra, fact, len(first), len(second))


def _differences(before: OpNode, after: OpNode) -> Iterator[Difference]:
    for (name, old), (_, new) in zip(before.arguments, after.arguments, strict=False):
        yield from _value_differences(after, f"argument {name!r}", old, new)
    for old, new in zip(before.outputs, after.outputs, strict=False):
        yield from _value_differences(after, "its output", old, new)


def _value_differences(node: OpNode, name: str, old: Any, new: Any) -> Iterator[Difference]:
    if isinstance(old, TensorSpec) and isinstance(new, TensorSpec):
        yield from _tensor_differences(node, name, old, new)
    elif isinstance(old, tuple) and isinstance(new, tuple) and _holds_tensors(old + new) and len(old) == len(new):
        for old_item, new_item in zip(old, new, strict=True):
            yield from _value_differences(node, name, old_item, new_item)
    elif not _is_same(old, new):
        yield _other("value", node, name, repr(old), repr(new), old, new)


def _tensor_differences(node: OpNode, name: str, old: TensorSpec, new: TensorSpec) -> Iterator[Difference]:
    if (old.shape, old.dtype) != (new.shape, new.dtype):
        yield _other("shape", node, name, _describe(old), _describe(new), (old.shape, old.dtype), (new.shape, new.dtype))
    elif not _is_same(old.value, new.value):
        yield _other("value", node, name, _shown(old.value), _shown(new.value), old.value, new.value)
    elif old.address != new.address:
        fact = f"reads {name} at another address than in the step before{_place(node)}"
        yield Difference("rebound", node, fact, old.address, new.address)


def _other(kind: str, node: OpNode, name: str, shown_old: str, shown_new: str, old: Any, new: Any) -> Difference:
    fact = f"got {shown_old} in one step and {shown_new} in the next for {name}{_place(node)}"
    return Difference(kind, node, fact, old, new)


def _place(node: OpNode) -> str:
    return in_parentheses(node.where)


def _holds_tensors(values: tuple[Any, ...]) -> bool:
    return any(isinstance(value, TensorSpec) for value in values)


def _is_same(old: Any, new: Any) -> bool:
    """Equal and of one type: 1 and 1.0 and True make different kernels; NaN equals NaN."""
    if type(old) is not type(new):
        return False
    if isinstance(old, tuple):
        return len(old) == len(new) and all(map(_is_same, old, new))
    # repr tells -0.0 from 0.0, and calls NaN equal to NaN.
    return repr(old) == repr(new) if isinstance(old, (float, complex)) else old == new


def _describe(spec: TensorSpec) -> str:
    return f"{list(spec.shape)} {str(spec.dtype).removeprefix('torch.')}"


def _shown(value: Any) -> str:
    return "other bytes from the host" if isinstance(value, bytes) else f"the host value {value!r}"
