"""From tokenized examples to a `Batch`: one row per sequence, padded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from preftune.data.keys import row_key
from preftune.types import Batch, Row, TokenizedExample


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
    batch = collate_rows([Row(e.prompt_ids, c) for e in examples for c in e.completions], pad_id, side, width)
    batch.real = torch.tensor([not e.filler for e in examples])
    batch.origins = [e.origin for e in examples]
    if layout == "unpaired":
        batch.labels = torch.tensor([bool(e.label) for e in examples])
    borrowing = [e for e in examples if e.mismatched is not None]
    if borrowing:
        lent = [Row(e.prompt_ids, e.mismatched) for e in borrowing if e.mismatched is not None]
        batch.mismatched = collate_rows(lent, pad_id, side, width)
        batch.mismatched.real = torch.tensor([not e.filler for e in borrowing])
        batch.mismatched.origins = [e.origin for e in borrowing]
    return batch


def collate_rows(
    rows: Sequence[Row], pad_id: int = 0, side: Literal["left", "right"] = "right", width: int | None = None
) -> Batch:
    """Make a batch of rows, to be scored only: each counts as an example of its own."""
    longest = max(len(row) for row in rows)
    width = longest if width is None else max(width, longest)
    shape = (len(rows), width)
    input_ids = torch.full(shape, pad_id)
    attention_mask = torch.zeros(shape, dtype=torch.long)
    position_ids = torch.zeros(shape, dtype=torch.long)
    positions: list[int] = []
    targets: list[int] = []
    for index, row in enumerate(rows):
        start = 0 if side == "right" else width - len(row)
        span = slice(start, start + len(row))
        input_ids[index, span] = torch.tensor(row.prompt_ids + row.completion.ids)
        attention_mask[index, span] = 1
        position_ids[index, span] = torch.arange(len(row))
        # The last prompt token predicts the completion's first: each target sits one after its source.
        before_first = index * width + start + len(row.prompt_ids) - 1
        for i, (target, scored) in enumerate(zip(row.completion.ids, row.completion.mask, strict=True)):
            if scored:
                positions.append(before_first + i)
                targets.append(target)
    return Batch(
        input_ids=input_ids,
        attention_mask=attention_mask,
        position_ids=position_ids,
        positions=torch.tensor(positions),
        targets=torch.tensor(targets),
        lengths=torch.tensor([row.completion.scored for row in rows]),
        real=torch.ones(len(rows), dtype=torch.bool),
        keys=[row_key(row) for row in rows],
    )
