"""A tokenised text with a training and a validation split, and the windows that are read from it."""

from __future__ import annotations

import operator
from dataclasses import dataclass

import numpy as np

from repro.data.random_words import Purpose, RandomWords, scale_to_range
from repro.data.token_shards import TokenShards, gather_windows
from repro.errors import ReproError


@dataclass(frozen=True, eq=False)
class Corpus:
    """A sequence of tokens: training split `[0, validation_start)`, validation split `[validation_start, end)`.

    A window of length T is T + 1 consecutive tokens: inputs `window[:-1]`, targets `window[1:]`. It lies in one split,
    its last target included. Windows hold uint16, or uint32 where `vocab_size` is above 65,536.

    Attributes:
      name: short name for tables and figures.
      tokens: 1-D unsigned integers: an array, a memory map, or `TokenShards` over several of them.
      vocab_size: number of token ids; every token is smaller.
      sha256: hex digest that identifies the tokens.
      provenance: where the tokens come from, in a sentence.
      validation_start: index of the first validation token.
      entropy_floor: nats per token that no predictor of a stated kind can beat, where known; see `repro.data.mkv2`.
      hash_scope: what `sha256` was taken over.
    """

    name: str
    tokens: np.ndarray | TokenShards
    vocab_size: int
    sha256: str
    provenance: str
    validation_start: int
    entropy_floor: dict[str, float] | None = None
    hash_scope: str = "every token"

    def __post_init__(self):
        if getattr(self.tokens, "ndim", 1) != 1 or self.tokens.dtype.kind != "u" or self.tokens.dtype.itemsize > 4:
            raise ReproError(f"The tokens of {self.name} must be a 1-D array of uint8, uint16 or uint32.")
        if not 0 <= self.validation_start <= len(self.tokens):
            raise ReproError(
                f"The validation split of {self.name} starts at {self.validation_start} but must start within its "
                f"{len(self.tokens)} tokens."
            )

    def batch(self, seed, step, *, batch_size, length):
        """The training batch of one seed at one step.

        A pure function of the arguments: no state to save, and a resumed run sees the batches it would have seen.
        Starts are independent and uniform over the training split, with replacement. A larger batch begins with the
        rows of a smaller one.

        Args:
          seed, step: ints in `[0, 2**64)`.
          batch_size: B, windows.
          length: T, tokens that are predicted per window.

        Returns:
          uint16 (uint32) `[B, T+1]`.

        Raises:
          ReproError: the training split has fewer than T + 2 tokens, or an argument is out of range.
        """
        return self.batches([seed], [step], batch_size=batch_size, length=length)[0, 0]

    def batches(self, seeds, steps, *, batch_size, length):
        """The batches of W seeds at S steps in one array; `[s, w]` equals `batch(seeds[w], steps[s])`.

        Args:
          seeds: sequence of W ints.
          steps: range (or sequence) of S ints.
          batch_size: B, windows.
          length: T, tokens that are predicted per window.

        Returns:
          uint16 (uint32) `[S, W, B, T+1]`.

        Raises:
          ReproError: as for `batch`.
        """
        batch_size = _positive("batch_size", batch_size)
        window_count = self._window_count("training", self.validation_start, length)
        words = RandomWords(Purpose.WINDOWS)
        drawn_SWB = np.empty((len(steps), len(seeds), batch_size), np.uint64)
        for row, step in enumerate(steps):
            for column, seed in enumerate(seeds):
                drawn_SWB[row, column] = words.draw(seed, step, batch_size)
        return self._read(scale_to_range(drawn_SWB, window_count), length)

    def validation(self, count, length):
        """`count` evenly spaced validation windows, the same for every seed.

        The first window begins the split and, from two windows on, the last one ends it.

        Args:
          count: number of windows.
          length: T, tokens that are predicted per window.

        Returns:
          uint16 (uint32) `[count, T+1]`.

        Raises:
          ReproError: the validation split has fewer than T + 2 tokens or fewer than `count` different windows.
        """
        count = _positive("count", count)
        window_count = self._window_count("validation", len(self.tokens) - self.validation_start, length)
        if count > window_count:
            raise ReproError(
                f"{self.name} has {window_count} different validation windows of length {length} but {count} were "
                "asked for: ask for fewer or use a longer text."
            )
        offsets = np.arange(count, dtype=np.int64) * (window_count - 1) // max(count - 1, 1)
        return self._read(self.validation_start + offsets, length)

    def _window_count(self, split, tokens, length):
        length = _positive("length", length)
        if tokens < length + 2:
            raise ReproError(
                f"The {split} split of {self.name} has {tokens} tokens but windows of length {length} need at least "
                f"{length + 2}: use a longer text or a shorter length."
            )
        return tokens - length

    def _read(self, starts, length):
        dtype = np.uint16 if self.vocab_size <= 2**16 else np.uint32
        return gather_windows(self.tokens, starts, length + 1).astype(dtype, copy=False)


def split_last_twentieth(token_count):
    """Index of the first validation token when the last 5 % (rounded down) is kept for validation."""
    return token_count - token_count // 20


def _positive(name, value):
    try:
        number = operator.index(value)
    except TypeError:
        number = 0
    if number < 1:
        raise ReproError(f"{name} is {value!r} but must be a whole number of at least 1.")
    return number
