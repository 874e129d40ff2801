import os
from pathlib import Path

import numpy as np
import pytest

from repro.data import load_corpus
from repro.data.token_shards import TokenShards
from repro.errors import ReproError

GPT2 = (20240520, 1, "<u2")
LLAMA3 = (20240801, 7, "<u4")


def write_llmc(path, tokens, form=GPT2, count=None):
    magic, version, dtype = form
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(tokens) if count is None else count
    Path(path).write_bytes(header.tobytes() + np.asarray(tokens).astype(dtype).tobytes())


def write_nanogpt(path, tokens, form=GPT2):
    Path(path).write_bytes(np.asarray(tokens).astype("<u2").tobytes())


WRITERS = {"nanogpt": write_nanogpt, "llmc": write_llmc}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(params=["nanogpt", "llmc"])
def kind(request):
    return request.param


def test_one_file_is_memory_mapped(kind):
    tokens = np.arange(1000) * 7
    WRITERS[kind]("t.bin", tokens)
    corpus = load_corpus(f"{kind}:t.bin")
    assert isinstance(corpus.tokens, np.memmap) and corpus.tokens.dtype == np.uint16
    assert corpus.tokens.tolist() == tokens.tolist()
    assert corpus.vocab_size == 50257 and corpus.validation_start == 950
    assert corpus.name == f"{kind}:t.bin" and corpus.hash_scope == "every token"


def test_several_shards_are_one_sequence_in_the_order_of_their_names(kind):
    tokens = np.arange(1000)
    for number, part in enumerate(np.split(tokens, [1, 400, 405])):
        WRITERS[kind](f"shard_{number}.bin", part)
    corpus = load_corpus(f"{kind}:shard_*.bin")
    assert isinstance(corpus.tokens, TokenShards)
    assert all(isinstance(part, np.memmap) for part in corpus.tokens.parts)
    assert corpus.tokens[:].tolist() == tokens.tolist()
    batch = corpus.batches(range(8), range(8), batch_size=16, length=30)
    assert (batch == batch[..., :1] + np.arange(31)).all()
    crossing = (batch[..., 0] < 400) & (batch[..., -1] >= 405)
    assert crossing.any() and batch.max() < corpus.validation_start
    WRITERS[kind]("whole.bin", tokens)
    whole = load_corpus(f"{kind}:whole.bin")
    assert corpus.sha256 == whole.sha256
    assert (whole.batches(range(8), range(8), batch_size=16, length=30) == batch).all()


def test_both_formats_of_the_same_tokens_have_one_hash():
    write_nanogpt("n.bin", range(100))
    write_llmc("l.bin", range(100))
    assert load_corpus("nanogpt:n.bin").sha256 == load_corpus("llmc:l.bin").sha256


def test_own_split(kind):
    WRITERS[kind]("train_0.bin", np.arange(0, 60))
    WRITERS[kind]("train_1.bin", np.arange(60, 100))
    WRITERS[kind]("val_0.bin", np.arange(1000, 1040))
    corpus = load_corpus(f"{kind}:train_*.bin|val_*.bin")
    assert corpus.validation_start == 100
    assert corpus.batches(range(9), range(9), batch_size=9, length=20).max() == 99
    windows = corpus.validation(20, 20)
    assert (windows.min(), windows.max()) == (1000, 1039)


def test_llama_3_shards_hold_large_ids():
    tokens = [0, 70_000, 128_255] * 100
    write_llmc("l.bin", tokens, LLAMA3)
    corpus = load_corpus("llmc:l.bin")
    assert corpus.vocab_size == 128_256 and corpus.tokens.tolist() == tokens
    batch = corpus.batch(0, 0, batch_size=8, length=8)
    assert batch.dtype == np.uint32 and set(batch.ravel().tolist()) == {0, 70_000, 128_255}


def test_ids_outside_the_vocabulary_are_refused(kind):
    WRITERS[kind]("a.bin", [1, 2, 3])
    WRITERS[kind]("b.bin", [1, 50_256, 50_257, 60_000])
    with pytest.raises(ReproError, match=r"Token 2 of b\.bin has id 50257 but the vocabulary has 50257 ids"):
        load_corpus(f"{kind}:?.bin")
    assert load_corpus(f"{kind}:?.bin", vocab_size=60_001).vocab_size == 60_001


