"""The GEMMs of one linear, for fused layers that produce the linear's input and consume its input gradient themselves.

A fused layer asks `gemm_of(linear, x)` once a forward. Where the linear quantizes, activations and output gradients travel
as `QuantizedTensor`, made by the kernel that computed them; elsewhere they are plain tensors and the GEMMs run in the
activation's dtype. The layer's code is the same for both.
"""

from typing import Any

import torch
from torch import Tensor, nn

from graphrt import kernels
from graphrt.kernels import QuantizedTensor, QuantizeTo
from graphrt.kernels.fused import MAX_COLUMNS
from graphrt.kernels.quantized import INPUT_DTYPES
from graphrt.linear import Float8Linear, LinearCall, finish_backward, input_grad, weight_grad, weight_transposed
from graphrt.owners import working_for
from graphrt.saved import is_graph_retained
from graphrt.sinks import deliver

__all__ = ["CalibratingGemm", "Fp8Gemm", "Gemm", "Operand", "PlainGemm", "can_fuse", "gemm_of", "is_fusable"]

#: A tensor in the form that the GEMM takes: quantized or plain, [rows, features].
Operand = Any


class PlainGemm:
    """Products in the dtype of the activations; weight gradients in the parameter's, where the GEMM can write it."""

    def __init__(self, linear: nn.Linear, dtype: torch.dtype) -> None:
        self.linear, self.weight, self.dtype = linear, linear.weight, dtype
        with working_for(linear):
            self._cast: Tensor | None = self.weight.detach().to(dtype)

    def input_target(self, transpose: bool = True) -> None:
        """Producers write plain tensors."""
        del transpose

    def input_again(self, saved: list[Any], is_needed: bool) -> QuantizeTo | None:
        """The input is kept as it is."""
        del saved, is_needed

    def keep_input(self, saved: list[Any]) -> None:
        """It is kept."""

    def grad_target(self, transpose: bool = True) -> None:
        """Producers write plain tensors."""
        del transpose

    def prepare_grad(self, grad_output: Tensor, transpose: bool = True) -> Tensor:
        """The output gradient as `grad_input` and `weight_grad` take it."""
        del transpose
        return grad_output

    def forward(self, x: Operand) -> Tensor:
        """``x w^T``: [rows, in_features] -> [rows, out_features]."""
        assert self._cast is not None
        with working_for(self.linear):
            return x @ self._cast.t()

    def release(self, x: Operand) -> list[Tensor | None]:
        """What the backward needs, for ``save_for_backward``, four entries; nothing of it is kept here."""
        cast, self._cast = self._cast, None
        return [x, None, cast, None]

    def receive(self, grad: Operand) -> Operand:
        """An output gradient that a kernel has written for `grad_target`."""
        return grad

    def grad_input(self, grad: Operand, saved: list[Any]) -> Tensor:
        """``dy w``; lets go of what ``saved`` holds of the weight."""
        with working_for(self.linear):
            product = grad @ saved[2]
        saved[2] = None
        return product

    def for_weight_grad(self, grad: Operand) -> Operand:
        """All that `weight_grad` reads of the output gradient."""
        return grad

    def weight_grad(self, grad: Operand, saved: list[Any]) -> Tensor | None:
        """``dy^T x`` into the weight's sink, or returned."""
        with working_for(self.linear):
            return deliver(self.weight, lambda out: _mm(grad.t(), saved[0], self.weight.dtype, out))

    def finish(self) -> None:
        """Nothing was requested."""


