"""The dispatch mode under which a step is recorded, and what a replay does for each operation."""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode_stack

from graphrt.capture.hazards import Hazard, is_host_constant, is_host_scalar, mixed_devices, operation_hazard
from graphrt.capture.record_location import Location, find_location, in_parentheses
from graphrt.capture.record_nodes import OpNode, TensorSpec, name_of, plain_value, storage_key, tensors_in
from graphrt.errors import CaptureError

__all__ = ["Call", "OperationObserver", "RecordMode", "uncompared"]

_UNINITIALISED = frozenset(
    {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::empty_permuted", "aten::new_empty", "aten::new_empty_strided"}
)
# The state of a generator: a host number in an eager step, an address in a captured one.
_RNG_ARGUMENTS = frozenset({"philox_seed", "philox_offset", "rng_state"})
# No work and no values, and autograd issues more or fewer of them depending on who else holds a tensor.
_BOOKKEEPING = frozenset({"aten::detach", "aten::alias"})


class Call(Protocol):
    """One node of a recording: work to be done at each replay."""

    def run(self) -> None: ...


class OperationObserver(Protocol):
    """Who hears of each operation of the step, before it runs and when it has been recorded."""

    def begin_operation(self, operation: Any, inputs: list[Tensor]) -> None: ...
    def end_operation(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None: ...


@dataclass(frozen=True, slots=True)
class _OperationCall:
    """An operation on recorded storages; fresh results go into the storages of the recorded results.

    Tensors are aliases taken at record time: what happens later to the shape or the storage of the user's tensor object
    (`t.transpose_()`, `t.data = u`, `p.grad = None`) does not change what the node works on.
    """

    operation: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    targets: tuple[Tensor | None, ...]  # one an output, None where nothing is to be copied

    def run(self) -> None:
        result = self.operation(*self.args, **self.kwargs)
        for target, value in zip(self.targets, _flat(result), strict=True):
            if target is not None:
                _copy(target, value)


@dataclass(frozen=True, slots=True)
class _ConstantCall:
    """A constant made from host values: in-place operations may have changed it in the replay before."""

    target: Tensor
    value: Tensor

    def run(self) -> None:
        self.target.copy_(self.value)


@dataclass(frozen=True, slots=True)
class _RngSave:
    generator: torch.Generator
    state: Tensor

    def run(self) -> None:
        self.state.copy_(self.generator.get_state())


@dataclass(frozen=True, slots=True)
class _RngRestore:
    generator: torch.Generator
    state: Tensor

    def run(self) -> None:
        self.generator.set_state(self.state)


class RecordMode(TorchDispatchMode):
    """Executes every operation issued under it, and keeps what a replay and a comparison need of it.

    `keep_outputs` False keeps nothing of the tensors, so that a step takes no more memory than without the mode.
    `is_collecting` goes on after what a graph cannot hold, to find all of it.
    """

    supports_higher_order_operators = True

    def __init__(self, device_type: str, keep_outputs: bool, is_collecting: bool = False) -> None:
        super().__init__()
        self.device_type = device_type
        self.operations: list[OpNode] = []
        self.calls: list[Call] = []
        self.refusals: list[CaptureError] = []
        self.is_collecting = is_collecting
        self.has_other_draws = False
        self.is_comparing = True
        self.observer: OperationObserver | None = None
        self.num_replayed = 0  # operations so far that a replay runs
        self._keep_outputs = keep_outputs
        self.current_module: Callable[[], str] = str  # names the submodule that issues what is recorded
        self._owner = threading.get_ident()
        self._made: set[int] = set()  # storages made by the step
        self._constants: set[int] = set()  # those among them that were made from host values

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if any(kind.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl for kind in types):
            return NotImplemented  # a tensor subclass unwraps itself first, into operations that come back here
        kwargs = kwargs or {}
        return self._run(func, args, kwargs, lambda: func(*args, **kwargs))

    def record_launch(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[[], Any]) -> Any:
        """Run ``run``, which computes what ``operation`` would by launches of its own, and record the operation."""
        with _disable_current_modes():
            return self._run(operation, args, kwargs, run)

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[[], Any]) -> Any:
        location = find_location(self._owner)
        self._check(func, operation_hazard(func, args, kwargs, location, self), location)
        if isinstance(func, torch._ops.HigherOrderOperator):
            raise self.refusals[-1]  # has no schema to go on with, also while collecting
        inputs = list(tensors_in((*args, *kwargs.values())))
        if self.observer is not None:
            self.observer.begin_operation(func, inputs)
        result = run()
        outputs = list(tensors_in((result,)))
        if name_of(func) not in _BOOKKEEPING and any(tensor.device.type == self.device_type for tensor in (*inputs, *outputs)):
            self._check(func, mixed_devices(func, inputs, outputs, self.device_type), location)
            self._add(func, args, kwargs, result, location)
            if self.observer is not None:
                self.observer.end_operation(func, args, kwargs, result)
        return result

    # What replaced calls ask and tell (hazards.Watcher, record_rng.RngWatcher).

    def is_watching(self) -> bool:
        """Whether the calling thread runs the step, and not the inside of an operation that is being recorded."""
        return any(mode is self for mode in _get_current_dispatch_mode_stack())

    def refuse(self, name: str, hazard: Hazard, location: Location | None = None) -> None:
        """Raise, unless collecting. The first error is kept: code that swallows it does not make the step legal."""
        place = in_parentheses(location or find_location(self._owner))
        error = CaptureError(f"{name} {hazard.fact}{place}. {hazard.remedy}")
        self.refusals.append(error)
        if not self.is_collecting:
            raise error

    def note_other_draw(self) -> None:
        self.has_other_draws = True

    def is_host_value(self, tensor: Tensor) -> bool:
        return tensor.device.type == "cpu" != self.device_type or storage_key(tensor) in self._constants

    def has_made(self, tensor: Tensor) -> bool:
        return storage_key(tensor) in self._made

    def add_rng_save(self, generator: torch.Generator, state: Tensor) -> None:
        self._made.add(storage_key(state))
        self._add_node("graphrt::rng_save", (), (_spec(state),), True, find_location(self._owner))
        if self._keep_outputs:
            self.calls.append(_RngSave(generator, _alias(state)))

    def add_rng_restore(self, generator: torch.Generator, state: Tensor) -> None:
        self._add_node("graphrt::rng_restore", (("state", _spec(state)),), (), True, find_location(self._owner))
        if self._keep_outputs:
            self.calls.append(_RngRestore(generator, _alias(state)))

    # Recording.

    def _check(self, operation: Any, hazard: Hazard | None, location: Location | None) -> None:
        if hazard is not None:
            self.refuse(name_of(operation), hazard, location)

    def _add(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, location: Location | None) -> None:
        is_constant = is_host_constant(operation)
        if is_constant:
            self._made.add(storage_key(args[0]))
            self._constants.add(storage_key(args[0]))
        fresh = _fresh_outputs(args, kwargs, result)
        is_replayed = is_constant or _is_replayed(operation, fresh, result)
        arguments = tuple(
            (name, self._describe(value, is_constant)) for name, value in _named(operation, args, kwargs) if name not in _RNG_ARGUMENTS
        )
        outputs = tuple(_spec(value) if isinstance(value, Tensor) else None for value in _flat(result))
        self._made.update(storage_key(tensor) for tensor in fresh if tensor is not None)
        self._add_node(name_of(operation), arguments, outputs, is_replayed, location)
        if self._keep_outputs and is_replayed:
            self.calls.append(_constant_call(args[0]) if is_constant else _operation_call(operation, args, kwargs, fresh))

    def _add_node(self, name: str, arguments: Any, outputs: Any, is_replayed: bool, location: Location | None) -> None:
        self.operations.append(OpNode(name, location, self.current_module(), arguments, outputs, is_replayed, self.is_comparing))
        self.num_replayed += is_replayed

    def _describe(self, value: Any, is_constant: bool) -> Any:
        if isinstance(value, (list, tuple)) and any(isinstance(item, Tensor) for item in value):
            return tuple(self._describe(item, is_constant) for item in value)
        if not isinstance(value, Tensor):
            return plain_value(value)
        is_frozen = is_constant or (self.device_type != "cpu" and is_host_scalar(value))
        address = None if is_frozen or self.has_made(value) else value.data_ptr()
        return _spec(value, address, _host_value(value) if is_frozen else None)


@contextmanager
def uncompared() -> Iterator[None]:
    """Operations inside are recorded and replayed, and left out where two steps are compared."""
    modes = [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, RecordMode) and mode.is_comparing]
    for mode in modes:
        mode.is_comparing = False
    try:
        yield
    finally:
        for mode in modes:
            mode.is_comparing = True


