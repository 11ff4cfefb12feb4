"""One FP8 product through cuBLASLt: its descriptors, the algorithms it can run with, and its launch.

cuBLASLt counts matrices by columns. What is row-major [r, c] here is c x r there, so ``out = a b_t^T`` is computed as
``out^T = b_t a^T``:

    A = b_t: K x N, transposed      B = a: K x M      C = D = out: N x M

and the scale of A is the one of ``b_t``. An algorithm is 64 bytes that mean nothing to others; "cublasLt.h" allows keeping
them for the same version of the library.
"""

import ctypes
import threading
import weakref
from ctypes import byref, c_float, c_int, c_int8, c_int32, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphrt.kernels import device
from graphrt.kernels.cublaslt import CONSTANTS, DATA_TYPES, AlgorithmStruct, CublasLt, CublasLtError, HeuristicResult

__all__ = ["WORKSPACE_BYTES", "Algorithm", "Gemm", "GemmKey"]

#: What an algorithm may use: what torch allows on Hopper, so that both are proposed the same ones.
WORKSPACE_BYTES = 32 * 2**20

_POINTER_BYTES = 8
_BIAS_POINTER = CONSTANTS["CUBLASLT_MATMUL_DESC_BIAS_POINTER"]
_A_SCALE_POINTER = CONSTANTS["CUBLASLT_MATMUL_DESC_A_SCALE_POINTER"]
_B_SCALE_POINTER = CONSTANTS["CUBLASLT_MATMUL_DESC_B_SCALE_POINTER"]
_DTYPE_NAMES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
}


class GemmKey(NamedTuple):
    """What decides which algorithms a product can run with, and which is the fastest."""

    device: int
    m: int
    n: int
    k: int
    a: torch.dtype
    b_t: torch.dtype
    out: torch.dtype
    fast_accum: bool
    has_bias: bool

    def __str__(self) -> str:
        """All but the device: "8192x6144x2048 e4m3*e4m3->bf16 fast", the sizes being M, N and K."""
        dtypes = f"{_DTYPE_NAMES[self.a]}*{_DTYPE_NAMES[self.b_t]}->{_DTYPE_NAMES[self.out]}"
        return f"{self.m}x{self.n}x{self.k} {dtypes}{' fast' if self.fast_accum else ''}{' bias' if self.has_bias else ''}"


@dataclass(frozen=True)
class Algorithm:
    """How a product is computed, in cuBLASLt's own terms.

    Attributes:
        data: `ALGORITHM_BYTES` bytes.
        workspace_bytes: device memory that it needs while it runs.
    """

    data: bytes
    workspace_bytes: int

    @cached_property
    def struct(self) -> AlgorithmStruct:
        """As cuBLASLt takes it."""
        return AlgorithmStruct.from_buffer_copy(self.data)

    @cached_property
    def address(self) -> int:
        """Of `struct`."""
        return ctypes.addressof(self.struct)


