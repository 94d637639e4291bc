"""The log-probability of each target token under a language-model head, without the `[T, V]` logits.

With z = cap * tanh(scale * (h W^T + b) / cap), the log-probability of target y is

    logp = z_y - logsumexp(z),        d logp / d z = onehot(y) - softmax(z).

Both are computed a chunk of tokens at a time, so the largest tensor is `[chunk, V]`. The gradient does not depend on
what is done with the log-probabilities except by a factor per token, so any loss can stand on top as plain autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from preftune.types import Hidden, Targets, TokenLogps

# Logits of one chunk in float32: large enough for full speed of the products, small enough to stay out of the way.
CHUNK_BYTES = 64 * 2**20
# A trained head's logits are kept from the forward to the backward when all of them fit this, in the product's dtype.
KEEP_BYTES = 256 * 2**20

Strategy = Literal["auto", "keep", "recompute"]


@dataclass(frozen=True)
class Head:
    """What turns a hidden state into logits: `softcap * tanh(scale * (h W^T + b) / softcap)`.

    `weight` is `[V, H]`, `bias` `[V]` or None; `scale` multiplies the logits (Cohere, Granite); `softcap` bounds them
    (Gemma 2), None for no cap. `module` replaces weight and bias where the head is more than a matrix (an adapter on
    the head, a quantized head): it maps `[T, H]` to `[T, V]` and is run chunk by chunk.
    """

    weight: Tensor | None = None
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None
    module: Callable[[Tensor], Tensor] | None = None

    def raw_logits(self, hidden: Tensor) -> Tensor:
        """`h W^T + b` in the dtype of the product."""
        if self.module is not None:
            return self.module(hidden)
        assert self.weight is not None
        dtype = _compute_dtype(hidden, self.weight)
        return hidden.to(dtype) @ self.weight.to(dtype).T

    def logits(self, hidden: Tensor) -> Tensor:
        """All logits `[T, V]` in float32 or wider. For oracles and chunks only."""
        bias = None if self.module is not None else self.bias
        return _finish(self.raw_logits(hidden), bias, self.scale, self.softcap)

    @property
    def vocabulary(self) -> int | None:
        """Number of rows of the weight; None where only the module knows."""
        return None if self.weight is None else self.weight.shape[0]


def token_logps(
    hidden: Hidden, head: Head, targets: Targets, chunk: int | None = None, strategy: Strategy = "auto"
) -> TokenLogps:
    """Log-probability of each target under the head, `[T]` nats, float32 (float64 when `hidden` is).

    Differentiable once, with any incoming gradient, in `hidden` and in the head's weight and bias (or its module's
    parameters). Without a gradient nothing of it is computed. Operations and memory beyond inputs and gradients:

    - *frozen head* (only `hidden` needs a gradient): the forward computes it with the values, since it depends on the
      incoming gradient only by a factor per token; 4THV, O(chunk * V).
    - *keep* (trained head whose logits fit `KEEP_BYTES` in the dtype of the product): they are kept and turned into
      gradients in place; 6THV, T * V. They serve one backward; a second one recomputes.
    - *recompute* (trained head, does not fit): the backward computes the logits again; 8THV, O(chunk * V).

    Args:
        hidden: `[T, H]`, the hidden state that predicts each target.
        head: the model's head.
        targets: `[T]` token ids in `[0, V)`.
        chunk: tokens per chunk, >= 1; by default as many as keep a chunk's float32 logits within 64 MiB.
        strategy: for a trained head: `keep`, `recompute`, or `auto` by size.
    """
    if head.module is not None:
        return _module_token_logps(hidden, head, targets, chunk or 256)
    assert head.weight is not None
    vocabulary = head.weight.shape[0]
    chunk = chunk or max(16, CHUNK_BYTES // (4 * vocabulary))
    dtype = _compute_dtype(hidden, head.weight)
    fits = len(targets) * vocabulary * dtype.itemsize <= KEEP_BYTES
    keep = strategy == "keep" or (strategy == "auto" and fits)
    with torch.autocast(hidden.device.type, enabled=False):
        out: Tensor = _TokenLogps.apply(
            hidden.to(dtype), head.weight, head.bias, targets, head.scale, head.softcap, chunk, keep
        )
        return out


def naive_token_logps(hidden: Hidden, head: Head, targets: Targets) -> TokenLogps:
    """The oracle: all logits at once and plain autograd. Same arguments and result as `token_logps`."""
    return head.logits(hidden).log_softmax(-1).gather(-1, targets[:, None])[:, 0]


class _TokenLogps(torch.autograd.Function):
    """The fused form for a head that is a matrix with an optional bias."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        scale: float,
        softcap: float | None,
        chunk: int,
        keep: bool,
    ) -> Tensor:
        hidden_grad, weight_grad, bias_grad = ctx.needs_input_grad[:3]
        trained = weight_grad or bias_grad
        # Cast once, here, so that the gradient returned below is in the stored dtype, not rounded to the product's.
        ctx.weight_dtype, weight = weight.dtype, weight.to(hidden.dtype)
        logps = torch.empty(len(targets), dtype=_wide(hidden), device=hidden.device)
        per_token = torch.empty_like(hidden) if hidden_grad and not trained else None
        kept = hidden.new_empty(len(targets), weight.shape[0]) if keep and trained else None
        for part in chunks(len(targets), chunk):
            raw = torch.mm(hidden[part], weight.T, out=None if kept is None else kept[part])
            logits = _finish(raw, bias, scale, softcap)
            normaliser = logits.logsumexp(-1)
            logps[part] = logits.gather(-1, targets[part, None])[:, 0] - normaliser
            if per_token is not None:
                slope = _slope(logits, normaliser, targets[part], scale, softcap)
                per_token[part] = slope.to(weight.dtype) @ weight
        ctx.scale, ctx.softcap, ctx.chunk = scale, softcap, chunk
        # Not among the saved tensors: the backward writes over it, which those do not allow.
        ctx.kept = kept
        if per_token is not None:
            ctx.save_for_backward(per_token)
        else:
            ctx.save_for_backward(hidden, weight, bias, targets)
        return logps

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        nothing = (None,) * 5
        if len(ctx.saved_tensors) == 1:
            (per_token,) = ctx.saved_tensors
            return ((per_token * grad[:, None]).to(per_token.dtype), None, None, *nothing)
        hidden, weight, bias, _ = ctx.saved_tensors
        hidden_grad, weight_grad, bias_grad = ctx.needs_input_grad[:3]
        # The kept logits serve one backward, whose gradients take their place; a second backward recomputes.
        kept, ctx.kept = ctx.kept, None
        d_hidden = torch.empty_like(hidden) if hidden_grad else None
        # Sums over chunks are kept in float32 or wider: rounding each partial sum to bfloat16 loses small gradients.
        d_weight = torch.zeros_like(weight, dtype=_wide(weight)) if weight_grad and kept is None else None
        d_bias = torch.zeros_like(bias, dtype=_wide(bias)) if bias_grad else None
        for part in chunks(len(grad), ctx.chunk):
            slope = _weighted_slope(ctx, part, grad, kept)
            if d_bias is not None:
                d_bias += slope.sum(0)
            narrow = slope.to(weight.dtype) if kept is None else kept[part].copy_(slope)
            if d_hidden is not None:
                torch.mm(narrow, weight, out=d_hidden[part])
            if d_weight is not None:
                d_weight += narrow.T @ hidden[part]
        if kept is not None and weight_grad:
            d_weight = kept.T @ hidden  # one product over all tokens
        return (
            d_hidden,
            None if d_weight is None else d_weight.to(ctx.weight_dtype),
            None if d_bias is None else d_bias.to(bias.dtype),
            *nothing,
        )


