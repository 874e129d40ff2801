"""Every token must be an id of the vocabulary: a larger one would silently read a wrong embedding row."""

import operator

from repro.errors import ReproError

_CHUNK = 2**24


def choose_vocab_size(requested, default):
    """The size asked for, or the default where none was (None).

    Raises:
      ReproError: the size is not a whole number from 1 to 2**32.
    """
    if requested is None:
        return default
    try:
        size = operator.index(requested)
    except TypeError:
        size = 0
    if not 1 <= size <= 2**32:
        raise ReproError(f"vocab_size is {requested!r} but must be a whole number from 1 to 2**32.")
    return size


def check_vocabulary(tokens, vocab_size, where):
    """Read all tokens, a chunk at a time so that a memory map stays on disk, and refuse ids outside the vocabulary.

    Args:
      tokens: 1-D unsigned integers.
      vocab_size: number of ids.
      where: name of the file or text, for the message.

    Raises:
      ReproError: some token is `vocab_size` or larger; names the first one.
    """
    for start in range(0, len(tokens), _CHUNK):
        chunk = tokens[start : start + _CHUNK]
        if chunk.max() >= vocab_size:
            offset = int((chunk >= vocab_size).argmax())
            raise ReproError(
                f"Token {start + offset} of {where} has id {int(chunk[offset])} but the vocabulary has {vocab_size} "
                f"ids (0 to {vocab_size - 1}): give the vocab_size of the tokenizer that wrote it."
            )
