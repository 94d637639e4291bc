"""References: exactly the starting policy, frozen, and apart from what is trained."""

from __future__ import annotations

import math

import pytest
import torch

import tiny
from preftune.data import collate
from preftune.errors import ConfigError, ModelError
from preftune.losses import make_loss
from preftune.models import Lora, Policy
from preftune.models.adapters import add_adapter, load_adapter, save_adapter, starts_at_base
from preftune.reference import (
    AdapterOff,
    AdapterStart,
    FrozenReference,
    NoReference,
    default_reference,
    frozen_copy,
)
from preftune.train import Objective

LORA = Lora(r=4, target_modules=("q_proj", "v_proj"))


def trained_adapter(folder, lora=LORA):
    """An adapter that has learnt something, saved."""
    torch.manual_seed(5)
    model = add_adapter(tiny.llama(), lora)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.1)
    save_adapter(model, str(folder))
    return str(folder)


STARTS = {
    "lora": lambda folder: add_adapter(tiny.llama(), LORA),
    "dora": lambda folder: add_adapter(tiny.llama(), Lora(r=4, target_modules=("q_proj",), use_dora=True)),
    "dropout": lambda folder: add_adapter(tiny.llama(), Lora(r=4, dropout=0.5, target_modules=("q_proj",))),
    "saved adapter": lambda folder: load_adapter(tiny.llama(), trained_adapter(folder)),
    "saved dora": lambda folder: load_adapter(
        tiny.llama(), trained_adapter(folder, Lora(r=4, target_modules=("q_proj",), use_dora=True))
    ),
    "full": lambda folder: tiny.llama(),
    "full with dropout": lambda folder: tiny.llama(attention_dropout=0.3),
    "biases": lambda folder: add_adapter(tiny.llama(attention_bias=True), Lora(r=4, bias="all")),
    "head saved": lambda folder: add_adapter(
        tiny.llama(), Lora(r=4, target_modules=("q_proj",), modules_to_save=("lm_head",))
    ),
}
KIND = {
    "saved adapter": "adapter_start",
    "saved dora": "adapter_start",
    "full": "frozen",
    "full with dropout": "frozen",
    "biases": "frozen",
}


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("loss", ["dpo", "kto"])
def test_at_lr_0_every_margin_is_exactly_0(tmp_path, start, loss):
    """B50, B69: through the real Trainer, loss ln 2 (DPO) or 1/2 (KTO) at every step, rewards exactly 0."""
    goal = Objective(p := Policy(STARTS[start](tmp_path / "adapter")), default_reference(p), make_loss(loss))
    assert goal.reference.kind == KIND.get(start, "adapter_off")
    fit = tiny.trainer(tmp_path, goal, tiny.rows(6, tiny.loss_layout(loss)), learning_rate=0.0, max_steps=4)
    fit.train()
    entries = [entry for entry in fit.state.log_history if "loss" in entry]
    assert len(entries) == 4
    for entry in entries:
        assert entry["rewards/margins"] == 0.0
        assert entry["rewards/chosen"] == 0.0
        assert entry["kl"] == 0.0
        assert entry["loss"] == pytest.approx(math.log(2) if loss == "dpo" else 0.5, abs=1e-7)
        if "dropout" not in start or start == "full with dropout":
            assert entry["grad_norm"] > 0


def test_dropout_of_an_adapter_does_not_reach_the_reference(tmp_path):
    """B65: eval mode during the pass, modes restored after."""
    model = load_adapter(tiny.llama(), trained_adapter(tmp_path, Lora(r=4, dropout=0.5, target_modules=("q_proj",))))
    policy = Policy(model)
    reference = default_reference(policy)
    batch = collate(tiny.rows(4).examples)
    model.train()
    modes = [m.training for m in model.modules()]
    first = reference.sequence_logps(batch)
    assert torch.equal(first, reference.sequence_logps(batch))
    assert [m.training for m in model.modules()] == modes
    assert not torch.equal(policy.sequence_logps(batch), policy.sequence_logps(batch)), "the policy's stays on"


@pytest.mark.parametrize("start", STARTS)
def test_the_reference_does_not_move_with_training(tmp_path, start):
    """B70: biases and other weights that switching the adapter off does not undo."""
    policy = Policy(STARTS[start](tmp_path / "adapter"))
    goal = Objective(policy, default_reference(policy), make_loss("dpo"))
    batch = collate(tiny.rows(4).examples)
    before = goal.reference.sequence_logps(batch)
    tiny.trainer(tmp_path, goal, tiny.rows(6), optim="adamw_torch", learning_rate=0.05, max_steps=5).train()
    assert torch.equal(goal.reference.sequence_logps(batch), before)
    policy.model.eval()
    assert float((policy.sequence_logps(batch).detach() - before).abs().max()) > 1e-3


