"""Times of cached blocks against a plain record of everything that happened to them."""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from qiao.engine.blocks import BlockManager
from qiao.engine.prefix import PrefixCache
from qiao.engine.request import Histogram
from qiao.engine.residency import Residency
from qiao.observability.names import RESIDENCY_BUCKETS

from tests.support.blocks import chain
from tests.support.engine import make_engine, request, run

BLOCKS, SIZE = 7, 2


class ResidencyMachine(RuleBasedStateMachine):
    """Tables over a manager whose every block is sampled; the record keeps all times of all blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.residency = Residency(1.0, clock=lambda: self.now)
        self.manager = BlockManager(BLOCKS, SIZE, PrefixCache(), residency=self.residency)
        self.tables: list[list[int]] = []
        self.times: dict[int, list[float]] = {}
        self.wanted: dict[str, list[float]] = {"lifetime": [], "idle": [], "reuse_gap": []}

    def cached(self) -> set[int]:
        return {block for block in range(BLOCKS) if block in self.manager.cache}

    @rule(seconds=st.sampled_from([0.0005, 0.01, 0.3, 7.0, 4000.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(tokens=st.lists(st.integers(0, 1), min_size=SIZE, max_size=4 * SIZE), kept=st.booleans())
    def start(self, tokens: list[int], kept: bool) -> None:
        keys = chain(tokens, SIZE)
        hits = self.manager.cache.match(keys)
        if len(keys) - len(hits) + self.manager.unreferenced(hits) > self.manager.available:
            return
        self.manager.share(hits)
        for block in hits:
            self.times[block].append(self.now)
        before = self.cached()
        new = self.manager.allocate(len(keys) - len(hits))
        for block in before - self.cached():
            self.evicted(self.times[block])
        for block, key in zip(new, keys[len(hits) :], strict=True):
            self.times[block] = [self.now]
            if kept:
                self.manager.cache.register(block, key)
        self.tables.append(hits + new)

    def evicted(self, times: list[float]) -> None:
        self.wanted["lifetime"].append(self.now - times[0])
        self.wanted["idle"].append(self.now - times[-1])
        self.wanted["reuse_gap"] += [b - a for a, b in pairwise(times[1:][-4:])]

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.manager.release(self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1))))

    @rule()
    def reset(self) -> None:
        self.manager.forget()

    @invariant()
    def times_are_those_of_the_record(self) -> None:
        for name, values in self.wanted.items():
            found: Histogram = getattr(self.residency.stats, name)
            buckets = [0] * (len(RESIDENCY_BUCKETS) + 1)
            for value in values:
                buckets[bisect_left(RESIDENCY_BUCKETS, value)] += 1
            assert (found.counts or [0] * len(buckets)) == buckets
            assert found.sum == pytest.approx(sum(values))


TestResidency = ResidencyMachine.TestCase
TestResidency.settings = settings(derandomize=True, max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("rate", [0.01, 0.25, 1.0])
@pytest.mark.parametrize("batch", [1, 7])
def test_as_many_are_sampled_as_were_asked_for(rate: float, batch: int) -> None:
    residency, count = Residency(rate, seed=5), 42_000
    for low in range(0, count, batch):
        residency.allocated(range(low, low + batch))
    for block in range(count):
        residency.evicted(block)
    expected = rate * count
    assert abs(sum(residency.stats.lifetime.counts) - expected) <= 4 * (expected * (1 - rate)) ** 0.5


def test_an_engine_times_its_blocks_only_when_asked() -> None:
    plain, timed = make_engine(num_blocks=12), make_engine(num_blocks=12, residency_sample=1.0)
    for engine in (plain, timed):
        for i in range(6):
            run(engine, [request(f"r{i}", [60 + i, *range(33)], max_tokens=1)])
    assert plain.stats().residency is None
    found = timed.stats().residency
    assert found is not None and sum(found.lifetime.counts) == sum(found.idle.counts) > 20
    assert found.lifetime.sum >= found.idle.sum > 0
