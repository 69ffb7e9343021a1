"""Where contents of KV blocks are kept beside the device: host memory, and files behind it. Bytes by content's key.

A content that falls out of memory goes to a file, one that falls out of the files is gone. Both tiers are bounded and
forget what was used longest ago. A file that cannot be read, or is not what was written, is a miss with a line in the
log, and is deleted.
"""

from __future__ import annotations

import logging
import os
import struct
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from threading import Lock

import numpy as np
import numpy.typing as npt

from qiao.engine.prefix import BlockKey
from qiao.observability.throttle import Throttle

logger = logging.getLogger(__name__)

_ABANDONED_SECONDS = 600.0
"""A file that is being written for so long belongs to a process that has ended."""

Content = npt.NDArray[np.uint8]
"""Keys and values of one block over all layers, as bytes [n]."""

_MAGIC = b"qiaokv1\n"
_HEAD = struct.Struct("<8s16sI32s")
"""Magic, checksum of what follows, bytes of the token ids, digest of the block before; then ids and content."""

MOST_PENDING = 256 << 20
"""Bytes that wait to be written; a disk that is slower loses contents, and never holds a step up."""


@dataclass(frozen=True, slots=True)
class OffloadSizes:
    """Bytes of host memory, and a folder with the bytes that its files may take; None for no files.

    ``identity`` names all that a block's bytes depend on besides the tokens.
    """

    host_bytes: int
    folder: Path | None = None
    disk_bytes: int = 0
    identity: str = ""


