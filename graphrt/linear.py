"""A linear layer whose three GEMMs run in FP8: forward, input gradient and weight gradient.

    y  = x  w^T        x, w in e4m3
    dx = dy w          dy in e5m2 (or e4m3), w in e4m3
    dw = dy^T x        dy in e5m2 (or e4m3), x in e4m3

FP8 GEMMs take both operands with the contraction innermost, so each tensor is needed as it is for one product and
transposed for another; one kernel writes both. For the backward only FP8 is saved: x transposed and w transposed, each
with the scale_inv it was made with. Outside a region the layer is a plain nn.Linear.
"""

import weakref
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from graphrt import kernels
from graphrt.errors import GraphrtError
from graphrt.guards import untraced
from graphrt.kernels import QuantizedTensor
from graphrt.recipe import FP8_MAX
from graphrt.recompute import is_reentrant_forward, unseen_by_selective_checkpoints
from graphrt.region import Context, Mode, RegionRecord, current_context
from graphrt.saved import is_graph_retained, take_saved
from graphrt.sinks import deliver
from graphrt.state import QuantizationState

__all__ = [
    "Float8Linear",
    "LinearCall",
    "LinearSlots",
    "WeightKey",
    "WeightWatch",
    "finish_backward",
    "forget_weights",
    "input_grad",
    "weight_grad",
    "weight_transposed",
]


@dataclass(frozen=True)
class LinearSlots:
    """Columns of one linear's slots in the packed state."""

    input: int
    weight: int
    grad_output: int


@dataclass(eq=False)
class LinearCall:
    """What one forward of a linear hands to its backward besides tensors."""

    state: QuantizationState
    slots: LinearSlots
    group: Any  # reduces the amaxes of the region
    record: RegionRecord | None  # held until the backward has run: that long the forward is in flight
    is_training: bool
    is_differentiable: bool
    weight_version: int = 0  # of a forward in FP8


class WeightKey(NamedTuple):
    """What a quantized weight was made from and for; another key quantizes anew."""

    serial: int  # of the region
    version: int
    address: int
    has_transposed: bool


class WeightWatch(Protocol):
    """Is told what the forwards of a step do with a quantized weight."""

    def writing(self, key: WeightKey, is_recording: bool) -> AbstractContextManager[Any]:
        """Entered while a forward quantizes; ``is_recording`` says whether the amax is recorded."""
        ...

    def note_read(self, quantized: QuantizedTensor) -> None:
        """A forward found what it needs."""
        ...

    @property
    def is_last_use(self) -> bool:
        """Whether no later forward of the step is expected to look for it. One that does quantizes anew, to the same bits."""
        ...


@dataclass
class _WeightCache:
    """The quantized weight of the current region, and what it was made from."""

    key: WeightKey
    weight: "weakref.ref[Tensor]"  # an address alone may be another tensor's by now
    quantized: QuantizedTensor
    is_recorded: bool  # its amax went into the staging row

    def serves(self, weight: Tensor, key: WeightKey, is_training: bool) -> bool:
        """Whether a forward may use it. One that records amaxes does not take over what one without left behind."""
        return self.key == key and self.weight() is weight and (self.is_recorded or not is_training)


