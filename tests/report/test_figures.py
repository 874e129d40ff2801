"""Figures: what is drawn, in which colours, and that the files are the same every time."""

import dataclasses
import math

import matplotlib
import numpy as np
import polars as pl
import pytest
from matplotlib.collections import PolyCollection

from repro.claims import All, Arm, AtLeast, AtMost, Claim, Control, Greater, Run, Runs, decide_all, swapped
from repro.errors import ReproError
from repro.report import Curve, Dose, Effects, Heatmap, Ladder, Reference, Width, draw, figure
from repro.report.curve_figure import band
from repro.report.effects_figure import deciding
from repro.report.look import LINE_STYLES, PALETTE, arm_style, legend_shape, plain_number

LOGIT = Curve("c", "max_logit", "title", "max logit", log=True)


def one_arm(values, *, size="s", arm="muon", metric="max_logit", **fixed):
    """Curves of one arm; `values` is [seeds, steps]."""
    columns = {"size": size, "arm": arm, "point": "best", "phase": "test", "rate": 1e-3, **fixed}
    parts = [
        pl.DataFrame({"step": np.arange(len(row)), metric: np.asarray(row, float)}).with_columns(
            pl.lit(seed).alias("seed"), *(pl.lit(value).alias(name) for name, value in columns.items())
        )
        for seed, row in enumerate(values)
    ]
    return pl.concat(parts)


def labelled(axes, label):
    return next(line for line in axes.lines if line.get_label() == label)


def legend_texts(drawn):
    return [text.get_text() for text in drawn.legends[0].get_texts()]


def test_every_spec_becomes_a_file_of_readable_size(written, experiment):
    assert [path.name for path in written] == [f"{spec.name}.png" for spec in experiment.figures]
    for path in written:
        data = path.read_bytes()
        assert data[:8] == b"\x89PNG\r\n\x1a\n"
        assert 1000 < int.from_bytes(data[16:20]) <= 1600
        assert b"Software" not in data and b"tIME" not in data


def test_the_same_bytes_again_whatever_matplotlibrc_says(written, experiment, curves, runs, verdicts, tmp_path):
    with matplotlib.rc_context({"font.size": 20, "axes.facecolor": "red", "savefig.dpi": 10}):
        again = draw(experiment, curves, runs, verdicts, tmp_path)
        assert matplotlib.rcParams["font.size"] == 20
    assert [path.read_bytes() for path in again] == [path.read_bytes() for path in written]


def test_an_arm_has_one_colour_in_every_figure(experiment, curves, runs):
    style = arm_style(experiment, "muon")
    for spec in experiment.figures:
        if isinstance(spec, Effects):
            continue
        drawn = figure(spec, experiment, curves, runs, ())
        handle = next(h for h in drawn.legends[0].legend_handles if h.get_label().split(" over ")[0] == "Muon")
        assert handle.get_color() == style["color"]
    few = figure(dataclasses.replace(LOGIT, arms=("softcap", "muon")), experiment, curves, runs, ())
    assert labelled(few.axes[0], "muon").get_color() == style["color"]


def test_more_arms_than_colours_differ_in_line_style(experiment):
    arms = tuple(Arm(f"a{i}", str(i)) for i in range(24))
    many = dataclasses.replace(experiment, arms=arms, claims=(), check_arms=())
    styles = {(arm_style(many, arm.name)["color"], str(arm_style(many, arm.name)["linestyle"])) for arm in many.arms}
    assert len(styles) == 24 and len(PALETTE) == 8 and len(LINE_STYLES) >= 3


def test_bands_reach_from_smallest_to_largest_and_lines_are_medians(experiment, curves, runs):
    drawn = figure(LOGIT, experiment, curves, runs, ())
    assert [axes.get_title("left") for axes in drawn.axes] == ["size xs", "size s", "size m"]
    axes = drawn.axes[1]
    muon = curves.filter((pl.col("arm") == "muon") & (pl.col("size") == "s")).sort("seed", "step")
    values = muon["max_logit"].to_numpy().reshape(8, -1)
    (polygon,) = [c for c in axes.collections if isinstance(c, PolyCollection) and c.get_label() == "muon"]
    vertices = polygon.get_paths()[0].vertices
    for step in (0, 150, 299):
        here = vertices[vertices[:, 0] == step, 1]
        assert here.min() == values[:, step].min() and here.max() == values[:, step].max()
    assert np.array_equal(labelled(axes, "muon").get_ydata(), np.median(values, axis=0))
    assert "smallest to largest" in drawn.legends[0].get_title().get_text()


