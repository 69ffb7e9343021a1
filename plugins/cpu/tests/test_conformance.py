"""Every hook against float64 within the catalog's tolerances, by the conformance kit, for each instruction set."""

from __future__ import annotations

import os

import pytest
import qiao_cpu
from qiao.contract import CATALOG
from qiao.contract.cases import cases
from qiao_conformance import kit
from qiao_conformance.target import Target
from qiao_cpu.matmul import ROUND_VARIABLE

HOOKS = {name: getattr(qiao_cpu, name) for name in CATALOG if hasattr(qiao_cpu, name)}


@pytest.fixture(params=["1", "0"], ids=["rounded", "exact"])
def target(isa, request, monkeypatch):
    monkeypatch.setenv(ROUND_VARIABLE, request.param)
    return Target("cpu", HOOKS, qiao_cpu.probe_devices()[0], qiao_cpu.capabilities(isa))


def test_only_rounding_needs_looser_tolerances(target):
    assert bool(target.capabilities.tolerances) == (os.environ[ROUND_VARIABLE] == "1")


@pytest.mark.parametrize("hook", HOOKS)
def test_hook(target, hook):
    kit.test_names_and_types(target, hook)
    for case in cases(hook, target.capabilities):
        kit.test_case(target, case)


def test_capture(target):
    for dtype in target.capabilities.dtypes:
        try:
            kit.test_replays_follow_their_buffers(target, dtype)
        except pytest.skip.Exception as refused:
            pytest.fail(str(refused))
    kit.test_capture_refuses_what_it_cannot_follow(target)


def test_what_every_plugin_needs(target):
    kit.test_required_device_hooks(target)
    assert target.device.score > 1 and target.device.torch_device == "cpu"
    assert target.device.chip in target.device.evidence
