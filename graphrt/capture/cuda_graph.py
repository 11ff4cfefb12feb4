"""One captured CUDA graph: capture, replay, and what is in it.

A capture executes nothing. It may fail half-way, and a failed one must leave the process as it was: the stream is left,
garbage collection is on again, the generator is usable, and the pool is the same one that the next capture uses (torch
leaks the private pool of an invalidated capture, so there is only ever one).
"""

import ctypes
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, TypeVar

import torch

from graphrt.capture.cuda_rng import CudaRng, RngTrace
from graphrt.capture.driver import call
from graphrt.capture.garbage import no_garbage_collection
from graphrt.capture.memset_nodes import replace_memsets
from graphrt.capture.nodes import RawNode
from graphrt.errors import CaptureError
from graphrt.ranges import INSTANTIATE

__all__ = ["CaptureCounter", "CapturedGraph", "GraphPool", "branch_stream", "capture", "capture_stream"]

T = TypeVar("T")

#: Of the capture stream, above the default of 0. Kernels keep it in the graph, and torch instantiates graphs so that it counts.
_MAIN_PRIORITY = -1


class CapturedGraph:
    """A captured step. Made by `capture`; replays on the current stream."""

    def __init__(self, graph: torch.cuda.CUDAGraph, nodes: list[Any], rng: CudaRng) -> None:
        self._graph: torch.cuda.CUDAGraph | None = graph
        self._rng = rng
        self.nodes = _describe(nodes)  # in the order of launch
        self.num_nodes_by_kind = dict(Counter(node.kind for node in self.nodes))
        self.kernel_names = tuple(node.kernel for node in self.nodes if node.kernel is not None)

    @property
    def num_nodes(self) -> int:
        """Nodes of all kinds."""
        return sum(self.num_nodes_by_kind.values())

    def replay(self) -> None:
        """Launch the graph on the current stream; the host does not wait."""
        if self._graph is None:
            raise CaptureError("This graph is closed. Capture the step again.")
        self._rng.prepare_replay()
        self._graph.replay()
        self._rng.finish_replay()

    def close(self) -> None:
        """Free the graph; a second call does nothing."""
        if self._graph is not None:
            self._graph.reset()
            self._graph = None


@functools.cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream all captures on ``device`` use. Memory that torch caches belongs to a stream: one a trainer would add up."""
    return torch.cuda.Stream(device, priority=_MAIN_PRIORITY)


@functools.cache
def branch_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream beside `capture_stream`, of lower priority; nothing is allocated on it."""
    return torch.cuda.Stream(device)


class GraphPool:
    """The memory pool that the graphs of one runner share.

    A graph of one node keeps it alive: torch does not take a pool's handle again once the last graph in it is gone.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.handle = torch.cuda.graph_pool_handle()
        self._keeper: torch.cuda.CUDAGraph | None = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(stream.device)
        with torch.cuda.stream(stream):
            self._keeper.capture_begin(pool=self.handle, capture_error_mode="thread_local")
            with _ending(self._keeper):
                torch.zeros(1, device=stream.device)

    def close(self) -> None:
        """Let the pool go with its last graph; a second call does nothing."""
        if self._keeper is not None:
            self._keeper.reset()
            self._keeper = None


def capture(body: Callable[[], T], *, stream: torch.cuda.Stream, pool: Any, rng_trace: RngTrace) -> tuple[CapturedGraph, T]:
    """Capture what ``body`` enqueues, on ``stream`` and into ``pool``.

    Args:
        rng_trace: what the last warmup step did with the device's generator.

    Returns:
        The graph, and what ``body`` returned: tensors in the pool, not computed yet.

    Raises:
        Whatever ``body`` raised, or what the driver said of an operation that a graph cannot hold.
    """
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    rng = CudaRng(rng_trace, stream.device)
    rng.register(graph)
    with ExitStack() as stack:
        # A collection could free a graph or memory, which the driver refuses during a capture.
        stack.enter_context(no_garbage_collection())
        stack.enter_context(_restoring_generator(stream.device))
        torch.cuda.synchronize(stream.device)
        stack.enter_context(torch.cuda.stream(stream))
        # thread_local: a loader thread that pins memory meanwhile does not break the capture.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        with _ending(graph), rng.capturing():
            out = body()
    nodes = replace_memsets(graph.raw_cuda_graph(), _nodes(graph), _index(stream.device), stream.priority)
    with INSTANTIATE:
        graph.instantiate()
    return CapturedGraph(graph, nodes, rng), out


@contextmanager
def _ending(graph: torch.cuda.CUDAGraph) -> Iterator[None]:
    """End the capture in every case; the first error is the one that tells."""
    try:
        yield
    except BaseException:
        # An invalidated capture ends with an error of its own, which says less than the one under way.
        with suppress(RuntimeError):
            graph.capture_end()
        raise
    graph.capture_end()


@contextmanager
def _restoring_generator(device: torch.device) -> Iterator[None]:
    """After a failed capture torch's generator believes it is still being captured: give it its earlier state back."""
    generator = torch.cuda.default_generators[_index(device)]
    before = generator.clone_state()
    try:
        yield
    except BaseException:
        generator.graphsafe_set_state(before)
        raise


