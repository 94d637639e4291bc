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
from collections.abc import Mapping
from functools import cache
from typing import Any

import pydantic
from pydantic import BaseModel, ConfigDict, Field
from transformers import TrainingArguments
from transformers.trainer_utils import HubStrategy, IntervalStrategy, SaveStrategy, SchedulerType
from transformers.training_args import OptimizerNames, trainer_log_levels

from preftune.errors import ConfigError, nearest
from preftune.train.arguments import FIXED, require_usable, without_effect

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

_CHECKPOINTING = ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs")

_ALLOWED: dict[str, list[str]] = {
    "eval_strategy": [kind.value for kind in IntervalStrategy],
    "logging_strategy": [kind.value for kind in IntervalStrategy],
    "save_strategy": [kind.value for kind in SaveStrategy],
    "hub_strategy": [kind.value for kind in HubStrategy],
    "lr_scheduler_type": [kind.value for kind in SchedulerType],
    "optim": [kind.value for kind in OptimizerNames],
    "log_level": list(trainer_log_levels),
    "log_level_replica": list(trainer_log_levels),
}

_BOUNDS: dict[str, dict[str, float]] = {
    "learning_rate": {"ge": 0},
    "num_train_epochs": {"gt": 0},
    "per_device_train_batch_size": {"gt": 0},
    "per_device_eval_batch_size": {"gt": 0},
    "gradient_accumulation_steps": {"gt": 0},
    "max_grad_norm": {"ge": 0},
    "weight_decay": {"ge": 0},
    "adam_beta1": {"ge": 0, "lt": 1},
    "adam_beta2": {"ge": 0, "lt": 1},
    "adam_epsilon": {"ge": 0},
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
    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True, allow_inf_nan=False)

    @pydantic.field_validator("*", mode="before")
    @classmethod
    def _fixed(cls, value: Any, info: pydantic.ValidationInfo) -> Any:
        if info.field_name in FIXED and value != FIXED[info.field_name][0]:
            allowed, reason = FIXED[info.field_name]
            raise ValueError(f"cannot be {value!r} (only {allowed!r}): {reason}")
        return value

    @pydantic.field_validator("report_to", mode="before", check_fields=False)
    @classmethod
    def _no_tracker(cls, value: Any) -> Any:
        return "none" if value is None else value

    @pydantic.field_validator(*_CHECKPOINTING, mode="after", check_fields=False)
    @classmethod
    def _known_option(cls, value: Any) -> Any:
        known = ("use_reentrant", "preserve_rng_state", "determinism_check", "early_stop", "debug")
        for name in value or {}:
            if name not in known:
                raise ValueError(f"unknown option {name!r}{nearest(str(name), known)} (allowed: {', '.join(known)})")
        return value

    @pydantic.field_validator("max_steps", mode="after", check_fields=False)
    @classmethod
    def _some_steps(cls, value: int) -> int:
        if value == 0 or value < -1:
            raise ValueError(f"must be > 0, or -1 to go by num_train_epochs, got {value}")
        return value

    @pydantic.field_validator(*_ALLOWED, mode="before", check_fields=False)
    @classmethod
    def _known_value(cls, value: Any, info: pydantic.ValidationInfo) -> Any:
        assert info.field_name is not None
        value = value.value if isinstance(value, enum.Enum) else value
        allowed = _ALLOWED[info.field_name]
        if value is False and "no" in allowed:  # what YAML makes of an unquoted no
            return "no"
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
    if (problem := ineffective(values)) is not None:
        raise ConfigError(problem)
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
    require_usable(args)
    if args.n_gpu > 1:
        args._n_gpu = 1  # see `PreferenceTrainer`: one process, one device
    return args


def ineffective(values: Mapping[str, Any]) -> str | None:
    """The first of the fields' values that would have no effect beside the others, with the cure; or None."""
    return without_effect(values, {name: field.default for name, field in training_model().model_fields.items()})


def _default(f: dataclasses.Field[Any]) -> Any:
    if f.default is not dataclasses.MISSING:
        return f.default.value if isinstance(f.default, enum.Enum) else f.default
    assert f.default_factory is not dataclasses.MISSING
    return f.default_factory()


def _annotation(name: str, hint: Any) -> Any:
    if name in _ALLOWED:
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
