"""The gradient of an embedding, bit for bit: the reference equals a loop, the CUDA source on the emulation and on a GPU the reference."""

import pytest
import torch
from torch import Tensor

from graphrt.kernels import device, embedding

from . import emulated
from .cases import INPUT_DTYPES, assert_same_bits, make_input

SEGMENT = embedding._SEGMENT
dtypes = pytest.mark.parametrize("dtype", INPUT_DTYPES, ids=str)

#: N, D, V: one position; not a multiple of a vector; more than one block's columns; below, at and above one segment, a batch of
#: rows, a warp of the sort; tables of one row, and far larger than the batch.
SHAPES = [
    (1, 8, 1),
    (1, 12, 7),
    (2, 1, 2),
    (64, 8, 1),
    (65, 8, 1),
    (33, 12, 7),
    (300, 20, 3),
    (40, 2056, 50),
    (100, 8, 32768),
    (150, 768, 90),
]
LARGE_SHAPES = [(512, 64, 32768), (8192, 768, 8000), (8192, 2048, 3000), (8192, 4096, 300), (8200, 36, 5), (20000, 64, 1000)]

#: How the tokens of N positions are chosen from V.
CHOICES = {
    "random": lambda num, rows, generator: torch.randint(rows, (num,), generator=generator),
    "all the same": lambda num, rows, generator: torch.full((num,), rows // 2),
    "all different": lambda num, rows, generator: torch.randperm(max(num, rows), generator=generator)[:num] % rows,
    "half the same": lambda num, rows, generator: torch.where(
        torch.rand(num, generator=generator) < 0.5, rows - 1, torch.randint(rows, (num,), generator=generator)
    ),
    "skewed": lambda num, rows, generator: (torch.rand(num, generator=generator) ** 6 * rows).long(),
}


def make_tokens(choice: str, num: int, rows: int, *, seed: int = 0) -> Tensor:
    return CHOICES[choice](num, rows, torch.Generator().manual_seed(seed))


def make_table(rows: int, cols: int, *, seed: int = 3) -> Tensor:
    """Negative zeros among its values: a row that is not touched keeps them."""
    table = torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed))
    return table.masked_fill_(table.abs() < 0.3, -0.0)


def add_in_turn(grad: Tensor, tokens: Tensor, out: Tensor, padding: int = -1) -> None:
    """The order that the module states, one row at a time."""
    for token in set(tokens.tolist()) & set(range(out.shape[0])) - {padding}:
        rows = grad[tokens == token].float()
        total = torch.zeros(grad.shape[1])
        for segment in rows.split(SEGMENT):
            segment_sum = torch.zeros(grad.shape[1])
            for row in segment:
                segment_sum += row
            total += segment_sum
        out[token] += total


def check(
    run, grad: Tensor, tokens: Tensor, rows: int, *, accumulate: bool = False, padding: int = -1, expect=embedding._compute, offset: int = 0
) -> None:
    """``run`` equals the reference, in every row of the table and beside it."""
    size = rows * grad.shape[1]
    storage = torch.full((offset + size + 4,), 9.0, device=grad.device)
    out = storage[offset : offset + size].view(rows, -1)
    out.copy_(make_table(rows, grad.shape[1]) if accumulate else torch.zeros_like(out))
    expected = out.cpu().clone()
    expect_args = (grad.cpu(), tokens.cpu(), expected)
    expect(*expect_args, padding) if expect is add_in_turn else expect(*expect_args, accumulate, padding)
    run(grad, tokens, out, accumulate, padding)
    assert_same_bits(out, expected, "out")
    assert (torch.cat([storage[:offset], storage[offset + size :]]) == 9).all()


# ---- the reference ----


@dtypes
@pytest.mark.parametrize("choice", CHOICES)
def test_reference_adds_in_the_stated_order(choice, dtype):
    for num, cols, rows in [(1, 3, 1), (65, 8, 1), (300, 20, 3), (200, 16, 90), (1, 3, 7)]:
        for accumulate in (False, True):
            tokens = make_tokens(choice, num, rows)
            check(embedding._compute, make_input(num, cols, dtype), tokens, rows, accumulate=accumulate, expect=add_in_turn)


def test_reference_skips_padding_and_what_is_out_of_range():
    tokens = torch.tensor([3, -1, 5, 2, 3, 2**40, 6, -(2**40), 2, 0])
    grad = make_input(10, 8, torch.float32)
    for padding in (-1, 3, 0):
        for accumulate in (False, True):
            check(embedding._compute, grad, tokens, 6, accumulate=accumulate, padding=padding, expect=add_in_turn)
    check(embedding._compute, grad, torch.full((10,), 3), 6, accumulate=True, padding=3, expect=add_in_turn)


@pytest.mark.parametrize("num_threads", [1, 4])
def test_reference_order_does_not_depend_on_threads(num_threads):
    grad, tokens = make_input(5000, 64, torch.float32), make_tokens("skewed", 5000, 50)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        check(embedding._compute, grad, tokens, 50, expect=add_in_turn)
    finally:
        torch.set_num_threads(before)


