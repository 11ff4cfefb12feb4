"""SwiGLU over the halves of one matrix, with the quantization of its result fused: ``silu(gate) * up``.

The formula is that of GLU Variants Improve Transformer (Shazeer, 2020), in fp32, the result rounded to bf16.
The CUDA kernel takes the sigmoid from two approximate instructions, the reference from torch: before the rounding to
bf16 they differ by about 2^-20 of the value, so that an element can differ by one unit in the last place of bf16, and
what is quantized from it accordingly. Where the sigmoid is below 2^-125 (a gate below -86) the kernel gives zero.
"""

import torch
from torch import Tensor

from graphrt.kernels import device, reference
from graphrt.kernels.fused import (
    aligned,
    allocate_result,
    check_again,
    check_columns,
    check_matrix,
    check_target,
    check_tensor,
    output_addresses,
    output_name,
    slot_addresses,
)
from graphrt.kernels.quantized import QuantizedTensor, QuantizeTo, transposed_shape

__all__ = ["swiglu", "swiglu_backward", "swiglu_backward_with_output"]

# These mirror the constants of fp8_tile in common.cuh.
_THREADS = 256
_TILE_ROWS, _TILE_COLS = 128, 64


def swiglu(h: Tensor, *, to: QuantizeTo | None = None) -> Tensor | QuantizedTensor:
    """``bf16(silu(gate.float()) * up.float())`` of ``h = gate | up``.

    Args:
        h: [rows, 2 F] bf16, F a multiple of 16 up to 16384; on a CPU also fp16 or fp32.
        to: where to quantize the result, as :func:`graphrt.kernels.quantize` does; None for the result itself.

    Returns:
        [rows, F] of ``h``'s dtype, or quantized.

    Raises:
        ValueError: an argument has another shape, dtype or device than above; the message names it.
        GraphrtError: the kernels cannot be compiled or loaded for the device.
    """
    _check_arguments(h, None, to)
    return _launch_forward(h, to) if h.is_cuda else _compute_forward(h, to)


def swiglu_backward(h: Tensor, grad_out: Tensor, *, to: QuantizeTo | None = None) -> Tensor | QuantizedTensor:
    """The gradient of ``h``: ``grad * up * s * (1 + gate * (1 - s)) | grad * gate * s`` with ``s = sigmoid(gate)``, in bf16.

    Args:
        h: [rows, 2 F] bf16, the input of :func:`swiglu`.
        grad_out: [rows, F], of ``h``'s dtype.
        to: where to quantize the result; None for the result itself.

    Returns:
        [rows, 2 F] of ``h``'s dtype, or quantized (transposed [2 F, ceil16(rows)]).

    Raises:
        ValueError: an argument has another shape, dtype or device than above; the message names it.
        GraphrtError: the kernels cannot be compiled or loaded for the device.
    """
    _check_arguments(h, grad_out, to)
    return _launch_backward(h, grad_out, to) if h.is_cuda else _compute_backward(h, grad_out, to)


