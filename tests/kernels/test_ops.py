"""Traced code runs the kernels through the custom operators, and gives what eager gives."""

import pytest
import torch

from graphrt import kernels

from .cases import NUM_SLOTS, SLOT, assert_same_result, make_input, make_scales, make_state

E4M3 = torch.float8_e4m3fn


def compile_whole(function):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")


@pytest.mark.parametrize("transpose", [False, True])
def test_traced_quantize_equals_eager(transpose):
    scale, scale_inv = make_scales(0.3)
    amax, expected_amax = torch.zeros(NUM_SLOTS), torch.zeros(NUM_SLOTS)
    x = make_input(17, 32, torch.bfloat16).requires_grad_()
    traced = compile_whole(lambda t: kernels.quantize(t, scale, scale_inv, SLOT, E4M3, amax=amax, transpose=transpose))
    expected = kernels.quantize(x, scale, scale_inv, SLOT, E4M3, amax=expected_amax, transpose=transpose)
    assert_same_result(traced(x), expected)
    assert amax[SLOT] == expected_amax[SLOT] != 0


def test_traced_out_is_written_in_place():
    scale, scale_inv = make_scales(0.3)
    x = make_input(17, 32, torch.bfloat16)
    out = kernels.quantize(torch.zeros_like(x), scale, scale_inv, SLOT, E4M3, transpose=True)
    compile_whole(lambda t: kernels.quantize(t, scale, scale_inv, SLOT, E4M3, transpose=True, out=out).data.float().sum())(x)
    assert_same_result(out, kernels.quantize(x, scale, scale_inv, SLOT, E4M3, transpose=True))


def test_traced_amax_and_update_change_their_arguments():
    state = make_state(4, 12)
    state[0].zero_()

    def step(x):
        kernels.record_amax_(x, state[0][0], 2)
        kernels.update_scales_(*state, start=0, end=12, direction=1, fp8_max=448.0, margin=0, algo="max")
        return x + 1

    compile_whole(step)(torch.tensor([3.0, -7.0]))
    assert state[0][3, 2] == 7
    assert state[1][2] == 64
    assert state[4].tolist() == [5, 8]


def test_operators_pass_opcheck():
    scale, scale_inv = make_scales(0.3)
    x = make_input(8, 16, torch.float32)
    amax = torch.zeros(NUM_SLOTS)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.graphrt.record_amax_.default, (x, amax, SLOT), test_utils=checks)
    arguments = (x, scale, scale_inv, SLOT, E4M3, amax)
    for transpose in (False, True):
        torch.library.opcheck(torch.ops.graphrt.quantize.default, (*arguments, transpose), test_utils="test_faketensor")
