"""Corpora and the windows that training and validation read from them. Plain NumPy; imports no JAX."""

from repro.data.corpus import Corpus
from repro.data.load import KINDS, load_corpus

__all__ = ["KINDS", "Corpus", "load_corpus"]
