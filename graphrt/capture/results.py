"""Static results: where a graph leaves what the step returns, and the copy that the caller gets."""

from typing import Any

import torch
from torch import Tensor

from graphrt.step import StepResult

__all__ = ["StaticResults"]

_ALIGNMENT = 16


class StaticResults:
    """One buffer outside the graph's pool that holds all results of a step.

    One buffer, because a copy of it is one launch: results returned are the caller's, the next replay writes elsewhere.

    Args:
        example: results of a warmup step, for names, shapes and dtypes.
    """

    def __init__(self, example: StepResult) -> None:
        flat = _flat(example)
        # fp32 scalars first, side by side: one unbind makes them all.
        self._scalars = [name for name, value in flat.items() if value.dtype is torch.float32 and value.dim() == 0]
        self._layout: list[tuple[str, int, int, torch.dtype, torch.Size]] = []
        offset = -(-4 * len(self._scalars) // _ALIGNMENT) * _ALIGNMENT
        for name, value in flat.items():
            if name not in self._scalars:
                num_bytes = value.numel() * value.element_size()
                self._layout.append((name, offset, num_bytes, value.dtype, value.shape))
                offset += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        self._buffer = torch.zeros(max(offset, _ALIGNMENT), dtype=torch.uint8, device=example.loss.device)
        self._views = self._split(self._buffer)

    def _split(self, buffer: Tensor) -> dict[str, Tensor]:
        scalars = buffer[: 4 * len(self._scalars)].view(torch.float32).unbind()
        others = {name: buffer[at : at + size].view(dtype).view(shape) for name, at, size, dtype, shape in self._layout}
        return {**dict(zip(self._scalars, scalars, strict=True)), **others}

    def write(self, result: StepResult) -> None:
        """Copy results in; part of the graph."""
        for name, value in _flat(result).items():
            self._views[name].copy_(value)

    def read(self) -> StepResult:
        """A copy in storage of its own."""
        views = self._split(self._buffer.clone())
        metrics = {name.removeprefix("metrics."): value for name, value in views.items() if name.startswith("metrics.")}
        return StepResult(views["loss"], views["grad_norm"], views["skipped"], metrics)


def _flat(result: StepResult) -> dict[str, Any]:
    metrics = {f"metrics.{name}": value for name, value in result.metrics.items()}
    return {"loss": result.loss, "grad_norm": result.grad_norm, "skipped": result.skipped, **metrics}
