import hashlib
import lzma

import numpy as np
import pytest

from repro.data import kjv, load_corpus
from repro.errors import ReproError


def test_size_hash_and_split():
    corpus = load_corpus("kjv")
    assert (corpus.name, corpus.vocab_size, len(corpus.tokens)) == ("kjv", 256, 4_152_808)
    assert corpus.tokens.dtype == np.uint8
    assert hashlib.sha256(corpus.tokens).hexdigest() == corpus.sha256
    assert corpus.sha256 == "b8781f16bec348b7cb933f28feb37465b6a3c833e3bc6da2cc429119e1b83250"
    assert corpus.validation_start == 4_152_808 - 207_640
    assert corpus.tokens[:10].tobytes() == b"Genesis 1\n"
    assert corpus.entropy_floor is None and corpus.hash_scope == "every token"
    assert "King James" in corpus.provenance


def test_the_text_cannot_be_changed_by_accident():
    with pytest.raises(ValueError, match="read-only"):
        load_corpus("kjv").tokens[0] = 0


def test_a_changed_or_damaged_text_is_refused():
    with pytest.raises(ReproError, match="has SHA-256 .* instead of b8781f16.*: install the package again"):
        kjv._unpack(lzma.compress(b"In the beginning"))
    with pytest.raises(ReproError, match="cannot be unpacked .*: install the package again"):
        kjv._unpack(b"not packed at all")


def test_vocabulary_can_be_padded_or_cut_to_what_is_used():
    assert load_corpus("kjv", vocab_size=320).vocab_size == 320
    assert load_corpus("kjv", vocab_size=123).vocab_size == 123
    with pytest.raises(ReproError, match="of kjv has id 122 but the vocabulary has 122 ids"):
        load_corpus("kjv", vocab_size=122)
