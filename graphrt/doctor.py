"""`graphrt doctor`: versions, and what works on this machine, in a form to paste into a bug report.

The probes run in a child process. One that hangs or dies is named as such, and another child goes on with the rest.
"""

import contextlib
import getpass
import importlib.metadata
import json
import os
import platform
import queue
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from graphrt import __version__
from graphrt.probes import ABSENT, BROKEN, PROBES, WORKS

__all__ = ["Finding", "Findings", "examine", "find_all"]

_PROBE_TIMEOUT_S = 120.0  # a cold import of torch and a dozen compilations, on a slow machine
_EXIT_TIMEOUT_S = 5.0
_PACKAGES = (
    "torch", "cuda-core", "cuda-bindings", "cuda-pathfinder", "nvidia-cuda-nvrtc", "nvtx", "numpy", "triton", "typer", "rich",
    "matplotlib", "tensorboard", "transformers",
)  # fmt: skip
_PROGRAM = str(Path(__file__).with_name("probes.py"))
_PACKAGE_PARENT = str(Path(__file__).parent.parent)
_HEADINGS = {BROKEN: "Broken", WORKS: "Works here", ABSENT: "Not here"}


@dataclass(frozen=True)
class Finding:
    """What became of one probe."""

    name: str
    status: str  # "works", "absent" or "broken"
    fact: str
    remedy: str
    seconds: float

    def __str__(self) -> str:
        return f"- {self.name}: {self.fact}" + (f" {self.remedy}" if self.remedy else "")


@dataclass(frozen=True)
class Findings:
    """Everything that `graphrt doctor` found; prints as Markdown."""

    versions: dict[str, str]
    probes: list[Finding]

    @property
    def num_broken(self) -> int:
        """How many things that can be expected to work here do not."""
        return sum(probe.status == BROKEN for probe in self.probes)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**asdict(self), "num_broken": self.num_broken}

    def __str__(self) -> str:
        lines = ["### graphrt doctor", "", *(f"- {name}: {version}" for name, version in self.versions.items())]
        for status, heading in _HEADINGS.items():
            chosen = [probe for probe in self.probes if probe.status == status]
            if chosen:
                lines += ["", f"#### {heading}", "", *map(str, chosen)]
        return "\n".join(lines)


def examine(*, as_json: bool = False) -> int:
    """Examine this machine and print what was found; returns the exit code, 1 if something is broken."""
    findings = find_all()
    print(json.dumps(findings.to_dict(), indent=2) if as_json else findings)
    return 1 if findings.num_broken else 0


def find_all(names: Sequence[str] = tuple(PROBES), timeout_s: float = _PROBE_TIMEOUT_S) -> Findings:
    """Run the probes and collect versions; without the names of the user and of folders above the home.

    Args:
        names: which probes.
        timeout_s: for each, after which it is given up.
    """
    probes = [Finding(**{**line, "fact": _anonymous(line["fact"])}) for line in _run(list(names), timeout_s)]
    return Findings(_versions(), probes)


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "platform": platform.platform(), "graphrt": __version__}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return versions


def _run(names: list[str], timeout_s: float) -> Iterator[dict[str, Any]]:
    """The outcome of each probe, over as many child processes as it takes."""
    while names:
        num_done = 0
        for line in _run_child(names, timeout_s):
            num_done += 1
            yield line
        names = names[num_done:]


def _run_child(names: list[str], timeout_s: float) -> Iterator[dict[str, Any]]:
    """Outcomes in the order of ``names``, up to the first probe that hangs or takes the child down; at least one."""
    with _Child(names) as child:
        for name in names:
            line = child.wait_for_outcome(timeout_s)
            if line is None:
                yield _failed(name, f"It did not answer within {timeout_s:.0f} s and was given up.", timeout_s)
                return
            if not line:
                yield _failed(name, f"It took the process down: {child.describe_end()}", 0.0)
                return
            yield line


def _failed(name: str, fact: str, seconds: float) -> dict[str, Any]:
    return {"name": name, "status": BROKEN, "fact": fact, "remedy": "Report it with this text.", "seconds": seconds}


class _Child:
    """A process that runs probes. It is killed at the end of the block, and not waited for if even that takes long."""

    def __init__(self, names: list[str]) -> None:
        # A parity check on a GPU needs the setting before cuBLAS starts; what the user has set is a finding of its own.
        own = os.environ.get("CUBLAS_WORKSPACE_CONFIG", "")
        environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "GRAPHRT_DOCTOR_CUBLAS_WORKSPACE_CONFIG": own}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (_PACKAGE_PARENT, os.environ.get("PYTHONPATH"))))
        self._process = subprocess.Popen(
            # -P: the script's own folder holds modules named as others' packages are.
            [sys.executable, "-P", _PROGRAM, *names],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=environment,
        )
        self._lines: queue.Queue[dict[str, Any]] = queue.Queue()
        self._stderr: list[str] = []
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._readers = [
            threading.Thread(target=self._read_outcomes, args=(self._process.stdout,), daemon=True),
            threading.Thread(target=self._read_stderr, args=(self._process.stderr,), daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def __enter__(self) -> "_Child":
        return self

    def __exit__(self, *_exception: object) -> None:
        self._process.kill()
        self._wait()

    def wait_for_outcome(self, timeout_s: float) -> dict[str, Any] | None:
        """The next outcome; empty if the process has ended, None if it has not answered in time."""
        try:
            return self._lines.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def describe_end(self) -> str:
        """How the process ended: its exit code or signal, and the last line that it wrote to stderr."""
        self._wait()
        code = self._process.returncode
        end = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        return f"{end}. {' '.join(self._stderr[-1:]).strip()}".strip()

    def _wait(self) -> None:
        try:
            self._process.wait(timeout=_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return  # in the driver's hands; it goes when the driver lets it
        for reader in self._readers:
            reader.join(timeout=_EXIT_TIMEOUT_S)
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None and not any(reader.is_alive() for reader in self._readers):
                stream.close()

    def _read_outcomes(self, stdout: IO[str]) -> None:
        for text in stdout:
            with contextlib.suppress(ValueError):  # a line cut short by the process's end
                self._lines.put(json.loads(text))
        self._lines.put({})

    def _read_stderr(self, stderr: IO[str]) -> None:
        for text in stderr:
            self._stderr = [*self._stderr[-20:], text]


def _anonymous(text: str) -> str:
    """Without the home folder's path and the user's name in paths."""
    home = os.path.expanduser("~")
    if len(Path(home).parts) > 1:
        text = text.replace(home, "~")
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        return text
    return re.sub(rf"(?<=/){re.escape(user)}(?=/|\b)", "USER", text)
