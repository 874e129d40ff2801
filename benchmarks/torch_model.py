"""The peer in PyTorch: the same decoder, optimizers and statistics, eager, as one would write them there."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from repro.data import Corpus
from repro.train import TrainConfig

_QUINTIC = (3.4445, -4.7750, 2.0315)
_NAMES = ("q", "k", "v", "o", "gate", "up", "down")


class Layer(nn.Module):
    """One pre-norm block; returns the new residual stream and the statistics of its logits and output."""

    def __init__(self, config: TrainConfig) -> None:
        super().__init__()
        m = config.model
        self.heads = m.heads
        self.attention_norm = nn.RMSNorm(m.width, eps=m.norm_eps)
        self.ffn_norm = nn.RMSNorm(m.width, eps=m.norm_eps)
        self.q, self.k, self.v, self.o = (nn.Linear(m.width, m.width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(m.width, m.ffn, bias=False) for _ in range(2))
        self.down = nn.Linear(m.ffn, m.width, bias=False)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, future: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        batch, time, width = x.shape
        h = self.attention_norm(x)
        q, k, v = (f(h).view(batch, time, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        z = rotated(q, cos, sin) @ rotated(k, cos, sin).transpose(2, 3) * (width // self.heads) ** -0.5
        p = z.masked_fill(future, -torch.inf).softmax(-1)
        x = x + self.o((p @ v).transpose(1, 2).reshape(batch, time, width))
        h = self.ffn_norm(x)
        units = F.silu(self.gate(h)) * self.up(h)
        x = x + self.down(units)
        with torch.no_grad():
            seen = {
                "max_logit": z.masked_fill(future, -torch.inf).amax((0, 2, 3)),
                "max_abs_logit": z.masked_fill(future, 0.0).abs().amax((0, 2, 3)),
                "entropy": torch.special.entr(p).sum(-1).mean((0, 2)),
                "activation_max": x.abs().amax(),
                "activation_rms": x.square().mean().sqrt(),
                "hidden_max": units.abs().amax(),
                "hidden_rms": units.square().mean().sqrt(),
            }
        return x, seen


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RoPE on [batch, head, time, size]; component i pairs with i + size / 2."""
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)


class Decoder(nn.Module):
    def __init__(self, config: TrainConfig) -> None:
        super().__init__()
        m = config.model
        self.embedding = nn.Embedding(m.vocab_size, m.width)
        self.layers = nn.ModuleList(Layer(config) for _ in range(m.layers))
        self.norm = nn.RMSNorm(m.width, eps=m.norm_eps)
        self.head = nn.Linear(m.width, m.vocab_size, bias=False)
        frequency = m.rope_theta ** -(np.arange(0, m.head_size, 2) / m.head_size)
        angle = torch.from_numpy(np.outer(np.arange(config.length), frequency))
        self.register_buffer("cos", angle.cos().float())
        self.register_buffer("sin", angle.sin().float())
        self.register_buffer("future", torch.ones(config.length, config.length, dtype=torch.bool).triu(1))

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        x, seen = self.embedding(tokens), []
        for layer in self.layers:
            x, own = layer(x, self.cos, self.sin, self.future)
            seen.append(own)
        return self.head(self.norm(x)), {name: torch.stack([own[name] for own in seen]) for name in seen[0]}

    @torch.no_grad()
    def load(self, weights: dict[str, Any]) -> None:
        """Weights in the form of the hand-written JAX loop: matrices [in, out]."""
        self.embedding.weight.copy_(tensor(weights["embedding"]))
        self.head.weight.copy_(tensor(weights["head"]).T)
        self.norm.weight.copy_(tensor(weights["final_gain"]))
        for layer, own in zip(self.layers, weights["layers"], strict=True):
            layer.attention_norm.weight.copy_(tensor(own["attention_gain"]))
            layer.ffn_norm.weight.copy_(tensor(own["ffn_gain"]))
            for name in _NAMES:
                getattr(layer, name).weight.copy_(tensor(own[name]).T)


def tensor(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.array(values))


class Muon:
    """Nesterov momentum, five Newton-Schulz steps, 0.2 sqrt(longer side); matrices of one shape go as one batch."""

    def __init__(self, params: Iterable[nn.Parameter], weight_decay: float) -> None:
        self.params, self.weight_decay = list(params), weight_decay
        self.momentum = [torch.zeros_like(p) for p in self.params]

    @torch.no_grad()
    def step(self, lr: float) -> None:
        groups: dict[tuple[int, int], list[tuple[nn.Parameter, torch.Tensor, bool]]] = {}
        for p, m in zip(self.params, self.momentum, strict=True):
            m.mul_(0.95).add_(p.grad)
            ahead, tall = p.grad.add(m, alpha=0.95), p.shape[0] > p.shape[1]
            ahead = ahead.T if tall else ahead
            groups.setdefault(tuple(ahead.shape), []).append((p, ahead, tall))
        a, b, c = _QUINTIC
        for shape, members in groups.items():
            x = torch.stack([ahead for _, ahead, _ in members])
            x = x / x.norm(dim=(1, 2), keepdim=True).clamp_min(1e-30)
            for _ in range(5):
                s = x @ x.mT
                x = torch.baddbmm(x, torch.baddbmm(s, s, s, beta=b, alpha=c), x, beta=a)
            for (p, _, tall), direction in zip(members, x.unbind(), strict=True):
                p.mul_(1 - lr * self.weight_decay)
                p.add_(direction.T if tall else direction, alpha=-lr * 0.2 * max(shape) ** 0.5)


