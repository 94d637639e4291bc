"""The store on disk: nothing wrong is read, nothing is lost, any number may write."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import numpy as np
import pytest

from preftune.data.keys import row_key
from preftune.errors import CacheError
from preftune.reference.store import ASIDE, Effort, LogpStore, ScoredRow, remove_scratch, shards_in
from preftune.types import Completion, Row


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def scored(*numbers: int, tokens: int = 3) -> list[ScoredRow]:
    return [ScoredRow(key(n), np.full(tokens, -float(n), np.float32)) for n in numbers]


def test_a_row_key_depends_on_ids_split_and_mask_only():
    def of(prompt, ids, mask=None):
        return row_key(Row(tuple(prompt), Completion(tuple(ids), tuple(mask or [True] * len(ids)))))

    same = of([1, 2], [3, 4])
    assert of([1, 2], [3, 4]) == same
    assert len(same) == 16
    others = [of([1], [2, 3, 4]), of([1, 2, 3], [4]), of([2, 1], [3, 4]), of([1, 2], [4, 3]), of([1, 2], [3, 4, 4])]
    others += [of([1, 2], [3, 4], [True, False]), of([1, 2], [3, 4], [False, True]), of([1, 258], [3, 4])]
    assert len({same, *others}) == 1 + len(others)


def test_what_is_committed_is_read_back_by_another_store(tmp_path):
    first = LogpStore(tmp_path / "s", per_token=True)
    first.commit(scored(5, 1), Effort(10, 0.5))
    first.commit(scored(9, tokens=2), Effort(4, 0.1))
    for per_token in (False, True):
        again = LogpStore(tmp_path / "s", per_token)
        found = again.find([key(9), key(2), key(1)])
        assert found.known.tolist() == [True, False, True]
        assert found.logps[[0, 2]].tolist() == [-18.0, -3.0]
        assert np.isnan(found.logps[1])
        assert found.tokens.tolist() == [2, 0, 3]
        assert again.effort.tokens == 14
    assert [v.tolist() for v in again.token_logps([key(9), key(5)])] == [[-9, -9], [-5, -5, -5]]


def test_a_row_without_values_per_token_is_unknown_where_they_are_asked_for(tmp_path):
    LogpStore(tmp_path).commit(scored(1), Effort())
    assert LogpStore(tmp_path).find([key(1)]).known.all()
    detailed = LogpStore(tmp_path, per_token=True)
    assert not detailed.find([key(1)]).known.any()
    detailed.commit(scored(1), Effort())
    assert LogpStore(tmp_path, per_token=True).token_logps([key(1)])[0].tolist() == [-1, -1, -1]


def test_keys_that_share_their_first_half_are_told_apart(tmp_path):
    store = LogpStore(tmp_path)
    near = [bytes(8) + n.to_bytes(8, "little") for n in range(5)]
    store.commit([ScoredRow(k, np.array([-float(i)], np.float32)) for i, k in enumerate(near[:4])], Effort())
    found = store.find([near[3], near[4], near[0], near[2]])
    assert found.known.tolist() == [True, False, True, True]
    assert found.logps[[0, 2, 3]].tolist() == [-3, 0, -2]


@pytest.mark.parametrize("damage", ["flip", "cut", "empty"])
def test_a_damaged_shard_is_set_aside_and_the_rest_is_read(tmp_path, damage, caplog):
    store = LogpStore(tmp_path)
    store.commit(scored(*range(100)), Effort())
    store.commit(scored(*range(100, 200)), Effort())
    path = shards_in(tmp_path)[0]
    content = bytearray(path.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 1
    path.write_bytes(content if damage == "flip" else content[: len(content) // 2 if damage == "cut" else 0])
    again = LogpStore(tmp_path)
    assert len(again) == 100
    assert "damaged" in caplog.text
    assert (tmp_path / ASIDE / path.name).exists()
    assert len(shards_in(tmp_path)) == 1


def test_a_file_that_is_being_written_is_no_shard(tmp_path):
    LogpStore(tmp_path).commit(scored(1), Effort())
    left = tmp_path / f".{shards_in(tmp_path)[0].name}.0a1b2c3d"
    left.write_bytes(b"half")
    assert len(LogpStore(tmp_path)) == 1
    assert remove_scratch(tmp_path) == 0, "it may be a writer at work"
    os.utime(left, (1, 1))
    assert remove_scratch(tmp_path) == 4
    assert not left.exists()


def test_a_folder_that_cannot_be_written_is_told_and_the_values_stay_in_memory(tmp_path, monkeypatch):
    store = LogpStore(tmp_path)
    store.commit(scored(1), Effort())

    def full(path, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("preftune.reference.store.write_whole", full)
    with pytest.raises(CacheError, match=r"No space left on device.*make room there, or set reference\.cache_dir"):
        store.commit(scored(2), Effort())
    assert store.find([key(1), key(2)]).known.all()
    assert len(LogpStore(tmp_path)) == 1


def test_a_million_rows_open_and_answer_at_once(tmp_path):
    rng = np.random.default_rng(0)
    raw = rng.bytes(16 * 1_000_000)
    keys = [raw[i : i + 16] for i in range(0, len(raw), 16)]
    value = np.array([-1.0], np.float32)
    store = LogpStore(tmp_path)
    store.commit([ScoredRow(k, value) for k in keys], Effort())
    began = time.process_time()
    again = LogpStore(tmp_path)
    opened = time.process_time()
    assert again.find(keys[::10]).known.all()
    assert time.process_time() - opened < 1
    assert opened - began < 2
    held = sum(column.nbytes for column in vars(again._index).values())
    assert held <= 48 * len(again)


WRITER = """
import sys, numpy as np
from pathlib import Path
from preftune.reference.store import *
store = LogpStore(Path(sys.argv[1]))
rng = np.random.default_rng(int(sys.argv[2]))
for turn in range(20):
    numbers = dict.fromkeys(int(n) for n in rng.integers(0, 500, 50))
    store.refresh()
    store.commit([ScoredRow(n.to_bytes(16, "big"), np.array([-float(n)])) for n in numbers], Effort(1, 1))
"""


def test_eight_processes_fill_one_store(tmp_path):
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), str(i)]) for i in range(8)]
    assert [w.wait(timeout=200) for w in writers] == [0] * 8
    store = LogpStore(tmp_path)
    known = [n for n in range(500) if store.find([key(n)]).known.all()]
    assert len(known) > 490
    assert store.find([key(n) for n in known]).logps.tolist() == [-float(n) for n in known]
    assert not list(tmp_path.glob(".*")), "no scratch file is left"
