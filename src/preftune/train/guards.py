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


def check_arguments(
    objective: Objective, args: TrainingArguments, train_dataset: PreferenceDataset, eval_dataset: Datasets | None
) -> None:
    """Refuse arguments that would be ignored or inexact, and data sets that do not go with the objective."""
    require_exact(args)
    sets = eval_dataset.values() if isinstance(eval_dataset, dict) else [eval_dataset] if eval_dataset else []
    for dataset in [train_dataset, *sets]:
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
    if spec.needs_kl_baseline and all(example.mismatched is None for example in dataset.examples):
        raise ConfigError(f"loss.name: {spec.name} needs mismatched pairs; give tokenize_examples a mismatched_seed")


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
