"""Content hashes of a model's weights, and a memo that spares hashing files that have not changed."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
import xxhash
from torch import Tensor, nn

from preftune.assets import cache_dir
from preftune.errors import ModelError
from preftune.files import write_whole
from preftune.models.adapters import is_adapted

BLOCK = 2**26  # elements copied from a device at once
# A file may change twice within a tick of its clock, so what was learnt that soon after a change is not remembered.
UNSETTLED = 2.0  # seconds


def tensors_of(model: nn.Module, adapter: str | None) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A model's tensors by the names they have without an adapter around them: the base's, and those of `adapter`.

    Parameters, buffers (also those that are not saved) and what a quantized layer keeps beside its weight. Base
    tensors are named alike with and without an adapter, so the same base is recognised.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    everything = {**dict(model.named_buffers()), **model.state_dict()}
    wrapped = {name for name, m in model.named_modules() if isinstance(m, BaseTunerLayer | AuxiliaryTrainingWrapper)}
    base: dict[str, Tensor] = {}
    extra: dict[str, Tensor] = {}
    for name, tensor in everything.items():
        if not isinstance(tensor, Tensor) or _moves_by_itself(model, name):
            continue
        owner = next((p for p in _parents(name) if p in wrapped), None)
        if owner is None:
            base[_plain(name, model)] = tensor
            continue
        kind, *rest = name.removeprefix(f"{owner}.").split(".")
        if kind in ("base_layer", "original_module"):
            base[_plain(".".join([owner, *rest]), model)] = tensor
        elif adapter is not None and rest and rest[0] == adapter:
            extra[_plain(".".join([owner, kind, *rest[1:]]), model)] = tensor
    return base, extra


def _parents(name: str) -> Iterator[str]:
    """The modules a tensor is in, innermost last."""
    parts = name.split(".")
    return (".".join(parts[:end]) for end in range(1, len(parts)))


def _plain(name: str, model: nn.Module) -> str:
    return name.removeprefix("base_model.model.") if is_adapted(model) else name


def _moves_by_itself(model: nn.Module, name: str) -> bool:
    """Rotary frequencies that the forward rewrites follow from the configuration and the batch."""
    if not name.endswith("inv_freq"):
        return False
    kinds = getattr(model.get_submodule(name.rpartition(".")[0]), "rope_type", "")
    return any(
        "dynamic" in kind or kind == "longrope" for kind in (kinds.values() if isinstance(kinds, dict) else [kinds])
    )


def digest_of(tensors: dict[str, Tensor]) -> str:
    """Hash over every name, shape, dtype and byte: 32 hex digits. Names may come in any order.

    Bytes are hashed by xxh3 (128 bits, as fast as memory is read), their list by blake2b.
    """
    lines = [f"{name} {tuple(t.shape)} {t.dtype} {_hash_bytes(name, t)}" for name, t in sorted(tensors.items())]
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()


def _hash_bytes(name: str, tensor: Tensor) -> str:
    if tensor.is_meta:
        raise ModelError(f"the weight {name} is on no device (meta), so it cannot be told what it is; load the model")
    digest = xxhash.xxh3_128()
    for block in tensor.detach().contiguous().view(-1).split(BLOCK):
        digest.update(cast("Any", block.cpu().view(torch.uint8).numpy()))
    return digest.hexdigest()


@dataclass(frozen=True)
class Loaded:
    """How weights came from files: `folder`, when loading began (seconds since 1970), and what else decided on them.

    Said by whoever loaded the model and has not changed a weight since.
    """

    folder: Path
    began: float
    how: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def begin(cls, name: str, revision: str | None, **how: Any) -> Loaded | None:
        """To be called before loading; None where the files of `name` are not known."""
        folder = Path(name)
        if not folder.is_dir():
            from huggingface_hub import try_to_load_from_cache

            found = try_to_load_from_cache(name, "config.json", revision=revision)
            if not isinstance(found, str):
                return None
            folder = Path(found).parent
        return cls(folder, time.time(), how)

    def signature(self) -> dict[str, Any] | None:
        """What the files are by size, times and inode; None while one has changed too lately to tell."""
        files: dict[str, tuple[int, ...]] = {}
        for path in sorted(p for p in self.folder.rglob("*") if p.is_file()):
            found = path.stat()
            if max(found.st_mtime, found.st_ctime) > self.began - UNSETTLED:
                return None
            stamps = (found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_dev)
            files[str(path.relative_to(self.folder))] = stamps
        return {"files": files, "how": self.how}


def remembered_digest(loaded: Loaded | None, compute: Callable[[], str], rehash: bool = False) -> str:
    """The digest of weights that came from files as `loaded` says, computed when no memo of them can be trusted.

    Args:
        loaded: None hashes always: weights made or changed in memory.
        compute: hashes the weights as they are in memory.
        rehash: do not trust the memo, write it anew.
    """
    signature = None if loaded is None else loaded.signature()
    if signature is None:
        return compute()
    from transformers import __version__ as reader

    text = json.dumps({**signature, "transformers": reader, "torch": torch.__version__}, sort_keys=True)
    memo = cache_dir() / "weights" / f"{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}.json"
    if not rehash:
        try:
            return str(json.loads(memo.read_text(encoding="utf-8"))["digest"])
        except (OSError, ValueError, LookupError, TypeError):
            pass
    digest = compute()
    try:
        memo.parent.mkdir(parents=True, exist_ok=True)
        write_whole(memo, json.dumps({"digest": digest, "folder": str(loaded and loaded.folder)}).encode())
    except OSError:  # a memo saves time; a folder that cannot be written is reported by the store
        pass
    return digest


def forget_memos(folder: Path | None = None) -> int:
    """Remove every memo; returns how many there were."""
    memos = list(((folder or cache_dir()) / "weights").glob("*.json"))
    for memo in memos:
        os.unlink(memo)
    return len(memos)
