"""What the kit asks of a hook beside its numbers: each kind of bad behaviour is noticed, none is seen in a good one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from qiao.contract import CATALOG, KVCache, composites
from qiao.contract.cases import cases
from qiao_conformance import behaviour, kit, reality, sim
from qiao_conformance.target import Target, find


@pytest.fixture
def reference() -> Target:
    return find("reference")


def pair_of(target, hook):
    return next(kit.few(target, hook))


def with_hook(target, name, function):
    return replace(target, hooks={**target.hooks, name: function})


def test_a_result_that_a_later_call_overwrites_is_noticed(reference):
    right, buffers = reference.hooks["silu_mul"], {}

    def reused(x):
        out = right(x)
        kept = buffers.setdefault("out", torch.empty(10_000, dtype=x.dtype))[: out.numel()].view(out.shape)
        return kept.copy_(out)

    behaviour.check_repeatable(reference, *pair_of(reference, "silu_mul"))
    with pytest.raises(AssertionError, match="a later call changed the result"):
        behaviour.check_repeatable(with_hook(reference, "silu_mul", reused), *pair_of(reference, "silu_mul"))


def test_state_from_an_earlier_call_is_noticed(reference):
    right, calls = reference.hooks["rms_norm"], []

    def drifting(x, weight, eps):
        calls.append(1)
        return right(x, weight, eps) * (1 + 1e-6 * len(calls))

    with pytest.raises(AssertionError, match="other bits the second time"):
        behaviour.check_repeatable(with_hook(reference, "rms_norm", drifting), *pair_of(reference, "rms_norm"))


def test_a_kernel_that_takes_rows_for_contiguous_is_noticed(reference):
    right = reference.hooks["silu_mul"]

    def flat(x):
        return right(torch.as_strided(x, x.shape, (x.shape[1], 1), x.storage_offset()))

    case, _ = pair_of(reference, "silu_mul")
    broken = with_hook(reference, "silu_mul", flat)
    kit.check_case(broken, case)
    with pytest.raises(AssertionError):
        kit.check_case(broken, case, strided=True)


def test_a_write_beside_strided_rows_is_noticed(reference):
    right = reference.hooks["silu_mul"]

    def careless(x):
        out = right(x)
        if x.stride(0) > x.shape[1]:
            torch.as_strided(x, (1,), (1,), x.storage_offset() + x.shape[1]).zero_()
        return out

    case, _ = pair_of(reference, "silu_mul")
    with pytest.raises(AssertionError, match="wrote beside the rows of x"):
        kit.check_case(with_hook(reference, "silu_mul", careless), case, strided=True)


@pytest.mark.parametrize(
    ("allocate", "said"),
    [
        (lambda *shape: (_ for _ in ()).throw(RuntimeError("CUDA error")), "raised RuntimeError"),
        (lambda *shape: None, "gave a cache of 4 times"),
    ],
)
def test_running_out_of_memory_in_another_way_is_noticed(reference, allocate, said):
    behaviour.check_out_of_memory(reference)
    with pytest.raises(AssertionError, match=said):
        behaviour.check_out_of_memory(with_hook(reference, "allocate_kv", allocate))


def test_memory_that_stays_taken_is_noticed():
    sim.setup(memory=64 << 20)
    target, kept = find("sim"), []
    right = target.hooks["allocate_kv"]

    def leaking(num_blocks, *rest):
        if num_blocks > 100:
            kept.append(torch.empty(8 << 20, dtype=torch.uint8, device="sim:0"))
        return right(num_blocks, *rest)

    behaviour.check_out_of_memory(target)
    with pytest.raises(AssertionError, match="still taken"):
        behaviour.check_out_of_memory(with_hook(target, "allocate_kv", leaking))
    kept.clear()


def test_types_are_the_contracts(reference):
    def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: int) -> torch.Tensor:
        return x

    def returns(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, ...]:
        return (x,)

    def plain(x, weight, eps):
        return x

    def defaulted(x, weight, eps=1e-5):
        return x

    def misnamed(x, weigth, eps):
        return x

    for hook in reference.hooks:
        behaviour.check_names_and_types(reference, hook)
    behaviour.check_names_and_types(with_hook(reference, "rms_norm", plain), "rms_norm")
    for wrong, said in (
        (rms_norm, "eps is annotated"),
        (returns, "return is annotated"),
        (defaulted, "must not have a default"),
        (misnamed, r"has the arguments \['weigth'\]"),
    ):
        with pytest.raises(AssertionError, match=said):
            behaviour.check_names_and_types(with_hook(reference, "rms_norm", wrong), "rms_norm")


def test_a_small_model_runs_as_planned():
    sim.setup(memory=256 << 20)
    for target in (find("reference"), find("sim")):
        reality.check_plan(target)


def test_a_plan_that_does_not_hold_is_noticed(reference):
    def refuses(x):
        raise RuntimeError("no kernel for this chip")

    sim.setup(memory=256 << 20)
    target = find("sim")
    with pytest.raises(AssertionError, match="the start-up probe failed"):
        reality.check_plan(with_hook(target, "silu_mul", refuses))
    right = target.hooks["attention"]

    def shifted(query, *rest):
        return right(query.roll(1, 1), *rest)

    with pytest.raises(AssertionError, match="differ from the reference"):
        reality.check_plan(with_hook(with_hook(target, "attention", shifted), "decode_attention", shifted))


def test_every_declared_size_comes_up(reference):
    facts = replace(reference.capabilities, block_sizes=(16, 32, 64, 128), head_dims=(64, 96, 128, 192, 256))
    seen = {(c.block_size, c.key.shape[2]) for c in (x.arguments["cache"] for x in cases("write_kv", facts))}
    assert {block for block, _ in seen} == {16, 32, 64, 128}
    assert {dim for _, dim in seen} == {64, 96, 128, 192, 256}


def test_every_hook_with_numbers_has_drawn_cases(reference):
    from qiao_conformance import drawn

    with_cases = {h for h in CATALOG if next(iter(cases(h, reference.capabilities)), None) is not None}
    without = {h for h in with_cases if drawn.recipes(h, reference.capabilities) is None}
    assert without == {"allocate_kv", "copy_blocks", "swap_blocks"}


def hidden_layout(target):
    """The reference plugin behind a layout whose inside nobody else may read."""
    inner, shut = "HND", "NZ"
    hooks = dict(target.hooks)

    def opened(function):
        return lambda *args: function(*(replace(a, layout=inner) if isinstance(a, KVCache) else a for a in args))

    def allocate(blocks, size, heads, dim, dtype, layout, device):
        assert layout == shut
        return replace(target.hooks["allocate_kv"](blocks, size, heads, dim, dtype, inner, device), layout=shut)

    for name in ("write_kv", "attention", "decode_attention", "copy_blocks", "swap_blocks", "rope_write_kv"):
        hooks[name] = opened(target.hooks[name])
    del hooks["prepare_attention"]
    facts = replace(target.capabilities, kv_layouts=(shut,), kv_dtypes=("float32",), dtypes=("float32",))
    return replace(target, hooks={**hooks, "allocate_kv": allocate}, capabilities=facts)


def test_a_layout_that_only_the_plugin_reads_is_checked_through_attention(reference):
    target = hidden_layout(reference)
    hooks = ("allocate_kv", "write_kv", "copy_blocks", "swap_blocks", "rope_write_kv", "attention")
    for hook in hooks:
        for case in cases(hook, target.capabilities):
            kit.check_case(target, case)
    kit.check_drawn(target, "write_kv", examples=5)
    right = target.hooks["write_kv"]

    def spills(key, value, cache, slots):
        right(key, value, cache, slots)
        if len(slots) == 6:  # a case's own six new tokens, not the cache that it begins with
            right(key[:1], value[:1], cache, (slots[:1] + 1) % (cache.key.shape[0] * cache.block_size))

    broken = with_hook(target, "write_kv", spills)
    case = next(c for c in cases("write_kv", target.capabilities) if len(c.arguments["key"]) == 6)
    with pytest.raises(AssertionError, match="attention reads other keys or values in block"):
        kit.check_case(broken, case)


def _reversed_ids(source_cache, target_cache, source, target):
    return source_cache, target_cache, source, target.flip(0)


def _touches_another(source_cache, target_cache, source, target):
    other = next(i for i in range(target_cache.key.shape[0]) if i not in target.tolist())
    target_cache.value[other].zero_()
    return source_cache, target_cache, source, target


def _harms_the_source(source_cache, target_cache, source, target):
    kept = source_cache.key[source].clone()
    source_cache.key[source] = 0
    return replace(source_cache, key=source_cache.key.index_copy(0, source, kept)), target_cache, source, target


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_reversed_ids, "times the tolerance"),
        (_touches_another, "written outside the slots"),
        (_harms_the_source, r"changed \['source_cache'\]"),
    ],
)
def test_a_wrong_swap_is_noticed(reference, change, said):
    right = reference.hooks["swap_blocks"]
    found = list(cases("swap_blocks", reference.capabilities))
    assert {case.id.split("-")[1] for case in found} == {"in", "out"}
    for case in found:
        kit.check_case(reference, case)
    broken = with_hook(reference, "swap_blocks", lambda *args: right(*change(*args)))
    with pytest.raises(AssertionError, match=said):
        for case in found:
            kit.check_case(broken, case)


def test_a_swap_gets_its_ids_on_the_host_and_one_cache_there():
    sim.setup(memory=64 << 20)
    target = find("sim")
    for case in list(cases("swap_blocks", target.capabilities))[:2]:
        arguments = target.placed(case)
        assert {arguments[name].device.type for name in ("source", "target")} == {"cpu"}
        places = {arguments[name].key.device.type for name in ("source_cache", "target_cache")}
        assert places == {"cpu", "sim"}


WRONG_EXPERTS = {
    "expert_matmul": lambda right: lambda x, weights, experts: right(x, weights, (experts + 1) % len(weights)),
    "route_experts": lambda right: lambda logits, top_k, normalise: right(logits, top_k, True),
    "combine_experts": lambda right: lambda x, weights: right(x, weights.flip(1)),
    "cap_logits": lambda right: lambda logits, cap: logits.clamp(-cap, cap),
}


@pytest.mark.parametrize("hook", WRONG_EXPERTS)
def test_drawn_cases_notice_wrong_experts_and_caps(reference, hook):
    facts = replace(reference.capabilities, dtypes=("float32",), schemes=("dense", "w4a16"))
    target = replace(reference, capabilities=facts)
    kit.check_drawn(target, hook, examples=10)
    with pytest.raises(AssertionError, match=hook):
        kit.check_drawn(with_hook(target, hook, WRONG_EXPERTS[hook](target.hooks[hook])), hook, examples=10)


def test_a_plan_that_is_not_what_runs_is_noticed(reference, monkeypatch):
    """The planned kernel is never called, or one is called that the plan puts elsewhere."""
    planned, bound = reality.make_plan, reality.bind

    def forgets(plan, backend, counters):
        return replace(bound(plan, backend, counters), silu_mul=composites.silu_mul)

    def without_norm(shape, backend, policy):
        return planned(shape, backend, policy, drop=("rms_norm",) if backend.plugin == "sim" else ())

    def whole(plan, backend, counters):
        return bound(planned(plan.shape, backend, plan.policy), backend, counters)

    sim.setup(memory=256 << 20)
    target = find("sim")
    with monkeypatch.context() as patch:
        patch.setattr(reality, "bind", forgets)
        with pytest.raises(AssertionError, match=r"the plan puts \['silu_mul'\] on sim, but a run of the model never"):
            reality.check_plan(target)
    monkeypatch.setattr(reality, "make_plan", without_norm)
    reality.check_plan(target)
    monkeypatch.setattr(reality, "bind", whole)
    with pytest.raises(AssertionError, match=r"\['rms_norm'\] of sim were called although the plan puts them elsewh"):
        reality.check_plan(target)
