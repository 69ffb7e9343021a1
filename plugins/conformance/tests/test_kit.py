"""The kit passes right plugins and notices each kind of wrong one."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from qiao.contract import CATALOG, Tolerance
from qiao.contract.cases import cases
from qiao_conformance import kit, sim
from qiao_conformance.target import find, same, worst

pytest_plugins = ("pytester",)

NUMERIC = [
    "attention", "decode_attention", "matmul", "logprobs", "rms_norm", "silu_mul", "gelu_mul",
    "add_rms_norm", "cap_logits", "expert_matmul", "combine_experts",
]  # fmt: skip


@pytest.fixture(autouse=True)
def device():
    sim.setup(memory=256 << 20)
    yield
    sim.reset()


@pytest.fixture
def target():
    return find("sim")


def fails(target, hook, scheme=""):
    for case in cases(hook, target.capabilities):
        if scheme and case.arguments["weight"].scheme != scheme:
            continue
        try:
            kit.test_case(target, case)
        except AssertionError:
            return True
    return False


def with_hook(target, name, function):
    return replace(target, hooks={**target.hooks, name: function})


@pytest.mark.parametrize("hook", NUMERIC)
def test_wrong_numbers_are_noticed(target, hook):
    assert not fails(target, hook)
    with sim.wrong_numbers(hook, by=0.1):
        assert fails(target, hook)


def test_a_declared_looser_tolerance_wins(target):
    loose = {("rms_norm", d): Tolerance(1.0, 1.0) for d in target.capabilities.dtypes}
    declared = replace(target, capabilities=replace(target.capabilities, tolerances=loose))
    with sim.wrong_numbers("rms_norm", by=0.1):
        assert fails(target, "rms_norm")
        assert not fails(declared, "rms_norm")


def test_a_tolerance_may_be_for_one_weight_format(target):
    loose = {("matmul.w4a16", d): Tolerance(1.0, 1.0) for d in target.capabilities.dtypes}
    declared = replace(target, capabilities=replace(target.capabilities, tolerances=loose))
    for dtype in target.capabilities.dtypes:
        assert declared.tolerance("matmul", dtype, "w4a16") == Tolerance(1.0, 1.0)
        assert declared.tolerance("matmul", dtype, "w8a16") == target.tolerance("matmul", dtype)
    with sim.wrong_numbers("matmul", by=0.1):
        assert fails(target, "matmul", "w4a16") and not fails(declared, "matmul", "w4a16")
        assert fails(declared, "matmul", "w8a16")


def test_a_write_outside_the_slots_is_noticed(target):
    right = target.hooks["write_kv"]

    def write(key, value, cache, slots):
        right(key, value, cache, slots.clamp(min=0))  # padding lands in slot 0

    # the case's own contents are written through the same hook, without padding there
    assert not fails(target, "write_kv")
    assert fails(with_hook(target, "write_kv", write), "write_kv")


def test_a_changed_argument_is_noticed(target):
    right = target.hooks["silu_mul"]

    def in_place(x):
        out = right(x)
        x.mul_(2)
        return out

    assert fails(with_hook(target, "silu_mul", in_place), "silu_mul")


def test_a_wrong_sampler_is_noticed(target):
    def greedy(logits, params):
        return logits.argmax(1)

    def highest_id_of_a_tie(logits, params):
        return logits.shape[1] - 1 - logits.flip(1).argmax(1)

    assert not fails(target, "sample")
    assert fails(with_hook(target, "sample", greedy), "sample")
    assert fails(with_hook(target, "sample", highest_id_of_a_tie), "sample")


def test_a_stale_cache_dtype_or_copy_is_noticed(target):
    assert fails(with_hook(target, "copy_blocks", lambda cache, source, to: None), "copy_blocks")
    assert fails(with_hook(target, "rotary", lambda q, k, c, s, i: (q.double(), k)), "rotary")


def _kept(field):
    """A capture that keeps one input as it was while recording."""

    def capture(function, example, device):
        inputs = [x.clone() if i == field else x for i, x in enumerate(example)]
        return _again(function, inputs)

    return capture


def _again(function, example):
    first = function(*example)

    def replay():
        for old, new in zip(first, function(*example), strict=True):
            old.copy_(new)
        return first

    return replay


def _same(value):
    return value


WRONG_CAPTURES = {
    **{name: _kept(i) for i, name in enumerate(("tokens", "positions", "starts", "lengths", "tables", "slots"))},
    "results": lambda function, example, device: partial(_same, function(*example)),
    "new results": lambda function, example, device: lambda: function(*example),
}
del WRONG_CAPTURES["starts"]  # which are the same in every step


@pytest.mark.parametrize("name", WRONG_CAPTURES)
def test_a_replay_that_keeps_what_changed_is_noticed(target, name):
    with pytest.raises(AssertionError):
        kit.test_replays_follow_their_buffers(with_hook(target, "capture", WRONG_CAPTURES[name]), "float32")


def test_a_value_kept_from_the_host_or_a_hidden_error_is_noticed(target):
    def frozen(function, example, device):
        result = function(*example)
        return lambda: result

    def hiding(function, example, device):
        try:
            return _again(function, example)
        except Exception:
            return lambda: None

    for wrong in (frozen, hiding):
        with pytest.raises((AssertionError, pytest.fail.Exception)):
            kit.test_capture_refuses_what_it_cannot_follow(with_hook(find("reference"), "capture", wrong))


def test_a_refusal_is_shown(target):
    def refuse(function, example, device):
        raise NotImplementedError("no graphs on this chip")

    with pytest.raises(pytest.skip.Exception, match="no graphs on this chip"):
        kit.test_replays_follow_their_buffers(with_hook(target, "capture", refuse), "float32")


def test_only_cases_for_what_the_chip_has(target):
    sim.setup(chip="hnd")
    limited = find("sim")
    seen = [c.arguments["cache"] for c in cases("attention", limited.capabilities)]
    assert {(c.layout, c.block_size) for c in seen} == {("HND", 128)}
    assert not fails(limited, "attention")


def test_every_hook_that_computes_has_cases(target):
    without = {name for name in CATALOG if not any(True for _ in cases(name, target.capabilities))}
    device = {name for name, op in CATALOG.items() if op.family == "device"}
    assert without == device | {"pack_weight", "prepare_attention"}


def test_comparison_counts_nan_and_shape_as_wrong():
    tight = Tolerance(0.0, 0.0)
    assert worst(torch.ones(2), torch.ones(2), tight)[0] == 0
    assert worst(torch.tensor([1.0, float("nan")]), torch.ones(2), Tolerance(9, 9)) == (float("inf"), 1)
    assert worst(torch.ones(3), torch.ones(2), Tolerance(9, 9))[0] == float("inf")
    assert worst(torch.tensor([float("-inf")]), torch.tensor([float("-inf")]), tight)[0] == 0
    assert not same(torch.ones(1), torch.ones(1).double())


def test_option_runs_the_kit_and_prints_what_it_tested(pytester):
    result = pytester.runpytest_subprocess("--qiao-device", "reference", "-k", "silu_mul")
    result.stdout.fnmatch_lines(["*qiao device: reference:0 (cpu)*"])
    outcomes = result.parseoutcomes()
    assert outcomes.get("failed", 0) == 0 and outcomes["passed"] >= 7


def test_a_looser_tolerance_is_printed_even_in_quiet_runs(pytester, monkeypatch):
    monkeypatch.setenv("QIAO_SIM_CHIP", "loose")
    result = pytester.runpytest_subprocess("--qiao-device", "sim", "-q", "-k", "silu_mul and not test_case")
    result.stdout.fnmatch_lines(["looser by the plugin's wish: matmul float16 atol 0.01 rtol 0.01"])
    assert result.ret == 0


def test_unknown_plugin_is_a_usage_error(pytester):
    result = pytester.runpytest_subprocess("--qiao-device", "warp")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "no plugin 'warp'" in result.stderr.str() + result.stdout.str()
