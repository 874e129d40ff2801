"""MKV2: a seeded synthetic language whose entropy is known.

Tokens 0 .. V-1 with V = 128. Given the previous token b and the one before it a, the next token x is

    with probability 1 - eps:   successor[b, order[a mod 4, r]],  rank r drawn with probability w[r] ~ 1 / (r + 1)
    with probability eps:       drawn from g[x] ~ 1 / (x + 1), the "global Zipf" law             (eps = 0.1)

where successor[b] holds K = 8 different tokens drawn one after another from g, and order[c] is a permutation of the
eight ranks for each class c = a mod 4. So the chain has order 2, but a model that reads only b already gains much.
Before each token, with probability p = 0.02, the next m = 8 tokens are instead copied from d tokens back, d uniform
over D = 41 distances 12 .. 52: what an induction head can find. Text begins in the context a = b = 0, and nothing is
copied before 52 tokens exist.

All probabilities are whole multiples of 2**-32, drawn from raw Philox words by integer comparison, so that a seed
gives the same bytes everywhere; `MKV2_SHA256` pins those of seed 0.
"""

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from repro.data.corpus import Corpus, split_last_twentieth
from repro.data.random_words import Purpose, RandomWords, scale_to_range
from repro.data.vocabulary import check_vocabulary, choose_vocab_size
from repro.errors import ReproError

MKV2_LENGTH = 1_000_000
MKV2_SHA256 = "afb2fe10709ac9be5c588373f26871087ba484889638c0f8e4fdf8aaaa2d157a"

_VOCAB = 128
_SUCCESSORS = 8
_CLASSES = 4
_ONE = 2**32
_NOISE = _ONE // 10
_COPY = _ONE // 50
_COPY_LENGTH = 8
_SHORTEST_DISTANCE = 12
_LONGEST_DISTANCE = 52
_DISTANCES = _LONGEST_DISTANCE - _SHORTEST_DISTANCE + 1


