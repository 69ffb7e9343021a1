"""The parent that forks for checks: each child is alone, and how it ended is told."""

from __future__ import annotations

import os

import pytest

from tests.support.forks import LATE, Forks


def test_children_are_alone_and_their_end_is_told() -> None:
    with Forks("import json\nprint('not an answer')\nkept = []", {**os.environ, "WORD": "first"}) as forks:
        look = "import json, os, sys; print(os.environ['WORD'], sys.modules.get('csv')); import csv"
        assert [forks.run(look, {"WORD": w}).stdout for w in ("a", "b")] == ["a None\n", "b None\n"]
        assert forks.run(look, {}).stdout == "first None\n"
        failed = forks.run("print('so far'); assert 1 == 2", {})
        assert (failed.returncode, failed.stdout) == (1, "so far\n") and "AssertionError" in failed.stderr
        assert forks.run("raise SystemExit(7)", {}).returncode == 7
        assert forks.run("import os; os.kill(os.getpid(), 9)", {}).returncode == -9
        assert forks.run("while True: pass", {}, seconds=1).returncode == LATE


def test_what_cannot_be_preloaded_is_said() -> None:
    with Forks("import no_such_module", dict(os.environ)) as forks, pytest.raises(RuntimeError, match="no_such_module"):
        forks.run("pass", {})
