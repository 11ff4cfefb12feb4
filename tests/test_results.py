"""Results of replays are plain StepResults to whoever looks: when first looked at, from any thread, in any mode, on disk."""

import copy
import dataclasses
import io
import pickle
import threading

import pytest
import torch

from graphrt.capture import results as results_module
from graphrt.capture.results import _NUM_PLACES, StaticResults
from graphrt.kernels.copy import copy_launches, launch_copies
from graphrt.step import StepResult

move = results_module._move
EXAMPLE = {"loss": 1.5, "grad_norm": 2.5, "skipped": True}


@pytest.fixture(params=[20, 2000], ids=["small", "large"])
def results(device, request):
    return make_results(request.param, device)


def make_results(size: int, device: torch.device) -> StaticResults:
    example = StepResult(
        torch.tensor(1.5, device=device),
        torch.tensor(2.5, device=device),
        torch.tensor(True, device=device),
        {
            "logits": torch.arange(float(size), device=device),
            "count": torch.tensor(7, device=device),
            "aux": torch.tensor(4.0, device=device),
        },
    )
    static = StaticResults(example)
    static.write(example)
    return static


def check(result: StepResult) -> None:
    assert {name: getattr(result, name).item() for name in EXAMPLE} == EXAMPLE
    assert list(result.metrics) == ["logits", "count", "aux"]
    assert (result.metrics["count"].item(), result.metrics["aux"].item()) == (7, 4.0)
    assert type(result) is StepResult
    assert set(vars(result)) == {"loss", "grad_norm", "skipped", "metrics"}


@pytest.mark.parametrize(
    "copied",
    [
        lambda result: result,
        copy.copy,
        copy.deepcopy,
        lambda result: pickle.loads(pickle.dumps(result)),
        lambda result: dataclasses.replace(result, skipped=torch.tensor(True)),
        lambda result: result.clone(),
    ],
    ids=["itself", "copy", "deepcopy", "pickle", "replace", "clone"],
)
def test_a_result_and_its_copies_are_plain(results, copied):
    check(copied(results.read()))


def test_a_result_is_as_equal_as_any_other(results):
    result = results.read()
    same = StepResult(result.loss, result.grad_norm, result.skipped, result.metrics)
    assert result == same
    assert same == result
    assert results.read() != 3
    assert repr(results.read()).startswith("StepResult(loss=tensor(1.5000")
    assert not hasattr(results.read(), "accuracy")
    with pytest.raises(dataclasses.FrozenInstanceError):
        results.read().loss = torch.tensor(0.0)


def take_step(results: StaticResults, value: float) -> StepResult:
    """What a replay does: keep the last result if need be, write, hand out."""
    copy = results.begin_keeping()
    if copy is not None:
        launch_copies(torch.cuda.current_device(), copy_launches([copy]))
    results.end_keeping()
    device = results._buffer.device
    metrics = {name: torch.full_like(x, value) for name, x in results.read().clone().metrics.items()}
    loss, skipped = torch.full((), value, device=device), torch.ones((), dtype=torch.bool, device=device)  # without a sync
    results.write(StepResult(loss, -loss, skipped, metrics))
    return results.read()


def test_the_next_step_does_not_change_a_result_that_nobody_has_looked_at(results):
    result = results.read()
    take_step(results, 5.0)
    check(result)


def test_a_result_that_was_looked_at_in_time_is_not_copied_again(results):
    result = take_step(results, 3.0)
    float(result.loss)
    assert results.begin_keeping() is None
    assert results._kept is None
    results.end_keeping()


def test_nothing_is_kept_for_nobody(results):
    take_step(results, 3.0)
    assert results.begin_keeping() is None
    assert results._kept is None


def test_any_number_of_results_may_be_kept(results):
    kept = []
    for i in range(3 * _NUM_PLACES + 5):
        result = take_step(results, float(i))
        if i % 3:
            kept.append((i, result))
        if i % 3 == 2:
            float(result.loss)  # some are looked at in time
    for i, result in kept:
        assert result.loss.item() == i == -result.grad_norm.item()
        assert result.metrics["count"].item() == i
        assert bool((result.metrics["logits"] == i).all())


def test_a_step_that_fails_before_its_copies_costs_no_result_its_values(results):
    result = take_step(results, 7.0)
    results.begin_keeping()
    if results._kept is not None:
        results._kept.fill_(255)  # on a GPU the copy would be launched with those of the inputs, which fail
    kept = [take_step(results, float(i)) for i in range(_NUM_PLACES)]
    assert result.loss.item() == 7
    assert bool((result.metrics["logits"] == 7).all())
    assert [other.loss.item() for other in kept] == list(range(_NUM_PLACES))