_KINDS = {
    "CU_GRAPH_NODE_TYPE_KERNEL": "kernel",
    "CU_GRAPH_NODE_TYPE_MEMCPY": "memcpy",
    "CU_GRAPH_NODE_TYPE_MEMSET": "memset",
    "CU_GRAPH_NODE_TYPE_EMPTY": "empty",
}


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _nodes(graph: torch.cuda.CUDAGraph) -> list[Any]:
    """The nodes, in the order they were captured in."""
    from cuda.bindings import driver  # pyright: ignore[reportAttributeAccessIssue]

    num_nodes = call(driver.cuGraphGetNodes, graph.raw_cuda_graph())[1]
    return list(call(driver.cuGraphGetNodes, graph.raw_cuda_graph(), num_nodes)[0])


def _describe(nodes: list[Any]) -> tuple[RawNode, ...]:
    """What the driver says of each node."""
    from cuda.bindings import driver  # pyright: ignore[reportAttributeAccessIssue]

    id_of = _node_id_query()
    return tuple(_describe_node(driver, node, id_of) for node in nodes)


def _describe_node(driver: Any, node: Any, id_of: Callable[[Any], int | None]) -> RawNode:
    kind = _KINDS.get(call(driver.cuGraphNodeGetType, node).name, "other")
    return RawNode(kind, _kernel_name(driver, node) if kind == "kernel" else None, id_of(node))


class CaptureCounter:
    """Counts the nodes of the graph that a stream is being captured into; callable from any thread.

    Args:
        stream: the stream; before its capture begins, and after it has ended, the count is 0.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        from cuda.bindings import driver  # pyright: ignore[reportAttributeAccessIssue]

        self._driver, self._stream = driver, stream

    def __call__(self) -> int:
        driver = self._driver
        error, status, _, graph, *_ = driver.cuStreamGetCaptureInfo(driver.CUstream(self._stream.cuda_stream))
        if int(error) or status != driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE:
            # Nothing is captured, or what was is invalid: the operation that made it so says why.
            return 0
        error, _, num_nodes = driver.cuGraphGetNodes(graph)
        return 0 if int(error) else num_nodes


def _node_id_query() -> Callable[[Any], int | None]:
    """A function from a node to the number that profilers give it; to None where neither the driver nor CUPTI tells."""
    ask_cupti = _cupti_node_id()

    def query(node: Any) -> int | None:
        if ask_cupti is not None:
            number = ctypes.c_uint64()
            return number.value if ask_cupti(ctypes.c_void_p(int(node)), ctypes.byref(number)) == 0 else None
        return None

    return query


def _cupti_node_id() -> Any:
    """``cuptiGetGraphNodeId`` of the CUPTI that torch has loaded."""
    for name in ("libcupti.so.13", "libcupti.so.12", "libcupti.so"):
        with suppress(OSError, AttributeError):
            return ctypes.CDLL(name).cuptiGetGraphNodeId
    return None


def _kernel_name(driver: Any, node: Any) -> str:
    params = call(driver.cuGraphKernelNodeGetParams, node)
    if int(params.func):
        return call(driver.cuFuncGetName, params.func).decode()
    return call(driver.cuKernelGetName, params.kern).decode()