@pytest.mark.parametrize("vocab_size", [0, -5, 2**32 + 1, 1.5, "many"])
def test_an_impossible_vocabulary_is_refused(vocab_size):
    write_nanogpt("a.bin", [0, 1])
    with pytest.raises(ReproError, match="vocab_size is .* whole number from 1 to"):
        load_corpus("nanogpt:a.bin", vocab_size=vocab_size)


def test_files_that_are_no_nanogpt_tokens_are_refused():
    Path("odd.bin").write_bytes(b"abc")
    with pytest.raises(ReproError, match=r"odd\.bin has 3 bytes but uint16 ids take an even number"):
        load_corpus("nanogpt:odd.bin")
    Path("empty.bin").touch()
    with pytest.raises(ReproError, match=r"empty\.bin is empty"):
        load_corpus("nanogpt:empty.bin")
    write_llmc("shard.bin", range(5))
    with pytest.raises(ReproError, match=r'shard\.bin begins with an llm\.c header: read it with "llmc:"'):
        load_corpus("nanogpt:shard.bin")


def test_files_that_are_no_llmc_shards_are_refused():
    write_nanogpt("n.bin", range(5000))
    with pytest.raises(ReproError, match=r'n\.bin begins with magic 65536, version 196610 but .* "nanogpt:"'):
        load_corpus("llmc:n.bin")
    write_llmc("version.bin", range(5), (20240520, 2, "<u2"))
    with pytest.raises(ReproError, match=r"version\.bin begins with magic 20240520, version 2 but"):
        load_corpus("llmc:version.bin")
    Path("short.bin").write_bytes(b"x" * 1023)
    with pytest.raises(ReproError, match=r"short\.bin has 1023 bytes but the header of an llm\.c shard has 1024"):
        load_corpus("llmc:short.bin")
    write_llmc("none.bin", [])
    with pytest.raises(ReproError, match=r"The header of none\.bin counts 0 tokens"):
        load_corpus("llmc:none.bin")
    write_llmc("negative.bin", [], count=-1)
    with pytest.raises(ReproError, match=r"The header of negative\.bin counts -1 tokens"):
        load_corpus("llmc:negative.bin")


@pytest.mark.parametrize("count", [9, 11])
def test_a_shard_whose_size_is_not_what_its_header_says_is_refused(count):
    write_llmc("t.bin", range(10), count=count)
    message = rf"t\.bin has 1044 bytes but its header counts {count} tokens, which makes {1024 + 2 * count}"
    with pytest.raises(ReproError, match=message):
        load_corpus("llmc:t.bin")


def test_shards_of_two_forms_are_not_mixed():
    write_llmc("a.bin", range(10))
    write_llmc("b.bin", range(10), LLAMA3)
    with pytest.raises(ReproError, match=r"a\.bin, b\.bin mix uint16 \(GPT-2\) and uint32 \(Llama 3\) shards"):
        load_corpus("llmc:?.bin")


def test_a_file_in_both_splits_is_refused(kind):
    WRITERS[kind]("a.bin", range(10))
    WRITERS[kind]("b.bin", range(10))
    os.symlink("a.bin", "same.bin")
    with pytest.raises(ReproError, match=r"same\.bin is in the training and the validation list"):
        load_corpus(f"{kind}:a.bin,b.bin|same.bin")


@pytest.mark.parametrize("spec", ["", "|b.bin", "a.bin|"])
def test_an_empty_list_is_refused(kind, spec):
    WRITERS[kind]("a.bin", range(10))
    WRITERS[kind]("b.bin", range(10))
    with pytest.raises(ReproError, match="path or glob is empty"):
        load_corpus(f"{kind}:{spec}")


def test_missing_files_are_refused(kind):
    with pytest.raises(ReproError, match=r"No file matches none\*\.bin"):
        load_corpus(f"{kind}:none*.bin")


def test_a_file_that_may_not_be_read_is_refused(kind, monkeypatch):
    WRITERS[kind]("a.bin", range(10))

    def refuse(path, mode):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ReproError, match=r"a\.bin cannot be read \(Permission denied\)"):
        load_corpus(f"{kind}:a.bin")
