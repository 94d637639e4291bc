"""The name of a row under which its reference log-probability is kept."""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Sequence

from preftune.types import Row

KEY_BYTES = 16
_LAYOUT = b"preftune row 1"


def row_key(row: Row) -> bytes:
    """Hash of all that a completion's log-probability depends on beside the model: 16 bytes (blake2b).

    These are the prompt's ids, the completion's ids (so also where one ends and the other begins) and, where not every
    token of the completion is scored, which ones are. Order, padding, neighbours, labels and losses do not enter.
    """
    digest = hashlib.blake2b(_LAYOUT, digest_size=KEY_BYTES)
    digest.update(_bytes([len(row.prompt_ids), *row.prompt_ids]))
    digest.update(_bytes(row.completion.ids))
    if not all(row.completion.mask):
        digest.update(b"mask" + bytes(row.completion.mask))
    return digest.digest()


def _bytes(numbers: Sequence[int]) -> bytes:
    """The same bytes on every machine: little-endian, 8 for each number."""
    packed = array("q", numbers)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()
