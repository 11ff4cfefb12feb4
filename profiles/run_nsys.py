"""nsys around some steps of a preset, exported and summarized.

    python profiles/run_nsys.py --preset 1b --start 10 --stop 12 --out runs/nsys

Runs the steps twice: with the nodes of the graph in sight (node.nsys-rep), which slows replays of short kernels down, and with
each replay as one piece (graph.nsys-rep), whose times are those of an unwatched step. Prints the tables of summarize.py for both,
and draws its picture of the first (node.png).
"""

import argparse
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import summarize
from windowed_steps import add_job_options, job_command

MISSING = """nsys is not installed on this machine, or not in PATH.
It is NVIDIA Nsight Systems: package nsight-systems-cli of NVIDIA's apt and rpm repositories, or https://developer.nvidia.com/nsight-systems.
The one inside Nsight Compute will do too: put its folder host/target-linux-x64 in PATH. It needs libdw.so.1 (package libdw1, or elfutils).
Without it `graphrt profile` gives device time by module, direction and phase, kernels and gaps of replayed steps, but no timeline
of the host and of other libraries' ranges."""


def profile_command(trace: str, report: Path, job: Sequence[str]) -> list[str]:
    """nsys around ``job``, without samples of the CPU; ``trace`` is "node" or "graph"."""
    options = ["-t", "cuda,nvtx", "-s", "none", "--cpuctxsw=none", "-c", "cudaProfilerApi", "--capture-range-end=stop"]
    return ["nsys", "profile", *options, f"--cuda-graph-trace={trace}", "--force-overwrite=true", "-o", str(report.with_suffix("")), *job]


def export_command(report: Path) -> list[str]:
    """The report as SQLite, beside it."""
    return ["nsys", "export", "--type", "sqlite", "--force-overwrite=true", "-o", str(report.with_suffix(".sqlite")), str(report)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Profile, export, summarize."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_job_options(parser)
    parser.add_argument("--start", type=int, default=10, help="first step, from 1; captured ones are from 4 on (default: %(default)s)")
    parser.add_argument("--stop", type=int, default=12, help="last step (default: %(default)s)")
    parser.add_argument("--trace", choices=("node", "graph", "both"), default="both", help="how replays are seen (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("runs/nsys"), help="folder of the reports (default: %(default)s)")
    options = parser.parse_args(arguments)
    if shutil.which("nsys") is None:
        print(MISSING, file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    for trace in ("node", "graph") if options.trace == "both" else (options.trace,):
        job = job_command(options, options.start, options.stop, options.out / "node_map.json" if trace == "node" else None)
        report = options.out / f"{trace}.nsys-rep"
        for command in (profile_command(trace, report, job), export_command(report)):
            done = subprocess.run(command, check=False)
            if done.returncode:
                print(f"{' '.join(command[:2])} failed with exit code {done.returncode}; what it said is above.", file=sys.stderr)
                return done.returncode
        print(f"\n== {report}")
        picture = ["--plot", str(report.with_suffix(".png"))] if trace == "node" else []
        if summarize.main([str(report.with_suffix(".sqlite")), *picture]):
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
