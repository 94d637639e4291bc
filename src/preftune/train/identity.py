"""What a run is, as plain data: saved with every checkpoint and compared when it is resumed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.trainer_utils import get_last_checkpoint

from preftune.errors import ConfigError, TrainingError

FILE = "preftune_run.json"
BLOCK = 2**26  # bytes summed at once, so that a checksum needs little memory
Identity = dict[str, Any]


def weights_checksum(model: nn.Module, trainable: bool | None = None) -> str:
    """A checksum over names, shapes, dtypes and all bytes of a model's parameters, computed where they live.

    Args:
        model: not sharded.
        trainable: only those that are trained (True), only those that are not (False), or all (None).
    """
    digest = hashlib.blake2b(digest_size=12)
    names: list[str] = []
    sums: list[Tensor] = []
    for name, parameter in model.named_parameters():
        if trainable is not None and parameter.requires_grad is not trainable:
            continue
        names.append(f"{name} {tuple(parameter.shape)} {parameter.dtype}")
        sums.extend(_sums(parameter.detach()))
    digest.update("\n".join(names).encode())
    if sums:
        digest.update(torch.stack([s.cpu() for s in sums]).numpy().tobytes())
    return digest.hexdigest()


def _sums(tensor: Tensor) -> Iterator[Tensor]:
    """Two sums modulo 2^64 per block of bytes, one weighted by position so that swapped values show as well."""
    data = tensor.contiguous().view(-1).view(torch.uint8)
    for block in data.split(BLOCK):
        words = torch.zeros(-(-block.numel() // 8), dtype=torch.int64, device=block.device)
        words.view(torch.uint8)[: block.numel()] = block
        place = torch.arange(1, words.numel() + 1, device=words.device)
        yield torch.stack([words.sum(), (words * (place * 0x9E3779B1)).sum()])


def save_identity(identity: Identity, folder: str | Path) -> None:
    """Write the identity into a checkpoint."""
    Path(folder, FILE).write_text(json.dumps(identity, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def find_checkpoint(resume: str | bool | None, output_dir: str) -> str | None:
    """The folder to resume from: `resume` itself, for True the last in `output_dir`, None where nothing is asked."""
    if not resume:
        return None
    folder = get_last_checkpoint(output_dir) if resume is True else str(resume)
    if folder is None or not Path(folder, "trainer_state.json").is_file():
        where = f"{output_dir}: no checkpoint to resume from" if resume is True else f"{resume}: no checkpoint"
        raise ConfigError(f"training.resume_from_checkpoint: {where}")
    return folder


def require_same_run(identity: Identity, checkpoint: str | Path) -> None:
    """Raise `TrainingError` with a list of what differs when the checkpoint belongs to another run."""
    path = Path(checkpoint, FILE)
    if not path.exists():
        raise TrainingError(
            f"{checkpoint} is no checkpoint of preftune ({FILE} is missing), so it cannot be told whether loss, data, "
            "base and reference are the same; start a new run from the model instead"
        )
    saved = json.loads(path.read_text(encoding="utf-8"))
    current = json.loads(json.dumps(identity))
    changes = _differences(saved, current)
    if changes:
        raise TrainingError(
            f"cannot resume from {checkpoint}: this run is not the one that was saved\n"
            + "\n".join(f"  {key}: saved {old}, now {new}" for key, old, new in changes)
            + "\nset these back, or start a new run with another output_dir"
        )


def _differences(saved: Any, current: Any, key: str = "") -> list[tuple[str, str, str]]:
    if isinstance(saved, dict) and isinstance(current, dict):
        return [
            change
            for name in sorted(saved.keys() | current.keys())
            for change in _differences(saved.get(name, "nothing"), current.get(name, "nothing"), f"{key}.{name}")
        ]
    return [] if saved == current else [(key.lstrip("."), str(saved), str(current))]
