"""When updates happen: once forward at the region's exit, once backward at the next top-level entry, never under a guard."""

import gc
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from training import (
    HISTORY,
    NUM_STEPS,
    assert_same_trajectory,
    assert_same_values,
    counts,
    descend,
    flush_all,
    grads,
    main_kinds,
    make_batch,
    make_net,
    same_bits,
    state_values,
    train,
)

import graphrt
from graphrt import guards, region
from graphrt.eager.autocast import FlushManager
from graphrt.errors import FlushError

FP8_MAX = {"input": 448.0, "weight": 448.0, "grad_output": 57344.0}


def step_by_hand(model: Any, step: int = 0, device: Any = "cpu") -> Tensor:
    x = make_batch(step, device=device).requires_grad_()
    with graphrt.fp8_autocast():
        loss = model(x).square().mean()
    loss.backward()
    return loss.detach()


def kind_of_slots(state: graphrt.QuantizationState, kind: str) -> list[int]:
    return [state.slot_index(name) for name in state.slots if name.endswith(f".{kind}")]


# -- one of each a step


def test_a_plain_step_updates_each_direction_once(device):
    model = make_net(device=device)
    state = graphrt.quantization_state(model)
    for step in range(NUM_STEPS):
        assert counts(state) == (step, max(0, step - 1))
        step_by_hand(model, step, device)
        assert counts(state) == (step + 1, step)
        descend(model)
    state.flush()
    assert counts(state) == (NUM_STEPS, NUM_STEPS)


def test_scales_and_histories_follow_the_amaxes_of_the_steps_before():
    """An FP8 model against the rule written out: max over the history, the staging row included, then a shift."""
    model: Any = make_net(1)
    state = graphrt.quantization_state(model)
    seen: dict[str, list[Tensor]] = {name: [] for name in state.slots}
    for module_name in ("blocks.0.up", "blocks.0.down"):
        module = model.get_submodule(module_name)
        module.register_forward_pre_hook(lambda m, args, n=module_name: seen[f"{n}.input"].append(args[0].detach().abs().max()))
        module.register_forward_pre_hook(lambda m, args, n=module_name: seen[f"{n}.weight"].append(m.weight.detach().abs().max()))
        module.register_full_backward_hook(lambda m, gi, go, n=module_name: seen[f"{n}.grad_output"].append(go[0].detach().abs().max()))
    for step in range(NUM_STEPS):
        step_by_hand(model, step)
        descend(model)
        state.flush()
        for name in state.slots:
            amaxes = torch.stack(seen[name])
            assert len(amaxes) == step + 1
            history = torch.cat([torch.zeros(HISTORY), amaxes])[-(HISTORY - 1) :]
            assert same_bits(state.amax_history(name), torch.cat([torch.zeros(1), history]))
            window = amaxes[-HISTORY:].max()
            fp8_max = torch.tensor(FP8_MAX[name.rsplit(".", 1)[1]])
            assert same_bits(state.scale(name), fp8_max / window)
            assert same_bits(state.scale_inv(name), 1 / state.scale(name))


def test_a_region_without_gradients_uses_the_scales_and_touches_nothing(device):
    model = make_net(device=device)
    state = graphrt.quantization_state(model)
    for step in range(2):
        step_by_hand(model, step, device)
    before = state_values(state)
    with torch.no_grad(), graphrt.fp8_autocast():
        quantized = model(make_batch(9, device=device))
    with torch.inference_mode(), graphrt.fp8_autocast():
        inferred = model(make_batch(9, device=device))
    with graphrt.fp8_autocast(), torch.no_grad():
        in_a_training_region = model(make_batch(9, device=device))
    after = state_values(state)
    assert after.pop("requested").item() is False
    assert before.pop("requested").item() is True
    assert counts(state) == (2, 2)
    backward = kind_of_slots(state, "grad_output")
    forward = [i for i in range(len(state.slots)) if i not in backward]
    assert same_bits(before["scale"][forward], after["scale"][forward])
    assert same_bits(before["scale_inv"][forward], after["scale_inv"][forward])
    assert same_bits(before["amax_history"][:, forward], after["amax_history"][:, forward])
    assert same_bits(quantized, inferred)
    assert same_bits(quantized, in_a_training_region)
    assert not same_bits(quantized, model(make_batch(9, device=device)))


