"""Recognise what a row is and bring it to one form: paired or unpaired, text or chat messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from preftune.data.sources import Row, read_rows
from preftune.errors import DataError, nearest
from preftune.types import Example, Message, Origin, PairedExample, Text, UnpairedExample

ROLES = {"human": "user", "gpt": "assistant", "user": "user", "assistant": "assistant", "system": "system"}
KNOWN_COLUMNS = ("prompt", "chosen", "rejected", "completion", "label", "messages", "conversations")


@dataclass(frozen=True)
class BadRow:
    """A row that cannot be used: where it is, the kind of trouble (for counting) and the sentence for the user."""

    origin: Origin
    reason: str
    detail: str


class RowError(DataError):
    """Raised while one row is read; `reason` is the short kind it is counted under."""

    def __init__(self, reason: str, detail: str | None = None) -> None:
        super().__init__(detail or reason)
        self.reason = reason


@dataclass(frozen=True)
class Loaded:
    """What a source held: usable examples, rows that are not usable, and columns that were read by nothing."""

    examples: list[Example]
    bad: list[BadRow]
    unused_columns: dict[str, int]


def load_examples(source: str | Path, split: str = "train") -> Loaded:
    """Read all rows of a file or hub data set into examples; rows that cannot be used are returned with reasons.

    Rows are recognised by their columns: `prompt, chosen, rejected` (paired) or `prompt, completion, label`
    (unpaired), each text or a list of chat messages. Two layouts are mapped on the way: `conversations` (turns with
    `from`/`value`) in place of `prompt`, and `messages` with a `label`, whose last turn is the completion. Raises
    `DataError` when the file cannot be read, holds no rows, or mixes the two kinds.
    """
    return examples_from_rows(read_rows(source, split), str(source))


def examples_from_rows(rows: Iterable[tuple[Row, Origin]], source: str) -> Loaded:
    """As `load_examples`, for rows already in memory."""
    examples: list[Example] = []
    bad: list[BadRow] = []
    unused: Counter[str] = Counter()
    total = 0
    for row, origin in rows:
        total += 1
        unused.update(str(column) for column in row if column not in KNOWN_COLUMNS)
        unused.update(f"{key} of a message" for key in _unused_keys(row))
        try:
            examples.append(_example(row, origin))
        except RowError as error:
            bad.append(BadRow(origin, error.reason, str(error)))
    if total == 0:
        raise DataError(f"{source}: holds no rows")
    kinds = Counter(type(example) for example in examples)
    if len(kinds) > 1:
        first = {kind: next(e.origin for e in examples if type(e) is kind) for kind in kinds}
        words = {PairedExample: "a pair", UnpairedExample: "a single completion"}
        where = ", ".join(f"{words[kind]} at {origin}" for kind, origin in first.items())
        raise DataError(f"{source}: paired and unpaired rows in one file ({where}); split it in two")
    return Loaded(examples, bad, dict(unused))


def to_unpaired(examples: Iterable[Example]) -> list[UnpairedExample]:
    """Turn each pair into one desirable and one undesirable row, chosen first. Unpaired rows pass through."""
    rows: list[UnpairedExample] = []
    for example in examples:
        if isinstance(example, UnpairedExample):
            rows.append(example)
        else:
            rows.append(UnpairedExample(example.prompt, example.chosen, True, example.origin))
            rows.append(UnpairedExample(example.prompt, example.rejected, False, example.origin))
    return rows


def _unused_keys(row: Row) -> set[str]:
    """Keys of a row's messages, other than role and text, that hold something."""
    turns = [turn for value in row.values() if isinstance(value, list) for turn in value if isinstance(turn, dict)]
    used = ("role", "from", "content", "value")
    return {str(key) for turn in turns for key, value in turn.items() if key not in used and value is not None}


def _example(row: Row, origin: Origin) -> Example:
    row = _known_layouts(row)
    if "chosen" in row or "rejected" in row:
        _need(row, ("prompt", "chosen", "rejected"))
        prompt = _text(row["prompt"], "prompt")
        chosen, rejected = (_completion(row[side], side, prompt) for side in ("chosen", "rejected"))
        if chosen == rejected:
            raise RowError("identical completions", "'rejected' equals 'chosen'; the pair says nothing, drop the row")
        return PairedExample(prompt, chosen, rejected, origin)
    _need(row, ("prompt", "completion", "label"))
    prompt = _text(row["prompt"], "prompt")
    return UnpairedExample(prompt, _completion(row["completion"], "completion", prompt), _label(row["label"]), origin)


