"""The fused log-probability of a head that is a matrix, as one differentiable operation.

The forward goes over chunks of tokens, each with all V logits: a soft-max needs its row whole. What the backward does
for a trained head goes over blocks of the *vocabulary* instead: the normalisers are known by then, so any columns can
be turned into gradients alone, and a block's weight gradient is finished by one product over all tokens. It is summed
inside that product, so it needs no `[V, H]` buffer beside the gradient that is returned, and its error does not grow
with the number of chunks. Only `d hidden`, which is small, is summed over blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from preftune.ops.head import wide
from preftune.ops.pointwise import EXTRAS, Pointwise, spans


@dataclass(frozen=True)
class Plan:
    """How a head is gone through.

    Args:
        chunk: tokens whose products are held at once in the forward.
        keep: of a trained head, the products of the first so many tokens are kept for the backward.
        tokens, columns: rows and columns of what the backward computes again at once.
        pointwise: the passes between the products.
        grad: whether a gradient may be asked for; without, nothing of it is computed.
        extras: whether figures of each token are returned as well.
    """

    chunk: int
    keep: int
    tokens: int
    columns: int
    pointwise: Pointwise
    grad: bool
    extras: bool


class FusedLogps(torch.autograd.Function):
    """`(hidden [T, H], weight [V, H], bias [V], targets [T], plan) -> (logps [T], extras [4, T] or None)`."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, plan: Plan
    ) -> tuple[Tensor, Tensor | None]:
        total = len(targets)
        hidden_grad, weight_grad, bias_grad = (plan.grad and needed for needed in ctx.needs_input_grad[:3])
        trained = weight_grad or bias_grad
        narrow = weight.to(hidden.dtype)
        figures = hidden.new_empty(2 + EXTRAS * plan.extras, total, dtype=wide(hidden.dtype))
        # d logp / d hidden of a frozen head depends on the incoming gradient only by a factor per token: made here.
        per_token = torch.empty_like(hidden) if hidden_grad and not trained else None
        kept = hidden.new_empty(min(plan.keep, total) if trained else 0, len(weight))
        buffer = hidden.new_empty(min(plan.chunk, total - len(kept)), len(weight))
        for part in [*spans(0, len(kept), plan.chunk), *spans(len(kept), total, plan.chunk)]:
            out = kept[part] if part.stop <= len(kept) else buffer[: part.stop - part.start]
            raw = torch.mm(hidden[part], narrow.T, out=out)
            figures[:, part] = plan.pointwise.score(
                raw, bias, targets[part], turn=per_token is not None, extras=plan.extras
            )
            if per_token is not None:
                torch.mm(raw, narrow, out=per_token[part])
        logps, normaliser, extras = figures[0], figures[1], figures[2:].clone() if plan.extras else None
        ctx.plan = plan
        if per_token is not None:
            ctx.save_for_backward(per_token)
        else:
            # The kept products are not among the saved tensors: the backward writes over them, which those forbid.
            ctx.kept = kept
            ctx.save_for_backward(hidden, weight, bias, targets, normaliser)
        if extras is not None:
            ctx.mark_non_differentiable(extras)
        return logps, extras

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        if len(ctx.saved_tensors) == 1:
            (per_token,) = ctx.saved_tensors
            return (per_token * grad[:, None]).to(per_token.dtype), None, None, None, None
        # The kept products serve one backward, whose gradients take their place; a second one computes them again.
        kept, ctx.kept = ctx.kept, None
        hidden, weight, bias, targets, normaliser = ctx.saved_tensors
        rows = _Rows(hidden, targets, normaliser, grad, hidden.new_empty(0, len(weight)) if kept is None else kept)
        weighty = rows.weighty()
        d_hidden, d_weight, d_bias = _gradients(weighty, weight, bias, ctx.needs_input_grad[:3], ctx.plan)
        if d_hidden is not None and weighty.index is not None:
            d_hidden = torch.zeros_like(hidden).index_copy_(0, weighty.index, d_hidden)
        return d_hidden, d_weight, d_bias, None, None


