"""Compiles the CUDA C++ sources to cubins with NVRTC, once per machine: the result is kept on disk.

Needs no driver and no GPU. The cache is a folder of files named by a hash of everything that decides the machine code;
a file holds the SHA-256 of the cubin and the cubin. It is only ever an optimisation: whatever is wrong with it, the
source is compiled.
"""

import functools
import hashlib
import io
import os
import tempfile
from pathlib import Path

from graphrt.errors import GraphrtError

__all__ = ["COMMON", "SOURCES", "cache_dir", "compile_source", "load_or_compile", "replace_file", "source_text"]

#: source name -> file; the kernels of each are found by their names.
SOURCES = {path.stem: path for path in sorted(Path(__file__).parent.glob("*.cu"))}

#: What stands in front of every source.
COMMON = Path(__file__).parent / "common.cuh"

#: Fast math stays off: the scale update divides as IEEE says and keeps subnormals.
_STANDARD = "c++17"

_DIGEST_BYTES = 32


def cache_dir() -> Path:
    """``$XDG_CACHE_HOME/graphrt``, or ``~/.cache/graphrt``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "graphrt"


def compile_source(source: str, name: str, arch: str, *, ptxas_options: tuple[str, ...] = ()) -> tuple[bytes, str]:
    """Compile header-free CUDA C++ for ``arch`` ("sm_90"); returns the cubin and the compiler's log.

    Raises:
        GraphrtError: NVRTC is not installed, or it refuses the source (its log is in the message).
    """
    log = io.StringIO()
    try:
        from cuda.core import Program, ProgramOptions  # pyright: ignore[reportAttributeAccessIssue]

        options = ProgramOptions(name=name, arch=arch, std=_STANDARD, ptxas_options=list(ptxas_options) or None)
        cubin = Program(source, "c++", options).compile("cubin", logs=log).code
    except Exception as error:
        raise GraphrtError(
            f"NVRTC could not compile {name}.cu for {arch}: {error} {log.getvalue()}\n"
            "If NVRTC is missing, install it with: pip install nvidia-cuda-nvrtc"
        ) from error
    if not isinstance(cubin, bytes):
        raise GraphrtError(f"NVRTC gave {type(cubin).__name__} instead of a cubin for {name}.cu. Reinstall cuda-core.")
    return cubin, log.getvalue()


def source_text(name: str) -> str:
    """The whole text of the source ``name``, as it is compiled."""
    return f'{COMMON.read_text()}\n#line 1 "{name}.cu"\n{SOURCES[name].read_text()}'


@functools.cache
def load_or_compile(name: str, arch: str) -> bytes:
    """The cubin of the source ``name``, from the disk cache if it holds it."""
    source = source_text(name)
    path = cache_dir() / f"{name}-{arch}-{_cache_key(source, arch)}.cubin"
    cubin = _read(path)
    if cubin is None:
        cubin, _ = compile_source(source, name, arch)
        _write(path, cubin)
    return cubin


def _cache_key(source: str, arch: str) -> str:
    parts = (source, arch, _STANDARD, _nvrtc_version())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _nvrtc_version() -> str:
    try:
        from cuda.bindings import nvrtc  # pyright: ignore[reportAttributeAccessIssue]

        _, major, minor = nvrtc.nvrtcVersion()
    except Exception as error:
        raise GraphrtError(f"NVRTC could not be loaded: {error} Install it with: pip install nvidia-cuda-nvrtc") from error
    return f"{major}.{minor}"


def _read(path: Path) -> bytes | None:
    """The cubin in ``path``, or None if there is none, or not a whole one."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    digest, cubin = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    return cubin if cubin and hashlib.sha256(cubin).digest() == digest else None


def _write(path: Path, cubin: bytes) -> None:
    replace_file(path, hashlib.sha256(cubin).digest() + cubin)


def replace_file(path: Path, content: bytes) -> None:
    """Write by rename, so that a reader or a second writer never sees half a file. A cache that cannot be written is no error."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f"{path.name}.", suffix=".tmp", delete=False) as file:
            temporary = Path(file.name)
            file.write(content)
    except OSError:
        return
    try:
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
