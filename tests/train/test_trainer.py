"""Guards, metrics, evaluation, resume rules, checkpoints, and the loop without a trainer."""

from __future__ import annotations

import json
import math
import re
import time
from pathlib import Path

import pytest
import torch
from transformers import TrainerCallback, TrainingArguments

import tiny
from preftune.data import PreferenceDataset, collate
from preftune.errors import ConfigError, TrainingError
from preftune.losses import loss_names
from preftune.models import Lora
from preftune.train import PreferenceTrainer
from preftune.train.callbacks import Throughput
from preftune.train.identity import weights_checksum
from preftune.train.metrics import METRICS, Meter

LORA = Lora(r=4, target_modules=("q_proj", "v_proj"))


def entries(folder):
    return [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("loss", loss_names())
def test_every_loss_learns_and_reports(tmp_path, loss):
    data = tiny.rows(8, tiny.loss_layout(loss))
    fit = tiny.trainer(
        tmp_path, tiny.objective(loss, LORA), data, data, optim="adamw_torch", max_steps=20, learning_rate=3e-2,
        eval_strategy="steps", eval_steps=10, per_device_train_batch_size=8,
    )  # fmt: skip
    fit.train()
    written = entries(tmp_path)
    trained = [e for e in written if "loss" in e]
    assert trained[-1]["loss"] < trained[0]["loss"] - 0.05
    assert trained[-1]["rewards/accuracies"] == 1.0
    assert METRICS.keys() <= trained[-1].keys()
    assert {"tokens", "tokens_per_second", "grad_norm", "learning_rate"} <= trained[-1].keys()
    per_epoch = sum(len(e.prompt_ids) + len(c.ids) for e in data.examples for c in e.completions)
    assert [e["tokens"] for e in trained[:2]] == [per_epoch, 2 * per_epoch]
    evaluated = [e for e in written if "eval_loss" in e]
    assert [e["step"] for e in evaluated] == [10, 20]
    assert {f"eval_{name}" for name in METRICS} <= evaluated[-1].keys()


@pytest.mark.parametrize("loss", loss_names())
def test_evaluation_is_the_same_for_any_batch_size(tmp_path, loss):
    """B83: no row counted twice, no batch over-weighted, one baseline over the whole set."""
    goal = tiny.objective(loss, LORA, torch.float64)
    with torch.no_grad():
        for name, p in goal.policy.model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.3, generator=torch.Generator().manual_seed(0))
    data = tiny.rows(7, tiny.loss_layout(loss))
    results = []
    for batch in (1, 2, 3, 7):
        fit = tiny.trainer(tmp_path, goal, data, {"a": data, "b": data}, per_device_eval_batch_size=batch)
        results.append(fit.evaluate())
    for got in results[1:]:
        for name in METRICS:
            for part in ("a", "b"):
                key = f"eval_{part}_{name}"
                assert got[key] == pytest.approx(results[0][key], rel=1e-6, abs=1e-9)


def test_a_named_metric_picks_the_best_model(tmp_path):
    """B85."""
    data = tiny.rows(8)
    fit = tiny.trainer(
        tmp_path, tiny.objective("dpo", LORA), data, data, optim="adamw_torch", max_steps=4, eval_strategy="steps",
        eval_steps=2, save_strategy="steps", save_steps=2, load_best_model_at_end=True,
        metric_for_best_model="rewards/margins", greater_is_better=True,
    )  # fmt: skip
    fit.train()
    best = max((e for e in entries(tmp_path) if "eval_loss" in e), key=lambda e: e["eval_rewards/margins"])
    assert fit.state.best_metric == best["eval_rewards/margins"]
    assert fit.evaluate()["eval_rewards/margins"] == pytest.approx(best["eval_rewards/margins"], abs=1e-6)