def _zipf_thresholds(count):
    """Cumulative Zipf law of exponent 1 in units of 2**-32: uint64 `[count]`, the last one 2**32."""
    cumulative = np.cumsum([_ONE // (rank + 1) for rank in range(count)]).tolist()
    return np.array([_ONE * part // cumulative[-1] for part in cumulative], np.uint64)


_RANK_THRESHOLDS = _zipf_thresholds(_SUCCESSORS)
_TOKEN_THRESHOLDS = _zipf_thresholds(_VOCAB)


@dataclass(frozen=True, eq=False)
class Mkv2Language:
    """The tables of one seed's language.

    Attributes:
      seed: int in `[0, 2**64)`.
      successor: `[V, K]` token ids.
      order: `[4, K]` permutations of the ranks.
    """

    seed: int
    successor: np.ndarray
    order: np.ndarray

    @classmethod
    def from_seed(cls, seed):
        """Draw the tables.

        Raises:
          ReproError: the seed is not a whole number from 0 to 2**64 - 1.
        """
        words = iter(RandomWords(Purpose.MKV2_LANGUAGE).draw(seed, 0, (_VOCAB + _CLASSES) * _SUCCESSORS))
        successor = np.array([_draw_distinct_tokens(words) for _ in range(_VOCAB)])
        order = np.array([_draw_permutation(words) for _ in range(_CLASSES)])
        return cls(seed, successor, order)

    @cached_property
    def transition(self):
        """P(x | a, b) without copies, by class of a: float64 `[4, V, V]`, indexed `[a mod 4, b, x]`."""
        rank_law = np.diff(_RANK_THRESHOLDS, prepend=np.uint64(0)) / _ONE
        token_law = np.diff(_TOKEN_THRESHOLDS, prepend=np.uint64(0)) / _ONE
        transition = np.tile(_NOISE / _ONE * token_law, (_CLASSES, _VOCAB, 1))
        for token_class, order in enumerate(self.order):
            # The successors of a token differ, so no entry is added to twice.
            ranked = self.successor[:, order]
            transition[token_class, np.arange(_VOCAB)[:, None], ranked] += (1 - _NOISE / _ONE) * rank_law
        return transition

    @cached_property
    def stationary(self):
        """Long-run law of (a mod 4, b) without copies: float64 `[4, V]`."""
        states = _CLASSES * _VOCAB
        step = np.zeros((_CLASSES, _VOCAB, _CLASSES, _VOCAB))
        for token in range(_VOCAB):
            step[:, token, token % _CLASSES, :] = self.transition[:, token, :]
        equations = step.reshape(states, states).T - np.eye(states)
        # One balance equation follows from the others; the total probability takes its place.
        equations[-1] = 1
        return np.linalg.solve(equations, np.eye(states)[-1]).reshape(_CLASSES, _VOCAB)

    def entropy_floor(self):
        """What can be known about the text, in nats per token.

        With pi the stationary law of (a mod 4, b) and P the transition of the chain without copies:

        - `uniform`: ln V, the loss of a model that has learnt nothing.
        - `unigram`: H(q), q[x] = sum over (c, b) of pi[c, b] P[c, b, x]: the floor of a model without context, on text
          without copies. Exact from the tables.
        - `order2`: sum over (c, b) of pi[c, b] H(P[c, b, :]): the entropy given the two previous tokens, which is the
          entropy rate of text without copies. Exact from the tables.
        - `copies_lower`, `copies_upper`: bounds on the entropy rate h of the text with copies. A decision to copy or
          not is taken (1 - p + m p)**-1 =: u times per token, and a share (1 - p) u of the tokens is drawn from the
          chain. An oracle that is told every decision pays only for those; one that is told none can do no worse than
          to pay for the decisions too:

              (1 - p) u order2  <=  h  <=  (1 - p) u order2 + u (H(p) + p ln D).

          Both take the contexts of the drawn tokens to follow pi. Copies disturb that, by under 0.01 % of `order2` on
          the texts of seeds 0 to 3. The upper bound is nearly tight: the best predictor, which knows the tables and
          filters the hidden decisions, stays 0.002 below it. A model whose window is too short to hold the source of
          every copy (60 tokens) stays higher.
        """
        order2 = float(np.sum(self.stationary * _entropy(self.transition)))
        copy = _COPY / _ONE
        decisions = 1 / (1 - copy + _COPY_LENGTH * copy)
        drawn = (1 - copy) * decisions * order2
        decision_entropy = float(_entropy(np.array([copy, 1 - copy])) + copy * np.log(_DISTANCES))
        return {
            "uniform": float(np.log(_VOCAB)),
            "unigram": float(_entropy(np.einsum("cb,cbx->x", self.stationary, self.transition))),
            "order2": order2,
            "copies_lower": drawn,
            "copies_upper": drawn + decisions * decision_entropy,
        }

    def sample(self, length, *, copies=True):
        """Text of this language.

        Args:
          length: number of tokens.
          copies: False gives the chain alone, whose entropy rate is exactly `order2`.

        Returns:
          uint8 `[length]`. A longer text begins with a shorter one.
        """
        words = RandomWords(Purpose.MKV2_TEXT).draw(self.seed, 0, 2 * length)
        halves = np.stack([words >> np.uint64(32), words % _ONE], axis=1)
        copy_word, distance_word, noise_word, choice_word = halves.reshape(length, 4).T
        # A draw below K is a rank; any other is a noise token plus K.
        rank = np.searchsorted(_RANK_THRESHOLDS, choice_word, side="right")
        noise_token = np.searchsorted(_TOKEN_THRESHOLDS, choice_word, side="right")
        draw = np.where(noise_word < _NOISE, noise_token + _SUCCESSORS, rank).tolist()
        distance = _SHORTEST_DISTANCE + scale_to_range(distance_word << np.uint64(32), _DISTANCES)
        copy_starts = np.flatnonzero(copy_word < _COPY) if copies else np.empty(0, np.int64)
        return self._write(draw, distance, copy_starts[copy_starts >= _LONGEST_DISTANCE], length)

    def _write(self, draw, distance, copy_starts, length):
        choices = _SUCCESSORS + _VOCAB
        table = np.empty((_CLASSES, _VOCAB, choices), np.int64)
        table[:, :, :_SUCCESSORS] = self.successor[:, self.order].swapaxes(0, 1)
        table[:, :, _SUCCESSORS:] = np.arange(_VOCAB)
        table = table.ravel().tolist()
        text = []
        for copy_start in [*copy_starts.tolist(), length]:
            # A decision that falls inside a running copy is void.
            if copy_start < len(text):
                continue
            a, b = text[-2:] or (0, 0)
            for choice in draw[len(text) : copy_start]:
                x = table[(a % _CLASSES * _VOCAB + b) * choices + choice]
                text.append(x)
                a, b = b, x
            if copy_start < length:
                source = copy_start - int(distance[copy_start])
                text.extend(text[source : source + _COPY_LENGTH])
        return np.array(text[:length], np.uint8)


def load_mkv2(seed=0, vocab_size=None):
    """A million tokens of the language of one seed.

    Args:
      seed: int in `[0, 2**64)`.
      vocab_size: number of token ids, 128 by default.

    Raises:
      ReproError: the seed is out of range, the vocabulary is too small, or seed 0 does not give its known text.
    """
    language = Mkv2Language.from_seed(seed)
    tokens = language.sample(MKV2_LENGTH)
    digest = hashlib.sha256(tokens).hexdigest()
    if seed == 0 and digest != MKV2_SHA256:
        raise ReproError(
            f"mkv2 came out with SHA-256 {digest} instead of {MKV2_SHA256}: this NumPy draws other random words, so "
            "results would not compare; use a released NumPy 2."
        )
    vocab_size = choose_vocab_size(vocab_size, _VOCAB)
    check_vocabulary(tokens, vocab_size, "mkv2")
    return Corpus(
        name="mkv2" if seed == 0 else f"mkv2:{seed}",
        tokens=tokens,
        vocab_size=vocab_size,
        sha256=digest,
        provenance=f"synthetic language MKV2, seed {seed}",
        validation_start=split_last_twentieth(len(tokens)),
        entropy_floor=language.entropy_floor(),
    )


def _draw_distinct_tokens(words):
    """K different tokens, each drawn from the global Zipf law restricted to those left: one word each."""
    weights = [_ONE // (token + 1) for token in range(_VOCAB)]
    tokens = []
    for _ in range(_SUCCESSORS):
        target = int(next(words)) * sum(weights) >> 64
        token = int(np.searchsorted(np.cumsum(weights), target, side="right"))
        weights[token] = 0
        tokens.append(token)
    return tokens


def _draw_permutation(words):
    """A uniform permutation of the ranks (Fisher-Yates): one word per rank."""
    order = list(range(_SUCCESSORS))
    for last in reversed(range(_SUCCESSORS)):
        other = int(next(words)) * (last + 1) >> 64
        order[last], order[other] = order[other], order[last]
    return order


def _entropy(law):
    """Nats, over the last axis; every probability is positive."""
    return -np.sum(law * np.log(law), axis=-1)
