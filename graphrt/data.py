"""Tokens to train on: text as bytes, or a file of token numbers, split and sampled so that a run can be repeated.

Nothing is read into memory that need not be: one file stays memory-mapped, and a batch copies only its own windows.
"""

import functools
import glob
import os
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from graphrt.settings import InputError, is_settings_file

__all__ = ["Corpus", "Split", "load_default_text", "load_text", "load_tokens", "sample_windows", "split_corpus", "validation_windows"]

Tokens = NDArray[Any]  # 1-d, unsigned integers; a memmap or an array
Windows = tuple[NDArray[np.int64], NDArray[np.int64]]  # tokens and labels, both [num_windows, seq_len]

NUM_BYTE_VALUES = 256
_CHUNK = 1 << 24  # tokens looked at together in one pass over a file
_SAMPLE = 1 << 20  # tokens from each end that identify a corpus
_VALIDATION_FRACTION = 0.1
_MAX_VALIDATION_TOKENS = 1 << 22
_BINARY_PROBE = 8000  # bytes in which a NUL makes a file binary, as git has it
_MAX_PATTERNS_SHOWN = 3


@dataclass(frozen=True)
class Corpus:
    """A sequence of tokens and where it comes from."""

    tokens: Tokens
    num_symbols: int  # tokens are 0 .. num_symbols - 1
    source: str
    is_bytes: bool
    left_out: str = ""  # what a directory or a pattern matched beside text, as a phrase; empty for nothing

    def fingerprint(self) -> str:
        """A short text that changes when the corpus does: its length and a checksum of both ends."""
        ends = np.concatenate((self.tokens[:_SAMPLE], self.tokens[-_SAMPLE:]))
        return f"{len(self.tokens)} tokens, crc32 {zlib.crc32(ends.tobytes()):08x}"


@dataclass(frozen=True)
class Split:
    """The first part to train on, the rest to validate on."""

    train: Tokens
    validation: Tokens


def load_default_text() -> Corpus:
    """The documentation that ships with CPython (`help("topics")`): about half a megabyte of English and Python."""
    from pydoc_data.topics import topics

    text = "\n".join(topics[name] for name in sorted(topics))
    return Corpus(np.frombuffer(text.encode(), dtype=np.uint8), NUM_BYTE_VALUES, "CPython's documentation topics", True)


def load_text(patterns: Sequence[str], run_folder: Path | None = None) -> Corpus:
    """Files as bytes, one after the other.

    Args:
        patterns: file names, glob patterns (``**`` too), or directories, whose files are taken recursively in sorted
            order without hidden ones. What a run wrote and binary files are taken only where they are named.
        run_folder: where this run writes, whether it has begun or not.

    Raises:
        InputError: nothing matches, or a file is empty or cannot be read.
    """
    expansion = _Expansion(run_folder)
    parts: dict[Path, Tokens] = {}
    for pattern in patterns:
        for file in expansion.files(pattern):
            if file not in parts:
                parts[file] = _map_file(file, np.dtype(np.uint8), "Give a file, a directory or a glob pattern.")
    tokens = next(iter(parts.values())) if len(parts) == 1 else np.concatenate(list(parts.values()))
    source = str(next(iter(parts))) if len(parts) == 1 else f"{len(parts)} files from {_shorten(patterns)}"
    return Corpus(tokens, NUM_BYTE_VALUES, source, True, expansion.left_out)


def load_tokens(file: str, dtype: str, vocab: int) -> Corpus:
    """A file of bare token numbers in little-endian order, memory-mapped.

    Args:
        file: its name.
        dtype: "uint16" or "uint32"; "auto" is uint16 when every token of the vocabulary fits in it, else uint32.
        vocab: tokens must lie below this. All are checked, in one pass.

    Raises:
        InputError: the file is missing or empty, its size is no multiple of the token's, or a token is out of range.
    """
    name = dtype if dtype != "auto" else "uint16" if vocab <= 1 << 16 else "uint32"
    tokens = _map_file(Path(file), np.dtype(name).newbyteorder("<"), "Give --tokens one file of token numbers.")
    for start in range(0, len(tokens), _CHUNK):
        _check_range(file, start, tokens[start : start + _CHUNK], vocab, name)
    return Corpus(tokens, vocab, file, False)


def split_corpus(corpus: Corpus, seq_len: int) -> Split:
    """The last tenth (at most 4 Mi tokens, at least one sequence) for validation, everything before it for training.

    Raises:
        InputError: one of the two parts would be shorter than one sequence and its next token.
    """
    num_tokens, needed = len(corpus.tokens), seq_len + 1
    num_validation = max(needed, min(int(num_tokens * _VALIDATION_FRACTION), _MAX_VALIDATION_TOKENS))
    if num_tokens - num_validation < needed:
        raise InputError(
            f"There are {num_tokens} tokens in {corpus.source}, but sequences of {seq_len} need at least {2 * needed}: one to train on, "
            "one to validate on. Give more text, or a smaller --seq-len."
        )
    return Split(corpus.tokens[:-num_validation], corpus.tokens[-num_validation:])


