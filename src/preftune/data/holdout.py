"""Hold rows out for evaluation."""

from __future__ import annotations

import json
import random

from preftune.data.formats import Loaded
from preftune.errors import DataError
from preftune.types import Example


def hold_out(loaded: Loaded, share: float, seed: int) -> tuple[Loaded, Loaded]:
    """Split rows into training and evaluation so that no prompt is in both; at least one row each.

    Prompts are drawn in an order given by `seed` until their rows make up `share` of all.
    """
    groups: dict[str, list[Example]] = {}
    for example in loaded.examples:
        groups.setdefault(json.dumps(example.prompt), []).append(example)
    if len(groups) < 2:
        raise DataError("data.eval: all rows have the same prompt, so none can be held out; give a file for eval")
    keys = list(groups)
    random.Random(f"preftune-hold-out-{seed}").shuffle(keys)
    held: set[str] = set()
    taken = 0
    for key in keys[:-1]:
        if taken and taken + len(groups[key]) / 2 > share * len(loaded.examples):
            break
        held.add(key)
        taken += len(groups[key])
    train = [e for e in loaded.examples if json.dumps(e.prompt) not in held]
    evaluation = [e for e in loaded.examples if json.dumps(e.prompt) in held]
    return Loaded(train, loaded.bad, loaded.unused_columns), Loaded(evaluation, [], {})
