"""Blocks and prefix cache under random use, against a plain model of who owns what."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from qiao.engine import prefix
from qiao.engine.blocks import BlockManager
from qiao.engine.integrity import check_blocks
from qiao.engine.prefix import BlockKey, PrefixCache, block_key, root_digest

from tests.support.blocks import chain

BLOCKS, SIZE = 7, 2


class BlockMachine(RuleBasedStateMachine):
    """Tables are lists of full blocks with known content; hits must return blocks that still hold it."""

    def __init__(self) -> None:
        super().__init__()
        self.manager = BlockManager(BLOCKS, SIZE, PrefixCache())
        self.tables: list[tuple[list[int], list[BlockKey]]] = []
        self.content: dict[int, tuple[int, ...]] = {}

    @rule(tokens=st.lists(st.integers(0, 1), min_size=SIZE, max_size=4 * SIZE))
    def start(self, tokens: list[int]) -> None:
        keys = chain(tokens, SIZE)
        hits = self.manager.cache.match(keys)
        for i, block in enumerate(hits):
            assert self.content[block] == tuple(tokens[: (i + 1) * SIZE]), "a hit returned other content"
        need = len(keys) - len(hits)
        if need + self.manager.unreferenced(hits) > self.manager.available:
            return
        self.manager.share(hits)
        new = self.manager.allocate(need)
        table = hits + new
        assert len(set(table)) == len(table)
        for i, block in enumerate(new, len(hits)):
            self.content[block] = tuple(tokens[: (i + 1) * SIZE])
            self.manager.cache.register(block, keys[i])
        self.tables.append((table, keys))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        table, keys = data.draw(st.sampled_from(self.tables))
        self.manager.share(table)
        self.tables.append((table.copy(), keys))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        table, _ = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.manager.release(table)

    @rule()
    def reset(self) -> None:
        self.manager.forget()
        assert self.manager.cache.match(chain([0] * SIZE, SIZE) + chain([1] * SIZE, SIZE)) == []

    @invariant()
    def books_balance(self) -> None:
        expected = Counter(b for table, _ in self.tables for b in table)
        assert self.manager.references == [expected[b] for b in range(BLOCKS)]
        unused = len(self.manager.cache.unused)
        assert len(self.manager.free) + unused + len(expected) == BLOCKS
        assert self.manager.used == len(expected)
        check_blocks(self.manager)


TestBlockMachine = BlockMachine.TestCase
TestBlockMachine.settings = settings(derandomize=True, max_examples=60, stateful_step_count=30, deadline=None)


def test_a_hash_that_always_collides_never_gives_other_content(monkeypatch: pytest.MonkeyPatch) -> None:
    class Weak:
        def __init__(self, data: bytes) -> None:
            pass

        def digest(self) -> bytes:
            return b"same"

    monkeypatch.setattr(prefix, "sha256", Weak)
    cache = PrefixCache()
    cache.register(0, block_key(root_digest(""), [1, 2]))
    assert cache.match([block_key(root_digest(""), [1, 2])]) == [0]
    assert cache.match([block_key(root_digest(""), [2, 1])]) == []


def test_b041_keys_depend_on_each_id_and_on_the_parent() -> None:
    base = [40] * 16
    seen = {block_key(root_digest(""), base).digest}
    for j in range(15):
        for shift in range(1, 1025):
            other = base.copy()
            other[j] += shift
            other[j + 1] -= 1
            seen.add(block_key(root_digest(""), other).digest)
    assert len(seen) == 1 + 15 * 1024
    assert block_key(root_digest("a"), base) != block_key(root_digest("b"), base)


def test_the_oldest_unreferenced_content_goes_first_and_tails_before_heads() -> None:
    manager = BlockManager(4, 1, PrefixCache())
    tables = []
    for tokens in ([1, 2], [3, 4]):
        first = block_key(root_digest(""), tokens[:1])
        second = block_key(first.digest, tokens[1:])
        blocks = manager.allocate(2)
        for block, key in zip(blocks, (first, second), strict=True):
            manager.cache.register(block, key)
        tables.append((blocks, [first, second]))
    for blocks, _ in tables:
        manager.release(blocks)
    manager.allocate(1)
    assert manager.cache.match(tables[0][1]) == tables[0][0][:1]
    assert manager.cache.match(tables[1][1]) == tables[1][0]


def test_a_block_released_twice_is_a_bug_that_shows() -> None:
    manager = BlockManager(2, 4)
    blocks = manager.allocate(1)
    manager.release(blocks)
    with pytest.raises(AssertionError, match="without a reference"):
        manager.release(blocks)
