"""Static results: where a graph leaves what the step returns, and what the caller gets of it.

What a step returns is the caller's, and the next replay writes where it lies. It is copied when somebody looks at it, or else
together with the next step's inputs, before the replay: a launch of its own would cost a step as much as its other checks.
"""

import threading
import weakref
from typing import Any

import torch
from torch import Tensor

from graphrt.kernels.copy import Copy
from graphrt.step import StepResult

__all__ = ["StaticResults"]

_ALIGNMENT = 16

#: There are places for so many copies of a step's results, each used again in turn, if they are not larger than this.
_NUM_PLACES, _MAX_PLACE_BYTES = 32, 4096


class StaticResults:
    """One buffer outside the graph's pool that holds all results of a step, so that a copy of it is one range of bytes.

    Args:
        example: results of a warmup step, for names, shapes and dtypes.
    """

    def __init__(self, example: StepResult) -> None:
        flat = _flat(example)
        self._metrics = list(example.metrics)
        # fp32 scalars first, side by side: one unbind makes them all.
        self._scalars = [name for name, value in flat.items() if value.dtype is torch.float32 and value.dim() == 0]
        self._layout: list[tuple[str, int, int, torch.dtype, torch.Size]] = []
        offset = -(-4 * len(self._scalars) // _ALIGNMENT) * _ALIGNMENT
        for name, value in flat.items():
            if name not in self._scalars:
                num_bytes = value.numel() * value.element_size()
                self._layout.append((name, offset, num_bytes, value.dtype, value.shape))
                offset += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        self._buffer = torch.zeros(max(offset, _ALIGNMENT), dtype=torch.uint8, device=example.loss.device)
        self._views = self._split(self._buffer)
        self._places = self._make_places()
        self._copies = [Copy(place.data_ptr(), self._buffer.data_ptr(), self._buffer.nbytes) for place in self._places]
        self._owners: list[weakref.ref[StepResult] | None] = [None] * len(self._places)
        self._num_kept = 0
        self._latest: weakref.ref[StepResult] | None = None  # while the buffer is what it holds
        self._kept: Tensor | None = None  # where that will be
        self._stream = _current_stream(self._buffer)  # that wrote last: the buffer, or places
        self._readers: list[Any] = []  # events of other streams that read the buffer or places

    def _make_places(self) -> list[Tensor]:
        num_bytes = self._buffer.nbytes
        return list(self._buffer.new_empty(_NUM_PLACES, num_bytes).unbind()) if num_bytes <= _MAX_PLACE_BYTES else []

    def _split(self, buffer: Tensor) -> dict[str, Tensor]:
        scalars = buffer[: 4 * len(self._scalars)].view(torch.float32).unbind()
        others = {name: buffer[at : at + size].view(dtype).view(shape) for name, at, size, dtype, shape in self._layout}
        return {**dict(zip(self._scalars, scalars, strict=True)), **others}

    def write(self, result: StepResult) -> None:
        """Copy results in; part of the graph."""
        for name, value in _flat(result).items():
            self._views[name].copy_(value)

    def read(self) -> StepResult:
        """What the step under way on the current stream leaves, also after the next one."""
        result = _CopiedResult.of(self, self._buffer)
        self._latest = weakref.ref(result)
        self._note_stream()
        return result

    def begin_keeping(self) -> Copy | None:
        """The buffer will be written again: prepare a place for the latest result, if somebody has it and has not looked yet.

        Returns:
            What is to be copied on the current stream before `end_keeping`, if anything. Without an `end_keeping`, as after an
            error, nothing has happened.
        """
        self._note_stream()
        latest = None if self._latest is None else self._latest()
        if latest is None or "_buffer" not in latest.__dict__:
            return None
        if not self._places:
            self._kept = self._buffer.clone()
            return None
        index = self._num_kept % _NUM_PLACES
        self._vacate(index)
        self._wait_for_readers()
        self._kept = place = self._places[index]
        if place.is_cuda:
            return self._copies[index]
        place.copy_(self._buffer)
        return None

    def _vacate(self, index: int) -> None:
        """Let the result in a place, if somebody has it and has not looked yet, have memory of its own."""
        reference, self._owners[index] = self._owners[index], None
        owner = None if reference is None else reference()
        if owner is not None and "_buffer" in owner.__dict__:
            _move(owner, self._places[index].clone())

    def end_keeping(self) -> None:
        """From here on the current stream may write the buffer."""
        latest = None if self._latest is None else self._latest()
        if latest is not None and self._kept is not None:
            _move(latest, self._kept)
            if self._places:
                self._owners[self._num_kept % _NUM_PLACES] = self._latest
                self._num_kept += 1
        self._latest = self._kept = None
        self._wait_for_readers()

    def _note_stream(self) -> None:
        """The current stream writes from here on, after what was read on the one that wrote before."""
        if self._stream is not None and _raw_stream_of(self._buffer) != self._stream.cuda_stream:
            before, self._stream = self._stream, torch.cuda.current_stream(self._buffer.device)
            self._stream.wait_stream(before)

    def _wait_for_readers(self) -> None:
        """What the current stream gets from here on runs after what other streams have read."""
        while self._readers:
            torch.cuda.current_stream(self._buffer.device).wait_event(self._readers.pop())

    def fields(self, buffer: Tensor) -> dict[str, Any]:
        """The fields of a `StepResult`, from a copy of the buffer.

        The scalars share one storage and everything else has its own: a loss that is kept keeps nothing large alive, and
        torch.save takes storages of one dtype only.
        """
        reader = None
        if self._stream is not None and _raw_stream_of(buffer) != self._stream.cuda_stream:
            reader = torch.cuda.current_stream(buffer.device)
            # Who has waited for the step to end has not waited for the copy that was made before the next one.
            reader.wait_stream(self._stream)
            buffer.record_stream(reader)
        # Whoever looks first may be in inference mode, whose tensors no training could use.
        with torch.inference_mode(False), torch.no_grad():
            scalars = buffer[: 4 * len(self._scalars)].view(torch.float32).clone().unbind()
            values = dict(zip(self._scalars, scalars, strict=True))
            for name, at, size, dtype, shape in self._layout:
                values[name] = buffer[at : at + size].view(dtype).view(shape).clone()
        if reader is not None:
            self._readers.append(reader.record_event())
        metrics = {name: values.pop(f"metrics.{name}") for name in self._metrics}
        return {**values, "metrics": metrics}


class _CopiedResult(StepResult):
    """A result that becomes a plain `StepResult` when it is first looked at: most steps of a long run never are."""

    @classmethod
    def of(cls, results: StaticResults, buffer: Tensor) -> StepResult:
        """One whose fields are in ``buffer``: the results' own, or a copy of it."""
        copied = object.__new__(cls)
        copied.__dict__.update(_results=results, _buffer=buffer)
        return copied

    def _become_plain(self) -> None:
        with _becoming_plain:  # two threads may look at once
            if "_results" in self.__dict__:
                self.__dict__.update(self.__dict__["_results"].fields(self.__dict__["_buffer"]))
                self.__dict__.pop("_results", None)  # a signal's handler may have looked meanwhile
                self.__dict__.pop("_buffer", None)
                object.__setattr__(self, "__class__", StepResult)

    def __getattr__(self, name: str) -> Any:
        # Called for what is not there yet.
        if name.startswith("__"):
            raise AttributeError(name)
        self._become_plain()
        return object.__getattribute__(self, name)

    def __repr__(self) -> str:
        self._become_plain()
        return repr(self)

    def __eq__(self, other: object) -> bool:
        self._become_plain()
        return self == other

    __hash__ = StepResult.__hash__

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._become_plain()
        return object.__reduce_ex__(self, protocol)


# Every step takes it, and so does a signal's handler that looks at a result, on the same thread.
_becoming_plain = threading.RLock()


def _move(result: StepResult, buffer: Tensor) -> None:
    """Let a result that nobody has looked at yet find its fields in ``buffer``, where they are now."""
    with _becoming_plain:
        if "_buffer" in result.__dict__:
            result.__dict__["_buffer"] = buffer


def _current_stream(buffer: Tensor) -> torch.cuda.Stream | None:
    return torch.cuda.current_stream(buffer.device) if buffer.is_cuda else None


def _raw_stream_of(buffer: Tensor) -> int:
    return torch._C._cuda_getCurrentRawStream(buffer.get_device())


def _flat(result: StepResult) -> dict[str, Any]:
    metrics = {f"metrics.{name}": value for name, value in result.metrics.items()}
    return {"loss": result.loss, "grad_norm": result.grad_norm, "skipped": result.skipped, **metrics}
