"""FP8 weights of captured steps: the few launches that make all of them, and how long they live.

An eager step quantizes a weight where its linear first needs it. A captured step can make them all where its region opens,
if that gives the same bits: the weight and its scale are the same then, and amaxes merge by max. Which weights that holds
for is learnt from the last warmup step, which the captured one repeats: those that were quantized once, by a training
forward, from what they held when the region opened. A weight that no forward uses must not get an amax, so a captured step
that does not use all of them is refused. Others are quantized where they are needed, as in an eager step.

The first weights are made before the forward, the others beside it ([Note: branch]), in the order of first use and in
chunks that grow: a forward waits once for each chunk, when it comes to the first weight of it.

They are allocated in the graph's pool where the region opens. Of each the copy that the forward multiplies with goes back to
the pool after its last forward of the step (how many there are the step before tells, also to a warmup step), the transposed one,
where the recipe keeps it, after the backward: later activations and gradients take their place.

An edit through ``weight.data`` inside a step, before its forward, moves no version and is not seen; one between steps is
honoured, as every replay quantizes anew.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from graphrt import kernels
from graphrt.capture.branch import Branch, Mark, growing_chunks
from graphrt.capture.record_mode import uncompared
from graphrt.errors import CaptureError
from graphrt.kernels import QuantizedTensor, QuantizeEntry, QuantizeTable, QuantizeTo
from graphrt.linear import Float8Linear, WeightKey
from graphrt.ranges import QUANTIZE_WEIGHTS
from graphrt.region import RegionRecord

__all__ = ["StepWeights"]

#: Elements that are made before the forward. So many keep the memory of a large GPU busy for about two microseconds; a model
#: with fewer has one launch, and none beside the forward.
_FIRST_ELEMENTS = 1 << 20


class _WeightUses:
    """What the step under way does with one linear's FP8 weight."""

    def __init__(self, key: WeightKey | None, num_expected: int, written: "list[_WeightUses]", is_on_gpu: bool) -> None:
        """The step's region opens.

        Args:
            key: of a training forward of the weight as it is now, None if it cannot be told.
            num_expected: uses in the last warmup step; 0 if there was none.
            written: gets every weight of the step when a forward first quantizes it.
        """
        self.key, self.num_expected, self.written, self.is_on_gpu = key, num_expected, written, is_on_gpu
        self.num_writes, self.num_reads, self.is_predictable = 0, 0, False
        self.mark: Mark | None = None  # where the branch has made it
        self.stream: torch.cuda.Stream | None = None  # that its memory belongs to
        self.kept: QuantizedTensor | None = None  # to the end of the step

    @property
    def num_uses(self) -> int:
        """Forwards so far."""
        return self.num_writes + self.num_reads

    @property
    def is_last_use(self) -> bool:
        """Whether the forward under way is the last that the warmup step before had."""
        return self.num_uses == self.num_expected

    @property
    def is_on_its_stream(self) -> bool:
        """Whether what the current stream gets is ordered with what else its memory will be used for."""
        return self.stream is None or torch.cuda.current_stream() == self.stream

    def writing(self, key: WeightKey, is_recording: bool) -> AbstractContextManager[None]:
        """A forward quantizes; a captured step may do this elsewhere, so the comparison of steps leaves it out."""
        self.is_predictable = self.num_writes == 0 and is_recording and key == self.key
        if self.num_writes == 0:
            self.written.append(self)
        self.num_writes += 1
        self.stream = torch.cuda.current_stream() if self.is_on_gpu else None
        return uncompared()

    def note_read(self, quantized: QuantizedTensor) -> None:
        """A forward uses what is there, from here on."""
        if self.mark is not None:
            self.mark.join()
        self.num_reads += 1
        if not self.is_on_its_stream:
            # A stream of the user's: freed when the host is done with it, the memory would go to others before the device is.
            self.kept = quantized


@dataclass(frozen=True, eq=False)
class _Chunk:
    """Weights that one launch makes. A graph that was captured with it reads the table at every replay."""

    linears: list[Float8Linear]
    table: QuantizeTable


