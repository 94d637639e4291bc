"""Where reference log-probabilities come from: none, the adapter switched off, a frozen model, or a store of them."""

from preftune.reference.base import (
    AdapterOff,
    AdapterStart,
    FrozenReference,
    NoReference,
    Reference,
    StartingPolicy,
    default_reference,
    frozen_copy,
    starting_reference,
)
from preftune.reference.cached import CachedReference, stores_folder

__all__ = [
    "AdapterOff",
    "AdapterStart",
    "CachedReference",
    "FrozenReference",
    "NoReference",
    "Reference",
    "StartingPolicy",
    "default_reference",
    "frozen_copy",
    "starting_reference",
    "stores_folder",
]
