"""Converting a model in place: nn.Linear to Float8Linear and back."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from graphrt.errors import RecipeError
from graphrt.linear import Float8Linear, LinearSlots
from graphrt.recipe import DelayedScaling
from graphrt.state import QuantizationState

__all__ = [
    "ConversionReport",
    "conversion_report",
    "convert_from_float8_training",
    "convert_to_float8_training",
    "quantization_state",
    "wrapped_part",
]

logger = logging.getLogger("graphrt")

ModuleFilter = Callable[[nn.Module, str], bool]

#: What FP8 GEMMs ask of in_features and out_features.
DIM_MULTIPLE = 16
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DataParallel")


@dataclass(frozen=True)
class ConversionReport:
    """What a conversion did: names of the converted linears, and of what was left with the reason."""

    converted: tuple[str, ...]
    skipped: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        lines = [f"converted {len(self.converted)} linears to FP8, left {len(self.skipped)} modules"]
        return "\n".join(lines + [f"  left {name or 'the model itself'}: {reason}" for name, reason in self.skipped])


def convert_to_float8_training(
    model: nn.Module, *, recipe: DelayedScaling | None = None, module_filter_fn: ModuleFilter | None = None
) -> nn.Module:
    """Convert a model's nn.Linear modules to FP8 training, in place; names and state_dict keys stay.

    Args:
        model: any module, also a bare nn.Linear.
        recipe: how scales follow from amaxes; ``DelayedScaling()`` without one.
        module_filter_fn: called with (module, name) for each convertible nn.Linear; False leaves it. Without a filter,
            linears that FP8 GEMMs refuse (in_features or out_features no multiple of 16) are left; a filter that
            accepts one raises.

    Returns:
        The model. `quantization_state` gives its scales, `conversion_report` what was converted and what was left, and why.

    Raises:
        RecipeError: nothing to convert, a layer the filter accepted that FP8 GEMMs refuse, or a wrapped model. Nothing
            has been changed.
        ValueError: the model, or part of it, is converted already.
    """
    recipe = recipe if recipe is not None else DelayedScaling()
    if not isinstance(recipe, DelayedScaling):
        raise RecipeError(f"recipe must be a graphrt.DelayedScaling, got {type(recipe).__name__}. Pass DelayedScaling().")
    _refuse_wrapped(model)
    _refuse_converted(model)
    linears, skipped = _choose(model, module_filter_fn)
    if not linears:
        reasons = "; ".join(f"{name or 'the model'}: {reason}" for name, reason in skipped[:5]) or "it holds no nn.Linear"
        raise RecipeError(f"There is nothing to convert in {type(model).__name__} ({reasons}). Check the model and module_filter_fn.")
    report = ConversionReport(tuple(linears), tuple(skipped))
    _bind(linears, recipe, report)
    logger.info("%s", report)
    return model


def wrapped_part(model: nn.Module) -> tuple[str, str] | None:
    """(name, wrapper) of the first part of a model that a data-parallel wrapper holds; None for a plain model."""
    for name, module in model.named_modules():
        wrapper = next((cls.__name__ for cls in type(module).__mro__ if cls.__name__ in _WRAPPERS), None)
        if wrapper is not None:
            return name or "The model", wrapper
    return None


def _refuse_wrapped(model: nn.Module) -> None:
    wrapped = wrapped_part(model)
    if wrapped is not None:
        raise RecipeError(f"{wrapped[0]} is wrapped in {wrapped[1]}, which is not supported yet. Convert the plain model.")


def _refuse_converted(model: nn.Module) -> None:
    done = [name for name, module in model.named_modules() if isinstance(module, Float8Linear)]
    if done:
        raise ValueError(
            f"{done[0] or 'The model'} is a Float8Linear already ({len(done)} in all). Call convert_from_float8_training(model) first."
        )


def _choose(model: nn.Module, module_filter_fn: ModuleFilter | None) -> tuple[dict[str, nn.Linear], list[tuple[str, str]]]:
    """The linears to convert by name, and what is left with the reason."""
    linears: dict[str, nn.Linear] = {}
    skipped = []
    for name, module in model.named_modules():
        reason = _reason_to_leave(module, name, module_filter_fn)
        if reason is not None:
            skipped.append((name, reason))
        elif type(module) is nn.Linear:
            linears[name] = module
    return linears, skipped


def _reason_to_leave(module: nn.Module, name: str, module_filter_fn: ModuleFilter | None) -> str | None:
    """Why a module that multiplies by a matrix stays as it is; None for one to convert, or that is nothing of the kind."""
    if type(module) is not nn.Linear:
        return _reason_not_a_linear(module)
    weight = module._parameters.get("weight")
    if weight is None:
        return "its weight is not a plain parameter (weight norm or the like)"
    if weight.dtype not in _DTYPES:
        return f"its weight is {weight.dtype}, FP8 needs fp32, bf16 or fp16"
    if type(weight) is not nn.Parameter and type(weight.data) is not torch.Tensor:
        return f"its weight is of type {type(weight).__name__}"
    refusal = _reason_gemms_refuse(module)
    if module_filter_fn is None:
        return refusal
    if not module_filter_fn(module, name):
        return "module_filter_fn left it"
    if refusal is not None:
        raise RecipeError(f"module_filter_fn accepted {name or 'the model'}, but {refusal}. Let the filter return False for it.")
    return None


def _reason_gemms_refuse(module: nn.Linear) -> str | None:
    if module.in_features % DIM_MULTIPLE or module.out_features % DIM_MULTIPLE or not module.in_features or not module.out_features:
        return (
            f"in_features={module.in_features}, out_features={module.out_features} are not both positive multiples of {DIM_MULTIPLE}, "
            "which FP8 GEMMs need"
        )
    return None


def _reason_not_a_linear(module: nn.Module) -> str | None:
    """For modules that look like a linear to a reader, but are not one that can be converted."""
    if isinstance(module, nn.Linear):
        return f"it is of type {type(module).__name__}, not exactly nn.Linear: its own forward may be read or replaced by its owner"
    if isinstance(module, nn.MultiheadAttention):
        return "nn.MultiheadAttention multiplies by its parameters itself, without calling a linear"
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return None
    weight = module._parameters.get("weight")
    if weight is not None and weight.dim() == 2:
        return f"{type(module).__name__} is not an nn.Linear"
    return None


def _bind(linears: dict[str, nn.Linear], recipe: DelayedScaling, report: ConversionReport) -> None:
    def slot(name: str, kind: str) -> str:
        return f"{name}.{kind}" if name else kind

    forward_slots = [slot(name, kind) for name in linears for kind in ("input", "weight")]
    backward_slots = [slot(name, "grad_output") for name in linears]
    device = next(iter(linears.values())).weight.device
    state = QuantizationState(recipe, forward_slots, backward_slots, "cpu" if device.type == "meta" else device)
    state.conversion = report
    for i, module in enumerate(linears.values()):
        # The object stays, so references, hooks and parameter names held elsewhere stay right.
        module.__class__ = Float8Linear
        assert isinstance(module, Float8Linear)
        module.bind(state, LinearSlots(2 * i, 2 * i + 1, len(forward_slots) + i))


def convert_from_float8_training(model: nn.Module) -> nn.Module:
    """Turn every Float8Linear back into an nn.Linear, in place; returns the model. Parameters are untouched.

    Raises:
        ValueError: nothing in the model is converted.
    """
    linears = list(_float8_linears(model))
    if not linears:
        raise ValueError(f"{type(model).__name__} holds no Float8Linear. Convert it with convert_to_float8_training(model) first.")
    for linear in linears:
        linear.unbind()
        linear.__class__ = nn.Linear  # pyright: ignore[reportAttributeAccessIssue]
    return model


def quantization_state(model: nn.Module) -> QuantizationState:
    """The one quantization state of a converted model.

    Raises:
        ValueError: the model is not converted, or holds parts that were converted separately.
    """
    states = list(dict.fromkeys(linear.quantization_state for linear in _float8_linears(model)))
    if not states:
        raise ValueError(f"{type(model).__name__} holds no Float8Linear. Convert it with convert_to_float8_training(model) first.")
    if len(states) > 1:
        raise ValueError(
            f"{type(model).__name__} holds parts converted separately, with {len(states)} quantization states. "
            "Convert the whole model in one call."
        )
    return states[0]


def conversion_report(model: nn.Module) -> ConversionReport:
    """What converting the model did, and what it left and why.

    Raises:
        ValueError: as `quantization_state`.
    """
    return quantization_state(model).conversion


def _float8_linears(model: nn.Module) -> Iterator[Float8Linear]:
    return (module for module in model.modules() if isinstance(module, Float8Linear))