def test_a_loss_that_is_not_finite_stops_the_run_naming_step_and_rows(tmp_path):
    """B52: never logged as 0; the weights keep their values."""
    goal = tiny.objective("dpo", LORA)
    fit = tiny.trainer(tmp_path, goal, tiny.rows(4), max_steps=3, gradient_accumulation_steps=2)

    class Poison(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            with torch.no_grad():
                next(p for n, p in goal.policy.model.named_parameters() if "lora_B" in n).fill_(float("inf"))
            self.weights = tiny.weights(goal.policy.model)

    poison = Poison()
    fit.add_callback(poison)
    with pytest.raises(TrainingError) as error:
        fit.train()
    assert str(error.value).startswith("step 2: loss not finite for ")
    assert all(f"rows:{i}" in str(error.value) for i in range(1, 5))
    after = tiny.weights(goal.policy.model)
    assert all(torch.equal(after[name], poison.weights[name]) for name in after)
    assert [e["step"] for e in entries(tmp_path) if "loss" in e] == [1]


def test_a_gradient_that_is_not_finite_stops_the_run(tmp_path):
    goal = tiny.objective("dpo", LORA)
    fit = tiny.trainer(tmp_path, goal, tiny.rows(2), max_steps=1, max_grad_norm=1.0)
    weight = next(p for n, p in goal.policy.model.named_parameters() if "lora_B" in n)
    weight.register_hook(lambda gradient: gradient * float("nan"))
    before = tiny.weights(goal.policy.model)
    with pytest.raises(TrainingError, match="step 1: gradient norm is nan; the optimizer's step was not taken"):
        fit.train()
    assert tiny.largest_difference(before, tiny.weights(goal.policy.model)) == 0.0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("neftune_noise_alpha", 5.0),
        ("label_smoothing_factor", 0.1),
        ("bf16", True),
        ("average_tokens_across_devices", False),
        ("dataloader_drop_last", True),
        ("torch_compile", True),
        ("use_liger_kernel", True),
        ("mixed_precision", "bf16"),
    ],
)
def test_arguments_made_without_preftune_are_refused_alike(tmp_path, name, value):
    args = tiny.arguments(tmp_path)
    setattr(args, name, value)
    with pytest.raises(ConfigError, match=name):
        PreferenceTrainer(tiny.objective("dpo", LORA), args, tiny.rows(4))


def test_arguments_that_would_lie_are_refused(tmp_path):
    goal, data = tiny.objective("dpo", LORA), tiny.rows(4)
    plain = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    with pytest.raises(ConfigError, match="logging_nan_inf_filter"):
        PreferenceTrainer(goal, plain, data)
    plain.logging_nan_inf_filter = False
    with pytest.raises(ConfigError, match="remove_unused_columns"):
        PreferenceTrainer(goal, plain, data)
    fine = tiny.trainer(tmp_path, goal, data)
    with pytest.raises(ConfigError, match=r"predict: .* use evaluate"):
        fine.predict(data)
    with pytest.raises(ConfigError, match="dpo takes paired rows, the data is unpaired"):
        tiny.trainer(tmp_path, goal, tiny.rows(4, "unpaired"))
    with pytest.raises(ConfigError, match="kto takes unpaired rows, the data is paired; use to_unpaired"):
        tiny.trainer(tmp_path, tiny.objective("kto", LORA), data)
    from dataclasses import replace

    alone = PreferenceDataset([replace(e, mismatched=None) for e in tiny.rows(4, "unpaired").examples])
    with pytest.raises(ConfigError, match="needs mismatched pairs"):
        tiny.trainer(tmp_path, tiny.objective("kto", LORA), alone)
    with pytest.raises(ConfigError, match="evaluation needs a PreferenceDataset"):
        tiny.trainer(tmp_path, goal, data).evaluate()


@pytest.fixture
def checkpoint(tmp_path):
    fit = tiny.trainer(
        tmp_path, tiny.objective("dpo", LORA), tiny.rows(4), max_steps=2, save_strategy="steps", save_steps=2
    )
    fit.train()
    return tmp_path


CHANGES = {
    "loss.beta: saved 0.1, now 0.2": lambda: (tiny.objective("dpo", LORA, beta=0.2), tiny.rows(4)),
    "loss.label_smoothing: saved 0.0, now 0.1": lambda: (
        tiny.objective("dpo", LORA, label_smoothing=0.1),
        tiny.rows(4),
    ),
    "data: saved": lambda: (tiny.objective("dpo", LORA), tiny.rows(4, seed=1)),
    "weights: saved": lambda: (tiny.objective("dpo", LORA, seed=3), tiny.rows(4)),
    "reference: saved the base model": lambda: (frozen_instead(), tiny.rows(4)),
}


def frozen_instead():
    from preftune.losses import make_loss
    from preftune.reference import frozen_copy
    from preftune.train import Objective

    policy = tiny.objective("dpo", LORA).policy
    return Objective(policy, frozen_copy(policy), make_loss("dpo"))


@pytest.mark.parametrize("words", CHANGES)
def test_resume_refuses_another_run_with_a_diff(checkpoint, words):
    """B90."""
    goal, data = CHANGES[words]()
    fit = tiny.trainer(checkpoint, goal, data, max_steps=4)
    with pytest.raises(ConfigError, match="this run is not the one that was saved") as error:
        fit.train(resume_from_checkpoint=True)
    assert words in str(error.value)


