"""Saving and loading everything a resumed run needs."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from graphrt.optimizer import UNREAD_KEYS, StepOptimizer
from graphrt.state import QuantizationState
from graphrt.step import Gradients

__all__ = ["load_trainer_state", "trainer_state_dict"]

VERSION = 1
_KEYS = ("version", "model", "optimizer", "quantization_state", "gradients", "rng", "counts")


def trainer_state_dict(
    model: nn.Module,
    optimizer: Optimizer,
    state: QuantizationState | None,
    gradients: Gradients,
    device: torch.device,
    counts: dict[str, int],
) -> dict[str, Any]:
    """CPU copies of everything, plain tensors and numbers in dicts and lists.

    Of gradients only the names: which parameters have one decides which the optimizer touches.
    """
    rng = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        rng["cuda"] = torch.cuda.get_rng_state(device)
    return _to_cpu(
        {
            "version": VERSION,
            "quantization_state": None if state is None else state.state_dict(),
            "model": dict(model.state_dict()),
            "optimizer": optimizer.state_dict(),
            "gradients": gradients.names,
            "rng": rng,
            "counts": counts,
        }
    )


def _to_cpu(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _to_cpu(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_to_cpu(item) for item in value)
    return copy.deepcopy(value)


def load_trainer_state(
    saved: dict[str, Any],
    model: nn.Module,
    optimizer: StepOptimizer,
    state: QuantizationState | None,
    gradients: Gradients,
    device: torch.device,
    *,
    is_captured: bool,
) -> dict[str, int]:
    """Copy ``saved`` in, in place; returns its counts.

    Args:
        is_captured: a graph holds the gradients that exist, so none of them is dropped.

    Raises:
        ValueError: it does not fit; nothing has been changed.
    """
    _check(saved, model, optimizer.optimizer, state, gradients)
    model.load_state_dict(saved["model"])
    _load_optimizer(saved["optimizer"], optimizer)
    _load_gradients(saved["gradients"], gradients, keep=is_captured)
    if state is not None:
        state.load_state_dict(saved["quantization_state"])
    torch.set_rng_state(saved["rng"]["cpu"])
    if device.type == "cuda" and "cuda" in saved["rng"]:
        torch.cuda.set_rng_state(saved["rng"]["cuda"], device)
    return {key: int(value) for key, value in saved["counts"].items()}


def _check(saved: Any, model: nn.Module, optimizer: Optimizer, state: QuantizationState | None, gradients: Gradients) -> None:
    missing = [key for key in _KEYS if not isinstance(saved, dict) or key not in saved]
    if missing:
        raise ValueError(f"The trainer state lacks {', '.join(missing)}. Pass what Trainer.state_dict() returned.")
    if saved["version"] != VERSION:
        raise ValueError(f"The trainer state has version {saved['version']!r}, expected {VERSION}. Load it with the graphrt that wrote it.")
    _check_model(saved["model"], model)
    _check_optimizer(saved["optimizer"], optimizer)
    if (saved["quantization_state"] is None) != (state is None):
        had, has = ("a plain", "a converted") if state is not None else ("a converted", "a plain")
        raise ValueError(f"The trainer state is of {had} model, this is {has} one. Convert the model as it was when saved.")
    if state is not None:
        state._check_state_dict(saved["quantization_state"])
    unknown = [name for name in saved["gradients"] if name not in gradients.named]
    if unknown:
        raise ValueError(
            f"The trainer state has a gradient of {unknown[0]}, which this trainer lacks. Make the optimizer as it was when saved."
        )


def _check_model(saved: dict[str, Any], model: nn.Module) -> None:
    ours = model.state_dict()
    for name in [*ours, *saved]:
        if name not in saved or name not in ours:
            where = "the trainer state" if name not in saved else "this model"
            raise ValueError(f"{name} is missing from {where}. Load into the model that was saved.")
        if isinstance(ours[name], Tensor) and (ours[name].shape != saved[name].shape or ours[name].dtype != saved[name].dtype):
            raise ValueError(
                f"{name} is {saved[name].dtype} {list(saved[name].shape)} in the trainer state, and {ours[name].dtype} "
                f"{list(ours[name].shape)} in this model. Load into the model that was saved."
            )


def _check_optimizer(saved: dict[str, Any], optimizer: Optimizer) -> None:
    ours, theirs = optimizer.param_groups, saved["param_groups"]
    sizes, saved_sizes = [len(group["params"]) for group in ours], [len(group["params"]) for group in theirs]
    if sizes != saved_sizes:
        raise ValueError(
            f"The optimizer has groups of {sizes} parameters, the trainer state {saved_sizes}. Make the optimizer as it was when saved."
        )
    for i, (group, other) in enumerate(zip(ours, theirs, strict=True)):
        differing = sorted((set(group) ^ set(other)) - UNREAD_KEYS)
        if differing:
            raise ValueError(
                f"The optimizer's group {i} has {differing} where the trainer state has not, or the other way round. "
                "Use the same optimizer class."
            )
    for p, entry in _pairs(saved, optimizer):
        for key, value in entry.items():
            if isinstance(value, Tensor) and value.dim() and value.shape != p.shape and value.numel() == p.numel():
                raise ValueError(
                    f"The optimizer's {key} has shape {list(value.shape)}, expected {list(p.shape)}. Load into the model that was saved."
                )


def _pairs(saved: dict[str, Any], optimizer: Optimizer) -> list[tuple[Tensor, dict[str, Any]]]:
    """(parameter, its saved state), by position as torch numbers them."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    indices = [i for group in saved["param_groups"] for i in group["params"]]
    return [(p, saved["state"][i]) for p, i in zip(params, indices, strict=True) if i in saved["state"]]


