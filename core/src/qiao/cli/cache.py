"""``qiao cache``: the packed weights on disk, and how to be rid of them."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from qiao.loading.packed_cache import CacheEntry


def cache(
    folder: Annotated[str | None, typer.Option("--packed-cache", help="The folder; as for `qiao serve`.")] = None,
    clear: Annotated[bool, typer.Option("--clear", help="Delete all files.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> None:
    """List the packed weights that starts have kept, or delete them. They are made again when they are missing."""
    from qiao.loading.packed_cache import PackedCache, cache_folder

    where = cache_folder(folder)
    held = PackedCache(where) if where is not None else None
    entries = held.entries() if held is not None else []
    freed = held.clear() if held is not None and clear else 0
    if as_json:
        files = [{"file": str(e.path), "model": e.model, "bytes": e.size, "used": e.used} for e in entries]
        data = {"schema": 1, "folder": str(where) if where else None, "files": files, "freed_bytes": freed}
        json.dump(data, sys.stdout, indent=2)
        print()
        return
    print(
        f"{where or 'packed weights are not kept (off)'}: {_mib(sum(e.size for e in entries))} in {len(entries)} files"
    )
    if clear:
        print(f"deleted {_mib(freed)}")
    else:
        _show(entries)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("cache")(cache)


def _mib(size: int) -> str:
    return f"{size / 2**20:.0f} MiB"


def _show(entries: list[CacheEntry]) -> None:
    for entry in entries:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used))
        print(f"  {entry.model}  {_mib(entry.size)}  last used {used}  {entry.path.name}")
