"""Policy + reference + loss: from a batch to a loss sum and its metrics. Knows no trainer.

    objective = Objective(policy, reference, loss)
    output = objective(batch)
    (output.total / batch.counts()[loss.spec.denominator]).backward()

is all a training loop needs; see `docs/loop.md`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from preftune.errors import ConfigError
from preftune.losses import Loss
from preftune.models import Policy
from preftune.models.adapters import evaluating
from preftune.models.policy import trainable_parameters
from preftune.reference import NoReference, Reference
from preftune.train.metrics import SumAndCount, masked
from preftune.types import Batch, PerExample, SequenceLogps


@dataclass
class ObjectiveOutput:
    """What one batch contributes.

    `total` is the sum of the loss over the batch's real examples, to be divided by the count that the loss declares,
    taken over the whole step; `count` is this batch's share of it. `values` are the losses per example, detached,
    fillers included.
    """

    total: Tensor
    count: Tensor
    values: PerExample
    metrics: dict[str, SumAndCount]


class Objective:
    """What is minimised. Call it with a batch on the policy's device.

    Raises `ConfigError` where the loss needs a reference and gets none, and `ModelError` (from its parts) where the
    reference would move with the policy.
    """

    def __init__(self, policy: Policy, reference: Reference, loss: Loss) -> None:
        if loss.spec.needs_reference and isinstance(reference, NoReference):
            raise ConfigError(f"reference.kind: {loss.name} needs a reference; choose adapter_off or frozen")
        if not trainable_parameters(policy.model):
            raise ConfigError("nothing to train: the model has no parameter with requires_grad; add an adapter")
        self.policy, self.reference, self.loss = policy, reference, loss

    def __call__(self, batch: Batch, model: nn.Module | None = None, z_ref: Tensor | None = None) -> ObjectiveOutput:
        """Score a batch.

        Args:
            batch: examples of the layout that the loss takes.
            model: the policy's model inside its wrapper (DDP, FSDP, compiled), where there is one.
            z_ref: KTO's baseline for the whole step (see `z_ref`); None takes it from this batch alone.
        """
        if self.loss.spec.needs_kl_baseline and z_ref is None:
            z_ref = self.z_ref([batch], model)
        ref = self.reference.sequence_logps(batch, model)
        policy = self.policy.sequence_logps(batch, model)
        groups = self._groups(batch, policy, ref)
        if batch.labels is None:
            values = self.loss(*groups)
        else:
            arguments = [groups[0], batch.labels, *([z_ref] if self.loss.spec.needs_kl_baseline else [])]
            values = self.loss(*arguments)
        total = torch.where(batch.real, values, torch.zeros_like(values)).sum()
        with torch.no_grad():
            metrics = self._metrics(batch, groups, z_ref)
        return ObjectiveOutput(total, self._count(batch), values.detach(), metrics)

    def kl_terms(self, batch: Batch, model: nn.Module | None = None) -> SumAndCount:
        """Sum and number of `log pi - log pi_ref` over the batch's mismatched pairs, without gradient, in eval mode."""
        # Rows with nothing to borrow still go through the model, at no weight: ranks meet at every forward of a
        # wrapper, and one that made fewer of them would leave the others waiting for ever.
        pairs = batch.mismatched or replace(batch, real=torch.zeros_like(batch.real))
        called = self.policy.model if model is None else model
        with evaluating(called):
            policy = self.policy.sequence_logps(pairs, model)
            ref = self.reference.sequence_logps(pairs, model)
        assert ref is not None
        return masked(policy - ref, pairs.real)

    def z_ref(self, batches: Iterable[Batch], model: nn.Module | None = None) -> Tensor:
        """KTO's baseline `max(0, mean over mismatched pairs of log pi - log pi_ref)` over the batches of a step.

        Ethayarajh et al. 2024, arXiv 2402.01306, section 4.2: z_0 estimated from mismatched outputs, clamped at 0, and
        taking no gradient. The clamp is applied once, to the mean over the whole step.
        """
        terms = [self.kl_terms(batch, model) for batch in batches]
        total, count = (torch.stack(column).sum() for column in zip(*terms, strict=True))
        return (total / count.clamp(min=1)).clamp(min=0)

    def describe(self) -> dict[str, Any]:
        """What the run optimises, as plain data: compared on resume, shown in summaries."""
        return {"loss": self.loss.describe(), "reference": self.reference.describe(), "model": self.policy.name}

    def _count(self, batch: Batch) -> Tensor:
        if self.loss.spec.denominator == "examples":
            return batch.real.sum()
        return (batch.lengths * batch.real.repeat_interleave(batch.per_example)).sum()

    def _groups(self, batch: Batch, policy: Tensor, ref: Tensor | None) -> list[SequenceLogps]:
        """One group per completion of an example: chosen and rejected, or the single one."""
        k = batch.per_example
        return [SequenceLogps(policy[i::k], None if ref is None else ref[i::k], batch.lengths[i::k]) for i in range(k)]

    def _metrics(self, batch: Batch, groups: list[SequenceLogps], z_ref: Tensor | None) -> dict[str, SumAndCount]:
        """Names as in the documentation's table; rewards are `beta * logratios`."""
        if batch.labels is None:
            sides = [("chosen", groups[0], batch.real), ("rejected", groups[1], batch.real)]
        else:
            sides = [
                ("chosen", groups[0], batch.real & batch.labels),
                ("rejected", groups[0], batch.real & ~batch.labels),
            ]
        metrics = {f"logps/{side}": masked(group.policy, mask) for side, group, mask in sides}
        if groups[0].ref is None:
            return metrics
        beta = self.loss.beta
        metrics |= {f"rewards/{side}": masked(beta * group.logratios, mask) for side, group, mask in sides}
        if batch.labels is None:
            margins = beta * (groups[0].logratios - groups[1].logratios)
            metrics["rewards/margins"] = masked(margins, batch.real)
            metrics["kl"] = masked((groups[0].logratios + groups[1].logratios) / 2, batch.real)
        else:
            baseline = 0.0 if z_ref is None else z_ref
            margins = torch.where(batch.labels, 1, -1) * (groups[0].logratios - baseline)
        metrics["rewards/accuracies"] = masked((margins.sign() + 1) / 2, batch.real)  # a tie counts half
        return metrics
