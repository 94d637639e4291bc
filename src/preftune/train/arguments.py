"""Which of transformers' training arguments go with preftune, and which of them go together."""

from __future__ import annotations

import inspect
import multiprocessing
from collections.abc import Mapping
from typing import Any

import torch
from transformers import TrainingArguments, get_scheduler
from transformers.integrations import get_available_reporting_integrations
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from transformers.trainer_utils import SchedulerType

from preftune.errors import ConfigError, nearest

# name: (the only value accepted, why and what to do instead)
FIXED: dict[str, tuple[Any, str]] = {
    "accelerator_config": (None, "rows are dealt out by preftune's own sampler; leave it out"),
    "auto_find_batch_size": (
        False,
        "would change the rows of a step in the middle of a run; lower per_device_train_batch_size and raise "
        "gradient_accumulation_steps, which changes nothing but memory",
    ),
    "average_tokens_across_devices": (True, "off, a step's loss would depend on how rows fall on ranks; leave it on"),
    "batch_eval_metrics": (False, "evaluation already keeps only sums and counts; leave it out"),
    "bf16": (False, "the compute dtype is model.dtype; set model.dtype: bfloat16"),
    "bf16_full_eval": (False, "evaluation runs in model.dtype; set model.dtype"),
    "dataloader_drop_last": (False, "every row is used once per epoch; to use fewer rows shorten the data"),
    "dataloader_in_order": (True, "batches out of order would change the rows of a step; leave it on"),
    "deepspeed": (None, "is not supported yet; use torchrun (DDP) without it"),
    "do_eval": (False, "has no effect here; set data.eval and training.eval_strategy"),
    "do_predict": (False, "has no effect here; leave it out"),
    "do_train": (False, "has no effect here; leave it out"),
    "eval_accumulation_steps": (None, "evaluation keeps no predictions; leave it out"),
    "eval_do_concat_batches": (True, "evaluation keeps no predictions; leave it out"),
    "eval_use_gather_object": (False, "evaluation keeps no predictions; leave it out"),
    "fp16": (False, "the compute dtype is model.dtype; set model.dtype: bfloat16"),
    "fp16_full_eval": (False, "evaluation runs in model.dtype; set model.dtype"),
    "fsdp": (None, "is not supported yet; use torchrun (DDP) without it"),
    "fsdp_config": (None, "is not supported yet; use torchrun (DDP) without it"),
    "ignore_data_skip": (False, "a resumed run would see rows twice; leave it off"),
    "include_for_metrics": ([], "metrics are sums and counts over batches; leave it out"),
    "include_num_input_tokens_seen": ("no", "tokens are always counted and logged as `tokens`; leave it out"),
    "label_names": (None, "batches have no label columns; leave it out"),
    "label_smoothing_factor": (0.0, "smooths next-token labels, which are not used here; set loss.label_smoothing"),
    "length_column_name": ("length", "rows are not grouped by length; leave it out"),
    "liger_kernel_config": (None, "the head is fused by preftune; leave it out"),
    "local_rank": (-1, "is set by the launcher; start with torchrun"),
    "logging_nan_inf_filter": (False, "would log a non-finite loss as the last finite one; leave it off"),
    "neftune_noise_alpha": (None, "adds noise to the policy but not to the reference; leave it out"),
    "parallelism_config": (None, "tensor and context parallelism are not supported yet; leave it out"),
    "prediction_loss_only": (False, "evaluation always reports all metrics; leave it out"),
    "remove_unused_columns": (False, "batches have no columns to remove; leave it off"),
    "torch_compile": (False, "is not supported yet; leave it off"),
    "torch_compile_backend": (None, "is not supported yet; leave it out"),
    "torch_compile_mode": (None, "is not supported yet; leave it out"),
    "train_sampling_strategy": ("random", "grouping rows by length or file order biases the steps; leave it out"),
    "use_cache": (False, "keys and values of training passes are never used again; leave it off"),
    "use_liger_kernel": (False, "the head is fused by preftune, in a form that keeps log-probabilities exact"),
}

# Fields that do nothing unless another has one of these values: name: (the other, values, the cure in words).
COMPANIONS: dict[str, tuple[str, tuple[Any, ...], str]] = {
    "eval_steps": ("eval_strategy", ("steps",), "eval_strategy: steps"),
    "eval_delay": ("eval_strategy", ("steps", "epoch"), "eval_strategy: steps or epoch"),
    "load_best_model_at_end": ("eval_strategy", ("steps", "epoch"), "eval_strategy: steps or epoch"),
    "logging_steps": ("logging_strategy", ("steps",), "logging_strategy: steps"),
    "save_steps": ("save_strategy", ("steps",), "save_strategy: steps"),
    "hub_token": ("push_to_hub", (True,), "push_to_hub: true"),
    "activation_checkpointing_kwargs": ("activation_checkpointing", (True,), "activation_checkpointing: true"),
    "gradient_checkpointing_kwargs": ("gradient_checkpointing", (True,), "gradient_checkpointing: true"),
    "hub_always_push": ("push_to_hub", (True,), "push_to_hub: true"),
    "hub_model_id": ("push_to_hub", (True,), "push_to_hub: true"),
    "hub_private_repo": ("push_to_hub", (True,), "push_to_hub: true"),
    "hub_revision": ("push_to_hub", (True,), "push_to_hub: true"),
    "hub_strategy": ("push_to_hub", (True,), "push_to_hub: true"),
}
_WITHOUT_OPTIONS = (SchedulerType.CONSTANT, SchedulerType.CONSTANT_WITH_WARMUP)
_METHODS = multiprocessing.get_all_start_methods()
# What TrainingArguments sets itself when it is made, so that a value of the user's cannot be told.
_REWRITTEN = {"accelerator_config", "do_eval", "fsdp_config", "local_rank"}


