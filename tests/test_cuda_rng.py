"""The plan that lets a CUDA graph repeat the generator rewinds of checkpointing; replays on a GPU follow it."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from stepping import KINDS, assert_captured_equals_eager, deterministic

from graphrt.capture.cuda_rng import RngTrace, plan_switches


def _offsets_drawn(trace: RngTrace) -> list[tuple[int, int]]:
    """What a step draws: (from, to) offsets of each stretch, in order."""
    begins = [0, *(after for _, after in trace.events)]
    ends = [*(before for before, _ in trace.events), trace.end]
    return [(begin, end) for begin, end in zip(begins, ends, strict=True) if begin != end]


def _offsets_replayed(trace: RngTrace) -> list[tuple[int, int]]:
    """What a graph draws that follows the plan: each state goes on from where it stands."""
    plan = plan_switches(trace)
    stands = [0, *plan.starts]
    current = plan.switches.get(-1, 0)
    lengths = [
        end - begin for begin, end in zip([0, *(e[1] for e in trace.events)], [*(e[0] for e in trace.events), trace.end], strict=True)
    ]
    drawn = []
    for i, length in enumerate(lengths):
        current = plan.switches.get(i - 1, current)
        if length:
            drawn.append((stands[current], stands[current] + length))
            stands[current] += length
    assert stands[0] == plan.default_end
    return drawn


def _trace(*steps: int | tuple[str, int]) -> RngTrace:
    """A step as draws (a number of offsets) and ("get", _) or ("set", to) events."""
    trace, at = RngTrace(), 0
    for step in steps:
        if isinstance(step, int):
            at += step
        else:
            kind, to = step
            target = at if kind == "get" else to
            trace.events.append((at, target))
            at = target
    trace.end = at
    return trace


def test_a_step_that_never_rewinds_needs_no_other_state() -> None:
    plan = plan_switches(_trace(4, ("get", 0), 4, ("get", 0), 8))
    assert (plan.starts, plan.switches) == ([], {})


def test_a_rewind_and_the_return_from_it_switch_there_and_back() -> None:
    trace = _trace(("get", 0), 8, ("get", 0), ("set", 0), 8, ("set", 8), 4)
    plan = plan_switches(trace)
    assert plan.starts == [0]
    assert plan.switches == {2: 1, 3: 0}
    assert _offsets_replayed(trace) == [(0, 8), (0, 8), (8, 12)]


def test_a_rewind_in_which_nothing_is_drawn_needs_no_other_state() -> None:
    plan = plan_switches(_trace(("get", 0), 8, ("set", 0), ("set", 8), 4))
    assert (plan.starts, plan.switches) == ([], {})


def test_after_a_return_the_default_state_goes_on_and_ends_where_the_step_does() -> None:
    """A replay moves the default generator by what the graph drew from it; the next step starts there."""
    trace = _trace(("get", 0), 8, ("get", 0), ("set", 0), 8, ("set", 8), 4)
    assert plan_switches(trace).default_end == trace.end == 12


def test_where_the_default_state_cannot_end_right_the_host_has_to_move_it() -> None:
    trace = _trace(4, ("set", 0))
    assert (plan_switches(trace).default_end, trace.end) == (4, 0)


def test_a_forward_that_goes_on_where_a_recompute_stopped_stays_there() -> None:
    trace = _trace(8, ("set", 4), 4, 4)
    assert _offsets_replayed(trace) == [(0, 8), (4, 12)]


def test_two_checkpoints_recomputed_in_reverse_order() -> None:
    trace = _trace(("get", 0), 4, ("get", 0), 4, ("set", 4), 4, ("set", 8), ("set", 0), 4, ("set", 8))
    assert _offsets_replayed(trace) == _offsets_drawn(trace) == [(0, 4), (4, 8), (4, 8), (0, 4)]


def test_the_same_place_rewound_to_twice_gets_a_state_for_each_time() -> None:
    """Two recomputes of one graph: the state of the first has moved on by then."""
    trace = _trace(4, ("set", 0), 4, ("set", 0), 4, ("set", 4), 4)
    assert _offsets_replayed(trace) == _offsets_drawn(trace)


steps = st.lists(
    st.integers(1, 3).map(lambda n: 4 * n) | st.just(("get", 0)) | st.integers(0, 6).map(lambda n: ("set", 4 * n)),
    max_size=12,
)


@given(steps)
def test_a_graph_that_follows_the_plan_draws_what_the_step_drew(program: list[int | tuple[str, int]]) -> None:
    trace = _trace(*program)
    assert _offsets_replayed(trace) == _offsets_drawn(trace)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [name for name in KINDS if name != "own"])
@pytest.mark.parametrize("num", [1, 2])
def test_checkpointed_dropout_in_a_cuda_graph_equals_eager(kind: str, num: int) -> None:
    with deterministic():
        assert_captured_equals_eager("cuda", model={"dropout": 0.5, "wrap": KINDS[kind]}, grad_accum_steps=num)


@pytest.mark.gpu
def test_a_seed_set_between_replays_is_followed_by_the_recomputes() -> None:
    def wrap(block: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return KINDS["graphrt"](lambda y: F.dropout(block(y), 0.5), x)

    def reseed(_trainer: object, step: int) -> None:
        if step >= 3:
            torch.manual_seed(step % 2)

    with deterministic():
        assert_captured_equals_eager("cuda", model={"dropout": 0.5, "wrap": wrap}, before_step=reseed)
