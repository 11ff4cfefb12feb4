"""Inputs for the kernels, and the bit-for-bit comparison of a kernel with the reference."""

import torch
from torch import Tensor

from graphrt.kernels import reference
from graphrt.kernels.quantized import QuantizedTensor

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
INPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
NUM_SLOTS, SLOT = 5, 3
SHAPES = [(1, 1), (1, 16), (16, 1), (15, 17), (16, 64), (127, 65), (128, 64), (129, 130), (130, 136), (300, 257), (256, 192)]
SCALES = (1.0, 0.75, 37.3, 1e-3, 2.0**20)

#: Values an FP8 cast can get wrong: ties, the edges of saturation, subnormals, signed zero.
EDGES = (
    *(0.0, -0.0, 448.0, 449.0, 464.0, 465.0, 480.0, -1e6, 57344.0, 61440.0, 65504.0, -65504.0),
    *(2.0**-6, 2.0**-7, 2.0**-9, 2.0**-10, 1.5 * 2.0**-10, 3 * 2.0**-10, 2.0**-16, 2.0**-17, 3 * 2.0**-17),
    *(17.0, 18.0, 19.0, 1.0625, 1.1875, -1.3125, 9.0, 10.0, 11.0, 13.0),
)
NONFINITE = (float("inf"), float("-inf"), float("nan"))


def make_input(rows: int, cols: int, dtype: torch.dtype, *, seed: int = 0, nonfinite: bool = False, device: str = "cpu") -> Tensor:
    """Values over many magnitudes, the edges scattered among them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, cols, generator=generator) * torch.exp2(torch.randint(-12, 10, (rows, cols), generator=generator))
    edges = torch.tensor([*EDGES, *NONFINITE] if nonfinite else EDGES)
    places = torch.randint(0, x.numel(), (max(1, x.numel() // 3),), generator=generator)
    x.view(-1)[places] = edges[torch.randint(0, len(edges), places.shape, generator=generator)]
    return x.to(dtype).to(device)


def make_scales(value: float, device: str = "cpu") -> tuple[Tensor, Tensor]:
    scale = torch.full((NUM_SLOTS,), 9.0)
    scale[SLOT] = value
    scale_inv = torch.full((NUM_SLOTS, 4), 7.0)
    scale_inv[SLOT, 0] = 1.0 / value
    return scale.to(device), scale_inv.to(device)


def bits(tensor: Tensor) -> Tensor:
    """The bytes of a tensor on the CPU, every NaN of an fp32 tensor made the same one."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype is torch.float32:
        tensor = torch.where(tensor.isnan(), torch.full_like(tensor, float("nan")), tensor)
    return tensor.view(torch.uint8) if tensor.dim() else tensor.view(1).view(torch.uint8)


def assert_same_bits(actual: Tensor, expected: Tensor, what: str) -> None:
    assert actual.shape == expected.shape, f"{what}: shape {list(actual.shape)}, expected {list(expected.shape)}"
    differing = bits(actual) != bits(expected)
    assert not differing.any(), f"{what}: {int(differing.sum())} of {differing.numel()} bytes differ"


def assert_same_result(actual: QuantizedTensor, expected: QuantizedTensor) -> None:
    assert_same_bits(actual.data, expected.data, "data")
    assert_same_bits(actual.scale_inv, expected.scale_inv, "scale_inv")
    assert (actual.transposed is None) == (expected.transposed is None)
    if actual.transposed is not None and expected.transposed is not None:
        assert_same_bits(actual.transposed, expected.transposed, "transposed")


def check_quantize(quantize, x: Tensor, dtype: torch.dtype, *, scale_value: float, transpose: bool, has_amax: bool) -> None:
    """``quantize`` equals the reference on ``x``: bytes, scale_inv, and the whole staging row."""
    device = str(x.device)
    scale, scale_inv = make_scales(scale_value, device)
    amax = torch.full((NUM_SLOTS,), 0.25, device=device) if has_amax else None
    expected_amax = amax.cpu().clone() if amax is not None else None
    actual = quantize(x, scale, scale_inv, SLOT, dtype, amax=amax, transpose=transpose)
    expected = reference.quantize(x.cpu(), scale.cpu(), scale_inv.cpu(), SLOT, dtype, amax=expected_amax, transpose=transpose)
    assert_same_result(actual, expected)
    if amax is not None and expected_amax is not None:
        assert_same_bits(amax, expected_amax, "amax")


STAGING_VALUES = (0.0, 1.0, 3.5, 448.0, 1e-45, 3e-39, 3.4e38, 1e30, float("inf"), float("nan"), 1e-38, 0.1)


def make_state(num_rows: int, num_slots: int, *, seed: int = 0, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """amax_history, scale, scale_inv, num_nonfinite, num_updates, with every kind of staging value."""
    generator = torch.Generator().manual_seed(seed)
    history = torch.rand(num_rows, num_slots, generator=generator) * torch.exp2(torch.randint(-30, 8, (1, num_slots), generator=generator))
    history[1:, ::3] = 0
    history[0] = torch.tensor([STAGING_VALUES[i % len(STAGING_VALUES)] for i in range(num_slots)])
    scale = torch.rand(num_slots, generator=generator) + 0.5
    scale_inv = torch.rand(num_slots, 4, generator=generator)
    state = (history, scale, scale_inv, torch.arange(num_slots, dtype=torch.int32), torch.tensor([5, 7]))
    return tuple(tensor.to(device) for tensor in state)  # type: ignore[return-value]


def check_update(update, state: tuple[Tensor, ...], **rule) -> None:
    """``update`` equals the reference on ``state``, in every tensor."""
    expected = [tensor.cpu().clone() for tensor in state]
    update(*state, **rule)
    reference.update_scales_(*expected, **rule)
    for name, actual_tensor, expected_tensor in zip(
        ("amax_history", "scale", "scale_inv", "num_nonfinite", "num_updates"), state, expected, strict=True
    ):
        assert_same_bits(actual_tensor, expected_tensor, name)


def quantize_kernels() -> list[str]:
    """Names of every kernel the sources must hold."""
    inputs, outputs = ("bf16", "fp16", "fp32"), ("e4m3", "e5m2")
    quantizing = [f"graphrt_quantize_{kind}_{i}_{o}" for kind in ("rows", "transpose") for i in inputs for o in outputs]
    quantizing += [f"graphrt_quantize_many_{i}_e4m3" for i in inputs]
    return sorted(quantizing + [f"graphrt_record_amax_{i}" for i in inputs])
