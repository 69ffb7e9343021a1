"""Packed weights on disk: a safetensors file for each model, plugin and instruction set, mapped when it is used again.

A file is trusted only if this user alone can write it, its header says that it was made for exactly the same key, and
the checksums of header and tensors agree. Anything else is a miss, and the weights are packed anew. Files are replaced
as a whole and never changed, so that servers that start at the same time, or have a file mapped, do not disturb each
other. A pickle is nowhere.
"""

from __future__ import annotations

import contextlib
import json
import logging
import mmap
import os
import stat
import tempfile
import time
import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO

import torch

from qiao.errors import ModelError
from qiao.loading.safetensors import TensorEntry, read_header

logger = logging.getLogger(__name__)

VARIABLE = "QIAO_PACKED_CACHE"
OFF = "off"

VERSION = 1
"""Of the files' form; others are not read."""

MIN_BYTES = 16 << 20
"""Weights that take less are packed faster than a file is worth."""

LIMIT_BYTES = 32 << 30
"""Most bytes of all files together; those that were used longest ago go first."""

FREE_SHARE = 0.05
"""Share of the disk that stays free: other programs need it more than a start that is some seconds faster."""

_ALIGNMENT = 64
_CHUNK = 4 << 20
_ABANDONED_SECONDS = 3600
_DTYPES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.float8_e4m3fn: "F8_E4M3",
}
_TORCH = {name: dtype for dtype, name in _DTYPES.items()}


@dataclass(frozen=True)
class PackedFile:
    """What a file holds: tensors by name, which are views of the mapped file, and the writer's notes."""

    tensors: Mapping[str, torch.Tensor]
    notes: Any


@dataclass(frozen=True)
class CacheEntry:
    """A file in the folder: for whom it was made, its size in bytes, and when it was last used (seconds since 1970)."""

    path: Path
    model: str
    size: int
    used: float


def cache_folder(setting: str | None, environment: Mapping[str, str] = os.environ) -> Path | None:
    """The folder that ``setting`` (a path, ``off``, or None for the variable or the default) means; None for none.

    The default is ``qiao/packed`` in the user's cache folder (``XDG_CACHE_HOME``, else ``~/.cache``).
    """
    chosen = setting or environment.get(VARIABLE)
    if chosen:
        return None if chosen == OFF else Path(chosen).expanduser()
    base = environment.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path("~/.cache").expanduser()) / "qiao" / "packed"


