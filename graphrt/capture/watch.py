"""Whether any of some dicts may have changed, without looking at them.

CPython calls back before a watched dict changes (``PyDict_Watch``, from 3.12 on). Hundreds of dicts hold what a graph was
captured with, and looking at each of them before each replay would cost more than everything else that a step does on the
host. So they are looked at once, and again after a change of any watched dict of the process, whoever's it is.
"""

import atexit
import ctypes
import functools
import itertools
from collections.abc import Iterable
from typing import Any

__all__ = ["DictWatch"]

#: Has one entry while no watched dict changes; a change takes it out.
_calm: dict[str, int] = {}
_numbers = itertools.count()


class DictWatch:
    """Some dicts, and whether they may have changed since `start`.

    Where that cannot be known (Python 3.11, or something that is no dict among them) the answer is always that they may have.

    Args:
        dicts: what to watch. They are kept alive: the interpreter also calls back when a watched dict is freed, possibly
            with an exception pending, which no callback could leave as it is; and it may turn the ``__dict__`` of an
            instance that nobody else holds into another form, whose changes it does not report.
    """

    def __init__(self, dicts: Iterable[Any]) -> None:
        self._dicts = list(dicts)
        self._watcher = _watcher() if all(isinstance(each, dict) for each in self._dicts) else None
        self._number: int | None = None  # in `_calm`, as long as nothing changes
        self._watched_at: int | None = None  # how many watches had ended

    @property
    def may_have_changed(self) -> bool:
        """Whether to look at the dicts again: True until `start`, and after a change."""
        return self._number is None or _calm.get("number") != self._number

    def start(self) -> None:
        """Say that the dicts have been looked at just now."""
        if self._watcher is None or self._watcher.is_closed:
            return
        # The order matters where another watch ends meanwhile, on another thread or by the garbage collector.
        number, num_ended = _calm.setdefault("number", next(_numbers)), self._watcher.num_ended
        if self._watched_at != num_ended:
            # Also those that are watched already: the watch that ended may have been of the same dicts.
            self._watcher.watch(self._dicts)
        self._number, self._watched_at = number, num_ended

    def __del__(self) -> None:
        if self._watcher is not None and not self._watcher.is_closed and self._watched_at is not None:
            self._watcher.unwatch(self._dicts)


class _Watcher:
    """graphrt's entry in the interpreter's short list of who hears of changes."""

    def __init__(self) -> None:
        # C all the way down: in a Python function signal handlers and the garbage collector could run, in the midst of a
        # dict's change. A C function may leave its arguments alone, so none are declared; the number that `pop` returns is
        # not negative, which means success.
        self._callback = ctypes.CFUNCTYPE(ctypes.c_int)(functools.partial(_calm.pop, "number", 0))
        self._id = ctypes.pythonapi.PyDict_AddWatcher(self._callback)
        self.num_ended = 0  # watches
        self.is_closed = False
        # Watched dicts may be freed after this module, when the interpreter ends.
        atexit.register(self._close)

    def watch(self, dicts: Iterable[dict[Any, Any]]) -> None:
        for each in dicts:
            ctypes.pythonapi.PyDict_Watch(self._id, ctypes.py_object(each))

    def unwatch(self, dicts: Iterable[dict[Any, Any]]) -> None:
        """Whoever else watches one of these dicts looks again, and watches it again."""
        for each in dicts:
            ctypes.pythonapi.PyDict_Unwatch(self._id, ctypes.py_object(each))
        self.num_ended += 1
        _calm.clear()

    def _close(self) -> None:
        self.is_closed = True
        _calm.clear()
        ctypes.pythonapi.PyDict_ClearWatcher(self._id)


@functools.cache
def _watcher() -> _Watcher | None:
    """The one of this process; None where there can be none."""
    if not hasattr(ctypes.pythonapi, "PyDict_AddWatcher"):
        return None
    try:
        return _Watcher()
    except (RuntimeError, MemoryError):
        return None  # The process has its eight already, or may not have memory that is both written and executed.