def _known_layouts(row: Row) -> Row:
    """Map the layouts of other tools onto our columns; see `load_examples`."""
    if "conversations" in row and "prompt" not in row:
        rest = {key: value for key, value in row.items() if key != "conversations"}
        return {"prompt": row["conversations"], **rest}
    if "messages" in row and "prompt" not in row:
        rest = {key: value for key, value in row.items() if key != "messages"}
        if "chosen" in row or "rejected" in row:
            return {"prompt": row["messages"], **rest}
        if "label" in row and isinstance(row["messages"], list) and row["messages"]:
            return {"prompt": row["messages"][:-1], "completion": row["messages"][-1:], **rest}
    return row


def _need(row: Row, columns: tuple[str, ...]) -> None:
    for column in columns:
        if column not in row:
            guess = nearest(column, row)
            raise RowError(
                f"no column {column!r}",
                f"no column {column!r}{guess} (columns: {', '.join(map(str, row))}; expected {', '.join(columns)})",
            )
        if row[column] is None:
            raise RowError(f"{column!r} is null")


def _text(value: Any, column: str) -> Text:
    if isinstance(value, str):
        if not value.strip():
            raise RowError(f"{column!r} is empty")
        return value
    if isinstance(value, dict):
        value = [value]
    if isinstance(value, list):
        if not value:
            raise RowError(f"{column!r} is empty")
        return [_message(item, column) for item in value]
    raise RowError(
        f"{column!r} is neither text nor messages", f"{column!r}: expected text or messages, got {type(value).__name__}"
    )


def _message(value: Any, column: str) -> Message:
    if not isinstance(value, dict):
        raise RowError(
            f"{column!r} holds a turn that is no message",
            f"{column!r}: expected a message with 'role' and 'content', got {type(value).__name__}",
        )
    role = value.get("role", value.get("from"))
    content = value.get("content", value.get("value"))
    if not isinstance(role, str) or role not in ROLES:
        raise RowError(f"{column!r} has an unknown role", f"{column!r}: role {role!r} is not one of {', '.join(ROLES)}")
    if not isinstance(content, str):
        raise RowError(
            f"{column!r} has a turn without text", f"{column!r}: 'content' must be text, got {type(content).__name__}"
        )
    return {"role": ROLES[role], "content": content}


def _completion(value: Any, column: str, prompt: Text) -> Text:
    completion = _text(value, column)
    if isinstance(prompt, str) != isinstance(completion, str):
        kinds = ["text" if isinstance(part, str) else "messages" for part in (prompt, completion)]
        raise RowError(
            "text and messages mixed in one row",
            f"'prompt' is {kinds[0]} but {column!r} is {kinds[1]}; make both text or both messages",
        )
    if isinstance(completion, list):
        if completion[0]["role"] != "assistant":
            raise RowError(
                f"{column!r} does not start with an assistant turn",
                f"{column!r} must start with an assistant turn, got role {completion[0]['role']!r}",
            )
        if completion[-1]["role"] != "assistant":
            raise RowError(f"{column!r} does not end with an assistant turn")
        if not any(turn["content"].strip() for turn in completion if turn["role"] == "assistant"):
            raise RowError(f"{column!r} is empty")
        if isinstance(prompt, list) and prompt[-1]["role"] == "assistant":
            raise RowError(
                "'prompt' ends with an assistant turn",
                "'prompt' ends with an assistant turn; end it with the user's, or move the turn into the completions",
            )
    return completion


def _label(value: Any) -> bool:
    """A written list only: truthiness would make every non-empty text, and every -1, desirable."""
    if isinstance(value, bool):
        return value
    if isinstance(value, int) and value in (0, 1):
        return bool(value)
    if isinstance(value, str) and value.strip().lower() in ("true", "false"):
        return value.strip().lower() == "true"
    raise RowError("'label' is not true or false", f"'label': expected true, false, 1, 0 or those words, got {value!r}")