@dataclass
class _Rows:
    """What the backward knows of each token. `kept` holds the products of the first `len(kept)` of them."""

    hidden: Tensor
    targets: Tensor
    normaliser: Tensor
    grad: Tensor
    kept: Tensor
    index: Tensor | None = None  # which ones these are, where some were left out

    def weighty(self) -> _Rows:
        """Those whose incoming gradient is not 0 and does not underflow, where that is known without waiting."""
        if self.grad.device.type != "cpu":
            return self
        index = (~(self.grad.abs() < torch.finfo(self.grad.dtype).tiny)).nonzero()[:, 0]  # a nan stays
        if len(index) == len(self.grad):
            return self
        among_kept = index[index < len(self.kept)].tolist()
        for place, row in enumerate(among_kept):  # within the buffer: a copy would go beyond the budget
            if place != row:
                self.kept[place] = self.kept[row]
        return _Rows(
            self.hidden[index],
            self.targets[index],
            self.normaliser[index],
            self.grad[index],
            self.kept[: len(among_kept)],
            index,
        )


def _gradients(
    rows: _Rows, weight: Tensor, bias: Tensor | None, needed: tuple[bool, bool, bool], plan: Plan
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """d hidden, d weight and d bias of a trained head, a block of columns (entries of the vocabulary) at a time."""
    hidden, kept, n, total = rows.hidden, rows.kept, len(rows.kept), len(rows.grad)
    narrow, sums = weight.to(hidden.dtype), wide(hidden.dtype)
    d_hidden = torch.zeros_like(hidden, dtype=sums) if needed[0] else None
    d_weight = torch.zeros_like(weight) if needed[1] else None
    d_bias = torch.zeros_like(bias, dtype=sums) if needed[2] and bias is not None else None
    if n:
        plan.pointwise.slope_(kept, bias, rows.targets[:n], rows.normaliser[:n], rows.grad[:n])
    parts = [*spans(0, n, max(1, n)), *spans(n, total, plan.tokens)]
    buffer = hidden.new_empty(min(plan.tokens, total - n) * min(plan.columns, len(weight)))
    for columns in spans(0, len(weight), plan.columns) if parts else []:
        block = narrow[columns]
        # Several products are added up in float32 or wider; a single one is rounded once, as it is made.
        d_block = None if d_weight is None else d_weight[columns]
        if d_block is not None and len(parts) > 1:
            d_block = d_block.to(sums)
        for part in parts:
            if part.stop <= n:
                slope = kept[:, columns]
            else:
                slope = buffer[: (part.stop - part.start) * len(block)].view(-1, len(block))
                torch.mm(hidden[part], block.T, out=slope)
                b = None if bias is None else bias[columns]
                plan.pointwise.slope_(
                    slope, b, rows.targets[part], rows.normaliser[part], rows.grad[part], columns.start
                )
            if d_hidden is not None:
                _add_product(d_hidden[part], slope, block, fresh=columns.start == 0)
            if d_block is not None:
                _add_product(d_block, slope.T, hidden[part], fresh=part is parts[0])
            if d_bias is not None:
                d_bias[columns] += slope.sum(0, dtype=sums)
        if d_weight is not None and d_block is not None and d_block.dtype != d_weight.dtype:
            d_weight[columns] = d_block
    return (
        None if d_hidden is None else d_hidden.to(hidden.dtype),
        d_weight,
        None if d_bias is None or bias is None else d_bias.to(bias.dtype),
    )


def _add_product(total: Tensor, a: Tensor, b: Tensor, fresh: bool) -> None:
    """`total += a @ b`, or `total = a @ b` where it is fresh; without a buffer where the dtypes agree."""
    if total.dtype == a.dtype:
        torch.addmm(total, a, b, beta=0 if fresh else 1, out=total)
        return
    product = torch.mm(a, b, out_dtype=total.dtype) if a.device.type == "cuda" else a @ b
    if fresh:
        total.copy_(product)
    else:
        total += product