def test_panels_share_the_y_axis(experiment, curves, runs):
    limits = {axes.get_ylim() for axes in figure(LOGIT, experiment, curves, runs, ()).axes}
    assert len(limits) == 1


def test_diverged_runs_end_their_line_and_are_counted(experiment, runs):
    values = np.ones((4, 20)) * np.arange(1, 5)[:, None]
    values[1:, 10:] = [[np.nan], [np.inf], [-np.inf]]
    drawn = figure(LOGIT, experiment, one_arm(values), runs, ())
    line = labelled(drawn.axes[0], "muon")
    assert line.get_xdata()[-1] == 9 and np.isfinite(line.get_ydata()).all()
    cross = next(line for line in drawn.axes[0].lines if line.get_marker() == "x")
    assert cross.get_xdata()[0] == 9
    assert legend_texts(drawn) == ["Muon (3 of 4 diverged)"]


def test_a_minority_that_diverged_does_not_end_the_line():
    values = np.ones((4, 20))
    values[3, 10:] = np.nan
    found = band(one_arm(values), "max_logit")
    assert len(found.steps) == 20 and found.lost == 1 and not found.ended


def test_a_run_without_any_finite_value_is_named(experiment, runs, tmp_path):
    experiment = dataclasses.replace(experiment, figures=(LOGIT,))
    curves = one_arm(np.full((2, 5), np.nan))
    assert legend_texts(figure(LOGIT, experiment, curves, runs, ())) == ["Muon (2 of 2 diverged)"]
    assert len(draw(experiment, curves, runs, (), tmp_path)) == 1


def test_nulls_are_steps_without_a_measurement(experiment, runs):
    curves = one_arm(np.arange(1, 31).reshape(3, 10))
    sparse = curves.with_columns(pl.when(pl.col("step") % 3 == 0).then(pl.col("max_logit")).alias("max_logit"))
    drawn = figure(LOGIT, experiment, sparse, runs, ())
    assert list(labelled(drawn.axes[0], "muon").get_xdata()) == [0, 3, 6, 9]
    assert legend_texts(drawn) == ["Muon"]


def test_zeros_on_a_logarithmic_axis(experiment, runs, tmp_path):
    values = np.tile([0.0, 0.0, 1.0, 10.0], (3, 1))
    experiment = dataclasses.replace(experiment, figures=(LOGIT, dataclasses.replace(LOGIT, name="zeros")))
    drawn = figure(LOGIT, experiment, one_arm(values), runs, ())
    assert drawn.axes[0].get_yscale() == "log" and 0.5 < drawn.axes[0].get_ylim()[0] < 1
    assert list(labelled(drawn.axes[0], "muon").get_ydata()) == [0, 0, 1, 10]
    only_zeros = figure(LOGIT, experiment, one_arm(values * 0), runs, ())
    assert only_zeros.axes[0].get_yscale() == "linear"
    assert len(draw(experiment, one_arm(values), runs, (), tmp_path)) == 2


def test_one_seed_has_a_line_and_no_band(experiment, runs, tmp_path):
    curves = one_arm(np.ones((1, 5)))
    drawn = figure(LOGIT, experiment, curves, runs, ())
    assert not drawn.axes[0].collections and len(labelled(drawn.axes[0], "muon").get_xdata()) == 5
    assert drawn.legends[0].get_title().get_text() == "one test seed"


def test_smoothing_is_a_trailing_mean_of_each_seed_and_start_cuts_after_it():
    values = np.random.default_rng(0).uniform(size=(3, 30))
    found = band(one_arm(values), "max_logit", smooth=5, start=10)
    means = np.array([[row[step - 4 : step + 1].mean() for step in range(10, 30)] for row in values])
    assert list(found.steps) == list(range(10, 30))
    np.testing.assert_allclose(found.median, np.median(means, axis=0))
    np.testing.assert_allclose(found.high, means.max(axis=0))


