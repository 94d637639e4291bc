"""How plots look: colours, fonts, smoothing, and one set of axes. Nothing here touches pyplot's global state."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.font_manager import fontManager
from matplotlib.ticker import MaxNLocator, ScalarFormatter, StrMethodFormatter

from preftune.report.metrics import History, set_name

DPI = 240
# From the palette of Okabe and Ito, told apart by colour-blind readers. Dashes and markers say the same in print.
CHOSEN, REJECTED = "#0072B2", "#D55E00"
TRAINING = "#475569"
EVALUATION = ("#009E73", "#AA4499", "#B58900", "#56B4E9")
MARKERS = ("o", "s", "D", "^")
INK, MUTED, FAINT = "#1f2937", "#6b7280", "#d1d5db"
SOLID, DASHED = "-", (0, (4, 1.6))
# More points than this are drawn light, with a smoothed line over them.
MANY_POINTS = 30


@dataclass(frozen=True)
class Curve:
    """A metric on a set of axes. Without a label its colours are those of training and evaluation."""

    metric: str
    label: str = ""
    colour: str = ""
    dashes: Any = SOLID
    filled: bool = True
    noisy: bool = True


@dataclass(frozen=True)
class Axes:
    """What one set of axes shows: curves, the label of y with its unit, a faint line, and fixed limits."""

    ylabel: str
    curves: tuple[Curve, ...]
    line_at: float | None = None
    limits: tuple[float, float] | None = None

    def has_data(self, history: History) -> bool:
        """Whether any of the curves was logged."""
        prefixes = ("", *(f"{prefix}_" for prefix in history.eval_prefixes))
        return any(history.series(prefix + curve.metric)[0] for curve in self.curves for prefix in prefixes)


@contextmanager
def styled() -> Iterator[None]:
    """Plots made within look like this; matplotlib's settings are restored after."""
    with matplotlib.rc_context(
        {
            "font.family": [*_fonts()],
            "font.size": 9,
            "text.color": INK,
            "axes.edgecolor": MUTED,
            "axes.labelcolor": INK,
            "axes.labelsize": 9,
            "axes.linewidth": 0.7,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "axes.grid.axis": "y",
            "axes.axisbelow": True,
            "axes.titlelocation": "left",
            "axes.titlesize": 10.5,
            "axes.titleweight": "bold",
            "axes.titlepad": 9,
            "axes.unicode_minus": True,
            "grid.color": "#eceff3",
            "grid.linewidth": 0.8,
            "xtick.color": MUTED,
            "ytick.color": MUTED,
            "xtick.labelcolor": INK,
            "ytick.labelcolor": INK,
            "xtick.labelsize": 8.5,
            "ytick.labelsize": 8.5,
            "xtick.major.size": 3,
            "ytick.major.size": 0,
            "lines.solid_capstyle": "round",
            "lines.solid_joinstyle": "round",
            "legend.frameon": False,
            "legend.fontsize": 8.5,
            "legend.handlelength": 2.6,
            "legend.columnspacing": 1.6,
            "figure.constrained_layout.use": True,
            "figure.constrained_layout.h_pad": 0.06,
            "figure.constrained_layout.w_pad": 0.11,
        }
    ):
        yield


def png(figure: Figure, dpi: int = DPI) -> bytes:
    """The figure as PNG on white, the same bytes for the same data."""
    target = io.BytesIO()
    figure.savefig(target, format="png", dpi=dpi, facecolor="white", metadata={"Software": None})
    return target.getvalue()


def draw(ax: Any, spec: Axes, history: History) -> None:
    """Draw all curves of `spec`: training as lines, evaluations as markers joined by a line."""
    if spec.line_at is not None:
        ax.axhline(spec.line_at, color=FAINT, linewidth=1.1, zorder=1)
    gaps: set[int] = set()
    for curve in spec.curves:
        gaps |= _training(ax, curve, *history.series(curve.metric))
        for i, prefix in enumerate(history.eval_prefixes):
            gaps |= _evaluation(ax, curve, i, set_name(prefix), *history.series(f"{prefix}_{curve.metric}"))
    if gaps:  # what is not finite has no height, and must not look like something that was not measured
        label = "not a finite number"
        at = sorted(gaps)
        ax.plot(at, [0.03] * len(at), "x", color="#B00020", ms=5, transform=ax.get_xaxis_transform(), label=label)
    ax.set_ylabel(spec.ylabel)
    ax.margins(x=0.02)
    ax.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 5, 10]))
    ax.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    if spec.limits is None:
        formatter = ScalarFormatter(useOffset=False, useMathText=True)
        formatter.set_powerlimits((-2, 5))
        ax.yaxis.set_major_formatter(formatter)
        ax.yaxis.set_major_locator(MaxNLocator(7, steps=[1, 2, 2.5, 5, 10]))
    else:
        low, high = spec.limits
        ax.set_ylim(low, high + 0.02 * (high - low))  # a line at the limit keeps its width
        ax.set_yticks(np.linspace(*spec.limits, 5))


