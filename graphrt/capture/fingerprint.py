"""What a graph was captured with, checked before each replay: a graph knows addresses and constants, not names.

The check compares object identities, addresses and flags, inside C loops; only when something differs does it look for the
name. What is found through dicts (modules, optimizer state) is compared only after one of them has changed, where the
interpreter tells. profiles/README.md has what it costs.
"""

import operator
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphrt.capture.watch import DictWatch
from graphrt.errors import CaptureError
from graphrt.optimizer import TRACKED_KEYS, UNREAD_KEYS
from graphrt.step import StepBody

__all__ = ["Fingerprint", "Settings"]

_RECAPTURE = "call trainer.recapture()"
_IGNORED = dict.fromkeys(("params", *UNREAD_KEYS, *TRACKED_KEYS))

_END = object()

# Getters that a map calls without a frame of Python each.
_get_training, _get_requires_grad, _get_grad = map(operator.attrgetter, ("training", "requires_grad", "grad"))


class _Entry(NamedTuple):
    """An object and where it is looked up: ``holder.get(key)``."""

    name: str
    holder: Any
    key: Any
    found: Any
    advice: str


class Settings:
    """Flags and hyper-parameters that a graph bakes in: what of a `Fingerprint` needs no graph yet.

    Args:
        body: the step that is captured, or will be. None of its gradients is kept alive.
    """

    def __init__(self, body: StepBody) -> None:
        self._body = body
        self.modules = list(body.model.named_modules())
        self.flagged = [module for _, module in self.modules]
        self._training = list(map(_get_training, self.flagged))
        self._parameters = list(body.gradients.named.items())
        self.trained = [p for _, p in self._parameters]
        self._requires_grad = list(map(_get_requires_grad, self.trained))
        self._without_grad = [(name, p) for name, p in self._parameters if p.grad is None]
        self.reason_outside = body.optimizer.reason_outside
        # Lists (betas, say) are kept as they are now: an item of theirs may be replaced in place.
        self._groups = [
            {key: list(value) if isinstance(value, list) else value for key, value in _frozen(group).items()}
            for group in body.optimizer.optimizer.param_groups
        ]

    def check(self) -> None:
        """Raise unless all are as they were.

        Raises:
            CaptureError: names what changed.
        """
        self.check_training()
        self.check_requires_grad()
        self.check_new_grads()
        self.check_reason_outside()
        self.check_groups()

    def check_training(self) -> None:
        """The modules' flags."""
        if list(map(_get_training, self.flagged)) != self._training:
            self._name_flag(self.modules, self._training, "training")

    def check_requires_grad(self) -> None:
        """The parameters' flags."""
        if list(map(_get_requires_grad, self.trained)) != self._requires_grad:
            self._name_flag(self._parameters, self._requires_grad, "requires_grad")

    def check_new_grads(self) -> None:
        """That parameters without a gradient still have none."""
        if any(p.grad is not None for _, p in self._without_grad):
            self._name_new_grad()

    def check_reason_outside(self) -> None:
        """Whether the optimizer is in the step."""
        reason = self._body.optimizer.reason_outside
        if reason != self.reason_outside:
            raise CaptureError(f"The optimizer changed since the step was captured ({reason or self.reason_outside}): {_RECAPTURE}.")

    def check_groups(self) -> None:
        """The optimizer's hyper-parameters."""
        groups = self._body.optimizer.optimizer.param_groups
        if list(map(_frozen, groups)) != self._groups:
            self._name_group(groups)

    def _name_flag(self, named: list[tuple[str, Any]], saved: list[bool], flag: str) -> None:
        for (name, owner), value in zip(named, saved, strict=True):
            if getattr(owner, flag) != value:
                raise CaptureError(
                    f"{name or 'The model'}.{flag} is {getattr(owner, flag)}, but the step was captured with {value}. "
                    f"Set it back, or {_RECAPTURE}."
                )

    def _name_new_grad(self) -> None:
        name = next(name for name, p in self._without_grad if p.grad is not None)
        raise CaptureError(f"{name}.grad has appeared since the step was captured, where it took no part. Set it to None, or {_RECAPTURE}.")

    def _name_group(self, groups: list[dict[str, Any]]) -> None:
        if len(groups) != len(self._groups):
            raise CaptureError(
                f"The optimizer has {len(groups)} param groups, but the step was captured with {len(self._groups)}. "
                f"Add groups before the capture, or {_RECAPTURE}."
            )
        for i, (group, saved) in enumerate(zip(groups, self._groups, strict=True)):
            now = _frozen(group)
            for key in [*saved, *now]:
                if now.get(key) != saved.get(key):
                    raise CaptureError(
                        f"optimizer.param_groups[{i}][{key!r}] is {now.get(key)!r}, but the step was captured with {saved.get(key)!r}, "
                        f"which the graph holds. Set it back, or {_RECAPTURE}."
                    )


