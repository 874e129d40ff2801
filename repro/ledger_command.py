"""`repro ledger`: bytes of a training state by role, under one policy or all of them. It says nothing of speed."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from repro.errors import ReproError


def ledger(args: argparse.Namespace, console: Console) -> int:
    """Prints the tables that the arguments of the command ask for."""
    from repro.quant.ledger import STATE_POLICIES, StatePolicy, state_ledger

    changes = dict(_change(text) for text in args.role)
    if args.policy is not None and args.policy not in STATE_POLICIES:
        raise ReproError(f"State policy {args.policy!r} is unknown; known are {', '.join(STATE_POLICIES)}.")
    chosen: Sequence[StatePolicy] = [STATE_POLICIES[args.policy]] if args.policy else [*STATE_POLICIES.values()]
    chosen = [policy.with_roles(changes) for policy in chosen]
    parameters = _parameters(args)
    if parameters is not None:
        console.print(f"{parameters:,} parameters; 1 GB = 10^9 bytes. Activations and buffers are not counted.")
    if changes:
        said = ", ".join(f"{role} {stored or 'none'}" for role, stored in changes.items())
        console.print(f"Changed in every policy shown: {said}.")
    if args.policy:
        console.print(_roles(state_ledger(parameters or 1, chosen[0]), counted=parameters is not None))
    else:
        console.print(_policies([state_ledger(parameters or 1, policy) for policy in chosen], parameters is not None))
        console.print(_formats())
    return 0


def _change(text: str) -> tuple[str, str | None]:
    role, sign, stored = text.partition("=")
    if not (role and sign and stored):
        raise ReproError(f"--role {text} is not ROLE=FORMAT, such as second_moment=bf16 or ema=none.")
    return role.replace("-", "_"), None if stored == "none" else stored


def _parameters(args: argparse.Namespace) -> int | None:
    if args.parameters is not None and args.size is not None:
        raise ReproError("--parameters and --size contradict each other; give the one or the other.")
    if args.size is not None:
        return count_parameters(args.size)
    if args.parameters is None:
        return None
    try:
        number = int(args.parameters.replace(",", ""))
    except ValueError:
        number = 0
    if number < 1:
        raise ReproError(f"--parameters is {args.parameters}; it must be a whole number of at least 1.")
    return number


def count_parameters(size: str) -> int:
    """The parameters of a named size of `repro.models.SIZES`. Raises `ReproError` for an unknown one."""
    import jax

    from repro.models import SIZES, ModelConfig, init_and_apply

    if size not in SIZES:
        raise ReproError(f"size {size!r} is unknown; known are {', '.join(SIZES)}.")
    init, _ = init_and_apply(SIZES[size].apply(ModelConfig()))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(jax.eval_shape(init, jax.random.key(0))))


def _roles(ledger, counted: bool) -> Table:
    from repro.quant.ledger import ROLES

    table = _table("role", "what it is", "format", "bits each", "bytes each", *(["GB"] if counted else []))
    for row in ledger.rows:
        bits = float(row.bits_per_value)
        cells = (row.role, ROLES[row.role], row.format, f"{bits:.5g}", f"{bits / 8:.5g}")
        table.add_row(*cells, *([_gigabytes(row.bytes)] if counted else []))
    table.add_section()
    total = ("total", "", ledger.policy.name, "", f"{float(ledger.bytes_per_parameter):.5g}")
    table.add_row(*total, *([_gigabytes(ledger.bytes)] if counted else []))
    return table


def _policies(ledgers: Sequence, counted: bool) -> Table:
    first = ledgers[0]
    headings = (
        "policy",
        "bytes per parameter",
        *(["GB"] if counted else []),
        f"against {first.policy.name}",
        "formats",
    )
    table = _table(*headings)
    for ledger in ledgers:
        each = ledger.bytes_per_parameter
        formats = ", ".join(f"{row.role} {row.format}" for row in ledger.rows)
        gigabytes = [_gigabytes(ledger.bytes)] if counted else []
        relative = f"{float(each / first.bytes_per_parameter):.3g}"
        table.add_row(ledger.policy.name, f"{float(each):.5g}", *gigabytes, relative, formats)
    return table


def _formats() -> Table:
    from repro.quant import FORMATS, RECIPES
    from repro.quant.ledger import storable, storage_bits

    table = _table("format", "element", "bits each", "of which scales")
    for name in storable():
        bits = float(storage_bits(name))
        element = RECIPES[name].element if name in RECIPES else name
        table.add_row(name, element, f"{bits:.6g}", f"{bits - FORMATS[element].bits:.6g}")
    return table


def _table(*headings: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), header_style="bold")
    words = ("role", "what it is", "format", "policy", "element", "formats")
    for heading in headings:
        table.add_column(heading, justify="left" if heading in words else "right", overflow="fold")
    return table


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:,.1f}" if count >= 1e8 else f"{count / 1e9:.4g}"
