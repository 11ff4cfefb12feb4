"""What `graphrt doctor` tries, each for real. Run as a program it tries the named ones and prints a line of JSON for each.

A probe may hang or take the process down: that is why it runs in a process that `graphrt.doctor` watches and can give up. The
program is run by its path and imports nothing of graphrt before a probe asks for it, so that a failing import is an outcome too.
"""

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

__all__ = ["ABSENT", "BROKEN", "PROBES", "WORKS", "Outcome", "run_probes"]

WORKS = "works"
ABSENT = "absent"  # cannot be expected on this machine, or is optional
BROKEN = "broken"  # can be expected here, and fails

_TOOL_TIMEOUT_S = 20
_WIDTH = 32
_NUM_PARITY_STEPS = 3
_MIN_CAPABILITY = (8, 9)
_NO_GPU = "torch sees no CUDA device"
_GPU_REMEDY = "A GPU of compute capability 8.9 or later, its driver and a CUDA build of torch are needed."


@dataclass(frozen=True)
class Outcome:
    """What one probe found: one sentence of fact, and one of remedy unless it works."""

    status: str  # WORKS, ABSENT or BROKEN
    fact: str
    remedy: str = ""


def run_probes(names: Sequence[str], write: Callable[[dict[str, Any]], None]) -> None:
    """Run probes in turn; ``write`` gets a dict after each: its name, the outcome's fields, and the seconds it took."""
    for name in names:
        start = time.perf_counter()
        try:
            outcome = PROBES[name]()
        except Exception as error:
            outcome = Outcome(BROKEN, _one_line(f"{type(error).__name__}: {error}"), "Report it with this text.")
        write({"name": name, **asdict(outcome), "seconds": round(time.perf_counter() - start, 2)})


# -- facts


def probe_devices() -> Outcome:
    """The GPUs that torch sees, with their driver."""
    import torch

    if not torch.cuda.is_available():
        return _without_device(torch.__version__, torch.version.cuda, driver_version())
    devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    listed = "; ".join(f"{d.name}, capability {d.major}.{d.minor}, {d.total_memory / 2**30:.0f} GiB" for d in devices)
    driver = f"driver {driver_version() or 'of unknown version'}, which takes CUDA {_driver_cuda_version()}"
    return Outcome(WORKS, f"{listed}; {driver}; torch is built for CUDA {torch.version.cuda}.")


def _without_device(torch_version: str, cuda_version: str | None, driver: str | None) -> Outcome:
    if cuda_version is None:
        remedy = "Install a CUDA build of torch to use the GPU." if driver else _GPU_REMEDY
        return Outcome(ABSENT, f"torch {torch_version} is built without CUDA; driver: {driver or 'none'}.", remedy)
    fact = f"torch is built for CUDA {cuda_version} and sees no device; driver: {driver or 'none'}."
    if driver is None:
        return Outcome(ABSENT, fact, _GPU_REMEDY)
    # A CUDA build beside a driver should find the GPU.
    return Outcome(BROKEN, fact, "Check nvidia-smi, CUDA_VISIBLE_DEVICES, and that the driver is new enough for this torch.")


