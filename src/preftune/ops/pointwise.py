"""Everything between the matrix products: soft-max, its slope, and what is reported of a token, block by block.

A block is a few rows of a product. On a CPU it is sized so that it stays in the core's own cache through all passes,
which makes them cheap beside the products; compiled, the passes are one.

Denormal numbers never leave here: a product with them runs more than ten times slower on a CPU, and what is smaller
than the smallest normal number changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

from preftune.ops.head import Finish, wide

# Elements of a block: what about fits a core's second-level cache in float32; on an accelerator, enough to fill it.
BLOCK = {"cpu": 2**18}
LARGE_BLOCK = 2**24
# Rows of what `describe` returns: entropy, log of the sum of squared probabilities, mean logit, whether top.
EXTRAS = 4


@dataclass(frozen=True)
class Pointwise:
    """The passes over a head's products; `compiled` makes one kernel of each with torch.compile."""

    finish: Finish
    compiled: bool = False

    def score(
        self, raw: Tensor, bias: Tensor | None, targets: Tensor, *, turn: bool = False, extras: bool = False
    ) -> Tensor:
        """Log-probability of each target and `logsumexp` of the logits, `[2, n]`, of products `raw [n, V]`.

        With `turn`, `raw` is replaced by d logp / d raw. With `extras`, they follow: `[6, n]`.
        """
        out = raw.new_empty(2 + EXTRAS * extras, len(raw), dtype=wide(raw.dtype))
        for rows in self._blocks(raw):
            out[:2, rows] = self._run(_score, raw[rows], bias, targets[rows])
            if extras:
                out[2:, rows] = self._run(_describe, raw[rows], bias, targets[rows], out[1, rows])
            if turn:
                self._turn(raw[rows], bias, targets[rows], out[1, rows])
        return out

    def slope_(
        self, raw: Tensor, bias: Tensor | None, targets: Tensor, normaliser: Tensor, grad: Tensor, first: int = 0
    ) -> Tensor:
        """Replace `raw [n, v]`, columns `first`, `first + 1`, ... of the products, by `grad * d logp / d raw`."""
        # |grad| goes into the exponent, so that what is flushed there is the gradient itself.
        sign, log_size = grad.sign(), grad.abs().log()
        for rows in self._blocks(raw):
            self._turn(raw[rows], bias, targets[rows] - first, normaliser[rows], sign[rows], log_size[rows])
        return raw

    def _turn(self, raw: Tensor, bias: Tensor | None, targets: Tensor, *vectors: Tensor) -> None:
        raw.copy_(self._run(_slope, raw, bias, targets, *vectors))

    def _blocks(self, raw: Tensor) -> Iterator[slice]:
        return spans(0, len(raw), block_rows(raw))

    def _run(self, function: Callable[..., Tensor], raw: Tensor, bias: Tensor | None, *vectors: Tensor) -> Tensor:
        if not self.compiled:
            return function(self.finish, raw, bias, *vectors)
        # A last block of fewer rows is filled up, so that each kernel is compiled for one shape.
        missing = block_rows(raw) - len(raw)
        if missing:
            raw = torch.cat([raw, raw.new_zeros(missing, raw.shape[1])])
            vectors = tuple(torch.cat([v, v.new_zeros(missing)]) for v in vectors)
        made = _compile(function, self.finish)(raw, bias, *vectors)
        # Rows are the last dimension of figures per token, the first of a slope.
        return made[..., : made.shape[-1] - missing] if function is not _slope else made[: len(raw) - missing]


@cache
def _compile(function: Callable[..., Tensor], finish: Finish) -> Callable[..., Tensor]:
    return torch.compile(partial(function, finish), dynamic=False)


def _score(finish: Finish, raw: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
    logits = finish(raw, bias)
    logps = logits.log_softmax(-1)  # one kernel, twice as fast as logsumexp
    normaliser = logits.amax(-1) - logps.amax(-1)  # at the top, where nothing is lost to rounding
    return torch.stack([logps.gather(-1, targets[:, None])[:, 0], normaliser])


def _slope(
    finish: Finish,
    raw: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    normaliser: Tensor,
    sign: Tensor | None = None,
    log_size: Tensor | None = None,
) -> Tensor:
    """d logp / d raw = (onehot - softmax) * d z / d raw, times `sign * exp(log_size)`."""
    logits = finish(raw, bias)
    # Columns may be some of the vocabulary's only; a target outside of them changes nothing.
    own = targets.clamp(0, raw.shape[1] - 1)[:, None]
    at_target = -torch.expm1(logits.gather(-1, own) - normaliser[:, None])  # 1 - p without cancellation
    shift = normaliser if log_size is None else normaliser - log_size
    slope = torch.threshold_(logits - shift[:, None], math.log(torch.finfo(logits.dtype).tiny), -math.inf).exp_()
    if sign is None or log_size is None:
        slope.neg_()
    else:
        slope *= -sign[:, None]
        at_target *= (sign * log_size.exp())[:, None]
    inside = ((targets >= 0) & (targets < raw.shape[1]))[:, None]
    slope.scatter_(-1, own, torch.where(inside, at_target, slope.gather(-1, own)))
    if finish.cap is None and abs(finish.scale) >= 1:
        return slope
    return torch.where(finish.chain(slope, logits).abs() < torch.finfo(slope.dtype).tiny, 0.0, slope)


def _describe(finish: Finish, raw: Tensor, bias: Tensor | None, targets: Tensor, normaliser: Tensor) -> Tensor:
    logits = finish(raw, bias)
    logp = logits - normaliser[:, None]
    # 0 * log 0 = 0: an excluded entry (-inf) adds nothing.
    entropy = -(logp.exp() * logp.clamp(min=torch.finfo(logp.dtype).min)).sum(-1)
    top = logits.gather(-1, targets[:, None])[:, 0] >= logits.amax(-1)
    return torch.stack([entropy, (2 * logp).logsumexp(-1), logits.mean(-1), top.to(logp.dtype)])


def block_rows(raw: Tensor) -> int:
    """Rows of a block of this width."""
    return max(1, BLOCK.get(raw.device.type, LARGE_BLOCK) // max(1, raw.shape[1]))


def spans(start: int, stop: int, size: int) -> Iterator[slice]:
    """Slices of at most `size` that cover `range(start, stop)`."""
    return (slice(i, min(i + size, stop)) for i in range(start, stop, size))
