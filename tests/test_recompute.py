"""A recomputed forward quantizes with the scales of the forward it repeats, bit for bit, and leaves no trace."""

import functools
import gc
import itertools
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint as torch_checkpoint
from torch import Tensor, nn
from training import (
    KINDS,
    MAIN_KINDS,
    NUM_STEPS,
    CastLog,
    assert_same_trajectory,
    assert_same_values,
    counts,
    descend,
    every_kind,
    flush_all,
    grads,
    main_kinds,
    make_batch,
    make_net,
    own,
    plainly,
    same_bits,
    state_values,
    train,
)

import graphrt
from graphrt import recompute, region
from graphrt.errors import FlushError

# Torch says this of the inner one of two nested reentrant checkpoints.
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")

# -- where regions and checkpoints stand; each takes (model, x, checkpoint)


def around_everything(model: nn.Module, x: Tensor, ckpt: Any) -> Tensor:
    with graphrt.fp8_autocast():
        return ckpt(model, x)


def per_layer(model: Any, x: Tensor, ckpt: Any) -> Tensor:
    with graphrt.fp8_autocast():
        for block in model.blocks:
            x = ckpt(block, x)
    return x


def nested_checkpoints(model: Any, x: Tensor, ckpt: Any) -> Tensor:
    first, second, third = model.blocks

    def inner(x: Tensor) -> Tensor:
        return third(ckpt(second, x))

    def outer(x: Tensor) -> Tensor:
        return ckpt(inner, first(x)).sin()

    with graphrt.fp8_autocast():
        return ckpt(outer, x)


def region_inside(model: nn.Module, x: Tensor, ckpt: Any) -> Tensor:
    def run(x: Tensor) -> Tensor:
        with graphrt.fp8_autocast():
            return model(x)

    return ckpt(run, x)


def nested_region_inside(model: Any, x: Tensor, ckpt: Any) -> Tensor:
    def run(x: Tensor) -> Tensor:
        x = model.blocks[0](x)
        with graphrt.fp8_autocast(enabled=False):
            x = model.blocks[1](x)
            with graphrt.fp8_autocast():
                x = model.blocks[2](x)
        return model.blocks[0](x)

    with graphrt.fp8_autocast():
        return ckpt(run, x)


def inside_a_disabled_region(model: Any, x: Tensor, ckpt: Any) -> Tensor:
    with graphrt.fp8_autocast():
        x = model.blocks[0](x)
        with graphrt.fp8_autocast(enabled=False):
            x = ckpt(model.blocks[1], x)
        return ckpt(model.blocks[2], x)


def region_inside_nested_checkpoints(model: Any, x: Tensor, ckpt: Any) -> Tensor:
    def inner(x: Tensor) -> Tensor:
        with graphrt.fp8_autocast():
            return model.blocks[1](x)

    def outer(x: Tensor) -> Tensor:
        with graphrt.fp8_autocast():
            x = model.blocks[0](x)
        x = ckpt(inner, x.cos())
        with graphrt.fp8_autocast():
            return model.blocks[0].branch(x) + model.blocks[2].branch(x)

    return ckpt(outer, x)


def siblings(model: Any, x: Tensor, ckpt: Any) -> Tensor:
    with graphrt.fp8_autocast():
        return ckpt(model.blocks[0].branch, x) + ckpt(model.blocks[1].branch, x)


def one_module_in_one_branch_only(model: Any, x: Tensor, ckpt: Any) -> Tensor:
    first, second, _ = model.blocks
    with graphrt.fp8_autocast():
        x = first(x)
        return ckpt(lambda x: second.branch(first.branch(x)), x) + ckpt(lambda x: F.gelu(x), x)


def double_use(model: Any, x: Tensor, ckpt: Any) -> Tensor:
    block = model.blocks[0]
    with graphrt.fp8_autocast():
        return ckpt(block, ckpt(block, x))


LAYOUTS = {
    around_everything: 1,
    per_layer: 1,
    nested_checkpoints: 1,
    region_inside: 1,
    nested_region_inside: 1,
    inside_a_disabled_region: 1,
    region_inside_nested_checkpoints: 3,
    siblings: 1,
    one_module_in_one_branch_only: 1,
    double_use: 1,
}
every_layout = pytest.mark.parametrize(("layout", "regions"), LAYOUTS.items(), ids=[layout.__name__ for layout in LAYOUTS])


class open_nothing:
    def __enter__(self) -> None:
        return None

    def __exit__(self, *_exception: object) -> None:
        return None


