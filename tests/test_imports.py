"""Imports point one way, and importing graphrt asks for neither a GPU nor much time."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import graphrt

PACKAGE = Path(graphrt.__file__).parent

#: Layers from the ground up; a module imports from layers below its own, or from its own where that is a package.
LAYERS = (
    ("errors", "ranges", "owners", "aside", "saved"),
    ("recipe", "guards", "recompute", "sinks"),
    ("kernels", "module_ranges", "nsys"),
    ("state",),
    ("region",),
    ("linear", "checkpoint"),
    ("convert", "nn", "batch", "optimizer", "snapshot"),
    ("step",),
    ("checkpointing",),
    ("capture", "eager"),
    ("report", "profiling"),
    ("trainer",),
    ("parity", "check"),
)
#: What may be imported beside lower layers: nothing of graphrt but what stands here.
ONLY = {
    "errors": set(),
    "recipe": {"errors"},
    "guards": {"errors"},
    "recompute": {"errors"},
    "module_ranges": {"guards", "ranges"},
    "nsys": {"errors", "ranges"},
    "kernels": {"errors", "recipe", "guards"},
    "checkpoint": {"recompute"},
}
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def unit(module: str) -> str:
    """The first name below graphrt: a module, or a subpackage as a whole."""
    return module.split(".")[1] if "." in module else module


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """(unit imported, line), those inside functions and under TYPE_CHECKING included."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "graphrt":
                    yield unit(alias.name), node.lineno
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.module.split(".")[0] == "graphrt":
            names = [node.module] if node.module != "graphrt" else [f"graphrt.{alias.name}" for alias in node.names]
            for name in names:
                yield unit(name), node.lineno
        else:
            assert not (isinstance(node, ast.ImportFrom) and node.level), f"{path}:{node.lineno} is a relative import"


def files() -> list[tuple[str, Path]]:
    return [(path.relative_to(PACKAGE).with_suffix("").parts[0], path) for path in sorted(PACKAGE.rglob("*.py"))]


LAYERED = [(name, path) for name, path in files() if name in LEVEL]
#: The main job and the command line stand on top of all.
APPLICATION = {name for name, _ in files()} - set(LEVEL) - {"__init__"}


@pytest.mark.parametrize(("name", "path"), LAYERED, ids=[str(path.relative_to(PACKAGE)) for _, path in LAYERED])
def test_a_module_imports_only_from_below(name, path):
    for imported, line in imports(path):
        if imported == name:
            assert (PACKAGE / name).is_dir()
            continue
        assert imported in LEVEL, f"{path.name}:{line} imports {imported}, which stands above the layers"
        assert LEVEL[imported] < LEVEL[name], f"{path.name}:{line} imports {imported}"
        assert imported in ONLY.get(name, {imported}), f"{path.name}:{line} imports {imported}"


def test_the_ground_layers_exist():
    assert {"errors", "recipe", "guards", "recompute", "kernels", "state", "region", "linear", "convert", "eager"} <= {
        name for name, _ in LAYERED
    }


def test_capture_and_eager_never_import_each_other():
    for name, other in (("capture", "eager"), ("eager", "capture")):
        for unit_name, path in files():
            if unit_name == name:
                assert other not in [imported for imported, _ in imports(path)], path


def test_nothing_below_the_application_imports_it():
    for name, path in files():
        if name not in APPLICATION:
            assert not APPLICATION & {imported for imported, _ in imports(path)}, path


SCRIPT = """
import sys, time
start = time.process_time()
import torch
torch_s = time.process_time() - start
start = time.process_time()
import graphrt
own_s = time.process_time() - start
assert not torch.cuda.is_initialized()
heavy = [name for name in ("triton", "matplotlib", "rich", "typer", "cuda.core", "torch._dynamo.convert_frame") if name in sys.modules]
print(own_s, ",".join(heavy))
"""


@pytest.mark.slow
def test_importing_works_without_a_gpu_and_costs_under_2_s_beyond_torch():
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-W", "error", "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    own_s, _, heavy = done.stdout.strip().partition(" ")
    assert float(own_s) < 2.0, f"{own_s} s of CPU time; loaded: {heavy}"


def test_every_public_name_exists_once():
    assert len(set(graphrt.__all__)) == len(graphrt.__all__)
    assert all(hasattr(graphrt, name) for name in graphrt.__all__)
    contract = (
        "DelayedScaling Format convert_to_float8_training convert_from_float8_training quantization_state fp8_autocast checkpoint "
        "mark_forward recompute_phase Trainer GraphrtError CaptureError StaticInputError FlushError ParityError RecipeError"
    )
    assert set(contract.split()) <= set(graphrt.__all__)
