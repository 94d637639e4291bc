"""The kinds of reference that answer with a model. Each scores a batch with the same code and dtype as the policy.

In eval mode, and with the same shapes, too: before the first update every log-ratio is exactly 0, and a difference
from 0 later is learning, not arithmetic. What is kept of their answers is in `cached.py`.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import nn

from preftune.data import PreferenceDataset
from preftune.errors import ModelError
from preftune.models.adapters import (
    REFERENCE_ADAPTER,
    active_adapter,
    adapter_state,
    copy_as_reference,
    evaluating,
    is_adapted,
    outside_adapter,
    starts_at_base,
)
from preftune.models.head import causal_lm
from preftune.models.policy import Policy
from preftune.types import Batch, PerCompletion, TokenLogps


class Reference(ABC):
    """A frozen distribution. `kind` is its name in configs."""

    kind: str
    # The model it holds of its own; None where it lives in the policy's.
    owned: nn.Module | None = None

    @abstractmethod
    def active(self, model: nn.Module | None = None) -> AbstractContextManager[tuple[Policy, nn.Module | None]]:
        """A context, without gradients and in eval mode, in which the policy it yields answers as the reference.

        Args:
            model: the policy's model inside its wrapper; yielded again where the reference lives in that model, else
                None takes its place.
        """

    @abstractmethod
    def describe(self) -> str:
        """What the reference is, in words, for summaries and for comparing runs."""

    def sequence_logps(self, batch: Batch, model: nn.Module | None = None) -> PerCompletion | None:
        """Log-probability of each completion, `[N]` nats without gradient; None for no reference.

        Args:
            batch: on the model's device.
            model: the policy's model inside its wrapper, for references that live in it.
        """
        with self.active(model) as (policy, wrapped):
            return policy.sequence_logps(batch, wrapped)

    def token_logps(self, batch: Batch, model: nn.Module | None = None) -> TokenLogps:
        """Log-probability of each scored token, `[T]` nats without gradient; arguments as of `sequence_logps`."""
        with self.active(model) as (policy, wrapped):
            return policy.token_logps(batch, wrapped)

    def scored_by(self) -> tuple[Policy, str | None]:
        """The policy that answers, and the adapter that is on while it does: what stored values depend on."""
        raise ModelError(f"reference.kind: {self.kind} has no model whose values could be kept")

    def prepare(  # noqa: B027 - a live reference needs no preparation
        self, datasets: Iterable[PreferenceDataset], device: torch.device, quiet: bool = False
    ) -> None:
        """Know what training on the data sets will ask for, before the first step. On several ranks a collective call.

        Args:
            datasets: every set whose rows will be asked for.
            device: where the models are.
            quiet: show no progress.
        """

    def to(self, device: torch.device) -> None:  # noqa: B027 - most references own nothing
        """Move what the reference owns to `device`; those that live in the policy's model move with it."""


class NoReference(Reference):
    """For losses that use none."""

    kind = "none"

    def active(self, model: nn.Module | None = None) -> AbstractContextManager[tuple[Policy, nn.Module | None]]:
        raise ModelError("this run has no reference, so nothing can be scored by it; set reference.kind")

    def sequence_logps(self, batch: Batch, model: nn.Module | None = None) -> PerCompletion | None:
        return None

    def describe(self) -> str:
        return "none"


class AdapterOff(Reference):
    """The policy's own model with the adapter switched off: the base model, at no extra memory.

    Raises `ModelError` where the policy trains anything that switching the adapter off does not undo.
    """

    kind = "adapter_off"

    def __init__(self, policy: Policy) -> None:
        if not is_adapted(policy.model):
            raise ModelError("reference.kind: adapter_off needs model.adapter; for full fine-tuning use frozen")
        outside = outside_adapter(policy.model)
        if outside:
            raise ModelError(
                f"reference.kind: adapter_off would share {len(outside)} trained weights with the policy, such as "
                f"{outside[0]}: switching the adapter off does not undo them; use reference.kind: frozen, or freeze "
                "them (adapter bias: none)"
            )
        self.policy = policy

    @contextmanager
    def active(self, model: nn.Module | None = None) -> Iterator[tuple[Policy, nn.Module | None]]:
        called = self.policy.model if model is None else model
        with adapter_state(self.policy.model, None), evaluating(called):
            yield self.policy, model

    def scored_by(self) -> tuple[Policy, str | None]:
        return self.policy, None

    def describe(self) -> str:
        return f"the base model {self.policy.name} (adapter switched off)"


