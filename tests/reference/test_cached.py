"""The cached reference: equal to the live one, computed once, and never another's value."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

import tiny
from preftune.data import PreferenceDataset, collate
from preftune.errors import CacheError, ModelError
from preftune.losses import make_loss
from preftune.models import Lora, Policy
from preftune.models.adapters import add_adapter
from preftune.reference import (
    AdapterOff,
    CachedReference,
    FrozenReference,
    StartingPolicy,
    default_reference,
    starting_reference,
)
from preftune.reference.keys import namespace_of
from preftune.reference.ranks import Team, wait_for
from preftune.reference.weights import Loaded, digest_of, remembered_digest, tensors_of
from preftune.train import Objective

LORA = Lora(r=4, target_modules=("q_proj", "v_proj"))
CPU = torch.device("cpu")


def adapted(seed=0, lora=LORA, **config):
    model = tiny.llama(seed, **config)
    torch.manual_seed(seed + 1)
    return Policy(add_adapter(model, lora))


def frozen(model, **kwargs):
    """A cached reference of another model, with how often it is asked."""
    policy = Policy(model)
    source = FrozenReference(Policy(tiny.llama(9)), policy)
    asked = []
    own = source.token_logps
    source.token_logps = lambda batch, model=None: (asked.append(batch.n_completions), own(batch, model))[1]
    kwargs.setdefault("verify_rows", 0)
    return CachedReference(source, keep_source=True, **kwargs), asked


def computed(reference, data):
    reference.prepare([data], CPU, quiet=True)
    return reference.work.rows


def sums(reference, data):
    return reference.sequence_logps(collate(data.examples))


@pytest.mark.parametrize("loss", ["dpo", "kto"])
@pytest.mark.parametrize("lora", [LORA, None])
def test_training_from_the_cache_is_training_with_the_live_reference(tmp_path, loss, lora):
    data = tiny.rows(9, tiny.loss_layout(loss))
    later = tiny.rows(5, tiny.loss_layout(loss), seed=3)

    def train(folder, cached):
        goal = tiny.objective(loss, lora)
        if cached:
            goal = Objective(goal.policy, CachedReference(starting_reference(goal.policy)), make_loss(loss))
        sets = {"same": data, "other": later}
        fit = tiny.trainer(folder, goal, data, sets, max_steps=6, gradient_accumulation_steps=2)
        fit.train()
        entries = [*fit.state.log_history, fit.evaluate()]
        return [e for e in entries if "train_runtime" not in e], tiny.weights(goal.policy.model)

    live, expected = train(tmp_path / "live", False)
    for turn in ("fills", "finds"):
        entries, weights = train(tmp_path / turn, True)
        assert tiny.largest_difference(weights, expected) < 1e-6
        for got, want in zip(entries, live, strict=True):
            for name in (n for n in want if "rewards" in n or "loss" in n or n.endswith("kl")):
                assert got[name] == pytest.approx(want[name], rel=1e-5, abs=2e-6), name


def test_each_row_is_computed_once_and_one_more_row_computes_one():
    data = tiny.rows(500, longest=4)
    distinct = len({k for e in data.examples for k in collate([e]).keys})
    reference, asked = frozen(tiny.llama())
    assert computed(reference, data) == distinct == sum(asked)
    more = PreferenceDataset([*data.examples, *tiny.rows(1, seed=77).examples])
    again, asked = frozen(tiny.llama())
    assert computed(again, more) == 2 == sum(asked), "the two completions of the new pair"
    shuffled = random.Random(0).sample(data.examples, 500)
    for part in (data.examples[::-1], shuffled, data.examples[:250]):
        other, asked = frozen(tiny.llama())
        assert computed(other, PreferenceDataset(part)) == 0 == sum(asked)
    assert torch.equal(sums(other, data), sums(reference, data))


def test_unpaired_rows_and_pairs_share_their_rows():
    pairs = tiny.rows(6)
    reference, _ = frozen(tiny.llama())
    computed(reference, pairs)
    single = [replace(e, completions=e.completions[:1], label=True) for e in pairs.examples]
    other, _ = frozen(tiny.llama())
    assert computed(other, PreferenceDataset(single)) == 0


def test_stored_values_are_those_of_the_model_row_by_row():
    """A row alone is what it is beside longer ones."""
    data = tiny.rows(20, longest=40)
    reference, _ = frozen(tiny.llama(), per_token=True)
    computed(reference, data)
    policy = Policy(tiny.llama())
    for example in data.examples:
        batch = collate([example])
        with torch.no_grad():
            torch.testing.assert_close(reference.token_logps(batch), policy.token_logps(batch), rtol=0, atol=1e-5)


def identity(policy, adapter=None):
    return namespace_of(policy, adapter, "words").id


CHANGES = {
    "one element": lambda p: p.model.model.layers[1].mlp.up_proj.weight.data[3, 5].add_(1e-3),
    "two elements swapped": lambda p: p.model.model.norm.weight.data.__setitem__(slice(0, 2), torch.tensor([1.5, 1.0])),
    "rope theta": lambda p: p.model.config.rope_parameters.__setitem__("rope_theta", 2e4),
    "soft cap": lambda p: setattr(p.model.config, "final_logit_softcapping", 30.0),
    "norm eps": lambda p: setattr(p.model.config, "rms_norm_eps", 1e-5),
    "attention": lambda p: setattr(p.model.config, "_attn_implementation", "eager"),
    "compute dtype": lambda p: setattr(p, "dtype", torch.bfloat16),
    "stored dtype": lambda p: p.model.to(torch.float64),
    "a buffer": lambda p: p.model.model.rotary_emb.inv_freq.mul_(2),
}
SAME = {
    "pad token": lambda p: setattr(p.model.config, "pad_token_id", 7),
    "dropout": lambda p: setattr(p.model.config, "attention_dropout", 0.3),
    "cache": lambda p: setattr(p.model.config, "use_cache", False),
    "name": lambda p: setattr(p.model.config, "_name_or_path", "elsewhere"),
    "training mode": lambda p: p.model.train(),
    "frozen": lambda p: p.model.requires_grad_(False),
}


@pytest.mark.parametrize("change", list(CHANGES))
def test_what_changes_a_value_changes_the_namespace(change):
    policy = Policy(tiny.llama())
    before = identity(policy)
    CHANGES[change](policy)
    assert identity(policy) != before


@pytest.mark.parametrize("change", list(SAME))
def test_what_changes_no_value_keeps_the_namespace(change):
    policy = Policy(tiny.llama())
    before = identity(policy)
    SAME[change](policy)
    assert identity(policy) == before


def test_an_adapter_is_part_of_it_only_where_it_does_something():
    base = identity(Policy(tiny.llama()))
    for lora in (LORA, Lora(r=4, target_modules=("embed_tokens", "q_proj"), modules_to_save=("lm_head",))):
        policy = adapted(lora=lora)
        assert identity(policy) == base, "switched off"
    policy = adapted()
    assert identity(policy, "default") == base, "fresh: it changes nothing"
    layer = next(m for m in policy.model.modules() if hasattr(m, "lora_B") and m.lora_B)
    layer.lora_B["default"].weight.data[0, 0] = 0.5
    moved = identity(policy, "default")
    assert moved != base
    layer.scaling["default"] = 99.0
    policy.model.peft_config["default"].lora_alpha = 99
    assert identity(policy, "default") not in (base, moved)


def test_the_log_says_why_a_namespace_is_new():
    data = tiny.rows(3)
    reference, _ = frozen(tiny.llama())
    computed(reference, data)
    assert "the first here" in "\n".join(reference.account)
    other, _ = frozen(tiny.llama(rms_norm_eps=1e-5))
    assert computed(other, data) == 6
    assert "config.rms_norm_eps: 1e-06, now 1e-05" in "\n".join(other.account)
    same, _ = frozen(tiny.llama(), verify_rows=4)
    assert computed(same, data) == 0
    said = "\n".join(same.account)
    assert "6 of 6 rows were stored, 0 computed" in said
    assert "4 stored rows computed again: at most" in said
    assert "saved about" in said
    assert "new namespace" not in said


def test_a_wrong_value_stops_the_run_with_both_values():
    data = tiny.rows(4)
    reference, _ = frozen(tiny.llama())
    computed(reference, data)
    other, _ = frozen(tiny.llama(), verify_rows=8)
    other.store._index.logps -= 1.0
    with pytest.raises(CacheError, match=r"stored, -\d+\.\d+ computed, for \d+ tokens .8 of 8 rows.*reference\.rehash"):
        computed(other, data)


def test_filling_touches_no_random_state_and_no_mode():
    """B65: policy dropout stays out of it."""
    policy = adapted(lora=Lora(r=4, target_modules=("q_proj",), dropout=0.5))
    for m in policy.model.modules():
        if hasattr(m, "lora_B") and m.lora_B:
            m.lora_B["default"].weight.data.normal_()
    policy.model.train()
    data = tiny.rows(6)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    reference = CachedReference(StartingPolicy(policy))
    computed(reference, data)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()
    assert (before[2] == np.random.get_state()[1]).all()
    assert policy.model.training
    first = sums(reference, data)
    policy.model.eval()
    with torch.no_grad():
        torch.testing.assert_close(first, policy.sequence_logps(collate(data.examples)), rtol=0, atol=1e-5)


def test_the_starting_policy_answers_only_before_it_moves():
    policy = Policy(tiny.llama())
    reference = CachedReference(StartingPolicy(policy))
    with pytest.raises(ModelError, match=r"call reference\.prepare"):
        sums(reference, tiny.rows(2))
    computed(reference, tiny.rows(2))
    with pytest.raises(ModelError, match="the model has moved since it was the reference"):
        computed(reference, tiny.rows(2, seed=5))
    assert computed(reference, tiny.rows(2)) == 0


def test_a_frozen_model_is_let_go_of_and_rows_that_come_later_are_refused():
    reference = CachedReference(FrozenReference(Policy(tiny.llama(9)), Policy(tiny.llama())))
    computed(reference, tiny.rows(2))
    assert reference.owned is None
    assert sums(reference, tiny.rows(2)).shape == (4,)
    with pytest.raises(ModelError, match="keep it with keep_source=True"):
        sums(reference, tiny.rows(2, seed=5))


def test_rows_of_a_stream_are_looked_up_and_filled_as_they_come():
    """B63."""
    policy = adapted()
    data = tiny.rows(6)
    live = AdapterOff(policy)
    for turn in range(2):
        reference = CachedReference(AdapterOff(policy))
        for example in data.examples:
            batch = collate([example])
            torch.testing.assert_close(reference.sequence_logps(batch), live.sequence_logps(batch), rtol=0, atol=1e-5)
        assert len(reference._late) == (12 if turn == 0 else 0)
        reference.flush()


def test_an_evaluation_set_that_comes_late_is_computed(tmp_path):
    """B60."""
    data, late = tiny.rows(4), tiny.rows(4, seed=8)
    goal = tiny.objective("dpo", LORA)
    live = tiny.trainer(tmp_path / "a", goal, data).evaluate(late)
    cached = Objective(goal.policy, CachedReference(AdapterOff(goal.policy)), make_loss("dpo"))
    fit = tiny.trainer(tmp_path / "b", cached, data)
    assert fit.evaluate(late)["eval_loss"] == pytest.approx(live["eval_loss"], abs=1e-6)
    assert cached.reference.work.rows == 8


def test_training_makes_no_forward_of_the_reference(tmp_path):
    """B64."""
    goal = tiny.objective("dpo", LORA)
    source = AdapterOff(goal.policy)
    cached = Objective(goal.policy, CachedReference(source), make_loss("dpo"))
    fit = tiny.trainer(tmp_path, cached, tiny.rows(4), tiny.rows(3, seed=2), max_steps=4)
    source.active = None  # any use from here on fails
    fit.train()
    fit.evaluate()


@pytest.mark.parametrize("kind", ["full disk", "read-only"])
def test_a_run_goes_on_where_nothing_can_be_kept(monkeypatch, kind):
    code = 28 if kind == "full disk" else 30

    def fail(path, content):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("preftune.reference.store.write_whole", fail)
    reference, _ = frozen(tiny.llama())
    data = tiny.rows(3)
    assert computed(reference, data) == 6
    assert os.strerror(code) in "\n".join(reference.account)
    assert sums(reference, data).isfinite().all()


def test_the_memo_of_files_is_trusted_only_while_they_are_the_same(tmp_path):
    folder = tmp_path / "model"
    tiny.llama().save_pretrained(folder)
    hashed = []

    def compute():
        hashed.append(1)
        return "digest"

    def ask(wait=True, **kwargs):
        loaded = Loaded.begin(str(folder), None, dtype="float32")
        if wait:
            loaded = replace(loaded, began=time.time() + 60)  # as if the files were a minute old
        remembered_digest(loaded, compute, **kwargs)
        return len(hashed)

    assert [ask(wait=False), ask(wait=False)] == [1, 2], "files this new are not trusted"
    assert [ask(), ask(), ask()] == [3, 3, 3]
    assert ask(rehash=True) == 4
    path = folder / "model.safetensors"
    content = path.read_bytes()
    stamps = path.stat()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    os.utime(path, ns=(stamps.st_atime_ns, stamps.st_mtime_ns))  # size and mtime as before: ctime tells
    assert ask() == 5
    assert remembered_digest(None, compute) == "digest"
    assert len(hashed) == 6


def test_the_digest_covers_names_shapes_dtypes_and_bytes():
    a = torch.arange(6.0)
    digests = {
        digest_of({"w": a}), digest_of({"v": a}), digest_of({"w": a.view(2, 3)}), digest_of({"w": a.double()}),
        digest_of({"w": a.flip(0)}), digest_of({"w": a.view(torch.int32)}), digest_of({}),
    }  # fmt: skip
    assert len(digests) == 7
    assert digest_of({"a": a, "b": a + 1}) == digest_of({"b": a + 1, "a": a.clone()})
    assert digest_of({"w": torch.arange(12.0)[::2]}) == digest_of({"w": a * 2})
    base, extra = tensors_of(adapted().model, "default")
    assert base.keys() == tensors_of(tiny.llama(), None)[0].keys()
    assert len(extra) == 8


def test_ranks_deal_rows_by_key_and_wait_for_files():
    keys = [k for e in tiny.rows(50).examples for k in collate([e]).keys]
    shares = [[k for k in keys if Team(3, place).owns(k)] for place in range(3)]
    assert sorted(k for share in shares for k in share) == sorted(keys)
    assert min(map(len, shares)) > 15
    arriving = iter([3, 3, 0])
    assert wait_for(lambda: next(arriving), lambda: 1, patience=5) == 0
    assert wait_for(lambda: 2, lambda: 0, patience=0.3) == 2


FILL = """
import sys, torch
sys.path.insert(0, sys.argv[1])
import tiny
import preftune.reference.fill as fill
from preftune.models import Policy
from preftune.reference import CachedReference, FrozenReference
torch.set_num_threads(1)
fill.TOKENS_PER_BATCH, fill.COMMIT_EVERY = 64, 0.0
reference = CachedReference(FrozenReference(Policy(tiny.llama(9)), Policy(tiny.llama())), keep_source=True)
reference.prepare([tiny.rows(300)], torch.device("cpu"), quiet=True)
"""


def test_a_run_killed_at_any_moment_keeps_what_it_committed():
    rng = random.Random(1)
    tests = os.path.dirname(os.path.dirname(__file__))
    data = tiny.rows(300)
    before: dict[bytes, float] = {}
    reference, _ = frozen(tiny.llama())
    keys = list({k for e in data.examples for k in collate([e]).keys})
    folder = reference.store.folder
    for _ in range(10):
        process = subprocess.Popen([sys.executable, "-c", FILL, tests])
        end = time.monotonic() + 60
        while not folder.exists() and time.monotonic() < end and process.poll() is None:
            time.sleep(0.02)
        seen = len(list(folder.glob("*.arrow")))
        end = time.monotonic() + 30
        while len(list(folder.glob("*.arrow"))) < seen + 3 and process.poll() is None and time.monotonic() < end:
            time.sleep(0.005)
        time.sleep(rng.random() / 10)
        process.send_signal(signal.SIGKILL)
        process.wait()
        reference.store.refresh()
        found = reference.store.find(keys)
        now = {k: float(v) for k, v, known in zip(keys, found.logps, found.known, strict=True) if known}
        assert all(now[k] == v for k, v in before.items()), "committed values are untouched"
        assert len(now) >= len(before)
        before = now
    assert before
    fresh, _ = frozen(tiny.llama())
    assert computed(fresh, data) == len(keys) - len(before)
    policy = Policy(tiny.llama())
    batch = collate(data.examples)
    with torch.no_grad():
        apart = (sums(fresh, data) - policy.sequence_logps(batch)).abs() / batch.lengths
    assert float(apart.max()) < 1e-5


def test_default_and_starting_reference_say_the_same():
    policy = adapted()
    assert default_reference(policy).describe() == starting_reference(policy).describe()


LONG = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
LONG |= {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 16.0}


@pytest.mark.parametrize(("rope", "positions", "kind"), [(LONG, 64, "longrope"), (DYNAMIC, 16, "dynamic")])
def test_rows_on_both_sides_of_a_switch_of_positions_are_refused(tmp_path, rope, positions, kind):
    """Beside a longer row a short one would have another log-probability than alone."""

    def goal():
        policy = Policy(tiny.llama(rope_parameters=dict(rope), max_position_embeddings=positions))
        return Objective(policy, CachedReference(starting_reference(policy)), make_loss("dpo"))

    short = tiny.rows(4, longest=6)
    mixed = PreferenceDataset([*short.examples, *tiny.rows(4, longest=40).examples])
    assert max(len(row) for e in mixed.examples for row in e.rows()) > 16 > len(short.examples[0].rows()[0])
    with pytest.raises(ModelError, match=rf"{kind} positions: rows of more than 16 tokens.*data\.max_length: 16"):
        tiny.trainer(tmp_path, goal(), mixed)
    tiny.trainer(tmp_path, goal(), short, max_steps=2).train()
    alone, beside = (goal().policy.sequence_logps(collate(e))[:8] for e in (short.examples, mixed.examples))
    assert float((alone - beside).abs().max()) > 1e-4, "this is what is refused"
