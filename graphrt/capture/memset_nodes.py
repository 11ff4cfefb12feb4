"""Memset nodes of a captured graph, replaced by kernels that write the same bytes.

Libraries clear small workspaces before their kernels: cuBLASLt before many GEMMs, cuDNN before each attention. In a graph
each becomes a memset node, and between two kernels such a node costs far more than the write: the device changes from
kernels to a memset and back. A kernel in its place keeps the chain one of kernels. profiles/README.md has the numbers.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

from graphrt.capture.driver import call
from graphrt.kernels import device
from graphrt.kernels.fill import FILL_KERNEL, Fill, fill_launch

__all__ = ["MAX_BYTES", "replace_memsets"]

#: In bytes. Larger ranges stay memset nodes: they take long enough for the change-over to count little.
MAX_BYTES = 1 << 16


def replace_memsets(graph: int, nodes: Sequence[Any], device_index: int, priority: int) -> list[Any]:
    """Replace the small memset nodes of a graph that is not instantiated yet.

    Args:
        graph: the CUgraph's handle.
        nodes: its nodes, in the order they were captured in.
        device_index: the CUDA device that the graph runs on; its kernels are loaded.
        priority: of the new kernels, that of the stream the memsets were captured on: a lower one would let a kernel behind
            them wait for other branches of the graph.

    Returns:
        The nodes in the same order, a kernel node where a memset node was replaced.
    """
    return [_replaced(graph, node, device_index, priority) for node in nodes]


def _replaced(graph: int, node: Any, device_index: int, priority: int) -> Any:
    from cuda.bindings import driver  # pyright: ignore[reportAttributeAccessIssue]

    if call(driver.cuGraphNodeGetType, node) != driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEMSET:
        return node
    params = call(driver.cuGraphMemsetNodeGetParams, node)
    fill = Fill(int(params.dst), params.value, params.elementSize, params.width)
    if params.height != 1 or fill.num_bytes > MAX_BYTES:
        return node
    before, after = _neighbours(driver.cuGraphNodeGetDependencies, node), _neighbours(driver.cuGraphNodeGetDependentNodes, node)
    kernel = call(driver.cuGraphAddKernelNode, graph, before, len(before), _kernel_params(fill, device_index))
    _set_priority(kernel, priority)
    if after:
        call(driver.cuGraphAddDependencies, graph, [kernel] * len(after), after, None, len(after))
    call(driver.cuGraphDestroyNode, node)
    return kernel


def _set_priority(kernel: Any, priority: int) -> None:
    from cuda.bindings import driver  # pyright: ignore[reportAttributeAccessIssue]

    value = driver.CUkernelNodeAttrValue()
    value.priority = priority
    call(driver.cuGraphKernelNodeSetAttribute, kernel, driver.CUkernelNodeAttrID.CU_LAUNCH_ATTRIBUTE_PRIORITY, value)


def _neighbours(query: Any, node: Any) -> list[Any]:
    """What ``node`` waits for, or what waits for it; a memset has plain edges only."""
    num_edges = call(query, node)[-1]
    return list(call(query, node, num_edges)[0][:num_edges]) if num_edges else []


def _kernel_params(fill: Fill, device_index: int) -> Any:
    from cuda.bindings import driver  # pyright: ignore[reportAttributeAccessIssue]

    num_blocks, num_threads, args = fill_launch(fill)
    params = driver.CUDA_KERNEL_NODE_PARAMS()
    params.func = device.function(device_index, FILL_KERNEL)
    params.gridDimX, params.gridDimY, params.gridDimZ = num_blocks, 1, 1
    params.blockDimX, params.blockDimY, params.blockDimZ = num_threads, 1, 1
    params.kernelParams = args, (ctypes.c_longlong,) * len(args)
    return params
