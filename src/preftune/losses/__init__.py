"""Preference losses: pure functions of log-probabilities with per-example results, and the one list of them.

To add a loss, write one function with the `register` decorator in a module imported here; it is then a name in
configs, in `make_loss`, in the docs and in every test that walks the registry.
"""

from preftune.losses.kto import kto
from preftune.losses.paired import dpo
from preftune.losses.registry import Loss, LossSpec, get_spec, loss_names, make_loss, register

__all__ = ["Loss", "LossSpec", "dpo", "get_spec", "kto", "loss_names", "make_loss", "register"]
