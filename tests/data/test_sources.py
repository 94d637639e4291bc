"""Readers: rows with their origins, and errors with file and line."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from preftune.data.sources import read_rows
from preftune.errors import DataError

ROWS = [{"prompt": "a", "n": 1}, {"prompt": "b\u2028c", "n": 2}]


def read(path):
    return [(row, str(origin)) for row, origin in read_rows(path)]


def test_jsonl_counts_lines_and_skips_blank_ones(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text("\ufeff" + json.dumps(ROWS[0]) + "\r\n\r\n" + json.dumps(ROWS[1], ensure_ascii=False) + "\n")
    assert read(path) == [(ROWS[0], f"{path}:1"), (ROWS[1], f"{path}:3")]


def test_json_array_knows_the_line_of_each_record(tmp_path):
    path = tmp_path / "p.json"
    path.write_text('[\n  {"prompt": "a",\n   "n": 1},\n\n  {"prompt": "b", "n": 2}\n]\n')
    assert [origin for _, origin in read(path)] == [f"{path}:2", f"{path}:5"]


def test_parquet_counts_rows(tmp_path):
    path = tmp_path / "p.parquet"
    pq.write_table(pa.Table.from_pylist(ROWS), path)
    assert read(path) == [(ROWS[0], f"{path}:1"), (ROWS[1], f"{path}:2")]


BAD = {
    "cut.jsonl": (b'{"a": 1}\n{"a": ', ":2: not valid JSON"),
    "array.jsonl": (b'[\n{"a": 1}\n]', ":1: not valid JSON"),
    "list.jsonl": (b"[1, 2]\n", ":1: expected an object with named columns, got list"),
    "twice.jsonl": (b'{"a": 1}\n{"a": 1, "a": 2}\n', ":2: not valid JSON (key 'a' appears twice)"),
    "nan.jsonl": (b'{"a": NaN}\n', ":1: not valid JSON (NaN is not JSON)"),
    "binary.jsonl": (b'{"a": 1}\n\xff\xfe\x00', ":2: not UTF-8 text"),
    "deep.jsonl": (b"[" * 100_000, ":1: not valid JSON"),
    "object.json": (b'{"a": 1}', ":1: expected an array of objects"),
    "cut.json": (b'[{"a": 1},\n {"a": ', ":2: not valid JSON"),
    "unclosed.json": (b'[{"a": 1}\n', ":2: the array is cut off"),
    "comma.json": (b'[{"a": 1}\n{"a": 2}]', ":2: the array is cut off or a comma is missing"),
    "number.json": (b"[1]", ":1: expected an object with named columns, got int"),
    "after.json": (b'[{"a": 1}]\nmore', ":1: text after the end of the array"),
    "empty.json": (b"", ":1: expected an array"),
    "bad.parquet": (b"no parquet", ": not a readable Parquet file"),
    "table.xlsx": (b"", ": unknown kind of file '.xlsx'"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_errors_with_file_and_line(tmp_path, name):
    content, words = BAD[name]
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError) as error:
        read(path)
    assert str(error.value).startswith(f"{path}{words.partition(' ')[0]}")
    assert words in str(error.value)


def test_missing_file_and_folder(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        read(tmp_path / "none.jsonl")
    with pytest.raises(DataError, match="is a folder"):
        read(tmp_path)


def test_a_hub_name_that_cannot_be_loaded_says_so():
    with pytest.raises(DataError, match="neither a file here nor a data set"):
        read("nobody/nothing")


def test_a_hub_data_set_yields_its_rows(monkeypatch):
    import datasets

    asked = []

    def load_dataset(name, split):
        asked.append((name, split))
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    rows = [(row, str(origin)) for row, origin in read_rows("someone/prefs", "validation")]
    assert asked == [("someone/prefs", "validation")]
    assert rows == [(ROWS[0], "someone/prefs[validation]:1"), (ROWS[1], "someone/prefs[validation]:2")]
