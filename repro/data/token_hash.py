"""A digest that says which tokens a result was trained on."""

import hashlib

import numpy as np

_MIB = 2**20
_CHUNK_BYTES = 16 * _MIB


def hash_tokens(parts, full_limit=2**30):
    """SHA-256 of a token sequence that lies in several arrays.

    Up to `full_limit` bytes it is taken over every token, as little-endian integers of the stored width, and so does
    not depend on how the sequence is cut into files. Beyond, where reading everything would take minutes, it is taken
    over the byte count (as decimal ASCII and a newline), the first MiB and the last MiB of each array in order.

    Returns:
      The hex digest and a phrase that says which of the two it is.
    """
    digest = hashlib.sha256()
    if sum(part.nbytes for part in parts) <= full_limit:
        for part in parts:
            step = _CHUNK_BYTES // part.itemsize
            for start in range(0, len(part), step):
                digest.update(_little_endian(part[start : start + step]))
        return digest.hexdigest(), "every token"
    for part in parts:
        tokens_in_mib = _MIB // part.itemsize
        digest.update(f"{part.nbytes}\n".encode())
        digest.update(_little_endian(part[:tokens_in_mib]))
        digest.update(_little_endian(part[-tokens_in_mib:]))
    return digest.hexdigest(), "byte count, first and last MiB of every file"


def _little_endian(tokens):
    return np.ascontiguousarray(tokens, tokens.dtype.newbyteorder("<")).data
