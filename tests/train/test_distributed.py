"""Two gloo ranks are one process: same weights, same losses, same metrics."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tiny

SCRIPT = Path(__file__).parent / "ranks.py"


def start(folder: Path, ranks: int, *arguments: str):
    folder.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    result = subprocess.run(
        [*command, str(SCRIPT), str(folder), *arguments], capture_output=True, text=True, timeout=240, env=environment
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads((folder / "entries.json").read_text()), torch.load(folder / "weights.pt")


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("loss", "lora", "rows", "two", "one"),
    [
        ("dpo", "full", "7", ("2", "2"), ("4", "2")),  # odd rows: a short last micro-batch, a filler
        ("dpo", "lora", "8", ("2", "2"), ("8", "1")),
        ("kto", "lora", "7", ("1", "3"), ("6", "1")),
        ("kto", "full", "5", ("2", "1"), ("1", "4")),  # the last step has one row: one rank holds a filler only
    ],
)
def test_two_ranks_equal_one(tmp_path, loss, lora, rows, two, one):
    entries, weights = start(tmp_path / "two", 2, loss, lora, rows, *two)
    expected, whole = start(tmp_path / "one", 1, loss, lora, rows, *one)
    # TINY computes norms in float32 inside; 1e-6 is that noise, a missing factor of 2 is not.
    assert tiny.largest_difference(weights, whole) < 1e-6
    for got, want in zip(entries, expected, strict=True):
        assert got.keys() == want.keys()
        for name, value in want.items():
            assert got[name] == pytest.approx(value, rel=2e-5, abs=2e-6), name


@pytest.mark.distributed
def test_one_class_per_rank_neither_hangs_nor_loses_a_class(tmp_path):
    """B81, B82."""
    entries, weights = start(tmp_path / "two", 2, "kto", "lora", "5", "2", "1", "one-class")
    expected, whole = start(tmp_path / "one", 1, "kto", "lora", "5", "4", "1", "one-class")
    assert tiny.largest_difference(weights, whole) < 1e-6
    assert {"eval_rewards/chosen", "eval_rewards/rejected"} <= entries[-1].keys()
    assert entries[-1]["eval_rewards/chosen"] == pytest.approx(expected[-1]["eval_rewards/chosen"], abs=1e-6)


@pytest.mark.distributed
def test_rows_with_nothing_to_borrow_do_not_hang_the_other_rank(tmp_path):
    """Every rank makes the same number of forwards, also for a micro-batch without a mismatched pair."""
    entries, weights = start(tmp_path / "two", 2, "kto", "lora", "6", "1", "2", "half")
    expected, whole = start(tmp_path / "one", 1, "kto", "lora", "6", "4", "1", "half")
    assert tiny.largest_difference(weights, whole) < 1e-6
    assert entries[0]["kl"] == pytest.approx(expected[0]["kl"], abs=1e-6)


@pytest.mark.distributed
@pytest.mark.parametrize(("loss", "lora"), [("dpo", "full"), ("kto", "lora")])
def test_two_ranks_compute_each_reference_value_once(tmp_path, monkeypatch, loss, lora):
    monkeypatch.setenv("PREFTUNE_CACHE", str(tmp_path / "cache of two"))
    entries, weights = start(tmp_path / "two", 2, loss, lora, "9", "2", "1", "cached")
    monkeypatch.setenv("PREFTUNE_CACHE", str(tmp_path / "cache of one"))
    expected, whole = start(tmp_path / "one", 1, loss, lora, "9", "4", "1", "cached")
    assert entries[-1]["computed"] == entries[-1]["asked"] == expected[-1]["computed"] == 18
    assert tiny.largest_difference(weights, whole) < 1e-6
    assert entries[-1]["eval_loss"] == pytest.approx(expected[-1]["eval_loss"], abs=1e-6)
