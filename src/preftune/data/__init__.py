"""From files of judgements to batches of token ids. Knows tokenizers, not models."""

from preftune.data.dataset import PreferenceDataset, RowReport, tokenize_examples
from preftune.data.formats import load_examples, to_unpaired
from preftune.data.pack import collate
from preftune.data.sampler import StepSampler

__all__ = [
    "PreferenceDataset",
    "RowReport",
    "StepSampler",
    "collate",
    "load_examples",
    "to_unpaired",
    "tokenize_examples",
]
