"""Prefix cache: full blocks found again by their content.

A block's key chains a SHA-256 digest over (parent digest, token ids); the chain starts from a digest of the tenant's
name and salt, so tenants never share, and of the LoRA adapter, whose keys and values differ from the model's. The key
also carries what was digested, and the lookup compares it, so that even two contents with one digest would not be
confused.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence as Items
from hashlib import sha256
from typing import NamedTuple


class BlockKey(NamedTuple):
    """Identity of one full block: the chained ``digest``, the ``parent`` digest and the block's token ids as bytes."""

    digest: bytes
    parent: bytes
    tokens: bytes


def root_digest(salt: str, scope: str = "", adapter: bytes = b"") -> bytes:
    """Start of the chain of one tenant (``scope``, without a zero byte), one salt of its own and one LoRA adapter.

    ``adapter`` is the digest of its files, so that neither its name nor its number matters; empty for none.
    """
    plain = sha256(b"qiao-prefix\0" + scope.encode() + b"\0" + salt.encode()).digest()
    return sha256(plain + adapter).digest() if adapter else plain


def block_key(parent: bytes, tokens: Items[int]) -> BlockKey:
    """Key of a full block holding ``tokens`` after the block whose digest is ``parent``."""
    content = array("q", tokens).tobytes()
    return BlockKey(sha256(parent + content).digest(), parent, content)


class PrefixCache:
    """Which block holds which content, and which of those blocks nobody refers to, oldest use first."""

    def __init__(self) -> None:
        self._blocks: dict[BlockKey, int] = {}
        self._keys: dict[int, BlockKey] = {}
        self._unused: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, block: int) -> bool:
        return block in self._keys

    @property
    def unused(self) -> OrderedDict[int, None]:
        """Cached blocks without a reference, least recently used first. Read only."""
        return self._unused

    @property
    def entries(self) -> dict[BlockKey, int]:
        """All cached blocks by key. Read only."""
        return self._blocks

    def match(self, keys: Items[BlockKey]) -> list[int]:
        """Blocks of the longest cached run of ``keys`` from its start."""
        found: list[int] = []
        for key in keys:
            block = self._blocks.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def register(self, block: int, key: BlockKey) -> None:
        """Make a filled, referenced block findable; a second block of the same content stays private."""
        if key not in self._blocks and block not in self._keys:
            self._blocks[key] = block
            self._keys[block] = key

    def retire(self, block: int) -> None:
        """The last reference to a cached block is gone: it may be evicted, after all that were retired before it."""
        self._unused[block] = None

    def revive(self, block: int) -> None:
        """A cached block is referred to again."""
        del self._unused[block]

    def evict(self) -> tuple[int, BlockKey]:
        """Forget the least recently used unreferenced block and return it with what it holds."""
        block, _ = self._unused.popitem(last=False)
        key = self._keys.pop(block)
        del self._blocks[key]
        return block, key

    def forget(self, blocks: Items[int]) -> None:
        """Make no prefix hit find ``blocks`` again; whoever refers to them, and all are referred to, keeps them."""
        for block in blocks:
            assert block not in self._unused, "an unreferenced block would be lost"
            key = self._keys.pop(block, None)
            if key is not None:
                del self._blocks[key]

    def clear(self) -> list[int]:
        """Forget all content; returns the blocks that nobody refers to."""
        freed = list(self._unused)
        self._unused.clear()
        self._blocks.clear()
        self._keys.clear()
        return freed
