"""Failures of the libraries that transformers' Trainer calls on, as messages that name the setting behind them."""

from __future__ import annotations

from typing import Any

from preftune.errors import ConfigError, refused_as


class ForeignErrors:
    """Goes in front of `transformers.Trainer` among the bases: the calls a user's settings or files can break."""

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Make the optimizer; one that is not installed or refuses its options is a `ConfigError`."""
        name: Any = self.args.optim  # type: ignore[attr-defined]
        with refused_as(ConfigError, f"training.optim: {name.value} cannot be used"):
            return super().create_optimizer(*args, **kwargs)  # type: ignore[misc]

    def init_hf_repo(self, *args: Any, **kwargs: Any) -> None:
        """Make the repository on the hub; no network or no right to is a `ConfigError`."""
        with refused_as(ConfigError, "training.push_to_hub: the hub cannot be reached or refuses"):
            super().init_hf_repo(*args, **kwargs)  # type: ignore[misc]

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: there are no predictions to return; `evaluate` returns every metric."""
        raise ConfigError("predict: log-probabilities are no predictions; use evaluate(dataset)")

    def _load_from_checkpoint(self, resume_from_checkpoint: str, *args: Any, **kwargs: Any) -> None:
        with refused_as(ConfigError, _damaged("weights", resume_from_checkpoint)):
            super()._load_from_checkpoint(resume_from_checkpoint, *args, **kwargs)  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with refused_as(ConfigError, _damaged("optimizer's state", checkpoint)):
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with refused_as(ConfigError, _damaged("random state", checkpoint)):
            super()._load_rng_state(checkpoint)  # type: ignore[misc]


def _damaged(what: str, checkpoint: str | None) -> str:
    return f"training.resume_from_checkpoint: the {what} in {checkpoint} cannot be read; give an earlier checkpoint"
