"""The same rows give the same step, however they are split, padded, accumulated or resumed."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback

import tiny
from preftune.data import collate
from preftune.losses import loss_names, make_loss
from preftune.models import Lora, Policy
from preftune.models.adapters import add_adapter, load_adapter, save_adapter
from preftune.reference import default_reference, frozen_copy
from preftune.train import Objective

LORA = Lora(r=4, target_modules=("q_proj", "v_proj"))
SPLITS = [(8, 1), (4, 2), (2, 4), (1, 8)]  # micro-batch x accumulation


def moved(goal):
    """Make the policy differ from its reference, so that every term of the loss matters."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for _, p in goal.policy.model.named_parameters():
            if p.requires_grad:
                p.add_(0.05 * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return goal


def one_run(folder, loss, lora, dtype, batch, accumulation, n=8, steps=2, **fields):
    goal = moved(tiny.objective(loss, lora, dtype))
    run = tiny.trainer(
        folder,
        goal,
        tiny.rows(n, tiny.loss_layout(loss)),
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulation,
        max_steps=steps,
        **fields,
    )
    run.train()
    losses = [entry["loss"] for entry in run.state.log_history if "loss" in entry]
    return losses, tiny.weights(goal.policy.model)


@pytest.mark.parametrize("loss", loss_names())
@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_any_split_of_a_step_is_the_same_step(tmp_path, loss, lora):
    whole_losses, whole = one_run(tmp_path, loss, lora, torch.float64, *SPLITS[0])
    for batch, accumulation in SPLITS[1:]:
        losses, weights = one_run(tmp_path, loss, lora, torch.float64, batch, accumulation)
        # TINY's norms and rotary embeddings compute in float32 inside, whatever the dtype: 1e-6 is their noise.
        assert losses == pytest.approx(whole_losses, rel=1e-6)
        assert tiny.largest_difference(weights, whole) < 1e-6


@pytest.mark.parametrize("loss", loss_names())
def test_a_short_last_step_counts_its_own_rows(tmp_path, loss):
    """7 rows as micro-batches of 2, 3 accumulated: steps of 6 and of 1 row. A missing factor shows in the weights."""
    losses, weights = one_run(tmp_path, loss, None, torch.float64, 2, 3, n=7)
    whole_losses, whole = one_run(tmp_path, loss, None, torch.float64, 6, 1, n=7)
    assert losses == pytest.approx(whole_losses, rel=1e-6)
    assert tiny.largest_difference(weights, whole) < 1e-6
    _, wrong = one_run(tmp_path, loss, None, torch.float64, 6, 1, n=7, learning_rate=1.01e-2)
    assert tiny.largest_difference(wrong, weights) > 5e-6, "the comparison would not see a wrong scale"


def gpt2():
    """A model without float32 casts inside, so that float64 means float64."""
    torch.manual_seed(0)
    shape = {"vocab_size": tiny.VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 256}
    policy = Policy(GPT2LMHeadModel(GPT2Config(**shape)).double(), dtype=torch.float64)
    return Objective(policy, frozen_copy(policy), make_loss("dpo"))


def gradient(goal, batches):
    """The gradient of one step made of these batches, and its loss, in plain torch."""
    count = sum(batch.counts()["examples"] for batch in batches)
    goal.policy.model.zero_grad()
    total = 0.0
    for batch in batches:
        output = goal(batch)
        (output.total / count).backward()
        total += float(output.total.detach()) / count
    return total, {n: p.grad.clone() for n, p in goal.policy.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_padding_and_split_do_not_change_the_gradient(dtype):
    """float64 to 1e-12 and float32 to 1e-6: padding side, padding width, and 1x8, 2x4, 8x1."""
    goal = moved(gpt2())
    goal.policy.model.to(dtype)
    goal.reference.policy.model.to(dtype)
    goal.policy.dtype = goal.reference.policy.dtype = dtype
    tolerance = 1e-12 if dtype == torch.float64 else 1e-6
    examples = tiny.rows(8).examples
    whole_loss, whole = gradient(goal, [collate(examples)])
    assert whole_loss != pytest.approx(0.693147, abs=1e-3)
    variants = [
        [collate(examples, side="left")],
        [collate(examples, width=40)],
        [collate(examples, pad_id=7, side="left", width=33)],
        [collate(examples[:4]), collate(examples[4:])],
        [collate(examples[i : i + 2], side="left") for i in range(0, 8, 2)],
        [collate([example]) for example in examples],
    ]
    for batches in variants:
        loss, grads = gradient(goal, batches)
        assert loss == pytest.approx(whole_loss, abs=tolerance)
        assert tiny.largest_difference(grads, whole) < tolerance


@pytest.mark.parametrize("loss", loss_names())
@pytest.mark.parametrize("lora", [None, Lora(r=4, dropout=0.1, target_modules=("q_proj",))], ids=["full", "lora"])
def test_resumed_equals_uninterrupted_to_the_last_bit(tmp_path, loss, lora):
    """6 steps = 2, stop, 4 more; with an adapter's dropout, so that the random state matters, and with Adam's state."""
    fields = {"optim": "adamw_torch", "lr_scheduler_type": "linear", "per_device_train_batch_size": 1}
    data = tiny.rows(8, tiny.loss_layout(loss))

    def run(folder, stop_after=None, resume=None):
        goal = tiny.objective(loss, lora)
        fit = tiny.trainer(
            folder,
            goal,
            data,
            save_strategy="steps",
            save_steps=2,
            max_steps=6,
            gradient_accumulation_steps=3,
            **fields,
        )
        if stop_after:
            fit.add_callback(StopAfter(stop_after))
        fit.train(resume_from_checkpoint=resume)
        return tiny.weights(goal.policy.model), fit

    whole, _ = run(tmp_path / "whole")
    run(tmp_path / "parts", stop_after=2)
    resumed, fit = run(tmp_path / "parts", resume=True)
    assert fit.state.global_step == 6
    assert tiny.largest_difference(whole, resumed) == 0.0
    steps = [line["step"] for line in lines(tmp_path / "parts") if "loss" in line]
    assert steps == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("loss", ["dpo", "kto"])
def test_a_resume_between_two_entries_logs_what_an_uninterrupted_run_logs(tmp_path, loss):
    """Sums, counts and tokens of the steps before the checkpoint are part of the next entry and of the totals."""

    def run(folder, stop_after=None, resume=None):
        fit = tiny.trainer(
            folder, tiny.objective(loss), tiny.rows(11, tiny.loss_layout(loss)), save_strategy="steps", save_steps=3,
            max_steps=7, logging_steps=4, logging_first_step=False, learning_rate=0.5,
        )  # fmt: skip
        if stop_after:
            fit.add_callback(StopAfter(stop_after))
        output = fit.train(resume_from_checkpoint=resume)
        timed = ("per_second", "runtime", "flos")
        return output, [{k: v for k, v in e.items() if not any(t in k for t in timed)} for e in lines(folder)]

    whole, entries = run(tmp_path / "whole")
    assert [e["step"] for e in entries] == [4, 7, 7], "the last step is logged, too"
    run(tmp_path / "parts", stop_after=3)
    resumed, again = run(tmp_path / "parts", resume=True)
    assert again == entries
    # 6 steps of 2 rows and one of 1, weighed by their rows.
    assert whole.training_loss == resumed.training_loss == entries[-1]["train_loss"]
    rows = [8, 5]
    expected = sum(n * e["loss"] for n, e in zip(rows, entries, strict=False)) / sum(rows)
    assert whole.training_loss == pytest.approx(expected, rel=1e-6)


def test_going_on_from_an_adapter_resumes_to_the_last_bit_too(tmp_path):
    """The frozen copy of the starting adapter is made from the start again, not from the checkpoint."""
    torch.manual_seed(5)
    started = add_adapter(tiny.llama(), LORA)
    with torch.no_grad():
        for name, p in started.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.1)
    save_adapter(started, str(tmp_path / "start"))

    def run(folder, stop_after=None, resume=None):
        policy = Policy(load_adapter(tiny.llama(), str(tmp_path / "start")))
        goal = Objective(policy, default_reference(policy), make_loss("dpo"))
        assert goal.reference.kind == "adapter_start"
        fit = tiny.trainer(folder, goal, tiny.rows(8), save_strategy="steps", save_steps=2, max_steps=4)
        if stop_after:
            fit.add_callback(StopAfter(stop_after))
        fit.train(resume_from_checkpoint=resume)
        return tiny.weights(policy.model), lines(folder)[-2]["loss"]

    whole, loss = run(tmp_path / "whole")
    run(tmp_path / "parts", stop_after=2)
    resumed, resumed_loss = run(tmp_path / "parts", resume=True)
    assert tiny.largest_difference(whole, resumed) == 0.0
    assert loss == resumed_loss


class StopAfter(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= self.step


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