def _weighted_slope(ctx: Any, part: slice, grad: Tensor, kept: Tensor | None) -> Tensor:
    """d loss / d (h W^T + b) of a chunk, from the kept products or computing them again."""
    hidden, weight, bias, targets = ctx.saved_tensors
    raw = hidden[part] @ weight.T if kept is None else kept[part]
    logits = _finish(raw, bias, ctx.scale, ctx.softcap)
    slope = _slope(logits, logits.logsumexp(-1), targets[part], ctx.scale, ctx.softcap)
    return slope.mul_(grad[part, None])


def _module_token_logps(hidden: Tensor, head: Head, targets: Tensor, chunk: int) -> Tensor:
    """Chunk by chunk through the head's own module, recomputed in the backward so that no chunk's logits are kept."""

    def scores(part_hidden: Tensor, part_targets: Tensor) -> Tensor:
        return naive_token_logps(part_hidden, head, part_targets)

    parts = list(chunks(len(targets), chunk)) or [slice(0, 0)]
    if not torch.is_grad_enabled():
        return torch.cat([scores(hidden[part], targets[part]) for part in parts])
    return torch.cat([checkpoint(scores, hidden[part], targets[part], use_reentrant=False) for part in parts])


def _finish(raw: Tensor, bias: Tensor | None, scale: float, softcap: float | None) -> Tensor:
    """From `h W^T` to logits in float32 or wider: bias, scale, cap. The input is not changed."""
    logits = raw.to(_wide(raw))
    if bias is not None:
        logits = logits + bias
    if scale != 1.0:
        logits = logits * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return logits


def _slope(logits: Tensor, normaliser: Tensor, targets: Tensor, scale: float, softcap: float | None) -> Tensor:
    """d logp / d (h W^T + b): (onehot - softmax) * (1 - (z / cap)^2) * scale."""
    slope = (logits - normaliser[:, None]).exp_().neg_()
    slope.scatter_add_(-1, targets[:, None], torch.ones_like(slope[:, :1]))
    if softcap is not None:
        slope *= 1 - (logits / softcap).square()
    if scale != 1.0:
        slope *= scale
    return slope


def _compute_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """The dtype of the product: autocast's where it is on (float64 stays), else what the operands promote to."""
    device = hidden.device.type
    if torch.is_autocast_enabled(device) and hidden.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return torch.promote_types(hidden.dtype, weight.dtype)


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def chunks(total: int, chunk: int) -> Iterator[slice]:
    """Slices of at most `chunk` that cover `range(total)`."""
    return (slice(start, min(start + chunk, total)) for start in range(0, total, chunk))
