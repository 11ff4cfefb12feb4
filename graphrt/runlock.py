"""One process a run folder: a lock of the operating system, which ends with the process however that ends."""

import os
from pathlib import Path

from graphrt.settings import InputError

try:
    import fcntl
except ImportError:  # no POSIX: there two runs in one folder are not noticed
    fcntl = None

__all__ = ["LOCK_NAME", "FolderLock", "check_idle"]

LOCK_NAME = ".lock"


def check_idle(path: Path) -> None:
    """Refuse a folder that another process trains in.

    Raises:
        InputError: one does.
    """
    try:
        descriptor = os.open(path / LOCK_NAME, os.O_RDWR)
    except OSError:
        return  # nobody has locked it, or it cannot be looked into, of which others tell
    try:
        _lock(path, descriptor)
    finally:
        os.close(descriptor)


def _lock(path: Path, descriptor: int) -> None:
    if fcntl is None:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise InputError(f"{path} is in use by another graphrt train. Wait for its end, or choose another --out.") from error
    except OSError:
        pass  # a file system without locks


class FolderLock:
    """While open, holds the folder once `acquire` was called.

    Args:
        path: the folder, which may be made later.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Take the lock of the folder, which exists.

        Raises:
            InputError: another process has it.
        """
        if self._descriptor is not None:
            return
        self._descriptor = os.open(self._path / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o666)
        _lock(self._path, self._descriptor)

    def __enter__(self) -> "FolderLock":
        return self

    def __exit__(self, *_: object) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
