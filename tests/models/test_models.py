"""Heads of several architectures, dropout, adapters, loading."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers

import tiny
from preftune.data import collate
from preftune.errors import ModelError
from preftune.models import Lora, Policy, load_policy
from preftune.models.adapters import add_adapter
from preftune.models.head import install
from preftune.models.load import load_config

SMALL = {
    "vocab_size": tiny.VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}
GPT2 = {"vocab_size": tiny.VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 256}
ARCHITECTURES = {
    "Llama": SMALL,
    "Qwen2": SMALL,
    "Qwen3": SMALL,
    "Mistral": SMALL,
    "Gemma2": SMALL | {"final_logit_softcapping": 2.0},
    "Phi": SMALL,
    "Granite": SMALL | {"logits_scaling": 8.0},
    "Cohere": SMALL | {"logit_scale": 0.25},
    "Olmo2": SMALL,
    "StarCoder2": SMALL,
    "GPT2": GPT2,
    "GPTNeoX": SMALL,
}
CLASS = {"StarCoder2": "Starcoder2", "GPT2": "GPT2LMHead"}


def make(name, seed=0):
    stem = CLASS.get(name, name)
    config = getattr(transformers, f"{stem.removesuffix('LMHead')}Config")(**ARCHITECTURES[name])
    cls = "GPT2LMHeadModel" if name == "GPT2" else f"{stem}ForCausalLM"
    torch.manual_seed(seed)
    model = getattr(transformers, cls)(config)
    with torch.no_grad():
        head = model.get_output_embeddings()
        head.weight.mul_(20)  # large enough that a missed scale or cap is nats away
        if head.bias is not None:
            head.bias.normal_()
    return model


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_fused_equals_the_models_own_logits(name):
    """B76: soft cap, scale, divisor and bias of the head."""
    policy = Policy(make(name))
    assert policy.self_check(collate(tiny.rows(2).examples)) < 1e-4


@pytest.mark.parametrize(
    ("name", "setting"),
    [("Gemma2", "final_logit_softcapping"), ("Granite", "logits_scaling"), ("Cohere", "logit_scale")],
)
def test_the_self_check_refuses_what_it_does_not_know(name, setting):
    """A head whose scale or cap is not found is an error, never silently another number."""
    model = make(name)
    policy = Policy(model)
    backbone = copy.deepcopy(model.config)

    class Blind:
        """The configuration without the setting, as that of an unknown architecture would be."""

        def __getattr__(self, key):
            if key == setting:
                return None
            return getattr(backbone, key)

    from preftune.models import head

    original = head._after_head
    head._after_head = lambda config: original(Blind())
    try:
        with pytest.raises(ModelError, match="differ from the model's own logits"):
            policy.self_check(collate(tiny.rows(2).examples))
    finally:
        head._after_head = original


def test_an_adapter_on_the_head_is_used_and_trained():
    """B72."""
    model = add_adapter(tiny.llama(), Lora(r=4, target_modules=("q_proj", "lm_head")))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_()
    policy = Policy(model)
    batch = collate(tiny.rows(2).examples)
    assert policy.self_check(batch) < 1e-4
    policy.sequence_logps(batch).sum().backward()
    assert all(p.grad.abs().sum() > 0 for n, p in model.named_parameters() if "lm_head" in n and "lora" in n)


def test_a_saved_head_module_is_used_and_trained():
    model = add_adapter(tiny.llama(), Lora(r=4, target_modules=("q_proj",), modules_to_save=("lm_head",)))
    policy = Policy(model)
    batch = collate(tiny.rows(2).examples)
    assert policy.self_check(batch) < 1e-4
    policy.sequence_logps(batch).sum().backward()
    assert any("modules_to_save" in n and p.grad is not None for n, p in model.named_parameters())


def test_without_positions_to_score_the_model_is_its_own():
    model = tiny.llama()
    ids = torch.randint(5, 200, (2, 7))
    expected = model(input_ids=ids).logits
    install(model)
    install(model)
    assert torch.equal(model(input_ids=ids).logits, expected)
    assert model.generate(ids, max_new_tokens=3, do_sample=False).shape == (2, 10)


def test_a_copy_calls_its_own_layers():
    policy = Policy(tiny.llama())
    twin = Policy(copy.deepcopy(policy.model))
    batch = collate(tiny.rows(2).examples)
    before = policy.sequence_logps(batch)
    with torch.no_grad():
        twin.model.model.embed_tokens.weight.zero_()
    assert torch.equal(policy.sequence_logps(batch), before)
    assert not torch.equal(twin.sequence_logps(batch), before)


def test_left_padding_needs_positions():
    """B87c: GPT-2's positions are absolute; a left-padded row scores as it does alone."""
    policy = Policy(make("GPT2"))
    examples = tiny.rows(4).examples
    batched = policy.sequence_logps(collate(examples, side="left"))
    alone = torch.cat([policy.sequence_logps(collate([e])) for e in examples])
    torch.testing.assert_close(batched, alone, rtol=0, atol=2e-4)