@pytest.mark.parametrize("in_training", [True, False])
def test_module_training_plays_no_part(in_training):
    def run(training: bool) -> list[dict[str, Tensor]]:
        model = make_net()
        model.train(training)
        return train(model, lambda model, x: model(x))

    assert_same_trajectory(run(in_training), run(True))


def test_only_states_used_in_the_region_count():
    used, unused = make_net(1), make_net(1, seed=1)
    for step in range(3):
        step_by_hand(used, step)
    flush_all()
    assert counts(graphrt.quantization_state(used)) == (3, 3)
    assert counts(graphrt.quantization_state(unused)) == (0, 0)


def test_a_module_unused_in_a_step_keeps_scale_and_history():
    model: Any = make_net(2)
    state = graphrt.quantization_state(model)
    for step in range(2):
        step_by_hand(model, step)
    state.flush()
    before = state_values(state)
    x = make_batch(7).requires_grad_()
    with graphrt.fp8_autocast():
        loss = model.blocks[0](x).square().mean()
    loss.backward()
    state.flush()
    after = state_values(state)
    unused = [i for i, name in enumerate(state.slots) if name.startswith("blocks.1.")]
    assert same_bits(before["scale"][unused], after["scale"][unused])
    assert same_bits(before["amax_history"][:, unused], after["amax_history"][:, unused])
    assert state.amax_history("blocks.0.up.input")[-1] == make_batch(7).abs().max()
    assert counts(state) == (3, 3)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_an_overflow_is_counted_and_does_not_freeze_the_scale(bad):
    model: Any = make_net(1)
    state = graphrt.quantization_state(model)
    step_by_hand(model, 0)
    state.flush()
    slot = "blocks.0.up.input"
    before = state.scale(slot).clone(), state.amax_history(slot).clone()
    x = make_batch(1)
    x[3, 5] = bad
    with graphrt.fp8_autocast():
        model(x)
    assert state.nonfinite_amaxes(slot) == 1
    assert same_bits(state.scale(slot), before[0])
    assert same_bits(state.amax_history(slot), before[1])
    with graphrt.fp8_autocast():
        model(make_batch(2))
    assert state.nonfinite_amaxes(slot) == 1
    assert state.amax_history(slot)[-1] == make_batch(2).abs().max()
    assert same_bits(state.scale(slot), torch.tensor(448.0) / make_batch(2).abs().max())


# -- flush timing


def test_the_backward_update_is_pending_until_the_next_top_level_entry(device):
    model = make_net(device=device)
    state = graphrt.quantization_state(model)
    backward = kind_of_slots(state, "grad_output")
    for step in range(NUM_STEPS):
        step_by_hand(model, step, device)
        assert state.backward_update_requested
        assert counts(state) == (step + 1, step)
        before = state_values(state)
        assert before["amax_history"][0, backward].gt(0).all()
        with graphrt.fp8_autocast():
            after = state_values(state)
            assert not state.backward_update_requested
            assert counts(state) == (step + 1, step + 1)
            assert same_bits(after["amax_history"][-1, backward], before["amax_history"][0, backward])
            assert same_bits(after["scale"][backward], torch.tensor(57344.0) / before["amax_history"][:, backward].amax(0).cpu())
            assert (after["scale"][backward] != before["scale"][backward]).any()
            assert after["amax_history"][0].eq(0).all()
            for enabled in (True, False, True):
                with graphrt.fp8_autocast(enabled=enabled):
                    assert_same_values(state_values(state), after)
                assert_same_values(state_values(state), after)
        assert_same_values(state_values(state), after)
        with graphrt.fp8_autocast():
            pass
        assert_same_values(state_values(state), after)


def test_an_entry_without_gradients_does_not_flush():
    model = make_net()
    state = graphrt.quantization_state(model)
    step_by_hand(model)
    before = state_values(state)
    with torch.no_grad(), graphrt.fp8_autocast():
        assert_same_values(state_values(state), before)
    with torch.inference_mode(), graphrt.fp8_autocast():
        assert_same_values(state_values(state), before)
    assert state.backward_update_requested