def test_a_reference_line_is_drawn_and_named(experiment, curves, runs):
    spec = dataclasses.replace(LOGIT, arms=("adamw",), line=100.0, line_label="τ")
    drawn = figure(spec, experiment, curves, runs, ())
    assert legend_texts(drawn) == ["AdamW", "τ"]
    assert any(set(line.get_ydata()) == {100.0} for line in drawn.axes[0].lines)
    assert drawn.axes[0].get_ylim()[1] > 100


def test_absent_arms_and_metrics_are_left_out(experiment, curves, runs, verdicts, tmp_path):
    reduced = curves.filter(pl.col("arm").is_in(["adamw", "muon"]) & (pl.col("size") == "xs")).drop("loss")
    few = Runs(run for run in runs if run.arm == "adamw" and run.size == "xs")
    paths = draw(experiment, reduced, few, (), tmp_path)
    assert [path.stem for path in paths] == ["max_logit", "ladder"]
    assert legend_texts(figure(LOGIT, experiment, reduced, runs, ())) == ["AdamW", "Muon"]
    assert draw(experiment, pl.DataFrame(), Runs(), (), tmp_path / "none") == []


def test_tuning_rows_are_no_curves(experiment, runs):
    assert figure(LOGIT, experiment, one_arm(np.ones((2, 3)), phase="tuning"), runs, ()) is None


def test_several_points_need_a_choice(experiment, runs):
    both = pl.concat([one_arm(np.ones((2, 3))), one_arm(np.ones((2, 3)), point="stress", rate=1e-2)])
    with pytest.raises(ReproError, match="best at rate 0.001, stress at rate 0.01; choose one by point"):
        figure(LOGIT, experiment, both, runs, ())
    assert figure(dataclasses.replace(LOGIT, point="stress"), experiment, both, runs, ()) is not None
    assert figure(dataclasses.replace(LOGIT, point="other"), experiment, both, runs, ()) is None


def test_ladder_has_means_and_every_seed(experiment, runs):
    spec = Ladder("l", "loss", "title", "loss", arms=("adamw",))
    axes = figure(spec, experiment, pl.DataFrame(), runs, ()).axes[1]
    tuning = [run for run in runs.select("adamw", size="s", phase="tuning")]
    mean, dots = axes.lines[0], axes.lines[1]
    assert list(mean.get_xdata()) == [3e-4, 1e-3, 3e-3, 1e-2, 3e-2]
    expected = np.mean([run.metrics["loss"] for run in tuning if run.rate == 1e-3])
    assert mean.get_ydata()[1] == pytest.approx(expected) and math.isnan(mean.get_ydata()[4])
    assert len(dots.get_xdata()) == 12 and mean.get_markerfacecolor() == "white"
    assert axes.lines[2].get_markerfacecolor() == arm_style(experiment, "adamw")["color"]
    assert sum(line.get_marker() == "x" for line in axes.lines) == 1, "the rate at which it diverged"
    assert axes.get_xscale() == axes.get_yscale() == "log"
    linear = figure(dataclasses.replace(spec, log=False), experiment, pl.DataFrame(), runs, ())
    assert linear.axes[0].get_yscale() == "linear"


def test_a_value_far_above_the_others_does_not_flatten_a_linear_ladder(experiment, runs):
    spec = Ladder("l", "loss", "title", "loss", arms=("adamw",), log=False)
    worst = max(run.metrics["loss"] for run in runs.select("adamw") if math.isfinite(run.metrics["loss"]))
    far = Runs(
        dataclasses.replace(run, metrics=run.metrics | {"loss": 1e9}) if run.rate == 3e-4 else run for run in runs
    )
    axes = figure(spec, experiment, pl.DataFrame(), far, ()).axes[1]
    assert axes.get_ylim()[1] < 3 * worst
    assert sum(line.get_marker() == "x" for line in axes.lines) == 2, "it is marked at the upper edge"


