"""The assembled command line: help, errors, exit status, and what it imports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from qiao import errors
from qiao.cli import main as cli


def python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env={**os.environ, **env}
    )


def test_help_lists_every_command_and_imports_nothing_heavy() -> None:
    code = """
import sys
from qiao.cli.main import main
try:
    main(["--help"])
except SystemExit as stop:
    assert not stop.code
heavy = {"torch", "transformers", "numpy", "fastapi", "httpx", "qiao_reference"} & set(sys.modules)
print("HEAVY", sorted(heavy))
"""
    result = python(code, COLUMNS="120")
    assert result.returncode == 0, result.stderr
    assert "HEAVY []" in result.stdout
    for name in cli.COMMANDS:
        assert f" {name.replace('_', '-')} " in result.stdout


def test_module_runs_as_the_command_does() -> None:
    from importlib.metadata import version

    result = subprocess.run([sys.executable, "-m", "qiao", "--version"], capture_output=True, text=True, timeout=60)
    assert result.stdout == f"qiao {version('qiao')}\n"


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (errors.UsageError("mend it"), 2),
        (errors.ParameterError("--block-size", "must be positive"), 2),
        (errors.ModelError("config.json is missing"), 2),
        (errors.NotFoundError("nothing there"), 1),
        (errors.PlanRefusedError("attention would run on the host"), 1),
        (errors.EngineDeadError("it ended"), 1),
    ],
)
def test_an_error_is_one_message_and_a_status(
    error: errors.QiaoError, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise error

    def one_command() -> typer.Typer:
        app = typer.Typer(pretty_exceptions_enable=False)
        app.command()(fail)
        return app

    monkeypatch.setattr(cli, "build_app", one_command)
    monkeypatch.delenv("QIAO_DEBUG", raising=False)
    with pytest.raises(SystemExit) as stop:
        cli.main([])
    assert stop.value.code == status
    assert capsys.readouterr().err == f"qiao: {error}\n"
    monkeypatch.setenv("QIAO_DEBUG", "1")
    with pytest.raises(type(error)):
        cli.main([])


def test_an_unknown_flag_is_refused_with_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["chat", "--no-such-flag"])
    assert stop.value.code == 2
    assert "no-such-flag" in capsys.readouterr().err


def test_serve_hands_every_argument_on_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    import qiao.server.__main__ as server

    seen: list[list[str]] = []
    monkeypatch.setattr(server, "main", lambda argv: seen.append(list(argv)))
    argv = ["folder", "-q", "gptq", "-tp", "2", "--port=1", "--no-enable-prefix-caching", "--max_num_seqs", "4", "-h"]
    with pytest.raises(SystemExit):
        cli.main(["serve", *argv])
    with pytest.raises(SystemExit):
        cli.main(["serve", "--port", "1", "--help", "folder"])
    assert seen == [argv, ["--port", "1", "--help", "folder"]]


def test_serve_imports_no_other_command() -> None:
    """What a server does not use would stay in its memory for as long as it runs, and its start would wait for it."""
    code = """
import sys
from qiao.cli.main import main
try:
    main(["serve", "--help"])
except SystemExit as end:
    assert not end.code
print("loaded:", sorted(name for name in sys.modules if name.startswith("qiao.cli.")))
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--port" in ran.stdout
    assert ran.stdout.splitlines()[-1] == "loaded: ['qiao.cli.main']"


def test_engine_keys_says_what_it_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli.build_app()(args=["engine-keys", str(tmp_path / "keys"), "--json"], standalone_mode=False)
    written = [Path(name) for name in json.loads(capsys.readouterr().out)]
    assert sorted(written) == sorted((tmp_path / "keys").iterdir()) and len(written) == 4
    with pytest.raises(errors.ParameterError, match="there already"):
        cli.build_app()(args=["engine-keys", str(tmp_path / "keys")], standalone_mode=False)
