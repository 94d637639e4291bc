"""The log-probability of each target token under a language-model head, without the `[T, V]` logits.

With z the logits, the log-probability of target y is

    logp = z_y - logsumexp(z),        d logp / d z = onehot(y) - softmax(z).

The gradient does not depend on what is done with the log-probabilities except by a factor per token, so any loss can
stand on top as plain autograd. This module chooses a way through the head; `fused` goes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args, overload

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from preftune.ops.fused import FusedLogps, Plan
from preftune.ops.head import Finish, Head, product_dtype
from preftune.ops.pointwise import Pointwise, spans
from preftune.types import Hidden, Targets, TokenLogps

Strategy = Literal["auto", "keep", "recompute"]
Backend = Literal["auto", "naive", "chunked", "compiled"]
# Tokens that the backward of a trained head takes at once: enough for the full speed of its products.
TOKENS = 4096
# Tokens of a head that is a module, at once.
MODULE_CHUNK = 256


@dataclass(frozen=True)
class HeadOptions:
    """How a head is computed. None of it changes a value or gradient beyond rounding.

    Args:
        backend: `chunked` (eager torch), `compiled` (the passes between the products are one kernel each; needs a C++
            compiler, or Triton on an accelerator), `naive` (all logits at once and plain autograd: the oracle), or
            `auto`: chunked.
        strategy: for a trained head: `keep` all products for the backward, `recompute` them, or `auto`: keep as many as
            the budget holds.
        chunk: tokens whose logits are held at once, >= 1; by default as many as take a quarter of the budget.
        budget: bytes that logits may take at once, > 0.
    """

    backend: Backend = "auto"
    strategy: Strategy = "auto"
    chunk: int | None = None
    budget: int = 256 * 2**20

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("backend", self.backend, get_args(Backend)),
            ("strategy", self.strategy, get_args(Strategy)),
        ):
            if value not in allowed:
                raise ValueError(f"{name}: expected one of {', '.join(allowed)}; got {value!r}")
        if self.budget <= 0 or (self.chunk is not None and self.chunk <= 0):
            raise ValueError(f"expected chunk and budget > 0; got {self.chunk} and {self.budget}")

    def plan(self, hidden: Tensor, head: Head, extras: bool) -> Plan:
        """Sizes for `hidden [T, H]`, already in the dtype of the product."""
        assert head.weight is not None
        vocabulary, total = len(head.weight), len(hidden)
        row = vocabulary * hidden.element_size()
        chunk = self.chunk or max(16, self.budget // 4 // row)
        fits = total * row <= self.budget
        beside = max(0, (self.budget - chunk * row) // row)
        keep = {"keep": total, "recompute": 0, "auto": total if fits else beside}[self.strategy]
        whole = keep >= total and head.weight.dtype == hidden.dtype
        # The same for every number of tokens, so that what is compiled for one batch serves the next.
        columns = vocabulary if whole else min(vocabulary, max(1, chunk * vocabulary // TOKENS))
        pointwise = Pointwise(head.finish, self.backend == "compiled")
        return Plan(chunk, keep, TOKENS, columns, pointwise, torch.is_grad_enabled(), extras)


DEFAULT = HeadOptions()


@dataclass(frozen=True)
class TokenExtras:
    """What else is known of each token's distribution, `[T]` each, without gradient.

    Args:
        entropy: `-sum_v p_v log p_v`, nats.
        log_sum_squares: `log sum_v p_v^2`, <= 0: 0 for a certain token.
        mean_logit: mean of the logits over the vocabulary.
        is_top: whether no other token is more probable than the target.
    """

    entropy: Tensor
    log_sum_squares: Tensor
    mean_logit: Tensor
    is_top: Tensor

    @classmethod
    def of(cls, table: Tensor) -> TokenExtras:
        """From the rows of a table `[4, T]`."""
        return cls(table[0], table[1], table[2], table[3].bool())


@overload
def token_logps(
    hidden: Hidden, head: Head, targets: Targets, options: HeadOptions = ..., *, extras: Literal[False] = ...
) -> TokenLogps: ...
@overload
def token_logps(
    hidden: Hidden, head: Head, targets: Targets, options: HeadOptions = ..., *, extras: Literal[True]
) -> tuple[TokenLogps, TokenExtras]: ...
def token_logps(
    hidden: Hidden, head: Head, targets: Targets, options: HeadOptions = DEFAULT, *, extras: bool = False
) -> TokenLogps | tuple[TokenLogps, TokenExtras]:
    """Log-probability of each target under the head, `[T]` nats, float32 (float64 when `hidden` is).

    Differentiable once, with any incoming gradient, in `hidden` and in the head's weight and bias (or its module's
    parameters). Without a gradient nothing of it is computed. Tokens whose incoming gradient is 0 or underflows take no
    backward work on a CPU. Operations and memory beyond inputs and gradients:

    - *frozen head* (only `hidden` needs a gradient): the forward makes it along with the values; 4THV, a chunk.
    - *keep* (trained head whose products fit the budget): they are kept and turned into gradients in place; 6THV,
      T * V. They serve one backward; a second one recomputes.
    - *recompute* (trained head, does not fit): the backward computes them again; 8THV, a chunk. By default as many as
      the budget holds are kept, and only the rest is computed again.

    Args:
        hidden: `[T, H]`, the hidden state that predicts each target.
        head: the model's head.
        targets: `[T]` token ids in `[0, V)`.
        options: backend, strategy and sizes.
        extras: return `TokenExtras` as well.
    """
    with torch.profiler.record_function("preftune::token_logps"):
        if options.backend == "naive":
            logps, table = _naive(hidden, head, targets, extras)
        elif head.module is not None:
            logps, table = _by_module(hidden, head, targets, options.chunk or MODULE_CHUNK, extras)
        else:
            logps, table = _fused(hidden, head, targets, options, extras)
    return (logps, TokenExtras.of(table)) if table is not None else logps


def naive_token_logps(hidden: Hidden, head: Head, targets: Targets) -> TokenLogps:
    """The oracle: all logits at once and plain autograd. Same arguments and result as `token_logps`."""
    return head.logits(hidden).log_softmax(-1).gather(-1, targets[:, None])[:, 0]


# Compilers see one opaque call: what is inside has loops over chunks that they would unroll.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _fused(
    hidden: Tensor, head: Head, targets: Tensor, options: HeadOptions, extras: bool
) -> tuple[Tensor, Tensor | None]:
    assert head.weight is not None
    hidden = hidden.to(product_dtype(hidden, head.weight))
    with torch.autocast(hidden.device.type, enabled=False):
        plan = options.plan(hidden, head, extras)
        made: tuple[Tensor, Tensor | None] = FusedLogps.apply(hidden, head.weight, head.bias, targets, plan)
        return made


def _naive(hidden: Tensor, head: Head, targets: Tensor, extras: bool) -> tuple[Tensor, Tensor | None]:
    logits = head.logits(hidden)
    logps = logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    if not extras:
        return logps, None
    with torch.no_grad():
        done = Pointwise(Finish())
        return logps, done.score(logits.detach(), None, targets, extras=True)[2:]


def _by_module(hidden: Tensor, head: Head, targets: Tensor, chunk: int, extras: bool) -> tuple[Tensor, Tensor | None]:
    """Chunk by chunk through the head's own module, recomputed in the backward so that no chunk's logits are kept."""
    parts = list(spans(0, len(targets), chunk)) or [slice(0, 0)]
    made = []
    for part in parts:
        arguments = (hidden[part], head, targets[part], extras)
        recompute = torch.is_grad_enabled()
        made.append(checkpoint(_naive, *arguments, use_reentrant=False) if recompute else _naive(*arguments))
    logps = torch.cat([values for values, _ in made])
    return logps, torch.cat([table for _, table in made if table is not None], -1) if extras else None
