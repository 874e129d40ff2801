"""Random 64-bit words addressed by (seed, purpose, step), the same under every NumPy.

NumPy promises that the raw output of a bit generator never changes, and promises nothing of the kind for
`Generator.integers` or `Generator.choice`. So everything random in this package is made of raw Philox4x64-10
words (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) and integer arithmetic.

Philox has a key of two 64-bit words and a counter of four. The key is (seed, purpose) and the last counter word is
the step; a draw only advances the first counter word. Two streams therefore meet only where seed, purpose and step
are all equal, as long as one of them draws fewer than 2**66 words.
"""

import operator
from enum import IntEnum

import numpy as np

from repro.errors import ReproError

_WORD = 2**64
_LOW_HALF = np.uint64(0xFFFFFFFF)
_HALF_BITS = np.uint64(32)


class Purpose(IntEnum):
    """What a stream is for. The numbers are part of the key, so they are never reused or changed."""

    WINDOWS = 1
    MKV2_LANGUAGE = 2
    MKV2_TEXT = 3


class RandomWords:
    """All streams of one purpose."""

    def __init__(self, purpose):
        self._purpose = purpose
        self._philox = np.random.Philox(key=0)

    def draw(self, seed, step, count):
        """The first `count` words of the stream (seed, step): uint64 `[count]`.

        A pure function of its arguments. A longer draw begins with the words of a shorter one.

        Raises:
          ReproError: seed or step is not a whole number from 0 to 2**64 - 1.
        """
        # Setting the state costs a tenth of building a new generator, which first asks the system for entropy.
        self._philox.state = {
            "bit_generator": "Philox",
            "state": {
                "counter": np.array([0, 0, 0, _word("step", step)], np.uint64),
                "key": np.array([_word("seed", seed), self._purpose], np.uint64),
            },
            "buffer": np.zeros(4, np.uint64),
            "buffer_pos": 4,
            "has_uint32": 0,
            "uinteger": 0,
        }
        return self._philox.random_raw(count)


def scale_to_range(words, size):
    """Map uniform 64-bit words to whole numbers in `[0, size)` by multiplying and keeping the high half.

    `floor(word * size / 2**64)`, exact: the 128-bit product is built from 32-bit halves. The probability of each
    number differs from 1 / size by less than 2**-64, that is by a relative bias below size * 2**-64: under 2**-32 for
    texts of up to 2**32 tokens and under 2**-24 for texts of 2**40.

    Args:
      words: uint64, any shape.
      size: int, 1 <= size <= 2**63.

    Returns:
      int64, the shape of `words`.
    """
    if not 1 <= size <= 2**63:
        raise ReproError(f"A random number was asked for in [0, {size}); the size must lie between 1 and 2**63.")
    size_high, size_low = np.uint64(size >> 32), np.uint64(size & 0xFFFFFFFF)
    high, low = words >> _HALF_BITS, words & _LOW_HALF
    # No sum overflows: (2**32 - 1)**2 + 2 * (2**32 - 1) = 2**64 - 1.
    middle = high * size_low + ((low * size_low) >> _HALF_BITS)
    carry = low * size_high + (middle & _LOW_HALF)
    return (high * size_high + (middle >> _HALF_BITS) + (carry >> _HALF_BITS)).astype(np.int64)


def _word(name, value):
    try:
        value = operator.index(value)
    except TypeError:
        value = None
    if value is None or not 0 <= value < _WORD:
        raise ReproError(f"The {name} of a random stream must be a whole number from 0 to 2**64 - 1.")
    return value
