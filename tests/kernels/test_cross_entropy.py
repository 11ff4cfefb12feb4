"""The loss and its gradient: the reference equals torch, and the CUDA source is within the tolerance that the module states.

Exact values are computed in float64 from the same logits.
"""

import pytest
import torch
from torch import Tensor

from graphrt.kernels import compiler, cross_entropy, device
from graphrt.kernels.device import entry_points

from . import emulated

IGNORED = -100
LOSS_RTOL, LOSS_ATOL = 1e-5, 2e-6
#: One unit in the last place, relative to the value.
ULP = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: 2.0**-23}

#: M, V: below, at and above one vector, one round of the block's threads, one block's share of a row; aligned or not.
SHAPES = [(1, 1), (3, 7), (2, 8), (5, 16), (3, 100), (2, 2048), (2, 2056), (3, 8192), (2, 8200), (2, 9001), (1, 33000)]
LARGE_SHAPES = [(64, 32768), (37, 50257), (19, 128256), (1000, 320)]


def make_logits(shape: tuple[int, int], dtype: torch.dtype, *, spread: float = 4.0, seed: int = 0, device: str = "cpu") -> Tensor:
    """Normal values around a different, large mean in each row."""
    generator = torch.Generator().manual_seed(seed)
    means = torch.randn(shape[0], 1, generator=generator) * 30
    return (torch.randn(shape, generator=generator) * spread + means).to(dtype).to(device)


def make_labels(shape: tuple[int, int], *, seed: int = 0, device: str = "cpu") -> Tensor:
    """Classes, the first and the last among them, and every third row ignored."""
    labels = torch.randint(shape[1], shape[:1], generator=torch.Generator().manual_seed(seed))
    labels[-1] = shape[1] - 1
    labels[1::3] = IGNORED
    return labels.to(device)


def exact(logits: Tensor, labels: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """losses, lse and gradient in float64; every label a class or IGNORED."""
    values = logits.detach().cpu().double().requires_grad_()
    losses = torch.nn.functional.cross_entropy(values, labels.cpu(), reduction="none", ignore_index=IGNORED)
    [gradient] = torch.autograd.grad(losses.sum() * scale, values)
    return losses.detach(), values.detach().logsumexp(1), gradient


def assert_within(actual: Tensor, expected: Tensor, rtol: float, atol: float | Tensor, what: str) -> None:
    error = (actual.cpu().double() - expected).abs()
    excess = error - (rtol * expected.abs() + atol)
    assert bool((excess <= 0).all()), f"{what}: error {error.max():.3g}, {excess.max():.3g} too much"


def check(forward, backward_, logits: Tensor, labels: Tensor, *, scale: float = 0.01) -> None:
    """Both functions are within tolerance of the exact values."""
    losses, lse = forward(logits, labels, IGNORED)
    expected_losses, expected_lse, expected_gradient = exact(logits, labels, scale)
    assert_within(losses, expected_losses, LOSS_RTOL, LOSS_ATOL, "losses")
    assert_within(lse, expected_lse, 2.0**-22, LOSS_ATOL, "lse")
    assert not losses[(labels == IGNORED)].any()
    backward_(logits, labels, lse, torch.tensor(scale, device=logits.device), IGNORED)
    lse_error = expected_lse[:, None].abs() * 2.0**-23 + 1e-6
    tolerance = expected_gradient.abs() * lse_error + scale * lse_error
    assert_within(logits, expected_gradient, ULP[logits.dtype], tolerance, "gradient")
    assert not logits[(labels == IGNORED)].any()


def check_special_rows(forward, backward_, dtype: torch.dtype, num_classes: int, device: str = "cpu") -> None:
    """Infinite and NaN logits, and labels out of range: what the reference gives, NaN for NaN and inf for inf."""
    logits = make_logits((12, num_classes), dtype, device=device)
    labels = torch.arange(12, device=device) % num_classes
    last = num_classes - 1
    logits[0, last] = torch.nan
    logits[1, 3] = torch.inf
    logits[2] = -torch.inf
    logits[3, : num_classes // 2] = -torch.inf
    logits[4, 1:] = -torch.inf
    labels[4] = 0
    labels[5], labels[6], labels[7] = -1, num_classes, 2**40
    labels[8], logits[8, 0] = IGNORED, torch.nan
    logits[9] = torch.nan
    expected_logits = logits.cpu().clone()
    expected = cross_entropy.reference_cross_entropy(expected_logits, labels.cpu(), IGNORED)
    actual = forward(logits, labels, IGNORED)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=2e-6, atol=1e-5, equal_nan=True)
    assert actual[0].isnan().tolist() == [True, True, True, False, False, True, True, True, False, True, False, False]
    scale = torch.tensor([0.5], device=device)
    backward_(logits, labels, expected[1].to(device), scale, IGNORED)
    cross_entropy.reference_cross_entropy_backward_(expected_logits, labels.cpu(), expected[1], scale.cpu(), IGNORED)
    torch.testing.assert_close(
        logits.cpu(), expected_logits, rtol=ULP[dtype] if dtype != torch.float32 else 1e-5, atol=1e-6, equal_nan=True
    )


# ---- the reference ----


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_reference_is_within_tolerance(dtype):
    for shape in SHAPES[:8]:
        check(cross_entropy.cross_entropy, cross_entropy.cross_entropy_backward_, make_logits(shape, dtype), make_labels(shape))


def test_reference_equals_torch():
    logits = make_logits((6, 50), torch.float32).requires_grad_()
    labels = make_labels((6, 50))
    losses, lse = cross_entropy.cross_entropy(logits, labels)
    expected = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=1e-6)
    [gradient] = torch.autograd.grad(expected.sum(), logits)
    assert not losses.requires_grad
    cross_entropy.cross_entropy_backward_(logits, labels, lse, torch.ones(()))
    torch.testing.assert_close(logits.detach(), gradient, rtol=1e-5, atol=1e-5)


