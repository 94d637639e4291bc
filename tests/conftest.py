"""Shared set-up: one thread, shapes checked at run time, a tiny Llama and a tiny tokenizer."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from jaxtyping import install_import_hook

# Every annotated shape in these modules is checked at each call while the tests run.
SHAPED = ("ops.token_logps", "ops.module", "ops.segments", "ops.token_kl", "losses")
install_import_hook([f"preftune.{name}" for name in SHAPED], "beartype.beartype")

import pytest
import torch

import tiny
from preftune.assets import cache_dir


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory, monkeypatch):
    """What a test stores is its own; what was fetched once is the user's."""
    folder = tmp_path_factory.mktemp("cache")
    fetched = cache_dir() / "demo"
    fetched.mkdir(parents=True, exist_ok=True)
    (folder / "demo").symlink_to(fetched)
    monkeypatch.setenv("PREFTUNE_CACHE", str(folder))
    return folder


@pytest.fixture
def tokenizer():
    return tiny.tokenizer()


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """TINY saved as a folder with its tokenizer, as a user's model would be."""
    folder = tmp_path_factory.mktemp("tiny-model")
    tiny.llama().save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder
