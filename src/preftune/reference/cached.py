"""The reference as data: log-probabilities that are computed once, kept, and looked up ever after."""

from __future__ import annotations

import atexit
import gc
import logging
import random
import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import nn

from preftune.assets import cache_dir
from preftune.data import PreferenceDataset
from preftune.data.keys import row_key
from preftune.errors import CacheError, ModelError
from preftune.models import Policy
from preftune.reference.base import FrozenReference, Reference, StartingPolicy
from preftune.reference.catalog import explain_new, folder_of, register
from preftune.reference.fill import Rows, Work, fill
from preftune.reference.keys import Namespace, namespace_of
from preftune.reference.ranks import Team, find_team, wait_for
from preftune.reference.store import Effort, Found, LogpStore, ScoredRow
from preftune.reference.verify import compare
from preftune.reference.weights import Loaded
from preftune.types import Batch, PerCompletion, TokenLogps

logger = logging.getLogger(__name__)


class CachedReference(Reference):
    """Answers from a store of log-probabilities; what the store lacks is computed once by `source`.

    `prepare` computes the rows of whole data sets before training, verifies some of what is stored and lets go of the
    source's model. Rows that come without (a stream) are computed as they come, unless the source is the starting
    policy, which moves.

    Args:
        source: the reference whose values these are: `AdapterOff`, `FrozenReference`, `StartingPolicy` and their like.
        cache_dir: folder of stores; by default `reference` in the user's cache, or in `PREFTUNE_CACHE`.
        per_token: keep the value of each token, too, for `token_logps`.
        verify_rows: how many stored rows `prepare` computes again to compare; 0 for none.
        loaded: where the source's base weights were loaded from, said only if none has been changed since: it spares
            hashing them. None hashes them as they are in memory.
        rehash: hash them in any case.
        keep_source: hold on to a frozen model after `prepare`, for rows that come later.
    """

    kind = "cached"

    def __init__(
        self,
        source: Reference,
        *,
        cache_dir: str | Path | None = None,
        per_token: bool = False,
        verify_rows: int = 8,
        loaded: Loaded | None = None,
        rehash: bool = False,
        keep_source: bool = False,
    ) -> None:
        self._source: Reference | None = source
        self._words = source.describe()
        self.root = stores_folder(cache_dir)
        self.per_token, self.verify_rows, self.keep_source = per_token, verify_rows, keep_source
        self._loaded, self._rehash = loaded, rehash
        self._late: list[ScoredRow] = []
        self._late_effort, self._late_since = Effort(), time.monotonic()
        self._unsaved: Exception | None = None
        self.account: list[str] = []
        self.worst: float | None = None
        self.work = Work()
        self.hits = self.asked = 0

    @cached_property
    def namespace(self) -> Namespace:
        """What the values depend on; the weights are hashed the first time this is asked for."""
        policy, adapter = self._need_source("its weights were never hashed").scored_by()
        return namespace_of(policy, adapter, self._words, self._loaded, self._rehash)

    @cached_property
    def store(self) -> LogpStore:
        """The values known so far."""
        self._need_source("no value was ever asked for").scored_by()
        return LogpStore(folder_of(self.root, self.namespace.id), self.per_token)

    @cached_property
    def _dtype(self) -> torch.dtype:
        return self._need_source("its dtype is not known").scored_by()[0].dtype

    def describe(self) -> str:
        return self._words

    @property
    def owned(self) -> nn.Module | None:  # type: ignore[override]
        """The source's model, while it is held."""
        return None if self._source is None else self._source.owned

    def scored_by(self) -> tuple[Policy, str | None]:
        return self._need_source("it was let go of").scored_by()

    def to(self, device: torch.device) -> None:
        if self._source is not None:
            self._source.to(device)

    def active(self, model: nn.Module | None = None) -> AbstractContextManager[tuple[Policy, nn.Module | None]]:
        return self._need_source("only its stored values are left").active(model)

    def prepare(self, datasets: Iterable[PreferenceDataset], device: torch.device, quiet: bool = False) -> None:
        """Know every row of the data sets; compute what lacks. On several ranks a collective call.

        Raises `CacheError` where a stored row is not what the source computes now, and where what lacks can no longer
        be computed. `account` says afterwards what was found and done.
        """
        began = time.monotonic()
        rows = {row_key(row): row for data in datasets for example in data.examples for row in example.rows()}
        self._dtype, self.store  # noqa: B018 - what they are read from may be let go of below
        news = explain_new(self.root, self.namespace)
        self.store.refresh()
        known = self._known(rows)
        self._verify(rows, [key for key in rows if key in known])
        team = find_team(self.store.folder)
        lacking = {key: row for key, row in rows.items() if key not in known}
        self.asked, self.hits, self.work = len(rows), len(known), Work()
        if lacking:
            register(self.root, self.namespace)
            self._compute({key: row for key, row in lacking.items() if team.owns(key)}, device, quiet)
            self._wait(lacking, team, device, quiet)
        self.account = self._account(rows, known, news, time.monotonic() - began)
        for line in self.account:
            logger.info("%s", line)
        self.release()

    def release(self) -> None:
        """Let go of the source's model: it has answered what it was needed for."""
        if isinstance(self._source, StartingPolicy):
            self._source.close()
        if isinstance(self._source, FrozenReference) and not self.keep_source:
            self._source = None
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def sequence_logps(self, batch: Batch, model: nn.Module | None = None) -> PerCompletion:
        """Stored log-probability of each completion, `[N]` nats; rows that are not stored yet are computed now."""
        logps = torch.from_numpy(self._find(batch).logps)
        return logps.to(_kept_in(self._dtype)).to(batch.input_ids.device, non_blocking=True)

    def token_logps(self, batch: Batch, model: nn.Module | None = None) -> TokenLogps:
        """Stored log-probability of each scored token, `[T]` nats. Raises `CacheError` unless `per_token` is set."""
        if not self.per_token:
            raise CacheError("values of single tokens are kept only with reference.per_token: true")
        self._find(batch)
        values = np.concatenate(self.store.token_logps(batch.keys))
        return torch.from_numpy(values).to(_kept_in(self._dtype)).to(batch.input_ids.device, non_blocking=True)

    def flush(self) -> None:
        """Bring rows that were computed as they came to the disk."""
        rows, self._late = self._late, []
        atexit.unregister(self.flush)
        if rows:
            register(self.root, self.namespace)
            try:
                self.store.write(rows, self._late_effort)
            except CacheError as error:
                if self._unsaved is None:
                    logger.warning("%s; going on, with the values in memory", error)
                self._unsaved = error
        self._late_effort, self._late_since = Effort(), time.monotonic()

    def _need_source(self, why: str) -> Reference:
        if self._source is None:
            raise ModelError(
                f"the reference ({self._words}) cannot compute anything any more: {why}, and its model was let go of "
                "when training began; keep it with keep_source=True, or set reference.kind: frozen"
            )
        return self._source

    def _known(self, rows: Rows) -> set[bytes]:
        keys = list(rows)
        return {key for key, known in zip(keys, self.store.find(keys).known, strict=True) if known}

    def _compute(self, rows: Rows, device: torch.device, quiet: bool) -> None:
        if not rows:
            return
        source = self._need_source(f"{len(rows)} rows have no stored value")
        if isinstance(source, StartingPolicy) and source.closed:
            raise ModelError(
                f"{len(rows)} rows have no stored reference value, and the model has moved since it was the reference; "
                "give all data sets to the trainer at the start, or set reference.kind: frozen"
            )
        self.work = fill(self.store, rows, source.token_logps, device, f"reference: {self._words}", quiet)
        self._unsaved = self.work.unsaved

    def _wait(self, lacking: Rows, team: Team, device: torch.device, quiet: bool) -> None:
        if team.size > 1 and self._unsaved is not None:
            raise self._unsaved  # the others would wait for it
        keys = list(lacking)

        def unknown() -> int:
            return int((~self.store.find(keys).known).sum())

        if team.size > 1 and wait_for(unknown, self.store.refresh):
            known = self._known(lacking)
            self._compute({key: row for key, row in lacking.items() if key not in known}, device, quiet)

    def _verify(self, rows: Rows, known: Sequence[bytes]) -> None:
        source = self._source
        if source is None or (isinstance(source, StartingPolicy) and source.closed):
            return  # nothing is left to compare with; it was done when there was
        # Not the global generator: which rows are drawn changes nothing else in a run.
        drawn = random.Random().sample(list(known), min(self.verify_rows, len(known)))
        if drawn:
            self.worst = compare(self.store, {key: rows[key] for key in drawn}, source, self.namespace.id)

    def _account(self, rows: Rows, known: set[bytes], news: str | None, seconds: float) -> list[str]:
        lines = [
            f"reference values: {len(known)} of {len(rows)} rows were stored, {self.work.rows} computed here in "
            f"{self.work.effort.seconds:.1f} s ({self.store.folder})"
        ]
        if news is not None:
            lines.append(f"  {news}")
        if known and self.worst is not None:
            lines.append(
                f"  {min(self.verify_rows, len(known))} stored rows computed again: at most {self.worst:.1e} nats a "
                "token apart"
            )
        effort = self.store.effort
        if known and effort.tokens:
            saved = effort.seconds / effort.tokens * sum(len(rows[key]) for key in known)
            lines.append(f"  saved about {saved:.1f} s of computing")
        if self._unsaved is not None:
            lines.append(f"  warning: {self._unsaved}; this run goes on with the values in memory")
        return lines

    def _find(self, batch: Batch) -> Found:
        found = self.store.find(batch.keys)
        if found.known.all():
            return found
        source = self._need_source(f"{int((~found.known).sum())} rows of a batch have no stored value")
        if isinstance(source, StartingPolicy):
            raise ModelError(
                "a batch holds rows that have no stored reference value, and the policy that trains is the reference "
                "as it started; call reference.prepare(datasets, device) before the first step"
            )
        began = time.monotonic()
        # The plain model, not the wrapper: other ranks may have all their rows and make no forward with this one.
        values = source.token_logps(batch).cpu().split(batch.lengths.tolist())
        new = dict(zip(batch.keys, values, strict=True))
        lacking = [key for key, known in zip(batch.keys, found.known, strict=True) if not known]
        rows = [ScoredRow(key, new[key].numpy()) for key in dict.fromkeys(lacking)]
        self._late_effort += Effort(int(batch.attention_mask.sum()), time.monotonic() - began)
        if not self._late:
            atexit.register(self.flush)
        self._late += rows
        self.store.hold(rows)
        if time.monotonic() - self._late_since > 20:
            self.flush()
        return self.store.find(batch.keys)


def _kept_in(dtype: torch.dtype) -> torch.dtype:
    """What a policy of this compute dtype gives its log-probabilities in."""
    return torch.promote_types(dtype, torch.float32)


def stores_folder(given: str | Path | None = None) -> Path:
    """Where stores are: `given`, or `reference` in the cache."""
    return cache_dir() / "reference" if given is None else Path(given).expanduser()
