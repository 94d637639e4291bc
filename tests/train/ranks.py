"""Started by torchrun: trains on every rank with gloo and lets the first write what came out.

Usage: ranks.py OUT LOSS LORA ROWS BATCH ACCUMULATION [one-class | half | cached]
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
import tiny
from preftune.data import PreferenceDataset
from preftune.models import Lora
from preftune.reference import CachedReference, starting_reference
from preftune.train import Objective, leave_process_group


def main(out: str, loss: str, lora: str, rows: str, batch: str, accumulation: str, *options: str) -> None:
    torch.set_num_threads(1)
    adapter = Lora(r=4, target_modules=("q_proj", "v_proj")) if lora == "lora" else None
    goal = tiny.objective(loss, adapter, torch.float64)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for _, p in goal.policy.model.named_parameters():
            if p.requires_grad:
                p.add_(0.05 * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    if "cached" in options:
        goal = Objective(goal.policy, CachedReference(starting_reference(goal.policy)), goal.loss)
    data = tiny.rows(int(rows), tiny.loss_layout(loss))
    if "one-class" in options:
        # Sorted by label and not shuffled: each of two ranks sees one class only.
        data = PreferenceDataset(sorted(data.examples, key=lambda e: bool(e.label)))
    if "half" in options:
        # Every other row has nothing to borrow: a rank's micro-batch may hold no mismatched pair at all.
        rows_left = [replace(e, mismatched=None) if i % 2 else e for i, e in enumerate(data.examples)]
        data = PreferenceDataset(rows_left)
    fit = tiny.trainer(
        Path(out),
        goal,
        data,
        data,
        per_device_train_batch_size=int(batch),
        per_device_eval_batch_size=int(batch),
        gradient_accumulation_steps=int(accumulation),
        max_steps=2,
        ddp_backend="gloo",
    )
    fit.train()
    metrics = fit.evaluate()
    if "cached" in options:
        rows_of = torch.tensor([goal.reference.work.rows])
        metrics |= {"computed": int(fit.accelerator.reduce(rows_of)), "asked": goal.reference.asked}
    if fit.is_world_process_zero():
        timing = ("runtime", "per_second", "epoch")  # epoch counts micro-batches, which differ
        entries = [
            {k: v for k, v in e.items() if not any(t in k for t in timing)}
            for e in [*fit.state.log_history, metrics]
            if "train_runtime" not in e
        ]
        Path(out, "entries.json").write_text(json.dumps(entries))
        torch.save(tiny.weights(goal.policy.model), Path(out, "weights.pt"))


if __name__ == "__main__":
    main(*sys.argv[1:])
    leave_process_group()
