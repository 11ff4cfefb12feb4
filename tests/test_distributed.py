"""Two processes over gloo: the ranks keep the same scales, and nobody waits alone."""

import datetime
import multiprocessing
import os
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from training import NUM_STEPS, RECIPE, assert_same_values, make_batch, make_net, same_bits, state_values

import graphrt
from graphrt.errors import FlushError

NUM_RANKS = 2
TIMEOUT_S = 60
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not dist.is_available(), reason="this torch has no torch.distributed")]

Results = dict[str, Any]


def step(net: Any, blocks: tuple[int, ...], x: Tensor, **region: Any) -> None:
    with graphrt.fp8_autocast(**region):
        y = x.requires_grad_()
        for block in blocks:
            y = net.blocks[block](y)
    y.square().mean().backward()


def values(net: Any) -> dict[str, Tensor]:
    return state_values(graphrt.quantization_state(net))


def batch_of(rank: int, number: int) -> Tensor:
    return make_batch(2 * number + rank)


def run_different_modules(rank: int, results: Results) -> None:
    net: Any = make_net()
    for i in range(NUM_STEPS):
        step(net, (0, 1 + rank), batch_of(rank, i))
    graphrt.quantization_state(net).flush()
    results["different modules"] = values(net)


def run_nan_on_one_rank(rank: int, results: Results) -> None:
    net: Any = make_net()
    for i in range(NUM_STEPS):
        x = batch_of(rank, i)
        if i == 2 and rank == 1:
            x[3, 4] = float("nan")
        step(net, (0,), x)
        if i == 1:
            graphrt.quantization_state(net).flush()
            results["before the nan"] = values(net)
        if i == 2:
            graphrt.quantization_state(net).flush()
            results["after the nan"] = values(net)
    graphrt.quantization_state(net).flush()
    results["nan"] = values(net)


def run_evaluation_on_rank_0(rank: int, results: Results) -> None:
    net: Any = make_net()
    for i in range(NUM_STEPS):
        step(net, (0, 1), batch_of(rank, i))
        if rank == 0:
            with torch.no_grad(), graphrt.fp8_autocast():
                net(batch_of(rank, 30))
            with torch.inference_mode(), graphrt.fp8_autocast():
                net(batch_of(rank, 30))
    graphrt.quantization_state(net).flush()
    results["evaluation"] = values(net)


def run_state_dict_on_rank_0(rank: int, results: Results) -> None:
    net: Any = make_net()
    state = graphrt.quantization_state(net)
    step(net, (0, 1), batch_of(rank, 0))
    if rank == 0:
        try:
            state.state_dict()
        except FlushError as error:
            results["refused"] = str(error)
    state.flush()
    if rank == 0:
        results["state_dict"] = state.state_dict()
    results["after state_dict"] = values(net)


def run_a_rank_without_backward(rank: int, results: Results) -> None:
    net: Any = make_net()
    for i in range(NUM_STEPS):
        if rank == 0:
            step(net, (0, 1, 2), batch_of(rank, i))
        else:
            with graphrt.fp8_autocast():
                pass
        results[f"due {i}"] = graphrt.quantization_state(net).backward_update_requested
    graphrt.quantization_state(net).flush()
    results["without backward"] = values(net)


def run_two_models(rank: int, results: Results) -> None:
    nets = [make_net(1), make_net(1, seed=1)]
    for i in range(NUM_STEPS):
        step(nets[rank], (0,), batch_of(rank, i))
    for net in nets:
        graphrt.quantization_state(net).flush()
    results["two models"] = {f"{i}.{name}": value for i, net in enumerate(nets) for name, value in values(net).items()}


def run_without_reduction(rank: int, results: Results) -> None:
    net: Any = make_net(recipe=graphrt.DelayedScaling(amax_history_len=RECIPE.amax_history_len, reduce_amax=False))
    for i in range(1 + rank):
        step(net, (0,), batch_of(rank, i))
    state = graphrt.quantization_state(net)
    results["without reduction"] = state.state_dict() if rank == 0 else None
    state.flush()
    results["alone"] = values(net)


def run_groups(rank: int, results: Results) -> None:
    alone = [dist.new_group([i]) for i in range(NUM_RANKS)]
    net: Any = make_net()
    step(net, (0,), batch_of(rank, 0), amax_reduction_group=alone[rank])
    results["own group"] = graphrt.quantization_state(net).state_dict()
    net = make_net()
    for i in range(NUM_STEPS):
        step(net, (0,), batch_of(rank, i), amax_reduction_group=dist.group.WORLD)
    graphrt.quantization_state(net).flush()
    results["the world"] = values(net)


def run_checkpointed(rank: int, results: Results) -> None:
    for name, use_reentrant in (("checkpointed", False), ("checkpointed, reentrant", True)):
        net: Any = make_net()
        for i in range(NUM_STEPS):
            with graphrt.fp8_autocast():
                y = graphrt.checkpoint(net.blocks[rank], batch_of(rank, i).requires_grad_(), use_reentrant=use_reentrant)
            y.square().mean().backward()
        graphrt.quantization_state(net).flush()
        results[name] = values(net)
    net = make_net()
    for i in range(NUM_STEPS):
        step(net, (rank,), batch_of(rank, i))
    graphrt.quantization_state(net).flush()
    results["not checkpointed"] = values(net)


