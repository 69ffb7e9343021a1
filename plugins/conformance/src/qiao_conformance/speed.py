"""Measures each hook that the plugin has: ``--qiao-performance`` collects this file beside the kit."""

from __future__ import annotations

from dataclasses import asdict

import pytest
from qiao.contract import CATALOG

from qiao_conformance import drawn, performance
from qiao_conformance.kit import target, target_of
from qiao_conformance.target import Target

__all__ = ["target"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One measurement for each case; the arguments are made when it runs."""
    found = target_of(metafunc.config)
    hooks = [h for h in CATALOG if h in found.hooks and drawn.recipes(h, found.capabilities) is not None]
    metafunc.parametrize("hook", hooks)


def test_performance(target: Target, hook: str, request: pytest.FixtureRequest) -> None:
    """Cannot fail by being slow: the numbers are noted with the result."""
    for case in performance.cases(hook, target.capabilities):
        measured = performance.measure(target, case)
        request.node.user_properties.append(("qiao_measured", asdict(measured)))
