"""`training:` takes the fields of `transformers.TrainingArguments` by their own names. This module is the policy.

A field is passed on, unless it is in one of the tables below: fixed at the only value under which numbers stay exact
or the field is not ignored (any other value is refused, with the reason and the cure), or used by preftune itself.
A test walks over every field of the installed version, so a new one cannot slip by unclassified.
"""

from __future__ import annotations

import dataclasses
import enum
import types
import typing
from functools import cache
from typing import Any

import pydantic
from pydantic import BaseModel, ConfigDict, Field
from transformers import TrainingArguments
from transformers.integrations import get_available_reporting_integrations
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from transformers.trainer_utils import HubStrategy, IntervalStrategy, SaveStrategy, SchedulerType
from transformers.training_args import OptimizerNames

from preftune.errors import ConfigError, nearest

# name: (the only value accepted, why, what to do instead)
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

# Taken by preftune before they reach TrainingArguments.
USED = {
    "output_dir": "set output_dir at the top level",
    "resume_from_checkpoint": "a checkpoint folder, or true for the last one in output_dir",
    "gradient_checkpointing": "the old name of activation_checkpointing",
    "gradient_checkpointing_kwargs": "the old name of activation_checkpointing_kwargs",
}

# Our defaults where they differ from transformers'.
DEFAULTS: dict[str, Any] = {
    "learning_rate": 5e-6,
    "num_train_epochs": 1.0,
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 4,
    "warmup_steps": 0.1,
    "logging_steps": 10,
    "logging_first_step": True,
    "save_strategy": "epoch",
    "save_total_limit": 2,
    "report_to": "none",
    "ddp_find_unused_parameters": False,
}

_ENUMS: dict[str, type[enum.Enum]] = {
    "eval_strategy": IntervalStrategy,
    "logging_strategy": IntervalStrategy,
    "save_strategy": SaveStrategy,
    "hub_strategy": HubStrategy,
    "lr_scheduler_type": SchedulerType,
    "optim": OptimizerNames,
}

_BOUNDS: dict[str, dict[str, float]] = {
    "learning_rate": {"ge": 0},
    "num_train_epochs": {"gt": 0},
    "per_device_train_batch_size": {"gt": 0},
    "per_device_eval_batch_size": {"gt": 0},
    "gradient_accumulation_steps": {"gt": 0},
    "max_grad_norm": {"ge": 0},
    "weight_decay": {"ge": 0},
    "warmup_steps": {"ge": 0},
    "logging_steps": {"gt": 0},
    "save_steps": {"gt": 0},
    "eval_steps": {"gt": 0},
    "seed": {"ge": 0, "lt": 2**32},
    "data_seed": {"ge": 0, "lt": 2**32},
    "save_total_limit": {"gt": 0},
    "dataloader_num_workers": {"ge": 0},
}


class _TrainingBase(BaseModel):
    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    @pydantic.field_validator("*", mode="before")
    @classmethod
    def _fixed(cls, value: Any, info: pydantic.ValidationInfo) -> Any:
        if info.field_name in FIXED and value != FIXED[info.field_name][0]:
            allowed, reason = FIXED[info.field_name]
            raise ValueError(f"cannot be {value!r} (only {allowed!r}): {reason}")
        return value

    @pydantic.field_validator(*_ENUMS, mode="after", check_fields=False)
    @classmethod
    def _known_value(cls, value: Any, info: pydantic.ValidationInfo) -> Any:
        assert info.field_name is not None
        value = value.value if isinstance(value, enum.Enum) else value
        allowed = [str(member.value) for member in _ENUMS[info.field_name]]
        if value not in allowed:
            raise ValueError(f"unknown value {value!r}{nearest(str(value), allowed)} (allowed: {', '.join(allowed)})")
        return value


@cache
def training_model() -> type[BaseModel]:
    """The pydantic model of `training:`, made from the fields of the installed TrainingArguments."""
    hints = typing.get_type_hints(TrainingArguments)
    fields: dict[str, Any] = {}
    for f in dataclasses.fields(TrainingArguments):
        if f.name == "output_dir":
            continue
        default = DEFAULTS.get(f.name, FIXED[f.name][0] if f.name in FIXED else _default(f))
        annotation = _annotation(f.name, hints[f.name])
        bounds: dict[str, Any] = _BOUNDS.get(f.name, {})
        fields[f.name] = (annotation, Field(default, description=_help(f), **bounds))
    return pydantic.create_model("TrainingConfig", __base__=_TrainingBase, **fields)


def training_arguments(output_dir: str, **fields: Any) -> TrainingArguments:
    """Return `transformers.TrainingArguments` with preftune's defaults, checked.

    Args:
        output_dir: where checkpoints, metrics and the result go.
        fields: any field of TrainingArguments by its own name. Raises `ConfigError` for an unknown name, a wrong
            value, or one that would be ignored or make numbers inexact.
    """
    from preftune.config.read import explain

    try:
        checked = training_model()(**fields)
    except pydantic.ValidationError as error:
        raise ConfigError(explain(error, training_model(), "training")) from None
    values = checked.model_dump()
    for old in ("gradient_checkpointing", "gradient_checkpointing_kwargs"):
        new = old.replace("gradient", "activation")
        given = values.pop(old, None)
        if given is not None and values.get(new) is None:
            values[new] = given
    values.pop("resume_from_checkpoint", None)
    values.pop("local_rank", None)
    try:
        args = TrainingArguments(output_dir=output_dir, **values)
    except (ValueError, ImportError) as error:
        raise ConfigError(f"training: {str(error).lstrip('- ')}") from None
    _require_trackers(args)
    if args.n_gpu > 1:
        args._n_gpu = 1  # see `PreferenceTrainer`: one process, one device
    return args


def _require_trackers(args: TrainingArguments) -> None:
    installed = get_available_reporting_integrations()
    for name in args.report_to or []:
        if name not in INTEGRATION_TO_CALLBACK:
            known = sorted(INTEGRATION_TO_CALLBACK)
            raise ConfigError(
                f"training.report_to: {name!r} is not a tracker{nearest(name, known)} (there are: {', '.join(known)})"
            )
        if name not in installed:
            raise ConfigError(f"training.report_to: {name} is not installed; pip install {name}, or leave it out")


def _default(f: dataclasses.Field[Any]) -> Any:
    if f.default is not dataclasses.MISSING:
        return f.default.value if isinstance(f.default, enum.Enum) else f.default
    assert f.default_factory is not dataclasses.MISSING
    return f.default_factory()


def _annotation(name: str, hint: Any) -> Any:
    if name in _ENUMS:
        return str
    if name == "resume_from_checkpoint":
        return bool | str | None
    if name in FIXED:
        return Any
    arguments = typing.get_args(hint)
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    if union and any(isinstance(a, type) and issubclass(a, enum.Enum) for a in arguments):
        return str
    return hint


def _help(f: dataclasses.Field[Any]) -> str:
    text = " ".join(str(f.metadata.get("help", "")).split())
    if f.name in FIXED:
        return f"Only {FIXED[f.name][0]!r}: {FIXED[f.name][1]}."
    return text
