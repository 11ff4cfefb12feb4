"""The fill kernel writes what a memset of the driver writes: executed on a CPU by the emulation."""

import ctypes

import pytest

from graphrt.kernels.fill import FILL_KERNEL, Fill, fill_launch

from . import emulated

pytestmark = pytest.mark.skipif(not emulated.is_available(), reason="g++ is not installed")

GUARD = 64


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return emulated.build("fill", tmp_path_factory.mktemp("emulation"))


@pytest.mark.parametrize("is_reversed", emulated.ORDERS)
@pytest.mark.parametrize(("element_size", "value"), [(1, 0xAB), (1, 0x1FF), (2, 0xBEEF), (4, 0xDEADBEEF), (4, 0)])
@pytest.mark.parametrize("num_elements", [1, 2, 3, 5, 16, 31, 1025, 4096, 9001])
def test_fill_writes_every_element_and_nothing_else(library, num_elements, element_size, value, is_reversed):
    launch = emulated.make_launch([library], is_reversed=is_reversed)
    num_bytes = num_elements * element_size
    for offset in {0, element_size, 4}:  # of the range from a 16-byte boundary; elements are aligned to their size
        memory = (ctypes.c_ubyte * (num_bytes + 2 * GUARD + 16))(*[0x5C] * (num_bytes + 2 * GUARD + 16))
        start = -ctypes.addressof(memory) % 16 + GUARD - GUARD % 16 + offset
        num_blocks, num_threads, args = fill_launch(Fill(ctypes.addressof(memory) + start, value, element_size, num_elements))
        launch(-1, FILL_KERNEL, num_blocks, num_threads, args)
        element = (value & ((1 << 8 * element_size) - 1)).to_bytes(element_size, "little")
        assert bytes(memory) == b"\x5c" * start + element * num_elements + b"\x5c" * (len(memory) - start - num_bytes)
