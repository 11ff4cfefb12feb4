"""The baseline a language model has to beat: how likely a token is after the one before it, counted on the same text."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["bigram_loss"]

_SMOOTHINGS = (1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001)
_HELD_OUT_FRACTION = 0.1
_MAX_TRAIN_TOKENS = 1 << 25  # counting more takes long and changes little
_CHUNK = 1 << 22


def bigram_loss(train: NDArray[Any], tokens: NDArray[np.int64], labels: NDArray[np.int64], num_symbols: int) -> float:
    """Mean loss in nats per token of p(b | a) = (count(a, b) + s) / (count(a) + s * num_symbols).

    The smoothing s is the one that does best on the last tenth of train when counted on the rest.

    Args:
        train: 1-d, the text to count on; of a longer one, the first 32 Mi tokens.
        tokens: what comes before, any shape.
        labels: what is predicted, same shape.
        num_symbols: number of possible tokens.
    """
    train = train[:_MAX_TRAIN_TOKENS]
    num_counted = len(train) - int(len(train) * _HELD_OUT_FRACTION)
    held_out = train[num_counted:].astype(np.int64)
    counts = _count(train[:num_counted], held_out[:-1], held_out[1:], num_symbols)
    smoothing = min(_SMOOTHINGS, key=lambda s: _loss(*counts, s, num_symbols))
    return _loss(*_count(train, tokens.ravel(), labels.ravel(), num_symbols), smoothing, num_symbols)


def _loss(pair_counts: NDArray[np.int64], first_counts: NDArray[np.int64], smoothing: float, num_symbols: int) -> float:
    if not len(pair_counts):
        return 0.0
    return float(-np.log((pair_counts + smoothing) / (first_counts + smoothing * num_symbols)).mean())


def _count(
    train: NDArray[Any], first: NDArray[np.int64], second: NDArray[np.int64], num_symbols: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """How often train has each pair (first[i], second[i]), and how often first[i] before anything."""
    # Only pairs that are asked for are counted: a table of all would have num_symbols ** 2 entries.
    wanted, place = np.unique(first * num_symbols + second, return_inverse=True)
    pair_counts = np.zeros(len(wanted), dtype=np.int64)
    first_counts = np.zeros(num_symbols, dtype=np.int64)
    for start in range(0, len(train) - 1, _CHUNK):
        chunk = train[start : start + _CHUNK + 1].astype(np.int64)
        first_counts += np.bincount(chunk[:-1], minlength=num_symbols)
        pair_counts += _count_wanted(chunk[:-1] * num_symbols + chunk[1:], wanted)
    return pair_counts[place], first_counts[first]


def _count_wanted(pairs: NDArray[np.int64], wanted: NDArray[np.int64]) -> NDArray[np.int64]:
    if not len(wanted):
        return np.zeros(0, dtype=np.int64)
    place = np.searchsorted(wanted, pairs).clip(max=len(wanted) - 1)
    return np.bincount(place[wanted[place] == pairs], minlength=len(wanted))
