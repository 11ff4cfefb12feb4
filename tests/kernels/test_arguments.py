"""Refused arguments are named, with what was expected; importing the kernels asks for no driver."""

import subprocess
import sys

import pytest
import torch

from graphrt import kernels
from graphrt.errors import GraphrtError

from .cases import NUM_SLOTS, SLOT, make_scales, make_state

E4M3 = torch.float8_e4m3fn


def quantize(**changes):
    scale, scale_inv = make_scales(1.0)
    arguments = {"x": torch.ones(4, 16), "scale": scale, "scale_inv": scale_inv, "slot": SLOT, "dtype": E4M3, **changes}
    return kernels.quantize(**arguments)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.ones(4)}, "two dimensions"),
        ({"x": torch.ones(4, 4, dtype=torch.int32)}, "x has dtype torch.int32"),
        ({"dtype": torch.float16}, "dtype is torch.float16"),
        ({"scale": torch.ones(NUM_SLOTS, dtype=torch.float64)}, "scale is"),
        ({"scale": torch.ones(2 * NUM_SLOTS)[::2]}, "scale is non-contiguous"),
        ({"scale_inv": torch.ones(NUM_SLOTS)}, "scale_inv is"),
        ({"slot": NUM_SLOTS}, "slot is 5"),
        ({"slot": -1}, "slot is -1"),
        ({"amax": torch.zeros(2)}, "length of amax"),
        ({"amax": torch.zeros(NUM_SLOTS, 2)}, "amax is"),
        ({"scale": torch.ones(NUM_SLOTS, device="meta")}, "on cpu"),
    ],
)
def test_quantize_names_the_bad_argument(changes, message):
    with pytest.raises(ValueError, match=message):
        quantize(**changes)


def test_out_must_fit():
    out = quantize(transpose=True)
    with pytest.raises(ValueError, match=r"out\.transposed is a tensor"):
        quantize(out=out)
    with pytest.raises(ValueError, match=r"out\.data is"):
        quantize(x=torch.ones(8, 16), transpose=True, out=out)
    with pytest.raises(ValueError, match=r"out\.transposed is contiguous"):
        quantize(transpose=True, out=out._replace(transposed=torch.zeros(16, 4).to(E4M3)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"start": 3, "end": 2}, "start and end"),
        ({"end": 99}, "start and end"),
        ({"direction": 2}, "direction is 2"),
        ({"algo": "min"}, "algo is 'min'"),
    ],
)
def test_update_names_the_bad_argument(changes, message):
    rule = {"start": 0, "end": 12, "direction": 0, "fp8_max": 448.0, "margin": 0, "algo": "max", **changes}
    with pytest.raises(ValueError, match=message):
        kernels.update_scales_(*make_state(4, 12), **rule)


def test_update_names_the_bad_tensor():
    state = list(make_state(4, 12))
    state[3] = state[3].long()
    with pytest.raises(ValueError, match="num_nonfinite is"):
        kernels.update_scales_(*state, start=0, end=12, direction=0, fp8_max=448.0, margin=0, algo="max")


@pytest.mark.slow
def test_importing_does_not_import_cuda_core():
    code = "import graphrt.kernels, sys; assert not [m for m in sys.modules if m.startswith('cuda.core')]"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks what happens without a GPU")
def test_preload_without_a_gpu_says_so():
    kernels.preload(torch.device("cpu"))
    for _ in range(2):  # twice: without a driver a second load would block for ever
        with pytest.raises(GraphrtError, match="No CUDA device"):
            kernels.preload()
