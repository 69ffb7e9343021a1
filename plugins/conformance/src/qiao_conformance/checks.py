"""One case on one device: what may change has changed as the formula says, and nothing else has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from types import MappingProxyType
from typing import Any

import torch
from qiao.contract import CATALOG, AttentionMetadata, KVCache
from qiao.contract.cases import Case, LooseCache, LooseWeight, place
from qiao.contract.catalog import ACTIVATION

from qiao_conformance import oracle
from qiao_conformance.target import Target, flat_rows, host, same, worst

Check = Callable[[Target, Case, dict[str, Any], Any], None]


def check_case(target: Target, case: Case, *, strided: bool = False) -> None:
    """The result within tolerance, and nothing changed but what the catalog allows.

    With ``strided`` the activations are parts of wider rows, as those of a fused projection are; what lies beside them
    must stay as well. Raises ``AssertionError`` saying what is wrong.
    """
    arguments = target.placed(case)
    wide = _widen(case, arguments) if strided else {}
    before = {k: host(v) for k, v in arguments.items()}
    beside = {k: host(v) for k, v in wide.items()}
    result = target.call(case.hook, arguments)
    allowed = CATALOG[case.hook].mutates
    changed = [k for k, v in arguments.items() if k not in allowed and not same(before[k], host(v))]
    assert not changed, f"{case.hook} changed {changed}; it may only change {list(allowed)}"
    for name, rows in wide.items():
        assert same(_beside(beside[name]), _beside(host(rows))), f"{case.hook} wrote beside the rows of {name}"
    for name in allowed:
        if isinstance(arguments[name], KVCache):
            _check_untouched(case, before[name], arguments[name])
    _CHECKS.get(case.hook, _check_results)(target, case, arguments, result)


def _widen(case: Case, arguments: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Put each activation into the middle third of rows three times as wide; returns the wide ones [T, 3, ...]."""
    found = {}
    for operand in CATALOG[case.hook].args:
        value = arguments[operand.name]
        if operand.place == "move" and operand.dtype == ACTIVATION and value.dim() > 1:
            wide = value.new_full((value.shape[0], 3, *value.shape[1:]), 7.0)
            wide[:, 1] = value
            arguments[operand.name], found[operand.name] = wide[:, 1], wide
    return found


def _beside(wide: torch.Tensor) -> torch.Tensor:
    return wide[:, 0::2]


def close(target: Target, case: Case, name: str, got: torch.Tensor, want: torch.Tensor) -> None:
    """``got`` of the device against ``want`` in float64; raises ``AssertionError`` naming the worst element."""
    flat = (x for v in case.arguments.values() for x in (v if isinstance(v, tuple) else (v,)))
    scheme = next((x.scheme for x in flat if isinstance(x, LooseWeight)), "")
    tolerance = target.tolerance(case.hook, case.dtype, scheme)
    ratio, index = worst(got, want, tolerance)
    assert ratio <= 1, (
        f"{case.id} ({case.note}): {name} of shape {tuple(got.shape)} is off by {ratio:.3g} times the tolerance "
        f"(atol {tolerance.atol}, rtol {tolerance.rtol}), worst at flat index {index}"
    )


def _check_untouched(case: Case, before: Mapping[str, Any], cache: KVCache) -> None:
    """No slot of ``cache`` but those that the case names has changed, written before or not."""
    if cache.layout not in ("NHD", "HND"):
        return
    size = cache.block_size
    if "slot_mapping" in case.arguments:
        slots = case.arguments["slot_mapping"]
    else:
        slots = _slots_of(case.arguments["target"], size)
    old = KVCache(**{f.name: before[f.name] for f in fields(KVCache)})  # a plugin may keep more in its own record
    for name, was, now in zip(("key", "value"), flat_rows(old), flat_rows(cache), strict=True):
        kept = ~torch.isin(torch.arange(len(was)), slots)
        wrong = [i for i in torch.arange(len(was))[kept].tolist() if not same(was[i], now[i])]
        assert not wrong, f"{case.id}: {name} was written outside the slots: at slots {wrong[:8]}"


