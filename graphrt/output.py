"""A stream to print to that may go away: a closed pipe, a full disk, a terminal that was hung up."""

from typing import IO, Any, cast

from rich.console import Console

__all__ = ["Output", "console_on", "lost_output"]


class Output:
    """A stream whose first failure is kept, not raised: who prints may be in the middle of a step, or in a signal handler.

    Args:
        stream: where to write. After the failure nothing is written any more.
    """

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self.error: OSError | None = None

    def write(self, text: str) -> int:
        """Write, or do nothing."""
        if self.error is None:
            try:
                self._stream.write(text)
            except OSError as error:
                self.error = error
        return len(text)

    def flush(self) -> None:
        """Flush, or do nothing."""
        if self.error is None:
            try:
                self._stream.flush()
            except OSError as error:
                self.error = error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def console_on(stream: IO[str]) -> Console:
    """A console whose stream may go away."""
    return Console(file=cast(IO[str], Output(stream)))


def lost_output(console: Console) -> OSError | None:
    """Why the console's stream has gone away; None while it has not."""
    return console.file.error if isinstance(console.file, Output) else None
