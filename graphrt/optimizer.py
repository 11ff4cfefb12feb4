"""Applying a torch optimizer from inside the step body, where nothing may be read on the host.

A captured step can hold an optimizer only if its learning rate, weight decay, step count and the decision to skip a
non-finite step all live on the device. Torch's own classes do not go that far (SGD bakes its learning rate, the fused
kernels bake the weight decay), so for an allow-list of exact classes the update is issued here: on the optimizer's own
state tensors, through torch's fused kernels where they fit, reading device copies of what ``param_groups`` says. Any
other optimizer runs by its own ``step()`` after the captured part, at the price of one host read a step.

Both the eager and the captured path issue this code, so that they agree to the last bit.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from graphrt.kernels.multi_tensor import TableCache, adamw_

__all__ = ["TRACKED_KEYS", "UNREAD_KEYS", "LiveGroup", "Norms", "StepOptimizer", "scale_"]

#: As torch.nn.utils.clip_grad_norm_: the clip coefficient is ``max_grad_norm / (grad_norm + CLIP_EPS)``, at most 1.
CLIP_EPS = 1e-6

#: Hyper-parameters that follow ``param_groups`` at every step, captured or not.
TRACKED_KEYS = ("lr", "weight_decay")

#: Keys that schedulers leave in a group and no optimizer reads in its update.
UNREAD_KEYS = {"initial_lr", "max_lr", "min_lr", "param_names", "max_momentum", "base_momentum", "swa_lr"}

_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Hooks of all optimizers at once, by torch.optim.optimizer.register_optimizer_step_pre_hook and its sibling.
_GLOBAL_HOOKS = (_global_optimizer_pre_hooks, _global_optimizer_post_hooks)

Group = dict[str, Any]


@dataclass
class LiveGroup:
    """Device copies of one group's learning rate and weight decay, 0-dim fp32."""

    lr: Tensor
    weight_decay: Tensor
    written: dict[str, float | None] = field(default_factory=dict)

    def refresh(self, group: Group) -> None:
        """Copy what changed in ``group`` since the last call."""
        for key, tensor in (("lr", self.lr), ("weight_decay", self.weight_decay)):
            value = group.get(key, 0.0)
            if isinstance(value, Tensor):
                tensor.copy_(value, non_blocking=True)
                self.written[key] = None
            elif self.written.get(key) != value:
                tensor.fill_(value)
                self.written[key] = value


@dataclass(frozen=True)
class Norms:
    """The gradient norm of a step and what follows from it, on the device; each is computed once."""

    grad_norm: Tensor  # 0-dim fp32
    max_grad_norm: Tensor  # 0-dim fp32, inf for no clipping

    @cached_property
    def clip_coef(self) -> Tensor:
        """0-dim fp32, multiplies the gradients."""
        return (self.max_grad_norm / (self.grad_norm + CLIP_EPS)).clamp(max=1.0)

    @cached_property
    def is_skipped(self) -> Tensor:
        """0-dim bool: the norm is not finite, and nothing may change."""
        # A finite number alone gives 0. Two kernels where isfinite and its negation take five.
        return (self.grad_norm - self.grad_norm) != 0

    @cached_property
    def found_inf(self) -> Tensor:
        """0-dim fp32, 1.0 where `is_skipped`, as torch's fused kernels take it."""
        return self.is_skipped.float()


@dataclass(frozen=True)
class _Update:
    """What one group's rule needs: tensors in parallel lists, and the live values."""

    group: Group
    live: LiveGroup
    params: list[Tensor]
    grads: list[Tensor]
    states: list[dict[str, Any]]
    norms: "Norms"
    tables: TableCache
    slot: tuple[int, torch.dtype]  # names this list of tensors among the optimizer's

    def column(self, key: str) -> list[Tensor]:
        return [state[key] for state in self.states]


