"""Metrics as sums and counts, so that they mean the same over any split into batches and ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

SumAndCount = tuple[Tensor, Tensor]

# Every metric of training and evaluation, and whether more of it is better.
METRICS = {
    "loss": False,
    "rewards/chosen": True,
    "rewards/rejected": False,
    "rewards/margins": True,
    "rewards/accuracies": True,
    "logps/chosen": True,
    "logps/rejected": False,
    "kl": False,
}


class Meter:
    """Accumulates sums and counts on the device; reading them is the only synchronisation.

    A metric whose count is 0 over all ranks (no desirable row was seen) is left out, never reported as 0.
    """

    def __init__(self) -> None:
        self._totals: dict[str, Tensor] = {}

    def add(self, metrics: Mapping[str, SumAndCount]) -> None:
        """Add one batch's sums and counts. Every rank adds the same names, if need be with count 0."""
        for name, (total, count) in metrics.items():
            wide = torch.float32 if total.device.type == "mps" else torch.float64  # MPS has no float64
            both = torch.stack([total.detach().to(wide), count.detach().to(wide)])
            self._totals[name] = self._totals[name] + both if name in self._totals else both

    def totals(self, reduce: Callable[[Tensor], Tensor] | None = None) -> dict[str, tuple[float, float]]:
        """Sums and counts so far, by name; see `read`."""
        if not self._totals:
            return {}
        names = sorted(self._totals)
        table = torch.stack([self._totals[name] for name in names])
        rows = (reduce(table) if reduce else table).tolist()
        return {name: (total, count) for name, (total, count) in zip(names, rows, strict=True)}

    def restore(self, totals: Mapping[str, Sequence[float]], device: torch.device) -> None:
        """Go on from sums and counts kept before."""
        kind = torch.float32 if device.type == "mps" else torch.float64
        self._totals = {name: torch.tensor(pair, dtype=kind, device=device) for name, pair in totals.items()}

    def read(self, reduce: Callable[[Tensor], Tensor] | None = None) -> dict[str, float]:
        """Means over everything added since the last reading, and start anew.

        Args:
            reduce: sums a tensor over ranks; None for one process. Called on every rank or on none.
        """
        totals = self.totals(reduce)
        self._totals = {}
        means = {name: total / count for name, (total, count) in totals.items() if count > 0}
        chosen, rejected = means.get("rewards/chosen"), means.get("rewards/rejected")
        if "rewards/margins" not in totals and chosen is not None and rejected is not None:
            means["rewards/margins"] = chosen - rejected  # unpaired rows have no margin each, only their classes do
        return means


def masked(values: Tensor, mask: Tensor) -> SumAndCount:
    """Sum and count of `values` where `mask` is true."""
    return torch.where(mask, values, torch.zeros_like(values)).sum(), mask.sum()
