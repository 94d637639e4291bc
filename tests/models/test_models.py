"""Heads of several architectures, dropout, adapters, loading."""

from __future__ import annotations

import copy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers

import tiny
from preftune.data import collate
from preftune.errors import ModelError
from preftune.models import Lora, Policy, head, load_policy
from preftune.models.adapters import adapter_state, add_adapter
from preftune.models.head import describe_head, install, use_own_head, uses_own_head
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
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT = {"vocab_size": tiny.VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 256}
GPT |= {"bos_token_id": 1, "eos_token_id": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "num_local_experts": 4, "moe_intermediate_size": 32}
MAMBA = {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 16}
HYBRID = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8}
# Scale, divisor and soft cap of the head are set to values that matter.
ARCHITECTURES = {
    "Bloom": {"vocab_size": tiny.VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 2},
    "Cohere": SMALL | {"logit_scale": 0.25},
    "Cohere2": SMALL | {"logit_scale": 0.25},
    "Ernie4_5": SMALL,
    "FalconH1": SMALL | HYBRID | {"lm_head_multiplier": 0.5},
    "GPT2": GPT,
    "GPTJ": GPT | {"rotary_dim": 8},
    "GPTNeoX": SMALL,
    "Gemma": SMALL,
    "Gemma2": SMALL | {"final_logit_softcapping": 2.0},
    "Gemma3": SMALL | {"final_logit_softcapping": 2.0},
    "Glm4": SMALL,
    "GptOss": SMALL | EXPERTS,
    "Granite": SMALL | {"logits_scaling": 8.0},
    "HyperCLOVAX": SMALL | {"logits_scaling": 0.5},
    "Llama": SMALL,
    "Mamba2": {key: SMALL[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers")} | MAMBA,
    "MiniCPM3": SMALL | LATENT | {"dim_model_base": 16},
    "Mistral": SMALL,
    "Mixtral": SMALL | EXPERTS,
    "OPT": SMALL | {"ffn_dim": 64, "word_embed_proj_dim": 16},
    "Olmo2": SMALL,
    "Phi": SMALL,
    "Phi3": SMALL,
    "Qwen2": SMALL,
    "Qwen3": SMALL,
    "Qwen3Moe": SMALL | EXPERTS,
    "SmolLM3": SMALL,
    "StableLm": SMALL,
    "Starcoder2": SMALL,
}
CONFIG = {"Gemma3": "Gemma3TextConfig"}
MODEL = {"GPT2": "GPT2LMHeadModel"}


def make(name, seed=0):
    config = getattr(transformers, CONFIG.get(name, f"{name}Config"))(**ARCHITECTURES[name])
    torch.manual_seed(seed)
    model = getattr(transformers, MODEL.get(name, f"{name}ForCausalLM"))(config)
    with torch.no_grad():
        head = model.get_output_embeddings()
        head.weight.mul_(20)  # large enough that a missed scale or cap is nats away
        if head.bias is not None:
            head.bias.normal_()
    return model


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_fused_equals_the_models_own_logits(name):
    """B76: soft cap, scale, divisor and bias of the head, known for each of these without falling back."""
    policy = Policy(make(name))
    assert policy.self_check(collate(tiny.rows(2).examples)) < 1e-4
    assert not uses_own_head(policy.model)


@pytest.mark.parametrize("name", sorted(ARCHITECTURES.keys() - {"OPT"}))
def test_the_models_own_head_gives_the_same_chunk_by_chunk(name):
    """The fall-back for a head that is not known; OPT's backbone is reached by another way, so it has none."""
    policy = Policy(make(name))
    use_own_head(policy.model)
    assert policy.self_check(collate(tiny.rows(2).examples)) < 1e-4


SETTINGS = [
    ("Gemma2", "final_logit_softcapping"),
    ("Granite", "logits_scaling"),
    ("Cohere", "logit_scale"),
    ("FalconH1", "lm_head_multiplier"),
]


def test_the_check_asks_for_few_logits(monkeypatch):
    """Not for those of a long prompt."""
    model = make("Llama")
    sizes = []
    model.lm_head.register_forward_hook(lambda module, args, out: sizes.append(out.shape[:-1].numel()))
    row = replace(tiny.rows(1, longest=40).examples[0], prompt_ids=tuple(range(5, 205)))
    policy = Policy(model)
    assert policy.self_check(collate([row])) < 1e-4
    assert sizes
    assert max(sizes) <= 32


@pytest.mark.parametrize(("name", "setting"), SETTINGS)
def test_an_unknown_head_falls_back_to_the_models_own_and_says_so(name, setting, monkeypatch, caplog):
    """Never silently another number: the values are right, and the gradients are those of the known head."""
    batch = collate(tiny.rows(3).examples)
    known = Policy(make(name))
    values = known.sequence_logps(batch)
    values.sum().backward()
    expected = tiny.gradients(known.model)
    original = head._after_head

    def blind(config):
        return original(SimpleNamespace(**{k: v for k, v in config.to_dict().items() if k != setting}))

    monkeypatch.setattr(head, "_after_head", blind)
    policy = Policy(make(name))
    assert policy.self_check(batch) < 1e-4
    assert uses_own_head(policy.model)
    assert "the model's own head is applied instead" in caplog.text
    torch.testing.assert_close(policy.sequence_logps(batch), values)
    policy.sequence_logps(batch).sum().backward()
    assert tiny.largest_difference(tiny.gradients(policy.model), expected) < 1e-4


def test_a_model_that_agrees_with_neither_is_refused():
    model = tiny.llama()
    policy = Policy(model)
    # As a wrapper around the model would that changes logits after its forward.
    model.register_forward_hook(
        lambda module, args, out: out if "token_logps" in out else type(out)(logits=2 * out.logits)
    )
    with pytest.raises(ModelError, match="differ from the model's own logits"):
        policy.self_check(collate(tiny.rows(2).examples))


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
    inner = model.get_base_model()
    assert describe_head(inner).weight is None, "run as a module"
    with adapter_state(model, None):
        assert describe_head(inner).weight is inner.lm_head.base_layer.weight
        torch.testing.assert_close(policy.sequence_logps(batch), Policy(tiny.llama()).sequence_logps(batch))


@pytest.mark.parametrize("dora", [False, True])
def test_an_adapter_on_a_tied_head_and_embedding_has_the_gradients_of_the_whole_logits(dora):
    """The gradient of the tied weight comes from both ends; those of the adapter from the head."""
    torch.manual_seed(3)
    model = add_adapter(
        tiny.llama(dtype=torch.float64, tie_word_embeddings=True),
        Lora(r=4, target_modules=("q_proj", "lm_head"), use_dora=dora),
    ).double()
    model.get_base_model().get_input_embeddings().weight.requires_grad_()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.1)
    policy, batch = Policy(model), collate(tiny.rows(3).examples)
    fused = torch.autograd.grad(policy.sequence_logps(batch).sum(), list_of(model))
    inputs = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
    logps = model(**inputs, position_ids=batch.position_ids).logits.flatten(0, 1)[batch.positions].log_softmax(-1)
    naive = torch.autograd.grad(logps.gather(-1, batch.targets[:, None]).sum(), list_of(model))
    assert len(fused) == 1 + 2 * 3 + (3 if dora else 0) - 0
    for got, expected in zip(fused, naive, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)
        assert got.abs().sum() > 0


def list_of(model):
    return [p for p in model.parameters() if p.requires_grad]


def test_a_batch_without_a_token_to_score_is_a_differentiable_zero():
    policy = Policy(tiny.llama())
    batch = collate(tiny.rows(2).examples)
    nothing = replace(
        batch, positions=batch.positions[:0], targets=batch.targets[:0], lengths=torch.zeros_like(batch.lengths)
    )
    values = policy.sequence_logps(nothing)
    assert values.tolist() == [0.0] * 4
    values.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in policy.model.parameters())