class Float8Linear(nn.Linear):
    """nn.Linear that computes in FP8 inside a `graphrt.fp8_autocast` region.

    Made from an nn.Linear by `graphrt.convert_to_float8_training`, in place: parameters, names, hooks and state_dict keys
    stay. ``x`` is ``[..., in_features]`` of any leading dimensions, bf16, fp16 or fp32.
    """

    quantization_state: QuantizationState
    slots: LinearSlots
    _weight_cache: _WeightCache | None
    weight_watch: WeightWatch | None

    def bind(self, state: QuantizationState, slots: LinearSlots) -> None:
        """Attach the state that holds this layer's scales."""
        self.quantization_state, self.slots = state, slots
        self._weight_cache = None
        self.weight_watch = None

    def unbind(self) -> None:
        """Drop what `bind` attached."""
        for name in ("quantization_state", "slots", "_weight_cache", "weight_watch"):
            del self.__dict__[name]

    def __getstate__(self) -> dict[str, Any]:
        # A copy quantizes its own weight.
        return {**self.__dict__, "_weight_cache": None, "weight_watch": None}

    def _apply(self, fn: Any, recurse: bool = True) -> "Float8Linear":
        super()._apply(fn, recurse)
        if self.weight.device.type != "meta":
            self.quantization_state.to(self.weight.device)
        self._weight_cache = None
        return self

    def extra_repr(self) -> str:
        """As nn.Linear's, with the formats."""
        return f"{super().extra_repr()}, fp8={self.quantization_state.recipe.fp8_format.value}"

    def forward(self, input: Tensor) -> Tensor:
        """``input`` [..., in_features] -> [..., out_features]."""
        if torch.compiler.is_compiling():
            return _forward_untraced(self, input)
        return self._forward(input)

    def _forward(self, x: Tensor) -> Tensor:
        context, weight = current_context(), self.weight  # read once: a parametrized weight is computed at each access
        if context.mode is Mode.PLAIN or context.record is None:
            return F.linear(x, weight, self.bias)
        call = self._begin(x, weight, context, context.record)
        run = self._calibrate if context.mode is Mode.CALIBRATE else self._quantize
        return run(x, weight, call, context.record)

    def _begin(self, x: Tensor, weight: Tensor, context: Context, record: RegionRecord) -> LinearCall:
        """Note the use, and gather what this forward's backward will need."""
        has_grad = torch.is_grad_enabled()
        is_training = not context.in_recompute and (has_grad or (record.has_gradients and is_reentrant_forward()))
        self._check_device(x, weight)
        if not context.in_recompute:
            record.note_use(self.quantization_state, is_training)
        return LinearCall(self.quantization_state, self.slots, record.group, record, is_training, has_grad)

    def prepare(self, x: Tensor) -> tuple[LinearCall, QuantizedTensor | None] | None:
        """What a fused layer needs to issue this linear's GEMMs itself; None where the layer is plain.

        Args:
            x: the activation the fused layer starts from, for its device.

        Returns:
            The call, and the weight in FP8; None instead of the weight while calibrating.
        """
        context, weight = current_context(), self.weight
        if context.mode is Mode.PLAIN or context.record is None:
            return None
        call = self._begin(x, weight, context, context.record)
        return call, None if context.mode is Mode.CALIBRATE else self._quantized_weight(weight, call, context.record)

    def _check_device(self, x: Tensor, weight: Tensor) -> None:
        state = self.quantization_state
        if not (x.device == weight.device == state.device):
            raise ValueError(
                f"Float8Linear got an input on {x.device} with its weight on {weight.device} and its scales on {state.device}. "
                "Move the whole model and the input to one device."
            )

    def _calibrate(self, x: Tensor, weight: Tensor, call: LinearCall, _record: RegionRecord) -> Tensor:
        if call.is_training:
            with unseen_by_selective_checkpoints():
                kernels.record_amax_(x.detach(), call.state.staging_row, call.slots.input)
                kernels.record_amax_(weight.detach(), call.state.staging_row, call.slots.weight)
        y = F.linear(x, weight, self.bias)
        if y.requires_grad:
            y.register_hook(lambda grad_output: _record_grad_amax(grad_output, call))
        return y

    def _quantize(self, x: Tensor, weight: Tensor, call: LinearCall, record: RegionRecord) -> Tensor:
        dtype = _output_dtype(x, weight)
        return _Linear.apply(x, weight, self.bias, self._quantized_weight(weight, call, record), call, dtype)

    def _quantized_weight(self, weight: Tensor, call: LinearCall, record: RegionRecord) -> QuantizedTensor:
        """The weight in FP8, quantized once a region; an edit in place (a new version) quantizes it anew."""
        transpose = call.state.recipe.keep_weight_transpose and (record.has_gradients or call.is_differentiable)
        call.weight_version = weight._version
        key = WeightKey(record.serial, call.weight_version, weight.data_ptr(), transpose)
        watch, cache = self.weight_watch, self._weight_cache
        if cache is not None and cache.serves(weight, key, call.is_training):
            if watch is not None:
                watch.note_read(cache.quantized)
                if watch.is_last_use:
                    self.forget_weight()
            return cache.quantized
        dtype = call.state.recipe.fp8_format.forward_dtype
        with nullcontext() if watch is None else watch.writing(key, call.is_training):
            quantized = _quantize(weight.detach(), call.state, self.slots.weight, record, dtype, call.is_training, transpose)
        if not (torch.is_inference_mode_enabled() or (watch is not None and watch.is_last_use)):
            self.take_weight(weight, key, quantized, is_recorded=call.is_training)
        return quantized

    def take_weight(self, weight: Tensor, key: WeightKey, quantized: QuantizedTensor, *, is_recorded: bool) -> None:
        """Let forwards of ``weight`` under ``key`` use ``quantized``; training forwards only if its amax was recorded."""
        self._weight_cache = _WeightCache(key, weakref.ref(weight), quantized, is_recorded)

    def forget_weight(self) -> None:
        """Let go of the quantized weight; a backward that needs it has it."""
        self._weight_cache = None


