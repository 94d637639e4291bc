"""What a tuned model does: held-out accuracy by reward, exact KL over its own samples, continuations side by side."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import cast

import torch
from torch import Tensor

from preftune.data import PreferenceDataset, collate
from preftune.losses import make_loss
from preftune.models import Policy
from preftune.models.adapters import evaluating
from preftune.models.head import hidden_and_head
from preftune.ops import token_kl
from preftune.reference import Reference
from preftune.train import Objective
from preftune.train.metrics import Meter
from preftune.types import Completion, Origin, TokenizedExample

BATCH = 32
NEW_TOKENS = 20


def held_out_pairs(policy: Policy, reference: Reference, pairs: PreferenceDataset, beta: float) -> dict[str, float]:
    """Accuracy (share of pairs whose better completion has the higher reward, a tie counts half) and mean margin."""
    objective = Objective(policy, reference, make_loss("dpo", beta=beta))
    meter = Meter()
    with evaluating(policy.model):
        for start in range(0, len(pairs), BATCH):
            batch = collate(pairs.examples[start : start + BATCH], _pad(policy)).to(policy.device)
            meter.add(objective(batch).metrics)
    means = meter.read()
    return {"accuracy": means["rewards/accuracies"], "margin": means["rewards/margins"]}


def sample(policy: Policy, prompts: Sequence[Sequence[int]], seed: int, temperature: float = 1.0) -> list[list[int]]:
    """One continuation per prompt, drawn from the model as it is now; ids without the prompt, cut after the end."""
    assert policy.tokenizer is not None
    model, eos = policy.model, policy.tokenizer.eos_token_id
    drawn: list[list[int]] = []
    with torch.random.fork_rng(devices=[policy.device] if policy.device.type == "cuda" else []), evaluating(model):
        torch.manual_seed(seed)
        for start in range(0, len(prompts), BATCH):
            part = prompts[start : start + BATCH]
            width = max(map(len, part))
            ids = torch.tensor([[_pad(policy)] * (width - len(p)) + list(p) for p in part], device=policy.device)
            mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in part], device=policy.device)
            with policy.autocast():
                out = cast(
                    "Tensor",
                    model.generate(  # type: ignore[operator]
                        input_ids=ids,
                        attention_mask=mask,
                        do_sample=True,
                        temperature=temperature,
                        top_k=0,
                        top_p=1.0,
                        max_new_tokens=NEW_TOKENS,
                        pad_token_id=_pad(policy),
                        use_cache=True,
                    ),
                )
            for row in out[:, width:].tolist():
                drawn.append(row[: row.index(eos) + 1] if eos in row else row)
    return drawn


def sampled_kl(policy: Policy, reference: Reference, prompts: Sequence[Sequence[int]], seed: int) -> float:
    """Mean over tokens of the exact KL(policy || reference), nats, along one sample of the policy for each prompt."""
    samples = sample(policy, prompts, seed)
    examples = [
        TokenizedExample(tuple(p), (Completion(tuple(s), (True,) * len(s)),), Origin("sample", i), label=True)
        for i, (p, s) in enumerate(zip(prompts, samples, strict=True))
    ]
    total, count = 0.0, 0
    for start in range(0, len(examples), BATCH):
        batch = collate(examples[start : start + BATCH], _pad(policy)).to(policy.device)
        inputs = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
        with evaluating(policy.model), policy.autocast():
            hidden, head = hidden_and_head(policy.model, **inputs)
            with reference.active() as (other, _):
                ref_hidden, ref_head = hidden_and_head(other.model, **inputs)
                rows = [h.flatten(0, 1)[batch.positions] for h in (hidden, ref_hidden)]
                kl = token_kl(rows[0], head, rows[1], ref_head)
        total, count = total + float(kl.double().sum()), count + kl.numel()
    return total / count


def side_by_side(
    policy: Policy, reference: Reference, prompts: Sequence[Sequence[int]], seed: int
) -> list[tuple[str, str, str]]:
    """`(prompt, reference's continuation, policy's continuation)`, each drawn with the same seed at temperature 0.7."""
    texts: list[list[str]] = []
    for scope in (reference.active(), nullcontext((policy, None))):
        with scope as (model, _):
            texts.append([_decode(policy, ids) for ids in sample(model, prompts, seed, temperature=0.7)])
    return [(_decode(policy, p), *pair) for p, *pair in zip(prompts, *texts, strict=True)]


def _decode(policy: Policy, ids: Sequence[int]) -> str:
    assert policy.tokenizer is not None
    return str(policy.tokenizer.decode(list(ids), skip_special_tokens=True)).strip()


def _pad(policy: Policy) -> int:
    assert policy.tokenizer is not None
    pad = policy.tokenizer.pad_token_id
    return cast("int", policy.tokenizer.eos_token_id if pad is None else pad)
