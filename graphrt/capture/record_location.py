"""Where the user's code is: the innermost stack frame outside torch, graphrt and the standard library.

A location is a code object and an instruction, so taking one costs no file access; path, line and source text are worked
out when somebody reads them. The source is the expression that was being evaluated, not the whole line.
"""

import dis
import functools
import linecache
import os
import re
import sys
import sysconfig
import threading
from dataclasses import dataclass
from itertools import islice
from types import CodeType, FrameType
from typing import Any

import numpy
import torch

__all__ = ["Location", "find_location", "in_parentheses", "is_torch_frame", "issuing_frame", "locations_of"]

_TORCH = os.path.dirname(torch.__file__) + os.sep
_CAPTURE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_GRAPHRT = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_COMMAND_LINE = _GRAPHRT + "cli.py"
_STEP = _GRAPHRT + "step.py"
_NUMPY = os.path.dirname(numpy.__file__) + os.sep
_PATHS = sysconfig.get_paths()
_SITE_PACKAGES = tuple({_PATHS["purelib"] + os.sep, _PATHS["platlib"] + os.sep})
_STDLIB = tuple({_PATHS["stdlib"] + os.sep, _PATHS["platstdlib"] + os.sep})
# Frames between an operation and the code that issued it when a mode or a default device is active.
_PASSING = tuple(_TORCH + name for name in ("_dynamo/eval_frame.py", "utils/_device.py", "overrides.py", "_compile.py"))
_MAX_SOURCE = 80
_FORWARD_TRACEBACK = "traceback_"  # where torch's anomaly mode keeps where a forward ran
_FORWARD_FRAME = re.compile(r'File "(.+)", line (\d+)')


@dataclass(frozen=True, slots=True)
class Location:
    """One instruction of the user's code. `str()` gives "file.py:42", the path relative to the working directory."""

    code: CodeType
    instruction: int  # byte offset, as in `frame.f_lasti`

    @property
    def path(self) -> str:
        return self.code.co_filename

    @property
    def line(self) -> int:
        return self._positions()[0]

    @property
    def source(self) -> str:
        """The expression at this instruction on one line, or "" when the file cannot be read."""
        first, last, start, end = self._positions()
        lines = [linecache.getline(self.path, number) for number in range(first, last + 1)]
        if not any(lines):
            return ""
        return _shorten(_cut(lines, start, end))

    @property
    def opname(self) -> str:
        """Name of the bytecode instruction, for example "CALL" or "STORE_SUBSCR"."""
        return dis.opname[self.code.co_code[self.instruction]]

    def _positions(self) -> tuple[int, int, int | None, int | None]:
        """First line, last line, and the columns in UTF-8 bytes at which the expression starts and ends."""
        first, last, start, end = next(islice(self.code.co_positions(), self.instruction // 2, None), (None,) * 4)
        line = first or self.code.co_firstlineno
        return line, last or line, start, end

    def __str__(self) -> str:
        return f"{_short_path(self.path)}:{self.line}"


@dataclass(frozen=True, slots=True)
class _BackwardLocation(Location):
    """An operation that autograd issued for itself: no line of anybody's asks for it, but one made it necessary."""

    what: str

    @property
    def source(self) -> str:
        return ""

    def __str__(self) -> str:
        return f"in the backward of {self.what}"


def in_parentheses(location: Location | None) -> str:
    """ " (train.py:42, loss.item())" to follow a statement, or "" for an unknown place."""
    if location is None:
        return ""
    return f" ({', '.join(part for part in (str(location), location.source) if part)})"


def find_location(owner: int | None = None) -> Location | None:
    """The innermost location in the user's code, or None.

    `owner` is the thread that runs the step: a CUDA backward issues its operations from a thread of the autograd engine,
    which has no frame of the user's, while the owner waits in the call of `backward()`.
    """
    found = _search(sys._getframe(1))
    if found is None and owner is not None and owner != threading.get_ident():
        found = _search(sys._current_frames().get(owner))
    return found


def locations_of(error: BaseException) -> list[Location]:
    """The user's own frames that an error came through, outermost first; those of other packages if there are no own ones."""
    traceback, passed = error.__traceback__, []
    while traceback is not None:
        passed.append(Location(traceback.tb_frame.f_code, traceback.tb_lasti))
        traceback = traceback.tb_next
    users = [location for location in passed if _is_user_file(location.path)]
    return [location for location in users if not location.path.startswith(_SITE_PACKAGES)] or users


def issuing_frame() -> FrameType | None:
    """The frame that issued the operation being dispatched, whoever wrote it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((_CAPTURE, *_PASSING)):
        frame = frame.f_back
    return frame


def is_torch_frame(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_TORCH)


def _search(frame: FrameType | None) -> Location | None:
    inside: FrameType | None = None
    node = torch._C._current_autograd_node()
    while frame is not None:
        filename = frame.f_code.co_filename
        # Above these are who called the step, and the command line's library: neither issued a backward's operation.
        if filename == _COMMAND_LINE or (filename == _STEP and node is not None):
            inside = inside or frame
            break
        if _is_user_file(filename):
            return Location(frame.f_code, frame.f_lasti)
        if inside is None and filename.startswith(_GRAPHRT) and not filename.startswith(_CAPTURE):
            inside = frame
        frame = frame.f_back
    if inside is None:
        return None
    if node is not None:
        return _BackwardLocation(inside.f_code, inside.f_lasti, _forward_of(node))
    return Location(inside.f_code, inside.f_lasti)


def _forward_of(node: Any) -> str:
    """The line whose backward a node is, if torch was asked to keep it; else the node's name."""
    frames = [match for entry in node.metadata.get(_FORWARD_TRACEBACK, ()) for match in _FORWARD_FRAME.findall(entry)]
    lines = [f"{_short_path(path)}:{line}" for path, line in frames if _is_user_file(path) and not path.startswith(_SITE_PACKAGES)]
    return lines[-1] if lines else node.name()


@functools.cache
def _is_user_file(filename: str) -> bool:
    if filename.startswith((_TORCH, _GRAPHRT, _NUMPY, "<frozen", "<__array_function__")):
        return False
    return filename.startswith(_SITE_PACKAGES) or not filename.startswith(_STDLIB)


@functools.cache
def _short_path(path: str) -> str:
    for root in (*_SITE_PACKAGES, os.getcwd() + os.sep):
        if path.startswith(root):
            return path[len(root) :]
    return os.path.basename(path)


def _cut(lines: list[str], start: int | None, end: int | None) -> str:
    if start is None or end is None:
        return lines[0]
    encoded = [line.encode() for line in lines]
    encoded[-1] = encoded[-1][:end]
    encoded[0] = encoded[0][start:]
    return b"".join(encoded).decode(errors="replace")


def _shorten(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= _MAX_SOURCE else flat[: _MAX_SOURCE - 3] + "..."
