"""Log-probabilities on disk: immutable shards that are only ever added, and an index of their rows in memory.

A shard is an Arrow file named by the hash of its content, so one that is torn, cut or changed shows itself and is set
aside. Writers never touch each other's files: any number of processes and machines may add at once, and a reader takes
the union of what it finds.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from preftune.data.keys import KEY_BYTES
from preftune.errors import CacheError
from preftune.files import write_whole

logger = logging.getLogger(__name__)

SUFFIX = ".arrow"
ASIDE = "aside"


@dataclass(frozen=True)
class ScoredRow:
    """What was computed of one row: its key and the log-probability of each scored token, nats."""

    key: bytes
    token_logps: NDArray[Any]


@dataclass(frozen=True)
class Effort:
    """What computing rows took: sequence tokens (prompts included) and seconds."""

    tokens: int = 0
    seconds: float = 0.0

    def __add__(self, other: Effort) -> Effort:
        return Effort(self.tokens + other.tokens, self.seconds + other.seconds)


@dataclass
class Found:
    """Stored sums in the order asked for: `logps` float64 nats and `tokens`, `known` where there is one."""

    known: NDArray[np.bool_]
    logps: NDArray[np.float64]
    tokens: NDArray[np.int32]
    places: NDArray[np.int64]


class LogpStore:
    """The shards of one namespace.

    Args:
        folder: where they are; need not exist until something is committed.
        per_token: rows count as known only where the value of each token is stored too, and commits store it.
    """

    def __init__(self, folder: Path, per_token: bool = False) -> None:
        self.folder, self.per_token = folder, per_token
        self.effort = Effort()
        self._seen: set[str] = set()
        self._columns: list[pa.Array] = []  # the shards' lists per token
        self._index = _Index.empty()
        self.refresh()

    def __len__(self) -> int:
        return len(self._index.logps)

    def refresh(self) -> int:
        """Take in shards that have been added since; returns how many rows became known."""
        before, tables = len(self), []
        for path in shards_in(self.folder):
            if path.name not in self._seen:
                self._seen.add(path.name)
                table = read_shard(path)
                if table is not None:
                    tables.append(table)
        self._take_in(tables)
        return len(self) - before

    def find(self, keys: Sequence[bytes]) -> Found:
        """What is stored of each key."""
        places = self._index.places(_as_array(keys))
        known = places >= 0
        taken = np.where(known, places, 0)
        if len(self) == 0:
            return Found(known, np.full(len(keys), np.nan), np.zeros(len(keys), np.int32), places)
        logps = np.where(known, self._index.logps[taken], np.nan)
        return Found(known, logps, np.where(known, self._index.tokens[taken], 0), places)

    def token_logps(self, keys: Sequence[bytes]) -> list[NDArray[Any]]:
        """The value of each scored token of each key, all of which are known (a store opened with `per_token`)."""
        shards, rows = self._index.shards, self._index.rows
        return [
            self._columns[shards[place]][int(rows[place])].values.to_numpy()
            for place in self._index.places(_as_array(keys))
        ]

    def commit(self, rows: Sequence[ScoredRow], effort: Effort) -> None:
        """Add rows: known from now on in this process and, once this returns, safe on disk as one new shard.

        Raises `CacheError` where the shard cannot be written; the rows are known in this process all the same.
        """
        self.hold(rows)
        self.effort += effort
        self.write(rows, effort)

    def hold(self, rows: Sequence[ScoredRow]) -> None:
        """Know rows in this process only."""
        self._take_in([_table(rows, self.per_token, Effort())])

    def write(self, rows: Sequence[ScoredRow], effort: Effort) -> None:
        """Write rows that are held as a new shard. Raises `CacheError` where that cannot be."""
        table = _table(rows, self.per_token, effort)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
        content = sink.getvalue()
        name = xxhash.xxh3_128(content).hexdigest() + SUFFIX
        self._seen.add(name)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(self.folder / name, content)
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            raise CacheError(
                f"{self.folder}: {len(rows)} reference values cannot be kept ({error.strerror or error}); "
                + ("make room there" if full else "make the folder writable")
                + ", or set reference.cache_dir or PREFTUNE_CACHE to another folder"
            ) from error

    def _take_in(self, tables: list[pa.Table]) -> None:
        parts = [self._index]
        for table in tables:
            self.effort += Effort(int(table.schema.metadata[b"tokens"]), float(table.schema.metadata[b"seconds"]))
            if self.per_token:
                if "token_logps" not in table.column_names:
                    continue
                self._columns.append(table["token_logps"].combine_chunks())
            parts.append(_Index.of(table, len(self._columns) - 1))
        if len(parts) > 1:
            self._index = _Index.merged(parts)


@dataclass
class _Index:
    """Rows sorted by key; a key is two 64-bit numbers, searched by the first. About 40 bytes a row."""

    high: NDArray[np.uint64]
    low: NDArray[np.uint64]
    logps: NDArray[np.float64]
    tokens: NDArray[np.int32]
    shards: NDArray[np.int32]
    rows: NDArray[np.int32]

    @classmethod
    def empty(cls) -> _Index:
        kinds: list[Any] = [np.uint64, np.uint64, np.float64, np.int32, np.int32, np.int32]
        return cls(*(np.empty(0, kind) for kind in kinds))

    @classmethod
    def of(cls, table: pa.Table, shard: int) -> _Index:
        keys = table["key"].combine_chunks()
        raw = np.frombuffer(keys.buffers()[1], np.uint64, 2 * len(keys), keys.offset * KEY_BYTES).reshape(-1, 2)
        rows = np.arange(len(keys), dtype=np.int32)
        logps, tokens = table["logps"].to_numpy(), table["tokens"].to_numpy()
        return cls(raw[:, 0], raw[:, 1], logps, tokens, np.full(len(keys), shard, np.int32), rows)

    @classmethod
    def merged(cls, parts: list[_Index]) -> _Index:
        """One index of all parts. A row that several parts have keeps the value of the earliest."""
        high, low, *values = (np.concatenate(column) for column in zip(*(vars(p).values() for p in parts), strict=True))
        order = np.lexsort((low, high))
        first = np.ones(len(order), bool)
        h, w = high[order], low[order]
        first[1:] = (h[1:] != h[:-1]) | (w[1:] != w[:-1])
        order = order[first]
        return cls(high[order], low[order], *(column[order] for column in values))

    def places(self, keys: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Where each key `[n, 2]` is, -1 where it is not."""
        if len(self.high) == 0:
            return np.full(len(keys), -1)
        place = np.searchsorted(self.high, keys[:, 0]).astype(np.int64)
        found = np.full(len(keys), -1)
        open_ = np.arange(len(keys))
        while len(open_):  # more than one turn only where two keys share their first half
            at = place[open_]
            open_ = open_[at < len(self.high)]
            open_ = open_[self.high[place[open_]] == keys[open_, 0]]
            hit = self.low[place[open_]] == keys[open_, 1]
            found[open_[hit]] = place[open_[hit]]
            open_ = open_[~hit]
            place[open_] += 1
        return found


