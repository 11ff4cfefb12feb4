"""cuBLASLt called directly: its first algorithm is torch's bit for bit, the others are as good, and Trainers use them."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphrt
from graphrt.kernels import cublaslt, gemm, gemm_choice, scaled_mm
from graphrt.kernels.cublaslt_gemm import Algorithm, Gemm, GemmKey
from graphrt.kernels.gemm_cache import Choice
from graphrt.kernels.gemm_choice import NUM_CANDIDATES, GemmChoices, Operands, choices

pytestmark = pytest.mark.gpu

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SHAPES = ((16, 16, 16), (512, 2304, 768), (768, 2048, 512), (1024, 4096, 2048), (2048, 512, 8192))
DTYPES = ((E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2))
OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def make_operands(m: int, n: int, k: int, a_dtype: Any = E4M3, b_dtype: Any = E4M3, bias_dtype: Any = None, seed: int = 0) -> Operands:
    generator = torch.Generator("cuda").manual_seed(seed)
    a, b_t = (
        torch.randn(rows, k, generator=generator, device="cuda").to(dtype) for rows, dtype in zip((m, n), (a_dtype, b_dtype), strict=True)
    )
    bias = None if bias_dtype is None else torch.randn(n, generator=generator, device="cuda").to(bias_dtype)
    return Operands(a, torch.tensor([0.5], device="cuda"), b_t, torch.tensor([0.25], device="cuda"), bias)


def make_gemm(operands: Operands, out_dtype: torch.dtype, fast_accum: bool) -> Gemm:
    a, _, b_t, _, bias = operands
    key = GemmKey(a.get_device(), a.shape[0], b_t.shape[0], a.shape[1], a.dtype, b_t.dtype, out_dtype, fast_accum, bias is not None)
    return Gemm(cublaslt.load(), key)


def multiply(product: Gemm, algorithm: Algorithm, operands: Operands) -> Tensor:
    out = torch.full((product.key.m, product.key.n), torch.nan, dtype=product.key.out, device="cuda")
    product.multiply(algorithm, *operands, out)
    return out


def multiply_by_torch(operands: Operands, out_dtype: torch.dtype, fast_accum: bool) -> Tensor:
    return gemm._multiply_by_torch(operands, out_dtype, fast_accum, None)


def exact(operands: Operands) -> Tensor:
    a, a_scale_inv, b_t, b_scale_inv, bias = operands
    product = (a.double() @ b_t.double().t()) * (a_scale_inv.double() * b_scale_inv.double())
    return product if bias is None else product + bias.double()


def sqnr_db(actual: Tensor, expected: Tensor) -> float:
    noise = (actual.double() - expected).square().mean()
    return float("inf") if noise == 0 else float(10 * torch.log10(expected.square().mean() / noise))


@pytest.fixture
def chosen_file(tmp_path) -> Iterator[Any]:
    """The process's choices, empty and kept in a file of the test's."""
    path = tmp_path / "choices.json"
    choices.__init__(path=lambda: path)
    yield path
    choices.__init__()


@pytest.fixture
def last_candidate(monkeypatch, chosen_file) -> None:
    """Every product runs with the last algorithm that is proposed, which is hardly ever torch's."""
    monkeypatch.setattr(gemm_choice, "choose", lambda candidates, measure: Choice(candidates[-1], 2.0, 1.0))


@pytest.mark.parametrize("fast_accum", [False, True])
@pytest.mark.parametrize("out_dtype", OUT_DTYPES, ids=str)
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_candidates(dtypes, out_dtype, fast_accum):
    for shape in SHAPES:
        for bias_dtype in (None, out_dtype) if out_dtype is not torch.float32 else (None,):
            operands = make_operands(*shape, *dtypes, bias_dtype)
            product = make_gemm(operands, out_dtype, fast_accum)
            candidates = product.candidates(NUM_CANDIDATES)
            by_torch, expected = multiply_by_torch(operands, out_dtype, fast_accum), exact(operands)
            assert torch.equal(multiply(product, candidates[0], operands), by_torch), f"{product.key}: the first is not torch's"
            for i, algorithm in enumerate(candidates):
                out = multiply(product, algorithm, operands)
                assert torch.equal(out, multiply(product, algorithm, operands)), f"{product.key}: candidate {i} is not reproducible"
                assert product.accepts(algorithm), f"{product.key}: candidate {i} is not accepted"
                assert sqnr_db(out, expected) > min(sqnr_db(by_torch, expected) - 3, 60), f"{product.key}: candidate {i} is inexact"


def test_choosing_times_and_leaves_everything_else_alone(chosen_file):
    operands = make_operands(1024, 4096, 2048)
    out = torch.full((1024, 4096), 7.0, dtype=torch.bfloat16, device="cuda")
    scaled_mm(*operands[:4], torch.bfloat16, fast_accum=True, out=out.clone())  # torch's own workspace
    rng, allocated = torch.cuda.get_rng_state(), torch.cuda.memory_allocated()
    with choices.choosing():
        scaled_mm(*operands[:4], torch.bfloat16, fast_accum=True, out=out)
    assert choices.num_timed == 1
    assert sqnr_db(out, exact(operands)) > 25
    assert torch.equal(torch.cuda.get_rng_state(), rng)
    assert torch.cuda.memory_allocated() == allocated
    later = GemmChoices(path=lambda: chosen_file)
    with later.choosing():
        found = [later.find(make_gemm(operands, torch.bfloat16, True).key, operands) for _ in range(2)]
    assert later.num_timed == 0
    known = next(iter(choices._chosen.values()))
    assert [None if one is None else one.algorithm for one in found] == [None if known is None else known.algorithm] * 2


