"""Limits of the documented tables: what is inside is taken, what is just outside is refused or left to another way."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from qiao_ascend import capabilities
from qiao_ascend.chips import (
    PROFILES,
    check_cache,
    check_heads,
    fits_group,
    fits_int4,
    fits_swiglu,
    profile,
)
from qiao_ascend.linear import pack_int4


@pytest.mark.parametrize(
    ("chip", "name"),
    [
        ("Ascend910B1", "910B"),
        ("Ascend910B3", "910B"),
        ("Ascend910B4-1", "910B"),
        ("Ascend910_9391", "910C"),
        ("Ascend910_9362", "910C"),
        ("Ascend310P3", "310P"),
        ("310P1", "310P"),
        ("", "910B"),
    ],
)
def test_profiles_by_soc(chip, name) -> None:
    assert profile(chip).name == name


@pytest.mark.parametrize("chip", ["Ascend910A", "Ascend910ProB", "Ascend310B1", "Ascend950PR_9589", "A100"])
def test_chips_without_a_profile(chip) -> None:
    assert profile(chip) is None
    with pytest.raises(ValueError, match=chip):
        capabilities(chip)


def test_what_chips_declare() -> None:
    a2, a3, small = (capabilities(c) for c in ("Ascend910B3", "Ascend910_9391", "Ascend310P3"))
    assert (a2.dtypes, a2.kv_layouts, a2.head_dims) == (a3.dtypes, a3.kv_layouts, a3.head_dims)
    assert "bfloat16" in a2.dtypes and small.dtypes == ("float16",)
    assert a2.kv_layouts == ("NHD",) and small.kv_layouts == ("NZ",)
    assert "w8a8" in a2.schemes and "w8a8" not in small.schemes
    assert not a2.soft_cap and not small.soft_cap


@pytest.mark.parametrize("name", PROFILES)
def test_caches(name) -> None:
    found = PROFILES[name]
    check_cache(found, 128, 64, torch.float16, found.layout)
    wrong = [(64, 64, torch.float16, found.layout), (128, 80, torch.float16, found.layout)]
    wrong += [(128, 256, torch.float16, found.layout), (128, 64, torch.float32, found.layout)]
    wrong += [(128, 64, torch.float16, "HND"), *([(128, 64, torch.bfloat16, "NZ")] if name == "310P" else [])]
    for arguments in wrong:
        with pytest.raises(ValueError, match=name):
            check_cache(found, *arguments)
    assert all(128 * dim <= 128 * 128 for dim in PROFILES["310P"].head_dims)  # what a block of NZ may hold


def test_heads() -> None:
    check_heads(64, 1, 4096)
    check_heads(256, 4, 1)
    for arguments in ((65, 1, 1), (257, 257, 1), (512, 16, 1), (6, 4, 1), (8, 8, 4097)):
        with pytest.raises(ValueError, match="at most"):
            check_heads(*arguments)


@pytest.mark.parametrize(
    ("rows", "columns", "group", "fits"),
    [
        (128, 64, 0, True),
        (128, 64, 32, True),
        (128, 64, 96, True),
        (128, 64, 128, False),  # K - 1 at most
        (128, 64, 16, False),
        (128, 64, 48, False),
        (65535, 64, 32, True),
        (65536, 64, 32, False),
        (128, 65536, 0, False),
    ],
)
def test_groups(rows, columns, group, fits) -> None:
    assert fits_group(rows, columns, group) == fits
    assert fits_int4(rows, columns, group) == fits
    assert not fits_int4(rows, columns - 1, group)


def test_gates() -> None:
    assert fits_swiglu(PROFILES["910B"], 66) and not fits_swiglu(PROFILES["910B"], 65)
    assert fits_swiglu(PROFILES["310P"], 64) and not fits_swiglu(PROFILES["310P"], 66)


@settings(derandomize=True, deadline=None, max_examples=30)
@given(st.lists(st.integers(-8, 7), min_size=8, max_size=8))
def test_packed_nibbles_are_twos_complement_lowest_first(codes) -> None:
    word = int(pack_int4(torch.tensor([codes], dtype=torch.int8))[0, 0]) & 0xFFFFFFFF
    assert word == sum((code & 15) << (4 * place) for place, code in enumerate(codes))
