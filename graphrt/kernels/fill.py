"""The fill kernel's grid and arguments, from what a graph's memset node says."""

from typing import NamedTuple

__all__ = ["FILL_KERNEL", "Fill", "fill_launch"]

FILL_KERNEL = "graphrt_fill"

# These mirror the constants of fill.cu.
_THREADS = 256
_BYTES = 16  # a thread writes


class Fill(NamedTuple):
    """``num_elements`` elements of ``element_size`` bytes (1, 2 or 4) from ``address`` on become ``value``."""

    address: int
    value: int
    element_size: int
    num_elements: int

    @property
    def num_bytes(self) -> int:
        """Bytes written."""
        return self.element_size * self.num_elements

    @property
    def pattern(self) -> int:
        """Four bytes, the value as often as it fits."""
        bits = 8 * self.element_size
        value = self.value & ((1 << bits) - 1)
        return sum(value << shift for shift in range(0, 32, bits))


def fill_launch(fill: Fill) -> tuple[int, int, tuple[int, ...]]:
    """(blocks, threads, arguments) of the kernel that writes ``fill``. Elements lie one after the other, aligned to their size."""
    num_blocks = max(1, -(-fill.num_bytes // (_THREADS * _BYTES)))
    return num_blocks, _THREADS, (fill.address, fill.num_bytes, fill.pattern, int(fill.address % _BYTES == 0))
