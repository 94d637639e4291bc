"""The log-probabilities as a layer that goes where a language-model head was."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from preftune.ops.head import Head
from preftune.ops.token_logps import DEFAULT, HeadOptions, TokenExtras, token_logps


class TokenLogProbs(nn.Module):
    """A head that answers with the log-probability of each target instead of logits.

        logps = TokenLogProbs(model.lm_head)(hidden, targets)

    Args:
        head: a linear layer `H -> V` (shared, not copied: tied weights stay tied, and gradients arrive there), or any
            module that maps `[T, H]` to `[T, V]` row by row, which is then run chunk by chunk.
        scale, softcap, temperature: what happens to its outputs (see `Head`).
        options: backend, strategy and sizes.
    """

    def __init__(
        self,
        head: nn.Module,
        scale: float = 1.0,
        softcap: float | None = None,
        temperature: float = 1.0,
        options: HeadOptions = DEFAULT,
    ) -> None:
        super().__init__()
        self.head, self.options = head, options
        self.scale, self.softcap, self.temperature = scale, softcap, temperature

    def forward(self, hidden: Tensor, targets: Tensor, extras: bool = False) -> Tensor | tuple[Tensor, TokenExtras]:
        """Log-probabilities in the shape of `targets`; with `extras`, those as well, in the same shape.

        Args:
            hidden: `[..., H]`.
            targets: `[...]` token ids in `[0, V)`. Select the positions that count before: none is skipped.
            extras: see `TokenExtras`.
        """
        after: dict[str, Any] = {"scale": self.scale, "softcap": self.softcap, "temperature": self.temperature}
        layer: Any = self.head
        plain = isinstance(layer, nn.Linear) and type(layer).forward is nn.Linear.forward
        head = Head(layer.weight, layer.bias, **after) if plain else Head(module=layer, **after)
        rows, shape = hidden.flatten(0, -2), targets.shape
        if not extras:
            return token_logps(rows, head, targets.flatten(), self.options).view(shape)
        logps, more = token_logps(rows, head, targets.flatten(), self.options, extras=True)
        return logps.view(shape), TokenExtras(*(column.view(shape) for column in vars(more).values()))
