"""`preftune cache`: look at and look after the stored reference values."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import typer

from preftune.errors import ConfigError

cache_app = typer.Typer(no_args_is_help=True, help="Look at and look after stored reference values.")

Dir = Annotated[Path | None, typer.Option("--dir", help="Folder of the stores; by default in the user's cache.")]
Start = Annotated[str, typer.Argument(metavar="ID", help="The store's identity, or how it begins.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print data for scripts.")]


@cache_app.command("ls")
def ls(folder: Dir = None, as_json: AsJson = False) -> None:
    """List the stores, the last used first."""
    from preftune.reference import catalog, stores_folder

    root = stores_folder(folder)
    found = [(entry, catalog.count_rows(entry)) for entry in catalog.entries(root)]
    if as_json:
        print(json.dumps([{**entry.as_json(), "rows": rows} for entry, rows in found]))
        return
    for entry, rows in found:
        used = time.strftime("%Y-%m-%d", time.localtime(entry.used))
        size = f"{entry.bytes / 2**20:.1f} MiB in {entry.shards} shards"
        dtype = entry.facts.get("compute dtype")
        print(f"{entry.id[:12]}  {used}  {rows:>9} rows  {size}  {entry.about.get('reference')}, {dtype}")
    print(f"{len(found)} stores in {root}")


@cache_app.command("show")
def show(start: Start, folder: Dir = None, as_json: AsJson = False) -> None:
    """Print what a store's values depend on."""
    from preftune.reference import catalog, stores_folder

    entry = catalog.find_entry(stores_folder(folder), start)
    everything = {**entry.as_json(), "rows": catalog.count_rows(entry)}
    if as_json:
        print(json.dumps(everything))
        return
    from preftune.config import dump_yaml

    print(dump_yaml(everything), end="")


@cache_app.command("verify")
def verify(start: Annotated[str, typer.Argument(metavar="[ID]")] = "", folder: Dir = None) -> None:
    """Compare every shard with its checksum; damaged ones are set aside. Exit code 1 when there were any."""
    from preftune.reference import catalog, stores_folder

    root = stores_folder(folder)
    bad = 0
    for entry in [catalog.find_entry(root, start)] if start else catalog.entries(root):
        damaged = catalog.damaged(entry)
        bad += len(damaged)
        print(f"{entry.id[:12]}: {entry.shards - len(damaged)} of {entry.shards} shards are whole")
    raise typer.Exit(1 if bad else 0)


@cache_app.command("prune")
def prune(
    start: Annotated[list[str] | None, typer.Argument(metavar="[ID]...", help="Stores to remove.")] = None,
    older_than: Annotated[float | None, typer.Option(help="Remove stores not used for so many days.", min=0)] = None,
    everything: Annotated[bool, typer.Option("--all", help="Remove every store.")] = False,
    folder: Dir = None,
) -> None:
    """Remove stores; without saying which, only what serves nothing (damaged shards, leftovers of killed runs)."""
    from preftune.reference import catalog, stores_folder

    root = stores_folder(folder)
    if bool(start) + (older_than is not None) + everything > 1:
        raise ConfigError("preftune cache prune: give stores, --older-than or --all, not several of them")
    stores = catalog.entries(root)
    limit = time.time() - (older_than or 0) * 86400
    if start:
        chosen = [catalog.find_entry(root, one) for one in start]
    else:
        chosen = stores if everything else [e for e in stores if older_than is not None and e.used < limit]
    freed = sum(map(catalog.tidy, stores)) + sum(map(catalog.remove, chosen))
    print(f"removed {len(chosen)} of {len(stores)} stores, {freed / 2**20:.1f} MiB")


@cache_app.command("export")
def export(start: Start, target: Annotated[Path, typer.Argument(metavar="FILE.tar")], folder: Dir = None) -> None:
    """Write a store into one file, to carry to another machine."""
    from preftune.reference import catalog, stores_folder

    entry = catalog.find_entry(stores_folder(folder), start)
    print(f"{target}: {catalog.export(entry, target)} shards of {entry.id[:12]}")


@cache_app.command("import")
def import_(source: Annotated[Path, typer.Argument(metavar="FILE.tar")], folder: Dir = None) -> None:
    """Add what `export` wrote."""
    from preftune.reference import catalog, stores_folder

    identity, new = catalog.import_store(stores_folder(folder), source)
    print(f"{identity[:12]}: {new} shards added")