def swiglu_backward_with_output(
    h: Tensor, grad_out: Tensor, *, to: QuantizeTo | None = None, output_to: QuantizeTo
) -> tuple[Tensor | QuantizedTensor, Tensor]:
    """As :func:`swiglu_backward`, and in the same launch the transposed copy of what :func:`swiglu` gave, quantized again.

    A forward that quantizes its result without the transposed copy need not keep anything of it for the weight gradient of
    the linear behind it: the bytes are written once, here instead of there.

    Args:
        h: as there.
        grad_out: as there.
        to: as there.
        output_to: e4m3, with the forward's scale and no amax, which the forward has recorded.

    Returns:
        The gradient, and [F, ceil16(rows)] e4m3: the bits that ``swiglu(h, to=output_to).transposed`` had.

    Raises:
        ValueError: an argument has another shape, dtype or device than above; the message names it.
        GraphrtError: the kernels cannot be compiled or loaded for the device.
    """
    _check_arguments(h, grad_out, to)
    check_again("output_to", output_to, h)
    if not h.is_cuda:
        output = _compute_forward(h, output_to._replace(transpose=True))
        assert isinstance(output, QuantizedTensor)
        assert output.transposed is not None
        return _compute_backward(h, grad_out, to), output.transposed
    shape = transposed_shape(h.shape[0], h.shape[1] // 2)
    output_transposed = torch.empty(shape, dtype=output_to.dtype, device=h.device)
    return _launch_backward(h, grad_out, to, (output_to, output_transposed)), output_transposed


def _check_arguments(h: Tensor, grad_out: Tensor | None, to: QuantizeTo | None) -> None:
    check_matrix("h", h)
    rows, cols = h.shape
    if cols % 2:
        raise ValueError(f"h has shape {list(h.shape)}, expected [rows, 2 F]: the gate and what it gates, side by side.")
    check_columns("F, half the columns of h,", cols // 2)
    if grad_out is not None:
        check_tensor("grad_out", grad_out, (rows, cols // 2), h.dtype, h.device)
    check_target(to, h)


# ---- reference ----


def _compute_forward(h: Tensor, to: QuantizeTo | None) -> Tensor | QuantizedTensor:
    gate, up = h.detach().float().chunk(2, dim=1)
    return _quantized((gate * torch.sigmoid(gate) * up).to(h.dtype), to)


def _compute_backward(h: Tensor, grad_out: Tensor, to: QuantizeTo | None) -> Tensor | QuantizedTensor:
    gate, up = h.detach().float().chunk(2, dim=1)
    grad = grad_out.detach().float()
    sigmoid = torch.sigmoid(gate)
    grad_gate = grad * up * (sigmoid * (1.0 + gate * (1.0 - sigmoid)))
    grad_up = grad * (gate * sigmoid)
    return _quantized(torch.cat([grad_gate, grad_up], dim=1).to(h.dtype), to)


def _quantized(result: Tensor, to: QuantizeTo | None) -> Tensor | QuantizedTensor:
    if to is None:
        return result
    return reference.quantize(result, to.scale, to.scale_inv, to.slot, to.dtype, amax=to.amax, transpose=to.transpose)


# ---- launches ----


def _launch_forward(h: Tensor, to: QuantizeTo | None) -> Tensor | QuantizedTensor:
    rows, features = h.shape[0], h.shape[1] // 2
    result = allocate_result(rows, features, h, to)
    h = aligned(h)
    _launch(f"graphrt_swiglu_{output_name(to)}", (h,), result, to, rows, features)
    return result


def _launch_backward(
    h: Tensor, grad_out: Tensor, to: QuantizeTo | None, output: tuple[QuantizeTo, Tensor] | None = None
) -> Tensor | QuantizedTensor:
    rows, cols = h.shape
    result = allocate_result(rows, cols, h, to)
    h, grad_out = aligned(h), aligned(grad_out)
    if output is None:
        _launch(f"graphrt_swiglu_backward_{output_name(to)}", (h, grad_out), result, to, rows, cols // 2)
        return result
    output_to, transposed = output
    further = transposed.data_ptr(), output_to.scale.data_ptr() + 4 * output_to.slot
    _launch(f"graphrt_swiglu_backward_output_{output_name(to)}", (h, grad_out), result, to, rows, cols // 2, further)
    return result


def _launch(
    name: str,
    inputs: tuple[Tensor, ...],
    result: Tensor | QuantizedTensor,
    to: QuantizeTo | None,
    rows: int,
    features: int,
    further: tuple[int, ...] = (),
) -> None:
    if rows == 0:
        if to is not None and isinstance(result, QuantizedTensor):
            result.scale_inv.copy_(to.scale_inv[to.slot, :1])
        return
    num_blocks = -(-rows // _TILE_ROWS) * -(-features // _TILE_COLS)
    addresses = (*[x.data_ptr() for x in inputs], *output_addresses(result), *slot_addresses(to, result))
    device.launch(inputs[0].get_device(), name, num_blocks, _THREADS, (*addresses, *further, rows, features))
