"""From `model:`, `reference:` and `loss:` to an objective."""

from __future__ import annotations

from pathlib import Path

from preftune.assets import resolve
from preftune.config import RunConfig
from preftune.models import Lora, Policy, load_policy, load_tokenizer
from preftune.models.load import DTYPES, load_model
from preftune.ops import HeadOptions
from preftune.reference import (
    AdapterOff,
    AdapterStart,
    FrozenReference,
    NoReference,
    Reference,
    default_reference,
    frozen_copy,
)
from preftune.train import Objective


def make_objective(config: RunConfig) -> Objective:
    """Load the model and its reference, and put them together with the loss."""
    model = config.model
    adapter: Lora | str | None = None
    if model.adapter is not None:
        a = model.adapter
        targets = a.target_modules if isinstance(a.target_modules, str) else tuple(a.target_modules)
        new = Lora(a.r, a.alpha, a.dropout, targets, a.dora, tuple(a.modules_to_save), a.bias)
        adapter = new if a.path is None else str(Path(a.path).expanduser())
    policy = load_policy(
        resolve(model.name),
        dtype=model.dtype,
        adapter=adapter,
        revision=model.revision,
        chat_template=model.chat_template,
        load_in_4bit=model.load_in_4bit,
        trainable_dtype=model.trainable_dtype,
        attn_implementation=model.attn_implementation,
        dropout=model.dropout,
        trust_remote_code=model.trust_remote_code,
        head=_head_options(config),
    )
    policy.name = model.name
    return Objective(policy, _reference(config, policy), config.loss.make())


def _head_options(config: RunConfig) -> HeadOptions:
    head = config.model.head
    return HeadOptions(head.backend, head.strategy, head.chunk, head.budget_mib * 2**20)


def _reference(config: RunConfig, policy: Policy) -> Reference:
    wanted = config.reference
    if wanted.kind == "none":
        return NoReference()
    if wanted.kind == "adapter_off":
        return AdapterOff(policy)
    if wanted.kind == "adapter_start":
        return AdapterStart(policy)
    if wanted.kind == "auto":
        return default_reference(policy)
    if wanted.model is None:
        return frozen_copy(policy)
    name = resolve(wanted.model)
    # Stored as the policy's weights are, so that both go through the same arithmetic.
    dtype = next(p for p in policy.model.parameters()).dtype
    trust = config.model.trust_remote_code
    model = load_model(
        name,
        dtype=dtype,
        revision=wanted.revision,
        attn_implementation=config.model.attn_implementation,
        trust_remote_code=trust,
        key="reference.model",
    )
    model.requires_grad_(False)
    tokenizer = load_tokenizer(name, wanted.revision, trust_remote_code=trust, key="reference.model")
    reference = Policy(model, tokenizer, DTYPES[config.model.dtype], name=wanted.model, head=_head_options(config))
    revision = f" at {wanted.revision}" if wanted.revision else ""
    return FrozenReference(policy, reference, f"the frozen model {wanted.model}{revision}")