def test_a_disabled_entry_does_not_flush_and_an_enabled_one_inside_it_does():
    model = make_net()
    state = graphrt.quantization_state(model)
    step_by_hand(model)
    with graphrt.fp8_autocast(enabled=False):
        assert state.backward_update_requested
        with graphrt.fp8_autocast():
            assert not state.backward_update_requested
            model(make_batch(1))
        assert counts(state) == (2, 1)
    assert counts(state) == (2, 1)


def test_a_calibrating_entry_flushes_like_any_other():
    model = make_net()
    state = graphrt.quantization_state(model)
    step_by_hand(model)
    with graphrt.fp8_autocast(calibrating=True):
        assert counts(state) == (1, 1)


def test_states_flush_in_order_of_creation():
    states = [graphrt.quantization_state(make_net(1, seed=seed)) for seed in range(3)]
    order = []
    for state in reversed(states):
        state.request_backward_quantization_update()
        state._update = lambda direction, group, state=state: order.append(state)  # pyright: ignore[reportAttributeAccessIssue]
    assert FlushManager().flush()
    for state in states:
        del state.__dict__["_update"]
    assert order == states


def test_flush_by_hand_does_what_the_next_entry_would_and_only_once(device):
    by_hand, by_entry = make_net(device=device), make_net(device=device)
    for step in range(NUM_STEPS):
        for model in (by_hand, by_entry):
            step_by_hand(model, step, device)
        state = graphrt.quantization_state(by_hand)
        for _ in range(2):
            state.flush()
            assert counts(state) == (step + 1, step + 1)
        with graphrt.fp8_autocast():
            assert_same_values(state_values(state), state_values(graphrt.quantization_state(by_entry)))


def test_flush_with_nothing_pending_does_nothing_even_under_a_guard(monkeypatch):
    state = graphrt.quantization_state(make_net())
    before = state_values(state)
    state.flush()
    monkeypatch.setattr("graphrt.state.is_capturing", lambda: True)
    state.flush()
    assert_same_values(state_values(state), before)


def test_an_update_by_hand_and_its_old_name_are_the_same_method():
    model = make_net()
    state = graphrt.quantization_state(model)
    step_by_hand(model)
    state.reduce_and_update_fp8_tensors(forward=False)
    assert counts(state) == (1, 1)
    assert not state.backward_update_requested
    state.reduce_and_update_quantization_state(forward=True)
    assert counts(state) == (2, 1)
    assert type(state).reduce_and_update_fp8_tensors is type(state).reduce_and_update_quantization_state


def test_a_request_by_hand_is_flushed_at_the_next_entry():
    state = graphrt.quantization_state(make_net())
    state.request_backward_quantization_update()
    state.request_backward_quantization_update()
    assert state.backward_update_requested
    with graphrt.fp8_autocast():
        assert counts(state) == (0, 1)


def test_a_backward_that_quantizes_nothing_requests_nothing():
    model: Any = make_net(1)
    model.blocks[0].up.weight.requires_grad_(False)
    model.blocks[0].down.weight.requires_grad_(False)
    with graphrt.fp8_autocast():
        y = model.blocks[0].up(make_batch(0))
    y.sum().backward()
    assert model.blocks[0].up.bias.grad is not None
    assert not graphrt.quantization_state(model).backward_update_requested


# -- nesting


def test_one_update_however_deep_the_nesting():
    def nested(depth: int) -> list[dict[str, Tensor]]:
        def forward(model: Any, x: Tensor) -> Tensor:
            if depth == 0:
                return model(x)
            for block in model.blocks:
                with graphrt.fp8_autocast(), graphrt.fp8_autocast():
                    x = block(x)
            return x

        return train(make_net(), forward)

    assert_same_trajectory(nested(1), nested(0))


def test_a_disabled_region_inside_is_plain_and_an_enabled_one_inside_that_belongs_to_the_outermost():
    model: Any = make_net(1)
    state = graphrt.quantization_state(model)
    linear = model.blocks[0].up
    x = make_batch(0)
    plain = linear(x)
    with graphrt.fp8_autocast():
        with graphrt.fp8_autocast(enabled=False):
            assert same_bits(linear(x), plain)
            with graphrt.fp8_autocast():
                assert not same_bits(linear(x), plain)
        assert counts(state) == (0, 0)
    assert counts(state) == (1, 0)


