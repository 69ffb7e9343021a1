"""Placement and its price, against numbers worked out by hand from the published shape of Llama 3 8B."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from qiao.contract import CATALOG, AttentionShape, LinearShape, ModelShape, Operand, StepShape
from qiao.errors import ParameterError, PluginError
from qiao.registry import Policy, make_plan
from qiao.registry.backend import make_backend
from qiao.registry.manager import LoadedPlugin
from qiao.registry.placement import Kind
from qiao.registry.pricing import operand_bytes

from tests.support.plans import device, host, shape_of

LAYERS, HEADS, KV_HEADS, SIZE, HIDDEN, FFN, VOCAB = 32, 32, 8, 128, 4096, 14336, 128256
BATCH, CONTEXT = 32, 2048


def llama():
    return shape_of("llama-3-8b")


def plan(backend=None, shape=None, **options):
    return make_plan(shape or llama(), backend or device(), Policy.parse("allow"), **options)


def row(made, operator, scheme="dense", step=None):
    rows = [r for r in made.price(step).rows if r.operator == operator and r.scheme in ("", scheme)]
    assert len(rows) == 1
    return rows[0]


def on_host(made):
    return {p.group for p in made.placements if p.kind is Kind.HOST}


def test_attention_with_its_group():
    made = plan(device(["attention"]))
    query = BATCH * HEADS * SIZE * 2
    kv = BATCH * KV_HEADS * SIZE * 2
    attention, write = row(made, "attention").price, row(made, "write_kv").price
    assert (attention.calls, attention.copies_to_host, attention.copies_to_device) == (LAYERS, LAYERS, LAYERS)
    assert attention.bytes_to_host == attention.bytes_to_device == LAYERS * query
    assert (write.copies_to_host, write.copies_to_device) == (2 * LAYERS, 0)
    assert (write.bytes_to_host, write.bytes_to_device) == (2 * LAYERS * kv, 0)
    assert attention.syncs == 2 * LAYERS and write.syncs == LAYERS
    assert on_host(made) == {"KV"}
    assert row(made, "write_kv").reason == "moves with attention (KV)"
    assert row(made, "attention").reason == "fake does not implement it"


def test_attention_with_the_cache_kept_on_the_device():
    """The figure that the design starts from: all of the cache crosses in each step."""
    moved, kept = plan(drop=["attention"]), plan(drop=["attention"], keep=["KV"])
    cache = LAYERS * BATCH * CONTEXT * 2 * KV_HEADS * SIZE * 2
    assert row(kept, "attention").price.bytes_to_host == cache + LAYERS * BATCH * HEADS * SIZE * 2
    assert row(kept, "write_kv").kind is Kind.DEVICE
    assert kept.price().total.bytes > 400 * moved.price().total.bytes
    assert kept.kept == ("KV",) and kept.as_dict()["bindable"] is False


def test_the_published_example_of_the_design():
    """36 layers as in the notes: 9,683 MB with the cache on the device, 24 MB with it on the host."""
    shape = shape_of("qwen3-8b")
    kept = plan(shape=shape, drop=["attention"], keep=["KV"])
    assert round(row(kept, "attention").price.bytes / 1e6) == 9683
    moved = plan(shape=shape, drop=["attention"])
    assert round(moved.price().fallback.bytes / 1e6) == 24


def test_sampling_moves_the_logits_only():
    price = plan(device(["sample"])).price()
    assert price.fallback.bytes_to_host == BATCH * VOCAB * 4 and price.fallback.bytes_to_device == 0
    assert price.fallback.copies == 1
    assert price.outputs.copies == 0


def test_matmul_moves_activations_only():
    price = row(plan(device(["matmul"])), "matmul").price
    ins = LAYERS * (HIDDEN + HEADS * SIZE + HIDDEN + FFN) + HIDDEN
    outs = LAYERS * ((HEADS + 2 * KV_HEADS) * SIZE + HIDDEN + 2 * FFN + HIDDEN) + VOCAB
    assert (price.calls, price.bytes_to_host, price.bytes_to_device) == (
        4 * LAYERS + 1,
        BATCH * ins * 2,
        BATCH * outs * 2,
    )


def test_inputs_follow_what_lies_on_the_device():
    step = StepShape(tokens=5, seqs=3, logits=2, context=9, table_width=4)
    all_there = plan().price(step)
    device_part, kv_part, sample_part = (5 + 5 + 2) * 8, 4 * 4 + 3 * 4 + 3 * 4 * 4 + 5 * 8, 2 * 4 * 5
    assert all_there.inputs.bytes_to_device == device_part + kv_part + sample_part
    assert all_there.inputs.copies == 3 + 4 + 5
    assert (all_there.outputs.copies, all_there.outputs.bytes_to_host) == (1, 2 * 8)
    assert plan(drop=["KV"]).price(step).inputs.bytes_to_device == device_part + sample_part
    assert plan(drop=["S"]).price(step).inputs.bytes_to_device == device_part + kv_part
    assert plan(host()).price(step).total.copies == 0


@settings(derandomize=True, max_examples=25, deadline=None)
@given(
    tokens=st.integers(1, 300),
    seqs=st.integers(1, 40),
    logits=st.integers(0, 40),
    drop=st.lists(st.sampled_from(["attention", "matmul", "sample", "rms_norm"]), unique=True),
)
def test_sums_are_the_sums_of_rows(tokens, seqs, logits, drop):
    made = plan(drop=drop)
    price = made.price(StepShape(max(tokens, seqs), seqs, min(logits, seqs), 64, 4))
    parts = [r.price for r in price.rows] + [price.inputs, price.outputs]
    assert price.total.bytes == sum(p.bytes for p in parts)
    assert price.total.copies == sum(p.copies for p in parts)
    for r in price.rows:
        assert r.kind is Kind.HOST or r.price.copies == r.price.bytes == 0


@pytest.mark.parametrize(
    ("capabilities", "groups", "said"),
    [
        ({"dtypes": ("float32",)}, {"KV", "W[dense]"}, "computes in float32, not in bfloat16"),
        ({"kv_dtypes": ("float16",)}, {"KV"}, "keeps a cache of float16, not of bfloat16"),
        ({"head_dims": (64, 256)}, {"KV"}, "takes head sizes 64, 256, not 128"),
        ({"schemes": ("w4a16",)}, {"W[dense]"}, "takes the schemes w4a16, not dense"),
        ({"kv_layouts": ()}, {"KV"}, "declares no KV layout"),
    ],
)
def test_declared_limits_move_the_group(capabilities, groups, said):
    made = plan(device(**capabilities))
    assert on_host(made) == groups
    assert any(said in r.reason for r in made.fallback_rows)


def test_a_cache_of_codes():
    floats = device(kv_dtypes=("bfloat16", "float32"))
    codes = replace(llama(), kv_dtype="int8")
    moved = plan(floats, codes)
    assert on_host(moved) == {"KV"}
    said = "keeps a cache of bfloat16, float32, not of int8: set --kv-cache-dtype"
    assert any(said in r.reason for r in moved.fallback_rows)
    assert moved.as_dict()["kv"]["dtype"] == "int8" and "int8, layout" in moved.render()
    assert on_host(plan(floats, replace(codes, kv_dtype="float32"))) == set()
    kept = plan(floats, codes, drop=["attention"], keep=["KV"])
    cache = LAYERS * BATCH * CONTEXT * 2 * KV_HEADS * (SIZE + 4)  # a byte a code, four a scale
    assert row(kept, "attention").price.bytes_to_host == cache + LAYERS * BATCH * HEADS * SIZE * 2


def test_block_sizes():
    backend = device(block_sizes=(32, 128))
    assert plan(backend).block_size == 32 and on_host(plan(backend)) == set()  # the core picks
    asked = plan(backend, block_size=16)
    assert on_host(asked) == {"KV"} and "KV blocks of 32, 128 tokens, not 16" in row(asked, "attention").reason
    assert plan(block_size=48).block_size == 48


@pytest.mark.parametrize(("feature", "value"), [("sliding_window", 4096), ("soft_cap", 50.0)])
def test_windows_and_caps(feature, value):
    attention = AttentionShape(2, 4, 2, 16, **{feature: value})
    shape = ModelShape("Toy", 64, 320, "float32", 64, (attention,), (LinearShape("o", 64, 64, 2),))
    assert on_host(plan(device(), shape)) == set()
    assert on_host(plan(device(**{feature: False}), shape)) == {"KV"}


def test_the_layout_is_that_of_the_place_of_the_cache():
    assert plan(device(kv_layouts=("NZ",))).kv_layout == "NZ"
    assert plan(device(kv_layouts=("NZ",)), drop=["attention"]).kv_layout == "NHD"


def test_schemes_move_apart():
    shape = replace(
        llama(), linears=(LinearShape("qkv", 64, 64, 2, "w4a16"), LinearShape("head", 64, 320, 1, "dense", "N"))
    )
    made = plan(device(schemes=("dense",)), shape)
    assert on_host(made) == {"W[w4a16]"}
    assert row(made, "matmul", "w4a16").price.calls == 2 and row(made, "matmul", "dense").kind is Kind.DEVICE


def test_optional_hooks_never_move():
    for op in CATALOG.values():
        if op.optional:
            made = plan(device([op.name]))
            assert on_host(made) == set(), op.name
            if op.family != "device":
                found = made.placement(op.name, "dense" if op.group == "W" else "")
                assert found.kind is (Kind.COMPOSITE if op.replaces == op.name else Kind.UNUSED)


def test_regions_with_host_operators_are_not_captured():
    made = plan(drop=["attention"])
    layers, sampling = made.regions
    assert not layers.capturable and "attention" in layers.reason
    assert sampling.capturable
    assert all(not r.capturable for r in plan(device(["capture"])).regions)


def test_products_of_experts_are_counted_once():
    lines = (LinearShape("o", 64, 64, LAYERS), LinearShape("experts", 64, 32, 8 * LAYERS, rows="X"))
    shape, step = replace(llama(), linears=lines, experts_per_token=2), StepShape(3, 3, 3, 9)
    together, apart = plan(device(), shape), plan(device(["expert_matmul"]), shape)
    assert row(together, "matmul", step=step).price.calls == LAYERS
    assert row(together, "expert_matmul", step=step).price.calls == LAYERS
    assert row(apart, "matmul", step=step).price.calls == LAYERS + 3 * 2 * LAYERS
    assert row(apart, "expert_matmul", step=step).price.calls == 0
    moved = plan(device(["matmul"]), shape)
    assert moved.placement("expert_matmul", "dense").kind is Kind.UNUSED


def test_experts_are_priced_from_above_and_marked():
    shape = replace(llama(), linears=(LinearShape("experts", 64, 32, 8 * LAYERS, rows="X"),), experts_per_token=2)
    made = plan(device(["matmul"]), shape)
    step = StepShape(tokens=3, seqs=3, logits=3, context=9)
    price = row(made, "matmul", step=step).price
    assert price.estimate and made.as_dict()["fallback"]["estimate"]
    assert price.bytes_to_host == 3 * 2 * LAYERS * 64 * 2  # each token to two experts in each layer
    assert price.calls == 3 * 2 * LAYERS  # at most one call for each


def test_what_nobody_can_run_is_an_error():
    behind = host()
    poor = make_backend(
        LoadedPlugin("reference", {k: v for k, v in behind.hooks.items() if k != "attention"}), behind.device, None
    )
    with pytest.raises(PluginError, match=r"KV can run nowhere.*fake: attention.*reference: attention"):
        plan(device(["attention"], behind=poor))
    with pytest.raises(PluginError, match="KV can run nowhere"):
        plan(host(), drop=["attention"])


def test_a_second_cpu_plugin_fills_in_by_whole_groups():
    """A faster CPU plugin without attention: the cache goes to the plugin behind it, which nothing is copied for."""
    last = host()
    fast = make_backend(
        LoadedPlugin("cpu", {k: v for k, v in last.hooks.items() if k != "attention"}),
        replace(last.device, name="cpu:0"),
        last,
    )
    made = plan(fast)
    assert {p.place for p in made.placements if p.group == "KV" and p.kind is Kind.HOST} == {"reference"}
    assert made.placement("matmul", "dense").place == "cpu"
    assert made.price().total.copies == 0
    beyond = plan(device(["attention", "matmul"], behind=fast))
    assert beyond.placement("attention").place == "reference"
    assert beyond.placement("matmul", "dense").place == "cpu"


@pytest.mark.parametrize(
    ("options", "field", "said"),
    [
        ({"drop": ["atention"]}, "drop", "Did you mean 'attention'?"),
        ({"drop": ["memory_info"]}, "drop", "cannot be dropped"),
        ({"keep": ["attention"]}, "keep", "no operator or group"),
        ({"keep": ["S"]}, "keep", "holds no state"),
    ],
)
def test_names_are_checked(options, field, said):
    with pytest.raises(ParameterError) as caught:
        plan(**options)
    assert caught.value.field == field and said in str(caught.value)


def test_keeping_what_did_not_move_changes_nothing():
    assert plan(keep=["KV", "W"]).kept == ()
    assert plan(keep=["KV"]).as_dict() == plan().as_dict()


def test_kept_weights_cross_in_each_call():
    kept = row(plan(drop=["matmul"], keep=["W"]), "matmul").price
    moved = row(plan(drop=["matmul"]), "matmul").price
    weights = 2 * sum(x.count * x.in_features * x.out_features for x in llama().linears)
    assert kept.bytes_to_host - moved.bytes_to_host == weights


def test_json_is_plain_and_stable():
    data = plan(drop=["attention"]).as_dict()
    assert json.loads(json.dumps(data)) == data == plan(drop=["attention"]).as_dict()
    attention = next(o for o in data["operators"] if o["operator"] == "attention")
    assert attention["group"] == "KV" and attention["place"] == "reference" and attention["kind"] == "host"
    assert attention["bytes"] == attention["bytes_to_host"] + attention["bytes_to_device"] > 0
    assert data["total"]["bytes"] == sum(o["bytes"] for o in data["operators"]) + sum(
        data[part]["bytes"] for part in ("inputs", "outputs")
    )
    assert data["assumptions"] == {"bytes_per_second": 25e9, "sync_seconds": 15e-6}


def test_text_names_what_falls_back_and_why():
    text = plan(device(["sample"]), drop=["attention"]).render()
    assert "attention (KV) runs on reference: left out by --drop" in text
    assert "sample (S) runs on reference: fake does not implement it" in text
    assert "25 GB/s" in text and "not captured" in text


def test_time_is_bytes_over_speed_and_waits():
    data = plan(drop=["attention"]).as_dict()["total"]
    assert data["seconds"] == pytest.approx(data["bytes"] / 25e9 + data["syncs"] * 15e-6)


def test_every_shape_of_the_catalog_can_be_sized():
    letters = dict.fromkeys("TBNHKDEVIOFRXA", 6)
    for op in CATALOG.values():
        for operand in (*op.args, *op.results):
            if operand.shape:
                assert operand_bytes(operand, letters, "bfloat16") > 0, (op.name, operand)
    assert operand_bytes(Operand("cos", "move", "T R/2", "float32"), letters, "bfloat16") == 6 * 3 * 4
    assert operand_bytes(Operand("x", "move", "T 2F", "activation"), letters, "bfloat16") == 6 * 12 * 2
