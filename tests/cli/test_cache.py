"""`preftune precompute` and `preftune cache`."""

from __future__ import annotations

import json

import pytest
from command import run

from preftune.reference import stores_folder
from preftune.reference.store import shards_in


@pytest.fixture
def filled(project, capsys):
    code, out, err = run(capsys, "precompute", project / "run.yaml", "--json")
    assert code == 0, err
    return project, json.loads(out)


def test_what_is_precomputed_is_found_by_training(filled, capsys):
    project, done = filled
    assert done["rows"] == done["computed"] == 20
    assert done["hits"] == 0
    again = json.loads(run(capsys, "precompute", project / "run.yaml", "--json", "training.learning_rate=1")[1])
    assert (again["computed"], again["hits"], again["namespace"]) == (0, 20, done["namespace"])
    code, out, err = run(capsys, "train", project / "run.yaml", "loss.beta=0.3", "training.seed=4", "data.seed=0")
    assert code == 0, err
    assert "reference values: 20 of 20 rows were stored, 0 computed here" in out
    assert "8 stored rows computed again: at most" in out
    code, out, _ = run(capsys, "train", project / "run.yaml", "model.adapter=null", "overwrite=true")
    assert "20 of 20 rows were stored" in out, "the same base, whole: the same values"
    code, out, _ = run(capsys, "precompute", project / "run.yaml", "model.dtype=bfloat16")
    assert "new namespace" in out
    assert "compute dtype: float32, now bfloat16" in out


def test_what_keeps_nothing_is_refused(project, capsys, monkeypatch):
    code, _, err = run(capsys, "precompute", project / "run.yaml", "reference.kind=adapter_off")
    assert code == 2
    assert "adapter_off keeps no values" in err

    def fail(path, content):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("preftune.reference.store.write_whole", fail)
    code, _, err = run(capsys, "precompute", project / "run.yaml")
    assert code == 2
    assert "cannot be kept (Read-only file system)" in err


def test_the_stores_are_listed_shown_verified_and_removed(filled, capsys):
    identity = filled[1]["namespace"]
    code, out, _ = run(capsys, "cache", "ls")
    assert code == 0
    assert identity[:12] in out
    assert "20 rows" in out
    assert json.loads(run(capsys, "cache", "ls", "--json")[1])[0]["rows"] == 20
    shown = json.loads(run(capsys, "cache", "show", identity[:6], "--json")[1])
    assert shown["facts"]["class"] == "LlamaForCausalLM"
    assert "rms_norm_eps" in run(capsys, "cache", "show", identity[:6])[1]
    code, _, err = run(capsys, "cache", "show", "zz")
    assert code == 2
    assert "no store begins with that" in err
    code, out, _ = run(capsys, "cache", "verify")
    assert (code, "1 of 1 shards are whole" in out) == (0, True)
    shard = shards_in(stores_folder() / identity)[0]
    shard.write_bytes(shard.read_bytes()[:-9])
    assert run(capsys, "cache", "verify", identity)[0] == 1
    assert "removed 0 of 1 stores" in run(capsys, "cache", "prune")[1]
    assert run(capsys, "cache", "prune", identity, "--all")[0] == 2
    assert "removed 1 of 1 stores" in run(capsys, "cache", "prune", identity[:8])[1]
    assert not (stores_folder() / identity).exists()


def test_a_store_travels_in_one_file(filled, capsys, tmp_path, monkeypatch):
    project, done = filled
    target = tmp_path / "store.tar"
    assert run(capsys, "cache", "export", done["namespace"][:8], target)[0] == 0
    monkeypatch.setenv("PREFTUNE_CACHE", str(tmp_path / "other machine"))
    code, out, _ = run(capsys, "cache", "import", target)
    assert (code, "1 shards added" in out) == (0, True)
    assert "0 shards added" in run(capsys, "cache", "import", target)[1]
    assert json.loads(run(capsys, "precompute", project / "run.yaml", "--json")[1])["hits"] == 20
    content = bytearray(target.read_bytes())
    content[content.index(b"ARROW1") + 300] ^= 1
    target.write_bytes(content)
    code, _, err = run(capsys, "cache", "import", target)
    assert code == 2
    assert "is damaged" in err
    target.write_text("no tar")
    assert "no export of preftune" in run(capsys, "cache", "import", target)[2]
