"""Metrics files to plots, one HTML page and a model card.

The figure of a run for a README:

    history = read_metrics("run/metrics.jsonl")
    Path("overview.png").write_bytes(overview(history))
"""

from preftune.report.card import model_card
from preftune.report.metrics import History, before_and_after, read_metrics
from preftune.report.page import RunReport, Sample, write_report
from preftune.report.plots import (
    PANELS,
    overview,
    plot,
    plot_accuracy,
    plot_kl,
    plot_logps,
    plot_loss,
    plot_margins,
    plot_optimizer,
    plot_rewards,
)

__all__ = [
    "PANELS",
    "History",
    "RunReport",
    "Sample",
    "before_and_after",
    "model_card",
    "overview",
    "plot",
    "plot_accuracy",
    "plot_kl",
    "plot_logps",
    "plot_loss",
    "plot_margins",
    "plot_optimizer",
    "plot_rewards",
    "read_metrics",
    "write_report",
]
