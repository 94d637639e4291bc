"""What stored log-probabilities depend on beside their row: the namespace they are kept under."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import torch

from preftune.models.adapters import starts_at_base
from preftune.models.head import causal_lm
from preftune.models.policy import Policy
from preftune.reference.weights import Loaded, digest_of, remembered_digest, tensors_of

# Raised whenever a change of preftune changes log-probabilities by more than rounding.
NUMERICS = 1

# Fields of a model's configuration that do not change its log-probabilities; every other field is taken to. Dropout is
# off in a reference, dtypes are read off the weights, and padding is masked.
IRRELEVANT = frozenset(
    {
        *("_name_or_path", "name_or_path", "transformers_version", "architectures", "auto_map", "tokenizer_class"),
        *("dtype", "torch_dtype", "use_cache", "return_dict", "gradient_checkpointing", "initializer_range"),
        *(
            "pad_token_id",
            "bos_token_id",
            "eos_token_id",
            "sep_token_id",
            "decoder_start_token_id",
            "tie_word_embeddings",
        ),
        *("output_attentions", "output_hidden_states", "output_router_logits", "router_aux_loss_coef"),
        *("id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "task_specific_params"),
        *("chunk_size_feed_forward", "is_encoder_decoder", "cross_attention_hidden_size", "pruned_heads"),
        *(
            "attention_dropout",
            "hidden_dropout",
            "resid_pdrop",
            "embd_pdrop",
            "attn_pdrop",
            "attention_probs_dropout_prob",
        ),
        *("hidden_dropout_prob", "classifier_dropout", "dropout", "activation_dropout", "resid_dropout"),
        *("embedding_dropout", "ffn_dropout", "layerdrop", "summary_first_dropout", "router_jitter_noise"),
    }
)
IRRELEVANT_OF_ADAPTERS = frozenset(
    {
        *("base_model_name_or_path", "revision", "inference_mode", "lora_dropout", "peft_version", "auto_mapping"),
        *("task_type", "init_lora_weights", "eva_config", "corda_config", "loftq_config", "lora_ga_config"),
    }
)


@dataclass(frozen=True)
class Namespace:
    """What the numbers depend on (`facts`), as plain data with one identity. `about` is for people, no part of it."""

    facts: dict[str, Any]
    about: dict[str, str]

    @property
    def id(self) -> str:
        """32 hex digits."""
        return identity_of(self.facts)


def identity_of(facts: dict[str, Any]) -> str:
    """The identity that follows from a namespace's facts."""
    return hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=16).hexdigest()


def namespace_of(
    policy: Policy, adapter: str | None, words: str, loaded: Loaded | None = None, rehash: bool = False
) -> Namespace:
    """The namespace of a model's log-probabilities in eval mode.

    Args:
        policy: model and compute dtype.
        adapter: name of the adapter that is on, or None.
        words: what the reference is, for people.
        loaded: where the base's weights were loaded from, said only if none has been changed since.
        rehash: hash the weights also where a memo of their files says what they are.
    """
    inner = causal_lm(policy.model)
    if adapter is not None and starts_at_base(policy.model):
        adapter = None  # an adapter that does nothing yet: the base's values, whatever its random half is
    base, extra = tensors_of(policy.model, adapter)
    facts = {
        "numerics": NUMERICS,
        "class": type(inner).__name__,
        "config": _without(inner.config.to_dict(), IRRELEVANT),
        "weights": remembered_digest(loaded, lambda: digest_of(base), rehash),
        "adapter": _adapter(policy, adapter, extra),
        "attention": getattr(inner.config, "_attn_implementation", None),
        "compute dtype": str(policy.dtype).removeprefix("torch."),
        "float32 products": torch.get_float32_matmul_precision(),
        "positions": "from 0 at the row's first token",
    }
    return Namespace(json.loads(json.dumps(facts, default=str)), {"reference": words, "model": policy.name})


def _adapter(policy: Policy, name: str | None, tensors: dict[str, Any]) -> dict[str, Any] | None:
    if name is None:
        return None
    config: Any = policy.model
    facts = _without(config.peft_config[name].to_dict(), IRRELEVANT_OF_ADAPTERS)
    ordered = {k: sorted(v) if isinstance(v, set) else v for k, v in facts.items()}
    return {"weights": digest_of(tensors), "config": ordered}


def _without(value: Any, irrelevant: frozenset[str]) -> Any:
    if isinstance(value, dict):
        return {str(k): _without(v, irrelevant) for k, v in value.items() if k not in irrelevant}
    return value


def differences(old: Any, new: Any, key: str = "") -> list[str]:
    """What differs between the facts of two namespaces, one entry each: `config.rope_theta: 10000.0, now 20000.0`."""
    if isinstance(old, dict) and isinstance(new, dict):
        names = sorted(old.keys() | new.keys())
        return [line for n in names for line in differences(old.get(n), new.get(n), f"{key}.{n}" if key else n)]
    return [] if old == new else [f"{key}: {old}, now {new}"]
