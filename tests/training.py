"""Small models, training loops by hand, and bitwise comparison of what they leave behind."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint as torch_checkpoint
from torch import Tensor, nn

import graphrt
from graphrt import kernels

HISTORY = 3
NUM_STEPS = HISTORY + 2
WIDTH, TOKENS = 32, 16
RECIPE = graphrt.DelayedScaling(amax_history_len=HISTORY)

Forward = Callable[..., Tensor]


class Block(nn.Module):
    """Two linears around a GELU, with a residual."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def branch(self, x: Tensor) -> Tensor:
        """Without the residual, so that two siblings make a sum of no more than two gradients, whose order leaves no bits."""
        return self.down(F.gelu(self.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x)


class Net(nn.Module):
    """A stack of blocks; ``forward`` is one plain pass."""

    def __init__(self, num_blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def make_net(
    num_blocks: int = 3, *, seed: int = 0, recipe: graphrt.DelayedScaling = RECIPE, device: torch.device | str = "cpu", dtype: Any = None
) -> nn.Module:
    torch.manual_seed(seed)
    net = Net(num_blocks).to(device=device, dtype=dtype)
    return graphrt.convert_to_float8_training(net, recipe=recipe)


def make_batch(step: int, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32, shape: Sequence[int] = ()) -> Tensor:
    """Other values and another magnitude each step, so that every update moves every scale."""
    generator = torch.Generator().manual_seed(1000 + step)
    x = torch.randn(*(shape or (TOKENS, WIDTH)), generator=generator) * (1.0 + 0.7 * step)
    return x.to(device=device, dtype=dtype)


def state_values(state: graphrt.QuantizationState) -> dict[str, Tensor]:
    """Copies of scales, histories and counts as they are, without a flush."""
    return {
        **{name: getattr(state, f"_{name}").detach().clone() for name in ("scale", "scale_inv", "amax_history", "num_nonfinite")},
        "updates": torch.tensor([state.forward_updates, state.backward_updates]),
        "num_updates": state._num_updates.detach().clone(),
        "requested": torch.tensor(state.backward_update_requested),
    }


def grads(model: nn.Module) -> dict[str, Tensor]:
    return {f"{name}.grad": p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}


@torch.no_grad()
def descend(model: nn.Module, lr: float = 0.02) -> None:
    for p in model.parameters():
        if p.grad is not None:
            p -= lr * p.grad
            p.grad = None


def train(
    model: nn.Module, forward: Forward, *, num_steps: int = NUM_STEPS, region: Any = graphrt.fp8_autocast, **batch: Any
) -> list[dict[str, Tensor]]:
    """Steps by hand; what each left behind: output, loss, gradients (the input's too), and the state before its flush."""
    state = graphrt.quantization_state(model)
    trajectory = []
    for step in range(num_steps):
        x = make_batch(step, **batch).requires_grad_()
        with region():
            y = forward(model, x)
            loss = y.float().square().mean()
        loss.backward()
        assert x.grad is not None
        trajectory.append({"y": y.detach(), "loss": loss.detach(), "x.grad": x.grad, **grads(model), **state_values(state)})
        descend(model)
    state.flush()
    trajectory.append(state_values(state))
    return trajectory


def same_bits(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    a, b = a.detach().cpu().contiguous(), b.detach().cpu().contiguous()
    return bool((a.reshape(-1).view(torch.uint8) == b.reshape(-1).view(torch.uint8)).all())


def assert_same_values(actual: dict[str, Tensor], expected: dict[str, Tensor], where: str = "") -> None:
    assert actual.keys() == expected.keys(), where
    different = [name for name in expected if not same_bits(actual[name], expected[name])]
    assert not different, f"{where}: {different} differ"


def assert_same_trajectory(actual: list[dict[str, Tensor]], expected: list[dict[str, Tensor]]) -> None:
    assert len(actual) == len(expected)
    for step, (a, b) in enumerate(zip(actual, expected, strict=True)):
        assert_same_values(a, b, f"step {step}")


def counts(state: graphrt.QuantizationState) -> tuple[int, int]:
    """Forward and backward updates; the device's own count has to agree with the host's."""
    assert state._num_updates.tolist() == [state.forward_updates, state.backward_updates]
    return state.forward_updates, state.backward_updates


def flush_all() -> None:
    """Flush what other tests left pending."""
    graphrt.eager.autocast.FlushManager().flush()


# -- every way to checkpoint a function


def plainly(fn: Forward, *args: Any) -> Any:
    return fn(*args)


class OwnCheckpoint(torch.autograd.Function):
    """A framework's own checkpoint: marks its forward, and names it around the recompute."""

    @staticmethod
    def forward(ctx: Any, fn: Forward, *args: Any) -> Any:
        ctx.fn, ctx.mark = fn, graphrt.mark_forward()
        ctx.save_for_backward(*args)
        with torch.no_grad():
            return fn(*args)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        args = [x.detach().requires_grad_(x.requires_grad) for x in ctx.saved_tensors]
        with torch.enable_grad(), graphrt.recompute_phase(of=ctx.mark):
            y = ctx.fn(*args)
        torch.autograd.backward(y, grad_outputs)
        return None, *(x.grad for x in args)


def own(fn: Forward, *args: Any) -> Any:
    return OwnCheckpoint.apply(fn, *args)


KINDS: dict[str, Callable[..., Any]] = {
    "graphrt": graphrt.checkpoint,
    "graphrt-reentrant": lambda fn, *args: graphrt.checkpoint(fn, *args, use_reentrant=True),
    "torch": lambda fn, *args: torch_checkpoint.checkpoint(fn, *args, use_reentrant=False),
    "torch-reentrant": lambda fn, *args: torch_checkpoint.checkpoint(fn, *args, use_reentrant=True),
    "no-early-stop": lambda fn, *args: graphrt.checkpoint(fn, *args, early_stop=False),
    "own": own,
}
MAIN_KINDS = {name: KINDS[name] for name in ("graphrt", "graphrt-reentrant", "own")}
main_kinds = pytest.mark.parametrize("kind", MAIN_KINDS.values(), ids=MAIN_KINDS.keys())
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())


class CastLog:
    """Every cast to FP8 while the log is open: slot, bytes and the scale_inv they were made with."""

    def __init__(self) -> None:
        self.casts: list[tuple[int, Tensor, Tensor, bool]] = []

    @contextmanager
    def open(self) -> Iterator[list[tuple[int, Tensor, Tensor, bool]]]:
        quantize = kernels.quantize
        self.casts = []

        def logged(x: Tensor, scale: Tensor, scale_inv: Tensor, slot: int, dtype: torch.dtype, **options: Any) -> Any:
            result = quantize(x, scale, scale_inv, slot, dtype, **options)
            is_recorded = options.get("amax") is not None
            self.casts.append((slot, result.data.detach().clone(), result.scale_inv.clone(), is_recorded))
            return result

        kernels.quantize = logged
        try:
            yield self.casts
        finally:
            kernels.quantize = quantize
