"""Runs the CUDA sources on a CPU: builds them with g++ against the emulation, and stands in for device.launch."""

import ctypes
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from graphrt.kernels import compiler

EMULATION = Path(__file__).parent / "emulation"
Launch = Callable[..., None]

#: Every argument of a kernel takes 8 bytes.
_CTYPES = {int: ctypes.c_longlong, float: ctypes.c_double}

#: Threads run in order and in reverse: a missing barrier shows in one of them.
ORDERS = [pytest.param(False, id="forward"), pytest.param(True, id="reverse", marks=pytest.mark.slow)]


def is_available() -> bool:
    return shutil.which("g++") is not None


def build(source: str, folder: Path) -> ctypes.CDLL:
    """The shared library of one source. -O1 with IEEE arithmetic: no contraction, no flush to zero."""
    library = folder / f"{source}.so"
    files = {"KERNEL_COMMON": compiler.COMMON, "KERNEL_SOURCE": compiler.SOURCES[source], "KERNEL_SIGNATURES": EMULATION / f"{source}.inc"}
    defines = [f'-D{name}="{path}"' for name, path in files.items()]
    flags = ["-std=c++17", "-O1", "-ffp-contract=off", "-shared", "-fPIC", "-w"]
    subprocess.run(["g++", *flags, *defines, str(EMULATION / "harness.cpp"), "-o", str(library)], check=True, timeout=120)
    return ctypes.CDLL(str(library))


def make_launch(libraries: list[ctypes.CDLL], *, is_reversed: bool) -> Launch:
    """A function with the signature of ``graphrt.kernels.device.launch``; threads run in order, or in reverse."""

    def launch(index: int, name: str, num_blocks: int, num_threads: int, args: tuple[int | float, ...], begins_early: bool = True) -> None:
        assert index == -1, "CPU tensors expected"
        del begins_early  # launches are made one after the other
        library = next(library for library in libraries if hasattr(library, name))
        values = [_CTYPES[type(arg)](arg) for arg in args]
        addresses = (ctypes.c_void_p * len(values))(*[ctypes.addressof(value) for value in values])
        kernel = ctypes.cast(getattr(library, name), ctypes.c_void_p)
        run = getattr(library, f"emulate_{name}" if hasattr(library, f"emulate_{name}") else f"emulate_{_signature_of(name)}")
        status = run(kernel, addresses, len(values), num_blocks, num_threads, int(is_reversed))
        assert status == 0, f"{name} was launched with {len(values)} arguments"

    return launch


def _signature_of(name: str) -> str:
    """The entry point whose emulation shares this one's signature."""
    name = re.sub(r"_(bf16|fp16|fp32)_e\w+$", "_bf16_e4m3", name)
    return re.sub(r"_(bf16|fp16|fp32)$", "_bf16", name)
