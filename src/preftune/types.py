"""The data that travels between the layers, and the names of its shapes.

Shapes: T scored tokens, N completions, B examples, H hidden size, V vocabulary size, R rows and S columns of a padded
batch. Log-probabilities are in nats, float32 or wider.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

Hidden = Float[Tensor, "T H"]
Weight = Float[Tensor, "V H"]
Bias = Float[Tensor, "V"]
Targets = Int[Tensor, "T"]
TokenLogps = Float[Tensor, "T"]
Lengths = Int[Tensor, "N"]
PerCompletion = Float[Tensor, "N"]
PerExample = Float[Tensor, "B"]
Labels = Bool[Tensor, "B"]
PerExampleLengths = Int[Tensor, "B"]
PaddedIds = Int[Tensor, "R S"]

Layout = Literal["paired", "unpaired"]
Message = dict[str, Any]
Text = str | list[Message]


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a row came from: a file (or data-set) name and a line (or row) number, counted from 1."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True)
class PairedExample:
    """A prompt with a better and a worse completion, each plain text or chat messages."""

    prompt: Text
    chosen: Text
    rejected: Text
    origin: Origin

    @property
    def completions(self) -> tuple[Text, ...]:
        return (self.chosen, self.rejected)


@dataclass(frozen=True, slots=True)
class UnpairedExample:
    """A prompt with one completion and a judgement: `label` true is desirable, false undesirable."""

    prompt: Text
    completion: Text
    label: bool
    origin: Origin

    @property
    def completions(self) -> tuple[Text, ...]:
        return (self.completion,)


Example = PairedExample | UnpairedExample


@dataclass(frozen=True, slots=True)
class Completion:
    """Token ids of a completion; `mask[i]` says whether token i is scored (said by the assistant)."""

    ids: tuple[int, ...]
    mask: tuple[bool, ...]

    def __post_init__(self) -> None:
        assert len(self.ids) == len(self.mask)
        assert any(self.mask), "a completion without a scored token is refused when tokenised"

    @property
    def scored(self) -> int:
        return sum(self.mask)


@dataclass(frozen=True, slots=True)
class Row:
    """A prompt and one completion of it: what a model gives a log-probability to."""

    prompt_ids: tuple[int, ...]
    completion: Completion

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.completion.ids)


@dataclass(frozen=True, slots=True)
class TokenizedExample:
    """One row as token ids.

    `completions` holds chosen and rejected (paired) or the one judged completion (unpaired). `mismatched` holds the
    completion of another prompt that KTO's KL baseline scores under this one. `filler` marks a repeated row that only
    evens out the ranks: it weighs 0 in the loss, the counts and the metrics.
    """

    prompt_ids: tuple[int, ...]
    completions: tuple[Completion, ...]
    origin: Origin
    label: bool | None = None
    mismatched: Completion | None = None
    filler: bool = False

    @property
    def layout(self) -> Layout:
        return "unpaired" if len(self.completions) == 1 else "paired"

    def rows(self) -> list[Row]:
        """Every row of the example that is scored, the borrowed one last."""
        borrowed = [] if self.mismatched is None else [self.mismatched]
        return [Row(self.prompt_ids, completion) for completion in (*self.completions, *borrowed)]


@dataclass
class Batch:
    """Sequences for one forward pass and where their scored tokens are.

    `positions[t]` indexes the flattened `[R * S]` hidden states at the token that *predicts* `targets[t]`, the t-th
    scored token; the tokens of a completion are consecutive, and `lengths` counts them. Completions are numbered
    example by example: example b owns completions `b * k ... b * k + k - 1` (chosen before rejected for pairs, k = 2).
    `keys` names each completion with its prompt (see `row_key`), for what is known of it beforehand.
    """

    input_ids: PaddedIds
    attention_mask: PaddedIds
    position_ids: PaddedIds
    positions: Targets
    targets: Targets
    lengths: Lengths
    real: Labels
    labels: Labels | None = None
    mismatched: Batch | None = None
    origins: list[Origin] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)

    @property
    def n_completions(self) -> int:
        return self.lengths.shape[0]

    @property
    def n_examples(self) -> int:
        return self.real.shape[0]

    @property
    def per_example(self) -> int:
        return self.n_completions // self.n_examples

    def counts(self) -> dict[str, int]:
        """What a step's loss may be divided by, fillers left out: `examples` and scored `completion_tokens`.

        With them `tokens`: those of the sequences, prompts included and padding left out, for throughput.
        """
        real = self.real.repeat_interleave(self.per_example)
        return {
            "examples": int(self.real.sum()),
            "completion_tokens": int((self.lengths * real).sum()),
            "tokens": int((self.attention_mask.sum(-1) * real).sum()),
        }

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """Return a copy with every tensor on `device`."""
        return self._each(lambda part: part.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        """Return a copy in page-locked memory (called by the data loader where that helps)."""
        return self._each(lambda part: part.pin_memory())

    def _each(self, change: Callable[[Any], Any]) -> Batch:
        parts = {f.name: getattr(self, f.name) for f in fields(self)}
        changes: dict[str, Any] = {k: change(v) for k, v in parts.items() if isinstance(v, Tensor | Batch)}
        return replace(self, **changes)


@dataclass(frozen=True)
class SequenceLogps:
    """What a loss sees of a group of completions: summed log-probabilities in nats and lengths in tokens.

    `ref` is None for a loss without a reference.
    """

    policy: PerExample
    ref: PerExample | None
    lengths: PerExampleLengths

    @property
    def logratios(self) -> PerExample:
        """`log pi(y|x) - log pi_ref(y|x)`, nats."""
        assert self.ref is not None, "a loss that reads log-ratios declares needs_reference"
        return self.policy - self.ref
