"""The quantization state: reading it, saving it, putting it back."""

import io
from typing import Any

import pytest
import torch
from training import (
    HISTORY,
    NUM_STEPS,
    RECIPE,
    assert_same_trajectory,
    assert_same_values,
    counts,
    make_batch,
    make_net,
    same_bits,
    state_values,
    train,
)

import graphrt
from graphrt.errors import GraphrtError, RecipeError


def forward(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model(x)


def leave_pending(model: Any) -> None:
    with graphrt.fp8_autocast():
        loss = model(make_batch(9)).square().mean()
    loss.backward()
    model.zero_grad()


def test_a_new_state_has_scales_of_one_and_empty_histories(device):
    state = graphrt.quantization_state(make_net(device=device))
    for name in state.slots:
        assert state.scale(name) == state.scale_inv(name) == 1
        assert state.scale(name).dim() == state.scale_inv(name).dim() == 0
        assert same_bits(state.amax_history(name).cpu(), torch.zeros(HISTORY))
        assert state.nonfinite_amaxes(name) == 0
    assert counts(state) == (0, 0)
    assert not state.backward_update_requested
    assert not state.in_recompute_phase
    assert state.device.type == device.type


def test_scale_inv_has_a_stride_of_16_bytes_a_slot(device):
    state = graphrt.quantization_state(make_net(device=device))
    addresses = [state.scale_inv(name).data_ptr() for name in state.slots]
    assert all(address % 16 == 0 for address in addresses)
    assert len(set(addresses)) == len(state.slots)


def test_an_unknown_slot_is_refused_by_name():
    state = graphrt.quantization_state(make_net())
    for read in (state.scale, state.scale_inv, state.amax_history, state.nonfinite_amaxes, state.slot_index):
        with pytest.raises(ValueError, match=r"no slot 'blocks.9.up.input'"):
            read("blocks.9.up.input")


def test_a_state_dict_holds_plain_copies_and_no_half_step():
    model = make_net()
    state = graphrt.quantization_state(model)
    leave_pending(model)
    saved = state.state_dict()
    assert counts(state) == (1, 1)
    assert not state.backward_update_requested
    buffer = io.BytesIO()
    torch.save(saved, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)
    assert loaded["slots"] == list(state.slots)
    kept = {name: value.clone() for name, value in saved.items() if isinstance(value, torch.Tensor)}
    train(model, forward, num_steps=1)
    assert_same_values({name: saved[name] for name in kept}, kept)


def test_a_loaded_state_goes_on_like_the_one_that_was_saved():
    model = make_net()
    train(model, forward)
    other = make_net()
    other.load_state_dict(model.state_dict())
    state, state_of_other = graphrt.quantization_state(model), graphrt.quantization_state(other)
    leave_pending(other)
    addresses = [getattr(state_of_other, f"_{name}").data_ptr() for name in ("scale", "scale_inv", "amax_history")]
    state_of_other.load_state_dict(state.state_dict())
    assert [getattr(state_of_other, f"_{name}").data_ptr() for name in ("scale", "scale_inv", "amax_history")] == addresses
    assert_same_values(state_values(state_of_other), state_values(state))
    assert counts(state_of_other) == (NUM_STEPS, NUM_STEPS)
    assert_same_trajectory(train(other, forward), train(model, forward))


DAMAGE = {
    "a key missing": (lambda saved: saved.pop("scale"), "lacks scale"),
    "other slots": (lambda saved: saved.update(slots=["a.input", *saved["slots"][1:]]), "expected 'blocks.0.up.input', got 'a.input'"),
    "fewer slots": (lambda saved: saved.update(slots=saved["slots"][:-1]), "has 11 slots, this state 12"),
    "another recipe": (lambda saved: saved["recipe"].update(margin=1), "margin=1, this state has 0"),
    "another format": (lambda saved: saved["recipe"].update(fp8_format="e4m3"), "fp8_format='e4m3'"),
    "another shape": (lambda saved: saved.update(amax_history=saved["amax_history"][:1]), r"amax_history is torch.float32 \[1, 12\]"),
    "another dtype": (lambda saved: saved.update(scale=saved["scale"].double()), "scale is torch.float64"),
}


@pytest.mark.parametrize(("damage", "match"), DAMAGE.values(), ids=DAMAGE.keys())
def test_a_state_dict_that_does_not_fit_is_refused_and_nothing_changes(damage, match):
    model = make_net(2)
    state = graphrt.quantization_state(model)
    saved = state.state_dict()
    leave_pending(model)
    before = state_values(state)
    damage(saved)
    with pytest.raises(ValueError, match=match):
        state.load_state_dict(saved)
    assert_same_values(state_values(state), before)


def test_a_snapshot_keeps_the_pending_request_and_goes_back_in_place():
    model = make_net()
    state = graphrt.quantization_state(model)
    train(model, forward, num_steps=2)
    leave_pending(model)
    before = state_values(state)
    assert before["requested"]
    address = state.staging_row.data_ptr()
    snapshot = state.snapshot()
    assert_same_values(state_values(state), before)
    train(model, forward, num_steps=2)
    state.restore(snapshot)
    assert_same_values(state_values(state), before)
    assert state.staging_row.data_ptr() == address
    state.flush()
    state.restore(snapshot)
    assert_same_values(state_values(state), before)


def test_counts_are_read_back_from_the_device_after_a_replay():
    state = graphrt.quantization_state(make_net())
    state._num_updates.copy_(torch.tensor([5, 4]))
    assert (state.forward_updates, state.backward_updates) == (0, 0)
    state.note_replay()
    assert (state.forward_updates, state.backward_updates) == (5, 4)


@pytest.mark.parametrize(
    "recipe",
    [
        graphrt.DelayedScaling(amax_history_len=1),
        graphrt.DelayedScaling(amax_history_len=2),
        graphrt.DelayedScaling(amax_history_len=4, amax_compute_algo="most_recent"),
        graphrt.DelayedScaling(amax_history_len=3, margin=3, fp8_format=graphrt.Format.E4M3),
    ],
    ids=["one row", "two rows", "most recent", "margin and e4m3"],
)
def test_the_scale_follows_the_recipe(recipe):
    model = make_net(recipe=recipe)
    state = graphrt.quantization_state(model)
    magnitudes = [1.0, 8.0, 2.0, 0.5, 0.25, 4.0, 3.0]
    amaxes = []
    for magnitude in magnitudes:
        x = make_batch(0) * magnitude
        amaxes.append(x.abs().max())
        with graphrt.fp8_autocast():
            y = model(x)
        y.sum().backward()
        window = amaxes[-1] if recipe.amax_compute_algo == "most_recent" else torch.stack(amaxes[-recipe.amax_history_len :]).max()
        assert same_bits(state.scale("blocks.0.up.input"), torch.tensor(448.0) / window / 2.0**recipe.margin)
    state.flush()
    gradient_max = 448.0 if recipe.fp8_format is graphrt.Format.E4M3 else 57344.0
    assert same_bits(state.scale("blocks.2.down.grad_output"), torch.tensor(gradient_max) / 2.0**recipe.margin)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("margin", 0.5),
        ("margin", 33),
        ("margin", True),
        ("fp8_format", "hybrid"),
        ("amax_history_len", 0),
        ("amax_history_len", 2.0),
        ("amax_compute_algo", "mean"),
        ("reduce_amax", 1),
        ("backward_fast_accum", 1),
        ("keep_weight_transpose", 0),
    ],
)
def test_a_recipe_out_of_range_is_refused_by_field(field, value):
    with pytest.raises(RecipeError, match=rf"{field} must be .*{value!r}") as caught:
        graphrt.DelayedScaling(**{field: value})
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, GraphrtError)


def test_a_recipe_comes_back_from_its_plain_values():
    recipe = graphrt.DelayedScaling(
        margin=2,
        fp8_format=graphrt.Format.E4M3,
        amax_history_len=7,
        reduce_amax=False,
        backward_fast_accum=True,
        keep_weight_transpose=False,
    )
    assert graphrt.DelayedScaling.from_dict(recipe.to_dict()) == recipe
    assert recipe != RECIPE


@pytest.mark.parametrize("saved_with", [True, False, None])
def test_a_state_loads_whatever_its_gemms_accumulated_in(saved_with):
    """None: a checkpoint from before there was a choice."""
    saved = graphrt.quantization_state(make_net(recipe=RECIPE)).state_dict()
    saved["recipe"]["backward_fast_accum"] = saved_with
    if saved_with is None:
        del saved["recipe"]["backward_fast_accum"]
    assert graphrt.DelayedScaling.from_dict(saved["recipe"]).backward_fast_accum is (saved_with is True)
    graphrt.quantization_state(make_net(recipe=RECIPE)).load_state_dict(saved)