def private_folder(folder: Path) -> Path:
    """``folder``, made if it is not there. Raises ``OSError`` where it cannot be, or where others may write to it:
    whoever writes there writes what the model has read.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    facts = folder.stat()
    if os.name == "posix" and (facts.st_mode & 0o022 or facts.st_uid not in (0, os.getuid())):
        raise PermissionError("other users may write to it; chmod go-w, or name a folder of your own")
    return folder


class HostTier:
    """Contents in memory, at most ``capacity`` bytes. What falls out is given to ``spill``."""

    def __init__(self, capacity: int, spill: Callable[[BlockKey, Content], None]) -> None:
        self._capacity = capacity
        self._spill = spill
        self._kept: OrderedDict[BlockKey, Content] = OrderedDict()
        self.used = 0

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._kept

    def put(self, key: BlockKey, content: Content) -> None:
        """Keep ``content``; one that is larger than the tier goes on at once."""
        self.drop(key)
        self._kept[key] = content
        self.used += content.nbytes
        while self.used > self._capacity:
            oldest, found = self._kept.popitem(last=False)
            self.used -= found.nbytes
            self._spill(oldest, found)

    def get(self, key: BlockKey) -> Content | None:
        """The content of ``key``, which is now the one used last."""
        if key in self._kept:
            self._kept.move_to_end(key)
        return self._kept.get(key)

    def drop(self, key: BlockKey) -> None:
        """Forget ``key``."""
        found = self._kept.pop(key, None)
        if found is not None:
            self.used -= found.nbytes

    def clear(self) -> None:
        """Forget everything."""
        self._kept.clear()
        self.used = 0


class DiskTier:
    """Contents in files of ``folder``, at most ``capacity`` bytes, those of earlier runs and other models included.

    ``identity`` names all that the bytes of a content depend on besides the tokens. Files are written on a thread of
    their own. Raises ``OSError`` where the folder cannot be made or read.
    """

    def __init__(self, folder: Path, capacity: int, identity: str) -> None:
        self._folder = folder
        self._capacity = capacity
        self._prefix = identity + "-"
        private_folder(folder)
        found = []
        for path in (*folder.glob("*.kv"), *folder.glob("*.part")):
            with suppress(FileNotFoundError):  # another engine over the same folder may delete it just now
                at = path.stat()
                if path.suffix == ".kv":
                    found.append((at, path.name))
                elif time.time() - at.st_mtime > _ABANDONED_SECONDS:
                    path.unlink()
        self._sizes = OrderedDict((name, at.st_size) for at, name in sorted(found, key=lambda one: one[0].st_mtime))
        self._used = sum(self._sizes.values())
        self._pending: dict[str, tuple[BlockKey, Content]] = {}
        self._pending_bytes = 0
        self._failures = 0
        self._lock = Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kv-disk")
        self._throttle = Throttle()
        self._trim()

    @property
    def used(self) -> int:
        """Bytes of all files."""
        return self._used

    @property
    def pending(self) -> tuple[int, int]:
        """Contents that wait to be written, and their bytes."""
        with self._lock:
            return len(self._pending), self._pending_bytes

    @property
    def failures(self) -> int:
        """Contents that could not be written."""
        return self._failures

    def _name(self, key: BlockKey) -> str:
        return f"{self._prefix}{key.digest.hex()}.kv"

    def __contains__(self, key: BlockKey) -> bool:
        name = self._name(key)
        with self._lock:
            return name in self._pending or name in self._sizes

    def put(self, key: BlockKey, content: Content) -> bool:
        """Have ``content`` written, unless it is there; False where too much waits already."""
        name = self._name(key)
        with self._lock:
            if name in self._sizes or name in self._pending:
                return True
            if self._pending_bytes + content.nbytes > MOST_PENDING:
                return False
            self._pending[name] = key, content
            self._pending_bytes += content.nbytes
        self._thread.submit(self._write, name)
        return True

    def unwritten(self, key: BlockKey) -> Content | None:
        """The content of ``key`` while it waits to be written."""
        with self._lock:
            pending = self._pending.get(self._name(key))
        return pending[1] if pending is not None and pending[0] == key else None

    def get(self, key: BlockKey) -> Content | None:
        """The content of ``key``; None where there is none that is whole. Reads a file; any thread may call it."""
        name = self._name(key)
        with self._lock:
            pending = self._pending.get(name)
            if pending is not None:
                return pending[1] if pending[0] == key else None
            if name not in self._sizes:
                return None
            self._sizes.move_to_end(name)
        path = self._folder / name
        try:
            content, problem = _decoded(path.read_bytes(), key)
            os.utime(path)
        except OSError as error:
            content, problem = None, str(error)
        if content is None:
            self._warn("a KV block is not used", path, problem)
            self.drop(key)
        return content

    def drop(self, key: BlockKey) -> None:
        """Delete the file of ``key``."""
        name = self._name(key)
        with self._lock:
            self._forget(name)
        self._unlink([name])

    def clear(self) -> None:
        """Delete all files of this model."""
        with self._lock:
            names = [name for name in (*self._sizes, *self._pending) if name.startswith(self._prefix)]
            for name in names:
                self._forget(name)
        self._unlink(names)

    def flush(self) -> None:
        """Return once everything that waits has been written."""
        self._thread.submit(int).result()

    def _warn(self, what: str, path: Path, problem: str) -> None:
        """On a full disk each block would have a line."""
        told = self._throttle.admit(what, f"{what}: {path}: {problem}")
        if told is not None:
            logger.warning("%s", told)

    def _unlink(self, names: list[str]) -> None:
        for name in names:
            with suppress(OSError):
                (self._folder / name).unlink(missing_ok=True)

    def _forget(self, name: str) -> None:
        self._used -= self._sizes.pop(name, 0)
        self._forget_pending(name)

    def _forget_pending(self, name: str) -> None:
        found = self._pending.pop(name, None)
        if found is not None:
            self._pending_bytes -= found[1].nbytes

    def _write(self, name: str) -> None:
        with self._lock:
            found = self._pending.get(name)
        if found is None:
            return
        data, path = _encoded(*found), self._folder / name
        partial = path.with_suffix(f".{os.getpid()}.part")
        try:
            with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(data)
            partial.replace(path)
        except OSError as error:
            self._warn("a KV block cannot be written", path, str(error))
            data = b""
            self._failures += 1
            with suppress(OSError):
                partial.unlink(missing_ok=True)
        with self._lock:
            wanted = name in self._pending
            self._forget_pending(name)
            if data and wanted:
                self._sizes[name] = len(data)
                self._used += len(data)
        if data and not wanted:  # dropped while it was written
            self._unlink([name])
        self._trim()

    def _trim(self) -> None:
        gone: list[str] = []
        with self._lock:
            while self._used > self._capacity:
                name, size = self._sizes.popitem(last=False)
                self._used -= size
                gone.append(name)
        self._unlink(gone)


def _encoded(key: BlockKey, content: Content) -> bytes:
    body = key.tokens + content.tobytes()
    rest = struct.pack("<I32s", len(key.tokens), key.parent)
    return _HEAD.pack(_MAGIC, _checksum(rest, body), len(key.tokens), key.parent) + body


def _decoded(data: bytes, key: BlockKey) -> tuple[Content | None, str]:
    """The content of a file, or None and what is wrong with it."""
    if len(data) < _HEAD.size:
        return None, "it is cut off"
    magic, checksum, count, parent = _HEAD.unpack_from(data)
    body = memoryview(data)[_HEAD.size :]
    if magic != _MAGIC:
        return None, "it is of another format"
    if checksum != _checksum(struct.pack("<I32s", count, parent), body):
        return None, "its checksum is wrong"
    if (parent, bytes(body[:count])) != (key.parent, key.tokens):
        return None, "it holds other tokens"
    return np.frombuffer(body[count:], np.uint8), ""


def _checksum(*parts: bytes | memoryview) -> bytes:
    state = blake2b(digest_size=16)
    for part in parts:
        state.update(part)
    return state.digest()
