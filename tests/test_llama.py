"""The language model: shapes, causality, positions, precision, checkpointing."""

import pytest
import torch

import graphrt
from graphrt.llama import Llama, is_block_linear, make_loss_fn, rotary_tables
from graphrt.nn import rotary_qkv
from graphrt.presets import PRESETS, ModelShape

SHAPE = ModelShape(num_layers=2, width=32, num_heads=2, ffn=48, vocab=64)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Llama(SHAPE, 32)


@pytest.fixture
def tokens():
    return torch.randint(64, (2, 32), generator=torch.Generator().manual_seed(1))


def test_logits_have_a_value_for_each_token_of_the_vocabulary(model, tokens):
    assert model(tokens).shape == (2, 32, 64)


def test_a_token_sees_only_those_before_it(model, tokens):
    changed = tokens.clone()
    changed[:, 20:] = (changed[:, 20:] + 1) % 64
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :20], after[:, :20])
    assert not torch.allclose(before[:, 20:], after[:, 20:])


def test_sequences_may_be_shorter_than_the_rotary_tables(model, tokens):
    torch.testing.assert_close(model(tokens[:, :16]), model(tokens)[:, :16])


def test_rotation_keeps_lengths_and_depends_on_distance_alone():
    cos, sin = rotary_tables(64, 16)
    stream, projection = torch.ones(1, 64, 16), torch.nn.Linear(16, 48, bias=False)
    _, query, key, value = rotary_qkv(stream, torch.zeros_like(stream), torch.ones(16), projection, cos, sin, 1, 1e-5)
    query, key, value = (x.detach()[0, 0] for x in (query, key, value))  # [64, 16], one vector at every position
    torch.testing.assert_close(value, value[:1].expand(64, 16))
    assert not torch.allclose(query[1], query[0])  # position 0 is turned by nothing
    torch.testing.assert_close(query.norm(dim=-1), query[0].norm().expand(64))
    torch.testing.assert_close(query[5] @ key[3], query[45] @ key[43])


def test_rotary_tables_are_no_part_of_the_state_dict(model):
    assert not {"cos", "sin"} & model.state_dict().keys()


def test_number_of_parameters_is_what_the_shape_says(model):
    assert sum(parameter.numel() for parameter in model.parameters()) == SHAPE.num_parameters


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_can_be_converted(name):
    preset = PRESETS[name]
    with torch.device("meta"):
        model = Llama(preset.shape, preset.seq_len)
    linears = [module for fqn, module in model.named_modules() if isinstance(module, torch.nn.Linear) and is_block_linear(module, fqn)]
    sizes = [size for linear in linears for size in (linear.in_features, linear.out_features)]
    assert sizes
    assert all(size % 16 == 0 for size in (*sizes, preset.seq_len))
    assert preset.shape.width % (2 * preset.shape.num_heads) == 0


def test_blocks_linears_are_converted_and_the_head_is_not(model):
    graphrt.convert_to_float8_training(model, module_filter_fn=is_block_linear)
    slots = graphrt.quantization_state(model).slots
    assert len(slots) == 3 * 4 * SHAPE.num_layers
    assert not [slot for slot in slots if slot.startswith("head")]


def test_a_fresh_model_is_as_wrong_as_a_uniform_guess(model, tokens):
    loss = make_loss_fn("cpu", None)(model, {"tokens": tokens, "labels": tokens})
    assert loss.item() == pytest.approx(torch.tensor(64.0).log().item(), abs=0.15)


def test_autocast_decides_the_dtype_of_the_residual_stream(model, tokens):
    seen = []
    model.blocks[1].register_forward_pre_hook(lambda _, args: seen.append((args[0].dtype, args[1].dtype)))
    batch = {"tokens": tokens, "labels": tokens}
    for dtype in (None, torch.bfloat16):
        loss = make_loss_fn("cpu", dtype)(model, batch)
        assert loss.dtype == torch.float32
    assert seen == [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16)]


def test_checkpointing_changes_no_bit(tokens):
    gradients = []
    for checkpoint in (None, graphrt.checkpoint):
        torch.manual_seed(0)
        model = Llama(SHAPE, 32, checkpoint)
        make_loss_fn("cpu", None)(model, {"tokens": tokens, "labels": tokens}).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
