"""The plots: PNG, what they show, and what they leave out."""

from __future__ import annotations

import math
import struct

import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure

from preftune.errors import DataError
from preftune.report import PANELS, History, overview, plot, plot_loss, plot_rewards, plots
from preftune.report.style import CHOSEN, REJECTED, Axes, Curve, draw, smooth


def size(png: bytes) -> tuple[int, int]:
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", png[16:24])
    return width, height


def entry(step: int, prefix: str = "", value: float | None = None) -> dict[str, float]:
    v = step / 10 if value is None else value
    names = ("loss", "rewards/chosen", "rewards/rejected", "rewards/margins", "kl", "logps/chosen", "logps/rejected")
    return {
        "step": step,
        **{prefix + name: -v if name.endswith("rejected") else v for name in names},
        prefix + "rewards/accuracies": min(1.0, 0.5 + v / 10),
    }


def full(points: int = 4) -> History:
    training = [{**entry(s), "learning_rate": 1e-5, "grad_norm": 2.0} for s in range(1, points + 1)]
    return History((*training, entry(0, "eval_", 0.0), entry(points, "eval_")))


def test_every_panel_is_a_png_of_its_size():
    history = History((*full().entries, {"step": 4, "eval_sampled_kl": 0.1}))
    for name in PANELS:
        assert size(plot(history, name)) == (1128, 792), name


def test_the_functions_draw_their_panels():
    functions = {name: getattr(plots, f"plot_{name}") for name in PANELS if name != "sampled_kl"}
    drawn = {name: function(full()) for name, function in functions.items()}
    assert drawn == {name: plot(full(), name) for name in functions}
    assert len(set(drawn.values())) == len(functions)


def test_panels_without_data_are_left_out():
    history = History(({"step": 1, "loss": 1.0}, {"step": 2, "loss": 0.5}))
    assert [name for name in PANELS if plot(history, name) is not None] == ["loss"]
    assert plot_rewards(history) is None


def test_the_overview_is_wide_and_has_a_cell_for_each_panel_and_the_key():
    width, height = size(overview(full()))
    assert (width, height) == (2400, 1200)
    # One panel and the key, side by side.
    assert size(overview(History(({"step": 1, "loss": 1.0},)))) == (1600, 600)
    assert size(overview(full(), "A title"))[1] == 1280


def test_an_overview_of_nothing_is_refused():
    with pytest.raises(DataError, match="logging_steps"):
        overview(History(({"step": 1, "grad_norm": 1.0},)))


def test_same_data_same_bytes_and_settings_are_restored():
    before = dict(matplotlib.rcParams)
    assert plot_loss(full()) == plot_loss(full())
    assert dict(matplotlib.rcParams) == before


def drawn(history: History, name: str):
    ax = Figure().subplots()
    (spec,) = PANELS[name].axes
    draw(ax, spec, history)
    return ax, {line.get_label(): line for line in ax.get_lines() if not line.get_label().startswith("_")}


def test_chosen_and_rejected_differ_in_colour_dash_and_marker():
    for name in ("rewards", "logps"):
        _, lines = drawn(full(), name)
        assert list(lines) == ["chosen, training", "chosen, evaluation", "rejected, training", "rejected, evaluation"]
        for kind in ("training", "evaluation"):
            chosen, rejected = lines[f"chosen, {kind}"], lines[f"rejected, {kind}"]
            assert (chosen.get_color(), rejected.get_color()) == (CHOSEN, REJECTED)
            assert (chosen.get_linestyle(), rejected.get_linestyle()) == ("-", "--")
        assert lines["rejected, evaluation"].get_markerfacecolor() == "white"
        assert lines["chosen, evaluation"].get_markerfacecolor() == CHOSEN


def test_lines_carry_the_values():
    _, lines = drawn(full(), "rewards")
    assert lines["rejected, training"].get_xydata().tolist() == [[1, -0.1], [2, -0.2], [3, -0.3], [4, -0.4]]
    assert lines["chosen, evaluation"].get_xydata().tolist() == [[0, 0.0], [4, 0.4]]


def test_many_points_get_a_light_line_and_a_smoothed_one():
    ax, lines = drawn(full(30), "loss")
    assert set(lines) == {"training", "evaluation"}
    ax, lines = drawn(full(31), "loss")
    assert set(lines) == {"training (smoothed)", "evaluation"}
    light = [line for line in ax.get_lines() if line.get_alpha() is not None]
    assert [line.get_ydata().tolist() for line in light] == [[s / 10 for s in range(1, 32)]]


def test_accuracy_runs_from_0_to_1_with_a_line_at_chance():
    ax, _ = drawn(full(), "accuracy")
    assert ax.get_ylim() == pytest.approx((0, 1.02))
    assert ax.get_yticks().tolist() == [0, 0.25, 0.5, 0.75, 1]
    assert ax.get_lines()[0].get_ydata() == [0.5, 0.5]


def test_what_is_not_finite_is_marked():
    history = History(({"step": 1, "loss": 1.0}, {"step": 2, "loss": math.nan}, {"step": 3, "loss": math.inf}))
    _, lines = drawn(history, "loss")
    assert list(lines["not a finite number"].get_xdata()) == [2, 3]
    assert np.isnan(lines["training"].get_ydata()).tolist() == [False, True, True]
    assert plot_loss(history) is not None


def test_named_sets_have_their_own_markers_and_short_names():
    history = History((entry(1, "eval_short_"), entry(1, "eval_one_with_a_name_that_is_much_too_long_")))
    _, lines = drawn(history, "loss")
    assert list(lines) == ["evaluation: short", "evaluation: one_with_a_na…h_too_long"]
    first, second = lines.values()
    assert first.get_marker() != second.get_marker()
    assert first.get_color() != second.get_color()


def test_there_is_a_legend_only_for_several_curves(monkeypatch):
    made = []
    monkeypatch.setattr(Figure, "legend", lambda *args, **kwargs: made.append(list(args[2])))
    plot_loss(History(({"step": 1, "loss": 1.0},)))
    plot(full(), "optimizer")
    assert made == []
    plot_loss(full())
    assert made == [["training", "evaluation"]]


def test_smoothing_keeps_lines_and_gaps():
    line = np.linspace(-1, 1, 50)
    assert smooth(line) == pytest.approx(line, abs=1e-12)
    assert smooth(np.full(40, 2.5)) == pytest.approx(2.5)
    gap = line.copy()
    gap[[0, 20]] = np.nan
    smoothed = smooth(gap)
    assert np.isnan(smoothed).nonzero()[0].tolist() == [0, 20]
    assert smoothed[1:20] == pytest.approx(line[1:20], abs=1e-9)
    assert np.isnan(smooth([math.nan] * 40)).all()


def test_smoothing_lessens_noise_and_stays_within_the_values():
    noise = np.where(np.arange(60) % 2, 1.0, 0.0)
    smoothed = smooth(noise)
    assert np.abs(smoothed[10:-10] - 0.5).max() < 0.05
    assert smoothed.min() >= 0
    assert smoothed.max() <= 1


def test_a_learning_rate_is_not_smoothed():
    ax = Figure().subplots()
    draw(ax, Axes("", (Curve("learning_rate", noisy=False),)), full(40))
    assert [line.get_label() for line in ax.get_lines()] == ["training"]
