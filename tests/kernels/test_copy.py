"""The copy kernel moves exactly the bytes it is told: executed on a CPU by the emulation."""

import ctypes
import random

import pytest
import torch

from graphrt.kernels.copy import COPY_KERNEL, Copy, copy_launches, launch_copies

from . import emulated

GUARD = 64
SIZES = (0, 1, 15, 16, 17, 1000, 16384, 16385, 40000)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return emulated.build("copy", tmp_path_factory.mktemp("emulation"))


@pytest.mark.skipif(not emulated.is_available(), reason="g++ is not installed")
@pytest.mark.parametrize("is_reversed", emulated.ORDERS)
@pytest.mark.parametrize("num_copies", [1, 2, 3, 4])
@pytest.mark.parametrize("offsets", [(0, 0), (0, 8), (3, 0), (5, 5)], ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_copies_move_every_byte_and_touch_no_other(library, size, offsets, num_copies, is_reversed):
    launch = emulated.make_launch([library], is_reversed=is_reversed)
    sizes = [size, 300, SIZES[(SIZES.index(size) + 4) % len(SIZES)], size][:num_copies]
    sources = [ctypes.create_string_buffer(random.Random(i).randbytes(n + GUARD), n + GUARD) for i, n in enumerate(sizes)]
    targets = [ctypes.create_string_buffer(b"\x5c" * (n + 2 * GUARD), n + 2 * GUARD) for n in sizes]
    starts = [(-ctypes.addressof(to) % 16 + 16 + offsets[0], -ctypes.addressof(source) % 16 + offsets[1])
              for to, source in zip(targets, sources, strict=True)]  # fmt: skip
    copies = [
        Copy(ctypes.addressof(to) + at, ctypes.addressof(source) + source_at, n)
        for to, source, n, (at, source_at) in zip(targets, sources, sizes, starts, strict=True)
    ]
    launches = copy_launches(copies)
    assert len(launches) == sum(any(sizes[i : i + 3]) for i in range(0, num_copies, 3))
    for num_blocks, num_threads, args in launches:
        launch(-1, COPY_KERNEL, num_blocks, num_threads, args)
    for to, source, n, (at, source_at) in zip(targets, sources, sizes, starts, strict=True):
        assert to.raw == b"\x5c" * at + source.raw[source_at : source_at + n] + b"\x5c" * (len(to) - at - n)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1, 16, 1000, 100_003, 1 << 24])
def test_on_a_gpu(size):
    source = torch.randint(256, (4, size + 16), dtype=torch.uint8, device="cuda")
    for offset in (0, 16, 3):
        to = torch.zeros_like(source)
        copies = [Copy(to[i].data_ptr(), source[i, offset:].data_ptr(), size) for i in range(4)]
        launch_copies(source.get_device(), copy_launches(copies))
        assert torch.equal(to[:, :size], source[:, offset : offset + size])
        assert not to[:, size:].any()
