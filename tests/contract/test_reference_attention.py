"""The reference's attention against loops over sequences, queries, heads and keys in float64."""

import itertools
import math
import sys
from dataclasses import replace

import pytest
import qiao_reference as reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from qiao.contract import AttentionMetadata

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


class Batch:
    """Random queries over shuffled blocks whose unwritten slots hold NaN."""

    def __init__(self, lens, heads=4, kv_heads=2, dim=8, block_size=4, layout="NHD", dtype=torch.float32, seed=0):
        self.generator = torch.Generator().manual_seed(seed)
        self.query_lens, self.kv_lens = zip(*lens, strict=True)
        counts = [-(-n // block_size) for n in self.kv_lens]
        total = sum(counts) + 3
        self.cache = reference.allocate_kv(total, block_size, kv_heads, dim, dtype, layout, "cpu")
        self.cache.key.fill_(math.nan)
        self.cache.value.fill_(math.nan)
        blocks = (torch.randperm(total - 1, generator=self.generator) + 1).tolist()
        self.tables = torch.zeros(len(lens), max(counts) + 1, dtype=torch.int32)
        self.keys, self.values = [], []
        for i, (count, length) in enumerate(zip(counts, self.kv_lens, strict=True)):
            own = [blocks.pop() for _ in range(count)]
            self.tables[i, :count] = torch.tensor(own, dtype=torch.int32)
            key, value = (self.random(length, kv_heads, dim).to(dtype) for _ in range(2))
            slots = torch.tensor([own[p // block_size] * block_size + p % block_size for p in range(length)])
            reference.write_kv(key, value, self.cache, slots)
            self.keys.append(key.double())
            self.values.append(value.double())
        self.query = self.random(sum(self.query_lens), heads, dim).to(dtype)

    def random(self, *shape):
        return torch.randn(shape, generator=self.generator)

    @property
    def starts(self):
        return [0, *itertools.accumulate(self.query_lens)]

    def metadata(self, rows=None):
        rows = range(len(self.kv_lens)) if rows is None else rows
        query_lens = tuple(self.query_lens[i] for i in rows)
        kv_lens = tuple(self.kv_lens[i] for i in rows)
        starts = torch.tensor([0, *itertools.accumulate(query_lens)], dtype=torch.int32)
        lens = torch.tensor(kv_lens, dtype=torch.int32)
        return AttentionMetadata(starts, lens, self.tables[list(rows)], torch.zeros(0), query_lens, kv_lens)

    def run(self, scale, window=0, cap=0.0, rows=None):
        rows = list(range(len(self.kv_lens)) if rows is None else rows)
        picked = torch.cat([self.query[self.starts[i] : self.starts[i + 1]] for i in rows])
        return reference.attention(picked, self.cache, self.metadata(rows), scale, window, cap)

    def expected(self, scale, window=0, cap=0.0):
        out = torch.zeros(self.query.shape, dtype=torch.float64)
        for i, (count, length) in enumerate(zip(self.query_lens, self.kv_lens, strict=True)):
            ratio = self.query.shape[1] // self.keys[i].shape[1]
            for j, head in itertools.product(range(count), range(self.query.shape[1])):
                position, row = length - count + j, self.starts[i] + j
                scores = []
                for p in range(position + 1):
                    if window and position - p >= window:
                        continue
                    score = scale * float(self.query[row, head].double() @ self.keys[i][p, head // ratio])
                    scores.append((p, cap * math.tanh(score / cap) if cap else score))
                top = max(s for _, s in scores)
                total = sum(math.exp(s - top) for _, s in scores)
                for p, s in scores:
                    out[row, head] += math.exp(s - top) / total * self.values[i][p, head // ratio]
        return out


MIXED = [(1, 9), (5, 5), (3, 11), (1, 1), (1, 33)]


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("window", "cap"), [(0, 0.0), (3, 0.0), (0, 2.0), (4, 3.0)])
def test_mixed_batch(dtype, layout, window, cap):
    batch = Batch(MIXED, layout=layout, dtype=dtype)
    got = batch.run(0.4, window, cap)
    assert got.dtype == dtype
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(got.double(), batch.expected(0.4, window, cap), atol=tolerance, rtol=tolerance)


@settings(derandomize=True, max_examples=25, deadline=None)
@given(
    lens=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 12)), min_size=1, max_size=4),
    heads=st.sampled_from([(1, 1), (4, 1), (6, 3), (3, 3)]),
    block_size=st.integers(1, 7),
    dim=st.sampled_from([1, 5, 8]),
    window=st.sampled_from([0, 1, 4]),
    cap=st.sampled_from([0.0, 1.5]),
    layout=st.sampled_from(["NHD", "HND"]),
)
def test_any_ragged_batch(lens, heads, block_size, dim, window, cap, layout):
    lens = [(new, new + cached) for new, cached in lens]
    batch = Batch(lens, *heads, dim, block_size, layout)
    got = batch.run(dim**-0.5, window, cap).double()
    torch.testing.assert_close(got, batch.expected(dim**-0.5, window, cap), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(("window", "cap"), [(0, 0.0), (5, 0.0), (0, 2.0)])
def test_a_sequences_result_does_not_depend_on_the_batch(window, cap):
    lens = [(1, n) for n in (1, 7, 31, 32, 33, 50, 64, 90)] + [(4, 9), (6, 6)]
    batch = Batch(lens, heads=6, kv_heads=3, dim=16)
    together, start = batch.run(0.25, window, cap), 0
    for i, (count, _) in enumerate(lens):
        alone = batch.run(0.25, window, cap, rows=[i])
        assert torch.equal(alone, together[start : start + count]), f"sequence {i}"
        start += count


def test_plan_is_used_and_changes_nothing():
    batch = Batch(MIXED)
    metadata = batch.metadata()
    plan = reference.prepare_attention(metadata, 4, 2, 8, 4)
    got = reference.attention(batch.query, batch.cache, replace(metadata, plan=plan), 0.4, 0, 0.0)
    assert torch.equal(got, batch.run(0.4))


def test_rows_of_no_sequence_come_back_as_zero():
    batch = Batch([(1, 4), (2, 2)])
    query = torch.cat((batch.query, torch.full((2, 4, 8), math.nan)))
    got = reference.attention(query, batch.cache, batch.metadata(), 0.4, 0, 0.0)
    assert torch.equal(got[3:], torch.zeros(2, 4, 8))
    assert torch.equal(got[:3], batch.run(0.4))


def test_long_capped_prefill_is_cut_into_pieces_without_a_seam(monkeypatch):
    batch = Batch([(20, 30)])
    whole = batch.run(0.4, 0, 2.0)
    module = sys.modules["qiao_reference.attention"]  # the package shows the function of that name
    monkeypatch.setattr(module, "_SCORE_BYTES", 4 * 4 * 30 * 7)  # seven queries at a time
    torch.testing.assert_close(batch.run(0.4, 0, 2.0), whole)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_write_touches_its_slots_only(layout):
    cache = reference.allocate_kv(3, 4, 2, 5, torch.float32, layout, "cpu")
    cache.key.fill_(7.0)
    cache.value.fill_(8.0)
    key, value = torch.randn(4, 2, 5), torch.randn(4, 2, 5)
    reference.write_kv(key, value, cache, torch.tensor([11, -1, 2, -1]))
    for part, new, old in ((cache.key, key, 7.0), (cache.value, value, 8.0)):
        seen = part if layout == "NHD" else part.transpose(1, 2)
        for block, offset in itertools.product(range(3), range(4)):
            row = {11: 0, 2: 2}.get(block * 4 + offset)
            want = torch.full((2, 5), old) if row is None else new[row]
            assert torch.equal(seen[block, offset], want)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_copy_and_swap_move_whole_blocks(layout):
    a, b = (reference.allocate_kv(5, 2, 1, 3, torch.float32, layout, "cpu") for _ in range(2))
    for part in (a.key, a.value, b.key, b.value):
        part.copy_(torch.randn(part.shape))
    before = a.key.clone(), a.value.clone(), b.key.clone(), b.value.clone()
    reference.copy_blocks(a, torch.tensor([0, 4]), torch.tensor([2, 1]))
    assert torch.equal(a.key, before[0][[0, 4, 0, 3, 4]]) and torch.equal(a.value, before[1][[0, 4, 0, 3, 4]])
    reference.swap_blocks(a, b, torch.tensor([3]), torch.tensor([0]))
    assert torch.equal(b.value[0], before[1][3]) and torch.equal(b.value[1:], before[3][1:])
    assert torch.equal(b.key[0], before[0][3]) and torch.equal(b.key[1:], before[2][1:])
    with pytest.raises(ValueError, match="layout"):
        reference.swap_blocks(a, replace(b, layout="NZ"), torch.tensor([3]), torch.tensor([0]))
    with pytest.raises(ValueError, match="NZ"):
        reference.allocate_kv(5, 2, 1, 3, torch.float32, "NZ", "cpu")