def rates(config: TrainConfig) -> list[float]:
    """The rate of every step: linear warm-up, then a cosine (or constant)."""
    rise, low = max(1, round(config.warmup * config.steps)), config.final_fraction

    def part(step: int) -> float:
        if step < rise:
            return step / rise
        turn = math.pi * (step - rise) / max(1, config.steps - rise)
        return low + (1 - low) * (1 + math.cos(turn)) / 2 if config.schedule == "cosine" else 1.0

    return [config.learning_rate * part(step + 1) for step in range(config.steps)]


class Run:
    """One training run from given weights."""

    def __init__(self, config: TrainConfig, weights: dict[str, Any]) -> None:
        self.config, self.model = config, Decoder(config)
        self.model.load(weights)
        matrix = lambda name: config.optimizer == "muon" and name.split(".")[-2] in _NAMES
        named = list(self.model.named_parameters())
        self.params = [p for _, p in named]
        self.muon = Muon([p for name, p in named if matrix(name)], config.weight_decay)
        self.adamw = torch.optim.AdamW(
            [p for name, p in named if not matrix(name)], betas=(0.9, 0.95), eps=1e-8,
            weight_decay=config.weight_decay, fused=True,
        )  # fmt: skip

    def loss(self, windows: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        logits, seen = self.model(windows[:, :-1])
        with torch.no_grad():
            seen["log_z_rms"] = logits.logsumexp(-1).square().mean().sqrt()
        return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()), seen

    def step(self, windows: torch.Tensor, lr: float) -> dict[str, torch.Tensor]:
        """One step; returns the statistics that the engine computes, as tensors."""
        for p in self.params:
            p.grad = None
        loss, seen = self.loss(windows)
        loss.backward()
        before = [p.detach().clone() for p in self.params]
        self.muon.step(lr)
        self.adamw.param_groups[0]["lr"] = lr
        self.adamw.step()
        with torch.no_grad():
            update_norm = nn.utils.get_total_norm(torch._foreach_sub(self.params, before))
            top = seen["max_logit"]
            root = torch.where(top > self.config.tau, self.config.tau / top, 1.0).sqrt()
            for layer, own in zip(self.model.layers, root, strict=True):
                rows = own.repeat_interleave(self.config.model.head_size)[:, None]
                layer.q.weight.mul_(rows)
                layer.k.weight.mul_(rows)
            return {
                "loss": loss.detach(), "max_logit": top.amax(), "max_abs_logit": seen["max_abs_logit"].amax(),
                "max_capped_logit": seen["max_abs_logit"].amax(), "entropy_mean": seen["entropy"].mean(),
                "entropy_min": seen["entropy"].amin(), "clipped_share": (top > self.config.tau).float().mean(),
                "activation_max": seen["activation_max"].amax(), "activation_rms": seen["activation_rms"][-1],
                "grad_norm": nn.utils.get_total_norm([p.grad for p in self.params]), "update_norm": update_norm,
                "head_logits": top, "hidden_max": seen["hidden_max"].amax(), "hidden_rms": seen["hidden_rms"].amax(),
                "log_z_rms": seen["log_z_rms"],
            }  # fmt: skip


def job(config: TrainConfig, seed: int, weights: dict[str, Any], corpus: Corpus) -> tuple[dict[str, np.ndarray], float]:
    """A whole run: the statistics of every step and the final validation loss."""
    run, read, shape = Run(config, weights), [], dict(batch_size=config.batch_size, length=config.length)
    for start in range(0, config.steps, 10):
        steps = range(start, min(start + 10, config.steps))
        windows = torch.from_numpy(corpus.batches([seed], steps, **shape)[:, 0].astype(np.int64))
        read += [run.step(own, lr) for own, lr in zip(windows, rates(config)[start:], strict=False)]
    with torch.no_grad():
        validation = torch.from_numpy(corpus.validation(config.eval_windows, config.length).astype(np.int64))
        final = run.loss(validation)[0].item()
    return {name: torch.stack([own[name] for own in read]).numpy() for name in read[0]}, final


def work(pipe: Any, config: TrainConfig, seeds: Sequence[int], weights: Sequence[dict[str, Any]]) -> None:
    """A process that trains its seeds in turn on one thread each time it is asked, until it receives False."""
    from repro.data import load_corpus

    torch.set_num_threads(1)
    corpus = load_corpus("kjv")
    while pipe.recv():
        for seed, own in zip(seeds, weights, strict=True):
            job(config, seed, own, corpus)
        pipe.send(True)