def forget_weights(model: nn.Module) -> None:
    """Free the quantized weights of a step that has ended: the next one makes its own."""
    for module in model.modules():
        if isinstance(module, Float8Linear):
            module.forget_weight()


def _output_dtype(x: Tensor, weight: Tensor) -> torch.dtype:
    device_type = x.device.type
    if torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    if x.dtype is not weight.dtype:
        raise ValueError(
            f"Float8Linear got an input of {x.dtype} with weights of {weight.dtype}. Cast one of them, or run under torch.autocast."
        )
    return x.dtype


@untraced(reason="an FP8 linear asks at run time which region it is in")
def _forward_untraced(linear: Float8Linear, x: Tensor) -> Tensor:
    return linear._forward(x)


def _quantize(
    x: Tensor,
    state: QuantizationState,
    slot: int,
    record: RegionRecord | None,
    dtype: torch.dtype,
    is_recording: bool,
    transpose: bool,
) -> QuantizedTensor:
    """Quantize ``x`` [rows, cols] with the scale its slot has in ``record`` (None: the live one)."""
    scales = state.scales if record is None else record.scales(state)
    amax = state.staging_row if is_recording else None
    with unseen_by_selective_checkpoints():
        quantized = kernels.quantize(x, scales.scale, scales.scale_inv, slot, dtype, amax=amax, transpose=transpose)
    if is_recording and state.is_counting_saturation:
        state.add_saturation(slot, x, quantized.data, FP8_MAX[dtype])
    return quantized