class StepWeights:
    """The FP8 weights of the step of one batch shape.

    Args:
        model: what is trained.
        branch: beside the capture stream; one that cannot fork has all weights made before the forward.
    """

    def __init__(self, model: nn.Module, branch: Branch) -> None:
        self._model = model
        self._branch = branch
        self._uses: dict[Float8Linear, _WeightUses] = {}  # of the step under way, or of the last one
        self._num_uses: dict[Float8Linear, int] = {}  # of the last warmup step
        self._written: list[_WeightUses] = []
        self._learnt: list[Float8Linear] = []  # in the order of first use
        self._chunks: list[_Chunk] = []  # of the captured step
        self._is_batching = False

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Surrounds one step."""
        self._uses = {}
        linears = [module for module in self._model.modules() if isinstance(module, Float8Linear)]
        try:
            yield
        finally:
            for linear in linears:
                linear.weight_watch = None
            for uses in self._uses.values():
                uses.kept = None

    def open_record(self, record: RegionRecord) -> None:
        """The step's region opens: note what the weights are now, and make those that `batched` says."""
        self._written = []
        for linear in (module for module in self._model.modules() if isinstance(module, Float8Linear)):
            is_on_gpu = linear.quantization_state.device.type == "cuda"  # a parametrized weight is computed at each access
            uses = _WeightUses(_training_key(linear, record), self._num_uses.get(linear, 0), self._written, is_on_gpu)
            self._uses[linear] = linear.weight_watch = uses
        if not (self._is_batching and self._chunks and record.has_gradients):
            return
        with QUANTIZE_WEIGHTS, uncompared():
            self._make_all(self._chunks)

    def _make_all(self, chunks: list[_Chunk]) -> None:
        # All before the fork: nothing is allocated beside.
        stream = torch.cuda.current_stream() if chunks[0].table.device.type == "cuda" else None
        first, *others = [(chunk, [_allocate(linear) for linear in chunk.linears]) for chunk in chunks]
        self._make(*first, stream)
        if others:
            with self._branch.beside():
                for chunk, outs in others:
                    self._make(chunk, outs, stream)

    def _make(self, chunk: _Chunk, outs: list[QuantizedTensor], stream: torch.cuda.Stream | None) -> None:
        """Issue one launch, and let the forwards find what it makes."""
        chunk.table.hold(outs)
        kernels.quantize_many(chunk.table)
        chunk.table.release()
        mark = self._branch.mark()
        for linear, out in zip(chunk.linears, outs, strict=True):
            uses, weight = self._uses[linear], _parameter(linear)
            assert uses.key is not None
            assert weight is not None
            uses.mark, uses.stream = mark, stream
            linear.take_weight(weight, uses.key, out, is_recorded=True)

    def close_record(self) -> None:
        """The step's region closes: the scale update that follows reads the amaxes of all weights, used or not."""
        for uses in self._uses.values():
            if uses.mark is not None:
                uses.mark.join()

    def learn(self) -> None:
        """Take in what the warmup step just run did, for those after it and the one to be captured."""
        self._num_uses = {linear: uses.num_uses for linear, uses in self._uses.items()}
        linears = {uses: linear for linear, uses in self._uses.items()}
        self._learnt = [linears[uses] for uses in self._written if uses.is_predictable and uses.num_writes == 1]

    @contextmanager
    def batched(self) -> Iterator[None]:
        """Steps inside the block make the weights that `learn` found all at once. Enter it before a capture: it allocates the
        tables outside the pool; they are written when it ends."""
        linears = [linear for linear in self._learnt if _can_batch(linear)]
        self._chunks = [_Chunk(part, QuantizeTable([_entry(linear) for linear in part])) for part in self._divide(linears)]
        self._is_batching = True
        try:
            yield
            for chunk in self._chunks:
                chunk.table.write()
        except BaseException:
            self.drop_tables()
            raise
        finally:
            self._is_batching = False

    @contextmanager
    def one_by_one(self) -> Iterator[None]:
        """Inside the block weights are quantized where they are needed: the tables of `batched` are not written yet."""
        was_batching, self._is_batching = self._is_batching, False
        try:
            yield
        finally:
            self._is_batching = was_batching

    def _divide(self, linears: list[Float8Linear]) -> list[list[Float8Linear]]:
        """What each launch makes."""
        if not self._branch.can_fork:
            return [linears] if linears else []
        chunks = growing_chunks([linear.weight.numel() for linear in linears], _FIRST_ELEMENTS)
        return [linears[chunk.start : chunk.stop] for chunk in chunks]

    def check(self) -> None:
        """Raise CaptureError if the captured step did otherwise than the last warmup step with a weight made at its opening."""
        for linear in (linear for chunk in self._chunks for linear in chunk.linears):
            uses = self._uses[linear]
            if uses.num_writes or not uses.is_last_use:
                name = next((name for name, module in self._model.named_modules() if module is linear), "")
                what = f"used {uses.num_reads} times" if uses.num_reads else "not used"
                raise CaptureError(
                    f"{name}.weight was used {uses.num_expected} times in the last warmup step, and "
                    f"{'changed or used once more' if uses.num_writes else what} in the captured step. "
                    "Make every step use the same layers, and edit parameters between steps."
                )

    def drop_tables(self) -> None:
        """Free what the launches read. No graph captured with them may be replayed any more."""
        self._chunks = []

    def close(self) -> None:
        """Let go of the weights."""
        self.drop_tables()
        self._uses, self._num_uses, self._written, self._learnt = {}, {}, [], []


def _training_key(linear: Float8Linear, record: RegionRecord) -> WeightKey | None:
    """The key under which a training forward looks the weight up; None for a weight that is computed anew at each access."""
    weight = _parameter(linear)
    return None if weight is None else WeightKey(record.serial, weight._version, weight.data_ptr(), _keeps_transpose(linear))


def _parameter(linear: Float8Linear) -> Tensor | None:
    return linear._parameters.get("weight")


def _can_batch(linear: Float8Linear) -> bool:
    weight = _parameter(linear)
    is_plain = weight is not None and weight.is_contiguous() and weight.numel() > 0
    # Counted casts go one by one.
    return is_plain and not linear.quantization_state.is_counting_saturation


def _allocate(linear: Float8Linear) -> QuantizedTensor:
    dtype = linear.quantization_state.recipe.fp8_format.forward_dtype
    return kernels.allocate(linear.weight.detach(), dtype, _keeps_transpose(linear))


def _keeps_transpose(linear: Float8Linear) -> bool:
    return linear.quantization_state.recipe.keep_weight_transpose


def _entry(linear: Float8Linear) -> QuantizeEntry:
    state = linear.quantization_state
    scales, dtype = state.scales, state.recipe.fp8_format.forward_dtype
    with torch.no_grad():
        to = QuantizeTo(scales.scale, scales.scale_inv, linear.slots.weight, dtype, state.staging_row, _keeps_transpose(linear))
        return QuantizeEntry(linear.weight.detach(), to)