def test_dropout_is_off_also_where_it_is_a_number():
    """B50: attention dropout is handed to a function; the saved configuration keeps its value."""
    model = tiny.llama(attention_dropout=0.3)
    policy = Policy(model)
    batch = collate(tiny.rows(4).examples)
    model.train()
    assert torch.equal(policy.sequence_logps(batch), policy.sequence_logps(batch))
    assert model.config.attention_dropout == 0.3
    asked = Policy(tiny.llama(attention_dropout=0.3), dropout=True)
    asked.model.train()
    assert not torch.equal(asked.sequence_logps(batch), asked.sequence_logps(batch))


def test_dropout_that_cannot_be_switched_off_is_refused():
    model = tiny.llama()
    hook = lambda module, args, out: torch.nn.functional.dropout(out, 0.5, module.training)  # noqa: E731
    model.model.embed_tokens.register_forward_hook(hook)
    with pytest.raises(ModelError, match="dropout could not be switched off"):
        Policy(model).self_check(collate(tiny.rows(2).examples))


def test_weights_that_no_gradient_reaches_are_refused():
    """B66: a layer that cuts the graph would leave the loss at ln 2 for ever."""
    model = add_adapter(tiny.llama(), Lora(r=4, target_modules=("q_proj",)))
    model.get_base_model().model.norm.register_forward_hook(lambda module, args, out: out.detach())
    policy = Policy(model)
    with pytest.raises(ModelError, match="no gradient reaches the 4 trained weights"):
        policy.self_check(collate(tiny.rows(2).examples))


def test_the_self_check_leaves_gradients_and_random_state_alone():
    policy = Policy(add_adapter(tiny.llama(), Lora(r=4, dropout=0.5, target_modules=("q_proj",))))
    state = torch.get_rng_state()
    policy.self_check(collate(tiny.rows(2).examples))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in policy.model.parameters())


def test_float16_is_not_trained_in():
    """B52."""
    with pytest.raises(ModelError, match="float16 is not trained in"):
        Policy(tiny.llama(dtype=torch.float16))


def test_trained_weights_are_stored_in_float32(tiny_folder):
    full = load_policy(str(tiny_folder), dtype="bfloat16")
    assert {p.dtype for p in full.model.parameters()} == {torch.float32}
    lora = load_policy(str(tiny_folder), dtype="bfloat16", adapter=Lora(r=4))
    assert {p.dtype for p in lora.model.parameters() if p.requires_grad} == {torch.float32}
    assert {p.dtype for p in lora.model.parameters() if not p.requires_grad} == {torch.bfloat16}
    with pytest.warns(UserWarning, match="rounded away"):
        pure = load_policy(str(tiny_folder), dtype="bfloat16", trainable_dtype="bfloat16")
    assert {p.dtype for p in pure.model.parameters()} == {torch.bfloat16}


def test_all_linear_leaves_the_head_alone(tiny_folder):
    policy = load_policy(str(tiny_folder), dtype="float32", adapter=Lora())
    assert not any("lm_head" in n for n, p in policy.model.named_parameters() if p.requires_grad)


def test_loading_errors_say_what_to_do(tiny_folder, tmp_path, monkeypatch):
    with pytest.raises(ModelError, match=r"model\.name: 'nobody/nothing': no such folder or model on the hub"):
        load_policy("nobody/nothing")
    with pytest.raises(ModelError, match=r"is a folder without a config\.json"):
        load_policy(str(tmp_path))
    with pytest.raises(ModelError, match=r"linear layers of this model: .*q_proj"):
        load_policy(str(tiny_folder), adapter=Lora(target_modules=("query",)))
    with pytest.raises(ModelError, match=r"model\.adapter\.path: no adapter"):
        load_policy(str(tiny_folder), adapter=str(tmp_path))
    with pytest.raises(ModelError, match="quantized weights cannot be trained"):
        load_policy(str(tiny_folder), load_in_4bit=True)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)  # as where bitsandbytes is not installed
    with pytest.raises(ModelError, match=r"pip install 'preftune\[quantized\]'"):
        load_policy(str(tiny_folder), load_in_4bit=True, adapter=Lora())


def test_models_that_see_and_models_without_a_head_are_refused(tmp_path):
    transformers.LlavaConfig().save_pretrained(tmp_path / "seeing")
    with pytest.raises(ModelError, match="takes images or sound"):
        load_config(str(tmp_path / "seeing"))
    transformers.T5Config().save_pretrained(tmp_path / "t5")
    with pytest.raises(ModelError, match="is not a causal language model"):
        load_config(str(tmp_path / "t5"))
    with pytest.raises(ModelError, match="backbone without a head"):
        install(tiny.llama().model)
