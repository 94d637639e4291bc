"""What a run leaves behind: the adapter or model, the report, the model card."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from preftune.build.run import Run
from preftune.errors import ConfigError, refused_as
from preftune.report import RunReport, Sample, before_and_after, model_card, read_metrics, write_report
from preftune.train.callbacks import METRICS_FILE
from preftune.train.metrics import METRICS

FACTS_FILE = "facts.json"


def finish(
    run: Run,
    figures: Mapping[str, tuple[float | None, float | None]] | None = None,
    samples: Sequence[Sample] = (),
    notes: Sequence[str] = (),
) -> None:
    """Save the adapter or model, the tokenizer, `report.html` and the model card (on the first process)."""
    folder = run.config.folder
    if run.trainer.is_world_process_zero():
        facts = run.facts()
        (folder / FACTS_FILE).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
        page = run.report(folder.name, figures, samples, notes)
        write_report([page], folder / "report.html", f"preftune: {folder.name}")
        card = model_card(
            name=folder.name,
            base_model=run.config.model.name,
            adapter=run.config.model.adapter is not None,
            loss=run.objective.loss.name,
            facts=facts,
            figures=_final_figures(run, page),
            revision=run.config.model.revision,
        )
        run.trainer.card = lambda: card
    run.trainer.save_model(str(folder))  # pushes to the hub, with the card, where that is asked for
    run.trainer.create_model_card()


def _final_figures(run: Run, page: RunReport) -> dict[str, float]:
    """The last evaluation's figures; where nothing was evaluated those of the last logged training steps."""
    figures = {name: after for name, (_, after) in page.figures.items() if after is not None}
    if not figures:
        last: dict[str, float] = next((e for e in reversed(run.trainer.state.log_history) if "loss" in e), {})
        figures = {f"{name} (training)": last[name] for name in METRICS if name in last}
    return figures


def report_again(folder: Path) -> Path:
    """Write `report.html` of a finished or running run anew from its metrics; returns its path."""
    path = folder / METRICS_FILE
    if not path.exists():
        raise ConfigError(f"{folder}: no {METRICS_FILE} there; give a run's output folder")
    history = read_metrics(path)
    facts = {}
    if (folder / FACTS_FILE).exists():
        with refused_as(
            ConfigError, f"{folder / FACTS_FILE}: cannot be read; delete it to write the report without it"
        ):
            facts = {str(k): str(v) for k, v in dict(json.loads((folder / FACTS_FILE).read_text("utf-8"))).items()}
    page = RunReport(
        name=folder.name, history=history, facts=facts, figures=before_and_after(history), samples=(), notes=()
    )
    write_report([page], folder / "report.html", f"preftune: {folder.name}")
    return folder / "report.html"
