"""What happened on the device in a few steps of one path, and sums over it. Times in microseconds."""

import functools
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from graphrt.capture.attribution import Place

__all__ = ["Event", "Gap", "PathProfile", "Row", "covered", "kind_of_work", "layer_of"]


@dataclass(frozen=True, slots=True)
class Event:
    """One kernel, copy or memset on the device; one operation on a CPU.

    Attributes:
        step: 0-based.
        name: the kernel's or the operation's.
        kind: "kernel", "memcpy", "memset" or "operation".
        start_us: since the first event of the path.
        place: module, direction and phase; None if unknown.
        is_in_graph: whether a graph's replay launched it.
        flops, num_bytes: what it computes, what it reads and writes; None where unknown.
        reason: why `place` is None.
        is_beside: whether it is on the graph's second branch.
    """

    step: int
    name: str
    kind: str
    start_us: float
    duration_us: float
    place: Place | None
    is_in_graph: bool = False
    flops: int | None = None
    num_bytes: int | None = None
    reason: str = ""
    is_beside: bool = False

    @property
    def end_us(self) -> float:
        return self.start_us + self.duration_us

    @property
    def work(self) -> str:
        """What sort of kernel it is, in a word."""
        return kind_of_work(self.name, self.kind)


@dataclass(frozen=True)
class Gap:
    """A time in which the device did nothing, and what ran before and after."""

    duration_us: float
    before: Event
    after: Event


@dataclass(frozen=True)
class Row:
    """Events that share a key; times, counts and costs a step.

    Attributes:
        time_us: of all of them, those beside others included.
        beside_us: of those on the graph's second branch, which wait there for room: what they cost the step is less.
        share: of the time of all kernels that are not beside others.
        flops, num_bytes: sums over the events where they are known; None if none is.
    """

    key: tuple[str, ...]
    time_us: float
    beside_us: float
    share: float
    num_kernels: float
    flops: float | None
    num_bytes: float | None

    @property
    def chain_us(self) -> float:
        """Time of those that are not beside others."""
        return self.time_us - self.beside_us


@dataclass(frozen=True)
class PathProfile:
    """The steps of one path.

    Attributes:
        path: "captured" or "eager".
        num_steps: steps watched.
        events: in order of start.
        step_us: time of a step that nobody watches, host and device.
        notes: what could not be matched, one sentence each.
    """

    path: str
    num_steps: int
    events: tuple[Event, ...]
    step_us: float
    notes: tuple[str, ...] = field(default=())

    @cached_property
    def kernel_us(self) -> float:
        """Time of all kernels of a step, added up; what ran side by side counts twice."""
        return sum(event.duration_us for event in self.events) / self.num_steps

    @cached_property
    def beside_us(self) -> float:
        """Of `kernel_us`, what is on the graph's second branch."""
        return sum(event.duration_us for event in self.events if event.is_beside) / self.num_steps

    @property
    def chain_us(self) -> float:
        """Of `kernel_us`, what is not beside others."""
        return self.kernel_us - self.beside_us

    @property
    def span_us(self) -> float:
        """From the first kernel's start to the last one's end, a step."""
        if not self.events:
            return 0.0
        return (max(event.end_us for event in self.events) - self.events[0].start_us) / self.num_steps

    @property
    def busy_us(self) -> float:
        """Time of a step in which at least one kernel ran."""
        return covered((event.start_us, event.end_us) for event in self.events) / self.num_steps

    @property
    def gap_share(self) -> float:
        """Share of `step_us` in which nothing ran. Watching stretches the gaps, so it is the unwatched step that counts."""
        return max(0.0, 1.0 - self.busy_us / self.step_us) if self.step_us else 0.0

    @cached_property
    def gaps(self) -> tuple[Gap, ...]:
        """All gaps of the watched steps, the longest first."""
        found: list[Gap] = []
        last: Event | None = None
        for event in self.events:
            if last is not None and event.start_us > last.end_us:
                found.append(Gap(event.start_us - last.end_us, last, event))
            if last is None or event.end_us > last.end_us:
                last = event
        return tuple(sorted(found, key=lambda gap: -gap.duration_us))

    @property
    def unattributed(self) -> tuple[Event, ...]:
        """Events that no place is known of."""
        return tuple(event for event in self.events if event.place is None)

    @property
    def attributed_share(self) -> float:
        """Share of the kernels' time whose place is known."""
        total = self.kernel_us * self.num_steps
        return 1.0 - sum(event.duration_us for event in self.unattributed) / total if total else 1.0

    def rows(self, key: Callable[[Event], tuple[str, ...]]) -> list[Row]:
        """Events with the same key as one row, the longest first, what is beside others last; every event is in one of them."""
        groups: dict[Hashable, list[Event]] = {}
        for event in self.events:
            groups.setdefault(key(event), []).append(event)
        return sorted((self._row(key(events[0]), events) for events in groups.values()), key=lambda row: (-row.chain_us, -row.beside_us))

    def _row(self, key: tuple[str, ...], events: Sequence[Event]) -> Row:
        time_us = sum(event.duration_us for event in events) / self.num_steps
        beside_us = sum(event.duration_us for event in events if event.is_beside) / self.num_steps
        flops = [event.flops for event in events if event.flops is not None]
        num_bytes = [event.num_bytes for event in events if event.num_bytes is not None]
        return Row(
            key,
            time_us,
            beside_us,
            (time_us - beside_us) / self.chain_us if self.chain_us else 0.0,
            len(events) / self.num_steps,
            sum(flops) / self.num_steps if flops else None,
            sum(num_bytes) / self.num_steps if num_bytes else None,
        )


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """How long at least one of the intervals (start, end) lasts, in their unit."""
    total, last_end = 0.0, -math.inf
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, last_end))
        last_end = max(last_end, end)
    return total


