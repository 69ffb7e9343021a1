"""The conformance kit: one test per case of the contract, on the plugin named by ``--qiao-device``."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import pytest
import torch
from qiao.contract import CATALOG, KVCache
from qiao.contract.cases import Case, LooseCache, LooseWeight, cases

from qiao_conformance import captured, oracle
from qiao_conformance.target import Target, find, flat_rows, host, same, specified, worst

_TARGET = pytest.StashKey[Target]()


def target_of(config: pytest.Config) -> Target:
    """The plugin under test, looked up once a session."""
    if _TARGET not in config.stash:
        try:
            config.stash[_TARGET] = find(config.getoption("--qiao-device"))
        except LookupError as error:
            raise pytest.UsageError(f"--qiao-device: {error}") from error
    return config.stash[_TARGET]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each hook that the plugin has, each case that its capabilities call for."""
    target = target_of(metafunc.config)
    if "case" in metafunc.fixturenames:
        found = [c for hook in CATALOG if hook in target.hooks for c in cases(hook, target.capabilities)]
        metafunc.parametrize("case", found, ids=[c.id for c in found])
    if "dtype" in metafunc.fixturenames:
        metafunc.parametrize("dtype", target.capabilities.dtypes if "capture" in target.hooks else ())
    if "hook" in metafunc.fixturenames:
        metafunc.parametrize("hook", [h for h in CATALOG if h in target.hooks])


@pytest.fixture(scope="session")
def target(request: pytest.FixtureRequest) -> Target:
    """The plugin under test."""
    return target_of(request.config)


def test_arguments_have_the_contracts_names_and_order(target: Target, hook: str) -> None:
    """The binder calls by position."""
    got = tuple(inspect.signature(target.hooks[hook]).parameters)
    assert got == specified()[hook]


def test_required_device_hooks(target: Target) -> None:
    """Without these four nothing can start."""
    for hook in ("probe_devices", "capabilities", "memory_info", "synchronize"):
        assert hook in target.hooks, f"{hook} is required"
    memory = target.hooks["memory_info"](target.device.torch_device)
    assert 0 <= memory.free <= memory.total


def test_threads(target: Target) -> None:
    """A plugin that has the hook says what it uses by default, and refuses a number that is none."""
    if "set_threads" not in target.hooks:
        pytest.skip("the plugin has no set_threads")
    assert target.hooks["set_threads"](None).strip()
    with pytest.raises(ValueError, match=r"."):
        target.hooks["set_threads"](0)


def test_replays_follow_their_buffers(target: Target, dtype: str) -> None:
    """A captured layer equals the layer: other tokens, positions, lengths, blocks and slots, empty rows."""
    captured.check_replays(target, dtype)


def test_capture_refuses_what_it_cannot_follow(target: Target) -> None:
    """A value on the host is refused or followed, never kept; errors come out as they are."""
    if "capture" not in target.hooks:
        pytest.skip("the plugin has no capture")
    captured.check_host_value(target)
    captured.check_errors(target)


def test_case(target: Target, case: Case) -> None:
    """The result within tolerance, and nothing changed but what the catalog allows."""
    arguments = target.placed(case)
    before = {k: host(v) for k, v in arguments.items()}
    result = target.call(case.hook, arguments)
    allowed = CATALOG[case.hook].mutates
    changed = [k for k, v in arguments.items() if k not in allowed and not same(before[k], host(v))]
    assert not changed, f"{case.hook} changed {changed}; it may only change {list(allowed)}"
    _CHECKS.get(case.hook, _check_results)(target, case, arguments, result)


def _close(target: Target, case: Case, name: str, got: torch.Tensor, want: torch.Tensor) -> None:
    flat = (x for v in case.arguments.values() for x in (v if isinstance(v, tuple) else (v,)))
    scheme = next((x.scheme for x in flat if isinstance(x, LooseWeight)), "")
    tolerance = target.tolerance(case.hook, case.dtype, scheme)
    ratio, index = worst(got, want, tolerance)
    assert ratio <= 1, (
        f"{case.id} ({case.note}): {name} of shape {tuple(got.shape)} is off by {ratio:.3g} times the tolerance "
        f"(atol {tolerance.atol}, rtol {tolerance.rtol}), worst at flat index {index}"
    )