def scale_(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiply each tensor by a 0-dim ``factor`` in place, without reading it on the host.

    On CUDA in one launch. On a CPU torch's foreach reads the factor, which a recording refuses as a graph would.
    """
    if tensors and tensors[0].is_cuda:
        torch._foreach_mul_(tensors, factor)
        return
    for x in tensors:
        x.mul_(factor)


def _scaled(tensors: list[Tensor], factor: Tensor) -> list[Tensor]:
    """As `scale_`, into new tensors."""
    if tensors and tensors[0].is_cuda:
        return list(torch._foreach_mul(tensors, factor))
    return [x * factor for x in tensors]


def _count_step(u: _Update) -> None:
    torch._foreach_add_(u.column("step"), [1.0 - u.norms.found_inf] * len(u.params))


def _decay(u: _Update) -> None:
    """Decoupled weight decay: ``p *= 1 - lr * weight_decay`` (Loshchilov and Hutter, 2019, algorithm 2)."""
    factor = torch.where(u.norms.is_skipped, torch.ones_like(u.norms.found_inf), 1.0 - u.live.lr * u.live.weight_decay)
    scale_(u.params, factor)


def _coupled_grads(u: _Update) -> list[Tensor]:
    """Gradients with L2 regularisation in them: ``clip * g + weight_decay * p``; the sign turned for maximize."""
    sign = -u.norms.clip_coef if u.group.get("maximize") else u.norms.clip_coef
    grads = _scaled(u.grads, sign)
    torch._foreach_add_(grads, _scaled(u.params, u.live.weight_decay))
    return grads


def _adamw(u: _Update) -> None:
    """AdamW through graphrt's kernel: clip, decay and update in one pass over memory."""
    amsgrad = u.group["amsgrad"]
    moments = [u.column("exp_avg"), u.column("exp_avg_sq"), *([u.column("max_exp_avg_sq")] if amsgrad else [])]
    adamw_(
        u.tables.get(u.slot, u.params, u.grads, *moments),
        u.tables.get((*u.slot, "steps"), u.column("step")),
        lr=u.live.lr,
        weight_decay=u.live.weight_decay,
        grad_norm=u.norms.grad_norm,
        max_grad_norm=u.norms.max_grad_norm,
        beta1=float(u.group["betas"][0]),
        beta2=float(u.group["betas"][1]),
        eps=u.group["eps"],
        amsgrad=amsgrad,
        maximize=bool(u.group["maximize"]),
    )


def _adam(u: _Update) -> None:
    """Adam with L2 regularisation through torch's fused kernel; the regularisation here, because the kernel would bake it."""
    _count_step(u)
    torch._fused_adam_(
        u.params,
        _coupled_grads(u),
        u.column("exp_avg"),
        u.column("exp_avg_sq"),
        u.column("max_exp_avg_sq") if u.group["amsgrad"] else [],
        u.column("step"),
        lr=u.live.lr,
        beta1=float(u.group["betas"][0]),
        beta2=float(u.group["betas"][1]),
        weight_decay=0.0,
        eps=u.group["eps"],
        amsgrad=u.group["amsgrad"],
        maximize=False,
        found_inf=u.norms.found_inf,
    )


def _adam_keys(group: Group) -> list[str]:
    return ["step", "exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else [])]


def _sgd(u: _Update) -> None:
    """SGD with momentum; a momentum buffer of zeros makes the first step the same as the later ones."""
    has_momentum = u.group["momentum"] != 0
    torch._fused_sgd_(
        u.params,
        _coupled_grads(u),
        u.column("momentum_buffer") if has_momentum else [],
        weight_decay=0.0,
        momentum=u.group["momentum"],
        lr=u.live.lr,
        dampening=0.0,
        nesterov=u.group["nesterov"],
        maximize=False,
        is_first_step=False,
        found_inf=u.norms.found_inf,
    )


def _sgd_keys(group: Group) -> list[str]:
    return ["momentum_buffer"] if group["momentum"] != 0 else []


def _keep(u: _Update, old: Tensor, new: Tensor) -> None:
    """``old`` becomes ``new``, except in a skipped step."""
    old.copy_(torch.where(u.norms.is_skipped, old, new))


def _rmsprop(u: _Update) -> None:
    """RMSprop (Graves, 2013), plain or centered, with or without momentum."""
    _count_step(u)
    alpha, eps, momentum = u.group["alpha"], u.group["eps"], u.group["momentum"]
    for p, grad, state in zip(u.params, _coupled_grads(u), u.states, strict=True):
        square_avg = state["square_avg"] * alpha + (1 - alpha) * grad * grad
        mean = torch.lerp(state["grad_avg"], grad, 1 - alpha) if u.group["centered"] else None
        spread = square_avg if mean is None else square_avg - mean * mean
        update = grad / (spread.sqrt() + eps)
        if momentum > 0:
            update = state["momentum_buffer"] * momentum + update
            _keep(u, state["momentum_buffer"], update)
        _keep(u, p, p - u.live.lr * update)
        _keep(u, state["square_avg"], square_avg)
        if mean is not None:
            _keep(u, state["grad_avg"], mean)


def _rmsprop_keys(group: Group) -> list[str]:
    return ["step", "square_avg", *(["momentum_buffer"] if group["momentum"] > 0 else []), *(["grad_avg"] if group["centered"] else [])]


def _orthogonalize(grad: Tensor, coefficients: tuple[float, float, float], num_steps: int, eps: float) -> Tensor:
    """The nearest semi-orthogonal matrix, by Newton-Schulz iterations in bf16 (Jordan et al., Muon, 2024)."""
    a, b, c = coefficients
    is_tall = grad.shape[0] > grad.shape[1]
    x = (grad.T if is_tall else grad).bfloat16()
    x = x / x.norm().clamp(min=eps)
    for _ in range(num_steps):
        gram = x @ x.T
        # addmm rounds once: small singular values are amplified several hundredfold, and so is each rounding.
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    # In fp32, or the learning rate, a 0-dim tensor, would be multiplied in bf16.
    return (x.T if is_tall else x).float()


def _muon(u: _Update) -> None:
    """Muon: momentum, orthogonalized, with decoupled weight decay."""
    momentum, adjust = u.group["momentum"], u.group["adjust_lr_fn"]
    _decay(u)
    for p, raw, state in zip(u.params, u.grads, u.states, strict=True):
        grad = raw * u.norms.clip_coef
        buffer = torch.lerp(state["momentum_buffer"], grad, 1 - momentum)
        update = torch.lerp(grad, buffer, momentum) if u.group["nesterov"] else buffer
        update = _orthogonalize(update, u.group["ns_coefficients"], u.group["ns_steps"], u.group["eps"])
        _keep(u, p, p - u.live.lr * _muon_lr_ratio(adjust, p) * update)
        _keep(u, state["momentum_buffer"], buffer)


def _muon_lr_ratio(adjust: str | None, p: Tensor) -> float:
    rows, cols = p.shape
    if adjust == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, cols))
    return math.sqrt(max(1.0, rows / cols)) if adjust in (None, "original") else 1.0