class Gemm:
    """One product: its descriptors, made once.

    Args:
        library: cuBLASLt.
        key: what is multiplied; M, N and K multiples of 16.

    Raises:
        CublasLtError: cuBLASLt refuses it.
    """

    def __init__(self, library: CublasLt, key: GemmKey) -> None:
        self.key, self._library = key, library
        self._handle = library.handle(key.device)
        self._a = self._layout(key.b_t, key.k, key.n)
        self._b = self._layout(key.a, key.k, key.m)
        self._d = self._layout(key.out, key.n, key.m)
        self._operation = self._create("cublasLtMatmulDesc", CONSTANTS["CUBLAS_COMPUTE_32F"], CONSTANTS["CUDA_R_32F"])
        self._set("TRANSA", c_int32(CONSTANTS["CUBLAS_OP_T"]))
        self._set("FAST_ACCUM", c_int8(key.fast_accum))
        if key.has_bias:
            self._set("EPILOGUE", c_int32(CONSTANTS["CUBLASLT_EPILOGUE_BIAS"]))
            self._set("BIAS_DATA_TYPE", c_int32(DATA_TYPES[key.out]))
        self._one, self._zero, self._pointer = c_float(1), c_float(0), c_void_p()
        self._addresses = tuple(map(ctypes.addressof, (self._one, self._zero, self._pointer)))
        # The addresses of the scales are in the descriptor: set and used by one thread at a time.
        self._lock = threading.Lock()

    def _create(self, kind: str, *args: Any) -> int:
        made = self._library.create(f"{kind}Create", *args)
        weakref.finalize(self, self._library.call, f"{kind}Destroy", made).atexit = False
        return made

    def _layout(self, dtype: torch.dtype, num_rows: int, num_columns: int) -> int:
        return self._create("cublasLtMatrixLayout", DATA_TYPES[dtype], num_rows, num_columns, num_rows)

    def _set(self, name: str, value: Any) -> None:
        attribute = CONSTANTS[f"CUBLASLT_MATMUL_DESC_{name}"]
        self._library.call("cublasLtMatmulDescSetAttribute", self._operation, attribute, byref(value), ctypes.sizeof(value))

    def candidates(self, num: int) -> list[Algorithm]:
        """Up to ``num`` algorithms, those first that cuBLASLt expects to be fastest.

        Raises:
            CublasLtError: there is none.
        """
        preference = self._create("cublasLtMatmulPreference")
        limit, found, results = c_uint64(WORKSPACE_BYTES), c_int(), (HeuristicResult * num)()
        attribute = CONSTANTS["CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES"]
        self._library.call("cublasLtMatmulPreferenceSetAttribute", preference, attribute, byref(limit), ctypes.sizeof(limit))
        layouts = (self._a, self._b, self._d, self._d)
        self._library.call(
            "cublasLtMatmulAlgoGetHeuristic", self._handle, self._operation, *layouts, preference, num, results, byref(found)
        )
        return [Algorithm(bytes(result.algorithm), result.workspace_bytes) for result in results[: found.value] if result.state == 0]

    def accepts(self, algorithm: Algorithm) -> bool:
        """Whether an algorithm that was kept can compute this product here, with the workspace it says."""
        result, layouts = HeuristicResult(), (self._a, self._b, self._d, self._d)
        try:
            self._library.call("cublasLtMatmulAlgoCheck", self._handle, self._operation, *layouts, algorithm.address, byref(result))
        except CublasLtError:
            return False
        return result.workspace_bytes <= algorithm.workspace_bytes <= WORKSPACE_BYTES

    def multiply(
        self,
        algorithm: Algorithm,
        a: Tensor,
        a_scale_inv: Tensor,
        b_t: Tensor,
        b_scale_inv: Tensor,
        bias: Tensor | None,
        out: Tensor,
    ) -> None:
        """``out = (a b_t^T) * (a_scale_inv * b_scale_inv) + bias`` on torch's current stream; may be captured.

        Args:
            algorithm: one of `candidates`, or one that it `accepts`.
            a: [M, K], contiguous, as all tensors here, and at an address that is a multiple of 256, as all but the scales.
            a_scale_inv: [1] fp32 at a 16-byte aligned address.
            b_t: [N, K].
            b_scale_inv: like ``a_scale_inv``.
            bias: [N] of ``out``'s dtype, exactly if the key says so.
            out: [M, N].

        Raises:
            CublasLtError: cuBLASLt could not launch it.
        """
        index = self.key.device
        if torch._C._cuda_getDevice() != index:
            with torch.cuda.device(index):
                self._launch(algorithm, a, a_scale_inv, b_t, b_scale_inv, bias, out)
        else:
            self._launch(algorithm, a, a_scale_inv, b_t, b_scale_inv, bias, out)

    def _launch(
        self, algorithm: Algorithm, a: Tensor, a_scale_inv: Tensor, b_t: Tensor, b_scale_inv: Tensor, bias: Tensor | None, out: Tensor
    ) -> None:
        index, num_bytes = self.key.device, algorithm.workspace_bytes
        device.use_context(index)
        # From torch, so that a captured product's lies in the graph's pool.
        workspace = torch.empty(num_bytes, dtype=torch.uint8, device=out.device) if num_bytes else None
        one, zero, _ = self._addresses
        out_address = out.data_ptr()
        with self._lock:
            self._set_address(_A_SCALE_POINTER, b_scale_inv)
            self._set_address(_B_SCALE_POINTER, a_scale_inv)
            if bias is not None:
                self._set_address(_BIAS_POINTER, bias)
            status = self._library.matmul(
                self._handle, self._operation,
                one, b_t.data_ptr(), self._a, a.data_ptr(), self._b,
                zero, out_address, self._d, out_address, self._d,
                algorithm.address, 0 if workspace is None else workspace.data_ptr(), num_bytes,
                torch._C._cuda_getCurrentRawStream(index),
            )  # fmt: skip
        self._library.check("cublasLtMatmul", status)

    def _set_address(self, attribute: int, tensor: Tensor) -> None:
        self._pointer.value = tensor.data_ptr()
        status = self._library.set_attribute(self._operation, attribute, self._addresses[2], _POINTER_BYTES)
        self._library.check("cublasLtMatmulDescSetAttribute", status)
