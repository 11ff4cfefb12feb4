"""What libraries are told when they ask whether a CUDA graph capture is under way.

Some compute something else while capturing: transformers reads the attention mask on the host in eager and skips it when
nothing is masked, but keeps it while capturing. An eager, a warmup, a recorded and a captured step must take the same
branch, so around each of them the answer is fixed to the one the capture gets. graphrt's own guards ask the driver
through a reference of their own (`graphrt.guards`) and are not affected.

The answer holds for the whole process: on CUDA the Python of a backward (a recomputed forward) runs in another thread.
Code that took its own reference to a query before (`from torch.cuda import is_current_stream_capturing`) is not reached.
With the answer "capturing", torch's optimizers insist on `capturable=True` on CUDA even in a warmup step.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["capture_answer"]

_QUERIES: tuple[tuple[Any, str], ...] = (
    (torch.cuda, "is_current_stream_capturing"),
    (torch.cuda.graphs, "is_current_stream_capturing"),
    (torch._C, "_cuda_isCurrentStreamCapturing"),
)
_lock = threading.Lock()
_answers: list[list[bool]] = []  # innermost last; one-element lists, so that each region removes its own
_originals: list[tuple[Any, str, Any]] = []


@contextmanager
def capture_answer(answer: bool) -> Iterator[None]:
    """Make torch's public queries say `answer` inside the region. Regions nest: the innermost decides."""
    entry = [answer]
    with _lock:
        _answers.append(entry)
        if len(_answers) == 1:
            _install()
    try:
        yield
    finally:
        with _lock:
            _answers[:] = [other for other in _answers if other is not entry]
            if not _answers:
                _uninstall()


def _install() -> None:
    for owner, name in _QUERIES:
        original = getattr(owner, name, None)
        if original is not None:
            _originals.append((owner, name, original))
            setattr(owner, name, _answering(original))


def _uninstall() -> None:
    while _originals:
        owner, name, original = _originals.pop()
        setattr(owner, name, original)


def _answering(original: Any) -> Any:
    def is_current_stream_capturing() -> bool:
        answers = tuple(_answers)
        # A caller that took this function inside a region and kept it gets the truth outside.
        return answers[-1][0] if answers else original()

    return is_current_stream_capturing