def test_scaled_mm_runs_the_chosen_one_with_and_without_out(last_candidate):
    for shape in SHAPES:
        operands = make_operands(*shape)
        product = make_gemm(operands, torch.float32, False)
        expected = multiply(product, product.candidates(NUM_CANDIDATES)[-1], operands)
        out = torch.full(expected.shape, torch.nan, device="cuda")
        with choices.choosing():
            assert torch.equal(scaled_mm(*operands[:4], torch.float32, fast_accum=False), expected)
        assert scaled_mm(*operands[:4], torch.float32, fast_accum=False, out=out) is out
        assert torch.equal(out, expected)
        bias = torch.ones(shape[1], device="cuda")
        assert torch.equal(scaled_mm(*operands[:4], torch.float32, fast_accum=False, bias=bias), expected + 1)


def test_a_captured_product_equals_the_eager_one(last_candidate):
    operands = make_operands(768, 2048, 512)
    with choices.choosing():
        scaled_mm(*operands[:4], torch.bfloat16, fast_accum=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = scaled_mm(*operands[:4], torch.bfloat16, fast_accum=True)
    for seed in range(1, 4):
        other = make_operands(768, 2048, 512, seed=seed)
        for tensor, value in zip(operands[:4], (other.a, other.a_scale_inv * seed, other.b_t, other.b_scale_inv), strict=True):
            tensor.copy_(value)
        graph.replay()
        assert torch.equal(out, scaled_mm(*operands[:4], torch.bfloat16, fast_accum=True))
        assert sqnr_db(out, exact(operands)) > 25


def test_under_a_capture_an_unknown_product_is_torchs(last_candidate):
    operands = make_operands(512, 2304, 768)
    expected = multiply_by_torch(operands, torch.bfloat16, True)
    graph = torch.cuda.CUDAGraph()
    with choices.choosing(), torch.cuda.graph(graph):
        out = scaled_mm(*operands[:4], torch.bfloat16, fast_accum=True)
    graph.replay()
    assert torch.equal(out, expected)
    assert choices.num_timed == 0


WIDTH, TOKENS, NUM_STEPS = 256, 512, 6
NUM_PRODUCTS = 2 * 3 - 1  # the input of the first linear needs no gradient


def make_trainer(mode: str) -> graphrt.Trainer:
    """Without an operation that is not reproducible: strict mode, which would leave every product to torch, stays off."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)).cuda()
    graphrt.convert_to_float8_training(model, recipe=graphrt.DelayedScaling(amax_history_len=3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            y = model(x)
        return (y.float() - x).square().mean()

    return graphrt.Trainer(model, optimizer, loss_fn, mode=mode, max_grad_norm=1.0)


def run(mode: str) -> tuple[list[Tensor], list[Tensor]]:
    with make_trainer(mode) as trainer:
        generator = torch.Generator("cuda").manual_seed(1)
        losses = [trainer.step(torch.randn(TOKENS, WIDTH, generator=generator, device="cuda")).loss for _ in range(NUM_STEPS)]
        return losses, [p.detach().clone() for p in trainer.model.parameters()]


@pytest.mark.parametrize("is_forced", [False, True], ids=["timed", "last candidate"])
def test_captured_steps_equal_eager_ones(request, is_forced, chosen_file):
    if is_forced:
        request.getfixturevalue("last_candidate")
    captured, eager = run("graph"), run("eager")
    for actual, expected in zip(captured, eager, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    assert len(choices._chosen) == choices.num_timed == NUM_PRODUCTS
    if is_forced:
        assert all(chosen is not None for chosen in choices._chosen.values())
    assert chosen_file.exists()


def test_a_trainer_in_another_process_of_this_machine_would_make_the_same_choices(chosen_file):
    first = run("graph")
    algorithms = {key: chosen and chosen.algorithm for key, chosen in choices._chosen.items()}
    choices.__init__(path=lambda: chosen_file)
    second = run("graph")
    assert choices.num_timed == 0
    assert {key: chosen and chosen.algorithm for key, chosen in choices._chosen.items()} == algorithms
    assert all(torch.equal(a, b) for a, b in zip(first[0] + first[1], second[0] + second[1], strict=True))


def test_a_captured_step_knows_what_its_products_compute(last_candidate):
    with make_trainer("graph") as trainer:
        for _ in range(3):
            trainer.step(torch.randn(TOKENS, WIDTH, device="cuda"))
        assert trainer._captured is not None
        assert trainer._captured.latest is not None
        assert trainer._captured.latest.node_map is not None
        flops = [node.flops for node in trainer._captured.latest.node_map.nodes if node.flops]
        assert flops.count(2 * TOKENS * WIDTH * 4 * WIDTH) == NUM_PRODUCTS
        assert trainer._captured.stats.estimated_pool_bytes > 0
        assert "products run with another algorithm than torch's" in str(trainer.report())


def test_strict_steps_choose_nothing(chosen_file):
    torch.use_deterministic_algorithms(True)
    try:
        run("graph")
    finally:
        torch.use_deterministic_algorithms(False)
    assert choices.num_timed == 0
    assert not chosen_file.exists()
