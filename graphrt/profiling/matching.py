"""From what the profiler saw of a replay to the nodes of its graph: by order, each checked by its name."""

import ctypes
import functools
import re
from collections.abc import Sequence
from typing import Protocol

from graphrt.capture.nodes import GraphNode

__all__ = ["Activity", "demangled", "is_same_kernel", "match"]


class Activity(Protocol):
    """What a profiler says of one kernel, copy or memset."""

    @property
    def kind(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def node_id(self) -> int | None: ...


def match(activities: Sequence[Activity], nodes: Sequence[GraphNode]) -> list[GraphNode | None]:
    """The node of each activity of one replay; None where it is not certain.

    Where the profiler gives the ids of these nodes, by id. Elsewhere the k-th activity is the k-th node, and both must have one kind and
    name. If one is missing or another one, what stands before it still counts from the start and what stands after it
    from the end; in between nothing is guessed. A second branch runs in an order of its own, so the kernels that are on
    one, wherever else they run too, are counted for themselves, and so are all others.

    Args:
        activities: in order of start.
        nodes: those that show in a profile, in order of launch.
    """
    if activities and all(activity.node_id is not None for activity in activities):
        by_id: dict[int | None, GraphNode] = {node.node_id: node for node in nodes if node.node_id is not None}
        found = [by_id.get(activity.node_id) for activity in activities]
        # Some drivers number the nodes of an instantiated graph anew; ids that do not fit throughout say nothing.
        if all(node is not None and _fits(activity, node) for activity, node in zip(activities, found, strict=True)):
            return found
    return _match_branches(activities, nodes)


def _match_branches(activities: Sequence[Activity], nodes: Sequence[GraphNode]) -> list[GraphNode | None]:
    beside = {(node.kind, node.kernel): node for node in nodes if node.is_beside}
    has_name = [any(_fits(activity, node) for node in beside.values()) for activity in activities]
    # A shown name may fit instantiations of one template alike: nodes are told apart as the activities are.
    alike = {(one.kind, one.name): one for one, value in zip(activities, has_name, strict=True) if value}.values()
    is_named = [(node.kind, node.kernel) in beside or any(_fits(activity, node) for activity in alike) for node in nodes]
    found: list[GraphNode | None] = [None] * len(activities)
    for is_beside in (False, True):
        places = [place for place, value in enumerate(has_name) if value is is_beside]
        kept = [node for node, value in zip(nodes, is_named, strict=True) if value is is_beside]
        for place, node in zip(places, _match_by_order([activities[place] for place in places], kept), strict=True):
            found[place] = node
    return found


def _match_by_order(activities: Sequence[Activity], nodes: Sequence[GraphNode]) -> list[GraphNode | None]:
    if len(activities) == len(nodes):
        pairs = zip(activities, nodes, strict=True)
        fitting: list[GraphNode | None] = [node if _fits(activity, node) else None for activity, node in pairs]
        if all(node is not None for node in fitting):
            return fitting
    num_first = _num_fitting(activities, nodes)
    num_last = min(_num_fitting(activities[::-1], nodes[::-1]), min(len(activities), len(nodes)) - num_first)
    first, last = list(nodes[:num_first]), list(nodes[len(nodes) - num_last :])
    return [*first, *[None] * (len(activities) - num_first - num_last), *last]


def _num_fitting(activities: Sequence[Activity], nodes: Sequence[GraphNode]) -> int:
    """How many from the start fit one by one."""
    number = 0
    for activity, node in zip(activities, nodes, strict=False):
        if not _fits(activity, node):
            break
        number += 1
    return number


def _fits(activity: Activity, node: GraphNode) -> bool:
    if activity.kind == "kernel" and _DEVICE_COPY.match(activity.name):
        return activity.name.startswith(node.kind)
    return activity.kind == node.kind and (node.kernel is None or is_same_kernel(node.kernel, activity.name))


# The driver runs small copies and memsets of a graph as kernels of its own.
_DEVICE_COPY = re.compile(r"mem(cpy|set)\d*_")


@functools.cache
def is_same_kernel(mangled: str, shown: str) -> bool:
    """Whether a kernel's name in the driver is the one that a profiler shows, mangled or not."""
    if shown in (mangled, demangled(mangled)):
        return True
    # Demanglers differ in how they write templates and lambdas: the names in it have to be the same ones.
    words = _source_names(mangled)
    return bool(words) and all(word in shown for word in words)


# In an Itanium-mangled name: a number as template argument, a back reference, and an identifier after its length.
_LITERAL, _REFERENCE, _LENGTH = re.compile(r"L[a-z]n?\d+E"), re.compile(r"[ST][0-9A-Z]*_"), re.compile(r"\d+")
_MIN_NAME = 4  # shorter ones may be numbers of other kinds


def _source_names(mangled: str) -> list[str]:
    """The identifiers in a mangled name."""
    names, at = [], 2 if mangled.startswith("_Z") else len(mangled)
    while at < len(mangled):
        if (found := _LITERAL.match(mangled, at) or _REFERENCE.match(mangled, at)) is not None:
            at = found.end()
        elif (found := _LENGTH.match(mangled, at)) is not None:
            at = found.end() + int(found[0])
            names.append(mangled[found.end() : at])
        else:
            at += 1
    return [name for name in names if len(name) >= _MIN_NAME and not name.startswith(("_GLOBAL__N", "_INTERNAL"))]


@functools.cache
def demangled(name: str) -> str:
    """A C++ name as its source has it; as it is where it is no mangled one, or nothing here can demangle it."""
    if not name.startswith("_Z"):
        return name
    demangle = _demangler()
    if demangle is None:
        return name
    status = ctypes.c_int()
    address = demangle(name.encode(), None, None, ctypes.byref(status))
    if not address:
        return name
    try:
        return ctypes.string_at(address).decode(errors="replace")
    finally:
        _free()(address)


@functools.cache
def _demangler() -> "ctypes._NamedFuncPointer | None":
    for library in (None, "libstdc++.so.6", "libc++abi.so.1", "libc++abi.dylib"):
        try:
            function = ctypes.CDLL(library).__cxa_demangle
        except (OSError, AttributeError):
            continue
        function.restype = ctypes.c_void_p
        function.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int)]
        return function
    return None


@functools.cache
def _free() -> "ctypes._NamedFuncPointer":
    function = ctypes.CDLL(None).free
    function.restype, function.argtypes = None, [ctypes.c_void_p]
    return function
