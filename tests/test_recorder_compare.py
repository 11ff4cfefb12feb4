"""Recordings as values: comparing two steps, what a node knows, closing, and the answer libraries get."""

import gc
import random
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphrt.capture.record_query import capture_answer
from graphrt.capture.recorder import compare, record
from graphrt.errors import CaptureError


class Stateful(nn.Module):
    """Python state of four kinds, each on its own line."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.n = kind, 0
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("ema", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.n += 1
        y = x * self.weight
        if self.kind == "scalar":
            y = y * (self.n * 0.5)
        if self.kind == "buffer":
            self.ema = self.ema * 0.5 + x
        if self.kind == "in place":
            self.ema.mul_(0.5).add_(x)
        if self.kind == "shape":
            y = y[: self.n]
        if self.kind == "branch" and self.n > 1:
            y = y.relu()
        if self.kind == "extra" and self.n > 1:
            y.sum()
        if self.kind == "item":
            y[0] = self.n
        return y.sum() + self.ema.sum() if self.kind != "extra" else y


def compare_two_steps(kind: str) -> list[Any]:
    model, x = Stateful(kind), torch.ones(4)
    first, second = (record(lambda: model(x), keep_outputs=False)[0] for _ in range(2))
    return compare(first, second)


COMPARISONS = {
    "scalar": ("value", "aten::mul got 0.5 in one step and 1.0 in the next for argument 'other'", "y * (self.n * 0.5)", "Keep the value"),
    "buffer": ("rebound", "aten::mul reads argument 'self' at another address", "self.ema * 0.5", "Update the tensor in place"),
    "shape": ("value", "aten::slice got 1 in one step and 2 in the next for argument 'end'", "y[: self.n]", "Keep the value"),
    "branch": ("operation", "aten::relu was issued (", "y.relu()", "Make every step issue the same"),
    "extra": ("operation", "aten::sum was issued (", "y.sum()", "Make every step"),
    "item": ("value", "aten::lift_fresh got the host value 1.0 in one step and the host value 2.0", "y[0]", "Keep the value"),
}


@pytest.mark.parametrize("kind", COMPARISONS)
def test_python_state_is_named(kind: str) -> None:
    expected_kind, start, expression, remedy = COMPARISONS[kind]
    first = compare_two_steps(kind)[0]
    assert first.kind == expected_kind
    assert str(first).startswith(start)
    for part in (expression, "test_recorder_compare.py:", remedy):
        assert part in str(first)
    assert first.location.split(":")[0].endswith("test_recorder_compare.py")


@pytest.mark.parametrize("kind", ["nothing", "in place"])
def test_steps_without_python_state_compare_equal(kind: str) -> None:
    assert compare_two_steps(kind) == []


def test_shapes_and_dtypes_that_differ() -> None:
    inputs = [torch.ones(2), torch.ones(3), torch.ones(3, dtype=torch.float64)]
    recordings = [record(lambda x=x: x.relu(), keep_outputs=False)[0] for x in inputs]
    assert "got [2] float32 in one step and [3] float32 in the next" in str(compare(*recordings[:2])[0])
    assert "got [3] float32 in one step and [3] float64 in the next" in str(compare(*recordings[1:])[0])


def test_host_random_numbers_are_refused_in_steps_that_are_only_compared() -> None:
    with pytest.raises(CaptureError, match=r"random\.random draws on the host.*random\.random\(\)"):
        record(lambda: torch.ones(3) * random.random(), keep_outputs=False)


def test_a_recording_without_outputs_keeps_no_tensor() -> None:
    alive: list[weakref.ref[Tensor]] = []

    def body() -> Tensor:
        middle = torch.ones(100).add(1)
        alive.append(weakref.ref(middle))
        return middle * 2

    recording, out = record(body, keep_outputs=False)
    assert alive[0]() is None
    assert recording.outputs is None
    assert out.sum().item() == 400
    with pytest.raises(CaptureError, match="kept no outputs"):
        recording.replay()


def test_close_drops_everything_and_may_be_called_twice() -> None:
    class Marked(Tensor):
        pass

    values = [torch.ones(1000).as_subclass(Marked)]
    reference = weakref.ref(values[0])
    recording, _ = record(lambda: values[0].add_(1))
    del values[0], _
    recording.close()
    recording.close()
    gc.collect()
    assert reference() is None
    assert recording.num_nodes == 0
    with pytest.raises(CaptureError, match="closed"):
        recording.replay()


def test_a_recording_does_not_keep_the_autograd_graph() -> None:
    weight = nn.Parameter(torch.ones(3))
    freed: list[weakref.ref[Any]] = []

    def body() -> None:
        loss = (weight * 2).sum()
        freed.append(weakref.ref(loss))
        loss.backward()

    recording, _ = record(body)
    assert freed[0]() is None
    assert recording.num_nodes > 0


def test_nodes_name_operation_line_source_and_module() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU()))
    recording, _ = record(lambda: model(torch.ones(2, 4)), on_module=model)
    assert [(node.name, node.module) for node in recording.nodes] == [("aten::ones", ""), ("aten::addmm", "0"), ("aten::relu", "1.0")]
    node = recording.nodes[1]
    assert node.location.endswith(
        f"test_recorder_compare.py:{test_nodes_name_operation_line_source_and_module.__code__.co_firstlineno + 2}"
    )
    assert node.source == "model(torch.ones(2, 4))"
    assert recording.num_nodes == 3
    assert len(recording.operations) > 3


def test_recordings_of_another_device_are_a_diagnosis_only() -> None:
    recording, _ = record(lambda: torch.empty(2, device="meta") + 1, device_type="meta")
    assert [node.name for node in recording.nodes] == ["aten::add"]
    with pytest.raises(CaptureError, match="diagnosis"):
        recording.replay()


def test_a_host_scalar_among_device_tensors_is_legal_and_compared() -> None:
    device = torch.empty(2, device="meta")
    first, second = (record(lambda v=v: device * torch.tensor(v), device_type="meta", keep_outputs=False)[0] for v in (1.0, 2.0))
    assert str(compare(first, second)[0]).startswith("aten::mul got the host value 1.0 in one step and the host value 2.0 in the next")
    with pytest.raises(CaptureError, match="copies between devices, from cpu to meta"):
        record(lambda: torch.ones(2).to("meta"), device_type="meta")


def queries() -> list[Any]:
    return [torch.cuda.is_current_stream_capturing, torch.cuda.graphs.is_current_stream_capturing]


def test_capture_answers_nest_and_are_put_back() -> None:
    before = queries()
    with capture_answer(True):
        kept = torch.cuda.is_current_stream_capturing
        assert [query() for query in queries()] == [True, True]
        with capture_answer(False):
            assert torch.cuda.is_current_stream_capturing() is False
        assert torch.cuda.is_current_stream_capturing() is True
    assert queries() == before
    with pytest.raises(KeyError), capture_answer(True):
        raise KeyError
    assert queries() == before
    with capture_answer(False):
        assert kept() is False


def test_capture_answers_may_end_in_any_order() -> None:
    before = queries()
    first, second = capture_answer(True), capture_answer(False)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert torch.cuda.is_current_stream_capturing() is False
    second.__exit__(None, None, None)
    assert queries() == before