def driver_version() -> str | None:
    """Version of the NVIDIA kernel driver; None if none is loaded."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return _tool_version("nvidia-smi", ("--query-gpu=driver_version", "--format=csv,noheader"))
    found = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", text)
    return found.group() if found else None


def _driver_cuda_version() -> str:
    from cuda.bindings import driver  # pyright: ignore[reportAttributeAccessIssue]

    status, number = driver.cuDriverGetVersion()
    return f"{number // 1000}.{number % 1000 // 10}" if int(status) == 0 else "of unknown version"


def _has_fp8_gpu() -> bool:
    import torch

    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= _MIN_CAPABILITY


# -- the package and its compiler


def probe_import() -> Outcome:
    """Importing graphrt, in a process that has torch."""
    import torch  # noqa: F401

    start = time.perf_counter()
    import graphrt

    return Outcome(WORKS, f"graphrt {graphrt.__version__} imports in {time.perf_counter() - start:.1f} s beyond torch.")


def _is_installed(distribution: str) -> bool:
    try:
        return bool(importlib.metadata.version(distribution))
    except importlib.metadata.PackageNotFoundError:
        return False


def probe_compile() -> Outcome:
    """One kernel through NVRTC, past the cache. Needs no driver; the cubin is not loaded here."""
    import torch

    from graphrt.errors import GraphrtError
    from graphrt.kernels.compiler import compile_source, source_text

    capability = torch.cuda.get_device_capability() if _has_fp8_gpu() else (9, 0)
    arch = f"sm_{capability[0]}{capability[1]}"
    start = time.perf_counter()
    try:
        cubin, _ = compile_source(source_text("scale_update"), "scale_update", arch)
    except GraphrtError as error:
        status = BROKEN if torch.cuda.is_available() or _is_installed("nvidia-cuda-nvrtc") else ABSENT
        return Outcome(status, _one_line(error), "pip install nvidia-cuda-nvrtc")
    return Outcome(
        WORKS, f"NVRTC compiled scale_update.cu for {arch} in {(time.perf_counter() - start) * 1e3:.0f} ms, {len(cubin):,} bytes."
    )


def probe_cache() -> Outcome:
    """The folder where compiled kernels are kept."""
    from graphrt.kernels.compiler import cache_dir

    folder = cache_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, suffix=".tmp"):
            pass
    except OSError as error:
        remedy = "Kernels are compiled anew by each process. Set XDG_CACHE_HOME to a folder that can be written."
        return Outcome(ABSENT, f"{folder} cannot be written: {error.strerror}.", remedy)
    sizes = [file.stat().st_size for file in folder.glob("*.cubin")]
    return Outcome(WORKS, f"{folder} can be written and holds {len(sizes)} cubins, {sum(sizes) / 2**20:.1f} MiB.")


# -- steps


def probe_capture() -> Outcome:
    """A CUDA graph of one operation, captured and replayed."""
    import torch

    if not torch.cuda.is_available():
        return Outcome(ABSENT, f"{_NO_GPU}; mode='graph' records and replays on the CPU instead.", _GPU_REMEDY)
    x, graph = torch.zeros(4, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.add_(1)
    graph.replay()
    graph.replay()
    values = x.tolist()
    if values != [2.0] * 4:
        return Outcome(BROKEN, f"Two replays of an addition gave {values}, expected 2.", "Report it with this text.")
    return Outcome(WORKS, "A CUDA graph was captured and replayed, with the right result.")


def probe_fp8_gemm() -> Outcome:
    """One FP8 GEMM against the same product in fp32."""
    import torch

    from graphrt import kernels

    if torch.cuda.is_available() and not _has_fp8_gpu():
        capability = ".".join(map(str, torch.cuda.get_device_capability()))
        return Outcome(ABSENT, f"The GPU has compute capability {capability}, FP8 needs 8.9 or later.", "Use --precision bf16.")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(_WIDTH, _WIDTH, generator=generator).to(device, torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones(1, device=device)
    product = kernels.scaled_mm(a, one, b, one, torch.bfloat16, fast_accum=False)
    error = float((product.float() - a.float() @ b.float().t()).abs().max())
    if not error < 0.25:  # bf16 output: half a unit in the last place of values up to 32
        return Outcome(BROKEN, f"An FP8 GEMM on {device} differs from fp32 by {error:.3g}.", "Report it with this text.")
    how = "on the GPU" if device == "cuda" else "the reference on the CPU; FP8 GEMMs proper need a GPU"
    return Outcome(WORKS, f"An FP8 GEMM agrees with fp32 ({how}).")


def probe_gemm_algorithms() -> Outcome:
    """Whether FP8 GEMMs can run with another algorithm than torch's, and what was chosen on this machine."""
    import torch

    from graphrt.kernels.cublaslt import CublasLtError, load
    from graphrt.kernels.cublaslt_gemm import Gemm, GemmKey
    from graphrt.kernels.gemm_cache import VARIABLE, choice_path

    path = choice_path()
    if not _has_fp8_gpu():
        return Outcome(ABSENT, "There is no FP8 GPU whose cuBLASLt could be asked.", _GPU_REMEDY)
    if path is None:
        return Outcome(ABSENT, f"{VARIABLE} is off: FP8 GEMMs run with torch's algorithms.", f"unset {VARIABLE}")
    e4m3, size = torch.float8_e4m3fn, 1024
    key = GemmKey(0, size, size, size, e4m3, e4m3, torch.bfloat16, fast_accum=True, has_bias=False)
    try:
        library = load()
        num = len(Gemm(library, key).candidates(8))
    except CublasLtError as error:
        fact = f"FP8 GEMMs run with torch's algorithms: {_one_line(error)}"
        return Outcome(ABSENT, fact, "Use a build of torch whose cuBLASLt is a shared library, as those from pytorch.org.")
    kept = f"choices are kept in {path}" if path.exists() else f"nothing was chosen yet in {path}"
    return Outcome(WORKS, f"cuBLASLt {library.version} proposes {num} algorithms for {key}; {kept}.")


