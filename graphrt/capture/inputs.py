"""Static inputs: the tensors a graph reads its batch from, and the check of what goes into them."""

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from graphrt import batch as batches
from graphrt.errors import StaticInputError
from graphrt.kernels.copy import Copy, copy_launches, launch_copies

__all__ = ["StaticInputs", "signature"]

_NUM_STAGES = 2

# Gradients are enabled whenever a step copies its inputs, so that one object can switch them off and on again for all.
_no_grad = torch.no_grad()
_is_on_cuda = operator.attrgetter("is_cuda")


def signature(batch: Any) -> Any:
    """Structure, shapes, dtypes and constants of a batch, as a hashable value: what a graph is keyed by."""
    if isinstance(batch, Tensor):
        return batch.shape, batch.dtype
    if isinstance(batch, dict):
        return frozenset((key, signature(value)) for key, value in batch.items())
    if isinstance(batch, list | tuple):
        return type(batch).__name__, tuple(signature(value) for value in batch)
    # 1, 1.0 and True are equal and hash alike, but make different kernels.
    return type(batch).__name__, batch


class StaticInputs:
    """Copies of one batch's tensors at addresses that stay.

    Args:
        batch: the first batch; later ones must have its structure, shapes, dtypes and constants.
        device: where the tensors go.
    """

    def __init__(self, batch: Any, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self.signature = signature(batch)
        self.batch = batches.map_tensors(lambda x: _static_like(x, device), batch)
        list(batches.leaves(batch))
        self._read = _reader(self.batch)
        self._tensors = self._read(self.batch)
        self._addresses = [x.data_ptr() for x in self._tensors]
        self._sizes = [x.nbytes for x in self._tensors]
        # A tensor of complex numbers may be the conjugate of what lies in memory.
        self._are_bytes = self._is_cuda and not any(x.dtype.is_complex for x in self._tensors)
        self._index = device.index if device.index is not None else torch.cuda.current_device() if self._is_cuda else -1
        self._stages: list[_PinnedStage] = []
        self._num_copies = 0

    def check(self, batch: Any) -> None:
        """Raise unless ``batch`` fits.

        Raises:
            StaticInputError: names what differs, expected and got.
        """
        expected, got = dict(batches.leaves(self.batch)), dict(batches.leaves(batch))
        for name in dict.fromkeys([*expected, *got]):
            _check_name(name, expected.get(name, _MISSING), got.get(name, _MISSING))
            _check_leaf(name, expected[name], got[name])
        if signature(batch) != self.signature:
            raise StaticInputError("The batch nests dicts, lists and tuples in another way than the captured one. Keep the structure.")

    def copy_from(self, batch: Any, also: Sequence[Copy] = ()) -> None:
        """Copy a batch of this signature in, on the current stream, without waiting for the device.

        The caller may refill host and device buffers as soon as this returns.

        Args:
            also: other copies on the same device, to share a launch with.
        """
        sources = self._read(batch)
        copies = list(also)
        if self._is_cuda and not all(map(_is_on_cuda, sources)):
            sources = self._stage(sources)
        if self._are_bytes and all(map(self._is_of_bytes, sources)):
            copies += map(Copy, self._addresses, map(Tensor.data_ptr, sources), self._sizes)
        elif sources:
            with _no_grad:
                torch._foreach_copy_(self._tensors, sources, non_blocking=True)
        if copies:
            launch_copies(self._index, copy_launches(copies))

    def _is_of_bytes(self, source: Tensor) -> bool:
        """Whether a tensor on a GPU is what lies in its memory, in order, on this device."""
        return type(source) is Tensor and source.get_device() == self._index and source.is_contiguous() and not source.is_neg()

    def _stage(self, sources: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Copy host tensors into pinned memory of our own: the device reads it after the caller has gone on."""
        if len(self._stages) < _NUM_STAGES:
            self._stages.append(_PinnedStage(sources))
        stage = self._stages[self._num_copies % _NUM_STAGES]
        self._num_copies += 1
        return stage.fill(sources)

    def note_copied(self) -> None:
        """Say that the copies of the last `copy_from` are enqueued; a stage is filled again only after they ran."""
        if self._stages:
            self._stages[(self._num_copies - 1) % _NUM_STAGES].event.record()


class _PinnedStage:
    """One set of pinned host buffers, and the event after which they may be filled again."""

    def __init__(self, sources: tuple[Tensor, ...]) -> None:
        self.buffers = [None if x.is_cuda else torch.empty(x.shape, dtype=x.dtype, pin_memory=True) for x in sources]
        self.event = torch.cuda.Event()

    def fill(self, sources: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        self.event.synchronize()
        pairs = zip(self.buffers, sources, strict=True)
        return tuple(source if buffer is None or source.is_cuda else buffer.copy_(source) for buffer, source in pairs)


def _static_like(x: Tensor, device: torch.device) -> Tensor:
    """Contiguous storage of our own; any strides of the caller's are copied from."""
    return torch.empty(x.shape, dtype=x.dtype, device=device)


def _reader(like: Any) -> Callable[[Any], tuple[Tensor, ...]]:
    """A function that takes the tensors out of batches like ``like``, in its order; for a dict of tensors one call in C."""
    if isinstance(like, dict) and len(like) > 1 and all(isinstance(value, Tensor) for value in like.values()):
        return operator.itemgetter(*like)
    return lambda batch: tuple(_tensors(like, batch))


def _tensors(like: Any, batch: Any) -> Iterator[Tensor]:
    """The tensors of ``batch``, dicts in the order of ``like``: a loader may give its keys in any."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, dict):
        for key, value in like.items():
            yield from _tensors(value, batch[key])
    elif isinstance(batch, list | tuple):
        for one, other in zip(like, batch, strict=True):
            yield from _tensors(one, other)


_MISSING = object()


def _check_name(name: str, expected: Any, got: Any) -> None:
    if got is _MISSING:
        raise StaticInputError(f"{name} is missing, but the step was captured with it. Pass it, or call trainer.recapture().")
    if expected is _MISSING:
        raise StaticInputError(f"{name} is new, the step was captured without it. Leave it out, or call trainer.recapture().")


def _check_leaf(name: str, expected: Any, got: Any) -> None:
    if isinstance(expected, Tensor) and isinstance(got, Tensor):
        if expected.shape != got.shape:
            raise StaticInputError(
                f"{name} has shape {list(got.shape)}, but the step was captured with {list(expected.shape)}. "
                "Pad the batch, or call trainer.recapture()."
            )
        if expected.dtype != got.dtype:
            raise StaticInputError(
                f"{name} has dtype {got.dtype}, but the step was captured with {expected.dtype}. Convert it, or call trainer.recapture()."
            )
    elif isinstance(expected, Tensor) or isinstance(got, Tensor):
        raise StaticInputError(
            f"{name} is of type {type(got).__name__}, but the step was captured with type {type(expected).__name__}. Pass the same kind."
        )
    elif type(expected) is not type(got) or expected != got:
        raise StaticInputError(
            f"{name} is {got!r}, but the step was captured with {expected!r}, which a graph freezes. "
            "Pass it as a tensor, or call trainer.recapture()."
        )
