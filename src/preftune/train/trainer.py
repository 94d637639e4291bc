"""The one subclass of `transformers.Trainer`, for every loss.

The loop, optimizers, schedules, checkpoints, wrappers, callbacks, trackers and the Hub are the Trainer's. This class
replaces what its loop assumes about language-modelling losses: how a step's loss is normalised, which rows a rank
gets, how evaluation averages, and what makes a checkpoint the right one to resume from.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer_utils import EvalLoopOutput, TrainOutput

from preftune.data import PreferenceDataset, StepSampler, collate
from preftune.errors import ConfigError, TrainingError
from preftune.models.adapters import is_adapted, save_adapter
from preftune.train.callbacks import LogLast, MetricsFile, close_bars, use_own_progress
from preftune.train.foreign import ForeignErrors
from preftune.train.guards import Datasets, check_arguments, check_layout, eval_sets, non_finite
from preftune.train.identity import Identity, find_checkpoint, identify, read_counted, require_same_run, save_identity
from preftune.train.ledger import Ledger
from preftune.train.loader import StepLoader
from preftune.train.metrics import Meter
from preftune.train.objective import Objective
from preftune.types import Batch, Origin

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

COUNTS = ("examples", "completion_tokens")


@dataclass
class _Step:
    """What the micro-batches of one optimizer step share."""

    batches: list[Batch]
    counts: Tensor
    z_ref: Tensor | None = None


class PreferenceTrainer(ForeignErrors, Trainer):
    """Trains an `Objective` with everything `transformers.Trainer` brings.

    The gradient of a step is that of (sum of the loss over all rows of the step, all micro-batches and ranks) /
    (their count): how a step is split changes nothing.

    Args:
        objective: policy, reference and loss.
        args: transformers' arguments; those that would be ignored or break exactness are refused (see
            `training_arguments`, whose defaults pass).
        train_dataset: rows of the layout that the loss takes.
        eval_dataset: one set, or several by name.
        tokenizer: saved with the model.
        callbacks: more of transformers' callbacks.
        run: facts about the run kept with its checkpoints and compared on resume, beside the objective and the data.
    """

    # The loss handed back is already that of the whole step's count; the loop must not divide it again.
    loss_is_scaled_for_ga = True

    # Attributes of the base class, which is not typed here.
    control: Any
    model: Any
    model_wrapped: Any

    def __init__(
        self,
        objective: Objective,
        args: TrainingArguments,
        train_dataset: PreferenceDataset,
        eval_dataset: Datasets | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        callbacks: Sequence[TrainerCallback] = (),
        run: Identity | None = None,
    ) -> None:
        check_arguments(objective, args, train_dataset, eval_dataset)
        self.objective = objective
        self.identity = {**identify(objective, train_dataset, args), **(run or {})}
        self._ledger = Ledger(self._sum_over_ranks)
        self._step: _Step | None = None
        self._suspects: list[tuple[Tensor, list[Origin]]] = []
        super().__init__(
            model=objective.policy.model,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=tokenizer or objective.policy.tokenizer,
            callbacks=[LogLast(), MetricsFile(args.output_dir), *callbacks],
        )
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            raise ConfigError("FSDP and DeepSpeed are not supported yet; start with torchrun and without them")
        use_own_progress(self)
        objective.reference.to(args.device)
        self.head_difference = objective.policy.self_check(self._prepare_inputs(collate([train_dataset[0]])))
        self._prepare_reference(train_dataset, *eval_sets(eval_dataset))
        self.card: Callable[[], str] | None = None

    # Rows and batches

    def get_train_dataloader(self) -> StepLoader:
        """Micro-batches of this rank; each row once per epoch over all ranks."""
        seed = self.args.data_seed if self.args.data_seed is not None else self.args.seed
        return self._loader(cast("PreferenceDataset", self.train_dataset), self._train_batch_size, seed)

    def get_eval_dataloader(self, eval_dataset: str | PreferenceDataset | None = None) -> StepLoader:
        """Batches of this rank, in the rows' own order; each row once over all ranks."""
        chosen = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(chosen, str):
            chosen = cast("dict[str, PreferenceDataset]", self.eval_dataset)[chosen]
        if not isinstance(chosen, PreferenceDataset):
            raise ConfigError("evaluation needs a PreferenceDataset (see tokenize_examples)")
        check_layout(self.objective, chosen)
        if chosen not in eval_sets(self.eval_dataset):
            self._prepare_reference(chosen)
        return self._loader(chosen, self.args.eval_batch_size, None)

    def _prepare_reference(self, *datasets: PreferenceDataset) -> None:
        self.objective.reference.prepare(datasets, self.args.device, quiet=self.args.process_index > 0)

    def _loader(self, dataset: PreferenceDataset, batch_size: int, seed: int | None) -> StepLoader:
        sampler = StepSampler(len(dataset), batch_size, self.args.process_index, self.args.world_size, seed)
        pad = getattr(self.processing_class, "pad_token_id", None)
        return StepLoader(dataset, sampler, 0 if pad is None else pad, self.args)

    def _prepare_inputs(self, inputs: Any) -> Any:
        return inputs.to(self.args.device, non_blocking=True) if isinstance(inputs, Batch) else inputs

    # One step

    def get_batch_samples(
        self, epoch_iterator: Iterator[Batch], num_batches: int, device: torch.device
    ) -> tuple[list[Batch], Tensor]:
        """Fetch a step's micro-batches and reduce its counts over ranks, once."""
        batches = [batch for _, batch in zip(range(num_batches), epoch_iterator, strict=False)]
        own = [batch.counts() for batch in batches]
        counts = torch.tensor([sum(c[name] for c in own) for name in COUNTS], dtype=torch.float32, device=device)
        counts = self._sum_over_ranks(counts)
        self._step = _Step(batches, counts)
        self._ledger.throughput.add(sum(c["tokens"] for c in own))
        return batches, counts

    def training_step(self, model: nn.Module, inputs: Batch, num_items_in_batch: Tensor | None = None) -> Tensor:
        """Forward and backward of a micro-batch; the step's first also makes the pass for KTO's baseline."""
        assert self._step is not None
        if self.objective.loss.spec.needs_kl_baseline and self._step.z_ref is None:
            # Here rather than where batches are fetched: a resume restores the random state in between. The pass is
            # in eval mode and draws no random numbers, and every rank makes the same number of forwards.
            self._step.z_ref = self._baseline(model, self._step.batches, self._ledger.interval)
        return cast("Tensor", super().training_step(model, inputs, num_items_in_batch))

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Batch,
        return_outputs: bool = False,
        num_items_in_batch: Tensor | None = None,
    ) -> Any:
        """Sum of the loss over the micro-batch / count of the whole step x ranks (the wrapper averages over those)."""
        assert self._step is not None
        output = self.objective(inputs, model, self._step.z_ref)
        self._ledger.add(output.metrics, (output.total, output.count))
        self._suspects.append((output.values, inputs.origins))
        count = self._step.counts[COUNTS.index(self.objective.loss.spec.denominator)]
        loss = output.total / count * self.accelerator.num_processes
        return (loss, output) if return_outputs else loss

    def _baseline(self, model: nn.Module, batches: Iterable[Batch], meter: Meter) -> Tensor:
        terms = [torch.stack(self.objective.kl_terms(self._prepare_inputs(batch), model)) for batch in batches]
        own = torch.stack(terms).sum(0)
        meter.add({"kl": (own[0], own[1])})
        total, count = self._sum_over_ranks(own)
        return cast("Tensor", (total / count.clamp(min=1)).clamp(min=0))

    def _sum_over_ranks(self, tensor: Tensor) -> Tensor:
        return cast("Tensor", self.accelerator.reduce(tensor, "sum")) if self.args.world_size > 1 else tensor

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """The gradient's norm; stops the run before the optimizer's step when it or a loss is not finite."""
        norm = super()._get_grad_norm(model, grad_norm)
        suspects, self._suspects = self._suspects, []
        bad = torch.stack([(~values.isfinite()).sum() for values, _ in suspects]).sum().float()
        bad = self._sum_over_ranks(bad) + ~torch.isfinite(torch.as_tensor(norm, device=bad.device))
        if float(bad):  # the step's one synchronisation for this
            raise TrainingError(non_finite(self.state.global_step + 1, suspects, norm))
        return norm

    # Metrics and evaluation

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the metrics of the interval to the training entries; `loss` becomes sum / count over its steps."""
        if "loss" in logs:
            figures, tokens = self._ledger.entry(self.args.device)
            self.state.num_input_tokens_seen += tokens
            logs |= {**figures, "tokens": self.state.num_input_tokens_seen}
        if "train_loss" in logs:  # the loop's own is a mean over steps, of those since a resume
            logs["train_loss"] = self._ledger.whole_run()
        super().log(logs, start_time)

    def evaluation_loop(
        self,
        dataloader: StepLoader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Count every row once: sums and counts over batches and ranks, and one baseline over the whole set."""
        model = self.model_wrapped
        self._ledger.throughput.pause()
        meter = Meter()
        spec = self.objective.loss.spec
        z_ref = self._baseline(model, dataloader, meter) if spec.needs_kl_baseline else None
        was_training = model.training
        model.eval()
        with torch.no_grad():
            for batch in dataloader:
                output = self.objective(self._prepare_inputs(batch), model, z_ref)
                meter.add({**output.metrics, "loss": (output.total, output.count)})
                self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)
        model.train(was_training)
        self._ledger.throughput.resume()
        means = meter.read(self._sum_over_ranks)
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in means.items()}
        rows = len(cast("PreferenceDataset", dataloader.dataset))
        return EvalLoopOutput(predictions=cast("Any", None), label_ids=None, metrics=metrics, num_samples=rows)

    def floating_point_ops(self, inputs: Any) -> int:
        """Six operations per token and weight, by the usual estimate."""
        weights: int = sum(p.numel() for p in self.model.parameters())
        return 6 * int(inputs.input_ids.numel()) * weights

    # Start, checkpoints, result

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> TrainOutput:
        """Train, or go on from a checkpoint (True: the last one in the output folder).

        Raises `ConfigError` when the checkpoint was saved by a run with another loss, data, base or reference. One
        that has all its steps already is loaded, and no step is taken.
        """
        checkpoint = find_checkpoint(resume_from_checkpoint, self.args.output_dir)
        if checkpoint is not None:
            require_same_run(self.identity, checkpoint)
            saved = TrainerState.load_from_json(os.path.join(checkpoint, "trainer_state.json"))
            *_, max_steps = self.set_initial_training_values(self.args, self.get_train_dataloader())
            if saved.global_step >= max_steps:
                logger.warning("nothing left to do: %s is at step %d of %d", checkpoint, saved.global_step, max_steps)
                self.state = saved
                if self.args.load_best_model_at_end and saved.best_model_checkpoint is not None:
                    self._load_best_model()
                else:
                    self._load_from_checkpoint(checkpoint)
                return TrainOutput(saved.global_step, float("nan"), {})
            if self.args.process_index == 0:
                self._ledger.restore(read_counted(checkpoint), self.args.device)
        try:
            output = super().train(resume_from_checkpoint=checkpoint, **kwargs)
            return TrainOutput(output.global_step, output.metrics.get("train_loss", float("nan")), output.metrics)
        finally:
            close_bars(self.callback_handler.callbacks)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write the card of whoever built the run (`card`), where there is one, in place of the generic one."""
        if self.card is None:
            super().create_model_card(*args, **kwargs)
        elif self.is_world_process_zero():
            Path(self.args.output_dir, "README.md").write_text(self.card(), encoding="utf-8")

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        counted = self._ledger.snapshot(self.args.device)
        if self.args.should_save:
            folder = f"checkpoint-{self.state.global_step}"
            save_identity(self.identity, counted, os.path.join(self._get_output_dir(trial), folder))

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        """Save the trained adapter alone: a frozen copy kept as reference is no part of the result."""
        unwrapped = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        if not is_adapted(unwrapped):
            super()._save(output_dir, state_dict)
            return
        output_dir = output_dir or self.args.output_dir
        if not self.args.should_save:
            return
        save_adapter(unwrapped, output_dir, state_dict)
        if self.processing_class is not None:
            self.processing_class.save_pretrained(output_dir)
        torch.save(self.args, os.path.join(output_dir, "training_args.bin"))