@pytest.mark.slow
def test_a_compiled_model_scores_as_the_eager_one():
    script = Path(__file__).with_name("compiled.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout.split()[0]) > 0, "something was compiled"


def test_extras_come_out_of_the_models_forward():
    policy = Policy(make("Gemma2"))
    batch = collate(tiny.rows(2).examples)
    logps, extras = policy.token_extras(batch)
    assert torch.equal(logps, policy.token_logps(batch))
    with torch.no_grad():
        logits = policy.model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits
    p = logits.flatten(0, 1)[batch.positions].log_softmax(-1)
    torch.testing.assert_close(extras.entropy, -(p.exp() * p).sum(-1), rtol=1e-4, atol=1e-4)
    assert torch.equal(extras.is_top, p.argmax(-1) == batch.targets)


def test_a_saved_head_module_is_used_and_trained():
    model = add_adapter(tiny.llama(), Lora(r=4, target_modules=("q_proj",), modules_to_save=("lm_head",)))
    policy = Policy(model)
    batch = collate(tiny.rows(2).examples)
    assert policy.self_check(batch) < 1e-4
    assert describe_head(model.get_base_model()).weight is model.get_base_model().lm_head.modules_to_save.default.weight
    with adapter_state(model, None):
        assert describe_head(model.get_base_model()).weight is model.get_base_model().lm_head.original_module.weight
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