class _Linear(torch.autograd.Function):
    """The three FP8 GEMMs."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, w: QuantizedTensor, call: LinearCall, dtype: torch.dtype
    ) -> Tensor:
        needs_x, needs_w = (call.is_differentiable and needed for needed in ctx.needs_input_grad[:2])
        rows = x.reshape(-1, x.shape[-1])
        forward_dtype = call.state.recipe.fp8_format.forward_dtype
        q = _quantize(rows, call.state, call.slots.input, call.record, forward_dtype, call.is_training, needs_w)
        y = kernels.scaled_mm(q.data, q.scale_inv, w.data, w.scale_inv, dtype, fast_accum=True, bias=bias)
        ctx.save_for_backward(
            *((q.transposed, q.scale_inv) if needs_w else (None, None)), *((w.transposed, w.scale_inv) if needs_x else (None, None))
        )
        ctx.call, ctx.x_shape, ctx.x_dtype, ctx.weight = call, x.shape, x.dtype, weight
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.w_t = None  # made by a backward that leaves the graph for another one
        # Not a view in autograd's eyes: those may not be edited in place when they come out of a custom function.
        return y if x.dim() == 2 else torch.ops.aten._unsafe_view.default(y, (*x.shape[:-1], weight.shape[0]))

    @staticmethod
    @untraced(reason="an FP8 linear's backward asks for a scale update on the host")
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        (grad_output,) = grad_outputs
        x_t, x_scale_inv, w_t, w_scale_inv = take_saved(ctx)
        needs_x, needs_w, needs_bias = ctx.needs_input_grad[:3]
        dy = grad_output.reshape(-1, grad_output.shape[-1])
        dx = dw = None
        if w_t is None and w_scale_inv is not None and (needs_x or is_graph_retained()):
            # The scales of the forward are there for its first backward only.
            w_t = weight_transposed(ctx.weight, ctx.call) if ctx.w_t is None else ctx.w_t
            ctx.w_t = w_t if is_graph_retained() else None
        if needs_x or needs_w:
            q = _quantize_grad_output(dy, ctx.call, transpose=needs_w)
            if needs_x:
                assert w_t is not None
                assert w_scale_inv is not None
                dx = input_grad(q, w_t, w_scale_inv, ctx.x_dtype, ctx.call).view(ctx.x_shape)
            dy_t, dy_scale_inv = q.transposed, q.scale_inv
            del q, w_t
            if needs_w:
                dw = deliver(ctx.weight, lambda out: weight_grad(dy_t, dy_scale_inv, x_t, x_scale_inv, ctx.weight.dtype, ctx.call, out))
        db = dy.sum(0, dtype=torch.float32).to(ctx.bias_dtype) if needs_bias else None
        return dx, dw, db, None, None, None


def weight_transposed(weight: Tensor, call: LinearCall) -> Tensor:
    """The transposed copy of the weight that the forward left out, from the weight and the scale that it had.

    Raises:
        GraphrtError: the weight has changed since.
    """
    if weight._version != call.weight_version:
        raise GraphrtError(
            f"A linear's weight [{weight.shape[0]}, {weight.shape[1]}] was changed in place after its forward, and its backward quantizes "
            "it again. Change it after the backward, or convert with DelayedScaling(keep_weight_transpose=True)."
        )
    assert call.record is not None
    scales, dtype = call.record.scales(call.state), call.state.recipe.fp8_format.forward_dtype
    return kernels.quantize_transposed(weight.detach(), scales.scale, scales.scale_inv, call.slots.weight, dtype)


def input_grad(q: QuantizedTensor, w_t: Tensor, w_scale_inv: Tensor, dtype: torch.dtype, call: LinearCall) -> Tensor:
    """``dy w`` [rows, in_features] from the output gradient and the transposed copy of the weight."""
    fast_accum = call.state.recipe.backward_fast_accum
    return kernels.scaled_mm(q.data, q.scale_inv, w_t, w_scale_inv, dtype, fast_accum=fast_accum)


def weight_grad(
    dy_t: Tensor | None, dy_scale_inv: Tensor, x_t: Tensor, x_scale_inv: Tensor, dtype: torch.dtype, call: LinearCall, out: Tensor | None
) -> Tensor:
    """``dy^T x`` [out_features, in_features] from the transposed copies of both, into ``out`` if given."""
    assert dy_t is not None
    fast_accum = call.state.recipe.backward_fast_accum
    return kernels.scaled_mm(dy_t, dy_scale_inv, x_t, x_scale_inv, dtype, fast_accum=fast_accum, out=out)


def _quantize_grad_output(dy: Tensor, call: LinearCall, transpose: bool) -> QuantizedTensor:
    """Quantize the output gradient with the live scale, and ask for the update that its amax will need."""
    dtype = call.state.recipe.fp8_format.backward_dtype
    quantized = _quantize(dy, call.state, call.slots.grad_output, None, dtype, True, transpose)
    finish_backward(call)
    return quantized


def finish_backward(call: LinearCall) -> None:
    """A quantized backward has run: request the update, and let go of the region."""
    call.state.request_backward_quantization_update(call.group)
    call.record = None


def _record_grad_amax(grad_output: Tensor, call: LinearCall) -> None:
    """Calibration of the backward direction: a hook on the output, so that the output itself stays as nn.Linear's."""
    kernels.record_amax_(grad_output, call.state.staging_row, call.slots.grad_output)
    finish_backward(call)
