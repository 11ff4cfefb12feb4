"""ncu over the kernels of a layer in one replayed step.

    python profiles/run_ncu.py --preset 1b --module blocks.3 --direction backward --out runs/ncu

ncu cannot filter by layer, but by a kernel's name, so the node map of the captured step (saved by a run before, without ncu)
gives the names. Other layers run the same kernels: ncu numbers its results in the order of the replay, and the list printed
at the end says which number is of which module; those that were asked for are marked. Forward and backward of a layer are far
apart in a step, with the same kernels of other layers between, so each has a run of its own. Kernels that the map says are
beside the others may have been run earlier or later than the list has them.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from windowed_steps import add_job_options, job_command

MISSING = """ncu is not installed on this machine, or not in PATH.
It is NVIDIA Nsight Compute: part of the CUDA toolkit (package nsight-compute), or https://developer.nvidia.com/nsight-compute.
Without it `graphrt profile` gives each kernel's time, but no counters of the hardware."""

Node = dict[str, Any]


def is_wanted(node: Node, module: str, direction: str | None) -> bool:
    """Whether a node is a kernel of ``module`` or a submodule, in ``direction`` or any."""
    is_inside = module == "" or node["module"] == module or node["module"].startswith(f"{module}.")
    return node["kind"] == "kernel" and is_inside and direction in (None, node["direction"])


def name_filter(wanted: Sequence[Node]) -> str:
    """ncu's filter for the kernels of these nodes."""
    return f"regex:^({'|'.join(sorted({re.escape(node['kernel']) for node in wanted}))})$"


@dataclass(frozen=True)
class Selection:
    """What ncu profiles: kernels of some names, from one to another of those in the replay."""

    num_before: int  # of these names, before the first that is wanted
    nodes: list[Node]  # the i-th is ncu's result i


def select(nodes: Sequence[Node], wanted: Sequence[Node]) -> Selection:
    """The shortest run of kernels, among those that pass `name_filter`, with all that are wanted."""
    named = _named(nodes, wanted)
    places = [place for place, node in enumerate(named) if any(node is one for one in wanted)]
    return Selection(places[0], named[places[0] : places[-1] + 1])


def by_direction(wanted: Sequence[Node]) -> dict[str, list[Node]]:
    """The nodes of each run of ncu, by what the report is called."""
    groups: dict[str, list[Node]] = {}
    for node in wanted:
        groups.setdefault(node["direction"], []).append(node)
    return {"step" if len(groups) == 1 else f"step-{direction or 'other'}": group for direction, group in groups.items()}


def _named(nodes: Sequence[Node], wanted: Sequence[Node]) -> list[Node]:
    names = {node["kernel"] for node in wanted}
    return [node for node in nodes if node["kind"] == "kernel" and node["kernel"] in names]


def profile_command(report: Path, kernels: str, selection: Selection, sections: str, job: Sequence[str]) -> list[str]:
    """ncu around ``job``, which turns the profiler on for one step."""
    window = ["--profile-from-start", "off", "--graph-profiling", "node"]
    launches = ["--launch-skip", str(selection.num_before), "--launch-count", str(len(selection.nodes))]
    names = ["--kernel-name-base", "mangled", "--kernel-name", kernels, *launches]
    return ["ncu", *window, *names, "--set", sections, "--force-overwrite", "-o", str(report), *job]


def main(arguments: Sequence[str] | None = None) -> int:
    """Find the layer's kernels, profile them, say which result is which."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_job_options(parser)
    parser.add_argument("--module", default="", help="name of a module; its submodules are in it (default: all)")
    parser.add_argument("--direction", choices=("forward", "backward", "recompute"), help="(default: all)")
    parser.add_argument("--step", type=int, default=5, help="a replayed step, so from 4 on (default: %(default)s)")
    parser.add_argument("--set", dest="sections", default="basic", help="ncu's set of sections (default: %(default)s)")
    parser.add_argument("--node-map", type=Path, help="one saved before; default: run the steps once to save one")
    parser.add_argument("--out", type=Path, default=Path("runs/ncu"), help="folder of the report (default: %(default)s)")
    options = parser.parse_args(arguments)
    if shutil.which("ncu") is None:
        print(MISSING, file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    node_map = options.node_map or options.out / "node_map.json"
    if options.node_map is None:
        subprocess.run(job_command(options, options.step, options.step, node_map), check=True)
    try:
        nodes = json.loads(node_map.read_text(encoding="utf-8"))
        wanted = [node for node in nodes if is_wanted(node, options.module, options.direction)]
    except (OSError, ValueError, TypeError, KeyError) as error:
        print(f"{node_map} is no node map: {error!r}. Leave --node-map out to save one.", file=sys.stderr)
        return 2
    if not wanted:
        print(f"No kernel of the node map is in module {options.module!r}. See the names in {node_map}.", file=sys.stderr)
        return 2
    job = job_command(options, options.step, options.step)
    for name, group in by_direction(wanted).items():
        selection = select(nodes, group)
        command = profile_command(options.out / name, name_filter(group), selection, options.sections, job)
        done = subprocess.run(command, check=False)
        if done.returncode:
            return done.returncode
        for number, node in enumerate(selection.nodes):
            mark = "*" if node in group else " "
            print(f"{mark} {number:5}  {node['direction']:10} {node['module'] or '-':40} {node['kernel'][:80]}")
        report = options.out / f"{name}.ncu-rep"
        print(f"Open {report}, or: ncu --import {report} --page details", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
