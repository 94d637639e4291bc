"""KTO's mismatched pairs: which completion each prompt borrows for the KL baseline.

The pairing is a property of the data, fixed by a seed. Batches may then be of any size and shuffled freely.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from preftune.errors import DataError
from preftune.types import TokenizedExample

# Draws per row before giving up on chance and walking through all completions.
PROBES = 16


def pair_mismatched(
    examples: Sequence[TokenizedExample], seed: int, lenders: Sequence[TokenizedExample] = ()
) -> list[TokenizedExample]:
    """Give each unpaired example the completion of another one, with a different prompt and a different text.

    Rows are laid out prompt by prompt, in an order drawn from `seed`, and each borrows from the row one largest group
    further on: never its own prompt while no prompt has more than half of the rows, and each completion is lent once.
    The rows where that meets the same text, or a prompt that is too common, draw at random instead, also from `lenders`
    (a held-out part may have one prompt only; the training rows then lend theirs). A row for which no completion
    qualifies keeps `mismatched=None` and is left out of the baseline. Raises `DataError` when that is so for all rows.
    """
    rng = random.Random(f"preftune-mismatched-{seed}")
    groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for index, example in enumerate(examples):
        groups[example.prompt_ids].append(index)
    keys = list(groups)
    rng.shuffle(keys)
    order = []
    for key in keys:
        rng.shuffle(groups[key])
        order.extend(groups[key])
    shift = max(len(group) for group in groups.values())
    lender = {row: order[(place + shift) % len(order)] for place, row in enumerate(order)}

    pool = [*examples, *lenders]

    def fits(row: int, other: int) -> bool:
        a, b = examples[row], pool[other]
        return a.prompt_ids != b.prompt_ids and a.completions[0].ids != b.completions[0].ids

    paired = []
    for row, example in enumerate(examples):
        other: int | None = lender[row]
        if not fits(row, lender[row]):
            drawn = (rng.randrange(len(pool)) for _ in range(PROBES))
            other = next((c for c in drawn if fits(row, c)), None)
            if other is None:
                other = next((c for c in range(len(pool)) if fits(row, c)), None)
        paired.append(replace(example, mismatched=None if other is None else pool[other].completions[0]))
    if all(example.mismatched is None for example in paired):
        raise DataError(
            f"{examples[0].origin.file}: no two rows differ in both prompt and completion, so KTO's KL baseline cannot "
            "be estimated from mismatched pairs; add rows with other prompts, or use paired data with loss.name: dpo"
        )
    return paired
