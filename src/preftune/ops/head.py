"""What turns hidden states into logits, described as data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Head:
    """`z = softcap * tanh(scale * (h W^T + b) / softcap) / temperature`, the logits of a hidden state `h`.

    Args:
        weight: `[V, H]`. A head padded beyond the tokenizer's vocabulary is taken as it is, as the model's own soft-max
            takes it.
        bias: `[V]`, or None.
        scale: multiplies the logits (Cohere, Granite), not 0.
        softcap: bounds them (Gemma 2), > 0; None for no cap.
        module: in place of weight and bias where the head is more than a matrix (an adapter on the head, a quantized
            head): maps `[T, H]` to `[T, V]`, row by row, and is run chunk by chunk.
        temperature: divides the logits last, > 0; 1 for the model's own distribution.
    """

    weight: Tensor | None = None
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None
    module: Callable[[Tensor], Tensor] | None = None
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if (self.weight is None) == (self.module is None):
            raise ValueError("a head is either a weight or a module; give one of the two")
        if not self.temperature > 0 or (self.softcap is not None and not self.softcap > 0) or not self.scale:
            raise ValueError(
                f"expected scale != 0, softcap > 0 or None, temperature > 0; got {self.scale}, {self.softcap}, "
                f"{self.temperature}"
            )

    @property
    def finish(self) -> Finish:
        """What happens after the product. A temperature is a smaller scale under a smaller cap."""
        cap = None if self.softcap is None else self.softcap / self.temperature
        return Finish(self.scale / self.temperature, cap)

    def logits(self, hidden: Tensor) -> Tensor:
        """All logits `[T, V]` in float32 or wider. For oracles and chunks only."""
        if self.module is not None:
            return self.finish(self.module(hidden), None)
        assert self.weight is not None
        dtype = product_dtype(hidden, self.weight)
        return self.finish(hidden.to(dtype) @ self.weight.to(dtype).T, self.bias)

    @property
    def vocabulary(self) -> int | None:
        """Number of rows of the weight; None where only the module knows."""
        return None if self.weight is None else self.weight.shape[0]


@dataclass(frozen=True)
class Finish:
    """From the product `x = h W^T` to logits: `z = cap * tanh(scale * (x + b) / cap)`, and back to its slope."""

    scale: float = 1.0
    cap: float | None = None

    def __call__(self, raw: Tensor, bias: Tensor | None) -> Tensor:
        """Logits in float32 or wider. `raw` is not changed; where nothing is to be done it is what is returned."""
        logits = raw.to(wide(raw.dtype))
        if bias is not None:
            logits = logits + bias
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.cap is not None:
            logits = self.cap * torch.tanh(logits / self.cap)
        return logits

    def chain(self, slope: Tensor, logits: Tensor) -> Tensor:
        """d / d x from d / d z: times `scale * (1 - (z / cap)^2)`, in place."""
        if self.cap is not None:
            slope *= 1 - (logits / self.cap).square()
        if self.scale != 1.0:
            slope *= self.scale
        return slope


def product_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """The dtype of the product: autocast's where it is on (float64 stays), else what the operands promote to."""
    device = hidden.device.type
    if torch.is_autocast_enabled(device) and hidden.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return torch.promote_types(hidden.dtype, weight.dtype)


def wide(dtype: torch.dtype) -> torch.dtype:
    """float32, or the dtype itself where it is wider."""
    return torch.promote_types(dtype, torch.float32)
