"""Block manager: who owns which block of the paged KV cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from qiao.engine.prefix import BlockKey, PrefixCache
from qiao.engine.residency import Residency


class BlockManager:
    """Free list and reference counts of ``num_blocks`` blocks of ``block_size`` tokens.

    A block is free, referenced (by one sequence, or by several that share it), or cached: unreferenced, its content
    kept for a prefix hit until the memory is needed. ``cache`` None switches the last state off. ``keep`` gets evicted
    blocks with their keys while their content is still there. ``residency`` is told what happens to blocks.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        cache: PrefixCache | None = None,
        keep: Callable[[list[tuple[int, BlockKey]]], None] | None = None,
        residency: Residency | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.cache = cache
        self._keep = keep
        self.residency = residency
        self.references = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def free(self) -> list[int]:
        """Blocks without reference and content. Read only."""
        return self._free

    @property
    def available(self) -> int:
        """Blocks that can be allocated now, by eviction if need be."""
        return len(self._free) + (len(self.cache.unused) if self.cache is not None else 0)

    @property
    def used(self) -> int:
        """Blocks that a sequence refers to."""
        return self.num_blocks - self.available

    def blocks_for(self, tokens: int) -> int:
        """Blocks that ``tokens`` tokens fill, the last one perhaps in part."""
        return -(-tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """``count`` blocks with one reference each; the caller has made sure that they are ``available``."""
        assert count <= self.available, f"{count} blocks asked, {self.available} available"
        blocks: list[int] = []
        evicted: list[tuple[int, BlockKey]] = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            else:
                assert self.cache is not None
                evicted.append(self.cache.evict())
                block = evicted[-1][0]
            self.references[block] = 1
            blocks.append(block)
        if evicted and self._keep is not None:
            self._keep(evicted)
        if self.residency is not None:
            for block, _ in evicted:
                self.residency.evicted(block)
            self.residency.allocated(blocks)
        return blocks

    def unreferenced(self, blocks: Iterable[int]) -> int:
        """How many of ``blocks`` (of a prefix hit) would leave the available ones when shared."""
        return sum(self.references[b] == 0 for b in blocks)

    def share(self, blocks: Iterable[int]) -> None:
        """One more reference to each of ``blocks``, which are referenced or cached."""
        for block in blocks:
            if self.references[block] == 0:
                assert self.cache is not None
                self.cache.revive(block)
            self.references[block] += 1
            if self.residency is not None:
                self.residency.used(block)

    def release(self, blocks: Sequence[int]) -> None:
        """One reference less to each of a table's ``blocks``; the tail is retired, and so evicted, first."""
        cache = self.cache
        for block in reversed(blocks):
            count = self.references[block] - 1
            assert count >= 0, f"block {block} released without a reference"
            self.references[block] = count
            if count == 0:
                if cache is not None and block in cache:
                    cache.retire(block)
                else:
                    self._give_back(block)

    def _give_back(self, block: int) -> None:
        self._free.append(block)
        if self.residency is not None:
            self.residency.dropped(block)

    def forget(self) -> None:
        """Drop all cached content; referenced blocks stay with their sequences."""
        if self.cache is not None:
            for block in self.cache.clear():
                self._give_back(block)
