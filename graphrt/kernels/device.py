"""Kernels loaded on the GPU, and one launch on torch's current stream.

A launch reads the current stream, looks up the kernel and the grid's launch configuration, and calls the driver:
no allocation, no sync, nothing a CUDA graph capture refuses.
"""

import functools
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from graphrt.errors import GraphrtError
from graphrt.kernels import compiler

__all__ = ["function", "launch", "preload", "use_context"]

_MIN_CAPABILITY = (8, 9)  # the first GPUs that convert to FP8
_MIN_WAITING_CAPABILITY = (9, 0)  # the first that have programmatic dependent launch
_ENTRY_POINT = re.compile(rb"\.text\.(graphrt_\w+)")


@dataclass(frozen=True)
class _LoadedKernels:
    """What a launch on one device needs."""

    kernels: dict[str, Any]  # name -> cuda.core.Kernel
    configure: Callable[[int, int, bool], Any]  # blocks, threads, whether it may begin early -> cuda.core.LaunchConfig
    wrap_stream: Callable[[int], Any]  # cudaStream_t -> cuda.core.Stream
    launch: Callable[..., None]


_loaded: dict[int, _LoadedKernels] = {}  # device index -> kernels
_load_lock = threading.RLock()


class _ThreadState(threading.local):
    """Devices whose context this thread has made current."""

    def __init__(self) -> None:
        self.devices: set[int] = set()


_thread = _ThreadState()


def preload(device: torch.device | int | None = None) -> None:
    """Compile and load every kernel on ``device`` (the current CUDA device by default), so that no later launch does.

    Nothing is left to do on a CPU device. Call it before capturing a CUDA graph.

    Raises:
        GraphrtError: there is no CUDA device, it has no FP8 conversions, or the kernels cannot be compiled.
    """
    if isinstance(device, torch.device) and device.type != "cuda":
        return
    index = device.index if isinstance(device, torch.device) else device
    if not torch.cuda.is_available():
        raise GraphrtError("No CUDA device is available, so no kernel can be loaded. CPU tensors need none: use them as they are.")
    index = torch.cuda.current_device() if index is None else index
    if index not in _loaded:
        with _load_lock, torch.cuda.device(index):
            if index not in _loaded:
                _loaded[index] = _load(index)


def launch(index: int, name: str, num_blocks: int, num_threads: int, args: tuple[int | float, ...], begins_early: bool = True) -> None:
    """Launch the kernel ``name`` on device ``index`` and torch's current stream there.

    Args:
        index: CUDA device index.
        name: entry point in one of the sources.
        num_blocks: blocks in the grid.
        num_threads: threads in a block.
        args: 8 bytes each: addresses and integers as int, the rest as float (double in the kernel).
        begins_early: lets blocks be placed while the kernel before it on the stream ends, where the GPU can; they wait by
            themselves.

    Raises:
        GraphrtError: the kernels cannot be compiled or loaded.
    """
    loaded = _loaded.get(index)
    if loaded is None:
        preload(index)
        loaded = _loaded[index]
    if torch._C._cuda_getDevice() != index:
        with torch.cuda.device(index):
            _launch(loaded, index, name, (num_blocks, num_threads, begins_early), args)
    else:
        _launch(loaded, index, name, (num_blocks, num_threads, begins_early), args)


def function(index: int, name: str) -> Any:
    """The CUfunction of the kernel ``name`` on device ``index``: for a node of a graph.

    Raises:
        GraphrtError: the kernels cannot be compiled or loaded.
    """
    from cuda.bindings import driver  # pyright: ignore[reportAttributeAccessIssue]

    preload(index)
    return _checked(driver.cuKernelGetFunction(_loaded[index].kernels[name].handle))


def _launch(loaded: _LoadedKernels, index: int, name: str, config: tuple[int, int, bool], args: tuple[int | float, ...]) -> None:
    use_context(index)
    stream = loaded.wrap_stream(torch._C._cuda_getCurrentRawStream(index))
    loaded.launch(stream, loaded.configure(*config), loaded.kernels[name], *args)


def use_context(index: int) -> None:
    """Make the context of device ``index`` current in this thread.

    A new thread (autograd's, say) has none until a runtime call makes one current; the driver's launch does not.
    """
    if index not in _thread.devices:
        _make_context_current(index)


def _make_context_current(index: int) -> None:
    from cuda.core import Device  # pyright: ignore[reportAttributeAccessIssue]

    with _allow_under_capture():
        Device(index).set_current()
    _thread.devices.add(index)


@contextmanager
def _allow_under_capture() -> Iterator[None]:
    """Let this thread load kernels and set contexts while a stream is captured: no stream work, but refused by default."""
    from cuda.bindings import driver  # pyright: ignore[reportAttributeAccessIssue]

    mode = _checked(driver.cuThreadExchangeStreamCaptureMode(driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
    try:
        yield
    finally:
        _checked(driver.cuThreadExchangeStreamCaptureMode(mode))


def _load(index: int) -> _LoadedKernels:
    from cuda.core import LEGACY_DEFAULT_STREAM, LaunchConfig, Stream  # pyright: ignore[reportAttributeAccessIssue]
    from cuda.core import launch as cuda_launch  # pyright: ignore[reportAttributeAccessIssue]

    capability = torch.cuda.get_device_capability(index)
    if capability < _MIN_CAPABILITY:
        raise GraphrtError(
            f"Device {index} has compute capability {capability[0]}.{capability[1]}, but FP8 conversions need 8.9 or later. "
            "Use an Ada, Hopper or later GPU."
        )
    kernels = _load_kernels(index, f"sm_{capability[0]}{capability[1]}")
    # A kernel that begins early waits by itself for the ones before it: begin_kernel in common.cuh, empty for earlier GPUs.
    can_wait = capability >= _MIN_WAITING_CAPABILITY

    @functools.lru_cache(maxsize=4096)
    def configure(num_blocks: int, num_threads: int, begins_early: bool) -> LaunchConfig:
        return LaunchConfig(grid=num_blocks, block=num_threads, programmatic_stream_serialization=begins_early and can_wait)

    @functools.lru_cache(maxsize=64)
    def wrap_stream(handle: int) -> Stream:
        return Stream.from_handle(handle) if handle else LEGACY_DEFAULT_STREAM

    return _LoadedKernels(kernels, configure, wrap_stream, cuda_launch)


def _load_kernels(index: int, arch: str) -> dict[str, Any]:
    from cuda.bindings import driver  # pyright: ignore[reportAttributeAccessIssue]
    from cuda.core import ObjectCode  # pyright: ignore[reportAttributeAccessIssue]

    cubins = [compiler.load_or_compile(name, arch) for name in compiler.SOURCES]
    _make_context_current(index)
    kernels = {}
    with _allow_under_capture():
        for cubin in cubins:
            code = ObjectCode.from_cubin(cubin)
            kernels |= {name: code.get_kernel(name) for name in entry_points(cubin)}
        for kernel in kernels.values():
            function = _checked(driver.cuKernelGetFunction(kernel.handle))
            _checked(driver.cuFuncLoad(function))  # the driver otherwise loads each at its first launch
    return kernels


def entry_points(cubin: bytes) -> list[str]:
    """Names of the kernels in a cubin, read from its section names."""
    return sorted({match.decode() for match in _ENTRY_POINT.findall(cubin)})


def _checked(result: tuple[Any, ...]) -> Any:
    """The value of a driver call that returned ``(status, value)``."""
    if int(result[0]) != 0:
        raise GraphrtError(f"The CUDA driver refused to load the kernels: {result[0].name}. Check that the driver supports CUDA 13.")
    return result[1] if len(result) > 1 else None
