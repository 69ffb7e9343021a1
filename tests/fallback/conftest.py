"""Collects one line for each placement that was tried and prints the whole table at the end of the run."""

from __future__ import annotations

import pytest

ROWS: pytest.StashKey[list[tuple[str, ...]]] = pytest.StashKey()
HEAD = ("left out", "on the host", "steps", "copies priced", "counted", "bytes priced", "counted", "tokens")


def pytest_configure(config):
    config.stash[ROWS] = []


@pytest.fixture
def table_row(request):
    """Call with the cells of one line of the table."""

    def add(*cells):
        request.config.stash[ROWS].append(tuple(str(cell) for cell in cells))

    return add


def pytest_terminal_summary(terminalreporter, config):
    rows = config.stash[ROWS]
    if not rows:
        return
    lines = [HEAD, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEAD))]
    terminalreporter.section("fallback on the simulated device, float32 Llama, against transformers on the CPU")
    for line in lines:
        terminalreporter.write_line("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)))
