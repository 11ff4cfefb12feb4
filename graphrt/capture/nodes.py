"""The node map of a captured step: which node of the graph belongs to which module, direction and phase.

A replay runs no Python, so nobody can say then which layer a kernel works for. The capture can: whenever the place of the
work changes (`graphrt.capture.attribution`), the number of nodes in the graph so far is read, and the nodes added since the
last change belong to the place that is left. A capture keeps its nodes in the order of launch, those of a second branch
([Note: branch]) among the others.
"""

import json
from bisect import bisect_right
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from graphrt.capture.attribution import Place
from graphrt.capture.costs import Cost, cost_of, is_known
from graphrt.capture.record_nodes import OpNode
from graphrt.errors import GraphrtError

__all__ = ["GraphNode", "NodeMap", "NodeObserver", "RawNode", "raw_operations"]


@dataclass(frozen=True, slots=True)
class RawNode:
    """What the driver says of a node."""

    kind: str  # "kernel", "memcpy", "memset", "empty", "other"; "operation" in a recording
    kernel: str | None = None  # mangled name of a kernel, name of an operation
    node_id: int | None = None  # as profilers know the node


@dataclass(frozen=True, slots=True)
class GraphNode:
    """One node of a captured step, in the order of launch.

    Attributes:
        index: position in the graph.
        kind: "kernel", "memcpy", "memset", "empty" or "other"; "operation" in a recording.
        kernel: mangled name of the kernel, or name of the operation; None for nodes without.
        place: module, direction and phase.
        node_id: what profilers call the node; None where the driver does not tell.
        flops: floating point operations, None where unknown.
        num_bytes: bytes read and written, None where unknown.
        is_beside: whether it is on a second branch: a replay may run it earlier or later than its index says.
    """

    index: int
    kind: str
    kernel: str | None
    place: Place
    node_id: int | None = None
    flops: int | None = None
    num_bytes: int | None = None
    is_beside: bool = False

    @property
    def has_activity(self) -> bool:
        """Whether a replay of the node shows in a profile."""
        return self.kind in ("kernel", "memcpy", "memset", "operation")


@dataclass(frozen=True)
class NodeMap:
    """The nodes of one captured step, in the order of launch."""

    nodes: tuple[GraphNode, ...]

    def __len__(self) -> int:
        return len(self.nodes)

    @property
    def active(self) -> tuple[GraphNode, ...]:
        """The nodes that show in a profile of a replay."""
        return tuple(node for node in self.nodes if node.has_activity)

    def save(self, path: str | Path) -> None:
        """Write a JSON list of objects: index, kind, kernel, module, direction, phase, node_id, is_beside."""
        lines = ",\n".join(json.dumps(_row(node)) for node in self.nodes)
        Path(path).write_text(f"[\n{lines}\n]\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> "NodeMap":
        """What `save` wrote.

        Raises:
            GraphrtError: the file holds something else.
        """
        try:
            rows = json.loads(Path(path).read_text(encoding="utf-8"))
            return cls(tuple(_from_row(row) for row in rows))
        except (ValueError, TypeError, KeyError) as error:
            raise GraphrtError(f"{path} does not hold a node map ({type(error).__name__}). Write one with NodeMap.save.") from error


def _row(node: GraphNode) -> dict[str, Any]:
    place = node.place
    return {
        "index": node.index, "kind": node.kind, "kernel": node.kernel, "module": place.module, "direction": place.direction,
        "phase": place.phase, "node_id": node.node_id, "is_beside": node.is_beside,
    }  # fmt: skip


def _from_row(row: dict[str, Any]) -> GraphNode:
    place = Place(row["phase"], row["direction"], row["module"])
    return GraphNode(row["index"], row["kind"], row["kernel"], place, row["node_id"], is_beside=row.get("is_beside", False))


@dataclass
class NodeObserver:
    """Collects, during one capture, where the places change and what operations cost.

    Args:
        num_nodes: number of nodes in the graph so far; 0 while nothing is being captured.
        before_operation: called with the tensors that an operation of torch's is about to get.
    """

    num_nodes: Callable[[], int]
    before_operation: Callable[[Sequence[Tensor]], None] = lambda inputs: None
    _ends: list[int] = field(default_factory=list)  # of stretches of nodes, in order
    _places: list[Place] = field(default_factory=list)
    _costs: dict[int, Cost] = field(default_factory=dict)  # by index of the operation's first node
    _first: int = 0

    def leave(self, place: Place) -> None:
        """The nodes added since the last call belong to ``place``."""
        end = self.num_nodes()
        if end > (self._ends[-1] if self._ends else 0):
            self._ends.append(end)
            self._places.append(place)

    def begin_operation(self, operation: Any, inputs: Sequence[Tensor]) -> None:
        """An operation of torch's is about to add its nodes."""
        self.before_operation(inputs)
        if is_known(operation):
            self._first = self.num_nodes()

    def end_operation(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """An operation has added its nodes."""
        if is_known(operation) and self.num_nodes() > self._first:
            self._costs[self._first] = cost_of(operation, args, kwargs, result)

    def node_map(self, nodes: Sequence[RawNode], beside: Collection[int] = ()) -> NodeMap:
        """The map of a finished capture.

        Args:
            nodes: what the graph holds, in the order of launch.
            beside: indices of those on a second branch.
        """
        return NodeMap(tuple(self._node(index, node, index in beside) for index, node in enumerate(nodes)))

    def _node(self, index: int, node: RawNode, is_beside: bool) -> GraphNode:
        at = bisect_right(self._ends, index)
        place = self._places[at] if at < len(self._places) else Place()
        return GraphNode(index, node.kind, node.kernel, place, node.node_id, *self._costs.get(index, (None, None)), is_beside)


def raw_operations(operations: Sequence[OpNode]) -> list[RawNode]:
    """The nodes of a recording."""
    return [RawNode("operation", node.name) for node in operations if node.is_replayed]