def sample_windows(tokens: Tokens, seq_len: int, batch_size: int, seed: int, step: int) -> Windows:
    """The batch of one step: a function of (seed, step) alone, so that a resumed run sees the same batches.

    Returns:
        tokens and labels (the next tokens), int64 [batch_size, seq_len], from places drawn uniformly.
    """
    starts = np.random.default_rng((seed, step)).integers(0, len(tokens) - seq_len, size=batch_size)
    return _cut(tokens, starts, seq_len)


def validation_windows(tokens: Tokens, seq_len: int, max_tokens: int) -> Windows:
    """Windows side by side, spread evenly over the text when there are more than max_tokens; at least one.

    Returns:
        tokens and labels, int64 [num_windows, seq_len].
    """
    num_possible = (len(tokens) - 1) // seq_len
    num_windows = max(1, min(num_possible, max_tokens // seq_len))
    return _cut(tokens, np.arange(num_windows) * num_possible // num_windows * seq_len, seq_len)


def _cut(tokens: Tokens, starts: Iterable[int], seq_len: int) -> Windows:
    windows = np.stack([tokens[start : start + seq_len + 1] for start in starts]).astype(np.int64)
    return windows[:, :-1], windows[:, 1:]


class _Expansion:
    """From patterns to files. What is named is taken as it is; what a directory or a pattern brings has to be text, and no run's own.

    A run's own files would change under the run, which could then not be resumed.
    """

    def __init__(self, run_folder: Path | None) -> None:
        self._run_folder = run_folder and run_folder.resolve()
        self._in_run: set[Path] = set()
        self._binary: set[Path] = set()
        self._is_of_run = functools.cache(self._look_for_run)

    @property
    def left_out(self) -> str:
        """What was matched and left out, as a phrase; empty for nothing."""
        counts = ((len(self._in_run), "in run folders"), (len(self._binary), "binary"))
        return " and ".join(f"{number} {what}" for number, what in counts if number)

    def files(self, pattern: str) -> list[Path]:
        """The files a pattern stands for."""
        path = Path(pattern).expanduser()
        if path.is_dir():
            matches = _visible_files(path)
        elif path.exists() or not glob.has_magic(pattern):
            return [path]
        else:
            matches = [Path(match) for match in sorted(glob.glob(str(path), recursive=True))]
        found = [match for match in matches if match.is_file() and match.stat().st_size > 0]
        files = [file for file in found if self._is_wanted(file)]
        if found and not files:
            raise InputError(f"--text {pattern} matches no text, but files left out: {self.left_out}. Name a file itself to train on it.")
        if not files:
            raise InputError(f"--text {pattern} matches no file with anything in it. Check the name, and quote the pattern.")
        return files

    def _is_wanted(self, file: Path) -> bool:
        if self._is_of_run(file.parent.resolve()):
            self._in_run.add(file)
        elif _is_binary(file):
            self._binary.add(file)
        else:
            return True
        return False

    def _look_for_run(self, folder: Path) -> bool:
        if folder == self._run_folder or is_settings_file(folder / "settings.json"):
            return True
        return folder.parent != folder and self._is_of_run(folder.parent)


def _is_binary(file: Path) -> bool:
    try:
        with open(file, "rb") as opened:
            return b"\0" in opened.read(_BINARY_PROBE)
    except OSError:
        return False  # whoever reads it says why it cannot be


def _shorten(patterns: Sequence[str]) -> str:
    """The first patterns, those below the working directory as they are seen from it."""
    here = os.getcwd() + os.sep
    shown = [pattern.removeprefix(here) for pattern in patterns[:_MAX_PATTERNS_SHOWN]]
    return ", ".join(shown + ["..."] * (len(patterns) > len(shown)))


def _visible_files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if not any(part.startswith(".") for part in path.relative_to(directory).parts))


def _map_file(file: Path, dtype: np.dtype[Any], remedy: str) -> Tokens:
    try:
        size_bytes = file.stat().st_size
        if not file.is_file():
            raise InputError(f"{file} is {'a directory' if file.is_dir() else 'not a regular file'}. {remedy}")
        if size_bytes == 0:
            raise InputError(f"{file} is empty. Give a file with text or tokens in it.")
        if size_bytes % dtype.itemsize:
            raise InputError(
                f"{file} has {size_bytes} bytes, which is no multiple of {dtype.name}'s {dtype.itemsize}. "
                "Check that the file is complete, or give its --token-dtype."
            )
        return np.memmap(file, dtype=dtype, mode="r")
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror}. Check the name and the permissions.") from error


def _check_range(file: str, start: int, chunk: Tokens, vocab: int, dtype_name: str) -> None:
    if chunk.max() < vocab:
        return
    position = int(np.argmax(chunk >= vocab))
    raise InputError(
        f"{file} has token {chunk[position]} at position {start + position} (read as {dtype_name}), but the vocabulary has {vocab}. "
        "Give the tokenizer's size with --vocab-size, or the file's --token-dtype."
    )