def test_loss_of_close_logits_is_not_cancelled():
    """The difference of the maximum and the label's logit is taken before anything is rounded."""
    logits = torch.full((1, 4), -1e4)
    logits[0, 2] = 3e4
    assert cross_entropy.cross_entropy(logits, torch.tensor([2]))[0].item() == 0
    logits = torch.tensor([[3e4, 3e4 - 7]])
    loss = cross_entropy.cross_entropy(logits, torch.tensor([0]))[0].double()
    torch.testing.assert_close(loss, torch.tensor([-7.0]).double().exp().log1p(), rtol=1e-4, atol=1e-7)


def test_another_ignore_index():
    logits = make_logits((4, 16), torch.float32)
    labels = torch.tensor([3, 5, -100, 3])
    losses, lse = cross_entropy.cross_entropy(logits, labels, ignore_index=3)
    assert losses[[0, 3]].tolist() == [0, 0]
    assert losses.isnan().tolist() == [False, False, True, False]
    cross_entropy.cross_entropy_backward_(logits, labels, lse, torch.ones(1), ignore_index=3)
    assert not logits[[0, 3]].any()
    assert logits.isnan().all(dim=1).tolist() == [False, False, True, False]


def test_reference_of_special_rows():
    for dtype in (torch.bfloat16, torch.float32):
        check_special_rows(cross_entropy.cross_entropy, cross_entropy.cross_entropy_backward_, dtype, 40)


