"""Several token arrays read as one sequence, without joining them in memory."""

import operator

import numpy as np


class TokenShards:
    """One read-only sequence over arrays that may be memory-mapped.

    `len`, an integer index and a slice of step 1 work as on a NumPy array (a slice is copied); `np.asarray` reads
    everything into memory.

    Args:
      parts: 1-D arrays of one dtype, in order, none of them empty.
    """

    def __init__(self, parts):
        self.parts = tuple(parts)
        self.dtype = self.parts[0].dtype
        self._ends = np.cumsum([len(part) for part in self.parts])
        self._starts = self._ends - [len(part) for part in self.parts]

    def __len__(self):
        return int(self._ends[-1])

    def __getitem__(self, index):
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step != 1:
                raise IndexError("token shards are sliced with step 1 only")
            return self._read(start, max(start, stop))
        position = operator.index(index)
        if position < 0:
            position += len(self)
        if not 0 <= position < len(self):
            raise IndexError(f"token {index} of {len(self)}")
        return self._read(position, position + 1)[0]

    def __array__(self, dtype=None, copy=None):
        if copy is False:
            raise ValueError("token shards lie in several arrays, so an array of all tokens is always a copy")
        return self[:].astype(dtype or self.dtype, copy=False)

    def _read(self, start, stop):
        pieces = [np.empty(0, self.dtype)]
        for shard in range(self._shard_of(start), len(self.parts)):
            if self._starts[shard] >= stop:
                break
            pieces.append(self.parts[shard][max(start - self._starts[shard], 0) : stop - self._starts[shard]])
        return np.concatenate(pieces)

    def _shard_of(self, position):
        return np.searchsorted(self._ends, position, side="right")

    def windows(self, starts, width):
        """The windows `[start, start + width)`: `[len(starts), width]`, for 1-D integer `starts`."""
        windows = np.empty((len(starts), width), self.dtype)
        first, last = self._shard_of(starts), self._shard_of(starts + width - 1)
        for shard in np.unique(first):
            inside = (first == shard) & (last == shard)
            if inside.any():
                view = np.lib.stride_tricks.sliding_window_view(self.parts[shard], width)
                windows[inside] = view[starts[inside] - self._starts[shard]]
        for row in np.flatnonzero(first != last):
            windows[row] = self._read(starts[row], starts[row] + width)
        return windows


def gather_windows(tokens, starts, width):
    """The windows `[start, start + width)` of a token sequence.

    Args:
      tokens: 1-D array or `TokenShards`.
      starts: int64, any shape.
      width: tokens in a window.

    Returns:
      `[*starts.shape, width]`, in the dtype of the tokens.
    """
    flat = starts.ravel()
    if isinstance(tokens, TokenShards):
        windows = tokens.windows(flat, width)
    else:
        windows = np.lib.stride_tricks.sliding_window_view(tokens, width)[flat]
    return windows.reshape(*starts.shape, width)
