"""Run alone, since a compiler cannot trace the shape checks of the tests: a compiled model is the eager one."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
import tiny
from preftune.data import collate
from preftune.models import Policy


def main() -> None:
    torch.set_num_threads(1)
    policy = Policy(tiny.llama())
    compiled = torch.compile(policy.model)
    for rows in (3, 2):
        batch = collate(tiny.rows(rows).examples)
        results = []
        for model in (None, compiled):
            policy.model.zero_grad()
            values = policy.sequence_logps(batch, model)
            values.sum().backward()
            results.append([values, *tiny.gradients(policy.model).values()])
        for got, expected in zip(*results, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    print(f"{torch._dynamo.utils.counters['stats']['unique_graphs']} graphs")


if __name__ == "__main__":
    main()
