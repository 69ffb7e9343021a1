"""The OpenAI SDK's own tests for the routes that there are, through ``tools/acceptance/openai_sdk_suite.py``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.server import server

SUITE = Path(__file__).parents[2] / "tools" / "acceptance" / "openai_sdk_suite.py"


@pytest.mark.compat
@pytest.mark.timeout(1300)
def test_the_sdk_s_own_tests(folder: Path) -> None:
    named = subprocess.run(
        [sys.executable, SUITE, "--models"], capture_output=True, text=True, check=True
    ).stdout.split()
    flags = ("--dtype", "float32", "--num-gpu-blocks-override", "64", "--threads", "1", "--max-logprobs", "20")
    with server(folder, *flags, "--served-model-name", "smollm2", *named) as running:
        command = [sys.executable, str(SUITE), "--url", running.url + "/v1", "--json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)
    assert done.stdout, done.stderr[-3000:]
    result = json.loads(done.stdout)
    print({reason: len(names) for reason, names in result["not_applicable"].items()}, result["passed"])
    assert not result["failed"], result["failed"]
    assert not result["passes_unexpectedly"], "no longer true: NOT_APPLICABLE lists them"
    assert result["passed"] > 150
