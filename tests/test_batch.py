"""Batches: names of their tensors, splits into microbatches, static inputs."""

import collections
import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import graphrt
from graphrt.batch import leaves, map_tensors, plain, split
from graphrt.capture.inputs import StaticInputs, signature


class Pair(NamedTuple):
    x: Tensor
    y: Any


def test_tensors_are_named_the_way_one_would_write_them() -> None:
    x = torch.zeros(2)
    batch = {"tokens": x, "nested": [x, {"mask": (x, 3)}], 7: x}
    names = [name for name, _ in leaves(batch)]
    assert names == ['batch["tokens"]', 'batch["nested"][0]', 'batch["nested"][1]["mask"][0]', 'batch["nested"][1]["mask"][1]', "batch[7]"]
    assert [name for name, _ in leaves(x)] == ["batch"]
    assert [name for name, _ in leaves(Pair(x, 1))] == ["batch.x", "batch.y"]


@dataclasses.dataclass
class Record:
    x: Tensor


@pytest.mark.parametrize("bad", [object(), {1, 2}, Record(torch.zeros(2)), len], ids=["object", "set", "dataclass", "function"])
def test_what_is_no_tensor_and_no_constant_is_refused_by_name(bad: Any) -> None:
    with pytest.raises(
        graphrt.StaticInputError, match=rf'batch\["a"\]\[1\] is of type {type(bad).__name__}, expected a tensor or a constant'
    ):
        list(leaves({"a": [1, bad]}))


def test_a_tensor_that_requires_a_gradient_is_refused_by_name() -> None:
    with pytest.raises(graphrt.StaticInputError, match=r'batch\["x"\] requires a gradient'):
        split({"x": torch.zeros(2, requires_grad=True)}, 1)


def test_mappings_of_other_types_become_dicts_all_the_way_down() -> None:
    batch = collections.UserDict(a=collections.OrderedDict(b=[collections.UserDict(c=1)]))
    assert plain(batch) == {"a": {"b": [{"c": 1}]}}
    assert type(plain(batch)["a"]) is dict


@given(
    rows=st.integers(1, 5),
    num=st.integers(1, 4),
    extra=st.lists(st.integers(1, 3), max_size=2),
)
def test_microbatches_put_together_are_the_batch(rows: int, num: int, extra: list[int]) -> None:
    x = torch.arange(rows * num * (extra[0] if extra else 1)).reshape(rows * num, *extra[:1])
    parts = split({"x": x, "scale": torch.tensor(2.0), "name": "a", "pair": (x, None)}, num)
    assert len(parts) == num
    assert torch.equal(torch.cat([part["x"] for part in parts]), x)
    assert torch.equal(torch.cat([part["pair"][0] for part in parts]), x)
    assert all(part["name"] == "a" and float(part["scale"]) == 2.0 for part in parts)
    assert all(part["x"].untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for part in parts)


@pytest.mark.parametrize("rows", [1, 3, 5])
def test_a_batch_that_does_not_divide_is_refused_by_name(rows: int) -> None:
    with pytest.raises(graphrt.StaticInputError, match=rf'batch\["x"\] has shape \[{rows}, 2\].*grad_accum_steps=2'):
        split({"x": torch.zeros(rows, 2)}, 2)


def test_a_list_of_as_many_batches_is_taken_as_it_is_and_another_one_is_split() -> None:
    a, b, c = torch.zeros(4), torch.ones(4), torch.ones(4)
    first, second = split([a, b], 2)
    assert first is a
    assert second is b
    parts = split([a, b, c], 2)
    assert [len(part) for part in parts] == [3, 3]
    assert parts[0][0].shape == (2,)
    (whole,) = split([a], 1)
    assert whole == [a]
    assert type(split((a, b), 2)[0]) is tuple


values = st.recursive(
    st.sampled_from([1, 1.0, True, "a", None, torch.zeros(2), torch.zeros(3), torch.zeros(2, dtype=torch.int64), torch.zeros(())]),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.sampled_from("abc"), children, max_size=3),
    max_leaves=6,
)


