"""Which rows each rank trains on, micro-batch by micro-batch."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.data import Sampler


class StepSampler(Sampler[list[int]]):
    """Deals every row out exactly once per epoch, on any number of ranks; yields lists of row keys.

    A step takes `world_size * accumulation * batch_size` consecutive rows of the epoch's order, so the rows of a step
    are the same however that product is split; the last step of an epoch takes what is left. Every rank yields the
    same number of micro-batches (they meet in collective operations): one that runs out of rows yields a filler, the
    key `~row` (negative), which asks the data set for that row at no weight in loss, counts and metrics.

    Args:
        rows: number of rows.
        batch_size: rows per micro-batch and rank.
        rank: this process, 0 <= rank < world_size.
        world_size: number of processes.
        seed: the epoch's order is a permutation drawn from (seed, epoch); None keeps the rows' own order.
    """

    def __init__(self, rows: int, batch_size: int, rank: int = 0, world_size: int = 1, seed: int | None = 0) -> None:
        assert rows > 0
        assert 0 <= rank < world_size
        self.rows, self.batch_size = rows, batch_size
        self.rank, self.world_size, self.seed = rank, world_size, seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the epoch that is iterated next."""
        self.epoch = epoch

    def order(self) -> list[int]:
        """All rows in this epoch's order."""
        if self.seed is None:
            return list(range(self.rows))
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        return torch.randperm(self.rows, generator=generator).tolist()

    def __len__(self) -> int:
        return -(-self.rows // (self.world_size * self.batch_size))

    def __iter__(self) -> Iterator[list[int]]:
        order = self.order()
        wide = self.world_size * self.batch_size
        for start in range(0, self.rows, wide):
            # One micro-batch of every rank. Only the epoch's very last can be short; it is spread over the ranks
            # evenly, so that none does more than its share.
            block = order[start : start + wide]
            own = block[self.rank :: self.world_size]
            yield own if own else [~block[0]]
