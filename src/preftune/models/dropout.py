"""Switch dropout off for good, in modules and where it is a number handed to a function."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

# An adapter's dropout is asked for by name, so it stays.
ADAPTER_DROPOUT = "lora_dropout"


def disable_dropout(model: nn.Module) -> int:
    """Set every dropout probability of the model itself to 0 and return how many were above 0.

    Covers `nn.Dropout` and its kind, and float attributes of modules whose name says dropout (`attention_dropout` is
    passed to the attention function as a number). The model's configuration is left alone, so a saved model keeps the
    values it came with; an adapter's own dropout is left alone, too.
    """
    changed = 0
    for name, module in model.named_modules():
        if ADAPTER_DROPOUT in name.split("."):
            continue
        if isinstance(module, nn.modules.dropout._DropoutNd):
            changed += module.p > 0
            module.p = 0.0
        for attribute, value in list(vars(module).items()):
            if "dropout" in attribute and isinstance(value, float) and value > 0:
                changed += 1
                setattr(module, attribute, 0.0)
    return changed


def has_adapter_dropout(model: nn.Module) -> bool:
    """Whether an adapter of `model` drops units while training."""
    return any(module.p > 0 for module in _adapter_dropouts(model))


def _adapter_dropouts(model: nn.Module) -> Iterator[nn.Dropout]:
    for name, module in model.named_modules():
        if ADAPTER_DROPOUT in name.split(".") and isinstance(module, nn.Dropout):
            yield module
