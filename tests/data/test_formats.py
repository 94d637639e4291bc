"""What rows are recognised, what is refused, and with which words."""

from __future__ import annotations

import pytest

from preftune.data.formats import examples_from_rows, to_unpaired
from preftune.errors import DataError
from preftune.types import Origin, PairedExample, UnpairedExample


def turn(role, content):
    return {"role": role, "content": content}


def load(*rows):
    return examples_from_rows([(row, Origin("p.jsonl", i)) for i, row in enumerate(rows, 1)], "p.jsonl")


PAIR = {"prompt": "q", "chosen": "a", "rejected": "b"}
SINGLE = {"prompt": "q", "completion": "a", "label": True}


def test_text_and_messages():
    loaded = load(PAIR, {"prompt": [turn("user", "q")], "chosen": [turn("assistant", "a")], "rejected": "b"}, PAIR)
    assert loaded.examples == [
        PairedExample("q", "a", "b", Origin("p.jsonl", 1)),
        PairedExample("q", "a", "b", Origin("p.jsonl", 3)),
    ]
    assert [str(row.origin) for row in loaded.bad] == ["p.jsonl:2"]
    assert "'prompt' is messages but 'rejected' is text" in loaded.bad[0].detail


def test_layouts_of_the_demo_records():
    sharegpt = {
        "conversations": [{"from": "human", "value": "q"}],
        "chosen": {"from": "gpt", "value": "a"},
        "rejected": {"from": "gpt", "value": "b"},
    }
    judged = {"messages": [turn("user", "q"), turn("assistant", "a")], "label": False}
    aliased = {
        "messages": [turn("user", "q")],
        "chosen": [turn("assistant", "a")],
        "rejected": [turn("assistant", "b")],
    }
    prompt = [turn("user", "q")]
    pair = PairedExample(prompt, [turn("assistant", "a")], [turn("assistant", "b")], Origin("p.jsonl", 1))
    assert load(sharegpt).examples == [pair]
    assert load(aliased).examples == [pair]
    assert load(judged).examples == [UnpairedExample(prompt, [turn("assistant", "a")], False, Origin("p.jsonl", 1))]


def test_pairs_become_one_desirable_and_one_undesirable_row():
    rows = to_unpaired(load(PAIR).examples)
    assert [(r.completion, r.label) for r in rows] == [("a", True), ("b", False)]
    assert {str(r.origin) for r in rows} == {"p.jsonl:1"}


@pytest.mark.parametrize(
    ("value", "expected"),
    [(True, True), (False, False), (1, True), (0, False), ("true", True), ("False", False), (" TRUE ", True)],
)
def test_labels_from_a_written_list(value, expected):
    """B09: `bool("False")` is True; B10, F04: truthiness makes every row desirable."""
    assert load(SINGLE | {"label": value}).examples[0].label is expected


@pytest.mark.parametrize("value", [None, -1, 2, 0.9, 1.0, "yes", "", "good", [True]])
def test_other_labels_are_refused(value):
    loaded = load(SINGLE | {"label": value})
    assert loaded.examples == []
    assert "'label'" in loaded.bad[0].detail


REFUSED = {
    "null": (PAIR | {"rejected": None}, "'rejected' is null"),
    "missing": ({"prompt": "q", "chosen": "a", "reject": "b"}, "no column 'rejected'; did you mean 'reject'?"),
    "no label": ({"prompt": "q", "completion": "a", "labels": True}, "no column 'label'; did you mean 'labels'?"),
    "no prompt": ({"chosen": "a", "rejected": "b"}, "no column 'prompt'"),
    "nothing known": ({"x": 1}, "no column 'prompt' (columns: x; expected prompt, completion, label)"),
    "identical": (PAIR | {"rejected": "a"}, "'rejected' equals 'chosen'"),
    "empty": (PAIR | {"chosen": "  "}, "'chosen' is empty"),
    "empty list": (PAIR | {"prompt": []}, "'prompt' is empty"),
    "number": (PAIR | {"chosen": 3}, "'chosen': expected text or messages, got int"),
    "user answers": (
        {"prompt": [turn("user", "q")], "chosen": [turn("assistant", "a")], "rejected": [turn("user", "no")]},
        "'rejected' must start with an assistant turn, got role 'user'",
    ),
    "user last": (
        {
            "prompt": [turn("user", "q")],
            "chosen": [turn("assistant", "a"), turn("user", "x")],
            "rejected": [turn("assistant", "b")],
        },
        "'chosen' does not end with an assistant turn",
    ),
    "odd role": (PAIR | {"prompt": [turn("narrator", "q")]}, "role 'narrator' is not one of"),
    "role is a list": (PAIR | {"prompt": [turn(["user"], "q")]}, "role ['user'] is not one of"),
    "no content": (PAIR | {"prompt": [turn("user", None)]}, "'content' must be text, got NoneType"),
    "no message": (PAIR | {"prompt": ["q"]}, "expected a message with 'role' and 'content', got str"),
    "prompt answered": (
        {"prompt": [turn("user", "q"), turn("assistant", "x")], "chosen": [turn("assistant", "a")], "rejected": "b"},
        "'prompt' ends with an assistant turn",
    ),
    "empty answer": (
        {"prompt": [turn("user", "q")], "chosen": [turn("assistant", "")], "rejected": [turn("assistant", "b")]},
        "'chosen' is empty",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_rows_say_why(case):
    row, words = REFUSED[case]
    loaded = load(row)
    assert loaded.examples == []
    assert words in loaded.bad[0].detail


def test_unused_columns_are_counted():
    """B13: system text in its own column is not ignored in silence."""
    assert load(PAIR | {"system": "s"}, PAIR | {"system": "t", "id": 3}).unused_columns == {"system": 2, "id": 1}


def test_no_rows_and_mixed_kinds_are_errors():
    with pytest.raises(DataError, match=r"p\.jsonl: holds no rows"):
        load()
    with pytest.raises(DataError, match=r"a pair at p\.jsonl:1, a single completion at p\.jsonl:2"):
        load(PAIR, SINGLE)
