"""Weight gradients written straight into ``.grad``.

A weight gradient that a GEMM computes goes, in plain autograd, through a temporary that is then added to ``.grad``, which
had to be zeroed before: twelve bytes of traffic a parameter that a GEMM's own output could save. Inside a Trainer's step
the backward of a linear (or of an embedding) therefore asks for the parameter's *sink*, and writes there: the first
contribution of a step overwrites, later ones add. Gradients that reach the same parameter through autograd (tied weights)
still add up, in any order: a hook zeroes what is left of the step before, should autograd come first.

As nothing is left to read of a tensor that will be overwritten, a step may also begin without it, and make it where its
backward first writes: in a captured step that is memory which the activations needed before.

A contribution that is little work (a norm's) may be written aside ([Note: aside]). Whoever else contributes to the same
gradient waits for it: contributions aside among each other by their order, others by a join.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from graphrt.aside import aside, join_asides
from graphrt.owners import working_for

__all__ = ["GradientSinks", "deliver"]

#: Computes a weight gradient, into ``out`` if one is given.
Compute = Callable[[Tensor | None], Tensor]
#: Adds a weight gradient to a contiguous tensor.
AddTo = Callable[[Tensor], object]


class _Sink:
    """One parameter whose gradient is written directly."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter
        self.is_stale = False  # .grad still holds the step before, or has been released
        self.is_released = False  # .grad is None, and the next step makes it anew
        self._is_aside = False  # the last contribution may still be under way
        self._hook = parameter.register_hook(self._before_autograd)

    def _before_autograd(self, grad: Tensor | None) -> None:
        if grad is not None:
            self._join()
            self.settle()

    def _join(self) -> None:
        if self._is_aside:
            join_asides()
        self._is_aside = False

    def release(self) -> None:
        """Let go of the tensor until the next step writes one."""
        self.parameter.grad, self.is_released = None, True

    def begin(self) -> None:
        """A step begins."""
        self.is_stale = self.is_released or self.parameter.grad is not None
        self.is_released = self._is_aside = False

    @torch.no_grad()
    def settle(self) -> None:
        """Zero what is left of the step before, if nothing has overwritten it."""
        if self.is_stale:
            with working_for(self.parameter):
                if self.parameter.grad is None:
                    self.parameter.grad = self._empty()
                self.parameter.grad.zero_()
        self.is_stale = False

    def _empty(self) -> Tensor:
        return torch.empty_like(self.parameter, memory_format=torch.contiguous_format)

    @torch.no_grad()
    def write(self, compute: Compute, add_to: AddTo | None) -> None:
        """Overwrite or add."""
        self._join()
        grad, overwrites = self._target()
        if overwrites:
            compute(grad)
        elif add_to is not None and grad.is_contiguous():
            add_to(grad)
        else:
            grad.add_(compute(None))

    @torch.no_grad()
    def write_aside(self, compute: Compute, reads: Sequence[Tensor]) -> None:
        """As `write`, aside; ``compute`` allocates nothing."""
        grad, overwrites = self._target()
        out = grad if overwrites else self._empty()
        with aside(grad, out, *reads):
            compute(out)
            if not overwrites:
                grad.add_(out)
        self._is_aside = True

    def _target(self) -> tuple[Tensor, bool]:
        """The ``.grad`` to write a contribution to, made where there is none, and whether it is to be overwritten."""
        grad, overwrites = self.parameter.grad, self.is_stale
        if grad is None:
            grad, overwrites = self._empty(), True
            self.parameter.grad = grad
        elif overwrites and not grad.is_contiguous():
            self.settle()
            overwrites = False
        self.is_stale = False
        return grad, overwrites

    def remove(self) -> None:
        self._hook.remove()


class GradientSinks:
    """The sinks of one Trainer's parameters; active while its step body runs."""

    _active: "GradientSinks | None" = None

    def __init__(self) -> None:
        self._sinks: dict[nn.Parameter, _Sink] = {}

    @contextmanager
    def active(self) -> Iterator[None]:
        """One step: gradients written inside the block replace those of the step before."""
        for sink in self._sinks.values():
            sink.begin()
        previous, GradientSinks._active = GradientSinks._active, self
        try:
            yield
            for sink in self._sinks.values():
                sink.settle()
        finally:
            GradientSinks._active = previous
            for sink in self._sinks.values():
                sink.is_stale = False

    def __contains__(self, parameter: nn.Parameter) -> bool:
        """Whether the parameter's gradient is written directly, so that nobody needs to zero it."""
        return parameter in self._sinks

    def sink(self, parameter: nn.Parameter) -> _Sink | None:
        """The parameter's sink; None where hooks of the user's have to see the gradient."""
        found = self._sinks.get(parameter)
        if not _is_accumulated(parameter):
            return None
        if _has_other_hooks(parameter, 0 if found is None else 1) or not (parameter.is_leaf and parameter.is_contiguous()):
            return None
        if found is None:
            found = self._sinks[parameter] = _Sink(parameter)
        return found

    def release(self, parameter: nn.Parameter) -> None:
        """Let go of the ``.grad`` of a parameter of these sinks: the next step makes a new one, of zeros if nothing writes it."""
        self._sinks[parameter].release()

    def forget(self, parameter: nn.Parameter) -> None:
        """The parameter has no gradient any more: none is made in place of a released one."""
        if parameter in self._sinks:
            self._sinks[parameter].is_released = False

    def close(self) -> None:
        """Take the hooks off the parameters."""
        for sink in self._sinks.values():
            sink.remove()
        self._sinks.clear()


def _is_accumulated(parameter: nn.Parameter) -> bool:
    """Whether the backward under way adds to the parameter's ``.grad``: ``autograd.grad`` only returns gradients."""
    if not parameter.requires_grad:
        return False
    try:
        return torch._C._will_engine_execute_node(torch.autograd.graph.get_gradient_edge(parameter).node)
    except RuntimeError:
        # What the engine says of a leaf whose gradient autograd.grad was asked for.
        return False


def _has_other_hooks(parameter: nn.Parameter, num_own: int) -> bool:
    hooks = getattr(parameter, "_backward_hooks", None) or ()
    return len(hooks) > num_own or bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


def deliver(parameter: Tensor, compute: Compute, add_to: AddTo | None = None, *, reads: Sequence[Tensor] | None = None) -> Tensor | None:
    """A weight gradient from a backward: into the parameter's sink, or returned for autograd to accumulate.

    Args:
        parameter: the weight the gradient is of.
        compute: called with the tensor to write into, or None to make one.
        add_to: called with the tensor to add to, where that takes no temporary; None adds what ``compute`` makes.
        reads: what ``compute`` reads, if it may run aside: it is little work, and given a tensor it allocates nothing.
    """
    active = GradientSinks._active
    sink = active.sink(parameter) if active is not None and isinstance(parameter, nn.Parameter) else None
    if sink is None:
        return compute(None)
    if reads is None:
        sink.write(compute, add_to)
    else:
        sink.write_aside(compute, reads)
    return None
