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
    CachedReference,
    FrozenReference,
    NoReference,
    Reference,
    StartingPolicy,
    frozen_copy,
    starting_reference,
)
from preftune.reference.weights import Loaded
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
    name = resolve(model.name)
    loaded = Loaded.begin(name, model.revision, dtype=_stored(config), load_in_4bit=model.load_in_4bit)
    policy = load_policy(
        name,
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
    loss = config.loss.make()
    cached = config.reference.kind in ("auto", "cached") and loss.spec.needs_reference
    return Objective(policy, _cached(config, policy, loaded) if cached else _live(config, policy), loss)


def _head_options(config: RunConfig) -> HeadOptions:
    head = config.model.head
    return HeadOptions(head.backend, head.strategy, head.chunk, head.budget_mib * 2**20)


def _stored(config: RunConfig) -> str:
    """In what the base's weights are held: it decides on their bytes."""
    adapter = config.model.adapter
    return f"{config.model.dtype} {config.model.trainable_dtype} {None if adapter is None else adapter.bias}"


def _cached(config: RunConfig, policy: Policy, loaded: Loaded | None) -> CachedReference:
    """The reference as data; `loaded` says where the policy's base came from."""
    wanted = config.reference
    source: Reference
    if wanted.model is not None:
        source, loaded = _other_model(config, policy)
    elif wanted.of == "adapter_off":
        source = AdapterOff(policy)
    elif wanted.of == "auto" and isinstance(usual := starting_reference(policy), AdapterOff):
        source = usual
    else:
        source = StartingPolicy(policy)
    return CachedReference(
        source,
        cache_dir=wanted.cache_dir,
        per_token=wanted.per_token,
        verify_rows=wanted.verify_rows,
        loaded=loaded,
        rehash=wanted.rehash,
    )


def _live(config: RunConfig, policy: Policy) -> Reference:
    wanted = config.reference
    if wanted.kind in ("none", "auto"):
        return NoReference()
    if wanted.kind == "adapter_off":
        return AdapterOff(policy)
    if wanted.kind == "adapter_start":
        return AdapterStart(policy)
    if wanted.model is None:
        return frozen_copy(policy)
    return _other_model(config, policy)[0]


def _other_model(config: RunConfig, policy: Policy) -> tuple[FrozenReference, Loaded | None]:
    """The model that `reference.model` names, frozen, and where it was loaded from."""
    wanted = config.reference
    assert wanted.model is not None
    name = resolve(wanted.model)
    # Stored as the policy's weights are, so that both go through the same arithmetic.
    dtype = next(p for p in policy.model.parameters()).dtype
    trust = config.model.trust_remote_code
    if wanted.load_in_4bit:
        dtype = DTYPES[config.model.dtype]
    loaded = Loaded.begin(name, wanted.revision, dtype=str(dtype), load_in_4bit=wanted.load_in_4bit)
    model = load_model(
        name,
        dtype=dtype,
        revision=wanted.revision,
        load_in_4bit=wanted.load_in_4bit,
        attn_implementation=config.model.attn_implementation,
        trust_remote_code=trust,
        key="reference.model",
    )
    model.requires_grad_(False)
    tokenizer = load_tokenizer(name, wanted.revision, trust_remote_code=trust, key="reference.model")
    reference = Policy(model, tokenizer, DTYPES[config.model.dtype], name=wanted.model, head=_head_options(config))
    revision = f" at {wanted.revision}" if wanted.revision else ""
    return FrozenReference(policy, reference, f"the frozen model {wanted.model}{revision}"), loaded
