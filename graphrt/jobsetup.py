"""From settings to a device and a Trainer on it."""

import torch
from torch import nn

from graphrt.checkpoint import checkpoint
from graphrt.convert import convert_to_float8_training
from graphrt.llama import Llama, is_block_linear, make_loss_fn
from graphrt.recipe import DelayedScaling
from graphrt.settings import InputError, Settings
from graphrt.trainer import Trainer

__all__ = ["build_trainer", "make_optimizer", "resolve_device"]

_MAX_GRAD_NORM = 1.0
_WEIGHT_DECAY = 0.1
_BETAS = (0.9, 0.95)
_FP8_CAPABILITY = (8, 9)


def resolve_device(settings: Settings) -> torch.device:
    """The device to train on.

    Raises:
        InputError: it is not there, or cannot do what the settings ask.
    """
    name = settings.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InputError(f"--device must be auto, cpu, cuda or cuda:N, got {name!r}.") from error
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"--device must be auto, cpu, cuda or cuda:N, got {name!r}.")
    return _check_gpu(settings, device) if device.type == "cuda" else device


def _check_gpu(settings: Settings, device: torch.device) -> torch.device:
    """The device with its index, made the current one."""
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (device.index or 0) >= num_gpus:
        raise InputError(f"--device {device} is not there: torch {torch.__version__} sees {num_gpus} GPUs. Use --device cpu.")
    device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    capability = torch.cuda.get_device_capability(device)
    if settings.precision == "fp8" and capability < _FP8_CAPABILITY:
        raise InputError(
            f"--precision fp8 needs a GPU of compute capability 8.9 or later, {device} has {capability}. Use --precision bf16."
        )
    torch.cuda.set_device(device)
    return device


def _autocast_dtype(settings: Settings, device: torch.device) -> torch.dtype | None:
    # What FP8 leaves alone runs in bf16 on a GPU. Most CPUs emulate bf16 at a tenth of fp32's speed, so there it runs in fp32.
    if settings.precision == "fp32" or (settings.precision == "fp8" and device.type == "cpu"):
        return None
    return torch.bfloat16


def build_trainer(settings: Settings, device: torch.device) -> Trainer:
    """A fresh model, its weights drawn from the seed, in a Trainer with AdamW."""
    torch.manual_seed(settings.seed)
    model = Llama(settings.shape, settings.seq_len, checkpoint if settings.checkpointing == "block" else None).to(device)
    if settings.precision == "fp8":
        recipe = DelayedScaling(
            backward_fast_accum=settings.backward_accum == "fast", keep_weight_transpose=settings.weight_transpose == "kept"
        )
        convert_to_float8_training(model, recipe=recipe, module_filter_fn=is_block_linear)
    return Trainer(
        model,
        make_optimizer(model, settings.lr),
        make_loss_fn(device.type, _autocast_dtype(settings, device)),
        mode=settings.mode,
        grad_accum_steps=settings.grad_accum,
        max_grad_norm=_MAX_GRAD_NORM,
    )


def make_optimizer(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """AdamW with weight decay on matrices alone."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": _WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=_BETAS, fused=True)
