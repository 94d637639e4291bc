"""Every recipe runs: its configuration here, a few real steps on the real model and records as a slow test."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from preftune.cli import main
from preftune.config import load_config

RECIPES = sorted((Path(__file__).parents[1] / "recipes").glob("*.yaml"))


def test_there_are_recipes():
    assert {"smollm2-dpo-lora", "smollm2-kto-lora"} <= {path.stem for path in RECIPES}


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_recipe_is_valid(path):
    config = load_config(path)
    assert config.output_dir == f"runs/{path.stem}"


@pytest.mark.slow
@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_recipe_trains_on_its_real_records(path, tmp_path, capsys):
    overrides = [
        f"output_dir={tmp_path / 'out'}", "data.max_length=320", "training.max_steps=3", "training.logging_steps=1",
        "training.eval_strategy=steps", "training.eval_steps=3", "training.gradient_accumulation_steps=2",
    ]  # fmt: skip
    with pytest.raises(SystemExit) as stop:
        main(["train", str(path), *overrides])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert "of 300 rows" in out or "of 2" in out
    entries = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    trained = [entry for entry in entries if "loss" in entry]
    first = 0.693147 if "dpo" in path.stem else 0.5
    assert trained[0]["loss"] == pytest.approx(first, abs=1e-5)
    assert trained[0]["rewards/chosen"] == 0.0
    assert len(trained) == 3
    assert any("eval_rewards/accuracies" in entry for entry in entries)
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()
