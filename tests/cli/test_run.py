"""``qiao run`` on a model whose text is certain."""

from __future__ import annotations

from pathlib import Path

import pytest
from qiao.cli.main import main

from tests.support.checkpoints import chain_checkpoint


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """After ``x`` and after a newline comes ``DEF``, then the end."""
    return chain_checkpoint(tmp_path_factory.mktemp("chain") / "model", "x>DEF")


def run(*argv: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(["run", *argv])
    return int(stop.value.code or 0)


@pytest.mark.parametrize("how", [("x", "--raw"), ("hello",)], ids=["raw", "chat"])
def test_the_answer_is_printed(how: tuple[str, ...], chain: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(str(chain), *how, "--device", "cpu") == 0
    assert capfd.readouterr().out == "DEF\n"


def test_max_tokens_is_kept(chain: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(str(chain), "x", "--raw", "--max-tokens", "2", "--device", "cpu") == 0
    assert capfd.readouterr().out == "DE\n"


def test_a_refused_plan_ends_with_status_1(chain: Path, capfd: pytest.CaptureFixture[str]) -> None:
    argv = (str(chain), "x", "--raw", "--device", "sim", "--drop", "attention", "--fallback")
    assert run(*argv, "allow") == 0
    assert capfd.readouterr().out == "DEF\n"
    assert run(*argv, "deny") == 1
    printed = capfd.readouterr()
    assert "attention" in printed.err and "Traceback" not in printed.err


def test_a_wrong_value_ends_with_status_2(chain: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(str(chain), "x", "--temperature", "9") == 2
    assert "temperature" in capfd.readouterr().err
