"""The sources compile for sm_90 without spilling, and the disk cache never does harm. No driver is needed."""

import hashlib
import os
import re
import subprocess
import sys
from typing import Any

import pytest
import torch

from graphrt.errors import GraphrtError
from graphrt.kernels import compiler, device
from graphrt.kernels.device import entry_points

from .cases import quantize_kernels

nvrtc: Any = pytest.importorskip("cuda.bindings.nvrtc")

ENTRY_POINTS = {"quantize": quantize_kernels(), "scale_update": ["graphrt_update_scales"]}

#: Registers a thread may take so that an SM (65536 of them) holds four blocks of 256 threads, three for fp32 -> transpose, rope in
#: rows and SwiGLU's backward, or one of the update's 1024.
MAX_REGISTERS = {"quantize_transpose_fp32": 80, "quantize": 64, "record": 64, "update": 64}
MAX_REGISTERS |= {"rms_norm": 64, "wide_rms_norm": 128, "embedding": 64}
MAX_REGISTERS |= {"swiglu_backward": 80, "swiglu": 64}
MAX_REGISTERS |= {"rope_backward_bf16_e": 64, "rope": 80}
DEFAULT_MAX_REGISTERS = 96

#: A few words a thread, whatever number of registers it is given: they stay in L1, and the kernel waits for memory.
MAX_SPILLED_BYTES = {"graphrt_swiglu_backward_output": 32}

#: Those with many entry points take the compiler some seconds each.
SLOW_SOURCES = ("norm", "quantize", "adamw", "swiglu", "rope", "embedding")
every_source = pytest.mark.parametrize(
    "source", [pytest.param(name, marks=pytest.mark.slow if name in SLOW_SOURCES else []) for name in compiler.SOURCES]
)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiler.load_or_compile.cache_clear()
    yield compiler.cache_dir()
    compiler.load_or_compile.cache_clear()


def resource_usage(log: str) -> dict[str, tuple[int, int]]:
    """kernel -> registers, spilled bytes; from ptxas's report."""
    usage = {}
    for part in log.split("Compiling entry function")[1:]:
        name = re.search(r"'(\w+)'", part)
        spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", part)
        registers = re.search(r"Used (\d+) registers", part)
        assert name, part
        assert spills, part
        assert registers, part
        usage[name[1]] = int(registers[1]), int(spills[1]) + int(spills[2])
    return usage


@every_source
def test_sources_compile_for_sm_90_without_spills(source):
    text = compiler.source_text(source)
    assert "#include" not in text.replace("There is no #include", "")
    cubin, log = compiler.compile_source(text, source, "sm_90", ptxas_options=("-v",))
    assert "warning" not in log
    usage = resource_usage(log)
    assert sorted(usage) == entry_points(cubin) == ENTRY_POINTS.get(source, sorted(usage))
    assert usage
    for name, (num_registers, spilled_bytes) in usage.items():
        print(f"{name}: {num_registers} registers, {spilled_bytes} bytes spilled")
        limit = next((limit for part, limit in MAX_REGISTERS.items() if name.startswith(f"graphrt_{part}")), DEFAULT_MAX_REGISTERS)
        assert spilled_bytes <= max((most for part, most in MAX_SPILLED_BYTES.items() if name.startswith(part)), default=0), name
        assert num_registers <= limit, name


@every_source
def test_nothing_touches_memory_before_the_kernels_ahead_have_ended(source):
    """Kernels begin early: see begin_kernel in common.cuh."""
    entries = compile_to_ptx(compiler.source_text(source)).split(".visible .entry ")[1:]
    assert entries
    for entry in entries:
        before, waits, after = entry.partition("griddepcontrol.wait")
        assert waits, entry.splitlines()[0]
        assert not re.search(r"\b(ld|st|atom|red|prefetch|cp)\.(?!param)", before), entry.splitlines()[0]
        assert not re.search(r"\bld\.global[.\w]*\.nc\b", after), entry.splitlines()[0]


@pytest.mark.parametrize(("capability", "is_early"), [((8, 9), False), ((9, 0), True), ((12, 0), True)])
def test_kernels_begin_early_only_where_they_can_wait(capability, is_early, monkeypatch):
    pytest.importorskip("cuda.core")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    monkeypatch.setattr(device, "_load_kernels", lambda index, arch: {})
    configure = device._load(0).configure
    assert configure(1, 32, True).programmatic_stream_serialization is is_early
    assert configure(1, 32, False).programmatic_stream_serialization is False


