"""The recorder: what a captured CUDA graph is on a GPU, on a machine without one.

`record` runs a step body once, for real (a CUDA capture executes nothing; the caller puts back what the step changed), and
keeps its aten operations. `Recording.replay` runs them again on the same storages under a CUDA graph's rules: no Python of
the step's, static addresses, in-place operations in place, dropout drawn anew from the default generator, and the
generator rewinds of activation checkpointing relative to the replay's own draws. What a graph cannot hold is refused with
the operation and the user's file and line. `compare` holds two steps side by side, to find Python state by its effects.

Every intermediate lives as long as the recording, so that addresses are static: a recording takes the memory of a step in
which nothing is freed. `record(..., keep_outputs=False)` keeps none of them, for steps that are only compared.

What the recorder cannot see:
- Python objects the step changes (counters, lists, dicts): only through operations that differ between two compared steps.
- Time, files, environment, network: as Python state, and nothing at all when two steps happen to agree.
- What a custom operator or a C extension does inside; it is replayed as one operation. Extensions that bypass the
  dispatcher, writes through `data_ptr()`, DLPack or a NumPy array that shares memory: not recorded.
- Other threads, a backward started in one included; on CUDA the engine's own threads are seen.
- `numpy.random.default_rng()` and `random.Random()` objects; a `torch.Generator` of the user's is drawn from, but its
  `manual_seed`, `get_state` and `set_state` are not seen, nor are those of `torch.default_generator` called directly.
- Streams and events, the memory pool, and kernels that read the host inside on CUDA but not on a CPU. On the CPU
  `t.to("cpu")` moves nothing and is not seen, while `t.cpu()` is refused.
- Some CPU kernels check values on the host where CUDA kernels do not: such an operation is refused although a GPU could
  capture it. `torch.nn.functional.one_hot` with a number of classes is known and handled.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from graphrt.capture.hazards import refusing_calls
from graphrt.capture.record_compare import Difference, compare_operations
from graphrt.capture.record_mode import Call, OperationObserver, RecordMode
from graphrt.capture.record_modules import module_names
from graphrt.capture.record_nodes import OpNode, TensorSpec
from graphrt.capture.record_rng import recorded_rng
from graphrt.errors import CaptureError

__all__ = ["Difference", "OpNode", "Recording", "TensorSpec", "compare", "record"]

T = TypeVar("T")
_recording = threading.Lock()


class Recording:
    """The operations of one step, and the storages they work on. Made by `record`.

    outputs: what the body returned; each replay writes into its tensors.
    refusals: what a graph cannot hold, in order of issue; only a collecting recording has any, and it cannot be replayed.
    """

    def __init__(
        self,
        operations: Sequence[OpNode],
        calls: Sequence[Call] | None,
        outputs: Any,
        device_type: str,
        refusals: Sequence[CaptureError] = (),
    ) -> None:
        self.refusals: tuple[CaptureError, ...] = tuple(refusals)
        self.operations: tuple[OpNode, ...] = tuple(operations)
        self.outputs: Any = outputs
        self._calls = None if calls is None else tuple(calls)
        self._device_type = device_type
        self._is_closed = False
        self._times_ns: list[tuple[int, int]] | None = None

    @property
    def nodes(self) -> tuple[OpNode, ...]:
        """The operations a replay runs: all but views, metadata changes and uninitialised factories."""
        return tuple(node for node in self.operations if node.is_replayed)

    @property
    def num_nodes(self) -> int:
        return len(self.nodes)

    def replay(self) -> None:
        """Run the step again on the storages of the recording. Like a CUDA graph it leaves `Tensor._version` as it is.

        Raises CaptureError after `close()`, for a recording without outputs, and for one made on another device than the CPU.
        """
        if self._is_closed:
            raise CaptureError("This recording is closed. Record the step again.")
        if self._calls is None:
            raise CaptureError("This recording kept no outputs, so it can only be compared. Record with keep_outputs=True.")
        if self._device_type != "cpu":
            raise CaptureError(f"This recording of {self._device_type} operations is a diagnosis. Capture a CUDA graph to replay.")
        # Recorded below autograd and autocast, so replayed without either, whatever the caller has switched on.
        with torch.inference_mode(), torch.autocast("cpu", enabled=False):
            if self._times_ns is None:
                for call in self._calls:
                    call.run()
            else:
                self._run_timed(self._calls, self._times_ns)

    @staticmethod
    def _run_timed(calls: Sequence[Call], times_ns: list[tuple[int, int]]) -> None:
        with _disable_current_modes():
            for call in calls:
                start = time.perf_counter_ns()
                call.run()
                times_ns.append((start, time.perf_counter_ns()))

    @contextmanager
    def timing(self) -> Iterator[list[tuple[int, int]]]:
        """Replays inside the block append to the list yielded, for each node, when it began and ended (`perf_counter_ns`)."""
        self._times_ns = []
        try:
            yield self._times_ns
        finally:
            self._times_ns = None

    def close(self) -> None:
        """Drop operations, intermediates and outputs. Closing twice does nothing."""
        self.operations, self.outputs, self._calls = (), None, None
        self._is_closed = True


class CollectionEnded(Exception):
    """A step raised while what a graph cannot hold in it was collected.

    Attributes:
        error: what it raised.
        refusals: what was collected before.
    """

    def __init__(self, error: Exception, refusals: Sequence[CaptureError]) -> None:
        super().__init__(f"The step raised {type(error).__name__} before its end.")
        self.error, self.refusals = error, tuple(refusals)


def record(
    body: Callable[[], T],
    *,
    device_type: str = "cpu",
    on_module: nn.Module | None = None,
    keep_outputs: bool = True,
    is_collecting: bool = False,
    observe: Callable[[Callable[[], int]], AbstractContextManager[OperationObserver]] | None = None,
) -> tuple[Recording, T]:
    """Run `body` once and record its operations; returns the recording and what `body` returned.

    device_type: the device whose work is recorded; operations on other devices run but are no part of the step.
    on_module: a root module, so that each node carries the name of the submodule that issued it.
    keep_outputs: False keeps no tensors alive; such a recording can be compared but not replayed.
    observe: called with a function that counts the nodes so far; what it yields hears of every operation.
    is_collecting: go on after what a graph cannot hold, and keep it in `Recording.refusals`; for comparing only.

    Raises CaptureError for what a CUDA graph cannot hold, also where `body` swallowed the error. Exceptions of `body` pass
    through, while collecting inside a `CollectionEnded`. Modes and replaced functions are put back in every case; what the
    body did to tensors is the caller's to undo.
    """
    if not _recording.acquire(blocking=False):
        raise CaptureError("A recording is under way in this process. Record one step at a time.")
    try:
        mode = RecordMode(device_type, keep_outputs and not is_collecting, is_collecting)
        outputs = _run(body, mode, on_module, observe)
    finally:
        _recording.release()
    kept = (mode.calls, outputs) if keep_outputs and not is_collecting else (None, None)
    return Recording(mode.operations, *kept, device_type, mode.refusals), outputs


def compare(first: Recording, second: Recording) -> list[Difference]:
    """What two steps of one body did differently, in order of issue; empty when a graph of one stands for both.

    kind "value": a Python scalar or host constant; "shape": a shape or dtype; "operation": another operation;
    "rebound": a tensor from before the step, read at another address. Each names the operation and the line.
    """
    return compare_operations(first.operations, second.operations)


def _run(
    body: Callable[[], T],
    mode: RecordMode,
    on_module: nn.Module | None,
    observe: Callable[[Callable[[], int]], AbstractContextManager[OperationObserver]] | None,
) -> T:
    with ExitStack() as stack:
        mode.current_module = stack.enter_context(module_names(on_module))
        stack.enter_context(_raising_refusal(mode))
        stack.enter_context(refusing_calls(mode))
        stack.enter_context(recorded_rng(mode))
        # A compiled block runs as the operations it was compiled from, in every step of a run alike.
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        if observe is not None:
            mode.observer = stack.enter_context(observe(lambda: mode.num_replayed))
        stack.enter_context(mode)
        return body()


@contextmanager
def _raising_refusal(mode: RecordMode) -> Iterator[None]:
    """Raise the first refusal even where the body swallowed it, or failed with something else because of it."""
    try:
        yield
    except Exception as error:
        if mode.is_collecting:
            raise CollectionEnded(error, mode.refusals) from error
        if not mode.refusals or error is mode.refusals[0]:
            raise
        raise mode.refusals[0] from error
    if mode.refusals and not mode.is_collecting:
        raise mode.refusals[0]
