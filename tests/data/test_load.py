import subprocess
import sys

import numpy as np
import pytest

from repro.data import KINDS, load_corpus
from repro.errors import ReproError


@pytest.mark.parametrize("spec", ["", "shakespeare", "KJV", "parquet:x.parquet", "no/such/file.txt"])
def test_an_unknown_name_lists_the_kinds(spec):
    with pytest.raises(ReproError) as error:
        load_corpus(spec)
    assert f"There is no corpus or file {spec!r}" in str(error.value)
    assert all(kind in str(error.value) for kind in KINDS)


def test_the_beginning_of_the_bible_keeps_its_validation_split():
    whole, first = load_corpus("kjv"), load_corpus("kjv:500")
    assert first.name == "kjv:500" and first.validation_start == 500 and first.sha256 != whole.sha256
    np.testing.assert_array_equal(first.tokens[:500], whole.tokens[:500])
    np.testing.assert_array_equal(first.validation(7, 30), whole.validation(7, 30))
    assert first.batch(0, 0, batch_size=50, length=400).max() == first.tokens[:500].max()


@pytest.mark.parametrize("spec", ["kjv:", "kjv:many", "kjv:0", "kjv:9999999", "kjv:-3"])
def test_a_beginning_that_is_none(spec):
    with pytest.raises(ReproError, match="whole number"):
        load_corpus(spec)


def test_a_bare_bin_file_must_say_what_it_is(tmp_path):
    path = tmp_path / "train.bin"
    path.write_bytes(b"ab" * 50)
    with pytest.raises(ReproError, match='write "nanogpt:.*", "llmc:.*" or "text:.*" to say which'):
        load_corpus(str(path))
    assert len(load_corpus(f"text:{path}").tokens) == 100
    assert len(load_corpus(f"nanogpt:{path}").tokens) == 50


def test_a_name_comes_before_a_file_of_that_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kjv").write_bytes(b"mine")
    assert load_corpus("kjv").name == "kjv"
    assert bytes(load_corpus("./kjv").tokens) == b"mine"


def test_nothing_here_imports_jax():
    code = "import sys, repro.data; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
