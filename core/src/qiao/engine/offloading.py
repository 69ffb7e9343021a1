"""KV blocks that outlive the device's memory: what the prefix cache evicts is kept in tiers and comes back on a hit."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from qiao.contract import KVCache
from qiao.engine.prefix import BlockKey
from qiao.engine.request import OffloadStats
from qiao.engine.tiers import MOST_PENDING, Content, DiskTier, HostTier, OffloadSizes
from qiao.observability.names import LOOKUP_BUCKETS, SAVE_OUTCOMES, TRANSFER_BUCKETS, WAIT_BUCKETS

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
    """The tiers of one engine. ``hits`` are tokens that came back, by tier, and ``queries`` those asked for. ``clock``
    is in seconds.

    Files are read on a thread of their own, for one run of keys at a time, whose contents lie in memory until ``load``.
    """

    def __init__(
        self,
        copier: BlockCopier,
        block_size: int,
        sizes: OffloadSizes,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._copier = copier
        self._clock = clock
        self._block_size = block_size
        self.disk = None if sizes.folder is None else DiskTier(sizes.folder, sizes.disk_bytes, sizes.identity)
        self.host = HostTier(sizes.host_bytes, self._spill)
        self.capacity = sizes.host_bytes
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="kv-read")
        self._reading: Future[dict[BlockKey, Content]] | None = None
        self._reading_for: Hashable = None
        self._waiting: dict[Hashable, float] = {}
        self._fetched: dict[BlockKey, Content] = {}
        self._counts = OffloadStats(host_capacity=sizes.host_bytes, transfer_capacity=MOST_PENDING)
        self._outcomes = dict.fromkeys(SAVE_OUTCOMES, 0)
        self.queries = 0
        self.hits = {"host": 0, "disk": 0}

    def _spill(self, key: BlockKey, content: Content) -> None:
        # Without files, what falls out of the memory had its time there unless it is larger than that.
        fits = content.nbytes <= self.capacity
        self._counts.failures += not (fits if self.disk is None else self.disk.put(key, content))

    def save(self, evicted: Iterable[tuple[int, BlockKey]]) -> None:
        """Keep the contents of blocks that are about to be overwritten, unless they are kept already."""
        wanted: list[tuple[int, BlockKey]] = []
        for block, key in evicted:
            if key not in self.host and not self._on_disk(key):
                wanted.append((block, key))
                continue
            writing = key not in self.host and self.disk is not None and self.disk.unwritten(key) is not None
            self._outcomes["skipped_in_flight" if writing else "skipped_already_cached"] += 1
        if not wanted:
            return
        began = self._clock()
        contents = self._copier.save([block for block, _ in wanted])
        counts, size = self._counts, len(wanted) * self._copier.block_bytes
        counts.store_seconds += self._clock() - began
        counts.store_bytes += size
        counts.store_sizes.observe(size, TRANSFER_BUCKETS)
        for (_, key), content in zip(wanted, contents, strict=True):
            self.host.put(key, content)
            kept = key in self.host or self._on_disk(key)
            self._outcomes["stored" if kept else "dropped_cpu_full"] += 1

    def _on_disk(self, key: BlockKey) -> bool:
        return self.disk is not None and key in self.disk

    def known(self, keys: Sequence[BlockKey]) -> int:
        """Length of the run at the start of ``keys`` that is kept; a file among them may still be found damaged."""
        for i, key in enumerate(keys):
            if key not in self.host and not self._on_disk(key):
                return i
        return len(keys)

    def look_up(self, keys: Sequence[BlockKey]) -> int:
        """``known``, with its time noted."""
        began = self._clock()
        found = self.known(keys)
        self._counts.lookups.observe(self._clock() - began, LOOKUP_BUCKETS)
        return found

    def ready(self, keys: Sequence[BlockKey], wait: bool, request: Hashable = None) -> bool:
        """Whether ``load`` finds all that is known of ``keys``. Else files are being read, for others or for these.

        With ``wait`` it returns when they have been: always True. A file that is found damaged is known no more.
        ``request`` is who asks; how long it waits is noted.
        """
        if self.disk is None:
            return True
        while missing := self._missing(keys[: self.known(keys)]):
            self._waiting.setdefault(request, self._clock())
            if self._reading is None:
                self._fetched = {key: self._fetched[key] for key in keys if key in self._fetched}
                self._reading, self._reading_for = self._reader.submit(self._read, missing), request
            if not (wait or self._reading.done()):
                return False
            self._fetched |= self._reading.result()
            self._reading = None
        self._waited(request)
        return True

    def _waited(self, request: Hashable) -> None:
        since = self._waiting.pop(request, None)
        if since is not None:
            self._counts.waits.observe(self._clock() - since, WAIT_BUCKETS)

    def leave(self, request: Hashable) -> None:
        """``request`` ended before it started; what was read for it is let go."""
        self._waited(request)
        if self._reading_for is request:
            self._fetched, self._reading_for = {}, None

    def _fetches(self) -> dict[str, int]:
        """Requests that wait for files, by how far these are."""
        mine = self._reading_for in self._waiting
        read = self._reading is not None and self._reading.done()
        return {
            "waiting_to_start": len(self._waiting) - mine,
            "in_progress": int(mine and self._reading is not None and not read),
            "completed_waiting": int((mine and read) or (self._reading is None and bool(self._fetched))),
        }

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
        began = self._clock()
        self._copier.restore(blocks, contents)
        if not blocks:
            return
        counts, size = self._counts, len(blocks) * self._copier.block_bytes
        counts.load_seconds += self._clock() - began
        counts.load_bytes += size
        counts.load_blocks += len(blocks)
        counts.load_sizes.observe(size, TRANSFER_BUCKETS)

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
        found = deepcopy(self._counts)
        found.queries = self.queries
        found.host_hits, found.disk_hits = self.hits["host"], self.hits["disk"]
        found.host_bytes = self.host.used
        found.save_outcomes = dict(self._outcomes)
        found.fetched_blocks = len(self._fetched)
        found.fetched_bytes = sum(content.nbytes for content in self._fetched.values())
        found.fetches = self._fetches()
        if self.disk is not None:
            found.disk_bytes = self.disk.used
            found.pending_blocks, found.pending_bytes = self.disk.pending
            found.failures += self.disk.failures
        return found

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
