"""What the training engine costs over a training loop written by hand for the one model.

The hand-written side is this file: plain jax.numpy, a dict of weights, no modules, no Optax, no layouts. Both sides run
the same job, from a seed through all steps, with every statistic of every step, to the final evaluation.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from timing import fastest, interleaved, judged, machine, ratios, spread

from repro.data import Corpus, load_corpus
from repro.models import SIZES
from repro.train import Lane, Numbers, TrainConfig, at_size, lane_mesh, train
from repro.train.compiled import compiled, steps_per_chunk, validation_shape
from repro.train.mesh import Seats, place
from repro.train.step import Periodic

Weights = dict[str, Any]
LOSS_TOLERANCE, STATISTICS_TOLERANCE = 1e-4, 1e-3
_QUINTIC = (3.4445, -4.7750, 2.0315)


# ---- The model: weights are {"embedding", "head", "final_gain", "layers": [{"q", "k", ...}, ...]}, all [in, out].


def init_weights(config: TrainConfig, seed: jax.Array) -> Weights:
    """Random weights of the same distributions as the engine's (not the same numbers)."""
    m = config.model
    D, F, out = m.width, m.ffn, (2 * m.layers) ** -0.5
    keys = iter(jax.random.split(jax.random.key(seed), 2 + 7 * m.layers))
    normal = lambda rows, columns, scale: scale * jax.random.normal(next(keys), (rows, columns))
    layers = [
        {"q": normal(D, D, D**-0.5), "k": normal(D, D, D**-0.5), "v": normal(D, D, D**-0.5),
         "o": normal(D, D, D**-0.5 * out), "gate": normal(D, F, D**-0.5), "up": normal(D, F, D**-0.5),
         "down": normal(F, D, F**-0.5 * out), "attention_gain": jnp.ones(D), "ffn_gain": jnp.ones(D)}
        for _ in range(m.layers)
    ]  # fmt: skip
    return {
        "embedding": normal(m.vocab_size, D, 1.0),
        "head": normal(D, m.vocab_size, D**-0.5),
        "final_gain": jnp.ones(D),
        "layers": layers,
    }


def from_engine(params: Any) -> Weights:
    """The engine's parameters of one run in this file's form."""
    blocks = params["blocks"]
    attention, ffn = blocks["attention"], blocks["ffn"]
    count, width = blocks["attention_norm"]["gain"].shape
    layer = lambda i: {
        "q": attention["q_DHK"][i].reshape(width, width), "k": attention["k_DHK"][i].reshape(width, width),
        "v": attention["v_DHV"][i].reshape(width, width), "o": attention["o_HVD"][i].reshape(width, width),
        "gate": ffn["gate_DF"][i], "up": ffn["up_DF"][i], "down": ffn["down_FD"][i],
        "attention_gain": blocks["attention_norm"]["gain"][i], "ffn_gain": blocks["ffn_norm"]["gain"][i],
    }  # fmt: skip
    return {
        "embedding": params["embedding_ZD"],
        "head": params["head_DZ"],
        "final_gain": params["final_norm"]["gain"],
        "layers": [layer(i) for i in range(count)],
    }


def rms(x: jax.Array, gain: jax.Array, eps: float) -> jax.Array:
    return gain * x / jnp.sqrt(jnp.square(x).mean(-1, keepdims=True) + eps)


