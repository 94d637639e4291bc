"""The model card: front matter that YAML reads back, and code that loads the model."""

from __future__ import annotations

import re

import pytest
import yaml

from preftune.report import model_card

FACTS = {"reference": "the base model, with the adapter switched off", "loss": "dpo (beta 0.1)", "data": "a | b\n<c>"}


def card(**changes) -> str:
    given = {
        "name": "my-run",
        "base_model": "owner/base",
        "adapter": True,
        "loss": "dpo",
        "facts": FACTS,
        "figures": {"rewards/accuracies": 0.7134, "kl": -12.5},
    }
    return model_card(**{**given, **changes})


def front(text: str) -> dict:
    assert text.startswith("---\n")
    return yaml.safe_load(text[4 : text.index("\n---\n\n# ")])


def code(text: str) -> str:
    (found,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    return found


def test_front_matter():
    assert front(card()) == {
        "base_model": "owner/base",
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "tags": ["preftune", "dpo", "lora"],
    }
    full = card(adapter=False, loss="kto", license="apache-2.0", datasets=["o/d"], tags=["x", "kto"])
    assert front(full) == {
        "base_model": "owner/base",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "license": "apache-2.0",
        "datasets": ["o/d"],
        "tags": ["preftune", "kto", "x"],
    }


def test_front_matter_is_escaped():
    nasty = "a: b\n---\n# \"c\" 'd' {e}"
    found = front(card(license=nasty, datasets=["yes", "1.0"], tags=[nasty]))
    assert found["license"] == nasty
    assert found["datasets"] == ["yes", "1.0"]
    assert found["tags"][-1] == nasty


def test_a_folder_is_no_name_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "base").mkdir(parents=True)
    for base in ("/data/base", "./base", "models/base", "C:\\base", "x" * 5000):
        text = card(base_model=base)
        assert "base_model" not in front(text)
        assert f"An adapter for `{base}`" in text


def test_facts_and_figures_are_tables():
    text = card()
    assert "| reference | the base model, with the adapter switched off |" in text
    assert "| loss | dpo (beta 0.1) |" in text
    assert r"| data | a \| b \<c> |" in text
    assert "| rewards/accuracies | 0.7134 |" in text
    assert "| kl | -12.5 |" in text
    assert "## Final figures" not in card(figures={})
    assert "## The run" not in card(facts={})


def test_the_base_is_loaded_at_its_revision():
    assert 'from_pretrained("owner/base", revision="abc", dtype="auto")' in code(card(revision="abc"))
    assert "revision" not in code(card())


def test_names_in_code_are_quoted():
    compile(code(card(name='a"b\\c', base_model='x"y\nz')), "card", "exec")
    assert "PeftModel" not in code(card(adapter=False))


@pytest.mark.parametrize("adapter", [True, False])
def test_the_code_loads_what_was_saved(adapter, tiny_folder, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tiny_folder)
    if adapter:
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    else:
        with torch.no_grad():
            next(model.parameters()).add_(0.1)
    model.save_pretrained(tmp_path / "out")
    AutoTokenizer.from_pretrained(tiny_folder).save_pretrained(tmp_path / "out")
    names: dict = {}
    exec(code(card(name=str(tmp_path / "out"), base_model=str(tiny_folder), adapter=adapter)), names)
    ids = torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        assert torch.equal(names["model"].eval()(ids).logits, model.eval()(ids).logits)
    assert len(names["tokenizer"]) == len(AutoTokenizer.from_pretrained(tiny_folder))
