"""Many matrices quantized in one launch, from a table of addresses on the device.

Each gets what one :func:`graphrt.kernels.quantize` would give it, bit for bit, from the same device code; a block takes one tile
of one matrix. On a CPU the reference goes through the table in order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from graphrt.kernels import device, reference
from graphrt.kernels.quantized import QuantizedTensor, QuantizeTo, check_arguments, check_out
from graphrt.kernels.tensor_table import block_map, upload

__all__ = ["QuantizeEntry", "QuantizeTable", "quantize_many"]

# These mirror the constants of quantize.cu.
_THREADS = 256
_TILE_ROWS, _TILE_COLS = 128, 64
_ROW_WORDS = 10  # of an entry

_KERNELS = {torch.bfloat16: "graphrt_quantize_many_bf16_e4m3", torch.float16: "graphrt_quantize_many_fp16_e4m3"}
_KERNELS |= {torch.float32: "graphrt_quantize_many_fp32_e4m3"}


class QuantizeEntry(NamedTuple):
    """One matrix to quantize: the arguments of one :func:`graphrt.kernels.quantize`."""

    x: Tensor  # [rows, cols] bf16, fp16 or fp32, contiguous, not empty
    to: QuantizeTo  # e4m3
    out: QuantizedTensor | None = None  # None: given later, by `QuantizeTable.hold`


@dataclass(frozen=True, eq=False)
class _Launch:
    """The entries of one input dtype as a kernel reads them."""

    kernel: str
    words: Tensor  # int64: entries [n, 10], tiles [num_tiles]
    addresses: tuple[int, int]  # where those two start
    places: tuple[int, ...]  # of the entries in the table
    tiles: np.ndarray

    @property
    def num_tiles(self) -> int:
        return len(self.tiles)

    def content(self, entries: Sequence[QuantizeEntry]) -> np.ndarray:
        """What ``words`` has to be."""
        rows = np.array([_row(entries[place]) for place in self.places], dtype=np.int64)
        return np.concatenate([rows.ravel(), self.tiles])


class QuantizeTable:
    """What :func:`quantize_many` quantizes, in the form its kernels want. It holds the tensors; their addresses must stay.

    Making one allocates its memory on the device. What the kernels read there comes with :meth:`write`: where the outputs are
    allocated in a capture, a launch is captured before, and nothing reads the memory before the first replay.

    Args:
        entries: not empty, all on one device, any mix of input dtypes. Several may share an input, or a slot; no two an output.
            If all have an output the table is ready to be read.

    Raises:
        ValueError: an entry is not as :class:`QuantizeEntry` says; the message names its place.
    """

    def __init__(self, entries: Sequence[QuantizeEntry]) -> None:
        _check(entries)
        self.entries = tuple(entries)
        self.device = self.entries[0].x.device
        _ = self.launches  # now: a later first use could be under capture, whose pool the memory must not come from
        self._contents: list[np.ndarray] = []
        outs = [entry.out for entry in entries if entry.out is not None]
        if len(outs) == len(entries):
            self.hold(outs)
            self.write()

    def hold(self, outs: Sequence[QuantizedTensor]) -> None:
        """Quantize to ``outs``, one for each entry. Kernels must not run with the table before :meth:`write`.

        Raises:
            ValueError: an output does not fit its entry.
        """
        entries = tuple(entry._replace(out=out) for entry, out in zip(self.entries, outs, strict=True))
        _check(entries)
        self.entries = entries
        self._contents = [launch.content(entries) for launch in self.launches]

    def release(self) -> None:
        """Let go of the outputs, but for their addresses: a graph that allocates them in its pool gives them to others later on."""
        self.entries = tuple(entry._replace(out=None) for entry in self.entries)

    def write(self) -> None:
        """Tell the device where what was held last is, on the current stream, without a sync. Not under capture."""
        with _disable_current_modes():
            for launch, content in zip(self.launches, self._contents, strict=True):
                launch.words.copy_(upload(content, self.device))

    @cached_property
    def launches(self) -> tuple[_Launch, ...]:
        """One for each input dtype, in the device's memory."""
        groups: dict[torch.dtype, list[int]] = {}
        for place, entry in enumerate(self.entries):
            groups.setdefault(entry.x.dtype, []).append(place)
        with _disable_current_modes():
            return tuple(self._make_launch(dtype, places) for dtype, places in groups.items())

    def _make_launch(self, dtype: torch.dtype, places: list[int]) -> _Launch:
        shapes = [self.entries[place].x.shape for place in places]
        tiles = block_map([-(-rows // _TILE_ROWS) * -(-cols // _TILE_COLS) for rows, cols in shapes])
        words = torch.empty(_ROW_WORDS * len(places) + len(tiles), dtype=torch.int64, device=self.device)
        start = words.data_ptr()
        return _Launch(_KERNELS[dtype], words, (start, start + 8 * _ROW_WORDS * len(places)), tuple(places), tiles)


def quantize_many(table: QuantizeTable) -> None:
    """Quantize every matrix of ``table``, each read once: as one :func:`graphrt.kernels.quantize` an entry, bit for bit.

    One launch for each input dtype. No host sync; may be captured in a CUDA graph, which reads the table at every replay.

    Raises:
        GraphrtError: the kernels cannot be compiled or loaded for the device.
    """
    if table.device.type == "cuda":
        _launch(table)
        return
    for x, to, out in table.entries:
        assert out is not None
        reference.quantize(x, to.scale, to.scale_inv, to.slot, to.dtype, amax=to.amax, transpose=to.transpose, out=out)


def _launch(table: QuantizeTable) -> None:
    index = table.entries[0].x.get_device()
    for launch in table.launches:
        device.launch(index, launch.kernel, launch.num_tiles, _THREADS, launch.addresses)


def _row(entry: QuantizeEntry) -> tuple[int, ...]:
    """The entry as the struct of quantize.cu."""
    x, to, out = entry
    assert out is not None
    rows, cols = x.shape
    matrices = (x.data_ptr(), out.data.data_ptr(), 0 if out.transposed is None else out.transposed.data_ptr())
    is_aligned = all(address % 16 == 0 for address in matrices) and cols * x.element_size() % 16 == 0
    scales = (to.scale.data_ptr() + 4 * to.slot, to.scale_inv.data_ptr() + 16 * to.slot, out.scale_inv.data_ptr())
    amax = 0 if to.amax is None else to.amax.data_ptr() + 4 * to.slot
    return *matrices, *scales, amax, rows, cols, int(is_aligned)


def _check(entries: Sequence[QuantizeEntry]) -> None:
    if not entries:
        raise ValueError("entries is empty, expected at least one. Leave the call out if there is nothing to quantize.")
    expected_device = entries[0].x.device
    for i, (x, to, out) in enumerate(entries):
        try:
            check_arguments(x, to.scale, to.scale_inv, to.slot, to.dtype, to.amax)
            if out is not None:
                check_out(out, x, to.dtype, to.transpose)
        except ValueError as error:
            raise ValueError(f"Entry {i}: {error}") from error
        if to.dtype is not torch.float8_e4m3fn:
            raise ValueError(f"Entry {i} asks for {to.dtype}, expected torch.float8_e4m3fn.")
        if x.device != expected_device or not x.is_contiguous() or x.numel() == 0:
            raise ValueError(
                f"Entry {i} has x of shape {list(x.shape)} and strides {list(x.stride())} on {x.device}, "
                f"expected a contiguous matrix that is not empty on {expected_device}."
            )
