"""The captured runner: warm up, capture, replay.

One method, three branches in order. The first calls with a batch of some shape are warmup steps, real steps run eagerly on
the capture stream; the next one captures the step body and replays it; every later one copies its batch into the static
inputs and replays. Without a GPU the recorder takes the place of the CUDA graph, under the same rules.
"""

import enum
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from graphrt import batch as batches
from graphrt import kernels
from graphrt.aside import asides
from graphrt.capture.attribution import attributing
from graphrt.capture.branch import Branch
from graphrt.capture.cuda_graph import CaptureCounter, CapturedGraph, GraphPool, branch_stream, capture, capture_stream
from graphrt.capture.cuda_rng import RngTrace, observed_rng
from graphrt.capture.fingerprint import Fingerprint, Settings
from graphrt.capture.inputs import StaticInputs, signature
from graphrt.capture.nodes import NodeMap, NodeObserver, raw_operations
from graphrt.capture.recorder import Recording, compare, record
from graphrt.capture.region import CapturedRegion
from graphrt.capture.results import StaticResults
from graphrt.capture.weights import StepWeights
from graphrt.errors import CaptureError
from graphrt.kernels.gemm_choice import choices
from graphrt.ranges import CAPTURE, COPY_INPUTS, REPLAY, RESULTS, WARMUP
from graphrt.snapshot import OptimizerSnapshot
from graphrt.step import StepBody, StepResult

__all__ = ["CaptureStats", "CapturedRunner", "Phase", "StepGraph"]


class Phase(enum.Enum):
    """Where a batch shape is on its way to a graph."""

    WARMUP = enum.auto()  # the next step runs eagerly, for real
    CAPTURE = enum.auto()  # the next step is captured, then replayed
    REPLAY = enum.auto()  # captured


@dataclass
class CaptureStats:
    """Facts about the captures so far."""

    num_graphs: int = 0
    capture_s: float = 0.0
    num_nodes_by_kind: dict[str, int] = field(default_factory=dict)
    pool_bytes_before: int = 0
    pool_bytes_after: int = 0
    estimated_pool_bytes: int = 0
    num_eager_fallbacks: int = 0


class _Replayable(Protocol):
    def replay(self) -> None: ...
    def close(self) -> None: ...


