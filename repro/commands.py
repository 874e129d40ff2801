"""What each command does."""

from __future__ import annotations

import argparse
import contextlib
import os
from pathlib import Path
from typing import Any

from rich.console import Console

from repro.errors import ReproError


def _console() -> Console:
    # No markup: a name or a message may hold square brackets.
    console = Console(highlight=False, markup=False)
    return console if console.is_terminal else Console(highlight=False, markup=False, width=max(100, console.width))


_MOST_CPU_DEVICES = 16
_MOST_ROWS, _MOST_COLUMNS = 16, 8
"""Of what an experiment computed, as a terminal can still show it."""


def _start_devices() -> None:
    """Before JAX starts: one CPU device per core, since runs are laid over devices, and on a GPU only kernels that give
    the same bits every time. Devices do their own linear algebra with a thread each: where OpenBLAS starts more, they
    wait for each other and a small SVD takes 40 times as long."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # read when SciPy is imported, which JAX does
    import jax

    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_gpu_deterministic_ops" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_deterministic_ops=true".strip()
    if "JAX_NUM_CPU_DEVICES" not in os.environ and "xla_force_host_platform_device_count" not in flags:
        usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        # A process that has used JAX already, such as a notebook, keeps the devices that it has.
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", min(usable, _MOST_CPU_DEVICES))


def list_claims(args: argparse.Namespace) -> int:
    from repro import catalogue
    from repro.report import ledger_table
    from repro.report.record import RunFolder, stored_verdicts

    runs: dict[str, Any] = {}
    for name in catalogue.names():
        experiment = catalogue.load(name)
        for preset in experiment.presets.values():
            for claim in experiment.claims_for(preset):
                runs.setdefault(claim.id, dict.fromkeys(()))[name] = None
    labels: dict[str, Any] = {}
    for path in sorted((catalogue.shipped().parent / "results").glob("*/verdict.json")):
        for item in stored_verdicts(RunFolder(path.parent).read("verdict.json")):
            labels.setdefault(item.claim_id, {})[item.label] = None
    _console().print(
        ledger_table({i: [*names] for i, names in runs.items()}, {i: [*found] for i, found in labels.items()})
    )
    return 0


def show(args: argparse.Namespace) -> int:
    from repro import catalogue
    from repro.claims import LEDGER

    console = _console()
    if args.id.upper() in LEDGER:
        row = LEDGER[args.id.upper()]
        console.print(f"{row.id} ({row.system}, tier {row.tier})\n{row.claim}")
        if row.reported:
            console.print(f"Reported, and its boundary: {row.reported}")
        chosen = [
            (catalogue.load(name), claim)
            for name in catalogue.names()
            for claim in _all_claims(catalogue.load(name))
            if claim.id == row.id
        ]
        if not chosen:
            console.print("Not run yet: no experiment judges it.")
    else:
        if args.id.replace("_", "-") not in catalogue.names():
            raise ReproError(f"{args.id!r} is neither a claim nor an experiment; `repro list` shows both.")
        experiment = catalogue.load(args.id)
        console.print(f"{experiment.name}: {experiment.title}\nPresets: {', '.join(experiment.presets)}")
        for arm in experiment.arms:
            console.print(f"  {arm.name}: {arm.label}")
        chosen = [(experiment, claim) for claim in _all_claims(experiment)]
    from repro.report import rule_words

    for experiment, claim in chosen:
        console.print(f"\n{claim.id}, {claim.variant} (repro run {experiment.name})")
        console.print(
            f"  {claim.statement}\n  Source: {claim.source}. Reported: {claim.reported}\n  Boundary: {claim.boundary}"
        )
        console.print(f"  Rule: {rule_words(claim.criterion)}\n  Control: {claim.control.description}")
    return 0


def _all_claims(experiment: Any) -> list:
    """Every claim of an experiment under any preset, once."""
    found = {claim.name: claim for preset in experiment.presets.values() for claim in experiment.claims_for(preset)}
    return [*found.values()]


def run(args: argparse.Namespace, overrides: list) -> int:
    _start_devices()
    from repro import catalogue
    from repro.overrides import changed_preset, help_text
    from repro.report.record import RunFolder

    if args.name is None:
        if args.help:
            print(
                "usage: repro run NAME [--preset PRESET] [--seeds N] [--out DIR] [--keep-checkpoints] [--FIELD VALUE ...]"
                f"\n\nExperiments: {', '.join(catalogue.names())}"
            )
            return 0
        raise ReproError(f"repro run: which experiment? Known are {', '.join(catalogue.names())}.")
    experiment = catalogue.load(args.name)
    if args.preset not in experiment.presets:
        raise ReproError(
            f"preset {args.preset!r} is unknown for {experiment.name}; known are {', '.join(experiment.presets)}."
        )
    stored = experiment.presets[args.preset]
    prog = f"repro run {experiment.name}"
    if args.help:
        seeds = " [--seeds N]" if hasattr(stored, "test_seeds") else ""
        presets = "|".join(experiment.presets)
        print(f"usage: {prog} [--preset {presets}]{seeds} [--out DIR] [--keep-checkpoints] [--FIELD VALUE ...]\n")
        print(help_text(stored, prog))
        return 0
    if args.keep_checkpoints and experiment.plan is None:
        raise ReproError(f"{experiment.name} trains nothing, so there are no checkpoints to keep.")
    preset, changed = changed_preset(experiment, stored, overrides, args.seeds, prog)
    _check_platform(preset, args.preset)
    folder = RunFolder.create(args.out or Path("runs") / f"{experiment.name}-{args.preset}")
    return _execute(experiment, args.preset, preset, folder, changed, keep_checkpoints=args.keep_checkpoints)


def _check_platform(preset: Any, name: str) -> None:
    import jax

    if getattr(preset, "platform", "any") == "gpu" and jax.default_backend() not in ("gpu", "cuda", "rocm"):
        raise ReproError(
            f"preset {name} is made for a GPU with about 80 GB of memory and JAX sees only {jax.default_backend()}; "
            "install repro[cuda] on such a machine, or use --preset cpu."
        )


def _execute(experiment: Any, preset_name: str, preset: Any, folder: Any, changed: list, **options: Any) -> int:
    from repro.errors import Stopped
    from repro.progress import ConsoleWatcher
    from repro.report import arms_table, claims_table
    from repro.runner import execute
    from repro.signals import Interrupted, Signals

    console = _console()
    console.print(f"{experiment.title}\n{experiment.name}, preset {preset_name}, into {folder.path}")
    if changed:
        console.print(f"Changed from the preset: {', '.join(changed)}; the verdicts do not count as evidence.")
    onwards = f"continue with `repro resume {folder.path}`."
    try:
        with Signals() as signals, folder.locked(), ConsoleWatcher(console) as watcher:
            options |= {"changed": changed, "watcher": watcher, "signals": signals}
            verdicts = execute(experiment, preset_name, preset, folder, **options)
            _, _, runs = folder.sealed()
    except Stopped as stopped:
        raise Interrupted(f"{stopped}; {onwards}", signals.received) from stopped
    except Interrupted as interrupted:
        raise Interrupted(f"{interrupted}; {onwards}", signals.received) from interrupted
    table = arms_table(experiment, runs)
    if experiment.plan is None and (table.row_count > _MOST_ROWS or len(table.columns) > _MOST_COLUMNS):
        console.print(f"What was computed: {table.row_count} rows of the report.")
    else:
        console.print(table)
    console.print(claims_table(experiment.claims_for(preset), verdicts))
    console.print(f"Figures and report: {folder.path / 'report.md'}")
    return 0


def _same_rules(record: dict, where: Path) -> tuple:
    """The experiment and preset of a run folder. Raises `ReproError` if the rules have changed since."""
    from repro import catalogue
    from repro.claims import rule_hash

    experiment = catalogue.load(str(record.get("experiment")))
    preset = catalogue.stored_preset(experiment, record, where)
    if rule_hash(experiment, preset, record["preset"]) != record.get("rule_hash"):
        raise ReproError(
            f"the claims, arms or preset of {experiment.name} have changed since {where} was written; "
            "use the version that wrote it, or run the experiment again."
        )
    return experiment, preset


def resume(args: argparse.Namespace) -> int:
    _start_devices()
    from repro.report import claims_table
    from repro.report.record import RunFolder, stored_verdicts

    folder = RunFolder.existing(args.folder)
    if folder.finished:
        record, verdict, _ = folder.sealed()
        experiment, preset = _same_rules(record, folder.path)
        _console().print(claims_table(experiment.claims_for(preset), stored_verdicts(verdict)))
        return 0
    record = folder.read("run.json")
    experiment, preset = _same_rules(record, folder.path)
    _check_platform(preset, record["preset_name"])
    accept = args.accept_differences
    return _execute(experiment, record["preset_name"], preset, folder, record["changed"], accept_differences=accept)


def replay(args: argparse.Namespace) -> int:
    _start_devices()
    from repro import replay_command
    from repro.report.record import RunFolder

    folder = RunFolder.existing(args.folder)
    experiment, preset = _same_rules(folder.read("run.json"), folder.path)
    return replay_command.replay(args, experiment, preset, folder, _console())


def verdict(args: argparse.Namespace) -> int:
    from repro.claims import decide_all
    from repro.report import claims_table
    from repro.report.record import RunFolder, stored_verdicts
    from repro.report.tables import check_order

    console = _console()
    if len(args.folders) > 1 and not args.check:
        raise ReproError("repro verdict takes one folder; several can be given with --check.")
    for path in args.folders:
        folder = RunFolder.existing(path)
        record, stored, runs = folder.sealed()
        experiment, preset = _same_rules(record, path)
        verdicts = stored_verdicts(stored)
        check_order(experiment.claims_for(preset), verdicts)
        if args.check:
            again = decide_all(experiment.claims_for(preset), runs)
            for old, new in zip(verdicts, again, strict=True):
                if found := old.differences(new):
                    raise ReproError(
                        f"{path}: the verdict on {new.claim_id} ({new.variant}) is {new.label} when derived again, stored "
                        f"as {old.label}; not as stored: {', '.join(found)}."
                    )
            console.print(f"{path}: {len(again)} verdicts derived again, all as stored.")
        else:
            console.print(claims_table(experiment.claims_for(preset), verdicts))
    return 0


def report(args: argparse.Namespace) -> int:
    if args.out or args.serve:
        return _pages(args)
    if not args.folders:
        raise ReproError("repro report: which run folder? Or write the pages of all results with --out DIR.")
    import polars as pl

    from repro.report import draw, write_report
    from repro.report.record import RunFolder, stored_verdicts

    for path in args.folders:
        folder = RunFolder.existing(path)
        record, stored, runs = folder.sealed()
        experiment, preset = _same_rules(record, path)
        verdicts = stored_verdicts(stored)
        curves = pl.read_parquet(folder.path / "metrics.parquet")
        figures = draw(experiment, curves.drop("head_logits", strict=False), runs, verdicts, folder.path / "figures")
        write_report(folder.path / "report.md", experiment, preset, record, runs, verdicts, figures)
        _console().print(f"{folder.path / 'report.md'} and {len(figures)} figures written.")
    return 0


def _pages(args: argparse.Namespace) -> int:
    from repro import catalogue
    from repro.report.site import build_site
    from repro.report.site.serve import open_browser, serve

    places = (catalogue.shipped().parent / "results", Path("results"))
    folders = args.folders or [place for place in places if place.is_dir()][:1]
    if not folders:
        raise ReproError(
            "repro report: neither this installation nor the working directory holds results; give the folders of runs."
        )
    console = _console()
    if args.serve:
        serve(folders, args.out, args.port, console.print, ready=open_browser)
    else:
        pages = build_site(folders, args.out)
        console.print(f"{len(pages)} pages written; open {args.out / 'index.html'} in a browser.")
    return 0


def compare(args: argparse.Namespace) -> int:
    from repro import compare_command

    return compare_command.compare(args, _console())


def ledger(args: argparse.Namespace) -> int:
    from repro import ledger_command

    return ledger_command.ledger(args, _console())


def scale_down(args: argparse.Namespace) -> int:
    from repro import scale_down_command

    return scale_down_command.scale_down(args, _console())


def doctor(args: argparse.Namespace) -> int:
    """Versions, devices, data, and which presets this machine can run."""
    _start_devices()
    import jax

    from repro import catalogue
    from repro.data import load_corpus
    from repro.runner import hardware, versions

    console = _console()
    console.print("Versions: " + ", ".join(f"{name} {value}" for name, value in versions().items()))
    machine = hardware()
    console.print(
        f"Devices: {machine['devices']} x {machine['device']} ({machine['platform']}), {machine['cpu_cores']} CPU cores"
    )
    for spec in ("kjv", "mkv2"):
        corpus = load_corpus(spec)
        console.print(f"Corpus {corpus.name}: {len(corpus.tokens):,} tokens, SHA-256 {corpus.sha256[:16]}...")
    total = float(jax.jit(lambda x: (x @ x).sum())(jax.numpy.ones((64, 64))))
    console.print(f"A matrix product on the device: {'as expected' if total == 64.0**3 else f'WRONG ({total})'}")
    for name in catalogue.names():
        for preset_name, preset in catalogue.load(name).presets.items():
            try:
                _check_platform(preset, preset_name)
                console.print(f"{name} --preset {preset_name}: can run here")
            except ReproError as error:
                console.print(f"{name} --preset {preset_name}: cannot run here; {error}")
    return 0 if total == 64.0**3 else 2


def drill(args: argparse.Namespace) -> int:
    _start_devices()
    from repro import drill_command

    return drill_command.drill(args, _console())


COMMANDS = {
    "list": list_claims, "show": show, "resume": resume, "replay": replay, "drill": drill, "verdict": verdict,
    "report": report, "compare": compare, "ledger": ledger, "scale-down": scale_down, "doctor": doctor,
}  # fmt: skip
