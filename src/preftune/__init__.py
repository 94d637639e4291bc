"""preftune tunes language models on preferences, offline: exact, fast and light.

The parts, from data to a trained adapter:

    loaded = preftune.load_examples("prefs.jsonl")
    policy = preftune.load_policy("HuggingFaceTB/SmolLM2-135M-Instruct", adapter=preftune.Lora(r=16))
    rows, report = preftune.tokenize_examples(loaded, policy.tokenizer, max_length=2048)
    objective = preftune.Objective(policy, preftune.default_reference(policy), preftune.make_loss("dpo", beta=0.1))
    trainer = preftune.PreferenceTrainer(objective, preftune.training_arguments("runs/first"), rows)
    trainer.train()
"""

from importlib.metadata import version as _version

from preftune.config import training_arguments
from preftune.data import PreferenceDataset, StepSampler, collate, load_examples, to_unpaired, tokenize_examples
from preftune.errors import CacheError, ConfigError, DataError, ModelError, PreftuneError, TrainingError
from preftune.losses import loss_names, make_loss, register
from preftune.models import Lora, Policy, load_policy
from preftune.ops import Head, HeadOptions, TokenExtras, TokenLogProbs, token_logps
from preftune.reference import (
    AdapterOff,
    AdapterStart,
    CachedReference,
    FrozenReference,
    NoReference,
    StartingPolicy,
    default_reference,
    frozen_copy,
    starting_reference,
)
from preftune.train import Objective, PreferenceTrainer
from preftune.types import Batch, SequenceLogps

__version__ = _version("preftune")

__all__ = [
    "AdapterOff",
    "AdapterStart",
    "Batch",
    "CacheError",
    "CachedReference",
    "ConfigError",
    "DataError",
    "FrozenReference",
    "Head",
    "HeadOptions",
    "Lora",
    "ModelError",
    "NoReference",
    "Objective",
    "Policy",
    "PreferenceDataset",
    "PreferenceTrainer",
    "PreftuneError",
    "SequenceLogps",
    "StartingPolicy",
    "StepSampler",
    "TokenExtras",
    "TokenLogProbs",
    "TrainingError",
    "collate",
    "default_reference",
    "frozen_copy",
    "load_examples",
    "load_policy",
    "loss_names",
    "make_loss",
    "register",
    "starting_reference",
    "to_unpaired",
    "token_logps",
    "tokenize_examples",
    "training_arguments",
]