def run_layout(layout: Any, ckpt: Any, **options: Any) -> tuple[list[dict[str, Tensor]], graphrt.QuantizationState]:
    model = make_net(**{key: options[key] for key in ("device", "dtype") if key in options})
    trajectory = train(model, lambda model, x: layout(model, x, ckpt), region=open_nothing, **options)
    return trajectory, graphrt.quantization_state(model)


@functools.cache
def run_plainly(layout: Any, **options: Any) -> list[dict[str, Tensor]]:
    return run_layout(layout, plainly, **options)[0]


@every_kind
@every_layout
def test_checkpointed_run_equals_the_plain_one_bit_for_bit(layout, regions, kind):
    expected = run_plainly(layout)
    actual, state = run_layout(layout, kind)
    assert_same_trajectory(actual, expected)
    assert counts(state) == (regions * NUM_STEPS, NUM_STEPS if regions == 1 else counts(state)[1])


@main_kinds
@every_layout
def test_no_recompute_leaves_a_trace(layout, regions, kind):
    """What the state holds before a backward and after it differs in gradient amaxes and the request, in nothing else."""
    model = make_net()
    state = graphrt.quantization_state(model)
    backward_slots = [state.slot_index(name) for name in state.slots if name.endswith("grad_output")]
    for step in range(NUM_STEPS):
        y = layout(model, make_batch(step).requires_grad_(), kind)
        before = state_values(state)
        y.square().mean().backward()
        after = state_values(state)
        assert after.pop("requested")
        before.pop("requested")
        assert before["amax_history"][0, backward_slots].eq(0).all()
        assert after["amax_history"][0, backward_slots].ne(0).any()
        after["amax_history"][0, backward_slots] = 0
        assert_same_values(after, before, f"step {step}")


@pytest.mark.parametrize("inner", MAIN_KINDS.values(), ids=MAIN_KINDS.keys())
@pytest.mark.parametrize("outer", MAIN_KINDS.values(), ids=MAIN_KINDS.keys())
def test_one_kind_inside_another_equals_the_plain_run(outer, inner):
    def layout(model: Any, x: Tensor, ckpt: Any) -> Tensor:
        def run(x: Tensor) -> Tensor:
            with graphrt.fp8_autocast():
                x = model.blocks[0](x)
            x = ckpt[1](model.blocks[1], x)
            with graphrt.fp8_autocast():
                return ckpt[1](model.blocks[2], x)

        return ckpt[0](run, x)

    expected, _ = run_layout(layout, (plainly, plainly))
    actual, _ = run_layout(layout, (outer, inner))
    assert_same_trajectory(actual, expected)


@main_kinds
@every_layout
def test_recompute_casts_the_same_bytes(layout, regions, kind):
    model = make_net()
    log = CastLog()
    for step in range(NUM_STEPS):
        with log.open() as in_forward:
            y = layout(model, make_batch(step).requires_grad_(), kind)
        with log.open() as in_backward:
            y.square().mean().backward()
        descend(model)
        num_forward_slots = 2 * len(graphrt.quantization_state(model).slots) // 3
        recomputed = [cast for cast in in_backward if cast[0] < num_forward_slots]
        assert recomputed
        assert not any(is_recorded for *_, is_recorded in recomputed)
        assert all(is_recorded for *_, is_recorded in in_forward)
        for slot, data, scale_inv, _ in recomputed:
            assert any(slot == s and same_bits(data, d) and same_bits(scale_inv, i) for s, d, i, _ in in_forward), f"slot {slot}"


# -- order of backwards


PIPELINES = {
    "1, 2, 3": "f0 f1 f2 b0 b1 b2",
    "one forward one backward": "f0 f1 b0 f2 b2 b1",
}


def run_pipeline(layout: Any, ckpt: Any, schedule: str, device: Any = "cpu", num_rounds: int = 2) -> list[dict[str, Tensor]]:
    model = make_net(device=device)
    state = graphrt.quantization_state(model)
    trajectory = []
    for i in range(num_rounds):
        losses: dict[str, Tensor] = {}
        for action in schedule.split():
            kind, number = action[0], int(action[1])
            if kind == "f":
                losses[action[1]] = layout(model, make_batch(3 * i + number, device=device).requires_grad_(), ckpt).square().mean()
            else:
                losses.pop(action[1]).backward()
                trajectory.append({**grads(model), **state_values(state)})
                for p in model.parameters():
                    p.grad = None
        descend(model)
    state.flush()
    return [*trajectory, state_values(state)]