def _muon_keys(_group: Group) -> list[str]:
    return ["momentum_buffer"]


def _zero_step(p: Tensor) -> Tensor:
    return torch.zeros((), dtype=torch.float32, device=p.device)


@dataclass(frozen=True)
class _Rule:
    """How one optimizer class is issued inside the step."""

    update: Callable[[_Update], None]
    keys: Callable[[Group], list[str]]  # of a parameter's state, as torch names them


_RULES: dict[type, Callable[[Group], _Rule]] = {
    torch.optim.AdamW: lambda group: _Rule(_adamw, _adam_keys),
    torch.optim.Adam: lambda group: _Rule(_adamw if group.get("decoupled_weight_decay") else _adam, _adam_keys),
    torch.optim.SGD: lambda group: _Rule(_sgd, _sgd_keys),
    torch.optim.RMSprop: lambda group: _Rule(_rmsprop, _rmsprop_keys),
}
if hasattr(torch.optim, "Muon"):
    _RULES[torch.optim.Muon] = lambda group: _Rule(_muon, _muon_keys)


class StepOptimizer:
    """One optimizer as the step body sees it.

    Args:
        optimizer: any torch optimizer. Its ``state`` and ``param_groups`` stay the only ones: schedulers, loggers and
            ``optimizer.state_dict()`` keep working.
        device: where the live copies of the hyper-parameters go.
    """

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        self.optimizer = optimizer
        self.device = device
        self._fixed_reason = _fixed_reason_outside(optimizer)
        self.tables = TableCache()
        self._live: list[LiveGroup] = []

    @property
    def reason_outside(self) -> str | None:
        """Why the optimizer runs after the step by its own ``step()``; None if it is issued inside. Hooks may come later."""
        return self._fixed_reason or _changeable_reason_outside(self.optimizer)

    @property
    def hooks(self) -> list[dict[Any, Any]]:
        """Where step hooks would be: the optimizer's own dicts of them, and those of all optimizers."""
        return [self.optimizer._optimizer_step_pre_hooks, self.optimizer._optimizer_step_post_hooks, *_GLOBAL_HOOKS]

    @property
    def is_in_step(self) -> bool:
        """Whether the update is issued inside the step; else the optimizer's own ``step()`` runs after it."""
        return self.reason_outside is None

    def refresh(self) -> None:
        """Bring the device copies of learning rate and weight decay up to date with ``param_groups``."""
        groups = self.optimizer.param_groups
        while len(self._live) < len(groups):
            self._live.append(LiveGroup(torch.zeros((), device=self.device), torch.zeros((), device=self.device)))
        del self._live[len(groups) :]
        for live, group in zip(self._live, groups, strict=True):
            live.refresh(group)

    def prepare(self) -> None:
        """Create the state of parameters that have a gradient and none yet, and keep step counts on the device."""
        if not self.is_in_step:
            return
        for group in self.optimizer.param_groups:
            keys = _RULES[type(self.optimizer)](group).keys(group)
            for p in group["params"]:
                if p.grad is not None:
                    self._prepare(p, keys)

    def _prepare(self, p: Tensor, keys: list[str]) -> None:
        state = self.optimizer.state[p]
        for key in keys:
            if key not in state:
                state[key] = _zero_step(p) if key == "step" else torch.zeros_like(p, memory_format=torch.preserve_format)
        step = state.get("step")
        if step is not None and (not isinstance(step, Tensor) or step.device != p.device):
            # Torch keeps the count on the host unless the optimizer is fused or capturable.
            state["step"] = torch.as_tensor(float(step), dtype=torch.float32, device=p.device)
        if "momentum_buffer" in state and state["momentum_buffer"] is None:
            state["momentum_buffer"] = torch.zeros_like(p)

    def apply(self, norms: Norms) -> None:
        """Update all parameters that have a gradient, with device work alone.

        A norm that is not finite leaves parameters, state and step counts as they are. Gradients stay unclipped.
        """
        for i, (group, live) in enumerate(zip(self.optimizer.param_groups, self._live, strict=True)):
            update = _RULES[type(self.optimizer)](group).update
            for params in _by_dtype(group):
                grads = [p.grad for p in params if p.grad is not None]
                states = [self.optimizer.state[p] for p in params]
                update(_Update(group, live, params, grads, states, norms, self.tables, (i, params[0].dtype)))
        # What LRScheduler looks at to see that the optimizer ran before it.
        self.optimizer._opt_called = True  # type: ignore[attr-defined]


