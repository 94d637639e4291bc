"""Reductions from tokens to completions."""

from __future__ import annotations

import torch

from preftune.types import Lengths, PerCompletion, TokenLogps


def sum_by_segment(values: TokenLogps, lengths: Lengths) -> PerCompletion:
    """Sum `values [T]` over consecutive completions of `lengths [N]` tokens, T = sum of lengths.

    Returns `[N]` in the dtype of `values` (float32 or wider); an empty completion sums to 0. The order of summation is
    fixed, so equal inputs give equal sums to the last bit on every device (a scatter-add on CUDA does not promise it).
    """
    # `unsafe` skips the check that lengths add up to T, which would read them back from the device; the collator
    # that made both guarantees it.
    return torch.segment_reduce(values, "sum", lengths=lengths, unsafe=True)