def _check_results(target: Target, case: Case, arguments: dict[str, Any], result: Any) -> None:
    got = result if isinstance(result, tuple) else (result,)
    want = oracle.EXPECTED[case.hook](*case.arguments.values())
    assert len(got) == len(want)
    for operand, a, b in zip(CATALOG[case.hook].results, got, want, strict=True):
        dtype = operand.dtype if operand.dtype == "int64" else case.dtype
        assert a.dtype == getattr(torch, dtype), f"{operand.name} is {a.dtype}"
        _close(target, case, operand.name, a, b)


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
    target: Target, case: Case, cache: KVCache, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor
) -> None:
    """``key`` and ``value`` [T, K, D] at ``slots``, everything else as it was in the case's loose cache."""
    loose: LooseCache = case.arguments["cache"]
    for name, rows, old, new in zip(
        ("key", "value"), flat_rows(cache), (loose.key, loose.value), (key, value), strict=True
    ):
        kept = ~torch.isin(loose.slots, slots)
        unchanged = same(rows[loose.slots[kept]], oracle.stored(old[kept], loose.dtype))
        assert unchanged, f"{case.id}: {name} was written outside the slots"
        _close(target, case, name, rows[slots[slots >= 0]], oracle.stored(new[slots >= 0], loose.dtype))


def _check_write(target: Target, case: Case, arguments: dict[str, Any], result: Any) -> None:
    given = case.arguments
    _check_stored(target, case, arguments["cache"], given["key"], given["value"], given["slot_mapping"])


def _check_rope_write(target: Target, case: Case, arguments: dict[str, Any], result: Any) -> None:
    given = case.arguments
    query, key = oracle.rotary(*(given[n] for n in ("query", "key", "cos", "sin", "interleaved")))
    _close(target, case, "query", result, query)
    _check_stored(target, case, arguments["cache"], key, given["value"], given["slot_mapping"])


def _check_copy(target: Target, case: Case, arguments: dict[str, Any], result: Any) -> None:
    loose, size = case.arguments["cache"], case.arguments["cache"].block_size
    offset = torch.arange(size)[None, :]
    source, target_slots = ((case.arguments[n][:, None] * size + offset).flatten() for n in ("source", "target"))
    _check_stored(target, case, arguments["cache"], loose.key[source], loose.value[source], target_slots)


def _check_allocate(target: Target, case: Case, arguments: dict[str, Any], result: KVCache) -> None:
    asked = case.arguments
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
    assert result.dtype == torch.int64
    right = oracle.draws(case.arguments["logits"], case.arguments["params"])
    pairs = enumerate(result.cpu().tolist())
    wrong = [(row, token, sorted(right[row])) for row, token in pairs if token not in right[row]]
    assert not wrong, f"{case.id} ({case.note}): (row, token, right tokens) {wrong}"


def _check_logprobs(target: Target, case: Case, arguments: dict[str, Any], result: Any) -> None:
    logits, token_ids, top = case.arguments.values()
    want = logits.double().log_softmax(-1)
    chosen = want.gather(1, token_ids[:, None])
    _close(target, case, "chosen", result.chosen, chosen[:, 0])
    assert result.rank.cpu().tolist() == ((want > chosen).sum(1) + 1).tolist()
    ids = result.top_ids.cpu()
    assert ids.shape == (len(logits), top)
    assert all(len(set(row)) == top for row in ids.tolist())
    _close(target, case, "top_values", result.top_values, want.sort(-1, descending=True).values[:, :top])
    _close(target, case, "values at top_ids", result.top_values, want.gather(1, ids))


_CHECKS = {
    "attention": _check_attention,
    "decode_attention": _check_attention,
    "write_kv": _check_write,
    "rope_write_kv": _check_rope_write,
    "copy_blocks": _check_copy,
    "allocate_kv": _check_allocate,
    "sample": _check_sample,
    "logprobs": _check_logprobs,
}
