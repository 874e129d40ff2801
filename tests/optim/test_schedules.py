import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from repro.errors import ReproError
from repro.optim import warmup_constant_cosine, warmup_multistep, warmup_stable_decay
from repro.train import TrainConfig
from repro.train.schedule import fraction as fraction_of_the_engine

pytestmark = pytest.mark.usefixtures("quick_compile")


def at(schedule, steps):
    return np.asarray(jax.jit(jax.vmap(schedule))(jnp.arange(steps)))


def test_cosine():
    got = at(warmup_constant_cosine(40, warmup=10, constant=5, final=0.1), 44)
    np.testing.assert_allclose(
        got[[0, 4, 9, 14]], [0.1, 0.5, 1, 1], rtol=1e-6
    )  # first, middle, last of warm-up, constant
    progress = (np.arange(15, 40) - 14) / 25
    np.testing.assert_allclose(got[15:40], 0.1 + 0.9 * (1 + np.cos(np.pi * progress)) / 2, rtol=1e-5)
    np.testing.assert_allclose(got[39:], 0.1, rtol=1e-6)
    assert got[15] < 1
    with pytest.raises(AssertionError):  # optax's own is a step late
        theirs = optax.warmup_cosine_decay_schedule(0.0, 1.0, 10, 40, 0.1)
        np.testing.assert_allclose(at(theirs, 10), got[:10], rtol=1e-6)


def test_cosine_is_the_schedule_of_the_engine():
    for steps, warmup in ((40, 0.1), (30, 0.0)):
        config = TrainConfig(steps=steps, warmup=warmup)
        want = at(lambda step, c=config: fraction_of_the_engine(c, step), steps)
        ours = warmup_constant_cosine(steps, warmup=max(1, round(warmup * steps)), final=config.final_fraction)
        np.testing.assert_allclose(at(ours, steps), want, rtol=1e-5)


def test_stable_decay():
    shapes = {
        "linear": lambda p: 1 - p,
        "sqrt": lambda p: 1 - np.sqrt(p),
        "cosine": lambda p: (1 + np.cos(np.pi * p)) / 2,
    }
    p = (np.arange(30, 40) - 29) / 10
    seen = []
    for shape, value in shapes.items():
        got = at(warmup_stable_decay(40, warmup=8, decay=10, final=0.2, shape=shape), 42)
        np.testing.assert_allclose(got[:8], np.arange(1, 9) / 8, rtol=1e-6)
        np.testing.assert_array_equal(got[8:30], 1)
        np.testing.assert_allclose(got[30:40], 0.2 + 0.8 * value(p), rtol=1e-5)
        np.testing.assert_allclose(got[40:], 0.2, rtol=1e-6)
        seen.append(got)
    assert all(np.abs(a - b).max() > 0.05 for i, a in enumerate(seen) for b in seen[:i])
    np.testing.assert_array_equal(at(warmup_stable_decay(5, decay=1), 5), [1, 1, 1, 1, 0])


def test_multistep():
    got = at(warmup_multistep(warmup=4, milestones={10: 0.3, 15: 0.1}), 20)
    want = [0.25, 0.5, 0.75] + [1] * 7 + [0.3] * 5 + [0.1] * 5
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_as_an_optax_schedule():
    tx = optax.sgd(warmup_constant_cosine(3, warmup=1, final=0.0))
    state, seen = tx.init(jnp.ones(())), []
    for _ in range(3):
        update, state = tx.update(jnp.ones(()), state)
        seen.append(float(update))
    np.testing.assert_allclose(seen, [-1, -0.5, 0], atol=1e-6)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: warmup_constant_cosine(0), "steps is 0"),
        (lambda: warmup_constant_cosine(10, warmup=2.5), "warmup is 2.5"),
        (lambda: warmup_constant_cosine(10, warmup=6, constant=4), "leave none of the 10 steps"),
        (lambda: warmup_constant_cosine(10, final=1.5), "final is 1.5"),
        (lambda: warmup_constant_cosine(10, final=float("nan")), "final is nan"),
        (lambda: warmup_stable_decay(10, warmup=6, decay=5), "exceed the 10 steps"),
        (lambda: warmup_stable_decay(10, decay=0), "decay is 0"),
        (lambda: warmup_stable_decay(10, decay=2, shape="exp"), "shape 'exp' is unknown; known are linear"),
        (lambda: warmup_multistep(warmup=5, milestones={4: 0.5}), "must ascend"),
        (lambda: warmup_multistep(milestones={4: 0.5, 3: 0.1}), "must ascend"),
        (lambda: warmup_multistep(milestones={4: 0.0}), "fractions above 0"),
        (lambda: warmup_multistep(milestones={4: 2.0}), "from step 4 on is 2.0"),
    ],
)
def test_refusals(make, words):
    with pytest.raises(ReproError, match=words):
        make()
