"""Other people's clients against this server: one server over the scripted engine, two over a real one.

What needs packages that ``make test`` does not install skips where they are missing; what is long is marked ``compat``
and runs with ``make compat``, which installs them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import rand_checkpoint
from tests.support.server import RunningServer, scripted, server

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln", "days": 2}}\n</tool_call>'
TEXTS = {
    "text": "It is fine.",
    "call": CALL,
    "two": f"{CALL}\n{CALL}",
    "thought": "<think>\nhm\n</think>\n\nYes.",
    "json": '{"city": "Köln", "days": 2}',
}
KEY, ADMIN_KEY = "sk-compat", "admin-compat"
PARSERS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what is marked ``compat`` unless the mark expression names it."""
    if "compat" in (config.getoption("markexpr") or ""):
        return
    for item in items:
        if item.get_closest_marker("compat"):
            item.add_marker(pytest.mark.skip(reason="long; run with make compat"))


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """RAND's checkpoint."""
    return rand_checkpoint(tmp_path_factory.mktemp("compat") / "rand")


@pytest.fixture(scope="session")
def served(folder: Path) -> Iterator[RunningServer]:
    """Answers are ``TEXTS``, chosen by ``cache_salt``."""
    with scripted(*PARSERS, model=folder, texts=TEXTS) as running:
        yield running


@pytest.fixture(scope="session")
def real(folder: Path) -> Iterator[RunningServer]:
    """RAND itself, in float32."""
    flags = ("--dtype", "float32", "--num-gpu-blocks-override", "64", "--max-num-seqs", "8", "--threads", "1")
    with server(folder, *flags, *PARSERS) as running:
        yield running


@pytest.fixture(scope="session")
def keyed(folder: Path) -> Iterator[RunningServer]:
    """RAND with keys, and so little to say that thousands of requests are soon answered."""
    flags = ("--dtype", "float32", "--num-gpu-blocks-override", "64", "--max-num-seqs", "8", "--threads", "1")
    flags += ("--override-generation-config", '{"max_new_tokens": 4}', "--max-model-len", "128")
    with server(folder, *flags, *PARSERS, "--api-key", KEY, "--admin-key", ADMIN_KEY) as running:
        yield running


def salted(name: str, **more: Any) -> dict[str, Any]:
    """The fields that choose the answer ``name``."""
    return {"cache_salt": name, **more}
