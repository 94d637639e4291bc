"""What is counted between two log entries and over the whole run, so that a resumed run logs what any other would."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from preftune.train.callbacks import Throughput
from preftune.train.metrics import Meter, SumAndCount

Totals = Mapping[str, tuple[float, float]]


class Ledger:
    """Sums and counts of training.

    Args:
        reduce: sums a tensor over ranks. Everything here that reads is called on every rank or on none.
    """

    def __init__(self, reduce: Callable[[Tensor], Tensor]) -> None:
        self.reduce = reduce
        self.interval, self.run, self.throughput = Meter(), Meter(), Throughput()
        self._tokens_before = 0

    def add(self, metrics: Mapping[str, SumAndCount], loss: SumAndCount) -> None:
        """Count a micro-batch."""
        self.interval.add({**metrics, "loss": loss})
        self.run.add({"loss": loss})

    def entry(self, device: torch.device) -> tuple[dict[str, float], int]:
        """Means and tokens per second since the last entry, and the tokens that came in since."""
        means = self.interval.read(self.reduce)
        tokens, seconds = self.throughput.read()
        total = int(self.reduce(torch.tensor(tokens, device=device)))
        added, self._tokens_before = total + self._tokens_before, 0
        return {**means, "tokens_per_second": total / max(seconds, 1e-9)}, added

    def whole_run(self) -> float:
        """The loss over all rows of the run, those before a resume included."""
        return self.run.read(self.reduce).get("loss", float("nan"))

    def snapshot(self, device: torch.device) -> dict[str, Any]:
        """All of it over all ranks, as plain data for a checkpoint."""
        tokens = int(self.reduce(torch.tensor(self.throughput.tokens, device=device)))
        return {
            "since the last entry": self.interval.totals(self.reduce),
            "whole run": self.run.totals(self.reduce),
            "tokens since the last entry": tokens + self._tokens_before,
        }

    def restore(self, saved: Mapping[str, Any], device: torch.device) -> None:
        """Go on from a snapshot. On one rank only: it holds the sums of all."""
        self.interval.restore(saved["since the last entry"], device)
        self.run.restore(saved["whole run"], device)
        self._tokens_before = saved["tokens since the last entry"]
