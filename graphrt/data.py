"""Tokens to train on: text as bytes, or a file of token numbers, split and sampled so that a run can be repeated.

Nothing is read into memory that need not be: one file stays memory-mapped, and a batch copies only its own windows.
"""

import glob
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from graphrt.settings import InputError

__all__ = ["Corpus", "Split", "load_default_text", "load_text", "load_tokens", "sample_windows", "split_corpus", "validation_windows"]

Tokens = NDArray[Any]  # 1-d, unsigned integers; a memmap or an array
Windows = tuple[NDArray[np.int64], NDArray[np.int64]]  # tokens and labels, both [num_windows, seq_len]

NUM_BYTE_VALUES = 256
_CHUNK = 1 << 24  # tokens looked at together in one pass over a file
_SAMPLE = 1 << 20  # tokens from each end that identify a corpus
_VALIDATION_FRACTION = 0.1
_MAX_VALIDATION_TOKENS = 1 << 22


@dataclass(frozen=True)
class Corpus:
    """A sequence of tokens and where it comes from."""

    tokens: Tokens
    num_symbols: int  # tokens are 0 .. num_symbols - 1
    source: str
    is_bytes: bool

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


def load_text(patterns: Sequence[str]) -> Corpus:
    """Files as bytes, one after the other.

    Args:
        patterns: file names, glob patterns (``**`` too), or directories, whose files are taken recursively in sorted
            order without hidden ones.

    Raises:
        InputError: nothing matches, or a file is empty or cannot be read.
    """
    files = list(dict.fromkeys(file for pattern in patterns for file in _expand(pattern)))
    parts = [_map_file(file, np.dtype(np.uint8)) for file in files]
    tokens = parts[0] if len(parts) == 1 else np.concatenate(parts)
    source = str(files[0]) if len(files) == 1 else f"{len(files)} files from {', '.join(patterns)}"
    return Corpus(tokens, NUM_BYTE_VALUES, source, True)


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
    tokens = _map_file(Path(file), np.dtype(name).newbyteorder("<"))
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
            f"{corpus.source} holds {num_tokens} tokens, but sequences of {seq_len} need at least {2 * needed}: one to train on, one to "
            "validate on. Give more text, or a smaller --seq-len."
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


def _expand(pattern: str) -> Iterator[Path]:
    path = Path(pattern).expanduser()
    if path.is_dir():
        yield from _nonempty_files(pattern, _visible_files(path))
    elif path.exists() or not glob.has_magic(pattern):
        yield path
    else:
        yield from _nonempty_files(pattern, (Path(match) for match in sorted(glob.glob(str(path), recursive=True))))


def _visible_files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if not any(part.startswith(".") for part in path.relative_to(directory).parts))


def _nonempty_files(pattern: str, paths: Iterable[Path]) -> list[Path]:
    files = [path for path in paths if path.is_file() and path.stat().st_size > 0]
    if not files:
        raise InputError(f"--text {pattern} matches no file with anything in it. Check the name, and quote the pattern.")
    return files


def _map_file(file: Path, dtype: np.dtype[Any]) -> Tokens:
    try:
        size_bytes = file.stat().st_size
        if not file.is_file():
            raise InputError(f"{file} is not a regular file. Give a file, a directory or a glob pattern.")
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
