"""``conformance.toml`` beside a plugin: read as written, mistakes named, and run with its own environment."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tools.conformance import main, prepared, read, run, targets

WRITTEN = """
[[target]]
plugin = "acme"
level = "stand-in"
coverage = "src/coverage.json"
name = "X2"
environment = {{ ACME_CHIP = "X2", ACME_HOME = "{{folder}}/home" }}
path = ["stand_in"]
python = "{python}"
prepare = {prepare}
arguments = ["--examples", "3"]
"""


def written(folder: Path, prepare: tuple[str, ...] = ()) -> Path:
    file = folder / "conformance.toml"
    file.write_text(WRITTEN.format(python=sys.executable, prepare=json.dumps(list(prepare))))
    return file


def test_it_is_run_as_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "stand_in/qiao_conformance").mkdir(parents=True)
    said = "import json, os, sys\njson.dump([sys.argv[1:], dict(os.environ)], open(os.environ['ACME_HOME'], 'w'))\n"
    (tmp_path / "stand_in/qiao_conformance/__init__.py").touch()
    (tmp_path / "stand_in/qiao_conformance/__main__.py").write_text(said)
    monkeypatch.setenv("PYTHONPATH", "other")
    (target,) = read(written(tmp_path))
    assert target.title == "acme X2" and not target.missing
    assert run(target, ["--json"])
    arguments, environment = json.loads((tmp_path / "home").read_text())
    assert arguments[:3] == ["acme", "--level", "stand-in"] and arguments[-3:] == ["--examples", "3", "--json"]
    assert arguments[arguments.index("--coverage") + 1] == str(tmp_path / "src/coverage.json")
    assert environment["ACME_CHIP"] == "X2"
    assert environment["PYTHONPATH"].split(os.pathsep) == [str(tmp_path / "stand_in"), "other"]


def test_a_preparation_runs_once_and_its_failure_is_said(tmp_path: Path) -> None:
    code = "import pathlib; p = pathlib.Path('runs'); p.touch(); p.write_text(p.read_text() + 'x'); print('no network')"
    for end, why in ((";", ""), ("; raise SystemExit(1)", "no network")):
        (target,) = read(written(tmp_path, ("{python}", "-c", code + end)))
        (tmp_path / "runs").unlink(missing_ok=True)
        done: dict[tuple[str, ...], str] = {}
        assert [prepared(target, done), prepared(target, done)] == [why, why]
        assert (tmp_path / "runs").read_text() == "x"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[[target]]\nplugin = "a"\nlevel = "device"\n', "needs coverage"),
        ('[[target]]\nplugin = "a"\nlevel = "device"\ncoverage = "c"\nchip = "b"\n', "unknown chip; known are"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "conformance.toml").write_text(text)
    with pytest.raises(ValueError, match=said):
        read(tmp_path / "conformance.toml")


def test_this_repositorys_plugins_have_targets() -> None:
    found = targets()
    assert {"reference", "sim", "cpu", "cambricon"} <= {target.plugin for target in found}
    assert len({target.title for target in found}) == len(found)


def test_one_that_is_asked_for_and_not_there_fails(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr("tools.conformance.metadata.entry_points", lambda group: [])
    monkeypatch.setattr(sys, "argv", ["conformance", "--only", "reference"])
    assert main() == 1
    assert "left out: it is not installed" in capsys.readouterr().out
