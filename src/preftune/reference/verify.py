"""Compare stored values with what the reference says now."""

from __future__ import annotations

import numpy as np
import torch

from preftune.data.pack import collate_rows
from preftune.errors import CacheError
from preftune.ops import sum_by_segment
from preftune.reference.base import Reference
from preftune.reference.fill import Rows
from preftune.reference.store import LogpStore

# How far a stored value may be from one computed now: nats per token, and once per row. Other batch shapes and other
# machines round differently; other weights are further off.
TOLERANCE = {
    torch.float64: (1e-8, 1e-8),
    torch.float32: (1e-4, 1e-4),
    torch.bfloat16: (2e-2, 3e-1),
    torch.float16: (5e-3, 5e-2),
}


def compare(store: LogpStore, rows: Rows, source: Reference, namespace: str) -> float:
    """Compute stored rows again, one by one; returns the largest difference found, nats per token.

    Args:
        store: knows every row.
        rows: by key, at least one.
        source: computes the values anew.
        namespace: identity named in the error.

    Raises `CacheError` with both values where they differ by more than rounding explains (`TOLERANCE`).
    """
    policy, _ = source.scored_by()
    slope, floor = TOLERANCE[policy.dtype]
    batches = [collate_rows([row]).to(policy.device) for row in rows.values()]
    fresh = torch.cat([sum_by_segment(source.token_logps(b).double(), b.lengths) for b in batches]).cpu().numpy()
    found = store.find(list(rows))
    apart = np.abs(fresh - found.logps)
    wrong = ~(apart <= slope * found.tokens + floor)
    if wrong.any():
        at = int(apart.argmax())
        raise CacheError(
            f"{store.folder}: a stored reference value is not what the model says now: {found.logps[at]:.6f} stored, "
            f"{fresh[at]:.6f} computed, for {found.tokens[at]} tokens ({int(wrong.sum())} of {len(rows)} rows compared "
            "are wrong). If files of the model were changed in a way their times do not show, run once with "
            f"reference.rehash: true; else remove the values: preftune cache prune {namespace[:12]}"
        )
    return float((apart / found.tokens).max())