def test_one_region_object_may_be_entered_again_while_it_is_open():
    model: Any = make_net(1)
    state = graphrt.quantization_state(model)
    autocast = graphrt.fp8_autocast()
    with autocast:
        with autocast:
            model(make_batch(0))
        assert counts(state) == (0, 0)
    assert counts(state) == (1, 0)
    with autocast:
        model(make_batch(0))
    assert counts(state) == (2, 0)


def test_calibrating_needs_an_enabled_region():
    with pytest.raises(ValueError, match="calibrating=True"):
        graphrt.fp8_autocast(enabled=False, calibrating=True)


def test_calibration_computes_like_a_plain_linear_and_makes_all_three_scales():
    model, plain = make_net(), make_net()
    graphrt.convert_from_float8_training(plain)
    state = graphrt.quantization_state(model)
    amax = {}
    for i, net in enumerate((model, plain)):
        x = make_batch(1).requires_grad_()
        with graphrt.fp8_autocast(calibrating=True):
            y = net(x)
        y.square().mean().backward()
        amax[i] = {"y": y.detach(), "x.grad": x.grad, **grads(net)}
    assert_same_values(amax[0], amax[1])
    state.flush()
    assert counts(state) == (1, 1)
    assert same_bits(state.scale("blocks.0.up.input"), torch.tensor(448.0) / make_batch(1).abs().max())
    weight = model.get_parameter("blocks.2.down.weight")
    assert same_bits(state.scale("blocks.2.down.weight"), torch.tensor(448.0) / weight.detach().abs().max())
    assert all(state.scale(name) != 1 for name in state.slots)


# -- exceptions


class Interruption(Exception):
    pass


def test_a_region_left_by_an_exception_is_closed_and_has_updated():
    model = make_net()
    state = graphrt.quantization_state(model)
    with pytest.raises(Interruption), graphrt.fp8_autocast(), graphrt.fp8_autocast(enabled=False), graphrt.fp8_autocast():  # noqa: PT012
        model(make_batch(0))
        raise Interruption
    assert not region.is_region_open()
    assert counts(state) == (1, 0)
    step_by_hand(model, 1)
    assert counts(state) == (2, 0)


def test_an_exception_in_a_backward_leaves_the_request_and_the_next_step_right():
    model: Any = make_net()
    state = graphrt.quantization_state(model)

    def fail(*_args: Any) -> None:
        raise Interruption

    handle = model.blocks[0].up.register_full_backward_hook(fail)
    with pytest.raises(Interruption):
        step_by_hand(model)
    handle.remove()
    assert state.backward_update_requested
    assert not guards.is_in_backward()
    for step in range(3):
        step_by_hand(model, step)
        assert counts(state) == (step + 2, step + 1)


def test_a_failing_entry_opens_nothing(monkeypatch):
    def fail(_manager: FlushManager) -> bool:
        raise Interruption

    with monkeypatch.context() as patch:
        patch.setattr(FlushManager, "flush", fail)
        with pytest.raises(Interruption), graphrt.fp8_autocast():
            pass
    assert not region.is_region_open()
    with graphrt.fp8_autocast():
        assert region.is_region_open()


# -- guards


def check_guarded(state: graphrt.QuantizationState, what: str) -> None:
    assert state.backward_update_requested
    for call in (state.flush, state.state_dict):
        with pytest.raises(FlushError, match=what):
            call()


def test_a_recompute_does_not_flush():
    """Backward 2 has requested; the recompute of forward 1 enters a region at the top level."""
    model: Any = make_net(1)
    state = graphrt.quantization_state(model)
    seen = []

    def run(x: Tensor) -> Tensor:
        with graphrt.fp8_autocast():
            if torch._C._current_graph_task_id() != -1:
                seen.append(state_values(state))
                check_guarded(state, "recompute phase")
            return model(x)

    first = graphrt.checkpoint(run, make_batch(0).requires_grad_())
    second = graphrt.checkpoint(run, make_batch(1).requires_grad_())
    with torch.no_grad():
        assert counts(state) == (2, 0)
    state.request_backward_quantization_update()
    before = state_values(state)
    second.sum().backward()
    first.sum().backward()
    assert len(seen) == 2
    assert_same_values(seen[0], before)
    assert counts(state) == (2, 0)
    with graphrt.fp8_autocast():
        assert counts(state) == (2, 1)


