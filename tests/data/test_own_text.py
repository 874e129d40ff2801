import hashlib
import os
from pathlib import Path

import pytest

from repro.data import load_corpus
from repro.errors import ReproError


@pytest.fixture
def texts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "b.txt").write_bytes(b"bee\n")
    (tmp_path / "a.txt").write_bytes("ä\0a".encode("latin-1"))
    (tmp_path / "deep" / "er" / "c.txt").write_bytes(b"sea")
    (tmp_path / "deep" / "d.md").write_bytes(b"\xff\xfe")
    return tmp_path


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ("a.txt", b"\xe4\0a"),
        ("./b.txt", b"bee\n"),
        ("~/b.txt", b"bee\n"),
        ("text:b.txt,a.txt", b"\xe4\0a\nbee\n"),
        ("text:*.txt,b.txt,~/b.txt", b"\xe4\0a\nbee\n"),
        ("text:**/*.txt", b"\xe4\0a\nbee\n\nsea"),
        ("text:~/deep/**/c.txt,deep/*", b"sea\n\xff\xfe"),
    ],
)
def test_files_are_sorted_and_joined_by_one_newline(texts, spec, text):
    corpus = load_corpus(spec)
    assert bytes(corpus.tokens) == text
    assert corpus.sha256 == hashlib.sha256(text).hexdigest()
    assert corpus.vocab_size == 256 and corpus.name.startswith("text:") and corpus.entropy_floor is None
    assert str(texts) not in corpus.name + corpus.provenance


def test_a_path_object_and_an_absolute_path(texts):
    assert bytes(load_corpus(Path("b.txt")).tokens) == b"bee\n"
    assert bytes(load_corpus(f"text:{texts}/b.txt").tokens) == b"bee\n"


@pytest.mark.parametrize("name", ["one, two.txt", "star*.txt", "[x].txt", "a:b.txt"])
def test_an_existing_path_is_taken_literally(texts, name):
    Path(name).write_bytes(b"literal")
    assert bytes(load_corpus(name).tokens) == b"literal"
    assert bytes(load_corpus(f"text:{name}").tokens) == b"literal"


def test_the_names_of_many_files_are_cut_short(texts):
    for number in range(5):
        Path(f"n{number}").write_bytes(b"x")
    assert load_corpus("text:n?").name == "text:n0, n1, n2 and 2 more"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("text:", "path or glob is empty"),
        ("text:a.txt,", "path or glob is empty"),
        ("text:nothing*.txt", r"No file matches nothing\*\.txt"),
        ("text:a.txt,gone.txt", "No file matches gone.txt"),
        ("text:deep", "deep is a folder: name the files in it with a glob"),
        ("deep", "deep is a folder: name the files in it with a glob"),
        ("text:dee*", r"dee\* matches folders only"),
        ("text:link", "link is not a regular file, or is a broken link"),
        ("link", "link is not a regular file, or is a broken link"),
        ("text:pipe", "pipe is not a regular file"),
        ("text:empty", "There is no text in empty"),
        ("text:empty,empty2", "There is no text in empty, empty2"),
    ],
)
def test_refusals(texts, spec, message):
    os.symlink("nowhere", "link")
    os.mkfifo("pipe")
    Path("empty").touch()
    Path("empty2").touch()
    with pytest.raises(ReproError, match=message):
        load_corpus(spec)


def test_a_file_that_may_not_be_read_is_refused(texts, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(ReproError, match=r"a\.txt cannot be read \(Permission denied\)"):
        load_corpus("text:a.txt")


def test_a_byte_outside_a_smaller_vocabulary_is_refused(texts):
    with pytest.raises(ReproError, match=r"Token 0 of a\.txt has id 228 but the vocabulary has 128 ids"):
        load_corpus("a.txt", vocab_size=128)


def test_a_text_that_is_too_short_says_so_when_it_is_read(texts):
    with pytest.raises(ReproError, match=r"training split of text:b\.txt has 4 tokens .* need at least 66"):
        load_corpus("b.txt").batch(0, 0, batch_size=1, length=64)
