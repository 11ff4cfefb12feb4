"""Host time of entering and leaving one range, beside an empty block and what nvtx offers.

    python profiles/range_cost.py

The best of several rounds, the empty loop taken off. Without a profiler in the process NVTX is off; run the script under one
to see what it costs then.
"""

import argparse
from contextlib import nullcontext
from timeit import Timer

import nvtx

from graphrt.ranges import OPTIMIZER, STEP, listening

ENTRIES, ROUNDS = 1_000, 300  # short rounds, so that some of them run undisturbed on a busy machine
STATEMENTS = {
    "an empty block": "with empty: pass",
    "a range": "with OPTIMIZER: pass",
    "a numbered range": "with STEP.numbered(1000): pass",
    "nvtx.annotate": "with nvtx.annotate('optimizer', domain='graphrt'): pass",
}


class Silent:
    """A listener that does nothing."""

    def enter_range(self, name: str) -> None:
        """Hear an entry."""

    def exit_range(self, name: str) -> None:
        """Hear an exit."""


def best_ns(statement: str) -> float:
    """Nanoseconds of one run of ``statement``, the loop around it included."""
    timer = Timer(statement, globals={"OPTIMIZER": OPTIMIZER, "STEP": STEP, "nvtx": nvtx, "empty": nullcontext()})
    return min(timer.repeat(ROUNDS, ENTRIES)) / ENTRIES * 1e9


def main() -> None:
    """Print a line a kind of range."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print(f"NVTX is {'off' if OPTIMIZER._attributes is None else 'on: a profiler is loaded'}")
    loop = best_ns("pass")
    for name, statement in STATEMENTS.items():
        print(f"{name:28} {best_ns(statement) - loop:7.0f} ns")
    with listening(Silent()):
        print(f"{'a range and one listener':28} {best_ns(STATEMENTS['a range']) - loop:7.0f} ns")


if __name__ == "__main__":
    main()