@pytest.mark.parametrize("with_gradients", [True, False])
def test_a_region_in_a_hook_of_a_running_backward_does_not_flush(with_gradients):
    model, other = make_net(1), make_net(1, seed=1)
    state, state_of_other = graphrt.quantization_state(model), graphrt.quantization_state(other)
    step_by_hand(other)
    step_by_hand(model)
    state_of_other.request_backward_quantization_update()
    ran = []

    def hook(_grad: Tensor) -> None:
        with torch.set_grad_enabled(with_gradients), graphrt.fp8_autocast():
            ran.append(other(make_batch(3)))
            check_guarded(state, "inside a running backward")
            check_guarded(state_of_other, "inside a running backward")
            with pytest.raises(FlushError, match="inside a running backward"):
                state.reduce_and_update_quantization_state(forward=False)

    x = make_batch(1).requires_grad_()
    y = x.sin()
    y.register_hook(hook)
    y.sum().backward()
    assert len(ran) == 1
    assert ran[0].requires_grad == with_gradients
    assert counts(state) == (1, 0)
    assert counts(state_of_other) == (2 if with_gradients else 1, 1)
    step_by_hand(model)
    assert counts(state) == (2, 1)
    assert counts(state_of_other)[1] == 2


def test_a_new_forward_in_a_hook_outside_any_region_of_its_own_is_refused():
    model = make_net(1)
    y = make_batch(1).requires_grad_().sin()

    def hook(_grad: Tensor) -> None:
        with torch.enable_grad():
            model(make_batch(3))

    y.register_hook(hook)
    with pytest.raises(FlushError, match=r"open graphrt.fp8_autocast\(\)"):
        y.sum().backward()


def pretend(monkeypatch: pytest.MonkeyPatch, guard: str) -> None:
    for module in ("graphrt.state", "graphrt.eager.autocast", "graphrt.guards"):
        monkeypatch.setattr(f"{module}.{guard}", lambda: True, raising=False)


def test_under_a_capture_the_flush_waits_and_a_warning_names_the_call(monkeypatch):
    model = make_net()
    state = graphrt.quantization_state(model)
    step_by_hand(model)
    with monkeypatch.context() as patch:
        pretend(patch, "is_capturing")
        with (  # noqa: PT031
            pytest.warns(UserWarning, match=r"state.reduce_and_update_quantization_state\(forward=False\)") as caught,
            graphrt.fp8_autocast(),
        ):
            assert counts(state) == (1, 0)
            check_guarded(state, "CUDA graph")
            loss = model(make_batch(1)).square().mean()
        assert caught[0].filename == __file__
        assert counts(state) == (2, 0)
        loss.backward()
        state.reduce_and_update_quantization_state(forward=False)
        assert counts(state) == (2, 1)
        assert not state.backward_update_requested
    with graphrt.fp8_autocast():
        assert counts(state) == (2, 1)


def test_under_a_capture_an_entry_without_gradients_has_nothing_to_warn_of(monkeypatch):
    model = make_net()
    pretend(monkeypatch, "is_capturing")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.no_grad(), graphrt.fp8_autocast():
            model(make_batch(0))


def test_a_backward_under_a_capture_may_not_update_while_it_runs(monkeypatch):
    model = make_net(1)
    state = graphrt.quantization_state(model)
    step_by_hand(model)
    pretend(monkeypatch, "is_capturing")
    y = make_batch(1).requires_grad_().sin()
    y.register_hook(lambda _grad: state.reduce_and_update_quantization_state(forward=False))
    with pytest.raises(FlushError, match="inside a running backward"):
        y.sum().backward()
    assert counts(state) == (1, 0)


def test_while_torch_compile_traces_the_flush_waits(monkeypatch):
    model = make_net()
    state = graphrt.quantization_state(model)
    step_by_hand(model)
    with monkeypatch.context() as patch:
        pretend(patch, "is_compiling")
        check_guarded(state, "torch.compile")
        assert not FlushManager().flush()
        with pytest.raises(FlushError, match=r"torch\.compile"):
            state.reduce_and_update_quantization_state(forward=False)
    assert counts(state) == (1, 0)
    with graphrt.fp8_autocast():
        assert counts(state) == (1, 1)


