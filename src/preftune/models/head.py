"""Find a model's head, describe it, and let the model's own forward return log-probabilities.

The head has to run inside the forward of the model: sharding wrappers gather its weights there and nowhere else. So
the causal language model gets an instance-level `forward` that, when it is given `logp_positions` and `logp_targets`,
runs the backbone and returns `token_logps`; without them it is the model's own forward, unchanged.
"""

from __future__ import annotations

import functools
import types
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils import ModelOutput

from preftune.errors import ModelError
from preftune.ops import Head, token_logps


@dataclass
class LogpsOutput(ModelOutput):
    """What the forward returns when asked for log-probabilities."""

    token_logps: Tensor | None = None


def causal_lm(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside an adapter wrapper, or the model itself."""
    inner = cast("Any", model).get_base_model() if hasattr(model, "get_base_model") else model
    if not isinstance(inner, PreTrainedModel):
        raise ModelError(f"expected a transformers model or a peft model around one, got {type(inner).__name__}")
    return inner


def describe_head(model: PreTrainedModel) -> Head:
    """Describe the head of a causal language model as it is now.

    A plain linear head is described by its weight and bias, read anew at each forward (wrappers swap them). Anything
    else that sits there (an adapter, a quantized layer, a saved module, a hooked layer) is run as a module.
    """
    module = model.get_output_embeddings()
    if uses_own_head(model):
        return Head(module=functools.partial(_own_logits, model))
    if module is None:
        raise ModelError(f"{type(model).__name__} has no language-model head (get_output_embeddings() is None)")
    scale, softcap = _after_head(model.config)
    if type(module) is nn.Linear and not (module._forward_hooks or module._forward_pre_hooks):
        return Head(module.weight, module.bias, scale=scale, softcap=softcap)
    return Head(module=module, scale=scale, softcap=softcap)


def _after_head(config: Any) -> tuple[float, float | None]:
    """Scale and soft cap that the model's forward applies to the logits, by the names its configuration gives them."""
    scale = 1.0
    for name, divides in (("logit_scale", False), ("lm_head_multiplier", False), ("logits_scaling", True)):
        value = getattr(config, name, None)
        if isinstance(value, int | float):
            # HyperCLOVA X multiplies by what the Granite family divides by.
            scale *= 1 / value if divides and config.model_type != "hyperclovax" else value
    softcap = getattr(config, "final_logit_softcapping", None)
    return scale, float(softcap) if softcap else None


def uses_own_head(model: nn.Module) -> bool:
    """Whether the model's own forward makes the logits of each chunk (see `use_own_head`)."""
    return bool(getattr(causal_lm(model), "_preftune_own_head", False))


def use_own_head(model: nn.Module) -> None:
    """From now on let the model's own forward turn hidden states into logits, whatever it does to them."""
    causal_lm(model)._preftune_own_head = True


class _Answer(BaseModelOutputWithPast):
    """What a backbone returns; what else a forward reads from it (router logits, attentions) is None."""

    def __getattr__(self, name: str) -> None:
        return None


class _Stand:
    """Stands in for an object: some attributes are given, all others are its own."""

    def __init__(self, original: Any, **given: Any) -> None:
        self.__dict__.update(given, _original=original)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_original"], name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["answer"]


def _own_logits(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """`[T, V]` logits as the model's forward makes them, with a stand-in for its backbone that answers `hidden`."""
    answer = _Answer(last_hidden_state=hidden[None])
    backbone = _Stand(model.base_model, answer=answer)
    stand = _Stand(model, **{model.base_model_prefix: backbone})
    return cast(
        "Tensor", type(model).forward(cast("Any", stand), inputs_embeds=hidden[None], use_cache=False).logits[0]
    )


def install(model: nn.Module) -> None:
    """Give the causal language model inside `model` the forward described above. Doing it twice changes nothing."""
    inner = causal_lm(model)
    if "forward" in vars(inner):
        if getattr(inner.forward, "preftune", False):
            return
        raise ModelError(f"{type(inner).__name__}.forward is already replaced by something else; give a fresh model")
    if inner.base_model is inner:
        raise ModelError(f"{type(inner).__name__} is a backbone without a head; load it with AutoModelForCausalLM")
    # Bound to the instance, not closed over it, so that a deep copy of the model calls its own layers.
    inner.forward = types.MethodType(_forward_of(cast("Any", type(inner))), inner)


@functools.cache
def _forward_of(cls: type[PreTrainedModel]) -> Any:
    # `wraps` keeps the signature, which generation reads to learn what the model accepts.
    @functools.wraps(cls.forward)
    def forward(
        self: PreTrainedModel,
        *args: Any,
        logp_positions: Tensor | None = None,
        logp_targets: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        if logp_positions is None or logp_targets is None:
            return cls.forward(self, *args, **kwargs)
        hidden = self.base_model(*args, use_cache=False, **kwargs)[0]
        rows = hidden.flatten(0, 1).index_select(0, logp_positions)
        return LogpsOutput(token_logps=token_logps(rows, describe_head(self), logp_targets))

    forward.preftune = True  # type: ignore[attr-defined]
    return forward


@torch.no_grad()
def hidden_and_head(model: nn.Module, **inputs: Any) -> tuple[Tensor, Head]:
    """The last hidden states `[R, S, H]` of an unwrapped model and its head, for reporting."""
    inner = causal_lm(model)
    return cast("Tensor", inner.base_model(use_cache=False, **inputs)[0]), describe_head(inner)
