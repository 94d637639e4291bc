"""Models, adapters and heads: everything that knows transformers and peft."""

from preftune.models.adapters import Lora
from preftune.models.load import load_policy, load_tokenizer
from preftune.models.policy import Policy

__all__ = ["Lora", "Policy", "load_policy", "load_tokenizer"]
