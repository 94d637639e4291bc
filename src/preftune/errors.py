"""The errors preftune raises on purpose.

A message says what is wrong, where, what was expected and what to do. Whatever derives from `PreftuneError` is shown
by the command without a traceback; anything else is a defect of preftune and keeps its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class PreftuneError(Exception):
    """Base of all errors raised on purpose. `exit_code` is what the command returns for it."""

    exit_code = 2


class ConfigError(PreftuneError, ValueError):
    """A run's configuration, or an argument from Python, is not usable."""


class DataError(PreftuneError, ValueError):
    """A file or row of data is not usable. The message starts with its `file:line`."""


class ModelError(PreftuneError, ValueError):
    """A model, tokenizer, adapter or reference is not usable as asked."""


class CacheError(PreftuneError, OSError):
    """Something kept in the cache is missing, damaged or cannot be fetched."""


class TrainingError(PreftuneError, RuntimeError):
    """A run had to stop: a non-finite loss or gradient, or a resume that would change the objective."""

    exit_code = 1


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the known name nearest to `name`, or an empty string."""
    match = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {match[0]!r}?" if match else ""
