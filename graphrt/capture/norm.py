"""The gradient norm of captured steps, most of it added up beside the backward that makes the gradients ([Note: branch]).

An eager step adds all gradients up by one launch at its end. A captured one can begin as soon as some are final, and gets the
same bits (`graphrt.kernels.grad_norm`). When a gradient is final is learnt from the last warmup step, which the captured one
repeats: after as many writes through its sink as there were then. Gradients that autograd adds to, or that anything else
edits, or that are written on a stream of the user's, are added up at the end, as is the one that is written last. A captured
step that touches a gradient after it was added up is refused.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from graphrt.capture.branch import Branch, growing_chunks
from graphrt.errors import CaptureError
from graphrt.kernels.grad_norm import NORM_DTYPES, NormSums, NormTable, grad_norm
from graphrt.owners import working_for
from graphrt.ranges import CLIP
from graphrt.step import StepBody

__all__ = ["StepNorm"]

#: Elements of the last launch beside the backward: it may end as much later than the backward as they take, some microseconds.
_LAST_ELEMENTS = 1 << 22


class _Writes:
    """What one step did with gradients that have a sink."""

    def __init__(self) -> None:
        self.count: Counter[nn.Parameter] = Counter()
        self.versions: dict[nn.Parameter, int] = {}  # in the order of the last writes
        self.accumulated: set[nn.Parameter] = set()

    def add(self, parameter: nn.Parameter, grad: Tensor) -> None:
        self.count[parameter] += 1
        self.versions.pop(parameter, None)
        self.versions[parameter] = grad._version

    def is_final(self, parameter: nn.Parameter) -> bool:
        """Whether nothing but its sink has touched the gradient. Autograd comes first to one that it adds to in place."""
        grad = parameter.grad
        return parameter not in self.accumulated and grad is not None and grad._version == self.versions.get(parameter)


@dataclass(eq=False)
class _Part:
    """Gradients that one launch of the captured step adds up."""

    parameters: list[nn.Parameter]
    table: NormTable
    num_missing: int  # gradients that are not final yet
    is_issued: bool = False


class _Plan:
    """The launches of the captured step's norm. A graph that was captured with them reads the tables at every replay."""

    def __init__(self, parameters: list[nn.Parameter], chunks: list[list[nn.Parameter]]) -> None:
        sums = NormSums([parameter.numel() for parameter in parameters], parameters[0].device)
        rows = {parameter: row for row, parameter in enumerate(parameters)}

        def part(chunk: list[nn.Parameter]) -> _Part:
            return _Part(chunk, NormTable(sums, [rows[parameter] for parameter in chunk]), len(chunk))

        beside = [part(chunk) for chunk in chunks]
        self.part_of = {parameter: part for part in beside for parameter in part.parameters}
        self.parts = [*beside, part([parameter for parameter in parameters if parameter not in self.part_of])]