class CalibratingGemm(PlainGemm):
    """Plain products that record the amaxes a quantized step would have."""

    def __init__(self, linear: Float8Linear, call: LinearCall, dtype: torch.dtype) -> None:
        super().__init__(linear, dtype)
        self._call = call

    def forward(self, x: Operand) -> Tensor:
        """As `PlainGemm.forward`; records the input's and the weight's amax."""
        call = self._call
        if call.is_training:
            with working_for(self.linear):
                kernels.record_amax_(x, call.state.staging_row, call.slots.input)
                kernels.record_amax_(self.weight.detach(), call.state.staging_row, call.slots.weight)
        return super().forward(x)

    def receive(self, grad: Operand) -> Operand:
        """Records the output gradient's amax."""
        with working_for(self.linear):
            kernels.record_amax_(grad, self._call.state.staging_row, self._call.slots.grad_output)
        return grad

    def prepare_grad(self, grad_output: Tensor, transpose: bool = True) -> Tensor:
        """Records the output gradient's amax."""
        del transpose
        return self.receive(grad_output)

    def finish(self) -> None:
        """A calibrating backward has run: request the scale update."""
        finish_backward(self._call)


class Fp8Gemm:
    """Products of FP8 operands, with the scales of the linear's slots."""

    def __init__(self, linear: Float8Linear, call: LinearCall, weight: QuantizedTensor, dtype: torch.dtype) -> None:
        self.linear, self.weight, self.dtype, self._call = linear, linear.weight, dtype, call
        self._quantized: QuantizedTensor | None = weight
        self._input_kept: Tensor | None = None
        self._transpose_kept: Tensor | None = None

    def input_target(self, transpose: bool = True) -> QuantizeTo:
        """Where the kernel that computes the input quantizes it to.

        Args:
            transpose: False leaves out the copy that the weight gradient reads: the backward makes it with `input_again`.
        """
        call = self._call
        assert call.record is not None
        scales = call.record.scales(call.state)
        amax = call.state.staging_row if call.is_training else None
        dtype = call.state.recipe.fp8_format.forward_dtype
        return QuantizeTo(scales.scale, scales.scale_inv, call.slots.input, dtype, amax, transpose and call.is_differentiable)

    def input_again(self, saved: list[Any], is_needed: bool) -> QuantizeTo | None:
        """What quantizes the input to the bits it had in the forward, for a backward that computes it again.

        None if there is no need: no weight gradient is asked for, or an earlier backward of a retained graph has done it and
        its result is in ``saved`` now.

        Args:
            saved: what `release` returned; who makes the copy puts it in the first place and calls `keep_input`.
            is_needed: whether the weight gradient is asked for.
        """
        if self._input_kept is not None:
            saved[0] = self._input_kept
            return None
        # The scales of the forward are there for its first backward only.
        return self.input_target()._replace(amax=None) if is_needed or is_graph_retained() else None

    def keep_input(self, saved: list[Any]) -> None:
        """Another backward may come, and ask."""
        self._input_kept = saved[0] if is_graph_retained() else None

    def grad_target(self, transpose: bool = True) -> QuantizeTo:
        """Where the kernel that computes the output gradient quantizes it to."""
        state = self._call.state
        dtype = state.recipe.fp8_format.backward_dtype
        scales = state.scales
        return QuantizeTo(scales.scale, scales.scale_inv, self._call.slots.grad_output, dtype, state.staging_row, transpose)

    def prepare_grad(self, grad_output: Tensor, transpose: bool = True) -> QuantizedTensor:
        """Quantize an output gradient that another kernel left plain."""
        to = self.grad_target(transpose)
        with working_for(self.linear):
            return kernels.quantize(grad_output, to.scale, to.scale_inv, to.slot, to.dtype, amax=to.amax, transpose=transpose)

    def forward(self, x: Operand) -> Tensor:
        """``x w^T``: [rows, in_features] -> [rows, out_features]."""
        w = self._quantized
        assert w is not None
        with working_for(self.linear):
            return kernels.scaled_mm(x.data, x.scale_inv, w.data, w.scale_inv, self.dtype, fast_accum=True)

    def release(self, x: Operand) -> list[Tensor | None]:
        """What the backward needs, for ``save_for_backward``, four entries; nothing of it is kept here."""
        w, self._quantized = self._quantized, None
        assert w is not None
        return [x.transposed, x.scale_inv, w.transposed, w.scale_inv]

    def receive(self, grad: Operand) -> Operand:
        """An output gradient that a kernel has quantized to `grad_target`."""
        return grad

    def grad_input(self, grad: Operand, saved: list[Any]) -> Tensor:
        """``dy w``; lets go of what ``saved`` holds of the weight."""
        w_t, w_scale_inv = saved[2:4]
        saved[2] = None
        with working_for(self.linear):
            if w_t is None:
                w_t = weight_transposed(self.weight, self._call) if self._transpose_kept is None else self._transpose_kept
                self._transpose_kept = w_t if is_graph_retained() else None
            return input_grad(grad, w_t, w_scale_inv, self.dtype, self._call)

    def for_weight_grad(self, grad: QuantizedTensor) -> Operand:
        """All that `weight_grad` reads of the output gradient: not the copy that `grad_input` read."""
        return grad.transposed, grad.scale_inv

    def weight_grad(self, grad: Operand, saved: list[Any]) -> Tensor | None:
        """``dy^T x`` into the weight's sink, or returned; ``grad`` as `for_weight_grad` gives it."""
        dy_t, dy_scale_inv = grad
        x_t, x_scale_inv = saved[:2]
        with working_for(self.linear):
            return deliver(self.weight, lambda out: weight_grad(dy_t, dy_scale_inv, x_t, x_scale_inv, self.weight.dtype, self._call, out))

    def finish(self) -> None:
        """A quantized backward has run: request the scale update."""
        finish_backward(self._call)