def test_without_a_gpu_nothing_is_capturing():
    assert not guards.is_capturing()
    assert not guards.is_in_backward()
    assert not guards.is_compiling()


# -- threads


def test_region_and_depth_are_the_processes_not_the_threads():
    model = make_net(1)
    state = graphrt.quantization_state(model)
    outputs = []
    plain = model(make_batch(0)).detach()
    with graphrt.fp8_autocast():
        thread = threading.Thread(target=lambda: outputs.append(model(make_batch(0)).detach()))
        thread.start()
        thread.join(60)
        assert not same_bits(outputs[0], plain)
        thread = threading.Thread(target=lambda: step_by_hand(model))
        thread.start()
        thread.join(60)
        assert counts(state) == (0, 0)
    assert counts(state) == (1, 0)


# -- lifetimes


def test_a_state_goes_with_its_model():
    model = make_net(1)
    serial = graphrt.quantization_state(model).serial
    step_by_hand(model)
    del model
    gc.collect()
    from graphrt.state import registered_states

    assert serial not in [state.serial for state in registered_states()]


def test_a_model_that_goes_with_an_update_pending_disturbs_nobody():
    model, other = make_net(1), make_net(1, seed=1)
    step_by_hand(model)
    del model
    gc.collect()
    step_by_hand(other)
    assert counts(graphrt.quantization_state(other)) == (1, 0)


# -- a capture of the user's own, on a GPU


@pytest.mark.gpu
@main_kinds
def test_a_step_captured_by_hand_replays_like_eager_steps(kind: Callable[..., Any]):
    device = torch.device("cuda")
    captured, eager = make_net(device=device), make_net(device=device)
    state, expected = graphrt.quantization_state(captured), graphrt.quantization_state(eager)
    for step in range(2):
        for model in (captured, eager):
            step_by_hand(model, step, device)
    flush_all()
    static_x = make_batch(2, device=device)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    for p in captured.parameters():
        assert p.grad is not None
        p.grad.zero_()
    for p in eager.parameters():
        assert p.grad is not None
        p.grad.zero_()
    before = state_values(state)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.graph(graph, stream=stream):
        for p in captured.parameters():
            assert p.grad is not None
            p.grad.zero_()
        with pytest.warns(UserWarning, match="forward=False"), graphrt.fp8_autocast():  # noqa: PT031
            assert guards.is_capturing()
            loss = kind(captured, static_x.requires_grad_()).square().mean()
        loss.backward()
        with pytest.raises(FlushError, match="CUDA graph"):
            state.flush()
        state.reduce_and_update_quantization_state(forward=False)
        assert not state.backward_update_requested
    after = state_values(state)
    for name in ("scale", "amax_history"):
        assert same_bits(before[name], after[name])
    for step in range(2, 2 + NUM_STEPS):
        with torch.no_grad():
            static_x.copy_(make_batch(step, device=device))
        graph.replay()
        state.note_replay()
        for p in eager.parameters():
            assert p.grad is not None
            p.grad.zero_()
        step_by_hand(eager, step, device)
        expected.flush()
        assert_same_values(state_values(state), state_values(expected), f"step {step}")
    assert counts(state) == (2 + NUM_STEPS, 2 + NUM_STEPS)


@pytest.mark.gpu
def test_a_flush_that_is_pending_at_a_capture_happens_at_the_next_entry_after_it():
    device = torch.device("cuda")
    model = make_net(1, device=device)
    state = graphrt.quantization_state(model)
    step_by_hand(model, 0, device)
    with torch.no_grad(), graphrt.fp8_autocast():
        model(make_batch(0, device=device))
    graph, x = torch.cuda.CUDAGraph(), make_batch(0, device=device)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph), pytest.warns(UserWarning, match="forward=False"), graphrt.fp8_autocast():
        model(x)
    assert state.backward_update_requested
    torch.cuda.synchronize()
    with graphrt.fp8_autocast():
        assert not state.backward_update_requested