def compile_to_ptx(text: str) -> str:
    # Not through cuda.core, which asks the driver whether it could load the result.
    program = checked(nvrtc.nvrtcCreateProgram(text.encode(), b"source.cu", 0, [], []))
    options = [b"--gpu-architecture=compute_90", b"--std=c++17"]
    checked(nvrtc.nvrtcCompileProgram(program, len(options), options))
    ptx = b" " * checked(nvrtc.nvrtcGetPTXSize(program))
    checked(nvrtc.nvrtcGetPTX(program, ptx))
    checked(nvrtc.nvrtcDestroyProgram(program))
    return ptx.decode()


def checked(result: tuple[Any, ...]) -> Any:
    assert int(result[0]) == 0, result
    return result[1] if len(result) > 1 else None


def test_a_source_that_does_not_compile_raises_with_the_log():
    with pytest.raises(GraphrtError, match=r"could not compile broken\.cu for sm_90(.|\n)*not_a_name"):
        compiler.compile_source("__global__ void f() { not_a_name; }", "broken", "sm_90")


def count_compilations(monkeypatch) -> list[str]:
    compiled: list[str] = []
    compile_source = compiler.compile_source

    def counting(source, name, arch, **options):
        compiled.append(name)
        return compile_source(source, name, arch, **options)

    monkeypatch.setattr(compiler, "compile_source", counting)
    return compiled


def load_in_new_process() -> bytes:
    """What a new process would read: the in-process cache is dropped."""
    compiler.load_or_compile.cache_clear()
    return compiler.load_or_compile("scale_update", "sm_90")


def test_compiles_once_per_process_and_once_per_machine(cache, monkeypatch):
    compiled = count_compilations(monkeypatch)
    first = load_in_new_process()
    assert compiler.load_or_compile("scale_update", "sm_90") is first
    assert load_in_new_process() == first
    assert compiled == ["scale_update"]
    [file] = cache.iterdir()
    assert file.read_bytes() == hashlib.sha256(first).digest() + first


def test_another_source_or_architecture_is_another_file(cache, monkeypatch, tmp_path):
    load_in_new_process()
    compiler.load_or_compile("scale_update", "sm_100")
    edited = tmp_path / "edited.cu"
    edited.write_text(compiler.SOURCES["scale_update"].read_text() + "\n")
    monkeypatch.setitem(compiler.SOURCES, "scale_update", edited)
    load_in_new_process()
    assert len(list(cache.iterdir())) == 3


@pytest.mark.parametrize("damage", [b"", b"short", lambda content: content[:-1], lambda content: content[:40] + b"!" + content[41:]])
def test_a_damaged_file_is_compiled_again_and_replaced(cache, monkeypatch, damage):
    first = load_in_new_process()
    [file] = cache.iterdir()
    whole = file.read_bytes()
    file.write_bytes(damage(whole) if callable(damage) else damage)
    compiled = count_compilations(monkeypatch)
    assert load_in_new_process() == first
    assert compiled == ["scale_update"]
    assert file.read_bytes() == whole


def test_a_cache_that_is_no_folder_does_not_matter(tmp_path, monkeypatch):
    (tmp_path / "graphrt").write_text("a file where the folder should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert entry_points(load_in_new_process()) == ENTRY_POINTS["scale_update"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes to read-only folders")
def test_a_read_only_cache_does_not_matter(cache):
    cache.mkdir()
    cache.chmod(0o500)
    assert entry_points(load_in_new_process()) == ENTRY_POINTS["scale_update"]
    cache.chmod(0o700)


def test_a_failed_write_leaves_no_temporary_file(cache, monkeypatch):
    def refuse(*_):
        raise PermissionError("read-only")

    monkeypatch.setattr(compiler.os, "replace", refuse)
    assert entry_points(load_in_new_process()) == ENTRY_POINTS["scale_update"]
    assert list(cache.iterdir()) == []


@pytest.mark.slow
def test_two_processes_compile_into_one_cache(cache):
    code = "from graphrt.kernels import compiler; print(len(compiler.load_or_compile('scale_update', 'sm_90')))"
    processes = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    sizes = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert sizes[0] == sizes[1]
    [file] = cache.iterdir()
    assert int(sizes[0]) + 32 == file.stat().st_size