@functools.cache
def run_pipeline_plainly(layout: Any, schedule: str) -> list[dict[str, Tensor]]:
    return run_pipeline(layout, plainly, schedule)


@every_kind
@pytest.mark.parametrize("schedule", PIPELINES.values(), ids=PIPELINES.keys())
@pytest.mark.parametrize("layout", [nested_checkpoints, region_inside, region_inside_nested_checkpoints])
def test_pipeline_order_equals_the_plain_run(layout, schedule, kind):
    assert_same_trajectory(run_pipeline(layout, kind, schedule), run_pipeline_plainly(layout, schedule))


def test_forwards_of_a_pipeline_run_with_other_scales():
    """Else the test above could not tell one forward's scales from another's."""
    model = make_net()
    state = graphrt.quantization_state(model)
    scales = []
    for i in range(3):
        scales.append(state.copy_scales().scale)
        around_everything(model, make_batch(i), plainly)
    inputs = [state.slot_index(name) for name in state.slots if name.endswith("input")]
    assert all((a[inputs] != b[inputs]).all() for a, b in itertools.pairwise(scales))


# -- branches


@main_kinds
def test_branch_without_gradient_leaves_exact_counts(kind):
    def run(ckpt: Any) -> tuple[list[dict[str, Tensor]], tuple[int, int]]:
        model: Any = make_net()

        def forward(model: Any, x: Tensor) -> Tensor:
            with graphrt.fp8_autocast():
                ckpt(model.blocks[1], x)
                return ckpt(model.blocks[0], x)

        trajectory = train(model, forward, region=open_nothing)
        return trajectory, counts(graphrt.quantization_state(model))

    expected, expected_counts = run(plainly)
    actual, actual_counts = run(kind)
    assert_same_trajectory(actual, expected)
    assert actual_counts == expected_counts == (NUM_STEPS, NUM_STEPS)
    assert not any("blocks.1" in name for name in actual[0])


@main_kinds
def test_branch_whose_gradient_comes_a_step_later_is_recomputed_with_its_own_scales(kind):
    def run(ckpt: Any) -> list[dict[str, Tensor]]:
        model: Any = make_net()
        state, trajectory, late = graphrt.quantization_state(model), [], None
        for step in range(NUM_STEPS):
            with graphrt.fp8_autocast():
                now, branch = (
                    ckpt(model.blocks[0], make_batch(step).requires_grad_()),
                    ckpt(model.blocks[1], make_batch(step + 10).requires_grad_()),
                )
            if late is not None:
                late.square().mean().backward()
            now.square().mean().backward()
            trajectory.append({**grads(model), **state_values(state)})
            late = branch
            for p in model.parameters():
                p.grad = None
        return trajectory

    assert_same_trajectory(run(kind), run(plainly))


@main_kinds
def test_eval_modules_inside_calibrate_like_the_rest(kind):
    def run(ckpt: Any, in_eval: bool) -> list[dict[str, Tensor]]:
        model: Any = make_net()
        model.blocks[1].train(not in_eval)
        return train(model, lambda model, x: per_layer(model, x, ckpt), region=open_nothing)

    assert_same_trajectory(run(kind, True), run(plainly, False))


@main_kinds
def test_two_backwards_in_one_step_are_one_update(kind):
    def run(ckpt: Any) -> list[dict[str, Tensor]]:
        model: Any = make_net()
        state, trajectory = graphrt.quantization_state(model), []
        for step in range(NUM_STEPS):
            x = make_batch(step).requires_grad_()
            with graphrt.fp8_autocast():
                a, b = ckpt(model.blocks[0], x), ckpt(model.blocks[1], x)
            a.square().mean().backward()
            b.abs().mean().backward()
            trajectory.append({**grads(model), **state_values(state)})
            descend(model)
        state.flush()
        assert counts(state) == (NUM_STEPS, NUM_STEPS)
        return trajectory

    assert_same_trajectory(run(kind), run(plainly))


@main_kinds
def test_microbatches_in_one_region_with_backwards_inside_it_merge(kind):
    def run(ckpt: Any) -> list[dict[str, Tensor]]:
        model: Any = make_net()
        state, trajectory = graphrt.quantization_state(model), []
        for step in range(NUM_STEPS):
            with graphrt.fp8_autocast():
                for part in range(2):
                    ckpt(model, make_batch(2 * step + part).requires_grad_()).square().mean().backward()
            trajectory.append({**grads(model), **state_values(state)})
            descend(model)
        state.flush()
        assert counts(state) == (NUM_STEPS, NUM_STEPS)
        return trajectory

    assert_same_trajectory(run(kind), run(plainly))