class AdapterStart(Reference):
    """The base model with a frozen copy of the adapter as it was at the start, beside the one that is trained."""

    kind = "adapter_start"

    def __init__(self, policy: Policy) -> None:
        if not is_adapted(policy.model):
            raise ModelError("reference.kind: adapter_start needs model.adapter; for full fine-tuning use frozen")
        outside = outside_adapter(policy.model)
        if outside:
            raise ModelError(f"the reference would share trained weights with the policy, such as {outside[0]}")
        self.policy = policy
        self.adapter = active_adapter(policy.model)
        copy_as_reference(policy.model)

    @contextmanager
    def active(self, model: nn.Module | None = None) -> Iterator[tuple[Policy, nn.Module | None]]:
        called = self.policy.model if model is None else model
        with adapter_state(self.policy.model, REFERENCE_ADAPTER), evaluating(called):
            yield self.policy, model

    def scored_by(self) -> tuple[Policy, str | None]:
        return self.policy, REFERENCE_ADAPTER

    def describe(self) -> str:
        return f"the base model {self.policy.name} with the adapter as it was at the start"


class StartingPolicy(Reference):
    """The policy's own model as it is before its first step: for values that are computed now and kept.

    No second model and no second adapter is held. `close` ends its time: called once training may begin, after which
    it answers no more.
    """

    kind = "start"

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.closed = False

    def close(self) -> None:
        """From now on the model may move."""
        self.closed = True

    @contextmanager
    def active(self, model: nn.Module | None = None) -> Iterator[tuple[Policy, nn.Module | None]]:
        if self.closed:
            raise ModelError("the policy as it was at the start is no more: training has begun")
        with evaluating(self.policy.model if model is None else model):
            yield self.policy, model

    def scored_by(self) -> tuple[Policy, str | None]:
        return self.policy, active_adapter(self.policy.model) if is_adapted(self.policy.model) else None

    def describe(self) -> str:
        return f"{self.policy.name} as it was at the start"


class FrozenReference(Reference):
    """A second model, frozen: a copy of the starting policy, or another one.

    Raises `ModelError` where it shares trainable weights with the policy or speaks another vocabulary.
    """

    kind = "frozen"

    def __init__(self, policy: Policy, reference: Policy, words: str | None = None) -> None:
        trained = {p.data_ptr(): name for name, p in policy.model.named_parameters() if p.requires_grad}
        shared = [trained[p.data_ptr()] for p in reference.model.parameters() if p.data_ptr() in trained]
        if reference.model is policy.model or shared:
            raise ModelError(
                "the reference shares trainable weights with the policy"
                + (f", such as {shared[0]}" if shared else "")
                + ": it would move with it and every margin would stay 0; give it weights of its own (frozen_copy)"
            )
        _same_language(policy, reference)
        reference.model.requires_grad_(False)
        reference.model.eval()
        self.policy = reference
        self.owned = reference.model
        self.words = words

    @contextmanager
    def active(self, model: nn.Module | None = None) -> Iterator[tuple[Policy, nn.Module | None]]:
        with evaluating(self.policy.model):
            yield self.policy, None

    def scored_by(self) -> tuple[Policy, str | None]:
        return self.policy, active_adapter(self.policy.model) if is_adapted(self.policy.model) else None

    def to(self, device: torch.device) -> None:
        self.policy.model.to(device)

    def describe(self) -> str:
        return self.words or f"a frozen model, {self.policy.name}"


def frozen_copy(policy: Policy) -> FrozenReference:
    """A copy of the policy as it is now, in memory of its own."""
    twin = Policy(copy.deepcopy(policy.model), policy.tokenizer, policy.dtype)
    return FrozenReference(policy, twin, f"a frozen copy of {policy.name} as it was at the start")


def default_reference(policy: Policy) -> Reference:
    """The live reference that makes every margin 0 at the start.

    With a fresh adapter it is the base model (adapter off); with an adapter trained before, a frozen copy of that
    adapter; for full fine-tuning a frozen copy of the model. `CachedReference(starting_reference(policy))` computes
    the same values once and holds no copy.
    """
    if not is_adapted(policy.model) or outside_adapter(policy.model):
        return frozen_copy(policy)
    return AdapterOff(policy) if starts_at_base(policy.model) else AdapterStart(policy)


def starting_reference(policy: Policy) -> Reference:
    """What a cached reference makes its values with, for margins that are 0 at the start, and without any copy.

    With a fresh adapter the base model (adapter off), so that every run on that base shares them; else the policy as it
    is before its first step.
    """
    fresh = is_adapted(policy.model) and not outside_adapter(policy.model) and starts_at_base(policy.model)
    return AdapterOff(policy) if fresh else StartingPolicy(policy)


def _same_language(policy: Policy, reference: Policy) -> None:
    own, other = (causal_lm(p.model).config.vocab_size for p in (policy, reference))
    if own != other:
        raise ModelError(
            f"reference.model: its vocabulary has {other} tokens, the policy's {own}; token ids would not match"
        )
    if policy.tokenizer is not None and reference.tokenizer is not None and reference.tokenizer is not policy.tokenizer:
        words, other_words = policy.tokenizer.get_vocab(), reference.tokenizer.get_vocab()
        if words != other_words:
            token = next(iter(words.items() ^ other_words.items()))[0]
            raise ModelError(f"reference.model: another tokenizer than the policy's (they differ in {token!r})")
