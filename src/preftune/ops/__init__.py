"""Tensors in, tensors out: the one heavy operation and the reductions around it. Knows torch only."""

from preftune.ops.head import Head
from preftune.ops.module import TokenLogProbs
from preftune.ops.segments import sum_by_segment
from preftune.ops.token_kl import token_kl
from preftune.ops.token_logps import HeadOptions, TokenExtras, naive_token_logps, token_logps

__all__ = [
    "Head",
    "HeadOptions",
    "TokenExtras",
    "TokenLogProbs",
    "naive_token_logps",
    "sum_by_segment",
    "token_kl",
    "token_logps",
]