@torch.no_grad()
def _load_optimizer(saved: dict[str, Any], step_optimizer: StepOptimizer) -> None:
    """As ``Optimizer.load_state_dict``, but into the tensors that are there: a captured graph knows their addresses."""
    optimizer = step_optimizer.optimizer
    pairs = _pairs(saved, optimizer)
    kept = {p for p, _ in pairs}
    for p in [p for p in optimizer.state if p not in kept]:
        if step_optimizer.is_in_step:
            _reset(optimizer.state[p])
        else:
            del optimizer.state[p]
    on_device = {p: bool(group.get("fused") or group.get("capturable")) for group in saved["param_groups"] for p in group["params"]}
    is_on_device = dict(zip((id(p) for group in optimizer.param_groups for p in group["params"]), on_device.values(), strict=True))
    for p, entry in pairs:
        current = optimizer.state[p]
        for key in [key for key in current if key not in entry]:
            del current[key]
        for key, value in entry.items():
            # A step count stays on the host where the optimizer's own step() reads it there.
            device = p.device if key != "step" or is_on_device[id(p)] else torch.device("cpu")
            current[key] = _load_value(current.get(key), value, device)
    for group, other in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        group.update({key: copy.deepcopy(value) for key, value in other.items() if key != "params"})


def _reset(state: dict[str, Any]) -> None:
    """Back to what a parameter's first step starts from: zeros, for every rule that runs inside the step."""
    for value in state.values():
        if isinstance(value, Tensor):
            value.zero_()


@torch.no_grad()
def _load_gradients(names: list[str], gradients: Gradients, *, keep: bool) -> None:
    """Have gradients where the saved run had some; their values do not matter, every step zeroes them."""
    for name, p in gradients.named.items():
        if name in names and name not in gradients.owned:
            p.grad = torch.zeros_like(p)
        elif name not in names and not keep:
            gradients.forget(name)
    gradients.adopt()


def _load_value(current: Any, value: Any, device: torch.device) -> Any:
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    if isinstance(current, Tensor) and current.shape == value.shape and current.dtype == value.dtype:
        return current.copy_(value)
    return value.to(device, copy=True)