def rotate(x: jax.Array, theta: float) -> jax.Array:
    """RoPE on [batch, time, head, size]; component i pairs with i + size / 2."""
    time, size = x.shape[1], x.shape[3]
    angles = np.outer(np.arange(time), theta ** -(np.arange(0, size, 2) / size))[:, None]
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    first, second = x[..., : size // 2], x[..., size // 2 :]
    return jnp.concatenate([first * cos - second * sin, first * sin + second * cos], -1)


def forward(config: TrainConfig, w: Weights, tokens: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Logits, and the statistics of the pass with a leading layer axis."""
    m = config.model
    batch, time = tokens.shape
    causal = np.tri(time, dtype=bool)
    x, seen = w["embedding"][tokens], []
    for layer in w["layers"]:
        h = rms(x, layer["attention_gain"], m.norm_eps)
        q, k, v = ((h @ layer[name]).reshape(batch, time, m.heads, m.head_size) for name in "qkv")
        z = jnp.einsum("bthk,bshk->bhts", rotate(q, m.rope_theta), rotate(k, m.rope_theta)) / math.sqrt(m.head_size)
        p = jax.nn.softmax(jnp.where(causal, z, -1e30), -1)
        x = x + jnp.einsum("bhts,bshk->bthk", p, v).reshape(x.shape) @ layer["o"]
        h = rms(x, layer["ffn_gain"], m.norm_eps)
        units = jax.nn.silu(h @ layer["gate"]) * (h @ layer["up"])
        x = x + units @ layer["down"]
        z, p, y, units = jax.lax.stop_gradient((z, p, x, units))
        seen.append(
            {
                "max_logit": jnp.where(causal, z, -jnp.inf).max((0, 2, 3)),
                "max_abs_logit": jnp.where(causal, jnp.abs(z), 0.0).max((0, 2, 3)),
                "entropy": -(p * jnp.log(jnp.maximum(p, 1e-37))).sum(-1).mean((0, 2)),
                "activation_max": jnp.abs(y).max(),
                "activation_rms": jnp.sqrt(jnp.square(y).mean()),
                "hidden_max": jnp.abs(units).max(),
                "hidden_rms": jnp.sqrt(jnp.square(units).mean()),
            }
        )
    logits = rms(x, w["final_gain"], m.norm_eps) @ w["head"]
    return logits, jax.tree.map(lambda *values: jnp.stack(values), *seen)


def loss_of(config: TrainConfig, w: Weights, windows: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    logits, seen = forward(config, w, windows[:, :-1])
    log_z = jax.nn.logsumexp(logits, -1)
    chosen = jnp.take_along_axis(logits, windows[:, 1:, None], -1)[..., 0]
    return (log_z - chosen).mean(), seen | {"log_z_rms": jnp.sqrt(jnp.square(jax.lax.stop_gradient(log_z)).mean())}


# ---- The step.


def is_matrix(path: tuple) -> bool:
    return path[0].key == "layers" and not path[-1].key.endswith("gain")


def orthogonalised(updates: Sequence[jax.Array]) -> list[jax.Array]:
    """Five Newton-Schulz steps on each matrix, scaled to a root mean square near 0.2; equal shapes go as one batch."""
    wide = [u.T if u.shape[0] > u.shape[1] else u for u in updates]
    a, b, c = _QUINTIC
    found: dict[int, jax.Array] = {}
    for shape in dict.fromkeys(u.shape for u in wide):
        members = [i for i, u in enumerate(wide) if u.shape == shape]
        x = jnp.stack([wide[i] for i in members])
        x = x / jnp.maximum(jnp.linalg.norm(x, axis=(1, 2), keepdims=True), 1e-30)
        for _ in range(5):
            s = jnp.matmul(x, x.mT, precision="highest")
            x = a * x + jnp.matmul(b * s + c * jnp.matmul(s, s, precision="highest"), x, precision="highest")
        found |= zip(members, 0.2 * max(shape) ** 0.5 * x, strict=True)
    return [found[i].T if u.shape[0] > u.shape[1] else found[i] for i, u in enumerate(updates)]


def rate(config: TrainConfig, step: jax.Array) -> jax.Array:
    """The rate of 0-based `step`: linear warm-up, then a cosine (or constant)."""
    rise = max(1, round(config.warmup * config.steps))
    turn = jnp.clip((step + 1 - rise) / max(1, config.steps - rise), 0, 1) * math.pi
    low = config.final_fraction
    fall = low + (1 - low) * (1 + jnp.cos(turn)) / 2 if config.schedule == "cosine" else 1.0
    return config.learning_rate * jnp.where(step + 1 < rise, (step + 1) / rise, fall)


def step(config: TrainConfig, state: dict[str, Any], windows: jax.Array) -> tuple[dict[str, Any], dict[str, jax.Array]]:
    """One step: forward, backward, update, QK-Clip; the next state and the statistics of this step."""
    windows = windows.astype(jnp.int32)
    w, lr, t = state["weights"], rate(config, state["step"]), state["step"] + 1.0
    (loss, seen), grads = jax.value_and_grad(lambda w: loss_of(config, w, windows), has_aux=True)(w)

    leaves = [jax.tree.leaves(tree) for tree in (w, grads, state["first"], state["second"])]
    by_muon = [config.optimizer == "muon" and is_matrix(path) for path, _ in jax.tree_util.tree_flatten_with_path(w)[0]]
    first, second, ahead, delta = [], [], [], []
    for muon, _, g, m, v in zip(by_muon, *leaves, strict=True):
        first.append(0.95 * m + g if muon else 0.9 * m + 0.1 * g)
        second.append(v if muon else 0.95 * v + 0.05 * g * g)
        if muon:
            ahead.append(g + 0.95 * first[-1])
    matrices = iter(orthogonalised(ahead))
    for muon, p, m, v in zip(by_muon, leaves[0], first, second, strict=True):
        direction = next(matrices) if muon else m / (1 - 0.9**t) / (jnp.sqrt(v / (1 - 0.95**t)) + 1e-8)
        delta.append(-lr * (direction + config.weight_decay * p))
    tree = jax.tree.structure(w)
    w = tree.unflatten([p + d for p, d in zip(leaves[0], delta, strict=True)])
    top = seen["max_logit"]
    for layer, own in zip(w["layers"], top, strict=True):
        root = jnp.sqrt(jnp.where(own > config.tau, config.tau / own, 1.0))
        per_column = jnp.repeat(root, config.model.head_size)
        layer["q"], layer["k"] = layer["q"] * per_column, layer["k"] * per_column
    norm = lambda tree: jnp.sqrt(sum(jnp.square(x).sum() for x in jax.tree.leaves(tree)))
    metrics = {
        "loss": loss, "max_logit": top.max(), "max_abs_logit": seen["max_abs_logit"].max(),
        "max_capped_logit": seen["max_abs_logit"].max(), "entropy_mean": seen["entropy"].mean(),
        "entropy_min": seen["entropy"].min(), "clipped_share": (top > config.tau).mean(),
        "activation_max": seen["activation_max"].max(), "activation_rms": seen["activation_rms"][-1],
        "grad_norm": norm(grads), "update_norm": norm(delta), "head_logits": top,
        "hidden_max": seen["hidden_max"].max(), "hidden_rms": seen["hidden_rms"].max(), "log_z_rms": seen["log_z_rms"],
    }  # fmt: skip
    state = {"weights": w, "first": tree.unflatten(first), "second": tree.unflatten(second), "step": state["step"] + 1}
    return state, metrics


def fresh(weights: Weights, config: TrainConfig) -> dict[str, Any]:
    """The state before step 0; what Muon moves has no second moment."""
    zeros = lambda shape: np.zeros(shape, np.float32)
    second = lambda path, p: zeros(() if config.optimizer == "muon" and is_matrix(path) else p.shape)
    return {
        "weights": weights,
        "first": jax.tree.map(lambda p: zeros(p.shape), weights),
        "second": jax.tree_util.tree_map_with_path(second, weights),
        "step": np.int32(0),
    }


# ---- The loop.


class HandWritten:
    """The whole job. Forms: `scan` (one run, steps scanned in chunks), `step` (one run, one call per step), `map` and
    `vmap` (several runs, each device taking its share in turn or as one batch)."""

    def __init__(
        self, config: TrainConfig, seeds: Sequence[int], corpus: Corpus, form: str, devices: Sequence[Any], chunk: int
    ) -> None:
        self.config, self.seeds, self.corpus, self.form = config, list(seeds), corpus, form
        self.chunk = 1 if form == "step" else chunk
        self.several = form in ("map", "vmap")
        if not self.several and len(self.seeds) != 1:
            raise ValueError(f"form {form} takes one seed")
        mesh = jax.sharding.Mesh(np.array(devices if self.several else devices[:1]), ("run",))
        self.sharding = NamedSharding(mesh, P("run") if self.several else P())

        def over_runs(f: Any) -> Any:
            if not self.several:
                return f
            one_by_one = lambda *args: jax.lax.map(lambda lane: f(*lane), args)
            local = jax.vmap(f) if form == "vmap" else one_by_one
            return jax.shard_map(local, mesh=mesh, in_specs=P("run"), out_specs=P("run"), check_vma=False)

        advance = lambda state, windows: step(config, state, windows)
        scanned = lambda state, windows: jax.lax.scan(advance, state, windows)
        validation = corpus.validation(config.eval_windows, config.length).astype(np.int32)
        begin = lambda seed: fresh(init_weights(config, seed), config)
        self.init = jax.jit(over_runs(begin), out_shardings=self.sharding)
        self.advance = jax.jit(over_runs(advance if form == "step" else scanned), donate_argnums=0)
        self.evaluate = jax.jit(over_runs(lambda w: loss_of(config, w, validation)[0]))

    def start(self) -> dict[str, Any]:
        seeds = np.array(self.seeds, np.uint32)
        return self.init(jax.device_put(seeds if self.several else seeds[0], self.sharding))

    def windows(self, start: int, stop: int) -> jax.Array:
        shape = dict(batch_size=self.config.batch_size, length=self.config.length)
        found = self.corpus.batches(self.seeds, range(start, stop), **shape)
        found = found[0, 0] if self.form == "step" else found[:, 0] if self.form == "scan" else np.moveaxis(found, 1, 0)
        return jax.device_put(np.ascontiguousarray(found), self.sharding)

    def run(self, state: dict[str, Any] | None = None) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Metrics of every step ([step, ...], or [step, run, ...] for several runs) and the final losses."""
        state = self.start() if state is None else state
        read, waiting, behind = [], [], 10 if self.form == "step" else 1
        for start in range(0, self.config.steps, self.chunk):
            stop = min(start + self.chunk, self.config.steps)
            state, metrics = self.advance(state, self.windows(start, stop))
            waiting.append(metrics)
            if len(waiting) > behind:
                read.append(jax.device_get(waiting.pop(0)))
        read += jax.device_get(waiting)
        final = np.asarray(self.evaluate(state["weights"]))
        if self.form == "step":
            return jax.tree.map(lambda *values: np.stack(values), *read), final
        steps_first = (lambda x: np.moveaxis(x, 1, 0)) if self.several else (lambda x: x)
        return jax.tree.map(lambda *values: np.concatenate([steps_first(x) for x in values]), *read), final

    def run_from(self, weights: Sequence[Weights]) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """`run` from given weights, one dict per seed."""
        states = [fresh(own, self.config) for own in weights]
        state = jax.tree.map(lambda *leaves: np.stack(leaves), *states) if self.several else states[0]
        return self.run(jax.device_put(state, self.sharding))


class EngineSteps:
    """The engine's compiled chunk alone, called again and again on the same windows: no data, no metrics read."""

    def __init__(
        self, config: TrainConfig, seeds: Sequence[int], corpus: Corpus, mesh: jax.sharding.Mesh, steps: int
    ) -> None:
        seats = Seats(len(seeds), mesh)
        programs = compiled(config, seats, corpus)
        self._chunk, self._counts = programs.chunk(steps), seats.counts
        self._numbers = seats.put(Numbers(*(np.full(len(seeds), n, np.float32) for n in config.numbers())))
        self._state = programs.init(seats.counts, seats.put(np.array(seeds, np.uint32)))
        windows = corpus.batches(list(seeds), range(steps), batch_size=config.batch_size, length=config.length)
        self._windows = seats.put(np.moveaxis(windows, 1, 0))
        self._periodic = None
        if config.monitors.chosen(dear=True):
            due = np.arange(steps) % config.monitors.interval == 0
            watched = corpus.validation(config.eval_windows, config.length)[: validation_shape(config)[0]]
            self._periodic = place(Periodic(due, watched), mesh, lanes=False)

    def __call__(self) -> None:
        self._state, metrics = self._chunk(self._counts, self._state, self._windows, self._numbers, self._periodic)
        jax.block_until_ready((self._state, metrics))


class HandWrittenSteps:
    """The same of the hand-written chunk."""

    def __init__(self, peer: HandWritten, steps: int) -> None:
        self._advance, self._state, self._windows = peer.advance, peer.start(), peer.windows(0, steps)

    def __call__(self) -> None:
        self._state, metrics = self._advance(self._state, self._windows)
        jax.block_until_ready((self._state, metrics))


# ---- The comparison.


def lanes_of(config: TrainConfig, seeds: Sequence[int]) -> list[Lane]:
    return [Lane(config.numbers(), seed) for seed in seeds]


def engine_weights(config: TrainConfig, seeds: Sequence[int], corpus: Corpus, mesh: jax.sharding.Mesh) -> list[Weights]:
    """The engine's initial parameters of each seed, on the host, in this file's form."""
    seats = Seats(len(seeds), mesh)
    state = compiled(config, seats, corpus).init(seats.counts, seats.put(np.array(seeds, np.uint32)))
    params = seats.take(state.params)
    return [from_engine(jax.tree.map(lambda x: x[lane], params)) for lane in range(len(seeds))]


def differences(peer: HandWritten, mesh: jax.sharding.Mesh, steps: int) -> tuple[float, float, float]:
    """Largest difference of the losses (absolute) and of all other statistics (relative to the larger of the value and
    one) over the first `steps` steps, from the same initial parameters, and the mean share of clipped heads."""
    own, _ = peer.run_from(engine_weights(peer.config, peer.seeds, peer.corpus, mesh))
    engine = train(peer.config, lanes_of(peer.config, peer.seeds), peer.corpus, mesh=mesh).curves
    if set(own) != set(engine):
        raise SystemExit(f"the two sides compute different statistics: {sorted(set(own) ^ set(engine))}")
    losses, others = 0.0, 0.0
    for name, values in engine.items():
        theirs, ours = values[:steps], own[name].reshape(values.shape)[:steps]
        if name == "loss":
            losses = float(np.abs(ours - theirs).max())
        else:
            others = max(others, float((np.abs(ours - theirs) / np.maximum(np.abs(theirs), 1)).max()))
    return losses, others, float(engine["clipped_share"][:steps].mean())


def check(peers: Sequence[HandWritten], mesh: jax.sharding.Mesh, steps: int) -> None:
    """Stops with a sentence if a form of the hand-written side does not compute what the engine computes."""
    for peer in peers:
        losses, others, clipped = differences(peer, mesh, steps)
        print(
            f"  check of {peer.form}: over the first {steps} steps losses differ by {losses:.1e}, statistics by "
            f"{others:.1e}; {clipped:.0%} of the heads clipped"
        )
        if not (losses <= LOSS_TOLERANCE and others <= STATISTICS_TOLERANCE):
            raise SystemExit(f"{peer.form} and the engine do not compute the same thing; a ratio would mean nothing.")


def compare(
    title: str, config: TrainConfig, seeds: Sequence[int], corpus: Corpus, forms: Sequence[str],
    mesh: jax.sharding.Mesh, *, check_steps: int, rounds: int,
) -> None:  # fmt: skip
    """Checks and times the engine against the forms: whole jobs, and the compiled steps alone."""
    print(f"\n{title}: {len(seeds)} seed(s), {mesh.size} device(s), {config.optimizer}, {config.steps} steps")
    chunk, devices = steps_per_chunk(config, mesh), list(mesh.devices.flat)
    peers = {form: HandWritten(config, seeds, corpus, form, devices, chunk) for form in forms}
    check(list(peers.values()), mesh, min(check_steps, config.steps))
    sides = {"engine": lambda: train(config, lanes_of(config, seeds), corpus, mesh=mesh)}
    sides |= {f"hand-written {form}": peer.run for form, peer in peers.items()}
    _report("whole job", interleaved(sides, rounds), config.steps)
    sides = {"engine": EngineSteps(config, seeds, corpus, mesh, chunk)}
    scanned = {form: peer for form, peer in peers.items() if form != "step"}
    sides |= {f"hand-written {form}": HandWrittenSteps(peer, chunk) for form, peer in scanned.items()}
    _report("compiled steps alone", interleaved(sides, 2 * rounds), chunk)


def _report(what: str, seconds: dict[str, list[float]], steps: int) -> None:
    for name, values in seconds.items():
        print(f"  {what}, {name}: {spread(values, 'ms per step', 1e3 / steps)}")
    best = fastest({name: values for name, values in seconds.items() if name != "engine"})
    print("  " + judged(f"{what}, engine over {best}", ratios(seconds["engine"], seconds[best]), at_most=1.05))


def settings(parser: argparse.ArgumentParser, *, steps: int) -> None:
    """The options that the scripts share."""
    parser.add_argument("--size", default="xs", choices=tuple(SIZES), help="model size (default: xs)")
    parser.add_argument("--steps", type=int, default=steps, help=f"steps of one timed job (default: {steps})")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds (default: 5)")


def config_of(args: argparse.Namespace, optimizer: str = "muon") -> TrainConfig:
    """The benchmark's run at a size; the threshold is one that clips some heads from the first step on."""
    base = TrainConfig(steps=args.steps, optimizer=optimizer, weight_decay=0.1, tau=3.0)
    return at_size(base, args.size)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    settings(parser, steps=100)
    parser.add_argument("--seeds", type=int, default=8, help="runs of the second comparison (default: 8)")
    parser.add_argument("--check-steps", type=int, default=10, help="steps that both sides must agree on (default: 10)")
    parser.add_argument("--optimizer", default="muon", choices=("muon", "adamw"))
    args = parser.parse_args(argv)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    config, corpus, devices = config_of(args, args.optimizer), load_corpus("kjv"), jax.devices()
    print(machine())
    shared = dict(check_steps=args.check_steps, rounds=args.rounds)
    compare("One run", config, [0], corpus, ("scan", "step"), lane_mesh(devices[:1]), **shared)
    compare("Several runs", config, range(args.seeds), corpus, ("map", "vmap"), lane_mesh(devices), **shared)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
