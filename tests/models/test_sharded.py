"""Sharded and replicated heads: two gloo ranks give the gradients of one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import sharded
import torch

import tiny

SCRIPT = Path(sharded.__file__)


@pytest.mark.distributed
def test_two_ranks_have_the_gradients_of_one(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    result = subprocess.run(
        [*command, str(SCRIPT), str(tmp_path)], capture_output=True, text=True, timeout=240, env=environment
    )
    assert result.returncode == 0, result.stderr[-3000:]
    found = torch.load(tmp_path / "gradients.pt")
    assert len(found) == len(sharded.CASES) == 15
    for case, got in found.items():
        expected = sharded.gradients("none", *case[1:])
        assert all(bool(gradient.any()) for gradient in expected.values())
        assert tiny.largest_difference(got, expected) < 1e-7, case