def test_nothing_left_to_do_is_said_and_no_step_is_taken(checkpoint, caplog):
    goal = tiny.objective("dpo", LORA)
    fit = tiny.trainer(checkpoint, goal, tiny.rows(4), max_steps=2)
    output = fit.train(resume_from_checkpoint=True)
    assert output.global_step == 2
    assert "nothing left to do" in caplog.text
    from safetensors.torch import load_file

    saved = load_file(checkpoint / "checkpoint-2" / "adapter_model.safetensors")
    for name, p in tiny.weights(goal.policy.model).items():
        assert torch.equal(saved[name.replace(".default.", ".")], p)


def test_resume_from_nowhere_is_refused(tmp_path):
    fit = tiny.trainer(tmp_path / "x", tiny.objective("dpo", LORA), tiny.rows(4), max_steps=2)
    with pytest.raises(ConfigError, match="no checkpoint to resume from"):
        fit.train(resume_from_checkpoint=True)
    with pytest.raises(ConfigError, match="no whole checkpoint of preftune"):
        fit.train(resume_from_checkpoint=str(tmp_path / "y"))


@pytest.mark.parametrize("damage", ["preftune_run.json", "trainer_state.json"])
@pytest.mark.parametrize("how", ["missing", "cut"])
def test_a_checkpoint_that_is_not_whole_is_passed_over(tmp_path, damage, how, caplog):
    def fit(steps):
        goal = tiny.objective("dpo", LORA)
        return tiny.trainer(tmp_path, goal, tiny.rows(4), max_steps=steps, save_strategy="steps", save_steps=2)

    fit(4).train()
    path = tmp_path / "checkpoint-4" / damage
    path.write_text(path.read_text()[:40])
    if how == "missing":
        path.unlink()
    again = fit(6)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 6
    assert re.search(r"checkpoint-4 is not a whole checkpoint \(.*\), passed over", caplog.text)
    (tmp_path / "checkpoint-6" / damage).unlink()
    with pytest.raises(ConfigError, match="no whole checkpoint of preftune"):
        fit(8).train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt"])
def test_a_checkpoint_without_the_optimizers_state_is_not_gone_on_from(tmp_path, name):
    """It would go on with a fresh one, to other weights, and say nothing; `save_only_model` leaves it out."""
    fields = {"save_strategy": "steps", "save_steps": 2}
    tiny.trainer(tmp_path, tiny.objective("dpo", LORA), tiny.rows(4), max_steps=2, **fields).train()
    (tmp_path / "checkpoint-2" / name).unlink()
    fit = tiny.trainer(tmp_path, tiny.objective("dpo", LORA), tiny.rows(4), max_steps=4, **fields)
    with pytest.raises(ConfigError, match=f"{name} is missing"):
        fit.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    with pytest.raises(ConfigError, match="no checkpoint to resume from"):
        fit.train(resume_from_checkpoint=True)


def other_reference(scale):
    """A policy with a frozen reference whose weights, but not whose name, depend on `scale`."""
    from preftune.losses import make_loss
    from preftune.models import Policy
    from preftune.reference import FrozenReference
    from preftune.train import Objective

    policy, twin = Policy(tiny.llama()), tiny.llama(1)
    twin.model.norm.weight.data.mul_(scale)
    return Objective(policy, FrozenReference(policy, Policy(twin), "the frozen model x"), make_loss("dpo"))


def test_resume_sees_a_reference_with_other_weights(tmp_path):
    fields = {"save_strategy": "steps", "save_steps": 2}
    tiny.trainer(tmp_path, other_reference(1.0), tiny.rows(4), max_steps=2, **fields).train()
    with pytest.raises(ConfigError, match="reference weights: saved"):
        tiny.trainer(tmp_path, other_reference(1.5), tiny.rows(4), max_steps=4).train(resume_from_checkpoint=True)
    tiny.trainer(tmp_path, other_reference(1.0), tiny.rows(4), max_steps=4).train(resume_from_checkpoint=True)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"per_device_train_batch_size": 1}, "rows per step .* saved 2, now 1"),
        ({"gradient_accumulation_steps": 3}, "rows per step .* saved 2, now 6"),
        ({"seed": 5}, r"order\.seed: saved 42, now 5"),
        ({"data_seed": 5}, r"order\.seed: saved 42, now 5"),
    ],
)
def test_resume_with_another_order_of_rows_is_refused(tmp_path, change, words):
    """Rows would be repeated and others never seen."""
    fields = {"save_strategy": "steps", "save_steps": 2}
    tiny.trainer(tmp_path, tiny.objective("dpo", LORA), tiny.rows(10), max_steps=2, **fields).train()
    fit = tiny.trainer(tmp_path, tiny.objective("dpo", LORA), tiny.rows(10), max_steps=4, **change)
    with pytest.raises(ConfigError, match=words):
        fit.train(resume_from_checkpoint=True)


def test_another_split_of_the_same_step_resumes_to_the_same_weights(tmp_path):
    results = []
    for split in (
        {"per_device_train_batch_size": 2},
        {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2},
    ):
        folder = tmp_path / str(len(results))
        fields = {"save_strategy": "steps", "save_steps": 2}
        tiny.trainer(folder, tiny.objective("dpo", LORA, torch.float64), tiny.rows(5), max_steps=2, **fields).train()
        goal = tiny.objective("dpo", LORA, torch.float64)
        tiny.trainer(folder, goal, tiny.rows(5), max_steps=5, **split).train(resume_from_checkpoint=True)
        results.append(tiny.weights(goal.policy.model))
    assert tiny.largest_difference(*results) < 1e-6


def test_the_logged_loss_is_the_sum_over_rows_over_their_count(tmp_path):
    """5 rows in steps of 4 and 1, logged once: each row weighs the same, as in the other metrics of the entry."""
    data = tiny.rows(5)
    each = tiny.trainer(
        tmp_path / "a", tiny.objective("dpo"), data, per_device_train_batch_size=4, max_steps=2, learning_rate=0.5
    )
    each.train()
    both = tiny.trainer(
        tmp_path / "b", tiny.objective("dpo"), data, per_device_train_batch_size=4, max_steps=2, learning_rate=0.5,
        logging_steps=2, logging_first_step=False,
    )  # fmt: skip
    both.train()
    four, one = [e["loss"] for e in entries(tmp_path / "a") if "loss" in e]
    assert abs(four - one) > 1e-3
    (logged,) = [e["loss"] for e in entries(tmp_path / "b") if "loss" in e]
    assert logged == pytest.approx((4 * four + one) / 5, rel=1e-6)


def test_time_spent_evaluating_is_not_training_time():
    clock = Throughput()
    clock.add(10)
    clock.pause()
    time.sleep(0.2)
    clock.resume()
    tokens, seconds = clock.read()
    assert tokens == 10
    assert seconds < 0.1


def test_gradient_checkpointing_changes_memory_only(tmp_path):
    results = []
    for on in (False, True):
        for lora in (None, LORA):
            goal = tiny.objective("dpo", lora)
            tiny.trainer(tmp_path, goal, tiny.rows(4), max_steps=2, activation_checkpointing=on).train()
            results.append(tiny.weights(goal.policy.model))
    assert tiny.largest_difference(results[0], results[2]) < 1e-6
    assert tiny.largest_difference(results[1], results[3]) < 1e-6


def test_the_checksum_sees_one_changed_bit_and_swapped_values():
    model = tiny.llama()
    base = weights_checksum(model)
    assert weights_checksum(tiny.llama()) == base
    weight = model.model.norm.weight.data
    weight[3] = torch.nextafter(weight[3], torch.tensor(2.0))
    changed = weights_checksum(model)
    weight[3], weight[5] = weight[5].clone(), weight[3].clone()
    assert len({base, changed, weights_checksum(model)}) == 3


def test_metrics_with_no_count_are_left_out():
    meter = Meter()
    one, zero = torch.tensor(1.0), torch.tensor(0.0)
    meter.add({"a": (one, zero), "b": (one, torch.tensor(4.0))})
    meter.add({"a": (zero, zero), "b": (one, torch.tensor(4.0))})
    assert meter.read() == {"b": 0.25}
    assert meter.read() == {}


def test_a_nan_metric_is_never_shown_as_a_number():
    meter = Meter()
    meter.add({"a": (torch.tensor(float("nan")), torch.tensor(2.0))})
    assert math.isnan(meter.read()["a"])


def test_the_objective_runs_in_a_plain_loop():
    """The ten lines in docs/loop.md are this test."""
    text = (Path(__file__).parents[2] / "docs" / "loop.md").read_text()
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL).group(1)
    loop = code[code.index("optimizer =") :]
    assert len(loop.strip().splitlines()) <= 10
    goal, data = tiny.objective("dpo", LORA), tiny.rows(8)
    names = {"objective": goal, "rows": data, "torch": torch, "preftune": __import__("preftune")}
    before = float(goal(collate(data.examples)).total.detach()) / 8
    exec(loop, names)
    after = float(goal(collate(data.examples)).total.detach()) / 8
    assert before == pytest.approx(math.log(2), abs=1e-6)
    assert after < before