SCENARIOS = (
    run_different_modules,
    run_nan_on_one_rank,
    run_evaluation_on_rank_0,
    run_state_dict_on_rank_0,
    run_a_rank_without_backward,
    run_two_models,
    run_without_reduction,
    run_groups,
    run_checkpointed,
)


def run_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=NUM_RANKS, timeout=timeout)
    results: Results = {}
    for scenario in SCENARIOS:
        scenario(rank, results)
        # What is still pending would be flushed, on all ranks, at the next scenario's first entry.
        with graphrt.fp8_autocast() if scenario is not run_without_reduction else nullcontext():
            pass
    torch.save(results, f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


def launch(folder: Path) -> None:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=run_rank, args=(rank, str(folder)), daemon=True) for rank in range(NUM_RANKS)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(2 * TIMEOUT_S)
    for process in processes:
        process.kill()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Results]:
    """What each rank found; launched once, also where several workers share the tests."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "ranks"
    done = folder / "done"
    try:
        folder.mkdir()
    except FileExistsError:
        deadline = time.monotonic() + 4 * TIMEOUT_S
        while not done.exists() and time.monotonic() < deadline:
            time.sleep(0.1)
    else:
        launch(folder)
        done.touch()
    files = [folder / f"rank{rank}.pt" for rank in range(NUM_RANKS)]
    assert all(file.exists() for file in files), "a rank failed, or waits for the other"
    return [torch.load(file, weights_only=False) for file in files]


def updates(values: dict[str, Tensor]) -> list[int]:
    return values["updates"].tolist()


SAME_ON_ALL_RANKS = (
    "different modules",
    "nan",
    "evaluation",
    "after state_dict",
    "without backward",
    "two models",
    "the world",
    "checkpointed",
    "checkpointed, reentrant",
)


@pytest.mark.parametrize("scenario", SAME_ON_ALL_RANKS)
def test_scales_histories_and_counts_end_equal_on_all_ranks(ranks, scenario):
    first, second = (results[scenario] for results in ranks)
    assert_same_values(first, second, scenario)
    scale = first["scale"] if "scale" in first else first["0.scale"]
    assert (scale != 1).any()


def test_a_module_that_ran_on_one_rank_only_has_that_ranks_amaxes_everywhere(ranks):
    state = graphrt.quantization_state(make_net())
    history = ranks[0]["different modules"]["amax_history"]
    for block in (0, 1, 2):
        for kind in ("input", "weight", "grad_output"):
            assert history[-1, state.slot_index(f"blocks.{block}.up.{kind}")] > 0
    both = max(batch_of(rank, NUM_STEPS - 1).abs().max() for rank in range(NUM_RANKS))
    assert history[-1, state.slot_index("blocks.0.up.input")] == both
    assert updates(ranks[0]["different modules"]) == [NUM_STEPS, NUM_STEPS]


def test_a_nan_on_one_rank_is_counted_on_all_and_freezes_nothing(ranks):
    column = graphrt.quantization_state(make_net()).slot_index("blocks.0.up.input")
    for results in ranks:
        before, after, end = results["before the nan"], results["after the nan"], results["nan"]
        assert after["num_nonfinite"][column] == end["num_nonfinite"][column] == 1
        assert same_bits(before["scale"][column], after["scale"][column])
        assert same_bits(before["amax_history"][:, column], after["amax_history"][:, column])
        assert not same_bits(after["scale"][column], end["scale"][column])
        assert end["amax_history"].isfinite().all()


def test_an_evaluation_on_rank_0_changes_nothing_and_waits_for_nobody(ranks):
    assert updates(ranks[0]["evaluation"]) == [NUM_STEPS, NUM_STEPS]


def test_state_dict_with_an_update_due_is_refused_on_one_rank_and_allowed_after_the_flush(ranks):
    assert "Call state.flush() on every rank first" in ranks[0]["refused"]
    assert same_bits(ranks[0]["state_dict"]["scale"], ranks[1]["after state_dict"]["scale"])


def test_a_rank_that_ran_no_backward_takes_part_in_the_update(ranks):
    for results in ranks:
        assert all(results[f"due {i}"] for i in range(NUM_STEPS))
        assert updates(results["without backward"]) == [NUM_STEPS, NUM_STEPS]


def test_states_take_part_on_every_rank_whether_used_or_not(ranks):
    for results in ranks:
        for i in range(2):
            assert results["two models"][f"{i}.updates"].tolist() == [NUM_STEPS, NUM_STEPS]
            assert (results["two models"][f"{i}.scale"] != 1).all()


def test_without_reduce_amax_each_rank_goes_its_own_way(ranks):
    first, second = (results["alone"] for results in ranks)
    assert updates(first) == [1, 1]
    assert updates(second) == [2, 2]
    assert not same_bits(first["scale"], second["scale"])
    assert ranks[0]["without reduction"] is not None


def test_a_group_of_one_rank_reduces_nothing(ranks):
    first, second = (results["own group"] for results in ranks)
    assert not same_bits(first["scale"], second["scale"])
    assert first["num_updates"].tolist() == [1, 1]


@pytest.mark.parametrize("name", ["checkpointed", "checkpointed, reentrant"])
def test_checkpointed_ranks_equal_plain_ones(ranks, name):
    assert_same_values(ranks[0][name], ranks[0]["not checkpointed"])
