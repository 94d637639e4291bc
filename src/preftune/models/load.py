"""Load models and tokenizers by name, with errors that say what to do."""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from preftune.data.template import resolve_chat_template
from preftune.errors import ModelError, first_line, refused_as
from preftune.models.adapters import Lora, add_adapter, load_adapter
from preftune.models.policy import Policy
from preftune.ops import HeadOptions

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_tokenizer(
    name: str,
    revision: str | None = None,
    chat_template: str | None = None,
    trust_remote_code: bool = False,
    key: str = "model.name",
) -> PreTrainedTokenizerBase:
    """Load a tokenizer; `chat_template` (a name, a file or text) replaces the one it brings.

    `key` is what errors call the setting that gave the name.
    """
    from transformers import AutoTokenizer

    with refused_as(ModelError, f"{key}: no usable tokenizer at {name!r}"):
        tokenizer = AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=trust_remote_code)
    if chat_template is not None:
        tokenizer.chat_template = resolve_chat_template(chat_template)
    return cast("PreTrainedTokenizerBase", tokenizer)


def load_config(
    name: str, revision: str | None = None, trust_remote_code: bool = False, key: str = "model.name"
) -> PreTrainedConfig:
    """Load a model's configuration only, and refuse what is not a text-only causal language model."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if revision is not None and Path(name).is_dir():
        raise ModelError(f"{key.split('.')[0]}.revision: {name!r} is a folder; only models on the hub have revisions")
    try:
        config = AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=trust_remote_code)
    except Exception as error:  # damaged files fail in as many ways as there are kinds of values
        where = "no such folder or model on the hub"
        if Path(name).is_dir():
            there = Path(name, "config.json").exists()
            where = "its config.json cannot be used" if there else "is a folder without a config.json"
        raise ModelError(f"{key}: {name!r}: {where} ({first_line(error)})") from error
    seeing = [key for key in ("vision_config", "audio_config") if getattr(config, key, None) is not None]
    if seeing:
        raise ModelError(
            f"{key}: {name!r} ({config.model_type}) takes images or sound ({', '.join(seeing)}); only text models "
            "are supported for now"
        )
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not trust_remote_code:
        raise ModelError(f"{key}: {name!r} ({config.model_type}) is not a causal language model")
    return cast("PreTrainedConfig", config)


def load_model(
    name: str,
    *,
    dtype: torch.dtype,
    revision: str | None = None,
    load_in_4bit: bool = False,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    key: str = "model.name",
) -> PreTrainedModel:
    """Load a causal language model with its weights stored in `dtype` (or in 4 bits, computing in `dtype`)."""
    from transformers import AutoModelForCausalLM

    load_config(name, revision, trust_remote_code, key)
    extra: dict[str, Any] = {}
    if load_in_4bit:
        extra["quantization_config"] = _four_bits(dtype)
    if attn_implementation is not None:
        extra["attn_implementation"] = attn_implementation
    with refused_as(ModelError, f"{key}: {name!r} could not be loaded"):
        model = AutoModelForCausalLM.from_pretrained(
            name, revision=revision, dtype=dtype, trust_remote_code=trust_remote_code, **extra
        )
    return cast("PreTrainedModel", model)


def load_policy(
    name: str,
    *,
    dtype: str = "bfloat16",
    adapter: Lora | str | None = None,
    revision: str | None = None,
    chat_template: str | None = None,
    load_in_4bit: bool = False,
    trainable_dtype: str = "float32",
    attn_implementation: str | None = None,
    dropout: bool = False,
    trust_remote_code: bool = False,
    head: HeadOptions | None = None,
) -> Policy:
    """Load a model to be trained, with its tokenizer.

    Args:
        name: a folder or a name on the hub.
        dtype: what products are computed in: float32, bfloat16 (or float64).
        adapter: a new adapter, the path of a saved one to go on from, or None to train all weights.
        revision: of the model on the hub.
        chat_template: a name, a file or text, where the tokenizer has none or another is wanted.
        load_in_4bit: keep the frozen base in 4 bits (needs an adapter, bitsandbytes and a device it supports).
        trainable_dtype: what trained weights are stored in. float32 keeps small updates; "bfloat16" halves the memory
            and rounds them, with a warning.
        attn_implementation: transformers' name of one, by default its own choice.
        dropout: see `Policy`.
        trust_remote_code: allow code that comes with the model.
        head: how the head is computed (backend, strategy, sizes).
    """
    compute, stored = DTYPES[dtype], DTYPES[trainable_dtype]
    if load_in_4bit and adapter is None:
        raise ModelError("model.load_in_4bit: quantized weights cannot be trained; add model.adapter")
    if stored == torch.bfloat16 and compute != torch.bfloat16:
        raise ModelError(f"model.trainable_dtype: bfloat16 weights cannot compute in {dtype}; set dtype bfloat16")
    wide = torch.promote_types(compute, torch.float32) if stored == torch.float32 else stored
    if stored != torch.float32:
        warnings.warn(
            f"trained weights are stored in {trainable_dtype}: updates smaller than about 0.4 % of a weight are "
            "rounded away; set model.trainable_dtype: float32 unless memory forbids it",
            stacklevel=2,
        )
    model = load_model(
        name,
        dtype=compute if adapter is not None else wide,
        revision=revision,
        load_in_4bit=load_in_4bit,
        attn_implementation=attn_implementation,
        trust_remote_code=trust_remote_code,
    )
    tokenizer = load_tokenizer(name, revision, chat_template, trust_remote_code)
    wrapped: nn.Module = model
    if adapter is not None:
        wrapped = load_adapter(model, adapter) if isinstance(adapter, str) else add_adapter(model, adapter)
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(wide)
    return Policy(wrapped, tokenizer, compute, dropout, head=head)


def _four_bits(dtype: torch.dtype) -> Any:
    from transformers import BitsAndBytesConfig

    if importlib.util.find_spec("bitsandbytes") is None:
        raise ModelError("model.load_in_4bit needs bitsandbytes: pip install 'preftune[quantized]'")
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
    )
