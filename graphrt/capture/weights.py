"""FP8 weights of captured steps: where they are, and the few launches that make all of them.

An eager step quantizes a weight where its linear first needs it. A captured step can make them all where its region opens,
if that gives the same bits: the weight and its scale are the same then, and amaxes merge by max. Which weights that holds
for is learnt from the last warmup step, which the captured one repeats: those that were quantized once, by a training
forward, from what they held when the region opened. A weight that no forward uses must not get an amax, so a captured step
that does not use all of them is refused. Others are quantized where they are needed, as in an eager step.

The first weights are made before the forward, the others beside it ([Note: branch]), in the order of first use and in
chunks that grow: a forward waits once for each chunk, when it comes to the first weight of it.

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

__all__ = ["StepWeights", "WeightStorage"]

#: Elements that are made before the forward. So many keep the memory of a large GPU busy for about two microseconds; a model
#: with fewer has one launch and no branch.
_FIRST_ELEMENTS = 1 << 20


class _StoredWeight:
    """Storage of one linear's FP8 weight outside any graph's pool, and what the step under way did with it."""

    def __init__(self, linear: Float8Linear) -> None:
        dtype = linear.quantization_state.recipe.fp8_format.forward_dtype
        self.quantized: QuantizedTensor = kernels.allocate(linear.weight.detach(), dtype, True)
        self.begin(None, [])

    def begin(self, key: WeightKey | None, written: "list[_StoredWeight]") -> None:
        """A step's region opens.

        Args:
            key: of a training forward of the weight as it is now, None if it cannot be told.
            written: gets every weight of the step when a forward first quantizes it.
        """
        self.key, self.num_writes, self.num_reads, self.is_predictable = key, 0, 0, False
        self.written = written
        self.mark: Mark | None = None  # where the branch has made it

    def storage(self) -> QuantizedTensor | None:
        """The storage, for the first write in a step; a backward may need that one when the weight is quantized again."""
        return self.quantized if self.num_writes == 0 else None

    def writing(self, key: WeightKey, is_recording: bool) -> AbstractContextManager[None]:
        """A forward quantizes; a captured step may do this elsewhere, so the comparison of steps leaves it out."""
        self.is_predictable = self.num_writes == 0 and is_recording and key == self.key
        if self.num_writes == 0:
            self.written.append(self)
        self.num_writes += 1
        return uncompared()

    def note_read(self) -> None:
        """A forward uses what is there, from here on."""
        if self.mark is not None:
            self.mark.join()
        self.num_reads += 1


class WeightStorage:
    """The FP8 weights of a model, for all graphs of a runner."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._stored: dict[Float8Linear, _StoredWeight] = {}

    @contextmanager
    def attached(self) -> Iterator[dict[Float8Linear, _StoredWeight]]:
        """Inside the block FP8 weights go to storage of their own."""
        linears = [module for module in self.model.modules() if isinstance(module, Float8Linear)]
        for linear in linears:
            if linear not in self._stored:
                self._stored[linear] = _StoredWeight(linear)
            linear.static_weight = self._stored[linear]
        try:
            yield {linear: self._stored[linear] for linear in linears}
        finally:
            for linear in linears:
                linear.static_weight = None

    def clear(self) -> None:
        """Free them."""
        self._stored.clear()


@dataclass(frozen=True, eq=False)
class _Chunk:
    """Weights that one launch makes. A graph that was captured with it reads the table at every replay."""

    linears: list[Float8Linear]
    table: QuantizeTable