def _same_form(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and a.dtype == b.dtype
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same_form(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(_same_form, a, b))
    return bool(a == b) and not isinstance(a, Tensor)


@given(one=values, other=values)
def test_signatures_are_equal_exactly_for_batches_of_one_form(one: Any, other: Any) -> None:
    assert (signature(one) == signature(other)) == _same_form(one, other)


@given(one=values, other=values)
def test_what_static_inputs_were_not_made_for_is_refused(one: Any, other: Any) -> None:
    inputs = StaticInputs(one, torch.device("cpu"))
    if _same_form(one, other):
        inputs.check(other)
    else:
        with pytest.raises(graphrt.StaticInputError):
            inputs.check(other)


@given(batch=values, data=st.data())
def test_static_inputs_take_the_values_and_keep_their_addresses(batch: Any, data: st.DataObject) -> None:
    inputs = StaticInputs(batch, torch.device("cpu"))
    addresses = [leaf.data_ptr() for _, leaf in leaves(inputs.batch) if isinstance(leaf, Tensor)]
    for fill in (3, 7):
        source = map_tensors(lambda x, fill=fill: torch.full_like(x, fill), batch)
        if isinstance(source, dict) and data.draw(st.booleans()):
            source = dict(reversed(source.items()))
        inputs.copy_from(source)
        filled = [leaf for _, leaf in leaves(inputs.batch) if isinstance(leaf, Tensor)]
        assert all(bool((leaf == fill).all()) for leaf in filled)
        assert [leaf.data_ptr() for leaf in filled] == addresses


def test_static_inputs_take_dicts_by_key_and_any_strides() -> None:
    x = torch.arange(6.0).reshape(2, 3)
    inputs = StaticInputs({"a": x, "b": x}, torch.device("cpu"))
    inputs.copy_from({"b": x + 10, "a": torch.arange(6.0).reshape(3, 2).T})
    assert inputs.batch["a"].tolist() == [[0.0, 2.0, 4.0], [1.0, 3.0, 5.0]]
    assert inputs.batch["b"].tolist() == (x + 10).tolist()
    expanded = torch.ones(1, 1).expand(2, 3)
    assert StaticInputs({"a": expanded}, torch.device("cpu")).batch["a"].is_contiguous()


@pytest.mark.parametrize("num_tensors", [1, 2, 5])
@pytest.mark.parametrize(
    "kind", ["plain", "sliced", "transposed", "expanded", "negated", "conjugated", "parameter", "empty", "host", "mixed"]
)
def test_static_inputs_hold_what_any_source_holds(kind, num_tensors, device):
    def make(i: int) -> torch.Tensor:
        x = torch.arange(24.0, device=device).reshape(4, 6) + 100 * i
        numbers = torch.complex(x, -x)
        sources = {
            "plain": x,
            "sliced": torch.cat((x, x))[4:],
            "transposed": x.t(),
            "expanded": x[:1].expand(4, 6),
            "negated": numbers.conj().imag,
            "conjugated": numbers.conj(),
            "parameter": torch.nn.Parameter(x, requires_grad=False),
            "empty": x[:, :0],
            "host": x.cpu(),
            "mixed": x.cpu() if i == 0 else x,
        }
        return sources[kind]

    batch = {str(i): make(i) for i in range(num_tensors)}
    inputs = StaticInputs(batch, device)
    for step in range(3):
        batch = {name: x.clone() if kind == "plain" and step else x for name, x in batch.items()}
        for x in inputs.batch.values():
            x.zero_()
        inputs.copy_from(batch)
        inputs.note_copied()
        for name, x in batch.items():
            assert inputs.batch[name].device.type == device.type
            assert torch.equal(inputs.batch[name].cpu().resolve_conj(), x.cpu().resolve_conj().resolve_neg())