def test_effects_have_dots_intervals_bounds_and_the_line_of_no_effect(experiment, verdicts):
    drawn = figure(Effects("e", "title"), experiment, pl.DataFrame(), Runs(), verdicts)
    ratio, difference, relative, value = drawn.axes
    assert ratio.get_xscale() == "log" and difference.get_xscale() == "linear"
    drawn_lines = [tuple(line.get_xdata()) for line in ratio.lines]
    assert verdicts[0].interval in drawn_lines and (verdicts[0].effect,) in drawn_lines
    assert tuple(verdicts[0].per_seed.values()) in drawn_lines
    assert (1.5, 1.5) in drawn_lines and (2, 2) in drawn_lines, "bounds of the rules"
    assert any(list(line.get_xdata()) == [1, 1] for line in ratio.lines)
    assert any(list(line.get_xdata()) == [0, 0] for line in difference.lines)
    assert {-0.0025, 0.0025} <= {line.get_xdata()[0] for line in relative.lines}
    labels = ["ratio", "difference in loss", "difference in loss, relative", "loss"]
    assert [axes.get_xlabel() for axes in drawn.axes] == labels
    assert value.get_xscale() == "linear", "the rule compares means, not geometric means"
    low, high = value.get_xlim()
    assert low < min(verdicts[4].per_seed.values()) and high > 2


def test_geometric_means_have_a_logarithmic_axis(experiment, runs):
    rule = AtLeast("max_logit", "muon@best/s", 100, log=True)
    control = Control("AdamW", dataclasses.replace(rule, arm="adamw@best/s"))
    claim = Claim("K2-1", "s", "t", "", "", "D", rule, control)
    one = dataclasses.replace(experiment, claims=(claim,))
    (axes,) = figure(Effects("e", "t"), one, pl.DataFrame(), Runs(), decide_all((claim,), runs)).axes
    assert axes.get_xscale() == "log" and axes.get_xlabel() == "max_logit"


def test_a_quantity_between_bounds_is_named_by_its_metric_and_has_both(experiment, runs):
    between = lambda arm: All((AtLeast("max_logit", arm, 100), AtMost("max_logit", arm, 900)))
    claim = Claim("K2-1", "s", "t", "", "", "D", between("muon@best/s"), Control("AdamW", between("adamw@best/s")))
    one = dataclasses.replace(experiment, claims=(claim,))
    (axes,) = figure(Effects("e", "t"), one, pl.DataFrame(), Runs(), decide_all((claim,), runs)).axes
    assert axes.get_xlabel() == "max_logit"
    bounds = {line.get_xdata()[0] for line in axes.lines if line.get_color() == "black"}
    assert {100, 900} <= bounds
    other = All((AtLeast("max_logit", "muon@best/s", 100), AtMost("loss", "muon@best/s", 900)))
    assert deciding(other, "max_logit of muon@best/s") == other.criteria[:1]
    assert deciding(other, "something else") == () and deciding(None, "") == ()


def test_effects_of_one_seed_and_of_a_diverged_run(experiment, runs, tmp_path):
    for keep in (lambda run: run.seed in (0, 100), lambda run: True):
        changed = Runs(
            dataclasses.replace(run, metrics=run.metrics | {"loss": math.nan}) if run.arm == "per_head" else run
            for run in runs
            if keep(run)
        )
        verdicts = decide_all(experiment.claims, changed)
        assert verdicts[3].effect is None
        drawn = figure(Effects("e", "title"), experiment, pl.DataFrame(), Runs(), verdicts)
        texts = [text.get_text() for axes in drawn.axes for text in axes.texts]
        assert "no finite effect" in texts
        only = dataclasses.replace(experiment, figures=(Effects("e", "t"),))
        assert len(draw(only, pl.DataFrame(), changed, verdicts, tmp_path)) == 1


def test_width_ratios(experiment, runs):
    spec = next(spec for spec in experiment.figures if isinstance(spec, Width))
    axes = figure(spec, experiment, pl.DataFrame(), runs, ()).axes[0]
    line = next(line for line in axes.lines if line.get_marker() == "D")
    muon, adamw = runs.values("max_logit", "muon@best/s"), runs.values("max_logit", "adamw@best/s")
    logs = [math.log(muon[seed] / adamw[seed]) for seed in muon]
    assert list(line.get_xdata()) == [64, 128, 256] and line.get_ydata()[1] == pytest.approx(math.exp(np.mean(logs)))
    assert axes.get_xscale() == "log" and any(set(line.get_ydata()) == {1} for line in axes.lines)
    broken = Runs(
        dataclasses.replace(run, metrics={"max_logit": math.inf}) if run.seed == 100 and run.size == "s" else run
        for run in runs
        if run.size in ("xs", "s")
    )
    axes = figure(spec, experiment, pl.DataFrame(), broken, ()).axes[0]
    line = next(line for line in axes.lines if line.get_marker() == "D")
    assert list(line.get_xdata()) == [64, 128] and math.isnan(line.get_ydata()[1])
    assert sum(line.get_marker() == "x" for line in axes.lines) == 1