def _slots_of(blocks: torch.Tensor, size: int) -> torch.Tensor:
    return (blocks[:, None] * size + torch.arange(size)[None, :]).flatten()


def _check_results(target: Target, case: Case, arguments: dict[str, Any], result: Any) -> None:
    got = result if isinstance(result, tuple) else (result,)
    want = oracle.EXPECTED[case.hook](*case.arguments.values())
    assert len(got) == len(want), f"{case.hook} returned {len(got)} results, the contract has {len(want)}"
    for operand, a, b in zip(CATALOG[case.hook].results, got, want, strict=True):
        assert isinstance(a, torch.Tensor), f"{operand.name} is a {type(a).__name__}, not a tensor"
        dtype = operand.dtype if operand.dtype == "int64" else case.dtype
        assert a.dtype == getattr(torch, dtype), f"{operand.name} is {a.dtype}"
        close(target, case, operand.name, a, b)


def _check_attention(target: Target, case: Case, arguments: dict[str, Any], result: Any) -> None:
    _check_results(target, case, arguments, result)
    if "prepare_attention" not in target.hooks:
        return
    query, cache, metadata = arguments["query"], arguments["cache"], arguments["metadata"]
    heads = (query.shape[1], case.arguments["cache"].key.shape[1])
    plan = target.hooks["prepare_attention"](metadata, *heads, query.shape[2], cache.block_size)
    planned = {**arguments, "metadata": replace(metadata, plan=plan)}
    _check_results(target, case, planned, target.call(case.hook, planned))


def _check_stored(
    target: Target,
    case: Case,
    cache: KVCache,
    key: torch.Tensor,
    value: torch.Tensor,
    slots: torch.Tensor,
    argument: str = "cache",
) -> None:
    """``key`` and ``value`` [T, K, D] at ``slots``, and elsewhere what the case's loose cache wrote before."""
    loose: LooseCache = case.arguments[argument]
    if cache.layout not in ("NHD", "HND"):
        _check_through_attention(target, case, loose, cache, (key, value), slots)
        return
    for name, rows, old, new in zip(
        ("key", "value"), flat_rows(cache), (loose.key, loose.value), (key, value), strict=True
    ):
        kept = ~torch.isin(loose.slots, slots)
        unchanged = same(rows[loose.slots[kept]], oracle.stored(old[kept], loose.dtype))
        assert unchanged, f"{case.id}: {name} was written outside the slots"
        close(target, case, name, rows[slots[slots >= 0]], oracle.stored(new[slots >= 0], loose.dtype))


def _check_through_attention(
    target: Target,
    case: Case,
    loose: LooseCache,
    cache: KVCache,
    new: tuple[torch.Tensor, torch.Tensor],
    slots: torch.Tensor,
) -> None:
    """The same for a layout that only the plugin can read: one query over each whole block.

    The case has written every slot; what it wrote again is ``new`` at ``slots``.
    """
    parts = [loose.key.clone(), loose.value.clone()]
    for part, rows in zip(parts, new, strict=True):
        part[slots[slots >= 0]] = rows[slots >= 0].to(part.dtype)
    blocks, ones = loose.num_blocks, (1,) * loose.num_blocks
    random = torch.Generator().manual_seed(blocks)
    query = torch.randn(blocks, *loose.key.shape[1:], generator=random).to(loose.key.dtype)
    lens = (loose.block_size,) * blocks
    metadata = AttentionMetadata(
        torch.arange(blocks + 1, dtype=torch.int32),
        torch.tensor(lens, dtype=torch.int32),
        torch.arange(blocks, dtype=torch.int32)[:, None],
        torch.full((blocks,), -1),
        ones,
        lens,
    )
    rest = (query.shape[-1] ** -0.5, 0, 0.0)
    device = target.device.torch_device
    placed = [place(x, target.hooks, device) for x in (query, metadata)]
    got = target.hooks["attention"](placed[0], cache, placed[1], *rest)
    (want,) = oracle.attention(query, replace(loose, key=parts[0], value=parts[1]), metadata, *rest)
    tolerance = target.tolerance("attention", case.dtype)
    ratio, index = worst(got, want, tolerance)
    block = index // want[0].numel()
    assert ratio <= 1, f"{case.id}: attention reads other keys or values in block {block} than were written"


