"""What the user allows, and how a refusal reads."""

from __future__ import annotations

import logging

import pytest
from qiao.errors import ParameterError, PlanRefusedError
from qiao.registry import Policy, enforce, make_plan

from tests.support.plans import device, host, shape_of


def test_the_most_specific_word_counts():
    policy = Policy.parse("warn, attention=deny, KV=allow, W=deny, W[w4a16]=allow")
    assert policy.verdict("attention", "KV") == "deny"
    assert policy.verdict("write_kv", "KV") == "allow"
    assert policy.verdict("matmul", "W[dense]") == "deny"
    assert policy.verdict("matmul", "W[w4a16]") == "allow"
    assert policy.verdict("sample", "S") == "warn"
    assert Policy.parse("").default == "warn" and Policy.parse("S=deny").default == "warn"


def test_dequantize_is_a_word_for_weights_alone():
    policy = Policy.parse("deny,W=dequantize,W[w8a8]=warn")
    assert policy.verdict("matmul", "W[fp8]") == policy.verdict("pack_weight", "W[w4a16]") == "dequantize"
    assert policy.verdict("matmul", "W[w8a8]") == "warn"
    for text in ("dequantize", "attention=dequantize", "KV=dequantize", "warn,write_kv=dequantize"):
        with pytest.raises(ParameterError, match="dequantize is for weights"):
            Policy.parse(text)


@pytest.mark.parametrize("text", ["maybe", "warn,deny", "attention=perhaps", "atention=deny", "W[=deny", "=deny=warn"])
def test_mistakes_name_the_field(text):
    with pytest.raises(ParameterError) as caught:
        Policy.parse(text)
    assert caught.value.field == "fallback"


def test_a_negative_budget():
    with pytest.raises(ParameterError, match="fallback_budget"):
        Policy.parse("warn", -1)


def judge(text, budget=None, backend=None, **options):
    policy = Policy.parse(text, budget)
    enforce(make_plan(shape_of("llama-3-8b"), backend or device(), policy, **options), policy)


def refusal(text, budget=None, **options):
    with pytest.raises(PlanRefusedError) as caught:
        judge(text, budget, **options)
    return str(caught.value)


def test_deny_names_operators_reasons_prices_and_the_remedy():
    said = refusal("deny", drop=["attention", "sample"])
    for part in (
        "attention (left out by --drop)",
        "write_kv",
        "sample",
        "MB",
        "ms a step",
        "--fallback warn",
        "fake:0",
    ):
        assert part in said
    assert "--device reference" in said


def test_exceptions_to_deny():
    judge("deny,attention=allow", drop=["attention"])  # what moves along is judged by its cause
    judge("deny,KV=warn", drop=["attention"])
    assert "sample" in refusal("deny,KV=allow", drop=["attention", "sample"])
    assert "write_kv" in refusal("allow,write_kv=deny", drop=["attention"])  # named, so it counts by itself
    assert "attention" in refusal("allow,KV=deny", drop=["attention"])


def test_deny_accepts_what_stays_on_the_device():
    judge("deny")
    judge("deny", drop=["rms_norm", "rotary", "rope_write_kv", "decode_attention", "capture"])
    judge("deny", backend=host())


def test_the_budget_is_a_hard_line():
    policy = Policy.parse("allow")
    exact = make_plan(shape_of("llama-3-8b"), device(), policy, drop=["attention"]).price().fallback.bytes
    judge("allow", exact, drop=["attention"])
    said = refusal("allow", exact - 1, drop=["attention"])
    assert str(exact) in said and "--fallback-budget" in said and "attention" in said
    judge("allow", 0)  # inputs and outputs are no fallback


def test_warn_says_it_once_for_each_group(caplog):
    judge("warn", drop=["attention", "write_kv", "sample"])
    said = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(said) == 2
    assert "attention" in said[0] and "write_kv" in said[0] and "sample" in said[1]
    assert all("fake:0" in line and "a step" in line for line in said)


def test_allow_is_silent(caplog):
    judge("allow", drop=["attention"])
    assert not caplog.records