def test_one_of_everything(experiment, tmp_path):
    """The smallest data: one step, one seed, one rate, and one width, over which there is nothing to draw."""
    runs = Runs(Run(arm, 0, {"loss": 1.0, "max_logit": 3.0}, "best", "s", 1e-3) for arm in ("muon", "adamw"))
    curves = one_arm([[3.0]]).with_columns(pl.lit(1.0).alias("loss"))
    specs = tuple(dataclasses.replace(s, start=0) if isinstance(s, Curve) else s for s in experiment.figures)
    paths = draw(dataclasses.replace(experiment, figures=specs), curves, runs, (), tmp_path)
    assert [path.stem for path in paths] == ["max_logit", "loss", "ladder"]


def test_names_with_markup_are_drawn_as_they_are(tmp_path, experiment):
    arms = (Arm("a", "cost $x_{ $ <b> \\frac"), Arm("b", "_hidden | `b`"))
    rule = Greater("x", "a", "b")
    claim = Claim("K2-1", "s", "t", "", "", "D", rule, Control("swap", swapped(rule)), variant="$\\alpha")
    runs = Runs(Run(arm, s, {"x": 2.0 + s if arm == "a" else 1.0}, rate=1e-3) for arm in "ab" for s in range(3))
    figures = (Curve("c", "x", "$t$ {", "$y"), Ladder("l", "x", "$", "_"), Effects("e", "$e"))
    hostile = dataclasses.replace(experiment, arms=arms, claims=(claim,), check_arms=(), figures=figures)
    curves = pl.concat([one_arm(np.ones((2, 4)), arm=arm, metric="x") for arm in "ab"])
    assert len(draw(hostile, curves, runs, decide_all((claim,), runs), tmp_path)) == 3
    assert legend_texts(figure(figures[0], hostile, curves, runs, ())) == [arm.label for arm in arms]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Curve("a/b", "x", "t", "y"), "file name"),
        (lambda: Effects("", "t"), "file name"),
        (lambda: Curve("a", "x", "t", "y", smooth=0), "at least 1"),
        (lambda: Curve("a", "x", "t", "y", start=-1), "at least 0"),
        (lambda: Curve("a", "x", "t", "y", log=True, line=0.0), "no reference line"),
        (lambda: Curve("a", "x", "t", "y", line_label="z"), "line that it does not have"),
        (lambda: Width("a", "x", "l", "r", "t", "y", ()), "different sizes"),
        (lambda: Width("a", "x", "l", "r", "t", "y", (("s", 0),)), "positive"),
        (lambda: Width("a", "x", "l/s", "r", "t", "y", (("s", 1),)), "leave them out"),
    ],
)
def test_specs_refuse_what_cannot_be_drawn(make, message):
    with pytest.raises(ReproError, match=message):
        make()


def test_errors_of_drawing(experiment, curves, runs, tmp_path):
    with pytest.raises(ReproError, match="no arm 'moun'"):
        figure(Curve("c", "loss", "t", "y", arms=("moun",)), experiment, curves, runs, ())
    with pytest.raises(ReproError, match="no column seed"):
        figure(LOGIT, experiment, curves.drop("seed"), runs, ())
    with pytest.raises(ReproError, match="2 figures of the name"):
        draw(dataclasses.replace(experiment, figures=(LOGIT, LOGIT)), curves, runs, (), tmp_path)
    with pytest.raises(ReproError, match="is a str"):
        draw(dataclasses.replace(experiment, figures=("loss",)), curves, runs, (), tmp_path)


def test_legends_use_the_width_they_have():
    assert legend_shape(["short"] * 8) == (4, 2)
    assert legend_shape(["x" * 60] * 4) == (1, 4)
    assert legend_shape([]) == (1, 0)


@pytest.mark.parametrize(("x", "text"), [(0.001, "0.001"), (50000, "50000"), (1e-5, "10⁻⁵"), (3e6, "3·10⁶")])
def test_tick_texts(x, text):
    assert plain_number(x) == text


