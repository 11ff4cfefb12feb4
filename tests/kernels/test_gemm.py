"""scaled_mm on any device: values, edges and refusals."""

import pytest
import torch

from graphrt.kernels import quantize, scaled_mm

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SCALE_INV = torch.tensor([0.5]), torch.tensor([0.25])


def make_operands(m: int = 5, k: int = 32, n: int = 48, a_dtype: torch.dtype = E4M3, b_dtype: torch.dtype = E4M3):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(m, k, generator=generator).to(a_dtype), torch.randn(n, k, generator=generator).to(b_dtype)


def multiply(a, b_t, out_dtype=torch.float32, bias=None):
    return scaled_mm(a, SCALE_INV[0], b_t, SCALE_INV[1], out_dtype, fast_accum=False, bias=bias)


@pytest.mark.parametrize("dtypes", [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3)], ids=str)
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_product(dtypes, out_dtype):
    a, b_t = make_operands(a_dtype=dtypes[0], b_dtype=dtypes[1])
    expected = (a.double() * 0.5) @ (b_t.double() * 0.25).t()
    out = multiply(a, b_t, out_dtype)
    assert out.dtype is out_dtype
    torch.testing.assert_close(out.double(), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("bias_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_bias_is_added_after_scaling(bias_dtype):
    a, b_t = make_operands()
    bias = torch.arange(48, dtype=bias_dtype)
    torch.testing.assert_close(multiply(a, b_t, bias=bias), multiply(a, b_t) + bias.float())


def test_no_rows_and_no_contraction():
    a, b_t = make_operands(m=0)
    assert multiply(a, b_t).shape == (0, 48)
    a, b_t = make_operands(k=0)
    assert (multiply(a, b_t, bias=torch.ones(48)) == 1).all()


def test_quantized_operands_reach_the_sqnr_of_fp8():
    generator = torch.Generator().manual_seed(1)
    x, w = torch.randn(64, 256, generator=generator), torch.randn(128, 256, generator=generator)
    scale = torch.tensor([448 / x.abs().max(), 448 / w.abs().max()])
    scale_inv = torch.zeros(2, 4)
    scale_inv[:, 0] = 1 / scale
    qx, qw = (quantize(t, scale, scale_inv, slot, E4M3) for slot, t in enumerate((x, w)))
    out = scaled_mm(qx.data, qx.scale_inv, qw.data, qw.scale_inv, torch.float32, fast_accum=True)
    expected = x @ w.t()
    assert 10 * torch.log10(expected.square().mean() / (out - expected).square().mean()) > 25


@pytest.mark.parametrize(
    ("operands", "message"),
    [
        ({"k": 24}, "K is 24, expected a multiple of 16"),
        ({"n": 40}, "N is 40, expected a multiple of 16"),
        ({"a_dtype": E5M2, "b_dtype": E5M2}, "both float8_e5m2"),
        ({"a_dtype": torch.bfloat16}, "a is torch.bfloat16"),
    ],
)
def test_refusals(operands, message):
    with pytest.raises(ValueError, match=message):
        multiply(*make_operands(**operands))


def test_refuses_layouts_dtypes_and_scales():
    a, b_t = make_operands(m=48)
    with pytest.raises(ValueError, match="row-major"):
        multiply(a.t(), b_t)
    with pytest.raises(ValueError, match="same contraction"):
        multiply(a, make_operands(k=64)[1])
    with pytest.raises(ValueError, match="out_dtype is"):
        multiply(a, b_t, out_dtype=E4M3)
    with pytest.raises(ValueError, match="bias has shape"):
        multiply(a, b_t, bias=torch.ones(5))
    with pytest.raises(ValueError, match="a_scale_inv is"):
        scaled_mm(a, torch.ones(2), b_t, SCALE_INV[1], torch.float32, fast_accum=True)


@pytest.mark.slow
def test_traced_product_equals_eager():
    a, b_t = make_operands()
    bias = torch.ones(48)
    traced = torch.compile(multiply, fullgraph=True, backend="aot_eager")
    assert torch.equal(traced(a, b_t, bias=bias), multiply(a, b_t, bias=bias))
