"""Human ratings of movie-review sentences as preference data.

About 20 people rated each sentence from -4 (most negative) to +4 (most positive); the mean is the judgement (Hutto and
Gilbert 2014, in the source distribution of vaderSentiment). A sentence's first word is the prompt and the rest its
completion ("Movie review: The" + " plot is ..."), so that sentences share prompts: pairs under one prompt for DPO,
other prompts to borrow from for KTO.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from preftune.errors import DataError

LENGTHS = (25, 80)  # characters
CLEAR = 1.5  # a mean rating at least this far from 0 says something
PER_CLASS = 6  # sentences of each sign a prompt needs to be used
HELD_OUT = 0.28
OPENING = "Movie review: "


@dataclass(frozen=True)
class Sentence:
    """One rated sentence, cut after its first word."""

    prompt: str
    completion: str
    rating: float


@dataclass(frozen=True)
class Split:
    """Sentences for training or held out, and pairs (higher rated first) made from them under the same prompt."""

    sentences: list[Sentence]
    pairs: list[tuple[Sentence, Sentence]]


def read_sentences(path: Path) -> list[Sentence]:
    """The clearly rated sentences of moderate length whose first word opens enough of both kinds."""
    groups: dict[str, list[Sentence]] = defaultdict(list)
    seen: set[str] = set()
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            _, rating, text = line.split("\t")
            value = float(rating)
        except ValueError:
            raise DataError(f"{path}:{number}: expected number, rating and sentence, with tabs between") from None
        first, space, rest = text.strip().partition(" ")
        if LENGTHS[0] <= len(text) <= LENGTHS[1] and abs(value) >= CLEAR and space and text not in seen:
            seen.add(text)
            groups[first].append(Sentence(OPENING + first, f" {rest}", value))
    return [sentence for group in groups.values() if min(_signs(group)) >= PER_CLASS for sentence in group]


def split(sentences: list[Sentence], seed: int) -> tuple[Split, Split]:
    """Training and held-out splits with no sentence in both; of each prompt's sentences the same share is held out."""
    rng = random.Random(f"preftune-reviews-{seed}")
    parts: tuple[list[Sentence], list[Sentence]] = ([], [])
    pairs: tuple[list[tuple[Sentence, Sentence]], list[tuple[Sentence, Sentence]]] = ([], [])
    groups: dict[str, list[Sentence]] = defaultdict(list)
    for sentence in sentences:
        groups[sentence.prompt].append(sentence)
    for group in groups.values():
        liked = [s for s in group if s.rating > 0]
        disliked = [s for s in group if s.rating < 0]
        for side in (liked, disliked):
            rng.shuffle(side)
        held = [round(len(side) * HELD_OUT) for side in (liked, disliked)]
        for part, (a, b) in enumerate(
            [(liked[held[0] :], disliked[held[1] :]), (liked[: held[0]], disliked[: held[1]])]
        ):
            parts[part].extend(a + b)
            pairs[part].extend(zip(a, b, strict=False))
    for rows in (*parts, *pairs):
        rng.shuffle(rows)
    # Held-out rows of like length side by side: less padding when they are scored.
    parts[1].sort(key=lambda s: len(s.completion))
    pairs[1].sort(key=lambda pair: max(len(s.completion) for s in pair))
    return Split(parts[0], pairs[0]), Split(parts[1], pairs[1])


def write_unpaired(part: Split, path: Path, every: int = 1) -> None:
    """Single sentences with the sign of their rating as the label; of `every` n sentences one."""
    rows = [{"prompt": s.prompt, "completion": s.completion, "label": s.rating > 0} for s in part.sentences[::every]]
    _write(rows, path)


def write_paired(part: Split, path: Path) -> None:
    """Pairs under one prompt, the better rated sentence chosen."""
    _write([{"prompt": a.prompt, "chosen": a.completion, "rejected": b.completion} for a, b in part.pairs], path)


def _write(rows: list[dict[str, object]], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def _signs(group: list[Sentence]) -> tuple[int, int]:
    liked = sum(s.rating > 0 for s in group)
    return liked, len(group) - liked