def test_up_to_a_segment_of_occurrences_it_is_torchs():
    grad, tokens = make_input(500, 40, torch.float32), make_tokens("random", 500, 60)
    assert 1 < tokens.bincount().max() <= SEGMENT
    out = torch.empty(60, 40)
    embedding.embedding_backward(grad, tokens, out)
    expected = torch.ops.aten.embedding_dense_backward(grad, tokens, 60, -1, False)
    assert_same_bits(out, expected, "out")
    table = make_table(60, 40)
    accumulated = table.clone()
    embedding.embedding_backward(grad, tokens, accumulated, accumulate=True)
    assert_same_bits(accumulated, table + expected, "out")


def test_overwrites_the_whole_table_or_adds():
    grad, tokens = torch.ones(3, 4).bfloat16(), torch.tensor([1, 3, 1], dtype=torch.int32)
    out = torch.full((5, 4), torch.nan)
    embedding.embedding_backward(grad, tokens, out)
    assert out[:, 0].tolist() == [0, 2, 0, 1, 0]
    embedding.embedding_backward(grad, tokens, out, accumulate=True, padding_idx=1)
    assert out[:, 0].tolist() == [0, 2, 0, 2, 0]


def test_empty_arguments():
    out = torch.full((5, 4), torch.nan)
    embedding.embedding_backward(torch.empty(0, 4), torch.empty(0).long(), out)
    assert not out.any()
    embedding.embedding_backward(torch.empty(2, 0), torch.zeros(2).long(), torch.empty(3, 0))
    embedding.embedding_backward(torch.empty(2, 4), torch.zeros(2).long(), torch.empty(0, 4))


def test_reads_nothing_on_the_host():
    grad, tokens = torch.empty(100, 8, device="meta"), torch.empty(100, device="meta").long()
    embedding.embedding_backward(grad, tokens, torch.empty(9, 8, device="meta"))


def test_refuses_other_arguments_by_name():
    grad, tokens, out = torch.ones(4, 8), torch.zeros(4).long(), torch.zeros(3, 8)
    for bad in (grad[0], grad.double(), grad.t()):
        with pytest.raises(ValueError, match=r"^grad is"):
            embedding.embedding_backward(bad, tokens, out)
    for bad in (tokens[:3], tokens.float(), torch.zeros(8).long()[::2], tokens.to("meta")):
        with pytest.raises(ValueError, match=r"^tokens are"):
            embedding.embedding_backward(grad, bad, out)
    for bad in (out[0], out[:, :4], out.bfloat16(), out.to("meta"), torch.zeros(8, 3).t()):
        with pytest.raises(ValueError, match=r"^out is"):
            embedding.embedding_backward(grad, tokens, bad)


# ---- the CUDA source on the emulation ----


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return emulated.build("embedding", tmp_path_factory.mktemp("embedding"))


@pytest.fixture(params=emulated.ORDERS)
def emulate(request, monkeypatch, library):
    """Threads run in order and in reverse: a missing barrier shows in one of them."""
    monkeypatch.setattr(device, "launch", emulated.make_launch([library], is_reversed=request.param))


needs_gxx = pytest.mark.skipif(not emulated.is_available(), reason="g++ is not installed")


@needs_gxx
@pytest.mark.usefixtures("emulate")
@dtypes
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def test_emulated_kernels_equal_reference(shape, dtype):
    num, cols, rows = shape
    for i, choice in enumerate(CHOICES):
        grad = make_input(num, cols, dtype, seed=i, nonfinite=choice == "skewed")
        check(embedding._launch, grad, make_tokens(choice, num, rows), rows, accumulate=i % 2 == 1)


@needs_gxx
@pytest.mark.usefixtures("emulate")
def test_emulated_long_runs_next_to_each_other():
    """Runs of every length around a segment, so that beginnings and ends fall everywhere in the windows of 64 places."""
    lengths = [63, 64, 65, 1, 127, 128, 129, 2, 70, 66, 1, 200]
    tokens = torch.cat([torch.full((length,), token) for token, length in enumerate(lengths)])
    tokens = tokens[torch.randperm(len(tokens), generator=torch.Generator().manual_seed(0))]
    grad = make_input(len(tokens), 8, torch.bfloat16)
    for padding in (-1, 2, 11):
        check(embedding._launch, grad, tokens, len(lengths) + 1, padding=padding)
        check(embedding._launch, grad, tokens, len(lengths) - 2, padding=padding, accumulate=True)  # the last are out of range


@needs_gxx
@pytest.mark.usefixtures("emulate")
def test_emulated_tokens_out_of_range():
    tokens = torch.tensor([3, -1, 5, 2, 3, 2**40, 6, -(2**40), 2, 0] * 20)
    check(embedding._launch, make_input(200, 8, torch.float32), tokens, 6, padding=2, accumulate=True)