class Fingerprint:
    """Addresses of parameters and buffers; gradients and optimizer tensors; flags; hyper-parameters.

    Args:
        body: the step that was captured.
    """

    def __init__(self, body: StepBody) -> None:
        self._body = body
        optimizer_entries = _optimizer_entries(body)
        self._entries = [*_model_entries(body), *optimizer_entries, *_state_entries(body)]
        self._dicts = _dicts(body)
        compared_whole = set(map(id, self._dicts))
        self._attributes = [entry for entry in self._entries if id(entry.holder) not in compared_whole]
        self._empty = [whole for whole in self._dicts if not whole]
        # Views show what a dict holds now; the mark at the end tells when there is one more or fewer.
        self._values = [*(whole.values() for whole in self._dicts if whole), (_END,)]
        self._objects = list(chain.from_iterable(self._values))
        self._settings = settings = Settings(body)
        holders = [entry.holder for entry in self._attributes]
        # `training` is found in a module's own dict.
        self._watch = DictWatch([*self._dicts, *holders, *map(vars, settings.flagged), *body.optimizer.hooks])
        self._movable = list({id(x): x for x in (*settings.trained, *body.model.buffers())}.values())
        self._addresses = list(map(Tensor.data_ptr, self._movable))
        self._grads = list(map(_get_grad, settings.trained))
        # Gradients and an optimizer's tensors are told by identity alone: rebinding their data without replacing them is
        # nobody's habit. Should it happen, the graph goes on writing to what is kept here, and not to memory of others.
        by_identity = [*self._grads, *(entry.found for entry in optimizer_entries)]
        self._kept = [x.untyped_storage() for x in by_identity if isinstance(x, Tensor)]

    @property
    def has_optimizer(self) -> bool:
        """Whether the optimizer is in the graph."""
        return self._settings.reason_outside is None

    def check(self) -> None:
        """Raise unless everything is where and what it was; a ``.grad`` set to None is put back.

        Raises:
            CaptureError: names what moved.
            GraphrtError: names a ``.grad`` that is another tensor.
        """
        if self._watch.may_have_changed:
            self._check_dicts()
            self._settings.check_training()
            self._settings.check_reason_outside()
            self._watch.start()
        self._check_parameters()
        self._settings.check_groups()

    def _check_dicts(self) -> None:
        # Value by value in C, without a look-up a key.
        is_same = all(map(operator.is_, chain.from_iterable(self._values), self._objects)) and not any(self._empty)
        if not is_same or any(entry.holder.get(entry.key) is not entry.found for entry in self._attributes):
            self._name_moved()

    def _check_parameters(self) -> None:
        """What no dict tells: addresses, requires_grad, ``.grad``."""
        if list(map(Tensor.data_ptr, self._movable)) != self._addresses:
            self._name_moved()
        # Two short passes cost less than one that makes a pair of each parameter's flag and gradient.
        self._settings.check_requires_grad()
        if not all(map(operator.is_, map(_get_grad, self._settings.trained), self._grads)):
            self._settings.check_new_grads()
            self._body.gradients.attach()

    def _name_moved(self) -> None:
        addresses = dict(zip(map(id, self._movable), self._addresses, strict=True))
        for entry in self._entries:
            found = entry.holder.get(entry.key)
            if found is None and entry.found is not None:
                raise CaptureError(f"{entry.name} is gone since the step was captured. Put it back, or {_RECAPTURE}.")
            if found is not entry.found:
                kind = "tensor" if isinstance(entry.found, Tensor) else "object"
                raise CaptureError(f"{entry.name} is another {kind} than the one the step was captured with. {entry.advice}")
            if isinstance(found, Tensor) and found.data_ptr() != addresses.get(id(found), found.data_ptr()):
                raise CaptureError(f"{entry.name} has moved to another address since the step was captured. {entry.advice}")
        self._name_added()

    def _name_added(self) -> None:
        known = {(id(entry.holder), entry.key) for entry in self._entries}
        for prefix, module in self._settings.modules:
            for kind in _kinds(module):
                for key in kind:
                    if (id(kind), key) not in known:
                        name = f"{prefix}.{key}" if prefix else key
                        raise CaptureError(f"{name} has appeared since the step was captured. Remove it, or {_RECAPTURE}.")
        raise CaptureError(f"The model's or the optimizer's tensors are in another order than when the step was captured: {_RECAPTURE}.")