def probe_step() -> Outcome:
    """Captured training steps against eager ones, bit for bit."""
    import torch
    from torch import nn

    import graphrt

    if torch.cuda.is_available() and not _has_fp8_gpu():
        return Outcome(ABSENT, "FP8 steps need a GPU of compute capability 8.9 or later.", "Use --precision bf16.")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = graphrt.convert_to_float8_training(nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.GELU(), nn.Linear(_WIDTH, _WIDTH)).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = [torch.randn(_WIDTH, _WIDTH, device=device) for _ in range(_NUM_PARITY_STEPS)]
    with graphrt.Trainer(model, optimizer, lambda model, x: model(x).square().mean(), mode="graph", max_grad_norm=1.0) as trainer:
        report = graphrt.check_parity(trainer, batches)
    how = "a CUDA graph" if device == "cuda" else "the CPU recorder"
    if not report:
        return Outcome(BROKEN, f"Steps replayed by {how} differ from eager ones: {_one_line(report)}", "Report it with this text.")
    return Outcome(WORKS, f"{_NUM_PARITY_STEPS} FP8 training steps replayed by {how} equal eager ones bit for bit.")


# -- profilers and tools


def probe_nvtx() -> Outcome:
    """Whether a profiler listens to the ranges of graphrt."""
    import nvtx

    # Without one, NVTX hands out no attributes.
    if nvtx.get_domain("graphrt").get_event_attributes(message="doctor") is None:
        return Outcome(ABSENT, "No profiler has injected itself into NVTX, so ranges cost nothing.", "Run under nsys profile to see them.")
    return Outcome(WORKS, "A profiler listens to the NVTX domain graphrt.")


