"""From `data:` to tokenized rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from preftune.assets import resolve
from preftune.config import RunConfig
from preftune.data import PreferenceDataset, RowReport, load_examples, to_unpaired, tokenize_examples
from preftune.data.formats import Loaded
from preftune.data.holdout import hold_out
from preftune.data.sources import is_hub_name
from preftune.errors import ConfigError, DataError
from preftune.losses import Loss
from preftune.models import load_tokenizer
from preftune.models.load import load_config
from preftune.types import PairedExample, TokenizedExample

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

DEFAULT_MAX_LENGTH = 4096


@dataclass
class Data:
    """Tokenized rows for training and evaluation, with the account of each source."""

    train: PreferenceDataset
    eval: PreferenceDataset | None
    reports: list[RowReport] = field(default_factory=list)

    def lines(self) -> list[str]:
        """The account in words."""
        out = [line for report in self.reports for line in report.lines()]
        if self.train.layout == "unpaired":
            desirable, undesirable = self.train.label_counts()
            out.append(f"  labels: {desirable} desirable, {undesirable} undesirable")
        return out


def prepare_data(config: RunConfig) -> Data:
    """Read and tokenise the rows, knowing the tokenizer and the model's configuration only."""
    model = config.model
    name = resolve(model.name)
    limit = _max_length(config, load_config(name, model.revision, model.trust_remote_code))
    tokenizer = load_tokenizer(name, model.revision, model.chat_template, model.trust_remote_code)
    loss = config.loss.make()
    _require_hub_for_splits(config)
    loaded = _of_layout(load_examples(resolve(config.data.train), config.data.split), loss, config.data.train)
    held_out: Loaded | None = None
    eval_name = config.data.train
    if isinstance(config.data.eval, float):
        loaded, held_out = hold_out(loaded, config.data.eval, config.data.seed)
        eval_name = f"{eval_name} ({config.data.eval:.0%} held out)"
    elif config.data.eval is not None:
        eval_name = config.data.eval
        held_out = _of_layout(load_examples(resolve(eval_name), config.data.eval_split), loss, eval_name)
    train, report = _tokenized(config, loaded, tokenizer, limit, loss, config.data.train)
    _require_both_classes(config, train)
    if held_out is None:
        return Data(train, None, [report])
    evaluation, eval_report = _tokenized(config, held_out, tokenizer, limit, loss, eval_name, train.examples)
    eval_report.notes = [note for note in eval_report.notes if note not in report.notes]
    return Data(train, evaluation, [report, eval_report])


def _of_layout(loaded: Loaded, loss: Loss, source: str) -> Loaded:
    """Bring rows to the loss's layout: pairs become unpaired rows; the other way there is no way."""
    paired = bool(loaded.examples) and isinstance(loaded.examples[0], PairedExample)
    if loss.spec.layout == "paired" and loaded.examples and not paired:
        raise ConfigError(
            f"loss.name: {loss.name} takes pairs, but {source} holds single completions with labels; use loss.name: kto"
        )
    if loss.spec.layout == "unpaired" and paired:
        return Loaded(list(to_unpaired(loaded.examples)), loaded.bad, loaded.unused_columns)
    return loaded


def _tokenized(
    config: RunConfig,
    loaded: Loaded,
    tokenizer: PreTrainedTokenizerBase,
    limit: int,
    loss: Loss,
    source: str,
    lenders: Sequence[TokenizedExample] = (),
) -> tuple[PreferenceDataset, RowReport]:
    return tokenize_examples(
        loaded,
        tokenizer,
        max_length=limit,
        truncation=config.data.truncation,
        bad_rows=config.data.bad_rows,
        source=source,
        mismatched_seed=config.data.seed if loss.spec.needs_kl_baseline else None,
        lenders=lenders,
    )


def _require_hub_for_splits(config: RunConfig) -> None:
    """A split is a hub data set's: given for a file, or for a share, it would do nothing."""
    for key, split, source in (("split", "train", config.data.train), ("eval_split", "test", config.data.eval)):
        if getattr(config.data, key) != split and not (isinstance(source, str) and is_hub_name(resolve(source))):
            raise ConfigError(f"data.{key}: has no effect: {source!r} is no data set on the hub; leave it out")


def _require_both_classes(config: RunConfig, dataset: PreferenceDataset) -> None:
    if dataset.layout == "unpaired" and 0 in dataset.label_counts() and not config.data.allow_one_class:
        which = "desirable" if dataset.label_counts()[1] == 0 else "undesirable"
        raise DataError(
            f"{config.data.train}: every row is {which}, so nothing is told apart; check the label column, or set "
            "data.allow_one_class: true"
        )


def _max_length(config: RunConfig, model_config: PreTrainedConfig) -> int:
    names = ("max_position_embeddings", "n_positions", "max_seq_len")
    positions = next((p for n in names if isinstance(p := getattr(model_config, n, None), int) and p > 0), None)
    if config.data.max_length is None:
        return min(positions or DEFAULT_MAX_LENGTH, DEFAULT_MAX_LENGTH)
    if positions is not None and config.data.max_length > positions:
        raise ConfigError(f"data.max_length: {config.data.max_length} is more than the model's {positions} positions")
    return config.data.max_length