def shards_in(folder: Path) -> list[Path]:
    """The shards in a folder, oldest first; none where there is no folder."""
    try:
        entries = [e for e in os.scandir(folder) if e.name.endswith(SUFFIX) and not e.name.startswith(".")]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CacheError(
            f"{folder}: cannot be read ({error.strerror}); mend its permissions, or choose another"
        ) from None
    stamped = []
    for entry in entries:
        try:
            stamped.append((entry.stat().st_mtime_ns, entry.name))
        except FileNotFoundError:  # set aside by another process just now
            continue
    return [folder / name for _, name in sorted(stamped)]


def read_shard(path: Path, set_aside: bool = True) -> pa.Table | None:
    """Read a shard whose content is what its name says; None, with a warning, for one that is damaged.

    Args:
        path: of the shard.
        set_aside: move a damaged one out of the way, into the folder `aside` beside it.
    """
    try:
        content = pa.memory_map(str(path)).read_buffer() if path.stat().st_size else pa.py_buffer(b"")
        if xxhash.xxh3_128(content).hexdigest() + SUFFIX == path.name:
            return pa.ipc.open_file(content).read_all()
    except FileNotFoundError:
        return None
    except (OSError, pa.ArrowException) as error:
        logger.warning("%s: a shard of reference values cannot be read (%s)", path, error)
        return None
    where = "its rows are computed again"
    if set_aside:
        try:
            (path.parent / ASIDE).mkdir(exist_ok=True)
            os.replace(path, path.parent / ASIDE / path.name)
            where = f"set aside in {path.parent / ASIDE}; " + where
        except OSError:
            pass
    logger.warning("%s: a shard of reference values is damaged (its content is not what was written); %s", path, where)
    return None


def remove_scratch(folder: Path, older_than: float = 3600) -> int:
    """Remove what writers that were killed left behind, once it is `older_than` seconds old; returns the bytes."""
    freed = 0
    for path in folder.glob(f".*{SUFFIX}.*"):
        try:
            if time.time() - path.stat().st_mtime > older_than:
                freed += path.stat().st_size
                path.unlink()
        except FileNotFoundError:
            continue
    return freed


def _table(rows: Sequence[ScoredRow], per_token: bool, effort: Effort) -> pa.Table:
    columns: dict[str, Any] = {
        "key": pa.array([row.key for row in rows], pa.binary(KEY_BYTES)),
        "logps": pa.array([float(row.token_logps.sum(dtype=np.float64)) for row in rows], pa.float64()),
        "tokens": pa.array([len(row.token_logps) for row in rows], pa.int32()),
    }
    if per_token:
        kind = pa.float64() if rows[0].token_logps.dtype == np.float64 else pa.float32()
        columns["token_logps"] = pa.array([row.token_logps for row in rows], pa.list_(kind))
    metadata = {"tokens": str(effort.tokens), "seconds": repr(effort.seconds)}
    return pa.table(columns).replace_schema_metadata(metadata)


def _as_array(keys: Sequence[bytes]) -> NDArray[np.uint64]:
    return cast("NDArray[np.uint64]", np.frombuffer(b"".join(keys), np.uint64).reshape(-1, 2))