Gemm = PlainGemm | Fp8Gemm


def can_fuse(x: Tensor, *linears: nn.Linear) -> bool:
    """Whether a fused layer may issue these linears' GEMMs: nobody watches them, and the kernels take the shapes and dtypes."""
    return is_fusable(x) and all(_is_bare(linear) for linear in linears)


def is_fusable(*activations: Tensor) -> bool:
    """Whether the kernels take these activations: one dtype that they know, and a width they can divide."""
    dtype, width = activations[0].dtype, activations[0].shape[-1]
    is_known = dtype is torch.bfloat16 if activations[0].is_cuda else dtype in INPUT_DTYPES
    return is_known and _is_size(width) and all(x.dtype is dtype for x in activations)


def _is_size(features: int) -> bool:
    return features % 16 == 0 and 0 < features <= MAX_COLUMNS


def _is_bare(linear: nn.Linear) -> bool:
    hooks = (linear._forward_hooks, linear._forward_pre_hooks, linear._backward_hooks, linear._backward_pre_hooks)
    is_watched = any(hooks) or "forward" in vars(linear)
    is_counted = isinstance(linear, Float8Linear) and linear.quantization_state.is_counting_saturation
    is_aligned = _is_size(linear.in_features) and linear.out_features % 16 == 0
    return type(linear) in (nn.Linear, Float8Linear) and linear.bias is None and is_aligned and not (is_watched or is_counted)


def gemm_of(linear: nn.Linear, x: Tensor) -> Gemm:
    """The GEMMs of ``linear`` in the forward under way.

    Args:
        linear: without bias.
        x: the activation the fused layer starts from, for device and dtype.
    """
    if not isinstance(linear, Float8Linear):
        return PlainGemm(linear, x.dtype)
    with working_for(linear):
        prepared = linear.prepare(x)
    if prepared is None:
        return PlainGemm(linear, x.dtype)
    call, weight = prepared
    return CalibratingGemm(linear, call, x.dtype) if weight is None else Fp8Gemm(linear, call, weight, x.dtype)


def _mm(a: Tensor, b: Tensor, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    """``a @ b`` in ``dtype``; on CUDA the GEMM of two 16-bit matrices writes fp32 itself."""
    if a.dtype is dtype:
        return torch.mm(a, b) if out is None else torch.mm(a, b, out=out)
    if a.is_cuda and dtype is torch.float32:
        return torch.mm(a, b, out_dtype=dtype) if out is None else torch.mm(a, b, out_dtype=dtype, out=out)
    product = torch.mm(a, b).to(dtype)
    return product if out is None else out.copy_(product)
