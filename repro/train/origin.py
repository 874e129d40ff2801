"""What the bits of a job depend on, kept with a checkpoint and compared when it is continued."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import Any

import repro

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "scipy")


def package_versions() -> dict[str, str]:
    """Versions of this package and of those that it computes with."""
    return {"repro": repro.__version__} | {name: version(name) for name in PACKAGES}


def compiler_flags() -> list[str]:
    """What XLA_FLAGS asks for, but for the number of devices and what is only written out."""
    passed = ("--xla_force_host_platform_device_count", "--xla_dump")
    return sorted(word for word in os.environ.get("XLA_FLAGS", "").split() if not word.startswith(passed))


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """In words, where what a checkpoint was written with is not what there is now. Both hold any of `versions`,
    `platform`, `flags`, `config`, `lanes`, `corpus` and `program`, in plain JSON; a part that only one of them has is
    passed over."""
    then, now = (json.loads(json.dumps(dict(part))) for part in (then, now))
    found: list[str] = []
    for name in ("versions", "platform", "flags", "config", "lanes", "corpus", "program"):
        old, new = then.get(name), now.get(name)
        if old is None or new is None or old == new:
            continue
        if name == "versions":
            found += _changed(old, new, "{0} {1}, this is {2}")
        elif name == "platform":
            found.append(f"platform {old}, this is {new}")
        elif name == "flags":
            found.append(f"XLA_FLAGS {' '.join(old) or 'unset'}, this is {' '.join(new) or 'unset'}")
        elif name == "config":
            found += _changed(dict(_flat(old)), dict(_flat(new)), "train.{0} {1}, this is {2}")
        elif name == "lanes":
            found += _lanes(old, new)
        elif name == "corpus":
            found.append(f"corpus {old[:12]}, this is {new[:12]}")
        else:
            found.append(f"step program {old[:12]}, this is {new[:12]} (hashes of its StableHLO)")
    return found


def _changed(old: Mapping[str, Any], new: Mapping[str, Any], words: str) -> list[str]:
    names = dict.fromkeys((*old, *new))
    return [words.format(n, old.get(n, "unset"), new.get(n, "unset")) for n in names if old.get(n) != new.get(n)]


def _flat(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


def _lanes(old: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]]) -> list[str]:
    if len(old) != len(new):
        return [f"{len(old)} runs, this has {len(new)}"]
    found = []
    for i, (a, b) in enumerate(zip(old, new, strict=True)):
        found += _changed(a, b, f"{{0}} {{1}} of run {i}, this is {{2}}")
    return found