def _shrinking_chunks(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """In order, each chunk about half of the one before: what is final last is added up by the shortest launch."""
    backwards = parameters[::-1]
    chunks = growing_chunks([parameter.numel() for parameter in backwards], _LAST_ELEMENTS)
    return [backwards[chunk.start : chunk.stop][::-1] for chunk in reversed(chunks)]


class StepNorm:
    """The norm of the step of one batch shape.

    Args:
        body: the step.
        branch: beside the capture stream; one that cannot fork has all gradients added up at the end.
    """

    def __init__(self, body: StepBody, branch: Branch) -> None:
        self._body, self._branch = body, branch
        self._norm = torch.zeros((), device=body.max_grad_norm.device)  # static: warmup and captured steps write the same
        self._writes = _Writes()
        self._final: list[nn.Parameter] = []  # of the step just run, in the order in which their gradients became so
        self._learnt: list[nn.Parameter] = []  # those of the last warmup step
        self._num_writes: Counter[nn.Parameter] = Counter()
        self._plan: _Plan | None = None
        self._late: list[nn.Parameter] = []

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Surrounds one step."""
        self._writes, self._late = _Writes(), []
        with self._body.gradients.sinks.heard_by(self):
            yield

    def learn(self) -> None:
        """Take in what the step just run did, for the one to be captured."""
        self._num_writes, self._learnt = self._writes.count, self._final

    @contextmanager
    def planned(self) -> Iterator[None]:
        """The step captured inside the block adds gradients up as they become final. The tables are written at its end."""
        self._plan = self._make_plan()
        if self._plan is not None:
            # The table of the warmup steps would keep their gradients.
            self._body.optimizer.tables.drop("gradients")
        try:
            yield
        except BaseException:
            self.drop_tables()
            raise
        for part in [] if self._plan is None else self._plan.parts:
            if part.is_issued:
                part.table.write()

    def _make_plan(self) -> _Plan | None:
        """None for a step whose norm is one launch at the end."""
        gradients = self._body.gradients
        names = set(gradients.names)
        parameters = [parameter for name, parameter in gradients.named.items() if name in names]
        has_known_dtypes = all((parameter if parameter.grad is None else parameter.grad).dtype in NORM_DTYPES for parameter in parameters)
        early = self._learnt[:-1]
        is_worth_it = sum(parameter.numel() for parameter in early) >= _LAST_ELEMENTS
        if not (self._branch.can_fork and has_known_dtypes and is_worth_it):
            return None
        return _Plan(parameters, _shrinking_chunks(early))

    # -- the step

    def wrote(self, parameter: nn.Parameter) -> None:
        """A sink has written: the gradient may be final now, and with it a part."""
        assert parameter.grad is not None
        self._writes.add(parameter, parameter.grad)
        part = self._early_part(parameter)
        if part is None:
            return
        if part.is_issued:
            self._late.append(parameter)
        elif self._writes.count[parameter] == self._num_writes[parameter] and self._branch.is_on_main:
            part.num_missing -= 1
            if part.num_missing == 0:
                self._issue_beside(part)

    def will_accumulate(self, parameter: nn.Parameter) -> None:
        """Autograd adds to the gradient."""
        self._writes.accumulated.add(parameter)
        part = self._early_part(parameter)
        if part is not None and part.is_issued:
            self._late.append(parameter)

    def _early_part(self, parameter: nn.Parameter) -> _Part | None:
        return self._plan.part_of.get(parameter) if self._plan is not None and self._branch.is_open else None

    def _issue_beside(self, part: _Part) -> None:
        # In the middle of a layer's backward: the work is not the layer's.
        with CLIP, working_for(self._body.model), self._branch.beside():
            self._issue(part)

    def _issue(self, part: _Part) -> None:
        part.table.hold([parameter.grad for parameter in part.parameters if parameter.grad is not None])
        grad_norm(part.table, self._norm)
        part.is_issued = True

    def finish(self, grads: list[Tensor]) -> Tensor:
        """The norm of ``grads``, all gradients of the step, which are final now: 0-dim fp32."""
        self._final = [parameter for parameter in self._writes.versions if self._writes.is_final(parameter)]
        if self._plan is None or not self._branch.is_open:
            grad_norm(self._body.optimizer.tables.get("gradients", grads, make=NormTable.whole), self._norm)
            return self._norm
        for part in self._plan.parts:
            if part.is_issued:
                self._late += [parameter for parameter in part.parameters if not self._writes.is_final(parameter)]
            else:
                self._issue(part)
        self._branch.join()
        return self._norm

    def check(self) -> None:
        """Raise CaptureError if the captured step touched a gradient after it had been added up."""
        for late in self._late:
            name = next((name for name, parameter in self._body.gradients.named.items() if parameter is late), "")
            raise CaptureError(
                f"{name}.grad was complete after {self._num_writes[late]} contributions in the last warmup step, "
                "and something changed it after as many in the captured step. Make every step use the same layers."
            )

    def drop_tables(self) -> None:
        """Free what the launches read. No graph captured with them may be replayed any more."""
        self._plan = None

    def close(self) -> None:
        """Let go of the parameters."""
        self.drop_tables()
        self._writes, self._num_writes = _Writes(), Counter()
        self._final, self._learnt, self._late = [], [], []
