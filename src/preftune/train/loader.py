"""Data loaders that deal rows to ranks by themselves."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.utils.data import DataLoader

from preftune.data import PreferenceDataset, StepSampler, collate
from preftune.types import TokenizedExample

if TYPE_CHECKING:
    from transformers import TrainingArguments


class StepLoader(DataLoader[TokenizedExample]):
    """A loader over `StepSampler`'s batches. It passes the epoch on, and draws nothing from the global random state."""

    def __init__(self, dataset: PreferenceDataset, sampler: StepSampler, pad_id: int, args: TrainingArguments) -> None:
        super().__init__(
            dataset,
            batch_sampler=sampler,
            collate_fn=partial(collate, pad_id=pad_id),
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory and torch.cuda.is_available(),
            persistent_workers=args.dataloader_persistent_workers,
            prefetch_factor=args.dataloader_prefetch_factor,
            multiprocessing_context=args.dataloader_multiprocessing_context,
            generator=torch.Generator().manual_seed(args.seed),
        )
        self.step_sampler = sampler

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the epoch that is iterated next."""
        self.step_sampler.set_epoch(epoch)
