"""KV blocks that outlive the device's memory: what the prefix cache evicts is kept in tiers and comes back on a hit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from qiao.contract import KVCache
from qiao.engine.prefix import BlockKey
from qiao.engine.request import OffloadStats
from qiao.engine.tiers import Content, DiskTier, HostTier, OffloadSizes

_STAGED = 32
"""Blocks that are copied at once."""


class BlockCopier:
    """Copies whole blocks over all ``caches`` to the host and back, as bytes.

    ``swap`` is the device's hook ``swap_blocks``; without it blocks are taken by index, which the layouts NHD and HND
    allow.
    """

    def __init__(self, caches: Sequence[KVCache], swap: Callable[..., None] | None) -> None:
        self._caches = caches
        self._swap = swap or _swap_by_index
        self._staging = [_host_copy(cache) for cache in caches]
        self._parts = [part for cache in self._staging for part in _parts(cache)]
        self.block_bytes = sum(part[0].numel() * part.element_size() for part in self._parts)

    def save(self, blocks: Sequence[int]) -> list[Content]:
        """The contents of ``blocks``."""
        found: list[Content] = []
        for low in range(0, len(blocks), _STAGED):
            chunk = blocks[low : low + _STAGED]
            source, target = _ids(chunk), _ids(range(len(chunk)))
            for cache, staged in zip(self._caches, self._staging, strict=True):
                self._swap(cache, staged, source, target)
            rows = np.concatenate([_bytes(part, len(chunk)) for part in self._parts], axis=1)
            found += list(rows) if len(chunk) == 1 else [row.copy() for row in rows]
        return found

    def restore(self, blocks: Sequence[int], contents: Sequence[Content]) -> None:
        """Write ``contents`` into ``blocks``."""
        for low in range(0, len(blocks), _STAGED):
            chunk = blocks[low : low + _STAGED]
            rows = np.stack(contents[low : low + _STAGED])
            start = 0
            for part in self._parts:
                view = _bytes(part, len(chunk))
                view[:] = rows[:, start : start + view.shape[1]]
                start += view.shape[1]
            source, target = _ids(range(len(chunk))), _ids(chunk)
            for cache, staged in zip(self._caches, self._staging, strict=True):
                self._swap(staged, cache, source, target)


class Offload:
    """The tiers of one engine. ``hits`` are tokens that came back, by tier, and ``queries`` those asked for.

    Files are read on a thread of their own, for one run of keys at a time, whose contents lie in memory until ``load``.
    """

    def __init__(self, copier: BlockCopier, block_size: int, sizes: OffloadSizes) -> None:
        self._copier = copier
        self._block_size = block_size
        self.disk = None if sizes.folder is None else DiskTier(sizes.folder, sizes.disk_bytes, sizes.identity)
        self.host = HostTier(sizes.host_bytes, self._spill)
        self.capacity = sizes.host_bytes
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="kv-read")
        self._reading: Future[dict[BlockKey, Content]] | None = None
        self._fetched: dict[BlockKey, Content] = {}
        self.queries = 0
        self.hits = {"host": 0, "disk": 0}

    def _spill(self, key: BlockKey, content: Content) -> None:
        if self.disk is not None:
            self.disk.put(key, content)

    def save(self, evicted: Iterable[tuple[int, BlockKey]]) -> None:
        """Keep the contents of blocks that are about to be overwritten, unless they are kept already."""
        wanted = [(block, key) for block, key in evicted if key not in self.host and not self._on_disk(key)]
        contents = self._copier.save([block for block, _ in wanted])
        for (_, key), content in zip(wanted, contents, strict=True):
            self.host.put(key, content)

    def _on_disk(self, key: BlockKey) -> bool:
        return self.disk is not None and key in self.disk

    def known(self, keys: Sequence[BlockKey]) -> int:
        """Length of the run at the start of ``keys`` that is kept; a file among them may still be found damaged."""
        for i, key in enumerate(keys):
            if key not in self.host and not self._on_disk(key):
                return i
        return len(keys)

    def ready(self, keys: Sequence[BlockKey], wait: bool) -> bool:
        """Whether ``load`` finds all that is known of ``keys``. Else files are being read, for others or for these.

        With ``wait`` it returns when they have been: always True. A file that is found damaged is known no more.
        """
        if self.disk is None:
            return True
        while missing := self._missing(keys[: self.known(keys)]):
            if self._reading is None:
                self._fetched = {key: self._fetched[key] for key in keys if key in self._fetched}
                self._reading = self._reader.submit(self._read, missing)
            if not (wait or self._reading.done()):
                return False
            self._fetched |= self._reading.result()
            self._reading = None
        return True

    def _missing(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """Those of ``keys`` that are in files alone."""
        assert self.disk is not None
        found = []
        for key in keys:
            if key not in self.host and key not in self._fetched:
                content = self.disk.unwritten(key)
                if content is None:
                    found.append(key)
                else:
                    self._fetched[key] = content
        return found

    def _read(self, keys: Sequence[BlockKey]) -> dict[BlockKey, Content]:
        """Contents of files up to the first that is no good, which is deleted. On the reading thread."""
        assert self.disk is not None
        found: dict[BlockKey, Content] = {}
        for key in keys:
            content = self.disk.get(key)
            if content is None or content.nbytes != self._copier.block_bytes:
                self.disk.drop(key)
                break
            found[key] = content
        return found

    def load(self, keys: Sequence[BlockKey]) -> list[Content]:
        """Contents of the longest run at the start of ``keys`` that is in memory: all of it once ``ready`` says so."""
        found: list[Content] = []
        for key in keys:
            content, tier = self.host.get(key), "host"
            if content is None:
                content, tier = self._fetched.get(key), "disk"
            if content is None or content.nbytes != self._copier.block_bytes:
                break
            self.hits[tier] += self._block_size
            found.append(content)
        for key, content in zip(keys, found, strict=False):
            if key not in self.host:
                self.host.put(key, content)
        self._fetched = {}
        return found

    def restore(self, blocks: Sequence[int], contents: Sequence[Content]) -> None:
        """Write ``contents`` into ``blocks`` of the device."""
        self._copier.restore(blocks, contents)

    def forget(self, keys: Iterable[BlockKey]) -> None:
        """Keep nothing of ``keys``, whose contents are wrong."""
        self._drop_fetched()
        for key in keys:
            self.host.drop(key)
            if self.disk is not None:
                self.disk.drop(key)

    def _drop_fetched(self) -> None:
        """Forget what was read, and what is being read when it comes."""
        self._fetched = {}
        self._reading = None

    def stats(self) -> OffloadStats:
        """Totals and sizes now."""
        return OffloadStats(
            queries=self.queries,
            host_hits=self.hits["host"],
            disk_hits=self.hits["disk"],
            host_bytes=self.host.used,
            host_capacity=self.capacity,
            disk_bytes=0 if self.disk is None else self.disk.used,
        )

    def clear(self) -> None:
        """Forget everything of this model."""
        self._drop_fetched()
        self.host.clear()
        if self.disk is not None:
            self.disk.clear()


def _parts(cache: KVCache) -> tuple[torch.Tensor, ...]:
    return tuple(x for x in (cache.key, cache.value, cache.key_scale, cache.value_scale) if x is not None)


def _host_copy(cache: KVCache) -> KVCache:
    """Room for some blocks of ``cache`` in host memory."""

    def room(part: torch.Tensor | None) -> torch.Tensor | None:
        return None if part is None else torch.zeros((_STAGED, *part.shape[1:]), dtype=part.dtype)

    key, value = room(cache.key), room(cache.value)
    assert key is not None and value is not None
    return replace(cache, key=key, value=value, key_scale=room(cache.key_scale), value_scale=room(cache.value_scale))


def _ids(blocks: Iterable[int]) -> torch.Tensor:
    return torch.tensor(list(blocks), dtype=torch.int64)


def _bytes(part: torch.Tensor, count: int) -> npt.NDArray[np.uint8]:
    """The first ``count`` blocks [count, bytes] of a host tensor; the same memory."""
    found: npt.NDArray[np.uint8] = part[:count].reshape(count, -1).view(torch.uint8).numpy()
    return found


def _swap_by_index(source_cache: KVCache, target_cache: KVCache, source: torch.Tensor, target: torch.Tensor) -> None:
    for here, there in zip(_parts(source_cache), _parts(target_cache), strict=True):
        blocks = here.index_select(0, source.to(here.device))
        there.index_copy_(0, target.to(there.device), blocks.to(there.device))