DOSE = Dose("d", "error", "title", "dose", "error", (("a", 2**-4), ("b", 1.0), ("c", 2**5)), ("muon", "adamw"), log_x=2)


def dosed(values, seeds=(0,), size=""):
    """Runs of {arm: {point: values over seeds}}."""
    return Runs(
        Run(arm, seed, {"error": value}, point=point, size=size)
        for arm, points in values.items()
        for point, over_seeds in points.items()
        for seed, value in zip(seeds, over_seeds, strict=True)
    )


def test_a_dose_is_a_mean_with_a_dot_per_seed(experiment, curves):
    runs = dosed({"muon": {"c": (5.0, 7.0), "a": (1.0, 2.0)}, "adamw": {"b": (3.0, 3.0)}}, (4, 9))
    drawn = figure(DOSE, experiment, curves, runs, ())
    line, dots = drawn.axes[0].lines[2:4]
    assert list(line.get_xdata()) == [2**-4, 32] and list(line.get_ydata()) == [1.5, 6.0]
    assert sorted(dots.get_ydata()) == [1, 2, 5, 7] and dots.get_color() == line.get_color()
    assert legend_texts(drawn) == ["AdamW", "Muon"] and "single seeds" in drawn.legends[0].get_title().get_text()
    assert drawn.axes[0].get_xscale() == "log"
    ticks = drawn.axes[0].xaxis
    assert [ticks.get_major_formatter()(x, 0) for x in ticks.get_majorticklocs()] == ["2⁻⁴", "1", "32"]


def test_a_deterministic_dose_has_one_mark_per_point_and_no_words_about_seeds(experiment, curves):
    drawn = figure(DOSE, experiment, curves, dosed({"muon": {"a": (1.0,), "b": (2.0,)}}), ())
    line, dots = drawn.axes[0].lines
    assert list(line.get_ydata()) == [1, 2] and len(dots.get_xdata()) == 0
    assert drawn.legends[0].get_title().get_text() == ""


def test_zero_and_lost_values_of_a_dose_are_marked_at_the_edges(experiment, curves):
    spec = dataclasses.replace(DOSE, log_y=True)
    runs = dosed({"muon": {"a": (0.0,), "b": (2.0,), "c": (math.nan,)}, "adamw": {"a": (1.0,), "b": (1.0,)}})
    axes = figure(spec, experiment, curves, runs, ()).axes[0]
    marks = {line.get_marker(): line.get_xdata()[0] for line in axes.lines if line.get_marker() in ("x", "v")}
    assert marks == {"v": 2**-4, "x": 32} and axes.get_yscale() == "log"
    means = next(line for line in axes.lines if len(line.get_xdata()) == 3).get_ydata()
    assert np.isnan(means[[0, 2]]).all() and means[1] == 2
    note = figure(spec, experiment, curves, runs, ()).legends[0].get_title().get_text()
    assert "triangle" in note and "cross" in note


def test_reference_lines_of_a_dose_lie_where_they_say(experiment, curves):
    spec = dataclasses.replace(DOSE, lines=(Reference("two per cent", y=0.02), Reference("limit", x=16.0)))
    drawn = figure(spec, experiment, curves, dosed({"muon": {"a": (1.0,)}}), ())
    across, up = drawn.axes[0].lines[:2]
    assert list(across.get_ydata()) == [0.02, 0.02] and list(up.get_xdata()) == [16, 16]
    assert legend_texts(drawn) == ["Muon", "two per cent", "limit"]


def test_a_dose_has_a_panel_per_size_and_is_left_out_without_runs(experiment, curves, runs):
    both = dosed({"muon": {"a": (1.0,)}}, size="s") + dosed({"muon": {"a": (2.0,)}}, size="m")
    assert [axes.get_title("left") for axes in figure(DOSE, experiment, curves, both, ()).axes] == ["size s", "size m"]
    assert figure(DOSE, experiment, curves, runs, ()) is None
    with pytest.raises(ReproError, match="no arm 'nobody'"):
        figure(dataclasses.replace(DOSE, arms=("nobody",)), experiment, curves, runs, ())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"points": ()}, "one or more different points"),
        ({"points": (("a", 1), ("a", 2))}, "one or more different points"),
        ({"points": (("a", 0),)}, "do not all have a place"),
        ({"points": (("a", math.inf),)}, "do not all have a place"),
        ({"log_x": True}, "base 2 or 10"),
        ({"log_x": 3}, "base 2 or 10"),
        ({"log_y": True, "lines": (Reference("zero", y=0.0),)}, "do not all have a place"),
        ({"lines": (Reference("zero", x=0.0),)}, "do not all have a place"),
        ({"name": "a/b"}, "file name"),
    ],
)
def test_doses_that_cannot_be_drawn(change, message):
    with pytest.raises(ReproError, match=message):
        dataclasses.replace(DOSE, **change)