class StepGraph:
    """The step of one batch shape: its static inputs and results, its warmup, its graph."""

    def __init__(self, runner: "CapturedRunner", batch: Any) -> None:
        self.runner = runner
        self.inputs = StaticInputs(batch, runner.device)
        self.microbatches = batches.split(self.inputs.batch, runner.num_microbatches)
        self.weights = StepWeights(runner.body.model, runner.branch)
        self.num_warmups = 0
        self.made_gradients = False  # in the last warmup step
        self.peak_bytes = 0  # beyond what was allocated before it, of the last warmup step in which no GEMM was timed
        self.results: StaticResults | None = None
        self.observation: Recording | None = None
        self.rng_trace = RngTrace()
        self.graph: _Replayable | None = None
        self.node_map: NodeMap | None = None  # of the graph
        self.settings: Settings | None = None  # of the last warmup step, until the capture

    @property
    def phase(self) -> Phase:
        """What the next step of this shape is."""
        if self.graph is not None:
            return Phase.REPLAY
        # If another shape was captured meanwhile, its gradients stay: one more warmup step, to compare the capture with.
        is_warm = self.num_warmups >= self.runner.num_warmup_steps and self.made_gradients == self.runner.makes_gradients
        return Phase.CAPTURE if is_warm else Phase.WARMUP

    @property
    def is_checked_afterwards(self) -> bool:
        """Whether the next step can still be refused after its optimizer has run: one that is watched, and executes."""
        if self.phase is Phase.CAPTURE:
            return not self.runner.is_cuda
        return self.phase is Phase.WARMUP and self.is_last_warmup and self.runner.can_observe

    @property
    def is_last_warmup(self) -> bool:
        """Whether the next warmup step is the one that the captured step is compared with."""
        return self.num_warmups + 1 >= self.runner.num_warmup_steps

    def warm_up(self, batch: Any) -> StepResult:
        """One real step, eagerly, on the capture stream; the last one is observed operation by operation."""
        self.copy_inputs(batch)
        gradients = self.runner.body.gradients
        num_gradients = len(gradients.names)
        self.made_gradients = self.runner.makes_gradients
        self.runner.release_gradients()
        with WARMUP, self.runner.refusing_new_gradients(), self.runner.on_capture_stream(), self.measuring_peak():
            result = self._observe() if self.is_last_warmup and self.runner.can_observe else self.run_captured()
        self.weights.learn()
        if self.is_last_warmup:
            if self.num_warmups and len(gradients.names) != num_gradients:
                # A step that brings a first gradient zeroes others than those after it: it is no model for the capture.
                return result
            self.settings = Settings(self.runner.body)
        self.num_warmups += 1
        return result

    @contextmanager
    def measuring_peak(self) -> Iterator[None]:
        """Take the memory that the step needs beyond what is allocated, for the estimate before the capture."""
        if not self.runner.is_cuda:
            yield
            return
        device = self.runner.device
        torch.cuda.reset_peak_memory_stats(device)
        before, num_timed = torch.cuda.memory_allocated(device), choices.num_timed
        yield
        if choices.num_timed == num_timed:  # else the peak may be a timing's
            self.peak_bytes = torch.cuda.max_memory_allocated(device) - before

    def _observe(self) -> StepResult:
        with self.runner.observed_rng() as self.rng_trace:
            self.observation, result = record(
                self.run_captured, device_type=self.runner.device.type, on_module=self.runner.body.model, keep_outputs=False
            )
        return result

    def run_captured(self) -> StepResult:
        """Issue the step on the static inputs, and leave its results where replays leave them."""
        region = CapturedRegion(self.weights.open_record, self.weights.close_record)
        with self.weights.attached():
            return self.runner.body.run(self.microbatches, region, self._publish)

    def _publish(self, result: StepResult) -> None:
        if self.results is None:  # in the first warmup step, which forks nothing
            self.results = StaticResults(result)
        self.results.write(result)

    def run_observed(self, observer: NodeObserver) -> Recording | None:
        """As `run_captured`, watched if the last warmup step was."""
        if self.observation is None:
            self.run_captured()
            return None
        return self._record(observer=observer)

    def watch(self, batch: Any) -> Recording:
        """One step, executed and recorded, whatever a graph would refuse in it."""
        self.copy_inputs(batch)
        with self.runner.on_capture_stream():
            return self._record(is_collecting=True)

    def _record(self, *, is_collecting: bool = False, observer: NodeObserver | None = None) -> Recording:
        return record(
            self.run_captured,
            device_type=self.runner.device.type,
            on_module=self.runner.body.model,
            keep_outputs=False,
            is_collecting=is_collecting,
            observe=None if observer is None else lambda _: nullcontext(observer),
        )[0]

    def diagnose(self) -> CaptureError | None:
        """What the step holds that a graph cannot: the same step again, executed and watched. None if nothing is found."""
        optimizer = self.runner.body.optimizer.optimizer
        before = OptimizerSnapshot.take(optimizer, with_values=True)
        try:
            with self.runner.on_capture_stream(), self.weights.one_by_one():
                self._record()
        except CaptureError as error:
            return error
        except Exception:
            # The capture's own error says more than one of a second attempt.
            return None
        finally:
            before.restore(optimizer)
        return None

    def copy_inputs(self, batch: Any) -> None:
        """Copy a batch in, on the current stream, and the last result out if it is still needed."""
        with COPY_INPUTS:
            if self.results is None:
                self.inputs.copy_from(batch)
            else:
                copy = self.results.begin_keeping()
                self.inputs.copy_from(batch, () if copy is None else (copy,))
                self.results.end_keeping()
            self.inputs.note_copied()

    def replay(self, batch: Any) -> StepResult:
        """One step: copy the batch in, replay, copy the results out."""
        self.copy_inputs(batch)
        return self.launch()

    def launch(self) -> StepResult:
        """Replay what the static inputs hold, copy the results out."""
        assert self.graph is not None
        assert self.results is not None
        with REPLAY:
            self.graph.replay()
        with RESULTS:
            return self.results.read()

    def drop_graph(self) -> None:
        """Free a graph that must not be replayed."""
        if self.graph is not None:
            self.graph.close()
            self.graph = None
        self.weights.drop_tables()

    def close(self) -> None:
        """Free the graph and everything it wrote to."""
        self.drop_graph()
        if self.observation is not None:
            self.observation.close()
        self.weights.close()
        self.observation = self.results = self.node_map = None


