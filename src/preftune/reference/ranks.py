"""Several processes fill one store: rows are dealt out, and each waits for the others' files, not in a collective."""

from __future__ import annotations

import contextlib
import logging
import socket
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from preftune.data.keys import KEY_BYTES

logger = logging.getLogger(__name__)

# A collective would time out while a slow rank computes. Files do not; a rank that adds none for this long is given up
# on and its rows are computed by whoever waits for them.
PATIENCE = 600.0  # seconds
POLL = 0.2


@dataclass(frozen=True)
class Team:
    """The processes that see the same folder, and which of them this one is."""

    size: int = 1
    place: int = 0

    def owns(self, key: bytes) -> bool:
        """Whether a row is this process's to compute: by its key, so no one has to be asked."""
        return int.from_bytes(key[KEY_BYTES - 4 :], "little") % self.size == self.place


def find_team(folder: Path) -> Team:
    """Which ranks of this run share `folder`: all of them, or (on disks of their own) those of this machine.

    A collective call: every rank makes it. Raises nothing where the folder cannot be written: then each rank is its
    own team, and the store says why nothing is kept.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return Team()
    rank = dist.get_rank()
    shared = [uuid.uuid4().hex]
    dist.broadcast_object_list(shared, src=0)
    marker = folder / f".team-{shared[0]}"
    own = marker.with_name(f"{marker.name}-{rank}")
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        own.touch()
    written = own.exists()
    dist.barrier()
    sees_first = _appears(marker.with_name(f"{marker.name}-0"))
    told: list[tuple[bool, bool, str]] = [(False, False, "")] * dist.get_world_size()
    dist.all_gather_object(told, (written, sees_first, socket.gethostname()))
    dist.barrier()
    with contextlib.suppress(OSError):
        own.unlink()
    if not all(wrote for wrote, _, _ in told):
        return Team()
    if all(sees for _, sees, _ in told):
        return Team(len(told), rank)
    mates = [r for r, (_, _, host) in enumerate(told) if host == socket.gethostname()]
    return Team(len(mates), mates.index(rank))


def _appears(path: Path, seconds: float = 3.0) -> bool:
    """Whether a file shows up; network file systems may take a moment."""
    end = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > end:
            return False
        time.sleep(POLL)
    return True


def wait_for(lacking: Callable[[], int], refresh: Callable[[], int], patience: float = PATIENCE) -> int:
    """Read what others add until nothing lacks, or nothing has been added for `patience` seconds.

    Args:
        lacking: how many rows are not known yet.
        refresh: reads new shards; returns how many rows became known.
        patience: seconds.

    Returns how many rows lack still.
    """
    end = time.monotonic() + patience
    while (left := lacking()) and time.monotonic() < end:
        if refresh():
            end = time.monotonic() + patience
        else:
            time.sleep(POLL)
    if left:
        logger.warning(
            "no other process has added a reference value for %.0f s: computing the %d that lack", patience, left
        )
    return left