@needs_gxx
@pytest.mark.usefixtures("emulate")
@dtypes
def test_emulated_unaligned_gradient_and_table(dtype):
    grad = make_input(1, 150 * 16 + 1, dtype).view(-1)[1:].view(150, 16)
    assert grad.data_ptr() % 16
    tokens = make_tokens("half the same", 150, 9)
    for offset in (0, 1):
        check(embedding._launch, grad, tokens, 9, offset=offset, accumulate=True)
        check(embedding._launch, grad.clone(), tokens, 9, offset=offset)


def sorted_by_torch(tokens: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    keys, positions = torch.sort(embedding._keys(tokens, rows, -1), stable=True)
    return keys.int(), positions.int()


@needs_gxx
@pytest.mark.usefixtures("emulate")
@pytest.mark.parametrize("num", [1, 31, 32, 511, 513, 1000, 8193])
def test_emulated_sort_is_stable(num):
    for choice, rows in (("half the same", 7), ("random", 2**31 - 2)):
        tokens = make_tokens(choice, num, rows)
        for actual, expected in zip(embedding._sort(tokens, rows, -1), sorted_by_torch(tokens, rows), strict=True):
            assert torch.equal(actual, expected)


@needs_gxx
@pytest.mark.usefixtures("emulate")
def test_emulated_batches_too_large_to_count_equal_reference(monkeypatch):
    monkeypatch.setattr(embedding, "_MAX_COUNTED", 100)
    check(embedding._launch, make_input(300, 8, torch.bfloat16), make_tokens("half the same", 300, 9), 9, padding=4)


# ---- on a GPU ----


@pytest.mark.gpu
@dtypes
@pytest.mark.parametrize("shape", [*SHAPES, *LARGE_SHAPES], ids=lambda shape: "x".join(map(str, shape)))
def test_gpu_kernels_equal_reference(shape, dtype):
    num, cols, rows = shape
    for i, choice in enumerate(CHOICES):
        grad = make_input(num, cols, dtype, seed=i, nonfinite=choice == "skewed", device="cuda")
        tokens = make_tokens(choice, num, rows).cuda()
        check(embedding._launch, grad, tokens, rows, accumulate=i % 2 == 1, padding=0 if i == 2 else -1)


@pytest.mark.gpu
def test_gpu_sort_is_stable():
    for num in (1, 512, 8192, 8193, 16384, 16385):
        tokens = make_tokens("half the same", num, 5000)
        for actual, expected in zip(embedding._sort(tokens.cuda(), 5000, -1), sorted_by_torch(tokens, 5000), strict=True):
            assert torch.equal(actual.cpu(), expected)


@pytest.mark.gpu
def test_gpu_unaligned_and_out_of_range():
    grad = make_input(1, 150 * 16 + 1, torch.bfloat16, device="cuda").view(-1)[1:].view(150, 16)
    tokens = torch.tensor([3, -1, 5, 2, 3, 2**40, 6, -(2**40), 2, 0] * 15).cuda()
    for offset in (0, 1):
        check(embedding._launch, grad, tokens, 6, offset=offset, accumulate=True)


@pytest.mark.gpu
def test_gpu_replays_follow_their_inputs_and_repeat_their_bits():
    num, cols, rows = 1000, 264, 50
    grad, tokens = torch.empty(num, cols, dtype=torch.bfloat16, device="cuda"), torch.zeros(num, device="cuda").long()
    out = torch.empty(rows, cols, device="cuda")
    device.preload()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        embedding.embedding_backward(grad, tokens, out, padding_idx=1)
    for seed, choice in enumerate(CHOICES):
        grad.copy_(make_input(num, cols, torch.bfloat16, seed=seed))
        tokens.copy_(make_tokens(choice, num, rows, seed=seed))
        expected = torch.empty(rows, cols)
        embedding.embedding_backward(grad.cpu(), tokens.cpu(), expected, padding_idx=1)
        for _ in range(2):
            graph.replay()
            assert_same_bits(out, expected, choice)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_gpu_launches_do_not_synchronize():
    out = torch.empty(100, 64, device="cuda")
    device.preload()
    for num in (500, 20000):
        grad, tokens = torch.ones(num, 64, device="cuda"), torch.zeros(num, device="cuda").long()
        torch.cuda.set_sync_debug_mode("error")
        try:
            embedding.embedding_backward(grad, tokens, out)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_gpu_more_than_2_to_the_31_elements():
    if torch.cuda.mem_get_info()[0] < 30 * 2**30:
        pytest.skip("needs 30 GiB of free GPU memory")
    num, cols, rows = 140_000, 16_384, 140_000
    grad = torch.zeros(num, cols, dtype=torch.bfloat16, device="cuda")
    grad[-1, -1] = grad[-2, -1] = 3.0
    tokens = torch.arange(num, device="cuda")
    tokens[-2] = rows - 1
    out = torch.empty(rows, cols, device="cuda")
    embedding.embedding_backward(grad, tokens, out)
    assert out[-1, -1].item() == 6
    assert out.count_nonzero().item() == 1