def require_exact(args: TrainingArguments) -> None:
    """Raise `ConfigError` for the first argument that would be ignored or make numbers inexact (see `FIXED`)."""
    for name, (allowed, reason) in FIXED.items():
        value = getattr(args, name, allowed)
        if name not in _REWRITTEN and value != allowed and (value or allowed):
            raise ConfigError(f"training.{name}: cannot be {value!r} (only {allowed!r}): {reason}")
    if args.mixed_precision != "no":  # what `accelerate launch --mixed_precision` leaves in the environment
        raise ConfigError(
            f"mixed_precision {args.mixed_precision}: the compute dtype is the policy's (model.dtype); launch with "
            "--mixed_precision no"
        )


def without_effect(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> str | None:
    """The first value that differs from its default but has no effect beside the others, with the cure; or None."""
    for name, (other, wanted, cure) in COMPANIONS.items():
        if values[name] != defaults[name] and values[other] not in wanted:
            return f"training.{name}: has no effect without training.{cure}; set it, or leave {name} out"
    if values["optim_target_modules"] and not str(values["optim"]).startswith(("galore", "apollo")):
        return f"training.optim_target_modules: has no effect with optim {values['optim']}; it is galore's and apollo's"
    if values["optim_args"] and (unknown := _unknown_option(str(values["optim"]), values["optim_args"])):
        return f"training.optim_args: {unknown} has no effect with optim {values['optim']}; leave it out"
    if values["save_strategy"] == "best" and values["metric_for_best_model"] is None:
        return "training.save_strategy: best needs training.metric_for_best_model"
    if values["greater_is_better"] is not None and values["metric_for_best_model"] is None:
        return "training.greater_is_better: has no effect without training.metric_for_best_model"
    method = values["dataloader_multiprocessing_context"]
    if method not in (None, *_METHODS):
        return f"training.dataloader_multiprocessing_context: must be one of {', '.join(_METHODS)}, got {method!r}"
    for name in ("dataloader_persistent_workers", "dataloader_multiprocessing_context", "dataloader_prefetch_factor"):
        if values[name] and not values["dataloader_num_workers"]:
            return f"training.{name}: has no effect without training.dataloader_num_workers > 0"
    return None


def require_usable(args: TrainingArguments) -> None:
    """Raise `ConfigError` for a tracker, optimizer or schedule that cannot be used, before anything is loaded."""
    installed = get_available_reporting_integrations()
    for name in args.report_to or []:
        if name not in INTEGRATION_TO_CALLBACK:
            known = sorted(INTEGRATION_TO_CALLBACK)
            raise ConfigError(
                f"training.report_to: {name!r} is not a tracker{nearest(name, known)} (there are: {', '.join(known)})"
            )
        if name not in installed:
            raise ConfigError(f"training.report_to: {name} is not installed; pip install {name}, or leave it out")
    _try_schedule(args)


def _unknown_option(optimizer: str, given: str) -> str | None:
    """The first of `key=value, ...` that an optimizer of torch's own does not take; others check theirs themselves."""
    if optimizer.startswith("adamw_torch") and "4bit" not in optimizer and "8bit" not in optimizer:
        return given
    kinds = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "rmsprop": torch.optim.RMSprop}
    if optimizer not in kinds:
        return None
    known = inspect.signature(kinds[optimizer]).parameters
    keys = [pair.partition("=")[0].strip() for pair in given.split(",")]
    return next((key for key in keys if key not in known), None)


def _try_schedule(args: TrainingArguments) -> None:
    weight = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    given = args.lr_scheduler_kwargs or {}
    if args.lr_scheduler_type in _WITHOUT_OPTIONS and given:
        raise ConfigError(f"training.lr_scheduler_kwargs: {args.lr_scheduler_type.value} takes none; leave it out")
    try:
        get_scheduler(
            args.lr_scheduler_type,
            weight,
            num_warmup_steps=1,
            num_training_steps=10,
            scheduler_specific_kwargs=dict(given) if isinstance(given, dict) else given,
        )
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        kind = getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)
        raise ConfigError(f"training.lr_scheduler_type: {kind} with lr_scheduler_kwargs {given}: {error}") from error