class CapturedRunner:
    """Steps of a trainer, captured: one `StepGraph` a batch shape, one pool, one capture stream.

    Args:
        body: the step.
        num_microbatches: parts a batch is split into.
        num_warmup_steps: real eager steps before a capture.
        max_graphs: batch shapes that get a graph.
        has_own_gradients: the first graph makes the ``.grad`` tensors that the step overwrites, in the pool, from memory
            that activations have left; they stay for later graphs. Else it writes to those that are there.
        has_branch: whether weights and small work run beside the rest ([Note: branch]); without, a graph is one chain.
    """

    def __init__(
        self,
        body: StepBody,
        device: torch.device,
        *,
        num_microbatches: int,
        num_warmup_steps: int,
        max_graphs: int,
        has_own_gradients: bool = False,
        has_branch: bool = True,
    ) -> None:
        self.body, self.device = body, device
        self.num_microbatches, self.num_warmup_steps, self.max_graphs = num_microbatches, num_warmup_steps, max_graphs
        self._has_own_gradients = has_own_gradients
        self.stats = CaptureStats()
        self.is_cuda = device.type == "cuda"
        self._stream = capture_stream(device) if self.is_cuda else None
        self.branch = self._make_branch() if has_branch else Branch()
        self._pool: GraphPool | None = None
        self._graphs: dict[Any, StepGraph] = {}
        self.latest: StepGraph | None = None  # of the last batch that a step was taken with
        self._fingerprint: Fingerprint | None = None

    def _make_branch(self) -> Branch:
        if self._stream is None:
            return Branch()
        return Branch((self._stream, branch_stream(self.device)), CaptureCounter(self._stream))

    # -- choosing

    def select(self, batch: Any) -> StepGraph | None:
        """The graph of this batch's shape, a new one if there is room; None beyond ``max_graphs``.

        Raises:
            StaticInputError: ``max_graphs`` is 1 and the batch differs from the captured one.
        """
        try:
            key = signature(batch)
            graph = self._graphs.get(key)
        except TypeError:
            list(batches.leaves(batch))
            raise
        if graph is None and len(self._graphs) >= self.max_graphs:
            if self.max_graphs == 1:
                next(iter(self._graphs.values())).inputs.check(batch)
            return None
        if graph is None:
            graph = self._graphs[key] = StepGraph(self, batch)
        return graph

    def find(self, batch: Any) -> StepGraph | None:
        """The graph of this batch's shape if there is one."""
        return self._graphs.get(signature(batch))

    def check(self) -> None:
        """Raise CaptureError unless everything the graphs hold is where and what it was; put back a ``.grad`` set to None."""
        if self._fingerprint is not None:
            self._fingerprint.check()

    @property
    def has_optimizer(self) -> bool:
        """Whether the optimizer is in the graphs, if there are any. After `check` it is as true as at the capture."""
        return self._fingerprint is not None and self._fingerprint.has_optimizer

    def drop_unused(self) -> None:
        """Forget shapes that have not completed a step: their first one failed."""
        for key in [key for key, graph in self._graphs.items() if graph.num_warmups == 0]:
            del self._graphs[key]

    def drop_unfinished(self) -> None:
        """Forget shapes on their way to a graph, whose warmup found gradients and optimizer state that are no longer there."""
        for key in [key for key, graph in self._graphs.items() if graph.graph is None]:
            self._graphs.pop(key).close()

    @property
    def is_captured(self) -> bool:
        """Whether any graph exists."""
        return self._fingerprint is not None

    # -- running

    def step(self, graph: StepGraph, batch: Any) -> StepResult:
        """One step of ``graph``: warm up, or capture and replay, or replay."""
        result = self._step(graph, batch)
        self.latest = graph
        return result

    def _step(self, graph: StepGraph, batch: Any) -> StepResult:
        if graph.phase is Phase.WARMUP:
            return graph.warm_up(batch)
        if graph.phase is Phase.CAPTURE:
            graph.copy_inputs(batch)
            return self._capture(graph)
        result = graph.replay(batch)
        self._note_replay()
        return result

    def _note_replay(self) -> None:
        for state in self.body.states:
            state.note_replay()

    def _capture(self, graph: StepGraph) -> StepResult:
        start = time.perf_counter()
        if graph.settings is not None:
            graph.settings.check()
        self.release_gradients()
        try:
            with self.body.optimizer.tables.capturing():
                self._make_graph(graph)
        except BaseException:
            graph.drop_graph()
            self.release_gradients()
            raise
        self._fingerprint = Fingerprint(self.body)
        graph.settings = None  # It has served, and would keep alive what the user replaces from now on.
        self.stats.num_graphs += 1
        self.stats.capture_s += time.perf_counter() - start
        self._note_replay()
        if self.is_cuda:
            # A capture executes nothing, so the step it stands for is this replay.
            return graph.launch()
        assert graph.results is not None
        return graph.results.read()

    def _make_graph(self, graph: StepGraph) -> None:
        capture_on = self._capture_cuda if self.is_cuda else self._capture_cpu
        with (
            CAPTURE,
            graph.weights.batched(),
            self.body.gradients.closed(
                f"in the step that was captured, after {self.num_warmup_steps} warmup steps without one. "
                "Raise warmup_steps, or make every step use it."
            ),
        ):
            graph.graph, observation = capture_on(graph)
        self._check_capture(graph, observation)
        graph.weights.check()

    def _capture_cuda(self, graph: StepGraph) -> tuple[_Replayable, Recording | None]:
        assert self._stream is not None
        kernels.preload(self.device)
        self._refuse_what_cannot_fit(graph)
        self.stats.pool_bytes_before = torch.cuda.memory_reserved(self.device)
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        if self._pool is None:
            self._pool = GraphPool(self._stream)
        try:
            captured, observation = self._capture_with_names(graph, self._stream, self._pool)
        except CaptureError:
            raise
        except Exception as error:
            if not _is_of_the_device(error):
                raise  # the step's own
            # The driver names no operation; the step's parameters and buffers are put back by the caller, as after any failure.
            found = graph.diagnose()
            raise found or CaptureError(
                f"The step could not be captured: {_first_line(error)} "
                "Run it with trainer.eager(), or find the operation with graphrt.check_capture."
            ) from error
        self.stats.num_nodes_by_kind = captured.num_nodes_by_kind
        self.stats.pool_bytes_after = torch.cuda.memory_reserved(self.device)
        return captured, observation

    def _capture_with_names(self, graph: StepGraph, stream: torch.cuda.Stream, pool: GraphPool) -> tuple[CapturedGraph, Recording | None]:
        """Capture, and note which nodes belong to which module."""
        observer = NodeObserver(CaptureCounter(stream), self.branch.before_operation)

        def body() -> Recording | None:
            with (
                self.branch.open(is_watched=graph.observation is not None),
                asides(self.branch),
                attributing(self.body.model, observer.leave),
            ):
                return graph.run_observed(observer)

        with _no_compiling():
            captured, observation = capture(body, stream=stream, pool=pool.handle, rng_trace=graph.rng_trace)
        graph.node_map = observer.node_map(captured.nodes, self.branch.nodes)
        return captured, observation

    def _capture_cpu(self, graph: StepGraph) -> tuple[_Replayable, Recording | None]:
        """Record the step, which runs it for real, and note which operations belong to which module."""
        observers: list[NodeObserver] = []

        @contextmanager
        def observe(num_nodes: Callable[[], int]) -> Iterator[NodeObserver]:
            observers.append(NodeObserver(num_nodes))
            with attributing(self.body.model, observers[0].leave):
                yield observers[0]

        recording, _ = record(graph.run_captured, device_type="cpu", on_module=self.body.model, observe=observe)
        graph.node_map = observers[0].node_map(raw_operations(recording.operations))
        self.stats.num_nodes_by_kind = {"operation": recording.num_nodes}
        return recording, recording

    def _check_capture(self, graph: StepGraph, observation: Recording | None) -> None:
        """Refuse a graph that does not stand for the steps before it."""
        if graph.observation is None or observation is None:
            return
        differences = compare(graph.observation, observation)
        if differences:
            raise CaptureError(str(differences[0]))
        graph.observation.close()

    # -- surroundings

    @property
    def makes_gradients(self) -> bool:
        """Whether the next warmup step or capture makes new ``.grad`` tensors: no graph knows the ones there are."""
        return self._has_own_gradients and not self.is_captured

    def release_gradients(self) -> None:
        """Free the ``.grad`` tensors that the next step makes anew."""
        if self.makes_gradients:
            self.body.gradients.release()
            self.body.optimizer.tables.release()

    def refusing_new_gradients(self) -> AbstractContextManager[None]:
        """Once a graph exists, a warmup of another shape brings no gradient that the graph knows nothing of."""
        if not self.is_captured:
            return nullcontext()
        return self.body.gradients.closed(
            "with this batch shape, after the step of another one was captured without it. "
            "Make every shape use it, or call trainer.recapture() before the new shape."
        )

    @contextmanager
    def on_capture_stream(self) -> Iterator[None]:
        """Run on the capture stream, after what the current stream has, before what it gets."""
        if self._stream is None:
            yield
            return
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            # Also after an error: what is put back then must not be overtaken by what was enqueued before it.
            current.wait_stream(self._stream)

    @property
    def can_observe(self) -> bool:
        """Whether warmup steps may be watched operation by operation: compiled blocks would run as plain operations."""
        return not self.is_cuda or not _has_compiled_parts(self.body)

    def observed_rng(self) -> AbstractContextManager[RngTrace]:
        """Record what the step does with the device's generator."""
        return observed_rng(self.device) if self.is_cuda else nullcontext(RngTrace())

    def _refuse_what_cannot_fit(self, graph: StepGraph) -> None:
        self.stats.estimated_pool_bytes = graph.peak_bytes
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(self.device)
        if graph.peak_bytes > free:
            raise CaptureError(
                f"Capturing needs about {graph.peak_bytes / 2**30:.1f} GiB, the peak of a warmup step, "
                f"and {free / 2**30:.1f} GiB are free. "
                "Use a smaller microbatch (grad_accum_steps), activation checkpointing, or mode='eager'."
            )

    def close(self) -> None:
        """Free all graphs, static inputs, and gradients in the graphs' pool; a second call does nothing."""
        if self._has_own_gradients and self.is_captured:
            self.body.gradients.release()
            self.body.optimizer.tables.release()
        for graph in self._graphs.values():
            graph.close()
        self._graphs.clear()
        self.latest = None
        self._fingerprint = None
        if self._pool is not None:
            self._pool.close()
            self._pool = None


def _no_compiling() -> AbstractContextManager[Any]:
    """Refuse to compile inside a capture, which would capture what compiling launches."""
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    return torch.compiler.set_stance("fail_on_recompile")


def _has_compiled_parts(body: StepBody) -> bool:
    def is_compiled(thing: Any) -> bool:
        return getattr(thing, "_torchdynamo_orig_callable", None) is not None

    compiled_module = getattr(torch._dynamo, "OptimizedModule", ()) if hasattr(torch, "_dynamo") else ()
    return is_compiled(body.loss_fn) or any(
        isinstance(module, compiled_module) or module._compiled_call_impl is not None or is_compiled(module.forward)
        for module in body.model.modules()
    )


def _is_of_the_device(error: Exception) -> bool:
    """Whether an error may be how torch or the driver says that something cannot be captured."""
    return isinstance(error, RuntimeError) or type(error).__module__.startswith("cuda.")


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return (lines[0].rstrip(".") + ".") if lines else f"{type(error).__name__}."
