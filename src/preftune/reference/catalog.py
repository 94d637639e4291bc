"""The stores in the cache: what each stands for, and looking after them."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import tarfile
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import xxhash

from preftune.errors import CacheError
from preftune.files import write_whole
from preftune.reference.keys import Namespace, differences, identity_of
from preftune.reference.store import ASIDE, SUFFIX, LogpStore, read_shard, remove_scratch, shards_in

DESCRIPTION = "namespace.json"
SHOWN = 3  # differing facts named when a namespace is new


@dataclass(frozen=True)
class Entry:
    """One store: its identity, what it stands for, and how much it holds."""

    id: str
    folder: Path
    facts: dict[str, Any]
    about: dict[str, str]
    shards: int
    bytes: int
    used: float

    def as_json(self) -> dict[str, Any]:
        """All of it as plain data; `used` is seconds since 1970."""
        return {**vars(self), "folder": str(self.folder)}


def folder_of(root: Path, identity: str) -> Path:
    """Where a namespace's store is."""
    return root / identity


def register(root: Path, namespace: Namespace) -> None:
    """Say beside the shards what they are the values of. What cannot be written is left to the store to report."""
    path = folder_of(root, namespace.id) / DESCRIPTION
    if _read(path) is not None:
        return
    made = {
        "made": time.strftime("%Y-%m-%d %H:%M:%S"),
        "by": f"preftune {version('preftune')}, torch {version('torch')}, transformers {version('transformers')}",
        "on": platform.node(),
    }
    content = {"id": namespace.id, "about": {**namespace.about, **made}, "facts": namespace.facts}
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, (json.dumps(content, indent=2) + "\n").encode())


def explain_new(root: Path, namespace: Namespace) -> str | None:
    """Why nothing is stored under a namespace yet: what differs from the nearest other. None where it is not new."""
    path = folder_of(root, namespace.id) / DESCRIPTION
    if _read(path) is not None:
        with contextlib.suppress(OSError):
            os.utime(path)  # when it was last used
        return None
    others = [(differences(entry.facts, namespace.facts), entry) for entry in entries(root)]
    if not others:
        return f"new namespace {namespace.id[:12]}: the first here"
    found, nearest = min(others, key=lambda pair: (len(pair[0]), -pair[1].used))
    more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return f"new namespace {namespace.id[:12]}: unlike {nearest.id[:12]} in {'; '.join(found[:SHOWN])}{more}"


def entries(root: Path) -> list[Entry]:
    """Every store under `root`, the last used first."""
    found = []
    for path in root.glob(f"*/{DESCRIPTION}"):
        content = _read(path)
        if content is not None:
            shards = shards_in(path.parent)
            size = sum(shard.stat().st_size for shard in shards)
            facts, about = content["facts"], content["about"]
            found.append(Entry(content["id"], path.parent, facts, about, len(shards), size, path.stat().st_mtime))
    return sorted(found, key=lambda entry: -entry.used)


def find_entry(root: Path, start: str) -> Entry:
    """The store whose identity begins with `start`. Raises `CacheError` for none and for several."""
    fitting = [entry for entry in entries(root) if start and entry.id.startswith(start)]
    if len(fitting) != 1:
        known = ", ".join(entry.id[:12] for entry in entries(root)) or "none"
        what = "no store begins with that" if not fitting else f"{len(fitting)} stores begin with that"
        raise CacheError(f"{start!r}: {what}; there are in {root}: {known}")
    return fitting[0]


def count_rows(entry: Entry) -> int:
    """How many rows a store knows."""
    return len(LogpStore(entry.folder))


def damaged(entry: Entry) -> list[str]:
    """Read every shard; set those aside whose content is not what was written, and return their names."""
    return [path.name for path in shards_in(entry.folder) if read_shard(path) is None]


def remove(entry: Entry) -> int:
    """Delete a store; returns the bytes."""
    size = sum(path.stat().st_size for path in entry.folder.rglob("*") if path.is_file())
    try:
        # The description goes last, so that what a failure leaves behind is still known by its name.
        for path in [*shards_in(entry.folder), entry.folder / DESCRIPTION]:
            path.unlink()
        shutil.rmtree(entry.folder)
    except OSError as error:
        raise CacheError(f"{entry.folder}: cannot be removed ({error.strerror})") from None
    return size


def tidy(entry: Entry) -> int:
    """Delete what serves nothing in a store: damaged shards that were set aside, and leftovers of killed writers."""
    freed = remove_scratch(entry.folder)
    aside = entry.folder / ASIDE
    if aside.is_dir():
        freed += sum(path.stat().st_size for path in aside.iterdir())
        shutil.rmtree(aside)
    return freed


def export(entry: Entry, target: Path) -> int:
    """Write a store into one tar file; returns its shards. Damaged ones are set aside and left out."""
    try:
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            made = Path(scratch, target.name)
            whole = [path for path in shards_in(entry.folder) if read_shard(path) is not None]
            with tarfile.open(made, "w") as tar:
                for path in [entry.folder / DESCRIPTION, *whole]:
                    tar.add(path, f"{entry.id}/{path.name}")
            os.replace(made, target)
    except OSError as error:
        raise CacheError(f"{target}: cannot be written ({error.strerror})") from None
    return len(whole)


def import_store(root: Path, source: Path) -> tuple[str, int]:
    """Add what `export` wrote, from this machine or another; returns the identity and how many shards were new.

    Every shard is checked before it is taken in. Raises `CacheError` where the file is not an export or is damaged.
    """
    new = 0
    try:
        with tarfile.open(source) as tar:
            members = {member.name: member for member in tar.getmembers() if member.isfile()}
            files = {name: tar.extractfile(member) for name, member in members.items()}
            contents = {name: file.read() for name, file in files.items() if file is not None}
    except (OSError, tarfile.TarError) as error:
        raise CacheError(f"{source}: no export of preftune that can be read ({error})") from None
    description = next((name for name in contents if name.endswith(f"/{DESCRIPTION}")), None)
    content = None if description is None else _parse(contents.pop(description))
    if content is None:
        raise CacheError(f"{source}: no export of preftune: it holds no {DESCRIPTION} that fits its name")
    folder = folder_of(root, content["id"])
    for name, data in contents.items():
        short = name.rpartition("/")[2]
        if xxhash.xxh3_128(data).hexdigest() + SUFFIX != short:
            raise CacheError(f"{source}: {short} is damaged; export it again")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if _read(folder / DESCRIPTION) is None:
            write_whole(folder / DESCRIPTION, (json.dumps(content, indent=2) + "\n").encode())
        for name, data in contents.items():
            path = folder / name.rpartition("/")[2]
            if not path.exists():
                write_whole(path, data)
                new += 1
    except OSError as error:
        raise CacheError(f"{folder}: cannot be written ({error.strerror})") from None
    return content["id"], new


def _read(path: Path) -> dict[str, Any] | None:
    try:
        return _parse(path.read_bytes())
    except OSError:
        return None


def _parse(raw: bytes) -> dict[str, Any] | None:
    """A description whose identity follows from its facts; None for anything else."""
    try:
        content = json.loads(raw)
        fits = content["id"] == identity_of(content["facts"]) and isinstance(content["about"], dict)
    except (ValueError, LookupError, TypeError):
        return None
    return dict(content) if fits else None