def _spec(tensor: Tensor, address: int | None = None, value: Any = None) -> TensorSpec:
    return TensorSpec(tuple(tensor.shape), tensor.dtype, address, value)


def _host_value(tensor: Tensor) -> Any:
    return tensor.item() if tensor.numel() == 1 else tensor.contiguous().view(torch.uint8).numpy().tobytes()


def _named(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    yield from zip(_argument_names(operation), args, strict=False)
    yield from kwargs.items()


@functools.cache
def _argument_names(operation: Any) -> tuple[str, ...]:
    return tuple(argument.name for argument in operation._schema.arguments)  # the schema makes new objects each time


def _flat(result: Any) -> Iterator[Any]:
    """The outputs of an operation one after the other; nothing for None alone."""
    if isinstance(result, (list, tuple)):
        for item in result:
            yield from _flat(item) if isinstance(item, (list, tuple)) else (item,)
    elif result is not None:
        yield result


def _fresh_outputs(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> tuple[Tensor | None, ...]:
    """The outputs that own new storage; None for those that alias an input, and for what is no tensor.

    Decided by the storages, not by the schema: `contiguous`, `to` and `reshape` return an input or a copy.
    """
    inputs = {storage_key(tensor) for tensor in tensors_in((*args, *kwargs.values()))}
    return tuple(value if isinstance(value, Tensor) and storage_key(value) not in inputs else None for value in _flat(result))


def _is_replayed(operation: Any, fresh: tuple[Tensor | None, ...], result: Any) -> bool:
    if torch.Tag.inplace_view in operation.tags or name_of(operation) in _UNINITIALISED:
        return False  # changes or makes tensor objects, not data
    return operation._schema.is_mutable or result is None or any(tensor is not None for tensor in fresh)


def _operation_call(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any], fresh: tuple[Tensor | None, ...]) -> Call:
    targets = tuple(None if tensor is None else tensor.detach() for tensor in fresh)
    return _OperationCall(operation, _alias(args), {name: _alias(value) for name, value in kwargs.items()}, targets)


def _constant_call(constant: Tensor) -> Call:
    return _ConstantCall(constant.detach(), constant.detach().clone())


def _alias(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach()
    if type(value) in (list, tuple):
        return type(value)(_alias(item) for item in value)
    return value


def _copy(target: Tensor, value: Tensor) -> None:
    """Copy all elements; of an expanded target (stride 0) each only once, since writing the same element twice is refused."""
    for dim, (size, stride) in enumerate(zip(target.shape, target.stride(), strict=True)):
        if stride == 0 and size > 1:
            target, value = target.narrow(dim, 0, 1), value.narrow(dim, 0, 1)
    target.copy_(value)