# ---- arguments ----


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logits": torch.zeros(2, 3, 4)}, "logits are"),
        ({"logits": torch.zeros(2, 0)}, "logits are"),
        ({"logits": torch.zeros(4, 2).t()}, "logits are non-contiguous"),
        ({"logits": torch.zeros(2, 4).double()}, "logits have dtype torch.float64, expected bfloat16 or float16 or float32"),
        ({"labels": torch.zeros(3).long()}, "labels is"),
        ({"labels": torch.zeros(2).int()}, "labels is contiguous torch.int32"),
        ({"labels": torch.zeros(2, device="meta").long()}, "on cpu"),
        ({"lse": torch.zeros(2).double()}, "lse is"),
        ({"lse": torch.zeros(2, 1)}, "lse is"),
        ({"grad_losses_scale": torch.zeros(2)}, "grad_losses_scale is"),
        ({"grad_losses_scale": torch.zeros(1).half()}, "grad_losses_scale is"),
    ],
)
def test_the_bad_argument_is_named(changes, message):
    arguments = {
        "logits": torch.zeros(2, 4),
        "labels": torch.zeros(2).long(),
        "lse": torch.zeros(2),
        "grad_losses_scale": torch.ones(()),
        **changes,
    }
    with pytest.raises(ValueError, match=message):
        cross_entropy.cross_entropy_backward_(**arguments)
    if not {"lse", "grad_losses_scale"} & changes.keys():
        with pytest.raises(ValueError, match=message):
            cross_entropy.cross_entropy(arguments["logits"], arguments["labels"])


# ---- the CUDA source, emulated ----


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return emulated.build("cross_entropy", tmp_path_factory.mktemp("cross_entropy"))


@pytest.fixture(params=emulated.ORDERS)
def emulate(request, monkeypatch, library):
    """Threads run in order and in reverse: a missing barrier shows in one of them."""
    monkeypatch.setattr(device, "launch", emulated.make_launch([library], is_reversed=request.param))


needs_gxx = pytest.mark.skipif(not emulated.is_available(), reason="g++ is not installed")
LAUNCHES = (cross_entropy.launch_cross_entropy, cross_entropy.launch_cross_entropy_backward_)


@needs_gxx
@pytest.mark.usefixtures("emulate")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0]}x{shape[1]}")
def test_emulated_kernels_are_within_tolerance(shape, dtype):
    check(*LAUNCHES, make_logits(shape, dtype), make_labels(shape))


@needs_gxx
@pytest.mark.usefixtures("emulate")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("num_classes", [41, 48, 2600])
def test_emulated_special_rows_equal_reference(dtype, num_classes):
    check_special_rows(*LAUNCHES, dtype, num_classes)


@needs_gxx
@pytest.mark.usefixtures("emulate")
def test_emulated_unaligned_and_aligned_agree_and_nothing_else_is_written():
    shape = (3, 2064)
    aligned = make_logits(shape, torch.bfloat16)
    labels = make_labels(shape)
    storage = torch.full((aligned.numel() + 9,), 3.0, dtype=torch.bfloat16)
    unaligned = storage[1:-8].view(shape).copy_(aligned)
    assert unaligned.data_ptr() % 16
    check(*LAUNCHES, unaligned, labels)
    check(*LAUNCHES, aligned, labels)
    torch.testing.assert_close(unaligned, aligned, rtol=2.0**-7, atol=1e-6)
    assert (storage[:1] == 3).all()
    assert (storage[-8:] == 3).all()


@needs_gxx
@pytest.mark.usefixtures("emulate")
def test_emulated_nearly_one_hot_row():
    """The label's probability is all but 1: the loss keeps its small value."""
    logits = make_logits((2, 512), torch.bfloat16, spread=0.5)
    logits[:, 100] = logits[:, 100] + 20
    labels = torch.tensor([100, 100])
    check(*LAUNCHES, logits, labels)


@needs_gxx
@pytest.mark.usefixtures("emulate")
def test_no_rows_launch_nothing():
    logits, labels = torch.zeros(0, 16).bfloat16(), torch.zeros(0).long()
    losses, lse = LAUNCHES[0](logits, labels, IGNORED)
    assert losses.shape == lse.shape == (0,)
    LAUNCHES[1](logits, labels, lse, torch.ones(1), IGNORED)


def test_source_compiles_without_spills():
    pytest.importorskip("cuda.bindings.nvrtc")
    cubin, log = compiler.compile_source(compiler.source_text("cross_entropy"), "cross_entropy", "sm_90", ptxas_options=("-v",))
    kinds = ("cross_entropy", "cross_entropy_backward")
    assert entry_points(cubin) == sorted(f"graphrt_{kind}_{name}" for kind in kinds for name in ("bf16", "fp32"))
    assert "warning" not in log
    assert log.count(" 0 bytes spill stores, 0 bytes spill loads") == 4


