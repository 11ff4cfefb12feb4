"""Plain copies on the device between two steps: as few launches as there can be, each cheaper than one of torch's operations."""

from collections.abc import Sequence
from typing import NamedTuple

from graphrt.kernels import device

__all__ = ["COPY_KERNEL", "Copy", "CopyLaunch", "copy_launches", "launch_copies"]

COPY_KERNEL = "graphrt_copy"

# These mirror the constants of copy.cu.
_THREADS = 256
_BLOCK_BYTES = _THREADS * 4 * 16
_RANGES = 3  # of a launch


class Copy(NamedTuple):
    """``num_bytes`` bytes from the address ``source`` go to the address ``to``; the two ranges are apart."""

    to: int
    source: int
    num_bytes: int


#: Blocks, threads in each, and the kernel's arguments.
CopyLaunch = tuple[int, int, tuple[int, ...]]

_NOTHING = Copy(0, 0, 0)


def copy_launches(copies: Sequence[Copy]) -> list[CopyLaunch]:
    """The launches that make ``copies``, one for three of them."""
    launches: list[CopyLaunch] = []
    for i in range(0, len(copies), _RANGES):
        first, second, third = (*copies[i : i + _RANGES], _NOTHING, _NOTHING)[:_RANGES]
        start = -(-first.num_bytes // _BLOCK_BYTES)
        next_start = start - (-second.num_bytes // _BLOCK_BYTES)
        num_blocks = next_start - (-third.num_bytes // _BLOCK_BYTES)
        if num_blocks:
            launches.append((num_blocks, _THREADS, (*first, *second, *third, start, next_start)))
    return launches


def launch_copies(index: int, launches: Sequence[CopyLaunch]) -> None:
    """Launch what `copy_launches` returned on device ``index`` and torch's current stream there.

    Raises:
        GraphrtError: the kernels cannot be compiled or loaded.
    """
    for num_blocks, num_threads, args in launches:
        # What is before it on the stream is the replay of a graph, or the caller's: not kernels that know of each other.
        device.launch(index, COPY_KERNEL, num_blocks, num_threads, args, begins_early=False)