class PackedCache:
    """The files of one folder. A failure of the disk costs time, not the start: it is logged and counts as a miss."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, key: Mapping[str, Any]) -> Path:
        """Where the weights of ``key`` are kept."""
        return self.folder / f"{blake2b(_text(key).encode(), digest_size=16).hexdigest()}.safetensors"

    def read(self, key: Mapping[str, Any]) -> PackedFile | None:
        """What was written for ``key``, mapped; None where there is nothing, or nothing to be trusted."""
        path = self.path(key)
        try:
            if not path.exists():
                return None
            _check_owner(self.folder)
            _check_owner(path)
            found = _read(path, key)
            os.utime(path)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, ModelError) as error:
            logger.warning("packed weights %s are not used, and made anew: %s", path, error)
            return None
        return found

    def write(self, key: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], notes: Any) -> bool:
        """Keep ``tensors`` (on the host) and ``notes`` (JSON) for ``key``. False where that was not possible."""
        size = sum(tensor.nbytes for tensor in tensors.values())
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_owner(self.folder)
            self._make_room(size)
            handle, part = tempfile.mkstemp(suffix=".part", dir=self.folder)
            try:
                with os.fdopen(handle, "wb") as stream:
                    _write(stream, key, tensors, notes)
                    stream.flush()
                    os.fsync(stream.fileno())
                os.replace(part, self.path(key))
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(part)
                raise
        except (OSError, ValueError) as error:
            logger.warning("packed weights are not kept in %s: %s", self.folder, error)
            return False
        return True

    def entries(self) -> list[CacheEntry]:
        """All files, the last used first."""
        found = []
        for path in self.folder.glob("*.safetensors") if self.folder.is_dir() else ():
            with contextlib.suppress(OSError):
                facts = path.stat()
                found.append(CacheEntry(path, _model_of(path), facts.st_size, facts.st_mtime))
        return sorted(found, key=lambda entry: -entry.used)

    def clear(self) -> int:
        """Delete all files; how many bytes they had. What a server has mapped stays on the disk until it ends."""
        freed = 0
        for entry in self.entries():
            with contextlib.suppress(OSError):
                entry.path.unlink()
                freed += entry.size
        return freed

    def _make_room(self, size: int) -> None:
        """Delete old files until ``size`` more bytes fit. Raises ``ValueError`` where they cannot."""
        for part in self.folder.glob("*.part"):
            with contextlib.suppress(OSError):
                if time.time() - part.stat().st_mtime > _ABANDONED_SECONDS:
                    part.unlink()
        if size > LIMIT_BYTES:
            raise ValueError(f"{size} bytes are more than the limit of {LIMIT_BYTES}")
        entries = self.entries()
        held = sum(entry.size for entry in entries)
        total, free = size + held, self._free() - size
        if free + held < 0:
            raise ValueError(f"{size} bytes would leave less than {FREE_SHARE:.0%} of the disk free")
        while entries and (total > LIMIT_BYTES or free < 0):
            oldest = entries.pop()
            with contextlib.suppress(OSError):
                oldest.path.unlink()
            total, free = total - oldest.size, free + oldest.size  # one that is mapped frees its bytes later

    def _free(self) -> float:
        """Bytes that may be taken from the disk."""
        disk = os.statvfs(self.folder)
        return float((disk.f_bavail - FREE_SHARE * disk.f_blocks) * disk.f_frsize)


def source_identity(files: Iterable[Path]) -> list[list[Any]]:
    """What tells these files from others: name, size, time of change, and a digest of 64 samples of 4 KiB.

    A digest of all bytes would have to read all of them at each start. It would only help against a file that was
    changed in place with its size and its time kept, in none of the samples.
    """
    found = []
    for file in files:
        facts = file.stat()
        digest = blake2b(digest_size=16)
        with file.open("rb") as stream:
            for i in range(64):
                stream.seek(max(0, facts.st_size - 4096) * i // 63)
                digest.update(stream.read(4096))
        found.append([file.name, facts.st_size, facts.st_mtime_ns, digest.hexdigest()])
    return found


def code_identity(folders: Iterable[Path]) -> str:
    """A digest of the Python files in ``folders``: weights that older code made must not outlive it."""
    digest = blake2b(digest_size=16)
    for file in sorted(path for folder in folders for path in folder.glob("*.py")):
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)


def _check_owner(path: Path) -> None:
    """Raise ``ValueError`` unless only this user, or root, can have written ``path``."""
    facts = path.lstat()
    if not (stat.S_ISREG(facts.st_mode) or stat.S_ISDIR(facts.st_mode)):
        raise ValueError(f"{path} is no plain file or folder")
    if facts.st_uid not in (os.geteuid(), 0) or facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ValueError(f"others can write {path}; chmod go-w it, or choose another folder with --packed-cache")


def _write(stream: BinaryIO, key: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], notes: Any) -> None:
    header: dict[str, Any] = {}
    parts: list[bytes | memoryview] = []
    sums: dict[str, int] = {}
    at = 0
    for name, tensor in tensors.items():
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
        pad = -at % _ALIGNMENT
        if pad:
            header[f"pad.{at}"] = {"dtype": "U8", "shape": [pad], "data_offsets": [at, at + pad]}
            parts.append(bytes(pad))
            at += pad
        end = at + data.nbytes
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}
        parts.append(data)
        sums[name], at = zlib.crc32(data), end
    told = {"version": VERSION, "key": key, "notes": notes, "sums": sums}
    metadata = {"qiao": _text(told), "check": str(zlib.crc32((_text(told) + _text(header)).encode()))}
    text = json.dumps({"__metadata__": metadata, **header}, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    stream.write(len(text).to_bytes(8, "little") + text)
    for part in parts:
        stream.write(part)


def _metadata(stream: BinaryIO) -> tuple[dict[str, str], dict[str, Any], int]:
    """Metadata and tensors of a header, and where the data begin."""
    length = int.from_bytes(stream.read(8), "little")
    header = json.loads(stream.read(length))
    return header.pop("__metadata__"), header, 8 + length


def _model_of(path: Path) -> str:
    try:
        read_header(path)
        with path.open("rb") as stream:
            return str(json.loads(_metadata(stream)[0]["qiao"])["key"]["model"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ModelError):
        return "not readable"


def _read(path: Path, key: Mapping[str, Any]) -> PackedFile:
    entries = read_header(path)  # sizes and places are checked there
    with path.open("rb") as stream:
        metadata, header, start = _metadata(stream)
        told = json.loads(metadata["qiao"])
        if metadata["check"] != str(zlib.crc32((_text(told) + _text(header)).encode())):
            raise ValueError("damaged header")
        if told["version"] != VERSION or _text(told["key"]) != _text(key):
            raise ValueError("made for another model, plugin or version")
        _check_sums(stream.fileno(), entries, told["sums"], start)
        mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)  # a stray write would not reach the file
    wanted = [entry for entry in entries if entry.name in told["sums"]]
    return PackedFile({entry.name: _view(mapped, entry, start) for entry in wanted}, told["notes"])


def _check_sums(file: int, entries: list[TensorEntry], sums: Mapping[str, int], start: int) -> None:
    """Read all tensors past the map, so that what is not used later takes no memory of the process."""

    def damaged(entry: TensorEntry) -> str:
        value, at = 0, start + entry.start
        while at < start + entry.end:
            data = os.pread(file, min(_CHUNK, start + entry.end - at), at)
            if not data:
                return entry.name
            value, at = zlib.crc32(data, value), at + len(data)
        return "" if value == sums[entry.name] else entry.name

    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        for name in pool.map(damaged, (entry for entry in entries if entry.name in sums)):
            if name:
                raise ValueError(f"damaged: {name}")


def _view(mapped: mmap.mmap, entry: TensorEntry, start: int) -> torch.Tensor:
    dtype = _TORCH[entry.dtype]
    if entry.end == entry.start:
        return torch.empty(entry.shape, dtype=dtype)
    count = (entry.end - entry.start) // dtype.itemsize
    return torch.frombuffer(mapped, dtype=dtype, count=count, offset=start + entry.start).view(entry.shape)
