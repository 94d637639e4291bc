"""Losses over pairs: a chosen and a rejected completion of one prompt."""

from __future__ import annotations

from torch.nn.functional import logsigmoid

from preftune.losses.registry import Beta, Smoothing, register
from preftune.types import PerExample, SequenceLogps


@register("dpo", layout="paired")
def dpo(
    chosen: SequenceLogps, rejected: SequenceLogps, *, beta: Beta = 0.1, label_smoothing: Smoothing = 0.0
) -> PerExample:
    r"""Direct preference optimisation, with optional label smoothing (conservative DPO).

    With the log-ratios r_w, r_l of chosen and rejected, D = r_w - r_l and e the smoothing,

        loss = -(1 - e) log sigmoid(beta D) - e log sigmoid(-beta D)

    Rafailov et al. 2023, arXiv 2305.18290, equation 7 (e = 0); Mitchell 2023, "A note on DPO with noisy preferences &
    relationship to IPO", the conservative DPO loss (e > 0). At the start D = 0 and the loss is ln 2. The gradient
    raises r_w and lowers r_l by the same weight beta * sigmoid(-beta D): large where the pair is ranked wrong,
    vanishing where it is ranked clearly right. With smoothing it changes sign at sigmoid(beta D) = 1 - e, so margins
    stay bounded when labels are noisy.

    Args:
        chosen: log-probabilities of the better completions, `[B]`.
        rejected: log-probabilities of the worse completions, `[B]`.
        beta: strength of the pull to the reference, > 0 (the paper: 0.1 to 0.5).
        label_smoothing: probability e that a label is flipped, 0 <= e < 0.5.

    Returns:
        One value per pair, `[B]` nats, >= 0.
    """
    logits = beta * (chosen.logratios - rejected.logratios)
    return -(1 - label_smoothing) * logsigmoid(logits) - label_smoothing * logsigmoid(-logits)