def smooth(values: Sequence[float]) -> np.ndarray:
    """Local linear fit with Gaussian weights (deviation 1/30 of the length) over finite values; gaps stay gaps.

    Unlike a moving mean it starts and ends where a rising or falling curve does.
    """
    numbers = _finite(values)
    known = ~np.isnan(numbers)
    if not known.any():
        return numbers
    sigma = max(2.5, len(numbers) / 30)
    reach = min(int(3 * sigma), (len(numbers) - 1) // 2)
    offsets = np.arange(-reach, reach + 1)
    weights = np.exp(-0.5 * (offsets / sigma) ** 2)
    w0, w1, w2 = (np.convolve(known, weights * offsets**power, mode="same") for power in (0, 1, 2))
    x0, x1 = (np.convolve(np.where(known, numbers, 0), weights * offsets**power, mode="same") for power in (0, 1))
    determinant = w0 * w2 - w1**2
    alone = determinant <= 1e-9 * w0**2  # one finite value in reach: no slope
    with np.errstate(invalid="ignore", divide="ignore"):
        fitted = np.where(alone, x0 / w0, (w2 * x0 - w1 * x1) / determinant)
    return np.where(known, np.clip(fitted, numbers[known].min(), numbers[known].max()), np.nan)


def _training(ax: Any, curve: Curve, steps: list[int], values: list[float]) -> set[int]:
    if not steps:
        return set()
    colour, numbers = curve.colour or TRAINING, _finite(values)
    label = f"{curve.label}, training" if curve.label else "training"
    if len(steps) > MANY_POINTS and curve.noisy:
        ax.plot(steps, numbers, color=colour, alpha=0.28, linewidth=0.8, zorder=2)
        numbers, label = smooth(values), label + " (smoothed)"
    marker = "." if len(steps) == 1 else None
    ax.plot(steps, numbers, color=colour, linestyle=curve.dashes, linewidth=1.7, marker=marker, label=label, zorder=3)
    return _gaps(steps, values)


def _evaluation(ax: Any, curve: Curve, index: int, name: str, steps: list[int], values: list[float]) -> set[int]:
    if not steps:
        return set()
    colour = curve.colour or EVALUATION[index % len(EVALUATION)]
    label = f"evaluation: {_short(name)}" if name else "evaluation"
    ax.plot(
        steps,
        _finite(values),
        color=colour,
        linestyle=curve.dashes,
        linewidth=1.1,
        marker=MARKERS[index % len(MARKERS)],
        markersize=5.2,
        markerfacecolor=colour if curve.filled else "white",
        markeredgecolor="white" if curve.filled else colour,
        markeredgewidth=0.8 if curve.filled else 1.3,
        label=f"{curve.label}, {label}" if curve.label else label,
        clip_on=False,
        zorder=4,
    )
    return _gaps(steps, values)


def _short(name: str) -> str:
    """A set's name that fits a legend; its end tells sets apart as often as its start."""
    return name if len(name) <= 24 else f"{name[:13]}…{name[-10:]}"


def _finite(values: Sequence[float]) -> np.ndarray:
    numbers = np.asarray(values, dtype=float)
    return np.where(np.isfinite(numbers), numbers, np.nan)


def _gaps(steps: list[int], values: list[float]) -> set[int]:
    return {step for step, value in zip(steps, values, strict=True) if not np.isfinite(value)}


@cache
def _fonts() -> tuple[str, ...]:
    """The first of some plain fonts that is here (naming one that is not would warn), then matplotlib's own."""
    here = {font.name for font in fontManager.ttflist}
    wanted = [name for name in ("Inter", "Helvetica Neue", "Helvetica", "Arial", "Liberation Sans") if name in here]
    return (*wanted[:1], "DejaVu Sans")
