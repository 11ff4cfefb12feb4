"""cuBLASLt, called directly for what torch does not offer: a product with an algorithm of the caller's choice.

The library is the one that torch has loaded, through ctypes. Nothing is installed or searched for, and the first algorithm
that the library proposes is the one that ``torch._scaled_mm`` takes.
"""

import ctypes
import functools
import os
from collections.abc import Callable
from ctypes import byref, c_float, c_int, c_int64, c_size_t, c_uint64, c_void_p
from typing import Any

import torch

from graphrt.errors import GraphrtError

__all__ = [
    "ALGORITHM_BYTES",
    "CONSTANTS",
    "DATA_TYPES",
    "AlgorithmStruct",
    "CublasLt",
    "CublasLtError",
    "HeuristicResult",
    "load",
]

ALGORITHM_BYTES = 64

#: Names and values of "cublasLt.h", "cublas_api.h" and "library_types.h".
CONSTANTS = {
    "CUBLAS_COMPUTE_32F": 68,
    "CUBLAS_OP_T": 1,
    "CUBLASLT_EPILOGUE_BIAS": 4,
    "CUBLASLT_MATMUL_DESC_TRANSA": 3,
    "CUBLASLT_MATMUL_DESC_EPILOGUE": 7,
    "CUBLASLT_MATMUL_DESC_BIAS_POINTER": 8,
    "CUBLASLT_MATMUL_DESC_A_SCALE_POINTER": 17,
    "CUBLASLT_MATMUL_DESC_B_SCALE_POINTER": 18,
    "CUBLASLT_MATMUL_DESC_FAST_ACCUM": 25,
    "CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE": 26,
    "CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES": 1,
    "CUDA_R_32F": 0,
    "CUDA_R_16F": 2,
    "CUDA_R_16BF": 14,
    "CUDA_R_8F_E4M3": 28,
    "CUDA_R_8F_E5M2": 29,
}
DATA_TYPES = {
    torch.float32: CONSTANTS["CUDA_R_32F"],
    torch.float16: CONSTANTS["CUDA_R_16F"],
    torch.bfloat16: CONSTANTS["CUDA_R_16BF"],
    torch.float8_e4m3fn: CONSTANTS["CUDA_R_8F_E4M3"],
    torch.float8_e5m2: CONSTANTS["CUDA_R_8F_E5M2"],
}

_SIGNATURES: dict[str, list[Any]] = {
    "cublasLtCreate": [c_void_p],
    "cublasLtMatmulDescCreate": [c_void_p, c_int, c_int],
    "cublasLtMatmulDescSetAttribute": [c_void_p, c_int, c_void_p, c_size_t],
    "cublasLtMatmulDescDestroy": [c_void_p],
    "cublasLtMatrixLayoutCreate": [c_void_p, c_int, c_uint64, c_uint64, c_int64],
    "cublasLtMatrixLayoutDestroy": [c_void_p],
    "cublasLtMatmulPreferenceCreate": [c_void_p],
    "cublasLtMatmulPreferenceSetAttribute": [c_void_p, c_int, c_void_p, c_size_t],
    "cublasLtMatmulPreferenceDestroy": [c_void_p],
    # handle, operation, layouts of A, B, C and D, preference, number asked for, results, number of results
    "cublasLtMatmulAlgoGetHeuristic": [*[c_void_p] * 7, c_int, c_void_p, c_void_p],
    # handle, operation, layouts of A, B, C and D, algorithm, result
    "cublasLtMatmulAlgoCheck": [c_void_p] * 8,
    # handle, operation, alpha, A and its layout, B and its, beta, C and its, D and its, algorithm, workspace, its size, stream
    "cublasLtMatmul": [*[c_void_p] * 14, c_size_t, c_void_p],
}


class CublasLtError(GraphrtError):
    """cuBLASLt cannot be called, or refused what it was asked."""


class AlgorithmStruct(ctypes.Structure):
    """cublasLtMatmulAlgo_t."""

    _fields_ = (("data", c_uint64 * (ALGORITHM_BYTES // 8)),)


class HeuristicResult(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", AlgorithmStruct),
        ("workspace_bytes", c_size_t),
        ("state", c_int),
        ("waves_count", c_float),
        ("reserved", c_int * 4),
    )


class CublasLt:
    """The library, with the signatures of what is called of it.

    Args:
        library: what `ctypes.CDLL` returns.
    """

    def __init__(self, library: Any) -> None:
        self._library = library
        for name, argument_types in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = argument_types, c_int
        library.cublasLtGetVersion.restype = c_size_t
        library.cublasLtGetStatusName.restype = ctypes.c_char_p
        self.matmul: Callable[..., int] = library.cublasLtMatmul
        self.set_attribute: Callable[..., int] = library.cublasLtMatmulDescSetAttribute
        self._handles: dict[int, int] = {}

    @property
    def version(self) -> int:
        """As in 130100 for 13.1."""
        return self._library.cublasLtGetVersion()

    def call(self, name: str, *args: Any) -> None:
        """Call ``name``.

        Raises:
            CublasLtError: it did not succeed.
        """
        self.check(name, getattr(self._library, name)(*args))

    def check(self, name: str, status: int) -> None:
        """Raise CublasLtError if ``status`` is not 0, that of success."""
        if status:
            raise CublasLtError(f"{name} returned {self._library.cublasLtGetStatusName(status).decode()}.")

    def create(self, name: str, *args: Any) -> int:
        """The address of what the function ``name`` makes and hands out through its first argument."""
        made = c_void_p()
        self.call(name, byref(made), *args)
        assert made.value is not None
        return made.value

    def handle(self, index: int) -> int:
        """The handle of a device, made once a process."""
        if index not in self._handles:
            with torch.cuda.device(index):
                self._handles[index] = self.create("cublasLtCreate")
        return self._handles[index]


@functools.cache
def load() -> CublasLt:
    """cuBLASLt as torch has loaded it.

    Raises:
        CublasLtError: torch is built without CUDA, or keeps the library where it cannot be found.
    """
    if torch.version.cuda is None:
        raise CublasLtError("torch is built without CUDA and brings no cuBLASLt.")
    name = f"libcublasLt.so.{torch.version.cuda.split('.')[0]}"
    try:
        # Only if it is loaded already: another copy would propose other algorithms than torch's.
        return CublasLt(ctypes.CDLL(name, mode=os.RTLD_NOLOAD))
    except (OSError, AttributeError) as error:
        raise CublasLtError(f"torch has not loaded a {name} that can be called: {error}.") from error
