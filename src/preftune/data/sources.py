"""Files and hub names to raw rows, each with its origin."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from preftune.errors import DataError, first_line
from preftune.types import Origin

Row = dict[str, Any]
SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet")


def is_hub_name(source: str) -> bool:
    """Whether `read_rows` would look for it on the hub."""
    path = Path(source).expanduser()
    return path.suffix not in SUFFIXES and not path.exists()


def read_rows(source: str | Path, split: str = "train") -> Iterator[tuple[Row, Origin]]:
    """Yield `(row, origin)` from a JSONL, JSON or Parquet file, or from a data set of that name on the hub.

    Origins count lines from 1 for JSONL, the line where the record starts for JSON, and rows for the rest. Raises
    `DataError` for a file that is missing, of an unknown kind, or damaged (with the line).
    """
    path = Path(source).expanduser()
    try:
        is_folder, exists = path.is_dir(), path.exists()
    except (OSError, ValueError) as error:  # too long, or with a character no name can have
        raise DataError(f"{str(source)[:80]!r}: no file can have this name ({first_line(error)})") from None
    if is_folder:
        raise DataError(f"{source}: is a folder; name one file ({', '.join(SUFFIXES)})")
    if path.suffix in SUFFIXES or exists:
        if not exists:
            raise DataError(f"{source}: no such file (looked in {path.absolute().parent})")
        reader = {".jsonl": _jsonl, ".ndjson": _jsonl, ".json": _json, ".parquet": _parquet}.get(path.suffix)
        if reader is None:
            raise DataError(f"{source}: unknown kind of file {path.suffix!r}; give one of {', '.join(SUFFIXES)}")
        return reader(path)
    return _hub(str(source), split)


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = path.read_bytes()[: error.start].count(b"\n") + 1
        raise DataError(f"{path}:{line}: not UTF-8 text ({error.reason} at byte {error.start})") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None


def _object(value: Any, origin: Origin) -> Row:
    if not isinstance(value, dict):
        raise DataError(f"{origin}: expected an object with named columns, got {type(value).__name__}")
    return value


def _no_duplicates(pairs: list[tuple[str, Any]]) -> Row:
    row = dict(pairs)
    if len(row) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"key {twice!r} appears twice")
    return row


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_no_duplicates, parse_constant=_no_constant)


def _jsonl(path: Path) -> Iterator[tuple[Row, Origin]]:
    # Split on newlines only: str.splitlines would also split inside strings that hold U+2028 and its like.
    for number, line in enumerate(_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        origin = Origin(str(path), number)
        try:
            value = _DECODER.decode(line)
        except (ValueError, RecursionError) as error:
            hint = "; the file looks like a JSON array, name it .json" if number == 1 and line.strip() == "[" else ""
            raise DataError(f"{origin}: not valid JSON ({error}){hint}") from None
        yield _object(value, origin), origin


def _json(path: Path) -> Iterator[tuple[Row, Origin]]:
    text = _text(path)
    position, line, counted = _skip(text, 0), 1, 0
    if text[position : position + 1] != "[":
        raise DataError(f"{path}:1: expected an array of objects; for one object per line name the file .jsonl")
    position = _skip(text, position + 1)
    while text[position : position + 1] != "]":
        line += text.count("\n", counted, position)
        counted = position
        origin = Origin(str(path), line)
        try:
            value, position = _DECODER.raw_decode(text, position)
        except json.JSONDecodeError as error:
            raise DataError(f"{path}:{error.lineno}: not valid JSON ({error.msg})") from None
        except (ValueError, RecursionError) as error:
            raise DataError(f"{origin}: not valid JSON ({error})") from None
        yield _object(value, origin), origin
        position = _skip(text, position)
        if text[position : position + 1] == ",":
            position = _skip(text, position + 1)
        elif text[position : position + 1] != "]":
            where = text.count("\n", 0, position) + 1
            raise DataError(f"{path}:{where}: the array is cut off or a comma is missing after a record")
    if text[position + 1 :].strip():
        raise DataError(f"{path}:{text.count(chr(10), 0, position) + 1}: text after the end of the array")


def _skip(text: str, position: int) -> int:
    while text[position : position + 1] in (" ", "\t", "\r", "\n"):
        position += 1
    return position


def _parquet(path: Path) -> Iterator[tuple[Row, Origin]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
        number = 0
        for batch in file.iter_batches():
            for row in batch.to_pylist():
                number += 1
                yield row, Origin(str(path), number)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a readable Parquet file ({error})") from None


def _hub(name: str, split: str) -> Iterator[tuple[Row, Origin]]:
    import datasets

    try:
        data = datasets.load_dataset(name, split=split)
    except Exception as error:  # the library raises a dozen kinds, from bad names to no network
        raise DataError(
            f"{name}: neither a file here nor a data set that could be loaded from the hub "
            f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason given'})"
        ) from None
    for number, row in enumerate(data, start=1):
        yield row, Origin(f"{name}[{split}]", number)
