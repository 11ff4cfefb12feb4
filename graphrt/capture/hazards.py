"""What a CUDA graph cannot hold, among operations and among calls that issue none.

An operation is illegal when it hands a device value to the host, when the shape of its output depends on values, or when
it copies between devices. Some calls never reach the dispatcher (`.numpy()`, `.tolist()`, `print(t)`, `random.random()`):
for the time of a recording their names are replaced by ones that refuse.
"""

import functools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy
import torch
from torch import Tensor

from graphrt.capture.record_location import Location, is_torch_frame, issuing_frame
from graphrt.capture.record_nodes import name_of, tensors_in

__all__ = ["Hazard", "Watcher", "is_host_constant", "mixed_devices", "operation_hazard", "refusing_calls", "replaced"]


@dataclass(frozen=True, slots=True)
class Hazard:
    """A statement that follows the operation's name, and what to do instead."""

    fact: str
    remedy: str


class Watcher(Protocol):
    """The recording that replaced calls report to."""

    device_type: str
    has_other_draws: bool  # another thread drew from a host generator meanwhile

    def is_watching(self) -> bool: ...
    def refuse(self, name: str, hazard: Hazard, location: Location | None = None) -> None: ...
    def note_other_draw(self) -> None: ...
    def is_host_value(self, tensor: Tensor) -> bool: ...


_READ = Hazard("reads a device value on the host", "Return the tensor and read it after the step.")
_BRANCH = Hazard("reads a device value on the host to branch on it", "Choose with torch.where, or decide outside the step.")
_SHAPE = Hazard("has an output whose shape depends on values", "Keep shapes static: use torch.where, a mask to multiply with, or topk.")
_MASK = Hazard("indexes with a boolean mask, so its shape depends on values", "Use torch.where, masked_fill or a mask to multiply with.")
_UNSAFE = Hazard("is tagged as unsafe in a CUDA graph", "Call it outside the step.")
_SPARSE = Hazard("works on a tensor that is not strided, whose size depends on values", "Use dense tensors inside the step.")
_CONSTANT = Hazard(
    "makes a tensor from host values inside the step, which is a copy from the host",
    "Create it once outside the step, or fill one with torch.full, zeros or arange.",
)
_HIGHER_ORDER = Hazard(
    "runs Python on operands that a recording cannot follow", "Replace torch.cond by torch.where, or call plain operations."
)
_COPY = "Keep every tensor of the step on one device; move the batch before the step and results after it."
_RANDOM = Hazard("draws on the host, a value a graph would freeze", "Draw with torch on the device, or outside the step and pass it in.")

_UNSAFE_TAG = getattr(torch.Tag, "cudagraph_unsafe", None)  # younger than the other tags
# Host reads that carry no tag. Their kernels read inside, where no dispatch mode sees it.
_READERS = frozenset({"aten::allclose", "aten::is_nonzero", "aten::item", "aten::_linalg_check_errors"})
_INDEXING = frozenset(
    {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index", "aten::_unsafe_index_put"}
)
_COPIES = frozenset({"aten::_to_copy", "aten::copy_", "aten::copy"})


def operation_hazard(
    operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any], location: Location | None, watcher: Watcher
) -> Hazard | None:
    """Why a graph cannot hold this call of `operation`, from its schema, tags and arguments, or None."""
    if isinstance(operation, torch._ops.HigherOrderOperator):
        return _HIGHER_ORDER
    tensors = list(tensors_in((*args, *kwargs.values())))
    if tensors and all(tensor.device.type != watcher.device_type for tensor in tensors):
        return None  # work of the host's own
    name, tags = name_of(operation), operation.tags
    if name in _INDEXING:
        return _indexing_hazard(args, watcher)
    if torch.Tag.data_dependent_output in tags or name in _READERS:
        return _BRANCH if location is not None and location.opname.startswith(("POP_JUMP", "JUMP_IF")) else _READ
    if torch.Tag.dynamic_output_shape in tags and kwargs.get("output_size") is None:
        return _SHAPE
    if _UNSAFE_TAG in tags:
        return _UNSAFE
    if is_host_constant(operation) and not _is_allowed_constant(args[0]):
        return _CONSTANT
    return None


def mixed_devices(operation: Any, inputs: Sequence[Tensor], outputs: Sequence[Tensor], device_type: str) -> Hazard | None:
    """The hazard of an operation that moves data between devices, or works on tensors a graph cannot address."""
    if any(tensor.layout != torch.strided for tensor in (*inputs, *outputs)):
        return _SPARSE
    others = [tensor for tensor in (*inputs, *outputs) if tensor.device.type != device_type]
    if name_of(operation) not in _COPIES and all(is_host_scalar(tensor) for tensor in others):
        return None  # a 0-dim CPU tensor among device tensors travels as a kernel argument
    if not others:
        return None
    source, target = (tensors[0].device.type if tensors else device_type for tensors in (inputs[-1:], outputs[:1]))
    return Hazard(f"copies between devices, from {source} to {target}", _COPY)


def is_host_scalar(tensor: Tensor) -> bool:
    return tensor.dim() == 0 and tensor.device.type == "cpu"


def is_host_constant(operation: Any) -> bool:
    """Whether `operation` brings in values of the host: what torch.tensor and indexing with a list issue."""
    return name_of(operation) == "aten::lift_fresh"


