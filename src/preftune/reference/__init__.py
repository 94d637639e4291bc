"""Where reference log-probabilities come from: none, the adapter switched off, or a frozen model."""

from preftune.reference.base import (
    AdapterOff,
    AdapterStart,
    FrozenReference,
    NoReference,
    Reference,
    default_reference,
    frozen_copy,
)

__all__ = [
    "AdapterOff",
    "AdapterStart",
    "FrozenReference",
    "NoReference",
    "Reference",
    "default_reference",
    "frozen_copy",
]
