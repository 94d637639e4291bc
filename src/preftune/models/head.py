"""Find a model's head, describe it, and let the model's own forward return log-probabilities.

The head has to run inside the forward of the model: sharding wrappers gather its weights there and nowhere else. So
the causal language model gets an instance-level `forward` that, when it is given `logp_positions` and `logp_targets`,
runs the backbone and returns `token_logps`; without them it is the model's own forward, unchanged. A head that is
sharded by itself is gathered by hooks on its own call, and gets such a `forward` as well.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils import ModelOutput

from preftune.errors import ModelError
from preftune.ops import Head, HeadOptions, TokenExtras, token_logps


@dataclass
class LogpsOutput(ModelOutput):
    """What the forward returns when asked for log-probabilities: `[T]` each; all but the first where asked for."""

    token_logps: Tensor | None = None
    entropy: Tensor | None = None
    log_sum_squares: Tensor | None = None
    mean_logit: Tensor | None = None
    is_top: Tensor | None = None


def causal_lm(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside an adapter wrapper, or the model itself."""
    inner = cast("Any", model).get_base_model() if hasattr(model, "get_base_model") else model
    if not isinstance(inner, PreTrainedModel):
        raise ModelError(f"expected a transformers model or a peft model around one, got {type(inner).__name__}")
    return inner


def describe_head(model: PreTrainedModel) -> Head:
    """Describe the head of a causal language model as it is now.

    A plain linear head is described by its weight and bias, read anew at each forward (wrappers swap them). Anything
    else that sits there (an adapter, a quantized layer, a hooked layer) is run as a module.
    """
    if uses_own_head(model):
        return Head(module=functools.partial(_own_logits, model))
    module = _head_module(model)
    scale, softcap = _after_head(model.config)
    if _is_plain(module) and not (module._forward_hooks or module._forward_pre_hooks):
        return Head(module.weight, module.bias, scale=scale, softcap=softcap)
    return Head(module=module, scale=scale, softcap=softcap)


def _head_module(model: PreTrainedModel) -> Any:
    """The module that makes the logits: of several that an adapter put there, the one that is on."""
    module: Any = model.get_output_embeddings()
    if module is None:
        raise ModelError(f"{type(model).__name__} has no language-model head (get_output_embeddings() is None)")
    if hasattr(module, "base_layer") and module.disable_adapters and not module.merged:
        return module.base_layer  # an adapter on the head that is switched off: the reference's plain head
    if not hasattr(module, "modules_to_save"):
        return module
    adapter = module.active_adapters[0]
    off = module.disable_adapters or adapter not in module.modules_to_save
    return module.original_module if off else module.modules_to_save[adapter]


def _is_plain(module: nn.Module) -> bool:
    # By the forward rather than the class, which sharding replaces by one of its own.
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


def _gathers_itself(module: nn.Module) -> bool:
    """Whether hooks on the head's own call bring its weights together: FSDP2 around it, or DeepSpeed's ZeRO-3."""
    from torch.distributed.fsdp import FSDPModule

    return _is_plain(module) and (isinstance(module, FSDPModule) or hasattr(module.weight, "ds_id"))


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


def install(model: nn.Module, options: HeadOptions | None = None) -> None:
    """Give the causal language model inside `model` the forward described above. Doing it twice changes nothing.

    `options` say how its head is computed; None leaves what was said before.
    """
    inner: Any = causal_lm(model)
    if options is not None:
        inner._preftune_head_options = options
    if "forward" in vars(inner):
        if getattr(inner.forward, "preftune", False):
            return
        raise ModelError(f"{type(inner).__name__}.forward is already replaced by something else; give a fresh model")
    if inner.base_model is inner:
        raise ModelError(f"{type(inner).__name__} is a backbone without a head; load it with AutoModelForCausalLM")
    # Bound to the instance, not closed over it, so that a deep copy of the model calls its own layers.
    inner.forward = types.MethodType(_forward_of(cast("Any", type(inner))), inner)


def _score(model: PreTrainedModel, hidden: Tensor, targets: Tensor, extras: bool) -> LogpsOutput:
    """What the head says of `targets` at `hidden [T, H]`; called inside the model's forward."""
    options = getattr(model, "_preftune_head_options", HeadOptions())

    def ask(rows: Tensor, head: Head) -> tuple[Tensor, TokenExtras | None]:
        if extras:
            return token_logps(rows, head, targets, options, extras=True)
        return token_logps(rows, head, targets, options), None

    module = _head_module(model)
    if uses_own_head(model) or not _gathers_itself(module):
        logps, more = ask(hidden, describe_head(model))
    else:
        scale, softcap = _after_head(model.config)
        module.forward = types.MethodType(_linear_or, module)
        logps, more = module(hidden, lambda rows: ask(rows, Head(module.weight, module.bias, scale, softcap)))
    return LogpsOutput(logps, *(vars(more).values() if more is not None else ()))


def _linear_or(layer: nn.Linear, hidden: Tensor, inside: Callable[[Tensor], Any] | None = None) -> Any:
    """The forward of a head that gathers itself: its own, or what is to be done while its weights are whole."""
    return type(layer).forward(layer, hidden) if inside is None else inside(hidden)


@functools.cache
def _forward_of(cls: type[PreTrainedModel]) -> Any:
    # `wraps` keeps the signature, which generation reads to learn what the model accepts.
    @functools.wraps(cls.forward)
    def forward(
        self: PreTrainedModel,
        *args: Any,
        logp_positions: Tensor | None = None,
        logp_targets: Tensor | None = None,
        logp_extras: bool = False,
        **kwargs: Any,
    ) -> Any:
        if logp_positions is None or logp_targets is None:
            return cls.forward(self, *args, **kwargs)
        hidden = self.base_model(*args, use_cache=False, **kwargs)[0]
        rows = hidden.flatten(0, 1).index_select(0, logp_positions)
        return _score(self, rows, logp_targets, logp_extras)

    forward.preftune = True  # type: ignore[attr-defined]
    return forward


@torch.no_grad()
def hidden_and_head(model: nn.Module, **inputs: Any) -> tuple[Tensor, Head]:
    """The last hidden states `[R, S, H]` of an unwrapped model and its head, for reporting."""
    inner = causal_lm(model)
    return cast("Tensor", inner.base_model(use_cache=False, **inputs)[0]), describe_head(inner)
