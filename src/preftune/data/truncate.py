"""The length policy: what happens to a row that is longer than `max_length`."""

from __future__ import annotations

from typing import Literal

from preftune.data.formats import RowError
from preftune.types import Completion

Truncation = Literal["drop", "keep_start", "keep_end"]


class TooLong(RowError):
    """A row that the length policy leaves out."""


def truncate(
    prompt_ids: tuple[int, ...],
    completions: tuple[Completion, ...],
    max_length: int,
    policy: Truncation,
) -> tuple[tuple[int, ...], tuple[Completion, ...]]:
    """Bring prompt + longest completion within `max_length` tokens; a row that fits is returned as it is.

    `drop` refuses the row (`TooLong`, counted). `keep_start` and `keep_end` first cut the prompt, at its end or its
    start, by no more than is needed and never below one token; what is still too long loses the end of its
    completions. All completions keep the same prompt. A cut completion gets no end of turn. A completion left without
    a scored token refuses the row.
    """
    longest = max(len(c.ids) for c in completions)
    if len(prompt_ids) + longest <= max_length:
        return prompt_ids, completions
    if policy == "drop":
        raise TooLong(
            "longer than max_length",
            f"{len(prompt_ids) + longest} tokens, more than max_length {max_length}",
        )
    room = max(1, max_length - longest)
    if room < len(prompt_ids):
        prompt_ids = prompt_ids[:room] if policy == "keep_start" else prompt_ids[-room:]
    limit = max_length - len(prompt_ids)
    cut = []
    for completion in completions:
        if not any(completion.mask[:limit]):
            raise TooLong(
                "no answer left within max_length",
                f"no scored token of the answer is left within max_length {max_length}",
            )
        cut.append(Completion(completion.ids[:limit], completion.mask[:limit]))
    return prompt_ids, tuple(cut)