def _indexing_hazard(args: tuple[Any, ...], watcher: Watcher) -> Hazard | None:
    if not any(index.dtype in (torch.bool, torch.uint8) for index in tensors_in(args[1])):
        return None
    # `x[mask] = 0.0` is a masked_fill inside: legal as long as the value is one of the host's.
    is_fill = len(args) > 2 and args[2].numel() == 1 and watcher.is_host_value(args[2])
    return None if is_fill else _MASK


def _is_allowed_constant(value: Tensor) -> bool:
    """torch's own internals may make constants, and `x[i] = 2.0` makes one that becomes a fill."""
    frame = issuing_frame()
    if frame is None or is_torch_frame(frame):
        return True
    return value.dim() == 0 and Location(frame.f_code, frame.f_lasti).opname in ("STORE_SUBSCR", "STORE_SLICE")


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute for the time of a block, then leave `vars(owner)` exactly as it was."""
    missing = object()
    original = vars(owner).get(name, missing)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if original is missing:
            delattr(owner, name)
        else:
            setattr(owner, name, original)


_PRINT = Hazard("reads a tensor on the host to show it", _READ.remedy)
_SAVE = Hazard("reads tensors on the host to write them", "Save after the step.")
_SYNC = Hazard("makes the host wait for the device", "Synchronize after the step.")
_RESIZE = Hazard("resizes a storage, whose address a graph holds", "Keep storages as they are inside the step.")
_CALLS: tuple[tuple[Any, str, str, Hazard], ...] = (
    (Tensor, "numpy", "Tensor.numpy", _READ),
    (Tensor, "__array__", "Tensor.__array__", _READ),
    (Tensor, "tolist", "Tensor.tolist", _READ),
    (Tensor, "cpu", "Tensor.cpu", Hazard("copies from the device to the host", _READ.remedy)),
    (Tensor, "__repr__", "Tensor.__repr__", _PRINT),
    (torch, "save", "torch.save", _SAVE),
    (torch.cuda, "synchronize", "torch.cuda.synchronize", _SYNC),
    (torch.accelerator, "synchronize", "torch.accelerator.synchronize", _SYNC),
    (torch.UntypedStorage, "resize_", "UntypedStorage.resize_", _RESIZE),
)


@contextmanager
def refusing_calls(watcher: Watcher) -> Iterator[None]:
    """For the time of a block, make the calls that no dispatch mode sees report to `watcher`."""
    with ExitStack() as stack:
        for owner, name, shown, hazard in _CALLS:
            stack.enter_context(replaced(owner, name, _refusing(watcher, getattr(owner, name), shown, hazard)))
        if watcher.device_type == "cpu":
            stack.enter_context(replaced(torch.nn.functional, "one_hot", _one_hot(watcher, torch.nn.functional.one_hot)))
        for owner, name, original in _host_draws():
            stack.enter_context(replaced(owner, name, _refusing_draw(watcher, original, f"{owner.__name__}.{name}")))
        stack.enter_context(_unmoved_host_rng(watcher))
        yield


def _refusing(watcher: Watcher, original: Callable[..., Any], shown: str, hazard: Hazard) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if watcher.is_watching() and not _is_on_other_device(args, watcher.device_type):
            watcher.refuse(shown, hazard)
        return original(*args, **kwargs)

    return call


def _is_on_other_device(args: tuple[Any, ...], device_type: str) -> bool:
    return bool(args) and isinstance(args[0], Tensor) and args[0].device.type != device_type


def _one_hot(watcher: Watcher, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """CPU kernels check the classes by reading them; CUDA kernels, which the recording stands for, do not."""

    @functools.wraps(original)
    def one_hot(tensor: Tensor, num_classes: int = -1) -> Tensor:
        if num_classes == -1 or not watcher.is_watching():
            return original(tensor, num_classes)
        return (tensor.unsqueeze(-1) == torch.arange(num_classes, device=tensor.device)).to(torch.int64)

    return one_hot


def _host_draws() -> list[tuple[Any, str, Any]]:
    """The module-level functions of `random` and `numpy.random` that move the generator behind them."""
    generators = ((random, getattr(random, "_inst", None)), (numpy.random, getattr(numpy.random.mtrand, "_rand", None)))
    return [
        (module, name, function)
        for module, generator in generators
        for name, function in vars(module).items()
        if _moves(generator, name, function)
    ]


def _moves(generator: Any, name: str, function: Any) -> bool:
    if name in ("seed", "ranf", "sample") and callable(function):
        return True  # in numpy plain functions, which name no generator
    return generator is not None and getattr(function, "__self__", None) is generator and name not in ("getstate", "get_state")


def _refusing_draw(watcher: Watcher, original: Callable[..., Any], shown: str) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if watcher.is_watching():
            watcher.refuse(shown, _RANDOM)
        watcher.note_other_draw()
        return original(*args, **kwargs)

    return call


@contextmanager
def _unmoved_host_rng(watcher: Watcher) -> Iterator[None]:
    """Catch draws through names that were imported from the module before, for which no line is known."""
    before = _host_rng_states()
    yield
    for name, state in _host_rng_states().items():
        if state != before[name] and not watcher.has_other_draws:
            watcher.refuse(f"{name} moved its generator during the step: it", _RANDOM)


def _host_rng_states() -> dict[str, Any]:
    kind, keys, *rest = numpy.random.get_state(legacy=True)
    return {"random": random.getstate(), "numpy.random": (kind, keys.tobytes(), *rest)}  # pyright: ignore[reportAttributeAccessIssue]
