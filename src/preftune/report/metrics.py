"""A run's metrics file, read back as curves."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from preftune.errors import DataError

# An evaluation of the one set is logged as `eval_loss`, of a set with a name as `eval_NAME_loss`. A name may hold
# underscores, so it is read from the metrics that every evaluation has; others then go to the longest prefix that fits.
_EVALUATION = re.compile(r"(eval(?:_.+)?)_(?:loss|runtime|(?:rewards|logps)/[^/]+)")
# Figures in the order in which they are shown; metrics that are not named here follow.
_ORDER = (
    "loss",
    "rewards/accuracies",
    "rewards/margins",
    "rewards/chosen",
    "rewards/rejected",
    "kl",
    "sampled_kl",
    "logps/chosen",
    "logps/rejected",
)
# How long an evaluation took is no result.
_NOT_FIGURES = {"runtime", "samples_per_second", "steps_per_second", "model_preparation_time", "jit_compilation_time"}


@dataclass(frozen=True)
class History:
    """The entries of a metrics file in their order.

    Args:
        entries: numbers by name; each has `step`.
        summary: the entry that ends a run (`train_runtime` and totals), no part of any curve; empty while it runs.
    """

    entries: tuple[Mapping[str, float], ...]
    summary: Mapping[str, float] = field(default_factory=dict)

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """Steps in increasing order and the values of one metric; two empty lists where it was never logged.

        Args:
            name: as in the file: `loss`, `eval_loss`, `eval_NAME_rewards/margins`. Values that are not finite are
                kept. Of several values at one step (evaluated again at the end) the last counts.
        """
        found = {int(entry["step"]): entry[name] for entry in self.entries if name in entry}
        steps = sorted(found)
        return steps, [found[step] for step in steps]

    @cached_property
    def eval_prefixes(self) -> tuple[str, ...]:
        """`eval` for the set without a name, `eval_NAME` for those with one, in the order of their first entry."""
        keys = (key for entry in self.entries for key in entry)
        return tuple(dict.fromkeys(match[1] for key in keys if (match := _EVALUATION.fullmatch(key))))

    def eval_metrics(self, prefix: str) -> tuple[str, ...]:
        """Names, without the prefix, of what was evaluated under one of `eval_prefixes`."""
        names: dict[str, None] = {}
        for key in (key for entry in self.entries for key in entry):
            fitting = [p for p in self.eval_prefixes if key.startswith(f"{p}_")]
            if fitting and max(fitting, key=len) == prefix:
                names[key.removeprefix(f"{prefix}_")] = None
        return tuple(names)


def read_metrics(path: str | Path) -> History:
    """Read a `metrics.jsonl`.

    NaN and infinities are kept, `null` is read as NaN; values that are no numbers belong to no curve and are left out.
    Raises `DataError` with `file:line` for a line that is not a JSON object with a `step`.
    """
    path = Path(path)
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); give the metrics.jsonl of a run") from None
    entries: list[Mapping[str, float]] = []
    summary: Mapping[str, float] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        entry = _read_line(line, f"{path}:{number}")
        if "train_runtime" in entry:
            summary = entry
        else:
            entries.append(entry)
    return History(tuple(entries), summary)


def before_and_after(history: History) -> dict[str, tuple[float | None, float | None]]:
    """Each evaluated metric before the first update and at the last evaluation, for a table.

    The first is None where nothing was evaluated at step 0, and the second where nothing was evaluated after it.
    Metrics of a set with a name are called `metric (NAME)`.
    """
    figures: dict[str, tuple[float | None, float | None]] = {}
    for prefix in history.eval_prefixes:
        metrics = [name for name in history.eval_metrics(prefix) if name not in _NOT_FIGURES]
        rank = {name: i for i, name in enumerate(_ORDER)}
        for metric in sorted(metrics, key=lambda name: rank.get(name, len(rank))):
            steps, values = history.series(f"{prefix}_{metric}")
            name = metric if prefix == "eval" else f"{metric} ({set_name(prefix)})"
            figures[name] = (values[0] if steps[0] == 0 else None, values[-1] if steps[-1] > 0 else None)
    return figures


def set_name(prefix: str) -> str:
    """The name of an evaluation set, from its prefix; empty for the set without one."""
    return prefix.removeprefix("eval").removeprefix("_")


def _read_line(line: bytes, where: str) -> dict[str, float]:
    try:
        entry = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{where}: not readable as JSON ({error}); delete the line, or write the report again later if the run is "
            "still writing it"
        ) from None
    if not isinstance(entry, dict):
        raise DataError(f"{where}: expected an object with 'step', got {type(entry).__name__}; delete the line")
    step = entry.get("step")
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        got = "none" if "step" not in entry else repr(step)
        raise DataError(f"{where}: expected 'step' to be a whole number >= 0, got {got}; delete the line")
    return {"step": step} | {key: number for key, value in entry.items() if (number := _number(value)) is not None}


def _number(value: Any) -> float | None:
    if value is None:
        return math.nan
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None
