"""The program `graphrt`: a Ctrl-C while torch is imported, which takes seconds, ends it with one line.

It stands beside the package because importing anything of the package imports torch.
"""

import os
import signal
from types import FrameType

__all__ = ["main"]

_ABORT_EXIT_CODE = 130


def main() -> int:
    """Run the command line; returns the exit code."""
    previous = signal.getsignal(signal.SIGINT)
    # Where the signal is ignored, as for a shell's background jobs, it stays so.
    if previous is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)
    from graphrt.cli import main as run

    signal.signal(signal.SIGINT, previous)
    return run()


def _leave(_signum: int, _frame: FrameType | None) -> None:
    # An exception would come out of the middle of an import, some of which turn it into another.
    os.write(2, b"\ngraphrt: Stopped by Ctrl-C.\n")
    os._exit(_ABORT_EXIT_CODE)
