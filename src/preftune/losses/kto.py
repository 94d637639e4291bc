"""Losses over single judged completions (thumbs up or down)."""

from __future__ import annotations

import torch
from torch import Tensor

from preftune.losses.registry import Beta, NonNegative, register
from preftune.types import Labels, PerExample, SequenceLogps


@register("kto", layout="unpaired", needs_kl_baseline=True)
def kto(
    completions: SequenceLogps,
    labels: Labels,
    z_ref: Tensor,
    *,
    beta: Beta = 0.1,
    desirable_weight: NonNegative = 1.0,
    undesirable_weight: NonNegative = 1.0,
) -> PerExample:
    r"""Kahneman-Tversky optimisation: raise desirable completions above a KL baseline, push undesirable ones below it.

    With the log-ratio r and the baseline z_ref, an estimate of KL(policy || reference) that takes no gradient,

        loss = lambda_D (1 - sigmoid(beta (r - z_ref)))    for a desirable completion
        loss = lambda_U (1 - sigmoid(beta (z_ref - r)))    for an undesirable one

    Ethayarajh et al. 2024, arXiv 2402.01306, equation 8 (the value function v) with L = lambda_y - v. The gradient is
    lambda beta sigmoid' at the distance from the baseline: it saturates on both sides, so hopeless and settled
    examples are left alone. 1 - sigmoid(x) is computed as sigmoid(-x), which keeps small values exact.

    Args:
        completions: log-probabilities, `[B]`.
        labels: true for desirable, `[B]`.
        z_ref: scalar >= 0, nats, over the whole optimizer step (see `Objective`).
        beta: strength of the pull to the reference, > 0.
        desirable_weight: lambda_D >= 0.
        undesirable_weight: lambda_U >= 0. The paper advises lambda_D n_D / (lambda_U n_U) in [1, 4/3].

    Returns:
        One value per completion, `[B]`, between 0 and its weight.
    """
    distance = beta * (completions.logratios - z_ref)
    gain = desirable_weight * torch.sigmoid(-distance)
    harm = undesirable_weight * torch.sigmoid(distance)
    return torch.where(labels, gain, harm)
