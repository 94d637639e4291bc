"""Tokenized examples to a `Batch`: one row per sequence, padded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from preftune.types import Batch, Completion, TokenizedExample


@dataclass(frozen=True)
class _Sequence:
    prompt_ids: tuple[int, ...]
    completion: Completion

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.completion.ids)


def collate(
    examples: Sequence[TokenizedExample],
    pad_id: int = 0,
    side: Literal["left", "right"] = "right",
    width: int | None = None,
) -> Batch:
    """Make a batch of examples of one layout.

    Args:
        examples: at least one, all paired or all unpaired.
        pad_id: what fills the gaps; never attended to and never scored, so any id will do.
        side: where padding goes. Positions are counted from the first real token, so both give the same numbers.
        width: tokens per row, at least the longest sequence; by default just that.
    """
    assert examples, "a batch holds at least one example"
    layout = examples[0].layout
    assert all(example.layout == layout for example in examples), "paired and unpaired rows do not share a batch"
    sequences = [_Sequence(e.prompt_ids, c) for e in examples for c in e.completions]
    borrowing = [e for e in examples if e.mismatched is not None]
    batch = _padded(sequences, pad_id, side, width)
    batch.real = torch.tensor([not e.filler for e in examples])
    batch.origins = [e.origin for e in examples]
    if layout == "unpaired":
        batch.labels = torch.tensor([bool(e.label) for e in examples])
    if borrowing:
        lent = [_Sequence(e.prompt_ids, e.mismatched) for e in borrowing if e.mismatched is not None]
        batch.mismatched = _padded(lent, pad_id, side, width)
        batch.mismatched.real = torch.tensor([not e.filler for e in borrowing])
        batch.mismatched.origins = [e.origin for e in borrowing]
    return batch


def _padded(sequences: list[_Sequence], pad_id: int, side: Literal["left", "right"], width: int | None) -> Batch:
    longest = max(len(sequence) for sequence in sequences)
    width = longest if width is None else max(width, longest)
    shape = (len(sequences), width)
    input_ids = torch.full(shape, pad_id)
    attention_mask = torch.zeros(shape, dtype=torch.long)
    position_ids = torch.zeros(shape, dtype=torch.long)
    positions: list[int] = []
    targets: list[int] = []
    for row, sequence in enumerate(sequences):
        start = 0 if side == "right" else width - len(sequence)
        span = slice(start, start + len(sequence))
        input_ids[row, span] = torch.tensor(sequence.prompt_ids + sequence.completion.ids)
        attention_mask[row, span] = 1
        position_ids[row, span] = torch.arange(len(sequence))
        # The last prompt token predicts the completion's first: each target sits one after its source.
        before_first = row * width + start + len(sequence.prompt_ids) - 1
        for i, (target, scored) in enumerate(zip(sequence.completion.ids, sequence.completion.mask, strict=True)):
            if scored:
                positions.append(before_first + i)
                targets.append(target)
    return Batch(
        input_ids=input_ids,
        attention_mask=attention_mask,
        position_ids=position_ids,
        positions=torch.tensor(positions),
        targets=torch.tensor(targets),
        lengths=torch.tensor([s.completion.scored for s in sequences]),
        real=torch.ones(len(sequences), dtype=torch.bool),
    )