def _check_write(target: Target, case: Case, arguments: dict[str, Any], result: Any) -> None:
    given = case.arguments
    _check_stored(target, case, arguments["cache"], given["key"], given["value"], given["slot_mapping"])


def _check_rope_write(target: Target, case: Case, arguments: dict[str, Any], result: Any) -> None:
    given = case.arguments
    query, key = oracle.rotary(*(given[n] for n in ("query", "key", "cos", "sin", "interleaved")))
    close(target, case, "query", result, query)
    _check_stored(target, case, arguments["cache"], key, given["value"], given["slot_mapping"])


def _check_copy(target: Target, case: Case, arguments: dict[str, Any], result: Any) -> None:
    loose, size = case.arguments["cache"], case.arguments["cache"].block_size
    source, to = (_slots_of(case.arguments[name], size) for name in ("source", "target"))
    _check_stored(target, case, arguments["cache"], loose.key[source], loose.value[source], to)


def _check_swap(target: Target, case: Case, arguments: dict[str, Any], result: Any) -> None:
    given = case.arguments
    loose, cache = given["source_cache"], arguments["target_cache"]
    source, to = (_slots_of(given[name], loose.block_size) for name in ("source", "target"))
    _check_stored(target, case, cache, loose.key[source], loose.value[source], to, "target_cache")


def _check_allocate(target: Target, case: Case, arguments: dict[str, Any], result: KVCache) -> None:
    asked = case.arguments
    assert isinstance(result, KVCache), f"allocate_kv returned a {type(result).__name__}"
    assert (result.layout, result.block_size) == (asked["layout"], asked["block_size"])
    inner = (asked["block_size"], asked["num_kv_heads"])
    inner = inner if asked["layout"] == "NHD" else inner[::-1]
    for part in (result.key, result.value):
        assert part.dtype == asked["dtype"]
        assert str(part.device).startswith(target.device.torch_device)
        if asked["layout"] in ("NHD", "HND"):
            assert tuple(part.shape) == (asked["num_blocks"], *inner, asked["head_dim"])
    for scale in (result.key_scale, result.value_scale):
        assert (scale is not None) == (asked["dtype"] == torch.int8)
        if scale is not None:
            assert (scale.dtype, tuple(scale.shape)) == (torch.float32, tuple(result.key.shape[:-1]))


def _check_sample(target: Target, case: Case, arguments: dict[str, Any], result: torch.Tensor) -> None:
    assert result.dtype == torch.int64, f"token ids are {result.dtype}"
    right = oracle.draws(case.arguments["logits"], case.arguments["params"])
    assert len(result) == len(right), f"{len(result)} token ids for {len(right)} rows"
    pairs = enumerate(result.cpu().tolist())
    wrong = [(row, token, sorted(right[row])) for row, token in pairs if token not in right[row]]
    assert not wrong, f"{case.id} ({case.note}): (row, token, right tokens) {wrong}"


def _check_logprobs(target: Target, case: Case, arguments: dict[str, Any], result: Any) -> None:
    logits, token_ids, top = case.arguments.values()
    want = logits.double().log_softmax(-1)
    chosen = want.gather(1, token_ids[:, None])
    close(target, case, "chosen", result.chosen, chosen[:, 0])
    assert result.rank.cpu().tolist() == ((want > chosen).sum(1) + 1).tolist()
    ids = result.top_ids.cpu()
    assert ids.shape == (len(logits), top)
    assert all(len(set(row)) == top for row in ids.tolist())
    close(target, case, "top_values", result.top_values, want.sort(-1, descending=True).values[:, :top])
    close(target, case, "values at top_ids", result.top_values, want.gather(1, ids))


_CHECKS: Mapping[str, Check] = MappingProxyType(
    {
        "attention": _check_attention,
        "decode_attention": _check_attention,
        "write_kv": _check_write,
        "rope_write_kv": _check_rope_write,
        "copy_blocks": _check_copy,
        "swap_blocks": _check_swap,
        "allocate_kv": _check_allocate,
        "sample": _check_sample,
        "logprobs": _check_logprobs,
    }
)