def test_the_saved_result_is_the_trained_adapter_alone(tmp_path):
    """B90f: no reference folder inside, and plain peft loads the trained policy."""
    import peft

    policy = Policy(load_adapter(tiny.llama(), trained_adapter(tmp_path / "start")))
    goal = Objective(policy, default_reference(policy), make_loss("dpo"))
    fit = tiny.trainer(tmp_path / "run", goal, tiny.rows(6), max_steps=3, save_strategy="steps", save_steps=3)
    fit.train()
    fit.save_model(str(tmp_path / "out"))
    batch = collate(tiny.rows(4).examples)
    for folder in (tmp_path / "out", tmp_path / "run" / "checkpoint-3"):
        assert not (folder / "reference").exists()
        again = Policy(peft.PeftModel.from_pretrained(tiny.llama(), folder))
        policy.model.eval()
        torch.testing.assert_close(again.sequence_logps(batch), policy.sequence_logps(batch), rtol=0, atol=1e-5)


def test_adapter_off_refuses_what_it_does_not_undo():
    """B70, F02."""
    model = add_adapter(tiny.llama(attention_bias=True), Lora(r=4, bias="all"))
    with pytest.raises(ModelError, match=r"would share \d+ trained weights with the policy, such as .*bias"):
        AdapterOff(Policy(model))
    plain = add_adapter(tiny.llama(), LORA)
    plain.get_base_model().model.norm.weight.requires_grad_(True)
    with pytest.raises(ModelError, match=r"norm\.weight"):
        AdapterOff(Policy(plain))


def test_adapter_off_is_an_explicit_choice_for_a_saved_adapter(tmp_path):
    """B69: then the reference is the raw base, and its description says so."""
    policy = Policy(load_adapter(tiny.llama(), trained_adapter(tmp_path)))
    reference = AdapterOff(policy)
    batch = collate(tiny.rows(4).examples)
    torch.testing.assert_close(reference.sequence_logps(batch), Policy(tiny.llama()).sequence_logps(batch).detach())
    assert "adapter switched off" in reference.describe()
    assert "as it was at the start" in AdapterStart(policy).describe()


def test_what_counts_as_a_fresh_adapter():
    """B = 0 is not enough: DoRA's magnitudes may have moved; and an adapter on embeddings starts with A = 0."""
    dora = add_adapter(tiny.llama(), Lora(r=4, target_modules=("q_proj",), use_dora=True))
    assert starts_at_base(dora)
    narrow = tiny.llama(dtype=torch.bfloat16)
    assert starts_at_base(add_adapter(narrow, Lora(r=4, target_modules=("q_proj",), use_dora=True)))
    layer = next(m for m in dora.modules() if getattr(m, "lora_magnitude_vector", None))
    layer.lora_magnitude_vector["default"].weight.data[3] *= 1.1
    assert not starts_at_base(dora)
    assert default_reference(Policy(dora)).kind == "adapter_start"
    assert starts_at_base(add_adapter(tiny.llama(), Lora(r=4, target_modules=("embed_tokens", "q_proj"))))


def test_a_reference_that_is_the_policy_is_refused():
    """B66."""
    policy = Policy(tiny.llama())
    with pytest.raises(ModelError, match="shares trainable weights with the policy"):
        FrozenReference(policy, policy)
    twin = tiny.llama(1)
    twin.model.embed_tokens.weight = policy.model.model.embed_tokens.weight
    with pytest.raises(ModelError, match=r"such as model\.embed_tokens\.weight"):
        FrozenReference(policy, Policy(twin))


def test_a_reference_of_another_language_is_refused():
    policy = Policy(tiny.llama(), tiny.tokenizer())
    with pytest.raises(ModelError, match="its vocabulary has 300 tokens, the policy's 280"):
        FrozenReference(policy, Policy(tiny.llama(vocab_size=300), tiny.tokenizer()))
    other = tiny.tokenizer()
    other.add_tokens(["new"])
    with pytest.raises(ModelError, match="another tokenizer than the policy's"):
        FrozenReference(policy, Policy(tiny.llama(1), other))


def test_a_frozen_reference_is_frozen():
    policy = Policy(tiny.llama())
    reference = frozen_copy(policy)
    assert not any(p.requires_grad for p in reference.policy.model.parameters())
    assert not reference.policy.model.training


def test_what_needs_a_reference_refuses_none_and_nothing_to_train_is_refused():
    policy = Policy(tiny.llama())
    with pytest.raises(ConfigError, match="dpo needs a reference"):
        Objective(policy, NoReference(), make_loss("dpo"))
    reference = frozen_copy(policy)
    policy.model.requires_grad_(False)
    with pytest.raises(ConfigError, match="nothing to train"):
        Objective(policy, reference, make_loss("dpo"))
    with pytest.raises(ModelError, match=r"adapter_off needs model\.adapter"):
        AdapterOff(policy)