@pytest.mark.parametrize("where", [{}, {"x": 1.0, "y": 1.0}, {"y": math.nan}])
def test_a_reference_line_is_somewhere(where):
    with pytest.raises(ReproError, match="one finite x or y"):
        Reference("l", **where)


def test_a_heatmap_shows_its_matrices_on_one_scale(experiment, curves, runs):
    first, second = np.array([[1.0, 10.0], [0.0, np.nan]]), np.array([[100.0, -1.0, 3.0]])
    spec = Heatmap("h", "title", lambda: {"one": first, "two": second}, "error (%)", "K", "bits", log=True)
    drawn = figure(spec, experiment, curves, runs, ())
    images = [axes.images[0] for axes in drawn.axes[:2]]
    assert [axes.get_title("left") for axes in drawn.axes[:2]] == ["one", "two"]
    for image, values in zip(images, (first, second), strict=True):
        shown = image.get_array()
        assert np.array_equal(shown.mask, ~(np.nan_to_num(values) > 0))
        assert np.array_equal(shown.compressed(), values[values > 0]) and image.get_clim() == (1, 100)
        assert image.cmap.name == "cividis"
    assert drawn.axes[2].get_ylabel() == "error (%)" and drawn.axes[0].get_ylabel() == "bits"
    linear = dataclasses.replace(spec, log=False)
    image = figure(linear, experiment, curves, runs, ()).axes[0].images[0]
    assert image.get_clim() == (-1, 100) and image.get_array().mask.sum() == 1


def test_heatmaps_without_values_or_with_vectors(experiment, curves, runs):
    nothing = Heatmap("h", "t", lambda: {"one": np.full((2, 2), -1.0)}, "error", log=True)
    assert figure(nothing, experiment, curves, runs, ()) is None
    assert figure(dataclasses.replace(nothing, compute=dict), experiment, curves, runs, ()) is None
    with pytest.raises(ReproError, match="one is an array of shape \\(3,\\), not a matrix"):
        figure(dataclasses.replace(nothing, compute=lambda: {"one": np.ones(3)}), experiment, curves, runs, ())


def test_a_mean_below_every_positive_value_is_inside_the_axes(experiment, curves):
    runs = dosed({"muon": {"a": (0.0, 0.0, 0.3), "b": (9.0, 9.0, 9.0)}}, (0, 1, 2))
    low, _ = figure(dataclasses.replace(DOSE, log_y=True), experiment, curves, runs, ()).axes[0].get_ylim()
    assert low < 0.1


def test_the_note_of_a_dose_says_where_zeros_are(experiment, curves):
    spec = dataclasses.replace(DOSE, log_y=True)
    for values, words in (
        ((0.0, 0.3), "seeds at zero or below have no dot"),
        ((0.0, 0.0), "triangle"),
        ((1.0, 2.0), ""),
    ):
        runs = dosed({"muon": {"a": values, "b": (9.0, 9.0)}}, (0, 1))
        note = figure(spec, experiment, curves, runs, ()).legends[0].get_title().get_text()
        assert words in note and ("zero" in note) == bool(words)


def test_a_trailing_mean_of_thinned_curves_spans_as_many_steps():
    values = np.arange(100.0)
    whole = pl.DataFrame({"seed": [0] * 100, "step": np.arange(100), "loss": values})
    assert band(whole, "loss", smooth=20).smoothed == 20 and band(whole, "loss").smoothed == 1
    thinned = whole.filter(pl.col("step") % 10 == 0)
    found = band(thinned, "loss", smooth=20)
    assert found.smoothed == 11 and found.median[5] == 45  # of steps 40 and 50
    assert band(thinned, "loss", smooth=5).smoothed == 1
