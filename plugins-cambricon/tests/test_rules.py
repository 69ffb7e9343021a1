"""The documented rules of torch_mlu_ops as the plugin keeps them; nothing of the vendor's is needed for these."""

from __future__ import annotations

import pytest
import torch
from qiao.contract import UnreadLengths, WeightInfo
from qiao_cambricon import chips, rules


@pytest.mark.parametrize(("block", "dim", "layout"), [(32, 64, "HND"), (16, 72, "HND"), (16, 64, "NHD")])
def test_a_cache_that_the_kernels_cannot_read_is_refused(block: int, dim: int, layout: str) -> None:
    for known in rules.HEAD_DIMS:
        rules.check_cache(16, known, "HND")
    with pytest.raises(ValueError, match=f"no {layout} cache of blocks of {block} and heads of {dim}"):
        rules.check_cache(block, dim, layout)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "kept", "sizes"),
    [
        (32, 8, torch.float16, [4]),
        (128, 1, torch.float16, [128]),
        (129, 1, torch.float16, [65, 64]),
        (300, 1, torch.float32, [100, 100, 100]),
        (256, 1, torch.bfloat16, [256]),
        (257, 1, torch.bfloat16, [129, 128]),
        (256, 1, torch.int8, [128, 128]),
        (512, 2, torch.bfloat16, [256]),
    ],
)
def test_heads_of_a_decode_are_split(heads: int, kv_heads: int, kept: torch.dtype, sizes: list[int]) -> None:
    """queries * heads / key heads up to 128, over a bfloat16 cache up to 256."""
    parts = rules.decode_parts(heads, kv_heads, kept)
    assert [p.stop - p.start for p in parts] == sizes
    assert [i for p in parts for i in range(p.start, p.stop)] == list(range(heads // kv_heads))


def test_heads_that_cannot_be_shared_out_are_refused() -> None:
    with pytest.raises(ValueError, match="7 heads cannot be shared out evenly over 2"):
        rules.decode_parts(7, 2, torch.float16)


def test_indices_are_int32() -> None:
    assert rules.int32(torch.tensor([1, -1])).dtype == torch.int32
    already = torch.tensor([3], dtype=torch.int32)
    assert rules.int32(already) is already


def test_the_longest_context_is_unknown_inside_a_graph() -> None:
    assert rules.longest((3, 900, 17)) == 900
    assert rules.longest(UnreadLengths()) == -1


def test_windows() -> None:
    """The vendor counts keys to the left without the query's own; the right side is -1 always."""
    assert rules.window(0) == (-1, -1)
    assert rules.window(1) == (0, -1)
    assert rules.window(4096) == (4095, -1)


def test_results_have_memory_of_their_own() -> None:
    query = torch.ones(3, 4)
    out = rules.apart(query)
    assert out.data_ptr() != query.data_ptr() and not out.any() and out.is_contiguous()


@pytest.mark.parametrize(
    ("dtype", "dim", "rotated", "taken"),
    [
        (torch.float16, 128, 128, True),
        (torch.bfloat16, 128, 32, True),
        (torch.float16, 2, 2, True),
        (torch.float16, 256, 256, True),
        (torch.float16, 257, 256, False),
        (torch.float16, 512, 64, False),
        (torch.float16, 128, 31, False),
        (torch.float16, 64, 128, False),
        (torch.float32, 128, 128, False),
    ],
)
def test_rotations_that_the_kernel_takes(dtype: torch.dtype, dim: int, rotated: int, taken: bool) -> None:
    assert rules.rotates(dtype, dim, rotated) is taken


@pytest.mark.parametrize(
    ("group", "columns", "bits", "fits"),
    [
        *((g, 1024, 4, True) for g in (64, 128, 256, 512)),
        (32, 1024, 4, False),
        (1024, 1024, 4, False),
        (-1, 64, 4, False),
        (64, 64 * 3, 8, True),
        (64, 96, 4, False),  # a short last group
        (128, 129, 8, False),
    ],
)
def test_groups_of_quantized_weights(group: int, columns: int, bits: int, fits: bool) -> None:
    assert rules.group_fits(WeightInfo("w", columns, 8, bits, group), bits) is fits


def test_kernels_are_symmetric() -> None:
    assert rules.takes_zero(None, 0) and rules.takes_zero(torch.full((2, 3), 8.0), 8)
    assert not rules.takes_zero(torch.tensor([[8.0, 7.0]]), 8)


def test_a_variable_that_breaks_graphs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(rules.BREAKS_CAPTURE, raising=False)
    assert rules.why_not_captured() == ""
    monkeypatch.setenv(rules.BREAKS_CAPTURE, "1")
    assert "CNCL_ASYNC_ERROR_HANDLING is set" in rules.why_not_captured()


@pytest.mark.parametrize(
    ("chip", "bfloat16"),
    [("MLU370", False), ("MLU370-X8", False), ("MLU590", True), ("MLU590-H8", True), ("MLU580", True), ("", True)],
)
def test_whether_a_chip_has_bfloat16_is_asked_of_its_generation(chip: str, bfloat16: bool) -> None:
    facts = chips.capabilities_of(chip)
    assert ("bfloat16" in facts.dtypes) is bfloat16 and ("bfloat16" in facts.kv_dtypes) is bfloat16
    assert (("rotary", "bfloat16") in facts.tolerances) is bfloat16
    assert facts.block_sizes == (16,) and facts.kv_layouts == ("HND",) and not facts.soft_cap