def _dicts(body: StepBody) -> list[dict[Any, Any]]:
    """The dicts whose every value has to stay: a module's tensors and children, owned gradients, the optimizer's state."""
    kinds = [kind for module in body.model.modules() for kind in _kinds(module)]
    state = body.optimizer.optimizer.state if body.optimizer.is_in_step else {}
    return [*kinds, body.gradients.owned, state, *state.values()]


def _frozen(group: dict[str, Any]) -> dict[str, Any]:
    """What of a group is baked into a graph: all but what follows at every step, which is None here."""
    return {**group, **_IGNORED, "number of params": len(group["params"])}


def _kinds(module: torch.nn.Module) -> tuple[dict[str, Any], ...]:
    return module._parameters, module._buffers, module._modules


def _model_entries(body: StepBody) -> list[_Entry]:
    advice = f"Change it in place (copy_), or {_RECAPTURE}."
    entries = []
    for prefix, module in body.model.named_modules():
        for kind in _kinds(module):
            entries += [_Entry(f"{prefix}.{key}" if prefix else key, kind, key, value, advice) for key, value in kind.items()]
    owned = body.gradients.owned
    entries += [_Entry(f"{name}.grad", owned, name, value, advice) for name, value in owned.items()]
    return entries


def _optimizer_entries(body: StepBody) -> list[_Entry]:
    """The state of each parameter, and the dicts it is found through: Optimizer.load_state_dict makes new ones."""
    advice = f"Load it with trainer.load_state_dict, which copies in place, or {_RECAPTURE}."
    if not body.optimizer.is_in_step:
        return []
    optimizer = body.optimizer.optimizer
    names = {id(p): name for name, p in body.gradients.named.items()}
    entries = [_Entry("the optimizer's state", vars(optimizer), "state", optimizer.state, advice)]
    for p, state in optimizer.state.items():
        name = f"optimizer.state[{names.get(id(p), '?')}]"
        entries.append(_Entry(name, optimizer.state, p, state, advice))
        entries += [_Entry(f"{name}[{key!r}]", state, key, value, advice) for key, value in state.items() if isinstance(value, Tensor)]
    return entries


def _state_entries(body: StepBody) -> list[_Entry]:
    advice = f"Move the model before training, or {_RECAPTURE}."
    return [
        _Entry(f"the quantization state's {key[1:]}", vars(state), key, value, advice)
        for state in body.states
        for key, value in vars(state).items()
        if isinstance(value, torch.Tensor)
    ]
