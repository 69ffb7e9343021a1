"""Attention over each kind of cache: any ragged batch against float64, and what bad numbers may reach."""

from __future__ import annotations

import pytest
import qiao_cpu
import qiao_reference
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from qiao.contract import CATALOG
from qiao_conformance import oracle

from tests.support.cpu import batch, generator

KEPT = (torch.float32, torch.bfloat16, torch.float16, torch.int8)
RAGGED = settings(
    max_examples=25, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def name(dtype):
    return str(dtype).removeprefix("torch.")


@RAGGED
@given(data=st.data())
def test_any_ragged_batch(isa, threads, data):
    kept, block = data.draw(st.sampled_from(KEPT)), data.draw(st.sampled_from([1, 5, 16, 32, 200]))
    lengths = data.draw(st.lists(st.integers(1, 330), min_size=1, max_size=4))
    kv_heads, group = data.draw(st.sampled_from([(1, 4), (2, 1), (2, 3), (1, 7)]))
    window, soft_cap = data.draw(st.sampled_from([0, 1, 40, 129])), data.draw(st.sampled_from([0.0, 3.0]))
    size = data.draw(st.sampled_from([4, 20, 64]))
    threads(data.draw(st.sampled_from([1, 2])))
    made = batch(lengths, kv_heads * group, kv_heads, size, block, kept=kept, window=window, soft_cap=soft_cap)
    counts = [data.draw(st.integers(1, n)) for n in lengths]
    parts = [(i, n - count, count) for i, (n, count) in enumerate(zip(lengths, counts, strict=True))]
    tolerance = CATALOG["attention"].tolerance["float32"]
    for i, got in enumerate(made.step(parts)):
        want = made.exact(i, name(kept))[lengths[i] - counts[i] :]
        torch.testing.assert_close(got.double(), want, atol=tolerance.atol, rtol=tolerance.rtol)


@pytest.mark.parametrize("kept", KEPT, ids=str)
def test_a_window_reads_no_block_outside_it(isa, kept):
    made = batch([700], 4, 2, 32, 16, kept=kept, window=60)
    want = made.step([(0, 650, 50)])[0]
    made.tables[0][: (650 - 59) // 16] = [2**20] * ((650 - 59) // 16)  # far outside the cache
    assert torch.equal(made.step([(0, 650, 50)])[0], want)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("kept", KEPT, ids=str)
def test_a_bad_vector_spoils_its_own_sequence_alone(isa, kept, bad):
    made = batch([300, 200], 4, 2, 32, 16, kept=kept)
    clean = made.step([(0, 299, 1), (1, 150, 50)])
    key, value = made.keys[0][40:41].clone(), made.values[0][40:41].clone()
    key[0, 0, 3] = value[0, 0, 3] = bad
    slot = torch.tensor([made.tables[0][40 // 16] * 16 + 40 % 16])
    qiao_cpu.write_kv(key, value, made.cache, slot)
    spoilt = made.step([(0, 299, 1), (1, 150, 50)])
    assert not spoilt[0][0, :2].isfinite().all()
    assert torch.equal(spoilt[0][0, 2:], clean[0][0, 2:])
    assert torch.equal(spoilt[1], clean[1])


def vectors(dtype):
    x = torch.randn(40, 2, 20, generator=generator(3)) * torch.logspace(-20, 4, 40)[:, None, None]
    x[3, 0], x[4, 1], x[5, 0, 2], x[6, 1, 7] = 0, 0.5, float("nan"), float("inf")
    x[7, 0] = torch.arange(-127, 128).float()[::13]  # ties at half a step
    x[7, 0, 0], x[7, 0, 1] = 254, 1
    return x.to(dtype)


@pytest.mark.parametrize("dtype", KEPT[:3], ids=str)
def test_codes_are_those_of_the_contract(isa, dtype):
    x = vectors(dtype)
    cache = qiao_cpu.allocate_kv(9, 5, 2, 20, torch.int8, "HND", "cpu")
    other = qiao_reference.allocate_kv(9, 5, 2, 20, torch.int8, "HND", "cpu")
    slots = torch.randperm(45, generator=generator(1))[:40]
    slots[8] = -1
    for plugin, own in ((qiao_cpu, cache), (qiao_reference, other)):
        plugin.write_kv(x, x.flip(0), own, slots)
    for part in ("key", "value", "key_scale", "value_scale"):
        a, b = getattr(cache, part), getattr(other, part)
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, atol=0, rtol=0, equal_nan=True)
    kept = [i for i in range(40) if i not in (5, 6, 8)]
    codes = cache.key.transpose(1, 2).flatten(0, 1)[slots[kept]].double()
    scales = cache.key_scale.transpose(1, 2).flatten(0, 1)[slots[kept]].double()
    assert torch.equal(codes * scales[..., None], oracle.stored(x[kept], "int8"))


@pytest.mark.parametrize("dtype", KEPT[:3], ids=str)
def test_rotated_and_written_in_one_pass_is_rotated_then_written(isa, dtype):
    g = generator(0)
    query, key, value = (torch.randn(7, n, 36, generator=g).to(dtype) for n in (4, 2, 2))
    angle, slots = torch.rand(7, 18, generator=g), torch.tensor([3, 1, 9, 8, 0, -1, 4])
    caches = [qiao_cpu.allocate_kv(2, 5, 2, 36, torch.int8, "HND", "cpu") for _ in range(2)]
    turned = qiao_cpu.rotary(query.clone(), key.clone(), angle.cos(), angle.sin(), False)
    qiao_cpu.write_kv(turned[1], value, caches[0], slots)
    got = qiao_cpu.rope_write_kv(query, key, value, angle.cos(), angle.sin(), False, caches[1], slots)
    assert torch.equal(got, turned[0])
    for part in ("key", "value", "key_scale", "value_scale"):
        assert torch.equal(getattr(caches[0], part), getattr(caches[1], part))


def test_copied_blocks_bring_their_scales(isa):
    cache = qiao_cpu.allocate_kv(6, 5, 2, 20, torch.int8, "HND", "cpu")
    x = torch.randn(30, 2, 20, generator=generator(0))
    qiao_cpu.write_kv(x, -x, cache, torch.arange(30))
    before = [part.clone() for part in (cache.key, cache.value, cache.key_scale, cache.value_scale)]
    qiao_cpu.copy_blocks(cache, torch.tensor([0, 4]), torch.tensor([2, 1]))
    for old, new in zip(before, (cache.key, cache.value, cache.key_scale, cache.value_scale), strict=True):
        assert torch.equal(new[[0, 4, 2, 1, 3, 5]], old[[0, 4, 0, 4, 3, 5]])


@pytest.mark.parametrize("soft_cap", [0.0, 2.0])
def test_int8_is_as_near_to_float_as_its_rounding_allows(isa, soft_cap):
    """A code is off by half a step at most, so with steps k and v of keys and values, and all in exact arithmetic,

    |score' - score| <= e = |scale| * sum|q| * max k / 2 (a cap only makes it smaller), so a weight changes by a factor
    between e^-2e and e^2e, and |out' - out| <= (e^2e - 1) * max|value| + max v / 2.
    """
    made = batch([260], 4, 2, 64, 16, kept=torch.int8, soft_cap=soft_cap)
    got, want = made.step([(0, 0, 260)])[0].double(), made.exact(0)
    key, value = (x[0].double().repeat_interleave(2, 1) for x in (made.keys, made.values))
    steps = [x.abs().amax(-1).cummax(0).values / 127 for x in (key, value)]  # [T, H], over all that a row sees
    error = 64**-0.5 * made.queries[0].double().abs().sum(-1) * steps[0] / 2
    bound = (torch.exp(2 * error) - 1) * value.abs().amax(-1).cummax(0).values + steps[1] / 2
    off = (got - want).abs().amax(-1)
    assert (off <= bound + 1e-5).all()
    assert off.max() < 0.05  # and in fact far nearer: entries are of the order of 1
    assert off.max() > 1e-4  # it is not the float cache
