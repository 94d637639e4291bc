"""What is refused at the start of a run, and what is said when one has to stop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from preftune.data import PreferenceDataset
from preftune.errors import ConfigError, ModelError
from preftune.models.head import causal_lm
from preftune.train.arguments import require_exact
from preftune.train.objective import Objective
from preftune.types import Origin

if TYPE_CHECKING:
    from transformers import TrainingArguments

Datasets = PreferenceDataset | dict[str, PreferenceDataset]


def eval_sets(given: Datasets | None) -> list[PreferenceDataset]:
    """All evaluation sets of none, one, or several by name."""
    if isinstance(given, dict):
        return list(given.values())
    return [given] if given is not None else []


def check_arguments(
    objective: Objective, args: TrainingArguments, train_dataset: PreferenceDataset, eval_dataset: Datasets | None
) -> None:
    """Refuse arguments that would be ignored or inexact, and data sets that do not go with the objective."""
    require_exact(args)
    for dataset in [train_dataset, *eval_sets(eval_dataset)]:
        check_layout(objective, dataset)
    if args.n_gpu > 1:
        args._n_gpu = 1  # one process, one device: nn.DataParallel averages losses over replicas


def check_layout(objective: Objective, dataset: PreferenceDataset) -> None:
    """Refuse rows of another layout than the loss takes, or without what it needs."""
    spec = objective.loss.spec
    if dataset.layout != spec.layout:
        cure = "use to_unpaired" if spec.layout == "unpaired" else "give rows with prompt, chosen, rejected"
        raise ConfigError(f"loss.name: {spec.name} takes {spec.layout} rows, the data is {dataset.layout}; {cure}")
    rows = len(causal_lm(objective.policy.model).get_input_embeddings().weight)
    if dataset.largest_id >= rows:
        raise ModelError(
            f"the data has token id {dataset.largest_id}, the model's embedding only {rows} rows; tokenise with the "
            "model's own tokenizer, or resize the embedding and train it"
        )
    _require_one_side(objective, dataset)
    if spec.needs_kl_baseline and all(example.mismatched is None for example in dataset.examples):
        raise ConfigError(f"loss.name: {spec.name} needs mismatched pairs; give tokenize_examples a mismatched_seed")


def _require_one_side(objective: Objective, dataset: PreferenceDataset) -> None:
    """Refuse rows whose positions would depend on what shares their batch.

    With longrope the longest row of a batch decides for all of it between two sets of rotary frequencies, with dynamic
    NTK scaling it sets them: a row beside a longer one would have another log-probability than alone.
    """
    config = causal_lm(objective.policy.model).config
    found = switching_length(config)
    if found is None:
        return
    kind, limit = found
    lengths = [len(row) for example in dataset.examples for row in example.rows()]
    if max(lengths) > limit and (kind != "longrope" or min(lengths) <= limit):
        raise ModelError(
            f"{config.model_type} has {kind} positions: rows of more than {limit} tokens (the longest here has "
            f"{max(lengths)}) would change the log-probabilities of the rows that share their batch; set "
            f"data.max_length: {limit}"
        )


def switching_length(config: Any) -> tuple[str, int] | None:
    """The kind of rotary positions that follow the batch's longest row, and the length from which on they do."""
    parameters = getattr(config, "rope_parameters", None) or {}
    for rope in [parameters, *(p for p in parameters.values() if isinstance(p, dict))]:
        kind = str(rope.get("rope_type", ""))
        if kind == "longrope":
            limit = rope.get("original_max_position_embeddings") or config.original_max_position_embeddings
            return kind, int(limit)
        if "dynamic" in kind:
            return kind, int(config.max_position_embeddings)
    return None


def non_finite(step: int, suspects: list[tuple[Tensor, list[Origin]]], norm: Any) -> str:
    """Name the step, what is not finite, and the rows."""
    values = torch.cat([v for v, _ in suspects])
    origins = [origin for _, rows in suspects for origin in rows]
    bad = [str(origin) for origin, fine in zip(origins, values.isfinite().tolist(), strict=True) if not fine]
    what = f"loss not finite for {', '.join(bad)}" if bad else f"gradient norm is {float(norm)}"
    rows = ", ".join(map(str, origins[:16])) + (" ..." if len(origins) > 16 else "")
    return (
        f"step {step}: {what}; the optimizer's step was not taken. Rows of the step on this rank: {rows}. Look at "
        "these rows, lower training.learning_rate, or raise model.dtype"
    )
