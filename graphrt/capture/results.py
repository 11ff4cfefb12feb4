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
        self._metrics = list(example.metrics)
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
        return _CopiedResult(self, self._buffer.clone())

    def fields(self, buffer: Tensor) -> dict[str, Any]:
        """The fields of a `StepResult` as views of a copy of the buffer."""
        views = self._split(buffer)
        metrics = {name: views.pop(f"metrics.{name}") for name in self._metrics}
        return {**views, "metrics": metrics}


class _CopiedResult(StepResult):
    """A result whose tensors are made when one is first asked for: most steps of a long run are never looked at."""

    def __init__(self, results: StaticResults, buffer: Tensor) -> None:
        self.__dict__.update(_results=results, _buffer=buffer)

    def __getattr__(self, name: str) -> Any:
        # Called for what is not there yet; a field that is has no need of it.
        results = self.__dict__.pop("_results", None)
        if results is not None:
            self.__dict__.update(results.fields(self.__dict__.pop("_buffer")))
        if name in self.__dict__:
            return self.__dict__[name]
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")


def _flat(result: StepResult) -> dict[str, Any]:
    metrics = {f"metrics.{name}": value for name, value in result.metrics.items()}
    return {"loss": result.loss, "grad_norm": result.grad_norm, "skipped": result.skipped, **metrics}
