"""Compute what a store lacks: longest rows first, in batches of like length, committed as they are done."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from preftune.data.pack import collate_rows
from preftune.reference.store import Effort, LogpStore, ScoredRow
from preftune.types import Batch, Row

TOKENS_PER_BATCH = 4096
COMMIT_EVERY = 20.0  # seconds; with a batch that takes BATCH_SECONDS at most, no more than 30 s of work is ever unsaved
BATCH_SECONDS = 8.0

Rows = Mapping[bytes, Row]


@dataclass
class Work:
    """What a fill did."""

    rows: int = 0
    effort: Effort = field(default_factory=Effort)
    unsaved: Exception | None = None


def fill(
    store: LogpStore,
    rows: Rows,
    score: Callable[[Batch], Tensor],
    device: torch.device,
    words: str = "reference",
    quiet: bool = False,
) -> Work:
    """Compute the rows and commit them.

    Args:
        store: told of every row, in shards of about `COMMIT_EVERY` seconds.
        rows: by key, none of them known.
        score: the log-probability of each scored token of a batch on `device`, without gradient.
        device: where batches go.
        words: what the progress bar says.
        quiet: show none.

    A shard that cannot be written ends nothing: the values are known in this process, and the error is in the result.
    """
    work = Work()
    todo = sorted(rows.items(), key=lambda item: (-len(item[1]), item[0]))
    scored: list[ScoredRow] = []
    pending, since = Effort(), time.monotonic()

    def commit() -> None:
        nonlocal scored, pending, since
        if scored:
            try:
                store.commit(scored, pending)
            except OSError as error:
                work.unsaved = error
        scored, pending, since = [], Effort(), time.monotonic()

    with _Bar(words, len(todo), sum(len(row) for _, row in todo), quiet) as advance:
        pace = _Pace()
        for part in _batches(todo, pace):
            began = time.monotonic()
            batch = collate_rows([row for _, row in part]).to(device)
            values = score(batch).cpu().split(batch.lengths.tolist())
            took = Effort(sum(len(row) for _, row in part), time.monotonic() - began)
            pace.saw(took)
            scored += [ScoredRow(key, value.numpy()) for (key, _), value in zip(part, values, strict=True)]
            work.rows, work.effort, pending = work.rows + len(part), work.effort + took, pending + took
            advance(len(part), took.tokens)
            if time.monotonic() - since > COMMIT_EVERY:
                commit()
        commit()
    return work


class _Pace:
    """How many tokens a batch may have: at most `TOKENS_PER_BATCH`, fewer where that would take too long."""

    def __init__(self) -> None:
        self.tokens = 1  # the first batch is one row, which shows how fast this machine is

    def saw(self, took: Effort) -> None:
        """Set the size from what a batch took."""
        rate = took.tokens / max(took.seconds, 1e-6)
        self.tokens = max(1, min(TOKENS_PER_BATCH, int(rate * BATCH_SECONDS)))


def _batches(todo: Sequence[tuple[bytes, Row]], pace: _Pace) -> Iterator[list[tuple[bytes, Row]]]:
    """Neighbours in length together, so that little is padded; at least one row each."""
    start = 0
    while start < len(todo):
        count = max(1, pace.tokens // len(todo[start][1]))
        yield list(todo[start : start + count])
        start += count


class _Bar:
    """A progress bar on standard error: rows, rows and tokens a second, time left. Plain lines where it is no terminal.

    It goes by tokens: the longest rows come first, so rows would promise too little.
    """

    def __init__(self, words: str, rows: int, tokens: int, quiet: bool) -> None:
        console = Console(stderr=True, quiet=quiet)
        self.rows, self.done, self.seen, self.began = rows, 0, 0, time.monotonic()
        self.live = console.is_terminal and not quiet
        self.console, self.words, self.said = console, words, self.began
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[rows]}"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not self.live,
        )
        self.task = self.bar.add_task(words, total=tokens, rows=f"0/{rows} rows")

    def __enter__(self) -> Callable[[int, int], None]:
        self.bar.__enter__()
        return self.advance

    def __exit__(self, *raised: object) -> None:
        self.bar.__exit__(None, None, None)

    def advance(self, rows: int, tokens: int) -> None:
        """Count what was done; without a terminal say so every half minute."""
        self.done, self.seen = self.done + rows, self.seen + tokens
        seconds = max(time.monotonic() - self.began, 1e-6)
        speed = f"{self.done}/{self.rows} rows, {self.done / seconds:.1f} rows/s, {self.seen / seconds:.0f} tokens/s"
        self.bar.update(self.task, advance=tokens, rows=speed)
        if not self.live and time.monotonic() - self.said > 30 and self.done < self.rows:
            total = self.bar.tasks[0].total or self.seen
            left = (total - self.seen) * seconds / max(self.seen, 1)
            self.console.print(f"{self.words}: {speed}, about {left:.0f} s left", highlight=False, soft_wrap=True)
            self.said = time.monotonic()
