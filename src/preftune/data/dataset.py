"""Tokenized rows as a torch data set, with the account of what was not used and why."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from rich.console import Console
from rich.progress import track
from torch.utils.data import Dataset

from preftune.data.formats import BadRow, Loaded, RowError
from preftune.data.pairing import pair_mismatched
from preftune.data.template import RowTokenizer, is_chat
from preftune.data.truncate import TooLong, Truncation, truncate
from preftune.errors import DataError
from preftune.types import Completion, Example, Layout, TokenizedExample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHOWN_PER_REASON = 3


@dataclass
class RowReport:
    """The account of one source: rows used, rows not used by reason, and what the user should know of the rest."""

    source: str
    used: int = 0
    bad: list[BadRow] = field(default_factory=list)
    too_long: list[BadRow] = field(default_factory=list)
    truncated: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def total(self) -> int:
        return self.used + len(self.bad) + len(self.too_long)

    def lines(self) -> list[str]:
        """The account in words, one finding per line."""
        out = [f"{self.source}: {self.used} usable of {self.total} rows"]
        for rows in (self.bad, self.too_long):
            for reason, count in Counter(row.reason for row in rows).most_common():
                out.append(f"  {count} x {reason}")
                examples = [row for row in rows if row.reason == reason][:SHOWN_PER_REASON]
                out.extend(f"      {row.origin}: {row.detail}" for row in examples)
        if self.truncated:
            out.append(f"  {self.truncated} rows cut to max_length")
        return out + [f"  note: {note}" for note in self.notes]

    def require_usable(self, bad_rows: Literal["stop", "drop"]) -> None:
        """Raise `DataError` with the account when no row is left, or when there are bad rows and the policy says so."""
        account = "\n".join(self.lines())
        if self.used == 0:
            raise DataError(f"{account}\nno row can be used")
        if self.bad and bad_rows == "stop":
            raise DataError(f"{account}\nfix these rows, or set data.bad_rows: drop to train without them")


class PreferenceDataset(Dataset[TokenizedExample]):
    """Tokenized rows of one layout. The key `~i` gives row i as a filler (see `StepSampler`)."""

    def __init__(self, examples: Sequence[TokenizedExample]) -> None:
        assert examples, "an empty data set is refused where rows are counted"
        self.examples = list(examples)

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, key: int) -> TokenizedExample:
        return self.examples[key] if key >= 0 else replace(self.examples[~key], filler=True)

    @property
    def layout(self) -> Layout:
        return self.examples[0].layout

    def label_counts(self) -> tuple[int, int]:
        """Number of desirable and of undesirable rows."""
        desirable = sum(bool(example.label) for example in self.examples)
        return desirable, len(self.examples) - desirable

    @cached_property
    def largest_id(self) -> int:
        """The largest token id of all rows."""
        return max(max((*e.prompt_ids, *(i for c in e.completions for i in c.ids))) for e in self.examples)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of every row's token ids, masks, labels and borrowed completions, in order."""
        digest = hashlib.blake2b(digest_size=16)
        for e in self.examples:
            completions = [*e.completions, *([] if e.mismatched is None else [e.mismatched])]
            row = [e.prompt_ids, [(c.ids, c.mask) for c in completions], e.label]
            digest.update(json.dumps(row).encode())
        return digest.hexdigest()


def tokenize_examples(
    loaded: Loaded | Iterable[Example],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    truncation: Truncation = "drop",
    bad_rows: Literal["stop", "drop"] = "stop",
    source: str = "data",
    mismatched_seed: int | None = None,
    lenders: Sequence[TokenizedExample] = (),
) -> tuple[PreferenceDataset, RowReport]:
    """Turn examples into token ids, and account for every row.

    Args:
        loaded: what `load_examples` returned, or examples of one layout.
        tokenizer: with a chat template where the rows are chat messages.
        max_length: tokens of prompt + completion, > 0.
        truncation: what happens to longer rows (see `truncate`); dropped rows are counted in the report.
        bad_rows: whether rows that cannot be used stop the run or are left out (counted in the report).
        source: the name used in the report.
        mismatched_seed: give each row a mismatched completion for KTO's KL baseline, drawn from this seed.
        lenders: rows that may lend theirs where the rows have none to borrow among themselves.

    Raises `DataError` with the whole account when no row is usable, or when there are bad rows and `bad_rows="stop"`.
    """
    if max_length <= 0:
        raise DataError(f"max_length must be > 0, got {max_length}")
    if not isinstance(loaded, Loaded):
        loaded = Loaded(list(loaded), [], {})
    report = RowReport(source, bad=list(loaded.bad), notes=_notes(loaded, tokenizer))
    rows = RowTokenizer(tokenizer)
    kept: list[TokenizedExample] = []
    for example in _with_bar(loaded.examples, f"tokenising {source}"):
        try:
            made, was_cut = _tokenize_row(rows, example, max_length, truncation)
        except RowError as error:
            part = report.too_long if isinstance(error, TooLong) else report.bad
            part.append(BadRow(example.origin, error.reason, str(error)))
        else:
            kept.append(made)
            report.truncated += was_cut
    report.used = len(kept)
    report.require_usable(bad_rows)
    if mismatched_seed is not None:
        kept = pair_mismatched(kept, mismatched_seed, lenders)
        left_out = sum(example.mismatched is None for example in kept)
        if left_out:
            report.notes.append(
                f"{left_out} rows find none with another prompt and another completion to borrow from, and are left "
                "out of the baseline"
            )
    return PreferenceDataset(kept), report


def _tokenize_row(
    rows: RowTokenizer, example: Example, max_length: int, truncation: Truncation
) -> tuple[TokenizedExample, bool]:
    """One row as token ids, and whether it was cut. Raises `RowError`, as `TooLong` where the length is to blame."""
    whole = rows.tokenize(example)
    if _all_equal(whole[1]):
        raise RowError("identical completions", "'rejected' equals 'chosen' once tokenised; drop the row")
    prompt_ids, completions = truncate(*whole, max_length, truncation)
    if _all_equal(completions):
        raise TooLong("identical within max_length", "'rejected' equals 'chosen' once cut to max_length")
    made = TokenizedExample(prompt_ids, completions, example.origin, getattr(example, "label", None))
    return made, (prompt_ids, completions) != whole


def _all_equal(completions: tuple[Completion, ...]) -> bool:
    return len(completions) > 1 and len({completion.ids for completion in completions}) == 1


def _with_bar(examples: list[Example], words: str) -> Iterable[Example]:
    """The examples, with a bar on a terminal that goes away when they are through."""
    console = Console(stderr=True)
    return track(examples, words, console=console, transient=True, disable=not console.is_terminal)


def _notes(loaded: Loaded, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    notes = [f"column {column!r} ({count} rows) is not used" for column, count in loaded.unused_columns.items()]
    if loaded.examples and not is_chat(loaded.examples[0].prompt) and tokenizer.chat_template is not None:
        notes.append(
            "the prompts are plain text, so they are not put into the tokenizer's chat template; "
            "give messages ([{role: user, content: ...}]) where the model should see a chat"
        )
    return notes
