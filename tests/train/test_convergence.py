"""Training with the fused head and with whole logits: the same loss curve, step by step."""

from __future__ import annotations

import random

import pytest
import torch

import tiny
from preftune.assets import resolve
from preftune.data import collate
from preftune.losses import make_loss
from preftune.models import Lora, load_policy
from preftune.ops import HeadOptions
from preftune.reference import default_reference
from preftune.train import Objective
from preftune.types import SequenceLogps

LORA = Lora(r=4, target_modules=("q_proj", "v_proj"))
NAIVE = HeadOptions(backend="naive")
FUSED = {"keep": HeadOptions(strategy="keep", chunk=16), "recompute": HeadOptions(strategy="recompute", chunk=16)}


def curve(objective, batches, optimizer, nll=0.0):
    """Losses of a plain loop; `nll` weighs the chosen completions' mean negative log-likelihood (RPO's term)."""
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        if nll:
            policy = objective.policy.sequence_logps(batch)
            ref = objective.reference.sequence_logps(batch)
            groups = [SequenceLogps(policy[i::2], ref[i::2], batch.lengths[i::2]) for i in (0, 1)]
            loss = (objective.loss(*groups) - nll * groups[0].policy / groups[0].lengths).mean()
        else:
            output = objective(batch)
            loss = output.total / output.count
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return torch.tensor(losses, dtype=torch.float64)


@pytest.mark.parametrize(("loss", "nll"), [("dpo", 0.0), ("dpo", 0.5), ("kto", 0.0)])
@pytest.mark.parametrize("lora", [LORA, None])
def test_a_hundred_steps_have_the_same_curve(loss, nll, lora):
    data = tiny.rows(24, tiny.loss_layout(loss)).examples
    rng = random.Random(0)
    batches = [collate(rng.sample(data, 4)) for _ in range(100)]

    def train(options):
        objective = tiny.objective(loss, lora, head=options)
        trained = [p for p in objective.policy.model.parameters() if p.requires_grad]
        return curve(objective, batches, torch.optim.SGD(trained, lr=0.02, momentum=0.9), nll)

    naive = train(NAIVE)
    assert naive[-20:].mean() < naive[:20].mean() - 1e-3, "something is learnt"
    for options in FUSED.values() if lora is None else [HeadOptions(chunk=16)]:
        torch.testing.assert_close(train(options), naive, rtol=1e-5, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [Lora(r=8, target_modules=("q_proj", "v_proj")), None])
def test_twenty_steps_of_a_real_model_have_the_same_curve(adapter):
    name = resolve("demo:smollm2-135m-instruct")

    def policy(options):
        torch.manual_seed(0)
        return load_policy(name, dtype="float32", adapter=adapter, head=options)

    rows = real_rows(policy(NAIVE).tokenizer)
    batches = [collate(rows[2 * i : 2 * i + 2]) for i in range(20)]

    def train(options):
        made = policy(options)
        objective = Objective(made, default_reference(made), make_loss("dpo"))
        trained = [p for p in made.model.parameters() if p.requires_grad]
        return curve(objective, batches, torch.optim.SGD(trained, lr=0.02 if adapter else 3e-4))

    naive = train(NAIVE)
    for options in (HeadOptions(strategy="keep"), HeadOptions(strategy="recompute")) if adapter is None else [None]:
        torch.testing.assert_close(train(options), naive, rtol=1e-5, atol=0)


def real_rows(tokenizer):
    from preftune.data import load_examples, tokenize_examples

    rows, _ = tokenize_examples(
        load_examples(resolve("demo:dpo_en_demo")), tokenizer, max_length=96, truncation="keep_end"
    )
    return rows.examples[:40]
