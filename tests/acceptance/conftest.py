"""Long runs against the demo model: left out unless asked for with ``-m acceptance``."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what is marked ``acceptance`` unless the mark expression names it."""
    if "acceptance" in (config.getoption("markexpr") or ""):
        return
    for item in items:
        if item.get_closest_marker("acceptance"):
            item.add_marker(pytest.mark.skip(reason="long; run with -m acceptance"))


def pytest_configure(config: pytest.Config) -> None:
    """Register the mark."""
    config.addinivalue_line("markers", "acceptance: long runs against the demo model")
