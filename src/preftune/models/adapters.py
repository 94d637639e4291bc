"""Low-rank adapters through peft: adding, continuing, switching without side effects."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from preftune.errors import ModelError, nearest, refused_as

REFERENCE_ADAPTER = "reference"


@dataclass(frozen=True)
class Lora:
    """A new low-rank adapter (LoRA, arXiv 2106.09685; DoRA, arXiv 2402.09353).

    Args:
        r: rank, > 0.
        alpha: the update is scaled by alpha / r.
        dropout: on the adapter's input while training, 0 <= p < 1.
        target_modules: names of the linear layers, or "all-linear" (all but the head).
        use_dora: learn magnitude and direction apart.
        modules_to_save: layers trained whole and saved with the adapter.
        bias: "none"; the other values of peft train the base model's biases, which switching the adapter off would
            not undo, so they go only with a frozen reference.
    """

    r: int = 16
    alpha: float = 32
    dropout: float = 0.0
    target_modules: tuple[str, ...] | str = "all-linear"
    use_dora: bool = False
    modules_to_save: tuple[str, ...] = ()
    bias: Literal["none", "all", "lora_only"] = "none"


def add_adapter(model: PreTrainedModel, lora: Lora) -> nn.Module:
    """Wrap `model` with a new adapter; its weights are stored in float32. Raises `ModelError` on a wrong target."""
    import peft

    modules = [name for name, _ in model.named_modules()]
    for key, asked in (("target_modules", lora.target_modules), ("modules_to_save", lora.modules_to_save)):
        for name in () if isinstance(asked, str) else asked:
            if not any(f".{module}".endswith(f".{name}") for module in modules):
                known = sorted({module.rsplit(".", 1)[-1] for module in modules if module})
                raise ModelError(
                    f"model.adapter.{key}: the model has no layer {name!r}{nearest(name, known)} "
                    f"(linear layers of this model: {', '.join(_linear(model))})"
                )
    targets = lora.target_modules if isinstance(lora.target_modules, str) else list(lora.target_modules)
    try:
        config = peft.LoraConfig(
            task_type="CAUSAL_LM",
            r=lora.r,
            lora_alpha=cast("Any", lora.alpha),
            lora_dropout=lora.dropout,
            target_modules=targets,
            use_dora=lora.use_dora,
            modules_to_save=list(lora.modules_to_save) or None,
            bias=lora.bias,
        )
        return cast("nn.Module", peft.get_peft_model(model, config))
    except ValueError as error:
        raise ModelError(f"model.adapter: {error} (linear layers of this model: {', '.join(_linear(model))})") from None


def _linear(model: nn.Module) -> list[str]:
    return sorted({name.rsplit(".", 1)[-1] for name, m in model.named_modules() if isinstance(m, nn.Linear)})


def load_adapter(model: PreTrainedModel, path: str) -> nn.Module:
    """Wrap `model` with an adapter saved earlier, trainable, to go on from it."""
    import peft

    with refused_as(ModelError, f"model.adapter.path: no adapter for this model at {path!r}"):
        adapted = peft.PeftModel.from_pretrained(model, path, is_trainable=True)
        saved = peft.utils.load_peft_weights(path, device="cpu")
        held = peft.get_peft_model_state_dict(adapted, save_embedding_layers=False)
    left = sorted(key for key in saved.keys() - held.keys() if "lora_" in key or "modules_to_save" in key)
    fresh = sorted(held.keys() - saved.keys())
    if left or fresh:
        what = f"the model has no place for {left[0]}" if left else f"it has no weights for {fresh[0]}"
        more = len(left) + len(fresh) - 1
        raise ModelError(
            f"model.adapter.path: {path!r} was made for another model: {what}" + (f" (and {more} more)" if more else "")
        )
    return cast("nn.Module", adapted)


def save_adapter(model: nn.Module, folder: str, state_dict: dict[str, torch.Tensor] | None = None) -> None:
    """Save the trained adapter alone: a frozen copy that served as reference is no part of the result."""
    # "auto" would ask the hub whether the vocabulary was resized; it never is here.
    cast("Any", model).save_pretrained(
        folder, state_dict=state_dict, selected_adapters=[active_adapter(model)], save_embedding_layers=False
    )


def is_adapted(model: nn.Module) -> bool:
    """Whether `model` is a peft model."""
    return hasattr(model, "peft_config")


def active_adapter(model: nn.Module) -> str:
    """Name of the adapter that is trained; `ModelError` when several are active at once."""
    names = list(cast("Any", model).active_adapters)
    if len(names) != 1:
        raise ModelError(f"exactly one adapter has to be active, got {names}; call model.set_adapter(name) first")
    return cast("str", names[0])


def starts_at_base(model: nn.Module) -> bool:
    """Whether the active adapter still changes nothing, read off its weights.

    A low-rank update is nothing while its second factor is 0 (`B`; for embeddings `A`), and a DoRA magnitude while it
    is the norm of the base weight's rows. Anything else is taken for an adapter that has learnt something.
    """
    from peft.tuners.lora import LoraLayer
    from peft.tuners.tuners_utils import BaseTunerLayer

    name = active_adapter(model)
    layers = [m for m in model.modules() if isinstance(m, BaseTunerLayer)]
    return bool(layers) and all(isinstance(m, LoraLayer) and _does_nothing(m, name) for m in layers)


def _does_nothing(layer: Any, name: str) -> bool:
    if name in layer.lora_magnitude_vector:
        base = layer.get_base_layer().weight
        norm = torch.linalg.norm(base.detach().float(), dim=1)
        # The magnitude was computed, and may be stored, in the base's precision.
        rtol = max(1e-6, 2 * torch.finfo(base.dtype).eps) if base.is_floating_point() else 1e-6
        if not torch.allclose(layer.lora_magnitude_vector[name].weight.float().flatten(), norm, rtol=rtol):
            return False
    if name in layer.lora_B:
        return not bool(layer.lora_B[name].weight.any())
    return name in layer.lora_embedding_A and not bool(layer.lora_embedding_A[name].any())


def copy_as_reference(model: nn.Module) -> None:
    """Keep a frozen copy of the active adapter, as it is now, under the name `reference`."""
    import peft

    adapted = cast("Any", model)
    name = active_adapter(model)
    if REFERENCE_ADAPTER in adapted.peft_config:
        raise ModelError(f"the model already holds an adapter named {REFERENCE_ADAPTER!r}; delete or rename it")
    try:
        adapted.add_adapter(REFERENCE_ADAPTER, adapted.peft_config[name])
    except ValueError as error:
        raise ModelError(
            f"this adapter cannot be held twice ({error}), so the model as it started cannot be the reference; "
            "set reference.kind: frozen"
        ) from None
    peft.set_peft_model_state_dict(
        model, peft.get_peft_model_state_dict(model, adapter_name=name), adapter_name=REFERENCE_ADAPTER
    )
    adapted.set_adapter(name)
    for key, parameter in model.named_parameters():
        if f".{REFERENCE_ADAPTER}." in key or key.endswith(f".{REFERENCE_ADAPTER}"):
            parameter.requires_grad_(False)


def outside_adapter(model: nn.Module) -> list[str]:
    """Trainable parameters that switching the adapter off does not undo (biases, norms, resized embeddings)."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import ModulesToSaveWrapper

    undone: set[int] = set()
    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            for layer in module.adapter_layer_names:
                undone.update(id(p) for p in _parameters(getattr(module, layer, None)))
        elif isinstance(module, ModulesToSaveWrapper):
            undone.update(id(p) for p in module.modules_to_save.parameters())
    return [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in undone]


def _parameters(holder: object) -> Iterator[nn.Parameter]:
    if isinstance(holder, nn.Module):
        yield from holder.parameters()
    elif isinstance(holder, nn.Parameter):
        yield holder


@contextmanager
def adapter_state(model: nn.Module, name: str | None) -> Iterator[None]:
    """Run with the adapter `name` active, or with none. Unlike peft's own switches it leaves `requires_grad` alone."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    layers: list[Any] = [m for m in model.modules() if isinstance(m, BaseTunerLayer | AuxiliaryTrainingWrapper)]
    before = [(layer._disable_adapters, layer._active_adapter) for layer in layers]
    try:
        for layer in layers:
            if name is None:
                layer._disable_adapters = True
            else:
                layer._active_adapter = [name]
        yield
    finally:
        for layer, (disabled, active) in zip(layers, before, strict=True):
            layer._disable_adapters, layer._active_adapter = disabled, active


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Run without gradients in eval mode; every module's own mode is restored after."""
    training = [module for module in model.modules() if module.training]
    try:
        for module in training:
            module.training = False
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True
