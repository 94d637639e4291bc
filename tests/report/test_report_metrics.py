"""Reading a metrics file back."""

from __future__ import annotations

import json
import math

import pytest

from preftune.errors import DataError
from preftune.report import before_and_after, read_metrics


def write(path, entries):
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def test_series_are_read_back(path):
    write(
        path,
        [
            {"step": 0, "eval_loss": 0.69, "eval_runtime": 1.0, "epoch": 0},
            {"step": 1, "loss": 0.7, "rewards/chosen": 0.25, "epoch": 0.1},
            {"step": 2, "loss": 0.5, "epoch": 0.2},
            {"step": 2, "eval_loss": 0.55, "eval_runtime": 1.0, "epoch": 0.2},
        ],
    )
    history = read_metrics(path)
    assert history.series("loss") == ([1, 2], [0.7, 0.5])
    assert history.series("rewards/chosen") == ([1], [0.25])
    assert history.series("eval_loss") == ([0, 2], [0.69, 0.55])
    assert history.series("no such metric") == ([], [])
    assert history.summary == {}


def test_the_closing_entry_is_no_point(path):
    write(path, [{"step": 1, "loss": 0.7}, {"step": 1, "train_runtime": 9.0, "train_loss": 0.6, "loss": 0.1}])
    history = read_metrics(path)
    assert history.series("loss") == ([1], [0.7])
    assert history.series("train_loss") == ([], [])
    assert history.summary["train_runtime"] == 9.0


def test_values_that_are_not_finite_survive(path):
    path.write_text('{"step": 1, "loss": NaN}\n{"step": 2, "loss": -Infinity}\n{"step": 3, "loss": null}\n')
    steps, values = read_metrics(path).series("loss")
    assert steps == [1, 2, 3]
    assert math.isnan(values[0])
    assert values[1] == -math.inf
    assert math.isnan(values[2])


def test_steps_increase_and_the_last_value_at_a_step_counts(path):
    write(path, [{"step": 4, "loss": 4.0}, {"step": 2, "loss": 2.0}, {"step": 4, "loss": 5.0}])
    assert read_metrics(path).series("loss") == ([2, 4], [2.0, 5.0])


def test_values_that_are_no_numbers_are_in_no_curve(path):
    write(path, [{"step": 1, "loss": 1.0, "note": "hello", "flag": True}])
    assert dict(read_metrics(path).entries[0]) == {"step": 1, "loss": 1.0}


def test_evaluation_sets_are_found_whatever_their_names(path):
    write(
        path,
        [
            {"step": 1, "loss": 1.0, "rewards/chosen": 0.0},
            {"step": 1, "eval_my_own_set_loss": 0.3, "eval_my_own_set_rewards/margins": 1.0},
            {"step": 1, "eval_loss": 0.4, "eval_rewards/margins": 2.0},
            {"step": 1, "eval_sampled_kl": 0.2},
        ],
    )
    history = read_metrics(path)
    assert history.eval_prefixes == ("eval_my_own_set", "eval")
    assert history.eval_metrics("eval_my_own_set") == ("loss", "rewards/margins")
    assert history.eval_metrics("eval") == ("loss", "rewards/margins", "sampled_kl")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"step": 2, "lo', "not readable as JSON"),
        ("[1, 2]", "expected an object with 'step', got list"),
        ('{"loss": 1.0}', "got none"),
        ('{"step": "2"}', "got '2'"),
        ('{"step": true}', "got True"),
        ('{"step": -1}', "got -1"),
    ],
)
def test_a_damaged_line_is_named(path, line, words):
    path.write_text('{"step": 1, "loss": 1.0}\n\n' + line + "\n")
    with pytest.raises(DataError) as caught:
        read_metrics(path)
    assert str(caught.value).startswith(f"{path}:3: ")
    assert words in str(caught.value)


def test_bytes_that_are_no_text_are_named(path):
    path.write_bytes(b'{"step": 1}\n{"step": 2, "a": "\xff"}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl:2: "):
        read_metrics(path)


def test_a_missing_file_is_an_error(path):
    with pytest.raises(DataError, match="cannot be read"):
        read_metrics(path)


def test_before_is_step_zero_and_after_the_last_evaluation(path):
    write(
        path,
        [
            {"step": 0, "eval_rewards/accuracies": 0.5, "eval_loss": 0.69, "eval_runtime": 3.0},
            {"step": 5, "eval_rewards/accuracies": 0.6, "eval_loss": 0.60, "eval_runtime": 3.0},
            {"step": 5, "eval_other_loss": 0.9},
            {"step": 9, "eval_rewards/accuracies": 0.7, "eval_loss": 0.50, "eval_runtime": 3.0},
        ],
    )
    figures = before_and_after(read_metrics(path))
    assert figures == {
        "loss": (0.69, 0.50),
        "rewards/accuracies": (0.5, 0.7),
        "loss (other)": (None, 0.9),
    }
    assert list(figures) == ["loss", "rewards/accuracies", "loss (other)"]


def test_an_evaluation_at_step_zero_alone_is_not_after(path):
    write(path, [{"step": 0, "eval_loss": 0.69}])
    assert before_and_after(read_metrics(path)) == {"loss": (0.69, None)}