def _by_dtype(group: Group) -> list[list[Tensor]]:
    """The group's parameters that have a gradient, one list a dtype, as the fused kernels want them."""
    lists: dict[torch.dtype, list[Tensor]] = {}
    for p in group["params"]:
        if p.grad is not None:
            lists.setdefault(p.dtype, []).append(p)
    return list(lists.values())


def _fixed_reason_outside(optimizer: Optimizer) -> str | None:
    """Why the optimizer cannot be issued inside the step; None if it can."""
    name = type(optimizer).__name__
    if type(optimizer) not in _RULES:
        return f"{name} is not on the list of optimizers that can be captured ({', '.join(cls.__name__ for cls in _RULES)})"
    if type(optimizer) is torch.optim.AdamW and any(
        p.dtype not in _KERNEL_DTYPES for group in optimizer.param_groups for p in group["params"]
    ):
        return f"{name} holds parameters of another dtype than fp32, bf16 and fp16"
    if any(p.is_complex() or p.is_sparse for group in optimizer.param_groups for p in group["params"]):
        return f"{name} holds complex or sparse parameters"
    return None


def _changeable_reason_outside(optimizer: Optimizer) -> str | None:
    """As `_fixed_reason_outside`, for what may change between two steps."""
    name = type(optimizer).__name__
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks or any(_GLOBAL_HOOKS):
        return f"{name} has step hooks, which are Python and run at every step"
    if any(group.get("dampening") for group in optimizer.param_groups):
        return f"{name} with dampening treats its first step differently"
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return f"{name} is differentiable=True"
    return None
