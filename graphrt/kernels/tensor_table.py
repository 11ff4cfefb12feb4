"""Lists of tensors as the kernels of many tensors read them: a table of addresses on the device."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, Protocol, TypeVar, overload

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from graphrt import guards
from graphrt.errors import GraphrtError

__all__ = [
    "DTYPE_CODES", "Table", "TableCache", "TensorTable", "block_map", "check_columns", "check_scalar", "describe", "form_of", "key_of",
    "upload",
]  # fmt: skip

# These mirror the constants of adamw.cu.
_CHUNK = 8192  # elements a block takes at once
_SHARED_SCALARS = 4
#: As grad_norm.cu and adamw.cu number them.
DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class Table(Protocol):
    """What a `TableCache` keeps; the methods are as `TensorTable` has them."""

    def holds(self, *columns: Sequence[Tensor]) -> bool: ...
    def fits(self, *columns: Sequence[Tensor]) -> bool: ...
    def hold(self, *columns: Sequence[Tensor]) -> None: ...
    def release(self) -> None: ...
    def write(self) -> None: ...


T = TypeVar("T", bound=Table)


@dataclass(frozen=True)
class _DeviceTable:
    """A table as the kernels read it, and the memory they leave intermediate results in."""

    words: Tensor  # int64: addresses [columns, rows], sizes [rows], dtype codes [rows], chunks [num_chunks]
    addresses: tuple[int, int, int, int]  # where those four start
    scalars: Tensor  # [4 + 2 * rows] fp32, written by the first AdamW launch for the second
    num_chunks: int


class TensorTable:
    """Parallel lists of tensors, in the form the kernels want. It holds the tensors.

    Their addresses must stay: a ``.data`` that is replaced is not followed (see :meth:`holds`). Two launches with one table
    must not run at the same time: they share its intermediate memory. What the kernels read stays where it is for the
    table's life, also when it is made to hold other tensors.

    Args:
        columns: lists of equal length, one or more, not empty; fp32, bf16 or fp16. A row has one shape and the same
            dense strides in every column, as torch's fused kernels ask. Empty tensors and addresses of any alignment are fine.

    Raises:
        ValueError: the columns are not as above; the message names the row.
    """

    def __init__(self, *columns: Sequence[Tensor]) -> None:
        check_columns(columns)
        self.columns: tuple[tuple[Tensor, ...], ...] = tuple(tuple(column) for column in columns)
        self.device = self.columns[0][0].device
        self._key = key_of(columns)
        if self.device.type == "cuda":
            _ = self.on_device  # now: a later first use could be under capture, which refuses the copy

    @property
    def num_rows(self) -> int:
        return len(self.columns[0])

    @cached_property
    def dtype(self) -> torch.dtype | None:
        """The one dtype of all tensors; None if there are several."""
        dtypes = {x.dtype for x in chain(*self.columns)}
        return dtypes.pop() if len(dtypes) == 1 else None

    def holds(self, *columns: Sequence[Tensor]) -> bool:
        """Whether ``columns`` have this table's addresses, sizes and dtypes."""
        return bool(self.columns) and self._key == key_of(columns)

    def fits(self, *columns: Sequence[Tensor]) -> bool:
        """Whether ``columns`` have this table's sizes and dtypes, at whatever addresses."""
        return form_of(self._key) == form_of(key_of(columns))

    def hold(self, *columns: Sequence[Tensor]) -> None:
        """Hold ``columns``, which fit, instead. Kernels must not run with the table before :meth:`write`.

        Raises:
            ValueError: as the constructor.
        """
        check_columns(columns)
        self.columns = tuple(tuple(column) for column in columns)
        self._key = key_of(columns)

    def release(self) -> None:
        """Let go of the tensors: the table holds none, and fits others of their sizes."""
        self.columns = ()

    def write(self) -> None:
        """Tell the device what the table holds, on the current stream, without a sync."""
        if self.device.type == "cuda":
            with _disable_current_modes():
                self.on_device.words.copy_(upload(self._words(), self.device))

    @cached_property
    def on_device(self) -> _DeviceTable:
        """The table in the device's memory; made without a sync."""
        # Host work of no step: a recorder of operations, under which a table may be made anew, is not shown it.
        with _disable_current_modes():
            return self._put_on_device()

    def _put_on_device(self) -> _DeviceTable:
        words = upload(self._words(), self.device)
        num_before_chunks = (len(self.columns) + 2) * self.num_rows
        starts = (0, len(self.columns) * self.num_rows, (len(self.columns) + 1) * self.num_rows, num_before_chunks)
        first, second, third, fourth = (words.data_ptr() + start * words.element_size() for start in starts)
        return _DeviceTable(
            words=words,
            addresses=(first, second, third, fourth),
            scalars=torch.zeros(_SHARED_SCALARS + 2 * self.num_rows, dtype=torch.float32, device=self.device),
            num_chunks=len(words) - num_before_chunks,
        )

    def _words(self) -> np.ndarray:
        """Addresses column by column, sizes, dtype codes, and what each block works on."""
        first = self.columns[0]
        pointers = [x.data_ptr() for column in self.columns for x in column]
        sizes, codes = [x.numel() for x in first], [DTYPE_CODES[x.dtype] for x in first]
        chunks = block_map([-(-size // _CHUNK) for size in sizes])
        return np.concatenate([np.array([*pointers, *sizes, *codes], dtype=np.int64), chunks])


class TableCache:
    """The tables of a step body that is issued anew each time, one a slot, made again when an address changed.

    A table used under capture stays until :meth:`clear`: the graph reads it at every replay. If the step being captured has
    made tensors of its own, the table is written after the capture, in the memory it has from the last eager step.
    """

    def __init__(self) -> None:
        self._tables: dict[Hashable, Table] = {}
        self._captured: list[Table] = []
        self._unwritten: list[Table] = []

    @overload
    def get(self, slot: Hashable, *columns: Sequence[Tensor]) -> TensorTable: ...
    @overload
    def get(self, slot: Hashable, *columns: Sequence[Tensor], make: Callable[..., T]) -> T: ...
    def get(self, slot: Hashable, *columns: Sequence[Tensor], make: Callable[..., Any] = TensorTable) -> Any:
        """The table that ``make`` makes of ``columns``, new only if the slot's last one has other tensors.

        Raises:
            ValueError: as ``make``.
            GraphrtError: it would have to be made while the current stream captures.
        """
        table = self._tables.get(slot)
        is_current = table is not None and table.holds(*columns)
        if _is_under_capture(columns):
            return self._get_for_capture(slot, table, is_current, columns)
        # One that is written at the end of the capture says nothing yet to a kernel that runs before, in a diagnosis of it.
        if table is None or not is_current or any(table is unwritten for unwritten in self._unwritten):
            table = self._tables[slot] = make(*columns)
        return table

    def _get_for_capture(self, slot: Hashable, table: Table | None, is_current: bool, columns: Sequence[Sequence[Tensor]]) -> Table:
        is_captured = any(table is captured for captured in self._captured)
        if table is None or not (is_current or (table.fits(*columns) and not is_captured)):
            raise GraphrtError(
                f"The tensors of table {slot!r} are not like those of the last eager step, and a capture cannot make a table for them. "
                "Run an eager step on such tensors first."
            )
        if not is_current:
            table.hold(*columns)
            self._unwritten.append(table)
        if not is_captured:
            self._captured.append(table)
        return table

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Surrounds a capture: what it left unwritten is written at its end, or holds nothing any more if it fails."""
        before = list(self._captured)
        try:
            yield
        except BaseException:
            self._captured = before
            for table in self._unwritten:
                table.release()
            raise
        else:
            for table in self._unwritten:
                table.write()
        finally:
            self._unwritten.clear()

    def release(self) -> None:
        """Let go of all tensors; tables of others of their sizes may follow. No graph captured so far may be replayed any more."""
        self._captured.clear()
        for table in self._tables.values():
            table.release()

    def clear(self) -> None:
        """Drop all tables. No graph captured with one may be replayed any more."""
        self._tables.clear()
        self._captured.clear()


def _is_under_capture(columns: Sequence[Sequence[Tensor]]) -> bool:
    return any(column[0].is_cuda for column in columns[:1] if column) and guards.is_capturing()


def upload(words: np.ndarray, device: torch.device) -> Tensor:
    """``words`` in the memory of ``device``, without a sync."""
    host = torch.from_numpy(words)
    return (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)


def block_map(num_blocks: Sequence[int]) -> np.ndarray:
    """What each block of a grid works on, int64: ``row << 32 | block of the row``, rows in order, ``num_blocks`` of each."""
    counts = np.array(num_blocks, dtype=np.int64)
    rows = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
    starts = np.repeat(np.cumsum(counts) - counts, counts)
    return rows << 32 | np.arange(len(rows), dtype=np.int64) - starts


#: What a table depends on: equal for columns that one table serves.
Key = list[list[tuple[int, int, torch.dtype]]]


def key_of(columns: Sequence[Sequence[Tensor]]) -> Key:
    """Address, size and dtype of each tensor."""
    return [[(x.data_ptr(), x.numel(), x.dtype) for x in column] for column in columns]


def form_of(key: Key) -> list[list[tuple[int, torch.dtype]]]:
    """A key without its addresses."""
    return [[(size, dtype) for _, size, dtype in column] for column in key]


def check_columns(columns: Sequence[Sequence[Tensor]]) -> None:
    """Raise ValueError unless ``columns`` are as :class:`TensorTable` says."""
    lengths = [len(column) for column in columns]
    if not lengths or lengths[0] == 0 or len(set(lengths)) != 1:
        raise ValueError(f"columns have lengths {lengths}, expected equal ones above 0. Leave the call out if there are no tensors.")
    expected_device = columns[0][0].device
    for i, row in enumerate(zip(*columns, strict=True)):
        for x in row:
            if x.layout is not torch.strided or x.dtype not in DTYPE_CODES or x.device != expected_device:
                raise ValueError(f"row {i} holds {describe(x)}, expected dense float32, bfloat16 or float16 on {expected_device}.")
            if x.shape != row[0].shape or x.stride() != row[0].stride() or not _is_dense(x):
                raise ValueError(
                    f"row {i} holds {describe(x)} beside {describe(row[0])}, expected one shape and one dense layout in a row. "
                    "Make the tensors contiguous."
                )


def _is_dense(x: Tensor) -> bool:
    """Whether the elements fill a range of memory once, in any order of dimensions."""
    if x.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(x.stride(), x.shape, strict=True) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def describe(x: Tensor) -> str:
    """The tensor in an error message."""
    return f"a {x.dtype} tensor of shape {list(x.shape)} on {x.device}" if x.layout is torch.strided else f"a {x.layout} tensor"


def check_scalar(name: str, x: Tensor, expected_device: torch.device) -> None:
    """Raise ValueError unless ``x`` is a 0-dim fp32 tensor there."""
    if x.dim() != 0 or x.dtype is not torch.float32 or x.device != expected_device:
        raise ValueError(f"{name} is {describe(x)}, expected a 0-dim float32 tensor on {expected_device}.")
