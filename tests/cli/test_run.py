"""``qiao run`` on a model whose text is certain."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from qiao.cli.main import build_app, main

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


def test_every_engine_flag_of_serve_is_there_or_left_out_by_name() -> None:
    from qiao.cli.run import SERVING
    from qiao.config import EngineArgs
    from qiao.server.flags import flags

    command = typer.main.get_group(build_app()).commands["run"]
    offered = {option for p in command.params for option in p.opts}
    names = set(EngineArgs.names())
    assert set(SERVING) <= names
    assert {name for name in names if flags()[name].option in offered} == names - set(SERVING) | {"seed"}


def test_engine_flags_reach_the_engine(chain: Path, capfd: pytest.CaptureFixture[str]) -> None:
    argv = ("--kv-cache-dtype", "int8", "--max-model-len", "0.5k", "--enforce-eager", "--drop", "rms_norm,silu_mul")
    assert run(str(chain), "x", "--raw", "--device", "reference", *argv) == 0
    assert capfd.readouterr().out == "DEF\n"
    assert run(str(chain), "x", "--kv-cache-dtype", "int7") == 2
    assert "kv_cache_dtype" in capfd.readouterr().err


def test_json(chain: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(str(chain), "x", "--raw", "--device", "cpu", "--json", "--stop", "F") == 0
    answer = json.loads(capfd.readouterr().out)
    assert (answer["text"], answer["finish_reason"], answer["prompt_tokens"]) == ("DE", "stop", 1)
    assert answer["tokens"] == 3 and 0 < answer["ttft"] <= answer["seconds"]
