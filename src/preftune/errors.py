"""The errors preftune raises on purpose.

A message says what is wrong, where, what was expected and what to do. Whatever derives from `PreftuneError` is shown
by the command without a traceback; anything else is a defect of preftune and keeps its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


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
    """A run had to stop: a loss or gradient is not finite."""

    exit_code = 1


@contextmanager
def refused_as(kind: type[PreftuneError], what: str) -> Iterator[None]:
    """Raise `kind` with `what` and the reason in one line for whatever a library raises; its own error is the cause.

    For calls that a user's input can make fail in ways that no one can list (files of other formats, optimizers and
    trackers of other packages).
    """
    try:
        yield
    except PreftuneError:
        raise
    except Exception as error:
        raise kind(f"{what} ({first_line(error)})") from error


def first_line(error: BaseException) -> str:
    """The first line of an error's message that says something, or else the name of its class."""
    kind = type(error).__name__
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    terse = isinstance(error, LookupError | AttributeError | TypeError)  # often no more than a name or number
    return f"{kind}: {line}" if terse and line else line or kind


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the known name nearest to `name`, or an empty string."""
    match = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {match[0]!r}?" if match else ""
