"""A whole run from its configuration."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import set_seed

from preftune.build.data import Data, prepare_data
from preftune.build.objective import make_objective
from preftune.config import RunConfig, dump_yaml, training_arguments
from preftune.config.training import DEFAULTS
from preftune.errors import ConfigError, refused_as
from preftune.models.policy import trainable_parameters
from preftune.reference import CachedReference
from preftune.report import RunReport, Sample, before_and_after, read_metrics
from preftune.train import Objective, PreferenceTrainer
from preftune.train.arguments import FIXED
from preftune.train.callbacks import METRICS_FILE
from preftune.train.identity import find_checkpoint, require_same_run

if TYPE_CHECKING:
    from torch import nn
    from transformers import TrainerCallback

CONFIG_FILE = "config.yaml"


@dataclass
class Run:
    """Everything a run needs, ready to train."""

    config: RunConfig
    data: Data
    objective: Objective
    trainer: PreferenceTrainer

    def facts(self) -> dict[str, str]:
        """What the run is, in words: for the summary, the report and the model card."""
        policy, model = self.objective.policy, self.config.model
        trained = sum(p.numel() for _, p in trainable_parameters(policy.model))
        total = sum(p.numel() for p in policy.model.parameters())
        loss = self.objective.loss
        args = self.trainer.args
        step = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
        facts = {
            "base model": model.name + (f" at {model.revision}" if model.revision else ""),
            "trained": f"{_adapter_words(self.config)}: {trained:,} of {total:,} parameters, stored in "
            f"{_stored(policy.model)}, computing in {model.dtype}",
            "reference": self.objective.reference.describe(),
            "loss": f"{loss.name} ({', '.join(f'{k} {v:g}' for k, v in loss.parameters.items())})",
            "data": f"{self.config.data.train}: {len(self.data.train)} {self.data.train.layout} rows for training"
            + (f", {len(self.data.eval)} for evaluation" if self.data.eval else ""),
            "step": f"{step} rows ({args.per_device_train_batch_size} a micro-batch x "
            f"{args.gradient_accumulation_steps} accumulated x {args.world_size} processes), "
            f"learning rate {args.learning_rate:g}",
        }
        facts |= _training_words(self.config)
        difference = self.trainer.head_difference
        facts["head"] = f"fused log-probabilities agree with the model's own logits to {difference:.1e} nats a token"
        if model.adapter is not None:
            facts["to load"] = _stacked_on(self.config)
        return facts

    def train(self) -> bool:
        """Train, or go on where `training.resume_from_checkpoint` says. False where no step was left to take."""
        resume = getattr(self.config.training, "resume_from_checkpoint", None)
        checkpoint = find_checkpoint(resume, str(self.config.folder))
        if checkpoint is not None:
            require_same_run(self.trainer.identity, checkpoint)
        if self.trainer.is_world_process_zero():
            _begin(self.config, checkpoint)
        return bool(self.trainer.train(resume_from_checkpoint=resume).metrics)

    def report(
        self,
        name: str,
        figures: Mapping[str, tuple[float | None, float | None]] | None = None,
        samples: Sequence[Sample] = (),
        notes: Sequence[str] = (),
    ) -> RunReport:
        """This run for the HTML page; `figures` (before, after) default to the evaluations."""
        history = read_metrics(self.config.folder / METRICS_FILE)
        return RunReport(
            name=name,
            history=history,
            facts=self.facts(),
            figures=before_and_after(history) if figures is None else figures,
            samples=samples,
            notes=notes,
        )


def build(
    config: RunConfig,
    callbacks: Sequence[TrainerCallback] = (),
    announce: Callable[[str], None] = lambda line: None,
) -> Run:
    """Check, read and load everything a run needs, cheap things first.

    Order: the training arguments, the model's configuration and tokenizer, then all data (so that bad rows are known
    before a weight is loaded), then the model, the reference and the trainer.

    Args:
        config: the run.
        callbacks: transformers' callbacks to add.
        announce: is told what was read, line by line, as soon as it is known.
    """
    args = training_arguments(str(config.folder), **config.training.model_dump())
    data = prepare_data(config)
    for line in data.lines():
        announce(line)
    set_seed(args.seed)  # a new adapter starts from random values: the same for the same seed, on every process
    objective = make_objective(config)
    adapter = None if config.model.adapter is None else config.model.adapter.model_dump(exclude={"path"})
    trainer = PreferenceTrainer(
        objective, args, data.train, data.eval, objective.policy.tokenizer, callbacks, run={"adapter": adapter}
    )
    if isinstance(objective.reference, CachedReference):
        for line in objective.reference.account:
            announce(line)
    return Run(config, data, objective, trainer)


def claim_folder(config: RunConfig) -> None:
    """Make the output folder; refuse one that holds a run, unless the run is resumed or may be written over.

    Nothing of a run is written yet: what fails before training starts leaves no run behind.
    """
    if int(os.environ.get("RANK", "0")) != 0:
        return  # the first process decides and writes; the launcher ends the others with it
    make_folder(config.folder)
    resume = getattr(config.training, "resume_from_checkpoint", None)
    # A checkpoint of another folder's run does not make the run in this one its own.
    resuming = resume is True or (bool(resume) and _is_own(str(resume), config.folder))
    if (config.folder / CONFIG_FILE).exists() and not (resuming or config.overwrite):
        raise ConfigError(
            f"output_dir: {config.folder} holds a run already; choose another, set overwrite: true to start anew in "
            "it, or training.resume_from_checkpoint: true to go on"
        )


def make_folder(folder: Path) -> None:
    """Make an output folder and try to write in it."""
    with refused_as(ConfigError, f"output_dir: {folder} cannot be written"):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass


def _is_own(checkpoint: str, folder: Path) -> bool:
    return Path(checkpoint).expanduser().resolve().parent == folder.resolve()


def _begin(config: RunConfig, checkpoint: str | None) -> None:
    """Save the configuration, without what only said how to start; an overwritten run's checkpoints go with it.

    A run that goes on from another folder's checkpoint takes that run's metrics with it.
    """
    if checkpoint is None or not _is_own(checkpoint, config.folder):
        for old in config.folder.glob("checkpoint-*"):
            if (old / "trainer_state.json").exists():
                shutil.rmtree(old)
        (config.folder / METRICS_FILE).unlink(missing_ok=True)
        before = Path(checkpoint or "").parent / METRICS_FILE
        if checkpoint is not None and before.exists():
            shutil.copyfile(before, config.folder / METRICS_FILE)
    data = config.resolved()
    data["overwrite"] = False
    data["training"]["resume_from_checkpoint"] = None
    (config.folder / CONFIG_FILE).write_text(dump_yaml(data), encoding="utf-8")


def describe_processes() -> list[str]:
    """A line for those who have more devices than this run uses."""
    import torch

    devices = torch.cuda.device_count()
    if devices > 1 and int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return [f"using one of {devices} devices; for all: torchrun --nproc-per-node {devices} -m preftune train ..."]
    return []


def _training_words(config: RunConfig) -> dict[str, str]:
    """What `training:` was given, and which defaults of our own fill the rest."""
    training: Any = config.training
    given = [name for name in training.model_fields_set if name not in ("hub_token", *DEFAULTS)]
    shown = {name: getattr(training, name) for name in [*DEFAULTS, *sorted(given)] if name not in FIXED}
    ours = [f"{name} {value}" for name, value in shown.items() if name not in training.model_fields_set]
    set_here = [f"{name} {value}" for name, value in shown.items() if name in training.model_fields_set]
    words = {"training": ", ".join(set_here), "training defaults": ", ".join(ours)}
    return {key: value for key, value in words.items() if value}


def _stored(model: nn.Module) -> str:
    kinds = {str(p.dtype).removeprefix("torch.") for _, p in trainable_parameters(model)}
    return " and ".join(sorted(kinds))


def _adapter_words(config: RunConfig) -> str:
    a: Any = config.model.adapter
    if a is None:
        return "all weights"
    if a.path is not None:
        return f"the adapter {a.path}"
    targets = a.target_modules if isinstance(a.target_modules, str) else ", ".join(a.target_modules)
    return f"{'DoRA' if a.dora else 'LoRA'} r={a.r} alpha={a.alpha:g} on {targets}"


def _stacked_on(config: RunConfig) -> str:
    a = config.model.adapter
    assert a is not None
    start = f" (it goes on from {a.path} and replaces it)" if a.path else ""
    return f"the saved adapter goes on top of {config.model.name}{start}"
