"""What a run is, as plain data: saved with every checkpoint and compared when it is resumed."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from preftune.data import PreferenceDataset
from preftune.errors import ConfigError
from preftune.models.adapters import is_adapted
from preftune.reference import CachedReference
from preftune.train.objective import Objective

if TYPE_CHECKING:
    from transformers import TrainingArguments

logger = logging.getLogger(__name__)

FILE, COUNTED = "preftune_run.json", "preftune_counted.json"
# Without these a resumed run would go on with a fresh optimizer and schedule, to other weights, and say nothing.
STATE = ("optimizer.pt", "scheduler.pt")
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


def identify(objective: Objective, rows: PreferenceDataset, args: TrainingArguments) -> Identity:
    """What has to be the same for a run to be gone on with.

    Loss, reference and base with their weights (of an adapted model those that do not move), the data, and what fixes
    which rows a step takes: the seed of the order and the rows per step. How a step is split may change.
    """
    model, reference = objective.policy.model, objective.reference
    owned = reference.owned
    seed = args.data_seed if args.data_seed is not None else args.seed
    split = args.per_device_train_batch_size, args.gradient_accumulation_steps, args.world_size
    return {
        **objective.describe(),
        "dropout of the model": objective.policy.dropout,
        "weights": weights_checksum(model, False if is_adapted(model) else None),
        "reference weights": None if owned is None else weights_checksum(owned),
        "reference values": reference.namespace.id if isinstance(reference, CachedReference) else None,
        "data": rows.fingerprint,
        "order": {"seed": seed, "rows per step (micro-batch x accumulation x processes)": math.prod(split)},
    }


def _sums(tensor: Tensor) -> Iterator[Tensor]:
    """Two sums modulo 2^64 per block of bytes, one weighted by position so that swapped values show as well."""
    data = tensor.contiguous().view(-1).view(torch.uint8)
    for block in data.split(BLOCK):
        words = torch.zeros(-(-block.numel() // 8), dtype=torch.int64, device=block.device)
        words.view(torch.uint8)[: block.numel()] = block
        place = torch.arange(1, words.numel() + 1, device=words.device)
        yield torch.stack([words.sum(), (words * (place * 0x9E3779B1)).sum()])


def save_identity(identity: Identity, counted: dict[str, Any], folder: str | Path) -> None:
    """Write the identity into a checkpoint, and what had been counted by then."""
    Path(folder, COUNTED).write_text(json.dumps(counted, indent=2) + "\n", encoding="utf-8")
    Path(folder, FILE).write_text(json.dumps(identity, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def read_counted(checkpoint: str | Path) -> dict[str, Any]:
    """What had been counted when the checkpoint was saved (see `PreferenceTrainer`)."""
    return dict(_read(Path(checkpoint, COUNTED)))


def find_checkpoint(resume: str | bool | None, output_dir: str) -> str | None:
    """The folder to resume from: `resume` itself, for True the last whole one in `output_dir`, None where not asked.

    A checkpoint that was being written when its run was stopped is passed over with a warning.
    """
    if not resume:
        return None
    if resume is not True:
        if (missing := _missing(Path(str(resume)))) is not None:
            raise ConfigError(f"training.resume_from_checkpoint: {resume}: no whole checkpoint of preftune ({missing})")
        return str(resume)
    folders = [p for p in Path(output_dir).glob("checkpoint-*") if p.name.removeprefix("checkpoint-").isdecimal()]
    for folder in sorted(folders, key=lambda p: int(p.name.removeprefix("checkpoint-")), reverse=True):
        if (missing := _missing(folder)) is None:
            return str(folder)
        logger.warning("%s is not a whole checkpoint (%s), passed over", folder, missing)
    raise ConfigError(f"training.resume_from_checkpoint: {output_dir}: no checkpoint to resume from")


def _missing(folder: Path) -> str | None:
    """What a checkpoint lacks, in words; None for a whole one."""
    if not folder.is_dir():
        return "no such folder"
    for name in STATE:
        if not (folder / name).exists():
            return f"{name} is missing; training.save_only_model leaves it out"
    # The identity is written last, so it says that all else is there.
    damaged = [name for name in ("trainer_state.json", COUNTED, FILE) if _read(folder / name) is None]
    return f"{damaged[0]} is missing or damaged" if damaged else None


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def require_same_run(identity: Identity, checkpoint: str | Path) -> None:
    """Raise `ConfigError` with a list of what differs when the checkpoint belongs to another run."""
    changes = _differences(_read(Path(checkpoint, FILE)), json.loads(json.dumps(identity)))
    if changes:
        raise ConfigError(
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
