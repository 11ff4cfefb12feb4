"""Copies of what a step may change, to put back when it fails."""

import copy
import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from graphrt.state import QuantizationState, StateSnapshot

__all__ = ["ModelSnapshot", "OptimizerSnapshot", "RngSnapshot", "StepSnapshot"]


@dataclass(frozen=True)
class RngSnapshot:
    """State of torch's generators (CPU and the given device), of Python's and of numpy's."""

    cpu: Tensor
    device: torch.device
    cuda: Tensor | None
    host: Any
    numpy: Any

    @classmethod
    def take(cls, device: torch.device) -> "RngSnapshot":
        cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return cls(torch.get_rng_state(), device, cuda, random.getstate(), numpy.random.get_state())

    def restore(self) -> None:
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, self.device)
        random.setstate(self.host)
        numpy.random.set_state(self.numpy)


@dataclass(frozen=True)
class _GradSnapshot:
    """One parameter's gradient: the tensor, unless the step may make another one, and a copy of its values."""

    parameter: nn.Parameter
    tensor: Tensor | None
    values: Tensor | None  # None: there was no gradient

    @classmethod
    def take(cls, parameter: nn.Parameter, *, holds_tensor: bool, on_host: bool) -> "_GradSnapshot":
        grad = parameter.grad
        if grad is None:
            return cls(parameter, None, None)
        return cls(parameter, grad if holds_tensor else None, _copy(grad, on_host))

    def restore(self) -> None:
        """Into the tensor that was kept, else into the one there is now: a graph captured meanwhile may know it."""
        if self.values is None:
            self.parameter.grad = None
            return
        tensor = self.parameter.grad if self.tensor is None else self.tensor
        self.parameter.grad = self.values.to(self.parameter.device) if tensor is None else tensor.copy_(self.values)


@dataclass(frozen=True)
class ModelSnapshot:
    """Parameters, buffers, gradients and training flags, restored in place."""

    values: list[tuple[Tensor, Tensor]]
    buffers: list[tuple[nn.Module, str, Tensor | None]]
    grads: list[_GradSnapshot]
    is_training: list[tuple[nn.Module, bool]]

    @classmethod
    @torch.no_grad()
    def take(
        cls, model: nn.Module, parameters: Iterable[nn.Parameter], *, on_host: bool = False, holds_grads: bool = True
    ) -> "ModelSnapshot":
        parameters = list({id(p): p for p in [*parameters, *model.parameters()]}.values())
        tensors = [*parameters, *model.buffers()]
        return cls(
            values=[(x, _copy(x, on_host)) for x in tensors],
            buffers=[(module, name, buffer) for module in model.modules() for name, buffer in module._buffers.items()],
            grads=[_GradSnapshot.take(p, holds_tensor=holds_grads, on_host=on_host) for p in parameters],
            is_training=[(module, module.training) for module in model.modules()],
        )

    @torch.no_grad()
    def restore(self) -> None:
        # A buffer that the step rebound goes back to the tensor it was, then to its value.
        for module, name, buffer in self.buffers:
            module._buffers[name] = buffer
        for x, value in self.values:
            x.copy_(value)
        for grad in self.grads:
            grad.restore()
        for module, flag in self.is_training:
            module.training = flag


@dataclass(frozen=True)
class OptimizerSnapshot:
    """An optimizer's groups and state. State tensors are copied only if asked for, and then restored in place."""

    state: list[tuple[Any, dict[str, Any], dict[str, Any], dict[str, Any]]]  # parameter, its dict, what it held, copies of that
    groups: list[dict[str, Any]]
    has_values: bool

    @classmethod
    @torch.no_grad()
    def take(cls, optimizer: Optimizer, *, with_values: bool, on_host: bool = False) -> "OptimizerSnapshot":
        state = [
            (p, values, dict(values), {key: _copy(value, on_host) for key, value in values.items()} if with_values else {})
            for p, values in optimizer.state.items()
        ]
        return cls(state, [{**group, "params": list(group["params"])} for group in optimizer.param_groups], with_values)

    @torch.no_grad()
    def restore(self, optimizer: Optimizer) -> None:
        kept = {p for p, *_ in self.state}
        for p in [p for p in optimizer.state if p not in kept]:
            del optimizer.state[p]
        for p, values, held, copies in self.state:
            # The same dict again: a captured step has looked at it.
            optimizer.state[p] = values
            values.clear()
            values.update({key: _put_back(value, copies[key]) if self.has_values else value for key, value in held.items()})
        del optimizer.param_groups[len(self.groups) :]
        for group, saved in zip(optimizer.param_groups, self.groups, strict=True):
            group.clear()
            group.update(saved)


def _copy(value: Any, on_host: bool = False) -> Any:
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True) if on_host else value.detach().clone()
    return copy.deepcopy(value)


def _put_back(value: Any, saved: Any) -> Any:
    return value.copy_(saved) if isinstance(value, Tensor) else saved


@dataclass(frozen=True)
class StepSnapshot:
    """Everything one step may change."""

    model: ModelSnapshot
    optimizer: tuple[Optimizer, OptimizerSnapshot]
    states: list[tuple[QuantizationState, StateSnapshot]]
    rng: RngSnapshot

    @classmethod
    def take(
        cls,
        model: nn.Module,
        parameters: Iterable[nn.Parameter],
        optimizer: Optimizer,
        states: Iterable[QuantizationState],
        device: torch.device,
        *,
        with_optimizer_values: bool = True,
        on_host: bool = False,
        holds_grads: bool = True,
    ) -> "StepSnapshot":
        """Copy everything now.

        Args:
            with_optimizer_values: also copy the optimizer's state tensors; not needed where only the last thing a step
                does can change them.
            on_host: copy to the host, which is slower and takes no device memory.
            holds_grads: put gradients back into the tensors they are in now, which keeps those alive; else into those there
                are then.
        """
        return cls(
            ModelSnapshot.take(model, parameters, on_host=on_host, holds_grads=holds_grads),
            (optimizer, OptimizerSnapshot.take(optimizer, with_values=with_optimizer_values, on_host=on_host)),
            [(state, state.snapshot()) for state in states],
            RngSnapshot.take(device),
        )

    def restore(self, *, keep_states: bool = False) -> None:
        """Put everything back, in place; with ``keep_states`` all but the quantization states."""
        self.model.restore()
        optimizer, snapshot = self.optimizer
        snapshot.restore(optimizer)
        for state, saved in [] if keep_states else self.states:
            state.restore(saved)
        self.rng.restore()