def probe_torch_profiler() -> Outcome:
    """Whether torch's profiler sees kernels."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    if not torch.cuda.is_available():
        return Outcome(ABSENT, f"{_NO_GPU}, so torch.profiler shows operations on the CPU only.", _GPU_REMEDY)
    x = torch.ones(4, device="cuda")
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        (x + x).sum().item()
    num_kernels = sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profiled.events() or ())
    if num_kernels:
        return Outcome(WORKS, f"torch.profiler saw {num_kernels} events on the GPU.")
    remedy = "Check that no other profiler holds CUPTI, and that the driver lets users profile (NVreg_RestrictProfilingToAdminUsers=0)."
    return Outcome(BROKEN, "torch.profiler saw no kernel on the GPU.", remedy)


def probe_cupti() -> Outcome:
    """The library that profilers in the process use."""
    import ctypes

    import torch
    from cuda.pathfinder import load_nvidia_dynamic_lib

    try:
        library = load_nvidia_dynamic_lib("cupti")
    except Exception:
        remedy = "pip install nvidia-cuda-cupti, or install the CUDA toolkit."
        return Outcome(BROKEN if torch.cuda.is_available() else ABSENT, "libcupti is not found.", remedy)
    number = ctypes.c_uint32()
    status = ctypes.CDLL(library.abs_path).cuptiGetVersion(ctypes.byref(number)) if library.abs_path else 1
    return Outcome(WORKS, f"libcupti loads, API version {number.value if status == 0 else 'unknown'}.")


def _probe_tool(tool: str, purpose: str, *, remedy: str) -> Callable[[], Outcome]:
    def probe() -> Outcome:
        if shutil.which(tool) is None:
            return Outcome(ABSENT, f"{tool} is not on PATH; {purpose}.", remedy)
        version = _tool_version(tool, ("--version",))
        if version is None:
            return Outcome(BROKEN, f"{tool} --version does not answer.", f"Reinstall {tool}.")
        return Outcome(WORKS, f"{version} ({purpose}).")

    return probe


def _tool_version(tool: str, arguments: Sequence[str]) -> str | None:
    """What a tool says of itself: the line with a version in it; None if it is not there or does not answer."""
    if shutil.which(tool) is None:
        return None
    try:
        done = subprocess.run([tool, *arguments], capture_output=True, text=True, timeout=_TOOL_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    return next((line for line in lines if re.search(r"\d+\.\d+", line) and "Copyright" not in line), lines[0] if lines else None)


def _probe_extra(package: str, extra: str, purpose: str) -> Callable[[], Outcome]:
    def probe() -> Outcome:
        try:
            importlib.import_module(package)
        except ImportError as error:
            is_installed = importlib.util.find_spec(package) is not None
            return Outcome(BROKEN if is_installed else ABSENT, f"{purpose}: {error}.", f"pip install 'graphrt[{extra}]'")
        return Outcome(WORKS, f"{package} {importlib.metadata.version(package)} ({purpose}).")

    return probe


def probe_cublas() -> Outcome:
    """The setting that bitwise equality needs on a GPU."""
    value = os.environ.get("GRAPHRT_DOCTOR_CUBLAS_WORKSPACE_CONFIG", "")
    if value in (":4096:8", ":16:8"):
        return Outcome(WORKS, f"CUBLAS_WORKSPACE_CONFIG={value} (check_parity on a GPU).")
    fact = f"CUBLAS_WORKSPACE_CONFIG is {value!r}" if value else "CUBLAS_WORKSPACE_CONFIG is not set"
    return Outcome(ABSENT, f"{fact}; check_parity on a GPU needs it.", "export CUBLAS_WORKSPACE_CONFIG=:4096:8")


def _one_line(value: object) -> str:
    return " ".join(str(value).split())


_TOOLKIT = "It comes with the CUDA toolkit."

#: In the order in which they are tried and shown.
PROBES: dict[str, Callable[[], Outcome]] = {
    "device": probe_devices,
    "import": probe_import,
    "compiler": probe_compile,
    "compiler cache": probe_cache,
    "capture": probe_capture,
    "FP8 GEMM": probe_fp8_gemm,
    "GEMM algorithms": probe_gemm_algorithms,
    "captured step": probe_step,
    "NVTX": probe_nvtx,
    "torch.profiler": probe_torch_profiler,
    "CUPTI": probe_cupti,
    "nsys": _probe_tool("nsys", "timelines", remedy="Install Nsight Systems."),
    "ncu": _probe_tool("ncu", "kernel profiles", remedy=_TOOLKIT),
    "compute-sanitizer": _probe_tool("compute-sanitizer", "memory checks", remedy=_TOOLKIT),
    "g++": _probe_tool("g++", "the tests run the CUDA sources through it", remedy="Install a C++ compiler."),
    "plots": _probe_extra("matplotlib", "plot", "loss.png, graphrt report"),
    "tensorboard": _probe_extra("tensorboard", "tensorboard", "graphrt train --tensorboard"),
    "cuBLAS workspace": probe_cublas,
}


@contextlib.contextmanager
def _own_stdout() -> Iterator[TextIO]:
    """The process's stdout for this program alone; whatever libraries print goes to stderr."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as stdout:
        os.dup2(2, 1)
        yield stdout


def _main() -> None:
    with _own_stdout() as stdout:
        run_probes(sys.argv[1:], lambda line: print(json.dumps(line), file=stdout, flush=True))
    # A driver in a bad state may hang a process at its exit.
    os._exit(0)


if __name__ == "__main__":
    _main()
