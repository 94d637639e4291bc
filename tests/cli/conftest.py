"""A project as a user would have it."""

from __future__ import annotations

import json

import pytest
import yaml
from command import turn


@pytest.fixture
def project(tmp_path, tiny_folder):
    """A folder with paired and unpaired data and a run file, as a user's would be."""
    words = ["cat", "mat", "sky", "sea", "film", "blue", "green", "what", "sat", "like"]
    pairs = [
        {
            "prompt": [turn("user", f"the {word}")],
            "chosen": [turn("assistant", f"is {word}")],
            "rejected": [turn("assistant", "no")],
        }
        for word in words
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    config = {
        "model": {"name": str(tiny_folder), "dtype": "float32", "adapter": {"r": 4, "target_modules": ["q_proj"]}},
        "data": {"train": str(tmp_path / "pairs.jsonl"), "eval": 0.2, "max_length": 128},
        "loss": {"name": "dpo", "beta": 0.1},
        "training": {"use_cpu": True, "max_steps": 4, "logging_steps": 1, "learning_rate": 1e-2, "eval_strategy": "no"},
        "output_dir": str(tmp_path / "out"),
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    return tmp_path
