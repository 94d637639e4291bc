"""The exact Kullback-Leibler divergence of two next-token distributions, token by token."""

from __future__ import annotations

import torch

from preftune.ops.head import Head
from preftune.ops.pointwise import spans
from preftune.types import Hidden, TokenLogps


@torch.no_grad()
def token_kl(hidden: Hidden, head: Head, ref_hidden: Hidden, ref_head: Head, chunk: int = 128) -> TokenLogps:
    """`KL(pi(.|x_t) || pi_ref(.|x_t)) = sum_v pi(v) (log pi(v) - log pi_ref(v))` for each position, `[T]` nats.

    Exact over the whole vocabulary, computed `chunk` positions at a time. Not differentiable: for reporting.

    Args:
        hidden: `[T, H]` hidden states of the policy.
        head: the policy's head.
        ref_hidden: `[T, H']` hidden states of the reference at the same positions.
        ref_head: the reference's head, over the same vocabulary.
        chunk: positions per chunk, >= 1.
    """
    parts = []
    for part in spans(0, len(hidden), chunk):
        logp = head.logits(hidden[part]).log_softmax(-1)
        parts.append((logp.exp() * (logp - ref_head.logits(ref_hidden[part]).log_softmax(-1))).sum(-1))
    return torch.cat(parts) if parts else hidden.new_zeros(0, dtype=torch.promote_types(hidden.dtype, torch.float32))
