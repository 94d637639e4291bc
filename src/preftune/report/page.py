"""One self-contained HTML page about one or several runs: no scripts, no network, plots within the file."""

from __future__ import annotations

import base64
import contextlib
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path

from jinja2 import Environment, StrictUndefined, Template

from preftune.errors import ConfigError
from preftune.report.metrics import History
from preftune.report.plots import PANELS, plot

# What each metric means, in the order of the page.
GLOSSARY: Mapping[str, str] = {
    "loss": "What training minimises, averaged over the step as the loss declares it (over examples, unless it says "
    "completion tokens). Losses of different kinds cannot be compared with each other.",
    "reward": "β · (log π − log π_ref) of a completion: how much more likely it has become under the policy than under "
    "the reference, in nats, times β. Chosen (or desirable) completions should rise above rejected (or undesirable) "
    "ones; both may fall. 0 before the first update.",
    "margin": "Chosen reward minus rejected reward, averaged over pairs. For single ratings, where rows have no "
    "partner, it is the mean reward of desirable rows minus that of undesirable rows.",
    "accuracy": "Pairs: the share whose chosen completion has the higher reward. Single ratings: the share of rows on "
    "the right side of the KL baseline. A tie counts half, so it is 0.5 where nothing was learned.",
    "kl": "How far the policy has moved from the reference, estimated in nats per completion. KTO: the mean "
    "log-ratio log π − log π_ref over mismatched pairs of prompt and completion, shown before it is clamped at 0 to "
    "become the baseline. Paired losses: the mean log-ratio over the batch's own completions; that is an off-policy "
    "estimate, which may be negative.",
    "sampled_kl": "KL(π ‖ π_ref) in nats per token, exact over the vocabulary, averaged along samples drawn from the "
    "policy itself. Never negative.",
    "logps": "log π of a whole completion: the sum over its tokens, in nats. Longer completions have lower values.",
    "learning rate, gradient norm": "The optimizer's learning rate, and the norm of the whole step's gradient before "
    "it is clipped.",
}
_ALT = "{title}, over the steps of {run}"
_PLAIN_MINUS = str.maketrans("-", "−")


@dataclass(frozen=True)
class Sample:
    """A prompt and what the reference and the policy answer."""

    prompt: str
    reference: str
    policy: str


@dataclass(frozen=True)
class RunReport:
    """What the page shows of one run.

    Args:
        name: its heading.
        history: its metrics, for the plots.
        facts: what the run is, in words: base model, reference, loss and parameters, data, adapter, ...
        figures: values before and after, None where not measured.
        samples: continuations side by side.
        notes: what a reader of the figures should know.
    """

    name: str
    history: History
    facts: Mapping[str, str]
    figures: Mapping[str, tuple[float | None, float | None]]
    samples: Sequence[Sample]
    notes: Sequence[str]


def write_report(runs: Sequence[RunReport], path: Path, title: str) -> None:
    """Write the page about `runs` to `path`, all of it or nothing; folders are made.

    Raises `ConfigError` where the file cannot be written.
    """
    page = render(runs, title)
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # A sample may hold half of a surrogate pair, which UTF-8 cannot spell.
        temporary.write_bytes(page.encode("utf-8", errors="replace"))
        temporary.replace(path)
    except OSError as error:
        raise ConfigError(f"{path}: the report cannot be written ({error.strerror}); choose another folder") from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def render(runs: Sequence[RunReport], title: str) -> str:
    """The page as text."""
    sections = [
        {
            "run": run,
            "anchor": f"run-{number}",
            "figures": [_row(name, *pair) for name, pair in run.figures.items()],
            "plots": _plots(run),
        }
        for number, run in enumerate(runs, 1)
    ]
    return _template().render(title=title, sections=sections, glossary=GLOSSARY)


def show(value: float | None) -> str:
    """A figure for reading: four significant digits, a true minus sign, a dash where there is none."""
    if value is None:
        return "–"
    if not math.isfinite(value):
        return str(value).translate(_PLAIN_MINUS)
    size = abs(value)
    if not size:
        return "0"
    if not 1e-3 <= size < 1e6:
        text = f"{value:.2e}"
    else:
        text = f"{value:,.{1 if size >= 100 else 2 if size >= 10 else 3 if size >= 1 else 4}f}"
    return text.translate(_PLAIN_MINUS)


def _row(name: str, before: float | None, after: float | None) -> tuple[str, str, str, str]:
    if before is None or after is None:
        return name, show(before), show(after), show(None)
    delta = after - before
    return name, show(before), show(after), ("+" if delta > 0 else "") + show(delta)


def _plots(run: RunReport) -> list[tuple[str, str]]:
    """Alternative text and PNG in base64 of each panel that has data."""
    drawn = ((panel.title, plot(run.history, name)) for name, panel in PANELS.items())
    return [
        (_ALT.format(title=title, run=run.name), base64.b64encode(data).decode("ascii"))
        for title, data in drawn
        if data is not None
    ]


@cache
def _template() -> Template:
    source = resources.files("preftune.report").joinpath("template.html").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(source)