@main_kinds
def test_two_models_in_one_process_keep_counts_of_their_own(kind):
    used, unused = make_net(), make_net(seed=1)
    for step in range(NUM_STEPS):
        with graphrt.fp8_autocast():
            y = kind(used, make_batch(step).requires_grad_())
            if step % 2:
                y = y + kind(unused, make_batch(step).requires_grad_())
        y.square().mean().backward()
    flush_all()
    assert counts(graphrt.quantization_state(used)) == (NUM_STEPS, NUM_STEPS)
    assert counts(graphrt.quantization_state(unused)) == (NUM_STEPS // 2, NUM_STEPS // 2)


# -- where a recompute runs


def in_a_thread(function: Any) -> None:
    failures = []

    def run() -> None:
        try:
            function()
        except BaseException as failure:
            failures.append(failure)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    if failures:
        raise failures[0]


@main_kinds
@pytest.mark.parametrize("layout", [nested_checkpoints, region_inside])
def test_backward_in_another_thread_equals_the_plain_run(layout, kind, device):
    def run(ckpt: Any, call: Any) -> list[dict[str, Tensor]]:
        model = make_net(device=device)
        state, trajectory = graphrt.quantization_state(model), []
        for step in range(NUM_STEPS):
            losses = [layout(model, make_batch(2 * step + i, device=device).requires_grad_(), ckpt).square().mean() for i in range(2)]
            for loss in losses:
                call(loss.backward)
                trajectory.append({**grads(model), **state_values(state)})
            descend(model)
        return trajectory

    with torch.random.fork_rng():
        assert_same_trajectory(run(kind, in_a_thread), run(plainly, plainly))


@pytest.mark.gpu
@every_kind
@every_layout
def test_recompute_on_the_gpu_equals_the_plain_run(layout, regions, kind):
    expected = run_plainly(layout, device="cuda")
    actual, _ = run_layout(layout, kind, device="cuda")
    assert_same_trajectory(actual, expected)


@main_kinds
def test_a_region_that_is_open_elsewhere_does_not_reach_into_a_recompute(kind):
    """The backward of a forward that ran under one region (or none), while another of another mode is open."""

    def run(ckpt: Any, surrounding: Any) -> list[dict[str, Tensor]]:
        model = make_net()
        state, trajectory = graphrt.quantization_state(model), []
        for step in range(NUM_STEPS):
            loss = around_everything(model, make_batch(step).requires_grad_(), ckpt).square().mean()
            plain = ckpt(model, make_batch(step).requires_grad_()).square().mean()
            with surrounding():
                (loss + plain).backward()
            trajectory.append({**grads(model), **state_values(state)})
            descend(model)
        return trajectory

    for surrounding in (
        graphrt.fp8_autocast,
        lambda: graphrt.fp8_autocast(enabled=False),
        lambda: graphrt.fp8_autocast(calibrating=True),
        open_nothing,
    ):
        assert_same_trajectory(run(kind, surrounding), run(plainly, surrounding))


@main_kinds
def test_checkpointed_plain_forward_is_recomputed_plain(kind):
    def run(ckpt: Any, converted: bool) -> list[dict[str, Tensor]]:
        model = make_net()
        if not converted:
            graphrt.convert_from_float8_training(model)
        results = []
        for step in range(3):
            loss = ckpt(model, make_batch(step).requires_grad_()).square().mean()
            loss.backward()
            results.append(grads(model))
            descend(model)
        return results

    model = make_net()
    state = graphrt.quantization_state(model)
    before = state_values(state)
    kind(model, make_batch(0).requires_grad_()).sum().backward()
    assert_same_values(state_values(state), before)
    assert_same_trajectory(run(kind, True), run(plainly, False))


def test_saved_tensor_read_outside_a_backward_recomputes_with_the_forwards_scales():
    model: Any = make_net(1)
    state = graphrt.quantization_state(model)
    expected = []
    for step in range(NUM_STEPS):
        with graphrt.fp8_autocast():
            x = make_batch(step).requires_grad_()
            hidden = []

            def run(x: Tensor, hidden: list[Tensor] = hidden) -> Tensor:
                hidden.append(model(x))
                return hidden[-1].sin()

            y = graphrt.checkpoint(run, x)
        expected.append((y, hidden[0].detach()))
    before = state_values(state)
    for y, hidden_value in expected:
        assert torch._C._current_graph_task_id() == -1
        assert same_bits(y.grad_fn._saved_self, hidden_value)
    assert_same_values(state_values(state), before)
    for y, _ in expected:
        y.sum().backward()
    state.flush()
    assert counts(state) == (NUM_STEPS, 1)


@main_kinds
@pytest.mark.parametrize("layout", [around_everything, region_inside_nested_checkpoints])
def test_a_graph_that_is_kept_is_recomputed_twice_with_the_same_scales(layout, kind):
    def run(ckpt: Any) -> list[dict[str, Tensor]]:
        model = make_net()
        state, trajectory = graphrt.quantization_state(model), []
        for step in range(NUM_STEPS):
            loss = layout(model, make_batch(step).requires_grad_(), ckpt).square().mean()
            loss.backward(retain_graph=True)
            trajectory.append({**grads(model), **state_values(state)})
            for p in model.parameters():
                p.grad = None
            # Another forward in between moves the scales.
            layout(model, make_batch(step + 20), plainly)
            loss.backward()
            trajectory.append({**grads(model), **state_values(state)})
            descend(model)
        return trajectory

    assert_same_trajectory(run(kind), run(plainly))


@pytest.mark.skipif(not hasattr(torch_checkpoint, "GraphExecGroup"), reason="this torch has no GraphExecGroup")
def test_backwards_that_share_a_recompute_equal_the_plain_run():
    def run(ckpt: Any) -> list[dict[str, Tensor]]:
        model: Any = make_net()
        state, trajectory = graphrt.quantization_state(model), []

        def both(x: Tensor) -> tuple[Tensor, Tensor]:
            with graphrt.fp8_autocast():
                return model.blocks[0](x), model.blocks[1](x)

        for step in range(NUM_STEPS):
            a, b = ckpt(both, make_batch(step).requires_grad_())
            with torch_checkpoint.GraphExecGroup():
                a.square().mean().backward(retain_graph=True)
                b.square().mean().backward()
            trajectory.append({**grads(model), **state_values(state)})
            descend(model)
        return trajectory

    assert_same_trajectory(run(graphrt.checkpoint), run(plainly))


# -- torch's options


def test_composable_checkpoint_equals_the_plain_run():
    from torch.distributed._composable import checkpoint as composable

    def run(is_checkpointed: bool, depth: int) -> list[dict[str, Tensor]]:
        model: Any = make_net()
        if is_checkpointed:
            for module in [*model.blocks] if depth == 1 else [model, model.blocks[1], model.blocks[1].down]:
                composable(module)
        trajectory = train(model, lambda model, x: model(x))
        assert counts(graphrt.quantization_state(model)) == (NUM_STEPS, NUM_STEPS)
        return trajectory

    for depth in (1, 2):
        assert_same_trajectory(run(True, depth), run(False, depth))


def test_debug_mode_equals_the_plain_run():
    expected = run_plainly(per_layer, num_steps=2)
    actual, _ = run_layout(per_layer, lambda fn, *args: graphrt.checkpoint(fn, *args, debug=True), num_steps=2)
    assert_same_trajectory(actual, expected)


SAVED = {
    "the GEMM": [torch.ops.aten.mm.default, torch.ops.aten._scaled_mm.default],
    "a product": [torch.ops.aten.mul.Tensor],
    "a maximum": [torch.ops.aten.maximum.default, torch.ops.aten.amax.default],
    "a cast": [torch.ops.aten._to_copy.default, torch.ops.aten.clamp.default],
    "an activation": [torch.ops.aten.gelu.default],
}


@pytest.mark.parametrize("saved", SAVED.values(), ids=SAVED.keys())
@pytest.mark.parametrize("layout", [region_inside, double_use])
def test_selective_checkpoint_equals_the_plain_run(layout, saved):
    def selective(fn: Any, *args: Any) -> Any:
        return graphrt.checkpoint(fn, *args, context_fn=lambda: torch_checkpoint.create_selective_checkpoint_contexts(saved))

    expected = run_plainly(layout)
    actual, _ = run_layout(layout, selective)
    assert_same_trajectory(actual, expected)


@main_kinds
def test_dropout_inside_draws_the_same_mask_again(kind):
    if kind is own:
        pytest.skip("it keeps no RNG state")

    def layout(model: Any, x: Tensor, ckpt: Any) -> Tensor:
        with graphrt.fp8_autocast():
            for block in model.blocks:
                x = ckpt(lambda x, block=block: F.dropout(block(x), 0.5), x)
        return x

    torch.manual_seed(3)
    expected, _ = run_layout(layout, plainly)
    torch.manual_seed(3)
    actual, _ = run_layout(layout, kind)
    assert_same_trajectory(actual, expected)


@pytest.mark.parametrize("is_inside", [False, True])
@pytest.mark.parametrize("kind", [KINDS["graphrt"], KINDS["graphrt-reentrant"]])
def test_save_on_cpu_equals_the_plain_run(kind, is_inside):
    def layout(model: Any, x: Tensor, ckpt: Any) -> Tensor:
        def run(x: Tensor) -> Tensor:
            with torch.autograd.graph.save_on_cpu() if is_inside else open_nothing():
                return ckpt(model.blocks[1], model.blocks[0](x))

        with graphrt.fp8_autocast(), torch.autograd.graph.save_on_cpu() if not is_inside else open_nothing():
            return ckpt(run, x)

    expected = run_plainly(layout)
    actual, _ = run_layout(layout, kind)
    assert_same_trajectory(actual, expected)


@main_kinds
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_equals_the_plain_run(kind, dtype):
    expected = run_plainly(nested_checkpoints, dtype=dtype)
    actual, _ = run_layout(nested_checkpoints, kind, dtype=dtype)
    assert_same_trajectory(actual, expected)


@main_kinds
def test_torch_autocast_equals_the_plain_run(kind):
    if kind is own:
        pytest.skip("it does not restore autocast")

    def layout(model: Any, x: Tensor, ckpt: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return nested_checkpoints(model, x, ckpt)

    expected = run_plainly(layout)
    actual, _ = run_layout(layout, kind)
    assert_same_trajectory(actual, expected)


@main_kinds
def test_calibration_under_a_checkpoint_equals_the_plain_one(kind):
    def calibrated(model: Any, x: Tensor, ckpt: Any) -> Tensor:
        with graphrt.fp8_autocast(calibrating=True):
            return ckpt(model, x)

    expected = run_plainly(calibrated)
    actual, state = run_layout(calibrated, kind)
    assert_same_trajectory(actual, expected)
    assert counts(state) == (NUM_STEPS, NUM_STEPS)
    assert state._scale.ne(1).all()


@main_kinds
def test_only_the_weight_or_only_the_input_needs_a_gradient(kind):
    def run(ckpt: Any, frozen: bool) -> list[dict[str, Tensor]]:
        model: Any = make_net()
        model.blocks[1].requires_grad_(not frozen)
        return train(model, lambda model, x: per_layer(model, x, ckpt), region=open_nothing)

    for frozen in (False, True):
        assert_same_trajectory(run(kind, frozen), run(plainly, frozen))


def test_checkpoint_passes_torchs_keywords_on_and_the_rest_to_the_function():
    seen: list[Any] = []

    def run(x: Tensor, *, offset: float, name: str) -> Tensor:
        seen.append(name)
        return (x + offset).sin().exp()

    x = make_batch(0).requires_grad_()
    y = graphrt.checkpoint(run, x, offset=2.0, name="a", preserve_rng_state=False, early_stop=False, determinism_check="none")
    y.sum().backward()
    assert seen == ["a", "a"]
    y = graphrt.checkpoint(run, x, use_reentrant=True, offset=2.0, name="b", preserve_rng_state=False)
    y.sum().backward()
    assert seen == ["a", "a", "b", "b"]


def test_checkpoint_refuses_a_keyword_the_reentrant_kind_does_not_take():
    with pytest.raises(ValueError, match="context_fn"):
        graphrt.checkpoint(
            torch.sin, make_batch(0), use_reentrant=True, context_fn=lambda: torch_checkpoint.create_selective_checkpoint_contexts([])
        )


@pytest.mark.parametrize("kind", [KINDS["graphrt-reentrant"], KINDS["torch-reentrant"]])
def test_a_reentrant_checkpoint_under_no_grad_is_no_training_forward(kind):
    model = make_net()
    state = graphrt.quantization_state(model)
    around_everything(model, make_batch(0).requires_grad_(), kind)
    before = state_values(state)
    with torch.no_grad():
        for layout in LAYOUTS:
            layout(model, make_batch(1).requires_grad_(), kind)
    with graphrt.fp8_autocast():
        model(make_batch(2))
        with torch.no_grad():
            kind(model, make_batch(30).requires_grad_())
    after = state_values(state)
    assert counts(state) == (2, 0)
    column = state.slot_index("blocks.0.up.input")
    assert float(after["amax_history"][-1, column]) == float(make_batch(2).abs().max())
    assert int(before["updates"][0]) == 1


# -- a checkpoint of one's own


def without_a_mark(fn: Any, x: Tensor) -> Tensor:
    class Unmarked(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return fn(x)

        @staticmethod
        def backward(ctx: Any, grad_output: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            x = x.detach().requires_grad_()
            with torch.enable_grad():
                y = fn(x)
            torch.autograd.backward(y, grad_output)
            assert x.grad is not None
            return x.grad

    return Unmarked.apply(x)


def test_a_recompute_nobody_can_place_raises_and_names_the_remedy():
    model = make_net()
    y = around_everything(model, make_batch(0).requires_grad_(), without_a_mark)
    before = state_values(graphrt.quantization_state(model))
    with pytest.raises(FlushError, match=r"recompute_phase\(of=mark\)"):
        y.sum().backward()
    assert_same_values(state_values(graphrt.quantization_state(model)), before)


def of_the_only_forward(fn: Any, x: Tensor) -> Tensor:
    def run(x: Tensor) -> Tensor:
        if torch._C._current_graph_task_id() == -1:
            return fn(x)
        with graphrt.recompute_phase():
            return fn(x)

    return without_a_mark(run, x)


def test_recompute_phase_without_a_mark_repeats_the_only_forward_in_flight():
    gc.collect()

    def run(ckpt: Any) -> list[dict[str, Tensor]]:
        model = make_net()
        state, trajectory = graphrt.quantization_state(model), []
        for step in range(NUM_STEPS):
            loss = around_everything(model, make_batch(step).requires_grad_(), ckpt).square().mean()
            loss.backward()
            del loss
            trajectory.append({**grads(model), **state_values(state)})
            descend(model)
        return trajectory

    assert_same_trajectory(run(of_the_only_forward), run(plainly))


def test_recompute_phase_without_a_mark_refuses_two_forwards_in_flight():
    gc.collect()
    model = make_net()
    first = around_everything(model, make_batch(0).requires_grad_(), plainly)
    second = around_everything(model, make_batch(1).requires_grad_(), plainly)
    with pytest.raises(FlushError, match=r"there are 2.*mark_forward"), graphrt.recompute_phase():
        pass
    first.sum().backward()
    second.sum().backward()
    with pytest.raises(FlushError, match="there are 0"), graphrt.recompute_phase():
        pass


def test_recompute_phase_takes_only_a_mark():
    with pytest.raises(TypeError, match="mark_forward"), graphrt.recompute_phase(of=object()):  # pyright: ignore[reportArgumentType]
        pass


def test_recompute_phase_is_seen_by_the_state_and_guards_its_flush():
    model = make_net()
    state = graphrt.quantization_state(model)
    mark = graphrt.mark_forward()
    around_everything(model, make_batch(0), plainly).sum().backward()
    assert not state.in_recompute_phase
    with graphrt.recompute_phase(of=mark):
        assert state.in_recompute_phase
        with pytest.raises(FlushError, match="recompute phase"):
            state.flush()
        with pytest.raises(FlushError, match="recompute phase"):
            state.reduce_and_update_quantization_state(forward=False)
        with pytest.raises(FlushError, match="recompute phase"):
            state.state_dict()
    assert not state.in_recompute_phase
    assert state.backward_update_requested
    assert counts(state) == (1, 0)


def test_marks_taken_outside_regions_name_each_its_own_forward():
    model = make_net()
    state = graphrt.quantization_state(model)
    marks, outputs = [], []
    for step in range(3):
        marks.append(graphrt.mark_forward())
        outputs.append(around_everything(model, make_batch(step), plainly))
    before = state_values(state)
    for step in (1, 0, 2):
        for _ in range(2):
            with graphrt.recompute_phase(of=marks[step]):
                assert same_bits(around_everything(model, make_batch(step), plainly), outputs[step])
    assert_same_values(state_values(state), before)


def test_a_recompute_that_opens_more_regions_than_its_forward_raises():
    model = make_net()
    runs = []

    def run(x: Tensor) -> Tensor:
        runs.append(1)
        for _ in runs:
            with graphrt.fp8_autocast():
                x = model(x)
        return x

    y = graphrt.checkpoint(run, make_batch(0).requires_grad_(), early_stop=False, determinism_check="none")
    with pytest.raises(FlushError, match="region number 2"):
        y.sum().backward()
    assert not region._stack


def test_a_recompute_that_reaches_layers_its_forward_did_not_raises():
    model = make_net()
    runs = []

    def run(x: Tensor) -> Tensor:
        runs.append(1)
        return model(x).sin() if len(runs) > 1 else x.cos().sin()

    y = graphrt.checkpoint(run, make_batch(0).requires_grad_(), early_stop=False)
    with pytest.raises(FlushError, match="the forward it repeats reached none"):
        y.sum().backward()


@main_kinds
def test_the_phase_can_be_asked_for_in_a_function_without_fp8_layers(kind):
    state = graphrt.quantization_state(make_net())
    answers = []

    def run(x: Tensor) -> Tensor:
        answers.append(state.in_recompute_phase)
        return x.sin().exp()

    kind(run, make_batch(0).requires_grad_()).sum().backward()
    assert answers == [False, True]


# -- exceptions


class Interruption(Exception):
    pass


@main_kinds
@pytest.mark.parametrize("failing_call", [1, 2], ids=["in the forward", "in the recompute"])
@pytest.mark.parametrize("layout", [nested_checkpoints, region_inside, region_inside_nested_checkpoints])
def test_an_exception_leaves_no_flag_behind(layout, failing_call, kind):
    model: Any = make_net()
    state = graphrt.quantization_state(model)
    calls = []

    def count(_module: nn.Module, _args: Any) -> None:
        calls.append(1)
        if len(calls) == failing_call:
            raise Interruption

    handle = model.blocks[1].register_forward_pre_hook(count)
    with pytest.raises(Interruption):
        layout(model, make_batch(0).requires_grad_(), kind).sum().backward()
    assert not region._stack
    assert not recompute._phases
    assert not state.in_recompute_phase
    handle.remove()
    model.zero_grad()
    flush_all()
    before = counts(state)
    for step in range(NUM_STEPS):
        layout(model, make_batch(step).requires_grad_(), kind).sum().backward()
    flush_all()
    assert counts(state)[0] == before[0] + LAYOUTS[layout] * NUM_STEPS
    assert counts(state)[1] == before[1] + (NUM_STEPS if LAYOUTS[layout] == 1 else counts(state)[1] - before[1])


@main_kinds
def test_after_a_failed_recompute_the_next_steps_equal_those_of_a_run_without_it(kind):
    def run(ckpt: Any) -> list[dict[str, Tensor]]:
        model: Any = make_net()
        fail_at = [2] if ckpt is not plainly else []
        calls = []

        def count(_module: nn.Module, _args: Any) -> None:
            calls.append(1)
            if len(calls) in fail_at:
                raise Interruption

        handle = model.blocks[0].register_forward_pre_hook(count)
        loss = around_everything(model, make_batch(7).requires_grad_(), ckpt).square().mean()
        if ckpt is not plainly:
            with pytest.raises(Interruption):
                loss.backward()
        handle.remove()
        model.zero_grad()
        return train(model, lambda model, x: around_everything(model, x, ckpt), region=open_nothing)

    assert_same_trajectory(run(kind), run(plainly))


def test_a_forwards_note_goes_with_its_graph():
    gc.collect()
    num_records = len(region._records)
    model = make_net()
    for kind in KINDS.values():
        region_inside(model, make_batch(0).requires_grad_(), kind).sum().backward()
        region_inside(model, make_batch(0).requires_grad_(), kind)
    gc.collect()
    assert len(region._records) == num_records


def test_hints_of_a_checkpoint_cost_little_and_are_certain():
    assert not recompute.may_be_checkpointed()
    seen = []

    def run(x: Tensor) -> Tensor:
        seen.append(recompute.may_be_checkpointed())
        return x.sin().exp()

    for kind in KINDS.values():
        kind(run, make_batch(0).requires_grad_()).sum().backward()
    assert seen == [True] * (2 * len(KINDS))


def test_a_new_forward_in_a_hook_of_a_recompute_backward_is_no_recompute():
    """A hook that runs in the backward of a reentrant recompute opens a region: a forward of its own."""
    model, other = make_net(), make_net(seed=1)
    state = graphrt.quantization_state(other)

    def new_forward(_grad: Tensor) -> None:
        with torch.enable_grad(), graphrt.fp8_autocast():
            other(make_batch(5))

    def run(x: Tensor) -> Tensor:
        y = model(x)
        if y.requires_grad:
            y.register_hook(new_forward)
        return y

    with graphrt.fp8_autocast():
        y = graphrt.checkpoint(run, make_batch(0).requires_grad_(), use_reentrant=True)
    y.sum().backward()
    assert counts(state) == (1, 0)
    assert state.amax_history("blocks.0.up.input")[-1] == make_batch(5).abs().max()
