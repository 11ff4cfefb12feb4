"""The L2 norm of a step's gradients, in one launch or several, with nothing read on the host.

    norm = sqrt(sum over all gradients of sum(g.float() ** 2))

A gradient is divided into pieces, and each piece leaves its sum of squares in fp64 in a place of its own; whichever block
finishes last adds the sums up, place by place. So the bits depend on the sizes and values of the gradients alone, not on the
launches that they were divided into. On a CPU the same runs in plain torch, a sum a gradient; the kernel agrees with an fp64 norm to
1e-6.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from graphrt.kernels import device
from graphrt.kernels.tensor_table import DTYPE_CODES, Key, block_map, check_columns, check_scalar, describe, form_of, key_of, upload

__all__ = ["NORM_DTYPES", "NormSums", "NormTable", "grad_norm"]

#: What the kernel reads.
NORM_DTYPES = tuple(DTYPE_CODES)

# These mirror the constants of grad_norm.cu.
_THREADS = 256
_PIECE = 65536  # elements


class NormSums:
    """Where the launches of one norm leave their sums. Two norms with the same sums must not be computed at one time.

    Args:
        sizes: elements of each gradient, in the order in which they are added up.
        device: the gradients'.
    """

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        self.sizes = tuple(sizes)
        self.device = device
        self.num_pieces_of = tuple(max(1, -(-size // _PIECE)) for size in sizes)  # an empty gradient has a sum too
        self.places = tuple(accumulate(self.num_pieces_of[:-1], initial=0))
        self.num_pieces = sum(self.num_pieces_of)
        # Host work of no step: a recorder of operations, under which this may be made, is not shown it.
        with _disable_current_modes():
            #: [1 + num_pieces] fp64: the count of finished blocks (an integer), then the sums.
            self.memory = torch.zeros(1 + self.num_pieces, dtype=torch.float64, device=device)


class NormTable:
    """Gradients whose squares one launch adds up, as the kernel reads them; :meth:`whole` for all of a norm at once.

    Making one allocates its memory on the device, which gets its content later: a launch may be captured before the
    addresses of its gradients are known there, as nothing reads them before the first replay.

    Args:
        sums: of the whole norm.
        rows: which of its gradients, by position; not empty.
    """

    def __init__(self, sums: NormSums, rows: Sequence[int]) -> None:
        self.sums, self.rows = sums, tuple(rows)
        self.grads: tuple[Tensor, ...] = ()
        self._key: Key = []
        self._pieces = block_map([sums.num_pieces_of[row] for row in rows])
        with _disable_current_modes():
            self._words = torch.empty(4 * len(self.rows) + self.num_blocks, dtype=torch.int64, device=sums.device)

    @classmethod
    def whole(cls, grads: Sequence[Tensor]) -> "NormTable":
        """The table of all gradients of a norm, ready to be read.

        Raises:
            ValueError: as `hold`.
        """
        check_columns([grads])
        table = cls(NormSums([grad.numel() for grad in grads], grads[0].device), range(len(grads)))
        table.hold(grads)
        table.write()
        return table

    @property
    def num_blocks(self) -> int:
        """Blocks of the launch."""
        return len(self._pieces)

    def hold(self, *columns: Sequence[Tensor]) -> None:
        """Hold gradients, one column. A kernel must not run with the table before :meth:`write`.

        Args:
            columns: one gradient for each row, any mix of fp32, bf16 and fp16, dense, of the sizes that the sums are for.

        Raises:
            ValueError: they are not as above; the message names the row.
        """
        check_columns(columns)
        [grads] = columns
        for row, grad in zip(self.rows, grads, strict=True):
            if grad.numel() != self.sums.sizes[row] or grad.device != self.sums.device:
                raise ValueError(f"row {row} is {describe(grad)}, expected {self.sums.sizes[row]} elements on {self.sums.device}.")
        self.grads, self._key = tuple(grads), key_of(columns)

    def holds(self, *columns: Sequence[Tensor]) -> bool:
        """Whether ``columns`` have the addresses, sizes and dtypes of the gradients held."""
        return bool(self.grads) and self._key == key_of(columns)

    def fits(self, *columns: Sequence[Tensor]) -> bool:
        """Whether ``columns`` have the sizes and dtypes of the gradients held last, at whatever addresses."""
        return form_of(self._key) == form_of(key_of(columns))

    def release(self) -> None:
        """Let go of the gradients: the table holds none, and fits others of their sizes."""
        self.grads = ()

    def write(self) -> None:
        """Tell the device what the table holds, on the current stream, without a sync. Not under capture."""
        columns = (
            [grad.data_ptr() for grad in self.grads],
            [grad.numel() for grad in self.grads],
            [DTYPE_CODES[grad.dtype] for grad in self.grads],
            [self.sums.places[row] for row in self.rows],
        )
        words = np.concatenate([np.array(columns, dtype=np.int64).ravel(), self._pieces])
        with _disable_current_modes():
            self._words.copy_(upload(words, self.sums.device))

    @property
    def addresses(self) -> tuple[int, ...]:
        """Where the columns start on the device: addresses, sizes, dtype codes, places, pieces."""
        start, step = self._words.data_ptr(), 8 * len(self.rows)
        return tuple(start + i * step for i in range(5))

    @property
    def is_whole(self) -> bool:
        """Whether it has all gradients of the norm, in order."""
        return self.rows == tuple(range(len(self.sums.sizes)))


def grad_norm(table: NormTable, out: Tensor) -> None:
    """Add up the squares of the table's gradients; the last launch of a norm writes it to ``out``. One launch.

    A norm is computed by launches that together have every gradient of their sums once, on streams in any order, and all of
    them get the same ``out``. Squares are fp32, so beyond 1.8e19 a value counts as inf, as in torch's fp32 norm; sums beyond a
    few values are fp64. An inf or a NaN makes the norm one of them.

    Args:
        table: it has been given gradients.
        out: 0-dim fp32 on the table's device.

    Raises:
        ValueError: ``out`` is not as above.
    """
    check_scalar("out", out, table.sums.device)
    (_launch if table.sums.device.type == "cuda" else _compute)(table, out)


def _launch(table: NormTable, out: Tensor) -> None:
    counter = table.sums.memory.data_ptr()
    args = (*table.addresses, table.sums.num_pieces, counter + 8, counter, out.data_ptr())
    device.launch(out.get_device(), "graphrt_grad_norm", table.num_blocks, _THREADS, args)


@torch.no_grad()
def _compute(table: NormTable, out: Tensor) -> None:
    """In plain torch, a sum a gradient; after the last launch ``out`` is the norm of all."""
    sums = torch.stack([grad.float().square().sum(dtype=torch.float64) for grad in table.grads])
    if not table.is_whole:
        # Each gradient's sum stands in the place of its first piece.
        table.sums.memory.index_copy_(0, _first_places(table.sums, table.rows), sums)
        sums = table.sums.memory.index_select(0, _first_places(table.sums, range(len(table.sums.sizes))))
    out.copy_(sums.sum().sqrt())


def _first_places(sums: NormSums, rows: Iterable[int]) -> Tensor:
    return torch.tensor([1 + sums.places[row] for row in rows])