# ---- on a GPU ----


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, *LARGE_SHAPES], ids=lambda shape: f"{shape[0]}x{shape[1]}")
def test_gpu_kernels_are_within_tolerance(shape, dtype):
    labels = make_labels(shape, device="cuda")
    for spread in (0.1, 4.0, 20.0):
        logits = make_logits(shape, dtype, spread=spread, device="cuda")
        check(cross_entropy.cross_entropy, cross_entropy.cross_entropy_backward_, logits, labels)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("num_classes", [41, 48, 32768, 50257])
def test_gpu_special_rows_equal_reference(dtype, num_classes):
    check_special_rows(cross_entropy.cross_entropy, cross_entropy.cross_entropy_backward_, dtype, num_classes, "cuda")


@pytest.mark.gpu
def test_gpu_replays_follow_their_inputs_and_repeat_their_bits():
    shape = (100, 4104)
    logits, labels = make_logits(shape, torch.bfloat16, device="cuda"), make_labels(shape, device="cuda")
    scale = torch.ones((), device="cuda")
    device.preload()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        losses, lse = cross_entropy.cross_entropy(logits, labels)
        cross_entropy.cross_entropy_backward_(logits, labels, lse, scale)
    for seed in range(3):
        values = make_logits(shape, torch.bfloat16, seed=seed)
        labels.copy_(make_labels(shape, seed=seed))
        scale.fill_(0.5 + seed)
        results = []
        for _ in range(2):
            logits.copy_(values)
            graph.replay()
            results.append([tensor.clone() for tensor in (losses, lse, logits)])
        for one, other in zip(*results, strict=True):
            assert torch.equal(one, other)
        expected_losses, expected_lse, expected_gradient = exact(values, labels, 0.5 + seed)
        assert_within(losses, expected_losses, LOSS_RTOL, LOSS_ATOL, "losses")
        assert_within(lse, expected_lse, 2.0**-22, LOSS_ATOL, "lse")
        assert_within(logits, expected_gradient, ULP[torch.bfloat16], 1e-4, "gradient")


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_gpu_launches_do_not_synchronize():
    logits, labels = make_logits((8, 512), torch.bfloat16, device="cuda"), make_labels((8, 512), device="cuda")
    scale = torch.ones(1, device="cuda")
    device.preload()
    torch.cuda.set_sync_debug_mode("error")
    try:
        _, lse = cross_entropy.cross_entropy(logits, labels)
        cross_entropy.cross_entropy_backward_(logits, labels, lse, scale)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_gpu_refuses_fp16():
    with pytest.raises(ValueError, match="expected bfloat16 or float32 on cuda"):
        cross_entropy.cross_entropy(torch.zeros(2, 16, device="cuda").half(), torch.zeros(2, device="cuda").long())


@pytest.mark.gpu
def test_gpu_more_than_2_to_the_31_elements():
    shape = (66_000, 32_768)
    if torch.cuda.mem_get_info()[0] < 10 * 2**30:
        pytest.skip("needs 10 GiB of free GPU memory")
    logits = torch.zeros(shape, dtype=torch.bfloat16, device="cuda")
    labels = torch.zeros(shape[0], dtype=torch.int64, device="cuda")
    labels[-1] = 7
    logits[-1, 7] = 5.0
    losses, lse = cross_entropy.cross_entropy(logits, labels)
    expected_losses, _, expected_gradient = exact(logits[-2:], labels[-2:], 1.0)
    assert_within(losses[-2:], expected_losses, LOSS_RTOL, LOSS_ATOL, "losses")
    cross_entropy.cross_entropy_backward_(logits, labels, lse, torch.ones(1, device="cuda"))
    assert_within(logits[-2:], expected_gradient, ULP[torch.bfloat16], 1e-5, "gradient")