class StepWeights:
    """The FP8 weights of the step of one batch shape.

    Args:
        branch: beside the capture stream; one that cannot fork has all weights made before the forward.
    """

    def __init__(self, storage: WeightStorage, branch: Branch) -> None:
        self._storage = storage
        self._branch = branch
        self._in_step: dict[Float8Linear, _StoredWeight] = {}
        self._written: list[_StoredWeight] = []
        self._learnt: list[Float8Linear] = []  # in the order of first use
        self._chunks: list[_Chunk] = []  # of the captured step
        self._is_batching = False

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Surrounds one step."""
        with self._storage.attached() as self._in_step:
            yield

    def open_record(self, record: RegionRecord) -> None:
        """The step's region opens: note what the weights are now, and make those that `batched` says."""
        self._written = []
        for linear, stored in self._in_step.items():
            stored.begin(_training_key(linear, record), self._written)
        if not (self._is_batching and self._chunks and record.has_gradients):
            return
        with QUANTIZE_WEIGHTS, uncompared():
            self._make_all(self._chunks)

    def _make_all(self, chunks: list[_Chunk]) -> None:
        first, *others = chunks
        self._make(first)
        if others:
            with self._branch.beside():
                for chunk in others:
                    self._make(chunk)

    def _make(self, chunk: _Chunk) -> None:
        """Issue one launch, and let the forwards find what it makes."""
        kernels.quantize_many(chunk.table)
        mark = self._branch.mark()
        for linear in chunk.linears:
            stored, weight = self._in_step[linear], _parameter(linear)
            assert stored.key is not None
            assert weight is not None
            stored.mark = mark
            linear.take_weight(weight, stored.key, stored.quantized, is_recorded=True)

    def close_record(self) -> None:
        """The step's region closes: the scale update that follows reads the amaxes of all weights, used or not."""
        for stored in self._in_step.values():
            if stored.mark is not None:
                stored.mark.join()

    def learn(self) -> None:
        """Take in what the step just run did, for the one to be captured."""
        linears = {stored: linear for linear, stored in self._in_step.items()}
        self._learnt = [linears[stored] for stored in self._written if stored.is_predictable and stored.num_writes == 1]

    @contextmanager
    def batched(self) -> Iterator[None]:
        """Steps inside the block make the weights that `learn` found all at once. Enter it before a capture: it copies to the device."""
        with self._storage.attached() as stored:
            linears = [linear for linear in self._learnt if linear in stored and _can_batch(linear)]
            self._chunks = [self._chunk(part, stored) for part in self._divide(linears)]
        self._is_batching = True
        try:
            yield
        except BaseException:
            self.drop_tables()
            raise
        finally:
            self._is_batching = False

    def _divide(self, linears: list[Float8Linear]) -> list[list[Float8Linear]]:
        """What each launch makes."""
        if not self._branch.can_fork:
            return [linears] if linears else []
        chunks = growing_chunks([linear.weight.numel() for linear in linears], _FIRST_ELEMENTS)
        return [linears[chunk.start : chunk.stop] for chunk in chunks]

    @staticmethod
    def _chunk(linears: list[Float8Linear], stored: dict[Float8Linear, _StoredWeight]) -> _Chunk:
        return _Chunk(linears, QuantizeTable([_entry(linear, stored[linear].quantized) for linear in linears]))

    def check(self) -> None:
        """Raise CaptureError if the captured step did otherwise than the last warmup step with a weight made at its opening."""
        for linear in (linear for chunk in self._chunks for linear in chunk.linears):
            stored = self._in_step[linear]
            if stored.num_writes or not stored.num_reads:
                name = next((name for name, module in self._storage.model.named_modules() if module is linear), "")
                raise CaptureError(
                    f"{name}.weight was used in the last warmup step, and "
                    f"{'changed inside' if stored.num_writes else 'not used in'} the captured step. "
                    "Make every step use the same layers, and edit parameters between steps."
                )

    def drop_tables(self) -> None:
        """Free what the launches read. No graph captured with them may be replayed any more."""
        self._chunks = []

    def close(self) -> None:
        """Let go of the weights."""
        self.drop_tables()
        self._in_step, self._written, self._learnt = {}, [], []


def _training_key(linear: Float8Linear, record: RegionRecord) -> WeightKey | None:
    """The key under which a training forward looks the weight up; None for a weight that is computed anew at each access."""
    weight = _parameter(linear)
    return None if weight is None else WeightKey(record.serial, weight._version, weight.data_ptr(), True)


def _parameter(linear: Float8Linear) -> Tensor | None:
    return linear._parameters.get("weight")


def _can_batch(linear: Float8Linear) -> bool:
    weight = _parameter(linear)
    is_plain = weight is not None and weight.is_contiguous() and weight.numel() > 0
    # Counted casts go one by one.
    return is_plain and not linear.quantization_state.is_counting_saturation


def _entry(linear: Float8Linear, out: QuantizedTensor) -> QuantizeEntry:
    state = linear.quantization_state
    scales, dtype = state.scales, state.recipe.fp8_format.forward_dtype
    with torch.no_grad():
        to = QuantizeTo(scales.scale, scales.scale_inv, linear.slots.weight, dtype, state.staging_row, True)
        return QuantizeEntry(linear.weight.detach(), to, out)
