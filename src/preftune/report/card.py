"""The model card: the README.md that goes with a tuned model to the Hub."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

# A name on the Hub: `model` or `owner/model`.
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")

_LOAD_ADAPTER = """\
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

path = {path}  # this folder, or its name on the Hub
base = AutoModelForCausalLM.from_pretrained({base}, dtype="auto")
model = PeftModel.from_pretrained(base, path)
tokenizer = AutoTokenizer.from_pretrained(path)
"""
_LOAD_MODEL = """\
from transformers import AutoModelForCausalLM, AutoTokenizer

path = {path}  # this folder, or its name on the Hub
model = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
tokenizer = AutoTokenizer.from_pretrained(path)
"""


def model_card(
    name: str,
    base_model: str,
    adapter: bool,
    loss: str,
    facts: Mapping[str, str],
    figures: Mapping[str, float],
    *,
    revision: str | None = None,
    license: str | None = None,
    datasets: Sequence[str] = (),
    tags: Sequence[str] = (),
) -> str:
    """Return a Hugging Face model card as markdown with YAML front matter.

    Args:
        name: the heading, and the path in the code that loads the model.
        base_model: a name on the Hub or a folder. A folder is not named in the front matter, where the Hub takes only
            its own names.
        adapter: whether the result is an adapter on top of `base_model`, or a whole model.
        loss: the loss's name, also a tag.
        facts: what the run is, in words: reference, loss with parameters, data, training.
        figures: final figures by name.
        revision: of the base model on the Hub.
        license: an identifier of the Hub's list, such as `apache-2.0`.
        datasets: names on the Hub.
        tags: more tags.
    """
    parts = [
        _front_matter(base_model, adapter, loss, license, datasets, tags),
        f"# {_text(name)}",
        _introduction(base_model, adapter, loss),
        "## How to load it",
        _code(name, base_model, adapter, revision),
        "It answers as it was trained to when prompted as in training: with the tokenizer's chat template where the "
        "data were messages, and with plain text where they were plain text.",
    ]
    if facts:
        parts += ["## The run", _table(("", ""), facts.items())]
    if figures:
        rows = [(key, f"{value:.4g}") for key, value in figures.items()]
        parts += ["## Final figures", _table(("metric", "value"), rows, "|---|---:|"), _MEANING]
    return "\n\n".join(part.strip() for part in parts) + "\n"


_MEANING = (
    "Rewards are β · (log π − log π_ref) in nats, π being this model and π_ref the reference; the margin is the chosen "
    "reward minus the rejected one; accuracy is the share ranked right by reward, a tie counting half. `report.html` "
    "shows the curves and what every metric means."
)


def _front_matter(
    base_model: str, adapter: bool, loss: str, license: str | None, datasets: Sequence[str], tags: Sequence[str]
) -> str:
    data: dict[str, Any] = {}
    if _on_hub(base_model):
        data["base_model"] = base_model
    data["library_name"] = "peft" if adapter else "transformers"
    data["pipeline_tag"] = "text-generation"
    if license is not None:
        data["license"] = license
    if datasets:
        data["datasets"] = list(datasets)
    data["tags"] = list(dict.fromkeys(["preftune", loss, *(["lora"] if adapter else []), *tags]))
    return f"---\n{yaml.safe_dump(data, sort_keys=False, allow_unicode=True)}---"


def _introduction(base_model: str, adapter: bool, loss: str) -> str:
    shown = f"[{base_model}](https://huggingface.co/{base_model})" if _on_hub(base_model) else _span(base_model)
    what = f"An adapter for {shown}" if adapter else shown
    return f"{what}, tuned on preferences with preftune and the loss {_span(loss)}."


def _code(name: str, base_model: str, adapter: bool, revision: str | None) -> str:
    base = json.dumps(base_model) + (f", revision={json.dumps(revision)}" if revision else "")
    code = (_LOAD_ADAPTER if adapter else _LOAD_MODEL).format(path=json.dumps(name), base=base)
    return f"```python\n{code}```"


def _table(head: tuple[str, str], rows: Any, rule: str = "|---|---|") -> str:
    lines = [f"| {head[0]} | {head[1]} |", rule, *(f"| {_text(key)} | {_text(value)} |" for key, value in rows)]
    return "\n".join(lines)


def _text(text: str) -> str:
    """Text that stays what it is in a cell or a line of markdown: no markup, columns or line ends of its own."""
    return re.sub(r"([\\|`*_<\[\]])", r"\\\1", " ".join(text.split()))


def _span(text: str) -> str:
    """Text as a span of code, where nothing but a backtick is special."""
    return f"`{' '.join(text.replace('`', '').split())}`"


def _on_hub(name: str) -> bool:
    return len(name) <= 200 and bool(_HUB_NAME.fullmatch(name)) and not Path(name).exists()
