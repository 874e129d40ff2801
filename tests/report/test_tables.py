"""Tables in a terminal: the numbers, at both usual widths."""

import dataclasses
import io
import math

import pytest
from rich.console import Console

from repro.claims import LEDGER, Arm, Run, Runs
from repro.errors import ReproError
from repro.report import arms_table, claims_table, ledger_table
from repro.report.numbers import effect_text, interval_text, p_text
from repro.report.summary import summarise


def shown(table, width=100):
    console = Console(file=io.StringIO(), width=width)
    console.print(table)
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= width
    return text


@pytest.mark.parametrize("width", [80, 100, 160])
def test_claims_table_has_every_number_label_and_word(experiment, verdicts, width):
    text = shown(claims_table(experiment.claims, verdicts), width)
    words = set(text.split())
    for verdict in verdicts:
        assert set(verdict.label.split()) <= words
        if verdict.effect is not None:
            assert f"effect {effect_text(verdict)}" in text
        if verdict.interval is not None:
            assert interval_text(verdict) in text
            assert f"n = {verdict.n}" in text and f"p (Holm) = {p_text(verdict.p_holm)}" in text
        assert set(verdict.reason.split()) <= words
        assert set(verdict.control_label.split()) <= words


def test_numbers_are_those_of_the_verdict(verdicts):
    for verdict in verdicts:
        if verdict.effect is not None:
            assert float(effect_text(verdict).split()[0]) == pytest.approx(verdict.effect, rel=5e-3)
        if verdict.interval is not None:
            low, high = map(float, interval_text(verdict).split(" to "))
            assert (low, high) == pytest.approx(verdict.interval, rel=5e-3)
    near_one = dataclasses.replace(verdicts[0], effect=1.0004123, interval=(1.000381, 1.000452))
    assert effect_text(near_one) == "1.000412 times" and interval_text(near_one) == "1.000381 to 1.000452"
    assert interval_text(dataclasses.replace(verdicts[0], interval=(0.0, math.inf))) == "0 to inf"


def test_labels_have_colours(experiment, verdicts):
    console = Console(file=io.StringIO(), width=100, force_terminal=True, color_system="standard")
    console.print(claims_table(experiment.claims, verdicts))
    assert "\x1b[1;32msupported" in console.file.getvalue() and "\x1b[1;31mcontradicted" in console.file.getvalue()


def test_verdicts_of_other_claims_are_refused(experiment, verdicts):
    with pytest.raises(ReproError, match="the verdicts are those of"):
        claims_table(experiment.claims, verdicts[::-1])


@pytest.mark.parametrize("width", [80, 100])
def test_arms_table_has_a_row_per_place(experiment, runs, width):
    text = shown(arms_table(experiment, runs), width)
    assert "clipped" in text and "0.201" in text and "266.5" in text and "train" not in text
    assert "tuning" not in text
    assert {"Muon", "best", "0.003", "AdamW"} <= set(text.split())


def test_summary_counts_diverged_runs_and_leaves_out_empty_columns(experiment):
    runs = Runs(
        [Run("muon", s, {"loss": value}) for s, value in enumerate((1.0, 3.0, math.nan, math.inf))]
        + [Run("adamw", 0, {"loss": 1.5}), Run("sgd", 0, {"loss": math.nan})]
    )
    summary = summarise(experiment, runs, every_metric=False)
    assert summary.headings == ("arm", "seeds", "valid. loss, mean ± sd")
    assert summary.rows == (
        ("AdamW", "1", "1.5"),
        ("Muon", "4", "2 ± 1.4 (2 diverged)"),
        ("SGD with momentum", "1", "– (1 diverged)"),
    )


def test_checks_are_shown_by_their_own_metrics(experiment):
    summary = summarise(experiment, Runs([Run("check", 0, {"factor": 0.5})]), every_metric=False)
    assert summary.rows == (("check", "0.5"),) and summary.headings == ("arm", "factor"), (
        "no seeds, and no median of one"
    )
    several = Runs(Run("check", seed, {"factor": 0.5 + seed}) for seed in (0, 1, 2))
    summary = summarise(experiment, several, every_metric=False)
    assert summary.rows == (("check", "3", "1.5"),) and summary.headings[-1] == "factor, median"
    shown(arms_table(experiment, Runs()))


def test_markup_in_names_is_text(experiment, verdicts):
    arms = (Arm("muon", "[bold]a[/bold] [/]"), *experiment.arms[2:])
    hostile = dataclasses.replace(experiment, arms=arms, claims=(), check_arms=())
    assert {"[bold]a[/bold]", "[/]"} <= set(shown(arms_table(hostile, Runs([Run("muon", 0, {"loss": 1.0})]))).split())
    claim = dataclasses.replace(experiment.claims[0], variant="[red]", statement="[/x] [link]")
    text = shown(claims_table((claim,), (dataclasses.replace(verdicts[0], variant="[red]"),)))
    assert "K2-1 ([red])" in text and "[/x] [link]" in text


@pytest.mark.parametrize("width", [80, 100])
def test_ledger_table_lists_every_claim(width):
    labels = {"K2-1": ["supported", "inconclusive"]}
    text = shown(ledger_table({"K2-1": ["logit_explosion"], "K2-2": ["logit_explosion", "other"]}, labels), width)
    for id in LEDGER:
        assert f" {id} " in text
    assert text.count("not run") == len(LEDGER) - 2
    assert "supported" in text and "inconclusive" in text and "logit_explosion" in text
    with pytest.raises(ReproError, match="no claim 'XX-1'"):
        ledger_table({"XX-1": ["a"]}, {})
