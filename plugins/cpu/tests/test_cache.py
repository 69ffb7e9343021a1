"""Storage of keys and values: odd sizes, other element types, rotation on the way."""

from __future__ import annotations

import psutil
import pytest
import qiao_cpu
import torch
from qiao.contract import composites

from tests.support.cpu import generator

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("stored", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_written_values_are_rounded_to_the_caches_type(isa, dtype, stored):
    cache = qiao_cpu.allocate_kv(4, 5, 2, 20, stored, "HND", "cpu")
    key, value = (torch.randn(7, 2, 20, generator=generator(i)).to(dtype) * 100 for i in range(2))
    key[0, 0, 0], value[1, 1, 3] = float("inf"), float("nan")
    slots = torch.tensor([19, 3, -1, 0, 11, 4, 5])
    qiao_cpu.write_kv(key, value, cache, slots)
    for part, new in ((cache.key, key), (cache.value, value)):
        flat = part.transpose(1, 2).flatten(0, 1)
        kept = slots >= 0
        assert torch.equal(flat[slots[kept]].nan_to_num(7), new[kept].to(stored).nan_to_num(7))
        others = [i for i in range(20) if i not in slots.tolist()]
        assert not flat[others].any()


@pytest.mark.parametrize("value", [1e-45, 1e-8, 6e-8, 6.1e-5, 65519.0, 65520.0, 3e38, float("inf"), float("nan")])
def test_rounding_to_half_precision_at_its_edges(isa, value):
    numbers = torch.tensor([value, -value, value * 0.999, 1.00048828125] * 4).view(1, 1, 16)
    for stored in DTYPES:
        cache = qiao_cpu.allocate_kv(1, 16, 1, 16, stored, "HND", "cpu")
        qiao_cpu.write_kv(numbers, numbers, cache, torch.tensor([5]))
        want = numbers[0, 0].to(stored)
        for part in (cache.key, cache.value):
            torch.testing.assert_close(part[0, 0, 5], want, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotated", [20, 8, 34])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotation_of_strided_heads_equals_the_composite(isa, dtype, rotated, interleaved):
    fused = torch.randn(6, (4 + 2 + 2) * 34, generator=generator(0)).to(dtype)
    query, key, value = (x.unflatten(1, (-1, 34)) for x in fused.split([4 * 34, 2 * 34, 2 * 34], dim=1))
    angle = torch.rand(6, rotated // 2, generator=generator(1)) * 6
    cos, sin, slots = angle.cos(), angle.sin(), torch.tensor([3, 1, 9, 8, 0, -1])
    want_query, want_key = composites.rotary(query, key, cos, sin, interleaved)
    cache = qiao_cpu.allocate_kv(2, 5, 2, 34, dtype, "HND", "cpu")
    got = qiao_cpu.rope_write_kv(query, key, value, cos, sin, interleaved, cache, slots)
    near = {"atol": 0.0, "rtol": 0.0} if dtype == torch.float32 else {"atol": 1e-2, "rtol": 1e-2}
    near = {"atol": 1e-6, "rtol": 1e-6} if dtype == torch.float32 else near
    torch.testing.assert_close(got, want_query, **near)
    flat = cache.key.transpose(1, 2).flatten(0, 1)
    torch.testing.assert_close(flat[slots[:5]], want_key[:5], **near)
    assert torch.equal(cache.value.transpose(1, 2).flatten(0, 1)[slots[:5]], value[:5])


def test_a_cache_takes_no_memory_before_it_is_written():
    """1 GiB; the process may not grow by a tenth of it."""
    process = psutil.Process()
    before = process.memory_info().rss
    cache = qiao_cpu.allocate_kv(8192, 16, 8, 128, torch.float16, "HND", "cpu")
    assert process.memory_info().rss - before < 100 << 20
    assert cache.key.numel() + cache.value.numel() == 1 << 28
    assert not cache.key[-1].any() and not cache.value[-1].any()
    with pytest.raises(torch.OutOfMemoryError, match="KV cache"):
        qiao_cpu.allocate_kv(1 << 40, 16, 8, 128, torch.float16, "HND", "cpu")