def test_a_result_that_was_looked_at_is_not_moved_when_its_place_is_needed(results, monkeypatch):
    moved = []
    monkeypatch.setattr(results_module, "_move", lambda result, buffer: (moved.append(result), move(result, buffer)))
    kept = []
    for i in range(2 * _NUM_PLACES):
        kept.append(take_step(results, float(i)))
        if i:
            float(kept[i - 1].loss)  # one step late
    assert len(moved) == 2 * _NUM_PLACES - 1, "once each, when the buffer is needed"


@pytest.mark.gpu
@pytest.mark.parametrize("size", [20, 2000])
def test_a_late_look_from_another_stream_that_waited_for_the_step_alone(size):
    results, other, step_ended = make_results(size, torch.device("cuda")), torch.cuda.Stream(), torch.cuda.Event()
    for i in range(10):
        result = take_step(results, float(i))
        step_ended.record()
        torch.cuda._sleep(20_000_000)
        take_step(results, -1.0)  # copies the result, behind the sleep
        other.wait_event(step_ended)
        with torch.cuda.stream(other):
            loss, logits = result.loss, result.metrics["logits"]
        torch.cuda.synchronize()
        assert loss.item() == i
        assert bool((logits == i).all())


@pytest.mark.gpu
def test_a_place_is_not_used_again_before_another_stream_has_read_it():
    results, other = make_results(20, torch.device("cuda")), torch.cuda.Stream()
    result = take_step(results, 7.0)
    take_step(results, -1.0)
    with torch.cuda.stream(other):
        other.wait_stream(torch.cuda.default_stream())
        torch.cuda._sleep(200_000_000)
        loss, logits = result.loss, result.metrics["logits"]
    latest = None
    for i in range(2 * _NUM_PLACES):
        latest = take_step(results, float(-i))  # a result that is held gets a place
    torch.cuda.synchronize()
    assert latest is not None
    assert loss.item() == 7
    assert bool((logits == 7).all())


@pytest.mark.gpu
@pytest.mark.parametrize("size", [20, 2000])
def test_a_look_on_the_stream_of_the_step_after_another_has_gone_on(size):
    results, other = make_results(size, torch.device("cuda")), torch.cuda.Stream()
    result = take_step(results, 7.0)
    other.wait_stream(torch.cuda.current_stream())
    torch.cuda._sleep(50_000_000)
    loss, logits = result.loss, result.metrics["logits"]
    with torch.cuda.stream(other):
        take_step(results, -1.0)
    torch.cuda.synchronize()
    assert loss.item() == 7
    assert bool((logits == 7).all())


@pytest.mark.gpu
@pytest.mark.parametrize("size", [20, 2000])
def test_a_look_from_another_stream_sees_its_own_step(size):
    results = make_results(size, torch.device("cuda"))
    for i in range(20):
        result = take_step(results, float(i))
        other = torch.cuda.Stream()
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            torch.cuda._sleep(2_000_000)
            loss, logits = result.loss, result.metrics["logits"]
        take_step(results, -1.0)
        torch.cuda.synchronize()
        assert loss.item() == i
        assert bool((logits == i).all())


def test_two_threads_may_look_at_once(results):
    errors = []

    def look(result: StepResult, barrier: threading.Barrier) -> None:
        barrier.wait()
        try:
            check(result)
        except Exception as error:
            errors.append(error)

    for _ in range(50):
        result, barrier = results.read(), threading.Barrier(2)
        threads = [threading.Thread(target=look, args=(result, barrier)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not errors


def test_a_look_from_a_signal_handler_does_not_wait_for_the_thread_it_interrupts(results, monkeypatch):
    result, other = results.read(), results.read()
    fields = results.fields

    def interrupted(buffer: torch.Tensor) -> dict:
        monkeypatch.setattr(results, "fields", fields)
        check(other)
        check(result)
        return fields(buffer)

    monkeypatch.setattr(results, "fields", interrupted)
    looking = threading.Thread(target=lambda: float(result.loss), daemon=True)
    looking.start()
    looking.join(timeout=20)
    assert not looking.is_alive()
    check(result)


def test_a_first_look_in_inference_mode_leaves_tensors_that_can_be_trained_with(results, device):
    result = results.read()
    with torch.inference_mode():
        float(result.loss)
    weight = torch.ones((), device=device, requires_grad=True)
    (weight * result.loss).backward()
    assert weight.grad.item() == 1.5
    result.loss.add_(1)


def test_results_can_be_saved_and_a_kept_loss_keeps_nothing_large(results):
    result, file = results.read(), io.BytesIO()
    torch.save({"loss": result.loss, "skipped": result.skipped, "metrics": result.metrics}, file)
    file.seek(0)
    assert torch.load(file, weights_only=True)["skipped"].item() is True
    assert result.loss.untyped_storage().nbytes() < 64