#: Words that tell the kind of a kernel or an operation, the first that fits.
_WORK = (
    ("attention", ("flash", "fmha", "attention", "sdpa", "cudnn_generated", "cudnn::fusion")),
    ("quantize", ("graphrt_quantize", "graphrt_record_amax", "graphrt::quantize", "graphrt::record_amax")),
    ("scale update", ("graphrt_update_scales", "graphrt::update_scales")),
    ("norm", ("rms_norm", "layer_norm", "layernorm")),
    ("rope", ("graphrt_rope", "rotary")),
    ("swiglu", ("graphrt_swiglu", "silu", "swiglu")),
    ("cross-entropy", ("cross_entropy", "nll_loss", "softmax")),
    ("optimizer", ("adam", "sgd", "multi_tensor_l2", "graphrt_grad_norm")),
    ("gemm", ("gemm", "cutlass", "nvjet", "scaled_mm", "::mm", "::addmm", "::bmm", "::baddbmm", "cublas", "splitk", "xmma")),
    ("embedding", ("embedding", "index", "gather", "scatter")),
    ("copy", ("memcpy", "::copy", "_to_copy", "::clone", "catarray", "direct_copy", "copy_kernel")),
    ("fill", ("memset", "fill", "zero", "::ones", "::full")),
    ("reduce", ("reduce", "::sum", "::mean", "::amax", "::max", "norm")),
)


@functools.cache
def kind_of_work(name: str, kind: str) -> str:
    """What sort of kernel it is by its name, in a word; "elementwise" and "other" for what has no better one."""
    if kind in ("memcpy", "memset"):
        return "copy" if kind == "memcpy" else "fill"
    lower = name.lower()
    for work, words in _WORK:
        if any(word in lower for word in words):
            return work
    return "elementwise" if kind == "operation" or "elementwise" in lower or "foreach" in lower else "other"


def layer_of(place: Place | None) -> str:
    """The row of a picture that work belongs to: a block such as "blocks.3", a top module, or the phase in parentheses."""
    if place is None:
        return "(unattributed)"
    if not place.module:
        return f"({'loss and root' if place.direction else place.phase})"
    parts = place.module.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdigit()), 0)
    return ".".join(parts[: number + 1])
