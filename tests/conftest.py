"""What every test needs: one thread, no region left open, and GPU tests only where there is a capable GPU."""

import os

import hypothesis
import pytest
import torch

from graphrt import recompute, region

# The same examples each time, so that a red run means a change; HYPOTHESIS_PROFILE=explore looks for new ones.
hypothesis.settings.register_profile("same", derandomize=True, deadline=None)
hypothesis.settings.register_profile("explore", deadline=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))

# What bitwise comparisons need on CUDA; read when the first cuBLAS handle is made.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

# An algorithm chosen by a clock may be another one in the next run; the tests of it turn it on.
os.environ.setdefault("GRAPHRT_GEMM_CHOICES", "off")

_MIN_CAPABILITY = (8, 9)


def _reason_without_gpu() -> str | None:
    if not torch.cuda.is_available():
        return "no CUDA device"
    if torch.cuda.get_device_capability() < _MIN_CAPABILITY:
        return "the CUDA device has no FP8 (compute capability 8.9 or later)"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = _reason_without_gpu()
    for item in items:
        if reason is not None and "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    """The tensors of the tests are slower on several, and sums over them would depend on the number."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _nothing_left_open():
    yield
    open_regions, open_phases = list(region._stack), list(recompute._phases)
    region._stack.clear()
    recompute._phases.clear()
    assert not open_regions, "the test left a region open"
    assert not open_phases, "the test left a recompute phase open"


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)
