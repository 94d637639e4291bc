"""The plots of a run, as PNG: one function for each, and an overview for READMEs.

Training is a line (the entries light and a smoothed line over them where they are many), evaluation is markers joined
by a line. Chosen and rejected have one colour each in all plots, and solid and dashed lines.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from preftune.errors import DataError
from preftune.report.metrics import History
from preftune.report.style import CHOSEN, DASHED, REJECTED, TRAINING, Axes, Curve, draw, png, styled


@dataclass(frozen=True)
class Panel:
    """A plot: what it is called, and its axes from top to bottom."""

    title: str
    axes: tuple[Axes, ...]

    def shown(self, history: History) -> list[Axes]:
        """The axes that have something to show."""
        return [axes for axes in self.axes if axes.has_data(history)]


def _both(metric: str) -> tuple[Curve, Curve]:
    return (
        Curve(f"{metric}/chosen", "chosen", CHOSEN),
        Curve(f"{metric}/rejected", "rejected", REJECTED, DASHED, filled=False),
    )


PANELS: Mapping[str, Panel] = {
    "loss": Panel("Loss", (Axes("loss", (Curve("loss"),)),)),
    "rewards": Panel("Rewards of chosen and rejected", (Axes("reward (β × nats)", _both("rewards"), line_at=0),)),
    "margins": Panel("Margin: chosen − rejected reward", (Axes("margin (β × nats)", (Curve("rewards/margins"),), 0),)),
    "accuracy": Panel(
        "Accuracy: share ranked right", (Axes("accuracy", (Curve("rewards/accuracies"),), 0.5, limits=(0, 1)),)
    ),
    "kl": Panel("KL estimate: mean log-ratio", (Axes("KL (nats per completion)", (Curve("kl"),), 0),)),
    "sampled_kl": Panel("KL over the policy's own samples", (Axes("KL (nats per token)", (Curve("sampled_kl"),), 0),)),
    "logps": Panel("Log-probability of completions", (Axes("log-probability (nats)", _both("logps")),)),
    "optimizer": Panel(
        "Learning rate and gradient norm",
        (Axes("learning rate", (Curve("learning_rate", noisy=False),)), Axes("gradient norm", (Curve("grad_norm"),))),
    ),
}
# What the overview shows.
MAIN = ("loss", "rewards", "margins", "accuracy", "kl")


def plot(history: History, name: str) -> bytes | None:
    """Draw one of `PANELS`.

    Returns:
        A PNG of 1128 x 792 pixels, higher where the legend is long; None where the run logged nothing to show.
    """
    panel = PANELS[name]
    shown = panel.shown(history)
    if not shown:
        return None
    with styled():
        figure = Figure(figsize=(4.7, 3.3))
        axes = figure.subplots(len(shown), 1, sharex=True, squeeze=False)[:, 0]
        for ax, spec in zip(axes, shown, strict=True):
            draw(ax, spec, history)
        axes[0].set_title(panel.title)
        axes[-1].set_xlabel("step")
        figure.align_ylabels(list(axes))
        _legend(figure, axes)
        return png(figure)


def plot_loss(history: History) -> bytes | None:
    """The loss."""
    return plot(history, "loss")


def plot_rewards(history: History) -> bytes | None:
    """Rewards of chosen (solid) and rejected (dashed) completions."""
    return plot(history, "rewards")


def plot_margins(history: History) -> bytes | None:
    """How far the chosen reward is above the rejected one."""
    return plot(history, "margins")


def plot_accuracy(history: History) -> bytes | None:
    """The share that is ranked right, from 0 to 1, with a faint line at chance."""
    return plot(history, "accuracy")


def plot_kl(history: History) -> bytes | None:
    """The estimate of the KL divergence of the policy from the reference."""
    return plot(history, "kl")


def plot_logps(history: History) -> bytes | None:
    """Log-probabilities of chosen (solid) and rejected (dashed) completions under the policy."""
    return plot(history, "logps")


def plot_optimizer(history: History) -> bytes | None:
    """Learning rate above, gradient norm below."""
    return plot(history, "optimizer")


def overview(history: History, title: str | None = None) -> bytes:
    """The main panels in one wide figure: loss, rewards, margins, accuracy, KL, and what lines and colours mean.

    The KL is that over the policy's own samples where it was measured, else the estimate.

    Raises `DataError` where the history has none of them.
    """
    measured = bool(PANELS["sampled_kl"].shown(history))
    names = ["sampled_kl" if name == "kl" and measured else name for name in MAIN]
    panels = [(PANELS[name].title, axes) for name in names for axes in PANELS[name].shown(history)]
    if not panels:
        raise DataError(
            "the metrics hold no loss, reward or KL to draw; log at least one step (training.logging_steps)"
        )
    columns = min(3, len(panels) + 1)
    rows = math.ceil((len(panels) + 1) / columns)
    with styled():
        figure = Figure(figsize=(4.0 * columns, 3.0 * rows + (0.4 if title else 0)))
        grid = figure.subplots(rows, columns, squeeze=False).flatten()
        for ax, (name, axes) in zip(grid, panels, strict=False):
            draw(ax, axes, history)
            ax.set_title(name)
            ax.set_xlabel("step")
        for ax in grid[len(panels) :]:
            ax.set_axis_off()
        _key(grid[len(panels)], grid[: len(panels)])
        if title:
            figure.suptitle(title, fontsize=13, fontweight="bold", x=0.01, ha="left")
        return png(figure, 200)


def _legend(figure: Any, axes: Any) -> None:
    """Below the plot, where it covers no data, and only where some axes have more than one curve."""
    found = [ax.get_legend_handles_labels() for ax in axes]
    if max(len(labels) for _, labels in found) < 2:
        return
    handles = {label: handle for pair in found for handle, label in zip(*pair, strict=True)}
    # Two columns: chosen in the first, rejected in the second.
    columns = 1 if max(map(len, handles)) > 33 else 2
    figure.set_figheight(figure.get_figheight() + 0.17 * max(0, math.ceil(len(handles) / columns) - 2))
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=columns)


def _key(ax: Any, drawn: Any) -> None:
    """The overview's one legend, in a cell of its own: every kind of curve once, chosen and rejected last."""
    plain: dict[str, Any] = {}
    sides: dict[str, Any] = {}
    for panel in drawn:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            side = label.split(",")[0]
            if side in ("chosen", "rejected"):
                sides.setdefault(side, handle)
            else:
                plain.setdefault(label, handle)
                if label.endswith("(smoothed)"):
                    light = Line2D([], [], color=TRAINING, alpha=0.45, linewidth=0.8)
                    plain.setdefault("training, each entry", light)
    handles = plain | sides
    ax.legend(handles.values(), handles.keys(), loc="center left", fontsize=9.5, labelspacing=0.9, handlelength=3)
