"""What cuBLASLt is told of a product, with a stand-in for the library; and its names and values, where its headers are."""

import ctypes
import importlib.util
import re
from ctypes import c_void_p
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from graphrt.kernels import cublaslt, cublaslt_gemm
from graphrt.kernels.cublaslt import CONSTANTS, CublasLt, CublasLtError
from graphrt.kernels.cublaslt_gemm import WORKSPACE_BYTES, Algorithm, Gemm, GemmKey

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
KEY = GemmKey(0, 32, 64, 128, E5M2, E4M3, torch.bfloat16, fast_accum=True, has_bias=False)
NOT_SUPPORTED = 15


class StandIn(SimpleNamespace):
    """A libcublasLt that makes numbered objects, and notes what they are given."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.attributes: dict[tuple[int, int], int] = {}
        self.layouts: dict[int, tuple[int, ...]] = {}
        self.made: list[str] = []
        self.destroyed: list[int] = []
        self.statuses: dict[str, int] = {}
        self.states = [0, NOT_SUPPORTED, 0]  # of the algorithms it proposes
        self.workspace_needed = 0
        for name in cublaslt._SIGNATURES:
            setattr(self, name, self._function(name))
        self.cublasLtGetVersion = lambda: 130100
        self.cublasLtGetStatusName = lambda status: b"CUBLAS_STATUS_NOT_SUPPORTED"

    def _function(self, name: str) -> Any:
        def function(*args: Any) -> int:
            self.calls.append((name, args))
            if name not in self.statuses:
                getattr(self, f"on_{name.removeprefix('cublasLt')}", self.on_other)(*args)
            if name.endswith("Create") and name not in self.statuses:
                self.made.append(name)
                args[0]._obj.value = len(self.made)
            return self.statuses.get(name, 0)

        return function

    def on_other(self, *args: Any) -> None:
        """Nothing to do."""

    def on_MatrixLayoutCreate(self, made: Any, *sizes: int) -> None:
        self.layouts[len(self.made) + 1] = sizes

    def on_MatmulDescSetAttribute(self, operation: int, attribute: int, value: Any, num_bytes: int) -> None:
        address = value if isinstance(value, int) else ctypes.addressof(value._obj)
        self.attributes[operation, attribute] = int.from_bytes(ctypes.string_at(address, num_bytes), "little")

    def on_MatmulPreferenceSetAttribute(self, preference: int, attribute: int, value: Any, num_bytes: int) -> None:
        self.on_MatmulDescSetAttribute(preference, attribute, value, num_bytes)

    def on_MatmulDescDestroy(self, made: int) -> None:
        self.destroyed.append(made)

    on_MatrixLayoutDestroy = on_MatmulPreferenceDestroy = on_MatmulDescDestroy

    def on_MatmulAlgoGetHeuristic(self, *args: Any) -> None:
        num, results, found = args[-3:]
        assert num >= len(self.states)
        for i, state in enumerate(self.states):
            results[i].algorithm.data[0], results[i].workspace_bytes, results[i].state = i + 7, 16 * i, state
        found._obj.value = len(self.states)

    def on_MatmulAlgoCheck(self, *args: Any) -> None:
        args[-1]._obj.workspace_bytes = self.workspace_needed


@pytest.fixture
def library(monkeypatch) -> StandIn:
    """In place of the library, and of what else a launch asks of a GPU."""
    stand_in = StandIn()
    monkeypatch.setattr(CublasLt, "handle", lambda self, index: 4711 + index)
    monkeypatch.setattr(cublaslt_gemm.device, "use_context", lambda index: None)
    for name, value in (("_cuda_getDevice", 0), ("_cuda_getCurrentRawStream", 99)):
        monkeypatch.setattr(torch._C, name, lambda *args, value=value: value, raising=False)
    return stand_in


def attribute(library: StandIn, name: str) -> int | None:
    operation = library.made.index("cublasLtMatmulDescCreate") + 1
    return library.attributes.get((operation, CONSTANTS[f"CUBLASLT_MATMUL_DESC_{name}"]))


def test_the_product_is_described_transposed(library):
    Gemm(CublasLt(library), KEY)
    e4m3, e5m2, bf16 = (CONSTANTS[f"CUDA_R_{name}"] for name in ("8F_E4M3", "8F_E5M2", "16BF"))
    assert list(library.layouts.values()) == [(e4m3, 128, 64, 128), (e5m2, 128, 32, 128), (bf16, 64, 32, 64)]
    assert attribute(library, "TRANSA") == 1
    assert attribute(library, "FAST_ACCUM") == 1
    assert attribute(library, "EPILOGUE") is None
    operation = dict(library.calls)["cublasLtMatmulDescCreate"]
    assert operation[1:] == (CONSTANTS["CUBLAS_COMPUTE_32F"], CONSTANTS["CUDA_R_32F"])


def test_a_bias_is_described(library):
    Gemm(CublasLt(library), KEY._replace(has_bias=True, fast_accum=False))
    assert attribute(library, "FAST_ACCUM") == 0
    assert attribute(library, "EPILOGUE") == CONSTANTS["CUBLASLT_EPILOGUE_BIAS"]
    assert attribute(library, "BIAS_DATA_TYPE") == CONSTANTS["CUDA_R_16BF"]


def test_descriptors_go_with_the_product(library):
    gemm = Gemm(CublasLt(library), KEY)
    gemm.candidates(4)
    assert not library.destroyed
    del gemm
    assert sorted(library.destroyed) == list(range(1, len(library.made) + 1))


def test_candidates_are_those_in_a_good_state_in_order(library):
    candidates = Gemm(CublasLt(library), KEY).candidates(8)
    assert [algorithm.data[0] for algorithm in candidates] == [7, 9]
    assert [algorithm.workspace_bytes for algorithm in candidates] == [0, 32]
    assert {len(algorithm.data) for algorithm in candidates} == {cublaslt.ALGORITHM_BYTES}
    preference = library.made.index("cublasLtMatmulPreferenceCreate") + 1
    assert library.attributes[preference, CONSTANTS["CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES"]] == WORKSPACE_BYTES


def test_a_refusal_names_the_call_and_the_status(library):
    gemm = Gemm(CublasLt(library), KEY)
    library.statuses["cublasLtMatmulAlgoGetHeuristic"] = NOT_SUPPORTED
    with pytest.raises(CublasLtError, match=r"cublasLtMatmulAlgoGetHeuristic returned CUBLAS_STATUS_NOT_SUPPORTED\."):
        gemm.candidates(8)


def test_a_kept_algorithm_is_checked(library):
    gemm, algorithm = Gemm(CublasLt(library), KEY), Algorithm(bytes(64), 1024)
    assert gemm.accepts(algorithm)
    library.workspace_needed = 1025
    assert not gemm.accepts(algorithm)
    library.workspace_needed = 0
    assert not gemm.accepts(Algorithm(bytes(64), WORKSPACE_BYTES + 1))
    library.statuses["cublasLtMatmulAlgoCheck"] = NOT_SUPPORTED
    assert not gemm.accepts(algorithm)


@pytest.mark.parametrize("num_bytes", [0, 4096])
@pytest.mark.parametrize("has_bias", [False, True])
def test_operands_and_scales_change_places(library, num_bytes, has_bias):
    a, b_t, out = torch.zeros(32, 128).to(E5M2), torch.zeros(64, 128).to(E4M3), torch.zeros(32, 64, dtype=torch.bfloat16)
    bias = torch.zeros(64, dtype=torch.bfloat16) if has_bias else None
    a_inv, b_inv = torch.ones(1), torch.ones(1)
    gemm = Gemm(CublasLt(library), KEY._replace(has_bias=has_bias))
    algorithm = Algorithm(bytes(range(64)), num_bytes)
    gemm.multiply(algorithm, a, a_inv, b_t, b_inv, bias, out)
    assert attribute(library, "A_SCALE_POINTER") == b_inv.data_ptr()
    assert attribute(library, "B_SCALE_POINTER") == a_inv.data_ptr()
    assert attribute(library, "BIAS_POINTER") == (None if bias is None else bias.data_ptr())
    name, args = library.calls[-1]
    assert name == "cublasLtMatmul"
    handle, _, alpha, *matrices, algo, space, size, stream = args
    beta = matrices.pop(4)
    addresses, layouts = matrices[::2], matrices[1::2]
    assert (handle, stream) == (4711, 99)
    assert [ctypes.c_float.from_address(address).value for address in (alpha, beta)] == [1, 0]
    assert addresses == [tensor.data_ptr() for tensor in (b_t, a, out, out)]
    assert [library.layouts[layout][1:3] for layout in layouts] == [(128, 64), (128, 32), (64, 32), (64, 32)]
    assert ctypes.string_at(algo, 64) == algorithm.data
    assert size == num_bytes
    assert (space != 0) == (num_bytes > 0)


def test_a_failed_launch_raises(library):
    gemm = Gemm(CublasLt(library), KEY)
    library.statuses["cublasLtMatmul"] = NOT_SUPPORTED
    a, b_t, one = torch.zeros(32, 128).to(E5M2), torch.zeros(64, 128).to(E4M3), torch.ones(1)
    with pytest.raises(CublasLtError, match="cublasLtMatmul returned"):
        gemm.multiply(Algorithm(bytes(64), 0), a, one, b_t, one, None, torch.zeros(32, 64, dtype=torch.bfloat16))


def test_a_key_names_its_product_but_for_the_device():
    assert str(KEY) == "32x64x128 e5m2*e4m3->bf16 fast"
    assert str(KEY._replace(device=3, fast_accum=False, has_bias=True)) == "32x64x128 e5m2*e4m3->bf16 bias"


def test_the_structures_have_the_sizes_of_the_header():
    assert ctypes.sizeof(cublaslt.AlgorithmStruct) == 64
    assert ctypes.sizeof(cublaslt.HeuristicResult) == 96
    assert ctypes.sizeof(c_void_p) == cublaslt_gemm._POINTER_BYTES


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch is built with CUDA")
def test_without_cuda_there_is_no_library():
    with pytest.raises(CublasLtError, match="built without CUDA"):
        cublaslt.load()


def test_a_torch_that_has_not_loaded_it_is_told(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "1.0")
    with pytest.raises(CublasLtError, match=r"torch has not loaded a libcublasLt\.so\.1 "):
        cublaslt.load.__wrapped__()


def _headers() -> list[Path]:
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(root) for root in (spec.submodule_search_locations or ())] if spec is not None else []
    return [path for root in roots for name in ("cublasLt.h", "cublas_api.h", "library_types.h") for path in root.rglob(name)]


@pytest.mark.skipif(not any(path.name == "cublasLt.h" for path in _headers()), reason="cublasLt.h is not installed")
def test_names_and_values_are_those_of_the_headers():
    text = "\n".join(path.read_text() for path in _headers())
    values = {name: int(value) for name, value in re.findall(r"\b(CU\w+)\s*=\s*(\d+)", text)}
    found = {name: values[name] for name in CONSTANTS if name in values}
    assert found == {name: CONSTANTS[name] for name in found}
    assert {name for name in CONSTANTS if name.startswith("CUBLASLT")} <= set(found)
