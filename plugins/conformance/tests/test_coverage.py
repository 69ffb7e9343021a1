"""The coverage file, when it is out of date, the archive for an issue, and the command."""

from __future__ import annotations

import getpass
import inspect
import json
import os
import socket
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from qiao.cli import conformance as command
from qiao.contract import CATALOG
from qiao.errors import PluginError
from qiao_conformance import coverage, kit, report, results
from qiao_conformance.coverage import Tally
from qiao_conformance.target import find

pytest_plugins = ("pytester",)


@pytest.fixture
def target():
    return find("reference")


def document(target, **tallies):
    return coverage.merged(None, target, coverage.chip_entry(target, tallies, "stand-in", "2026-01-31"))


def tally(*checks):
    made = Tally()
    for name, dtype, passed, called in checks:
        made.add(name, dtype, passed, called)
    return made


def test_every_check_without_a_case_says_which_hooks_it_calls():
    """Else what it found counts for no operator."""
    named = {"hook", "case", "pair", "drawn_hook"}
    checks = {name: f for name, f in vars(kit).items() if name.startswith("test_")}
    plain = {name for name, f in checks.items() if not named & set(inspect.signature(f).parameters)}
    assert plain - {"test_plan_and_reality_agree"} == set(results._CALLED_BY), "that one is about all of them"


def test_only_what_was_called_and_passed_has_a_level(target):
    made = document(
        target,
        matmul=tally(("a", "float32", True, True), ("b", "float16", True, True)),
        sample=tally(("a", "float32", True, True), ("b", "float32", False, True)),
        capture=tally(("names", "", True, False)),
    )
    (chip,) = made["chips"].values()
    found = {name: (entry["level"], entry["dtypes"]) for name, entry in chip["operators"].items()}
    assert found == {
        "matmul": ("stand-in", ["float16", "float32"]),
        "sample": ("none", []),
        "capture": ("none", []),
    }
    assert chip["limits"]["kv_dtypes"] and chip["sdk"]["torch"] and chip["date"] == "2026-01-31"
    table = coverage.table(made)
    assert "| `matmul` | stand-in: float16, float32 |" in table
    assert "| `sample` | none (1 of 2 checks failed) |" in table and "| `attention` | none |" in table


def test_a_file_is_stale_when_kit_catalog_or_hooks_change_and_not_by_its_date(target):
    made, hooks = document(target, matmul=Tally()), list(target.hooks)
    assert coverage.stale(made, hooks) == [] == coverage.stale(json.loads(json.dumps(made)), hooks)
    changes = {
        "schema": {**made, "schema": 1},
        "contract": {**made, "contract": "0.9"},
        "kit": {**made, "kit": {**made["kit"], "version": "0.0.1"}},
        "catalog": {**made, "kit": {**made["kit"], "catalog": "0"}},
    }
    for name, changed in changes.items():
        assert coverage.stale(changed, hooks), name
    assert "capture" in coverage.stale(made, [h for h in hooks if h != "capture"])[0]


def test_chips_share_a_file_until_it_is_stale(target, tmp_path):
    from dataclasses import replace

    file = tmp_path / "coverage.json"
    entry = coverage.chip_entry(target, {"matmul": Tally(1, 1, {"float32": True})}, "device", "2026-01-31")
    coverage.write(file, target, entry)
    other = replace(target, device=replace(target.device, chip="second"))
    assert set(coverage.write(file, other, entry)["chips"]) == {target.device.chip, "second"}
    old = {**json.loads(file.read_text()), "contract": "0.9"}
    file.write_text(json.dumps(old))
    assert set(coverage.write(file, target, entry)["chips"]) == {target.device.chip}


def test_the_fingerprint_follows_tolerances(monkeypatch):
    before = coverage.fingerprint()
    changed = dict(CATALOG)
    del changed["gelu_mul"]
    monkeypatch.setattr(coverage, "CATALOG", changed)
    assert coverage.fingerprint() != before


def test_the_archive_holds_nothing_private(tmp_path, monkeypatch):
    monkeypatch.setenv("QIAO_TEST_TOKEN", "hf_secret0123456789")
    monkeypatch.setenv("VIRTUAL_ENV", "/opt/secretproject/venv")
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu-box-7")
    monkeypatch.setattr(getpass, "getuser", lambda: "alice")
    home, user, name = str(Path.home()), "alice", "gpu-box-7"
    message = f"open {home}/models/secret.bin by {user} at {name}: /opt/secretproject/venv/lib/x.py in {os.getcwd()}/a"
    file = tmp_path / "report.zip"
    report.pack(file, {"failures": [{"message": message}], "evidence": "/dev/acme0, driver 1.2"}, None)
    with zipfile.ZipFile(file) as archive:
        assert set(archive.namelist()) == {"README.txt", "report.json", "versions.json"}
        everything = "\n".join(archive.read(n).decode() for n in archive.namelist())
        told = json.loads(archive.read("report.json"))
    for secret in ("hf_secret", "secretproject", f"{home}/models", os.getcwd()):
        assert secret not in everything
    words = told["failures"][0]["message"].split()
    assert user not in words and name + ":" not in words and "secret.bin" in told["failures"][0]["message"]
    assert "driver 1.2" in told["evidence"]


def test_a_hook_that_was_there_in_another_way_has_its_own_level():
    assert coverage.read_levels("device") == ("device", {})
    assert coverage.read_levels("interpreted,capture=stand-in") == ("interpreted", {"capture": "stand-in"})
    wrong = (("interpreted,capture", "'' is none of"), ("none", "'none' is"), ("device,x=device", "no hook x"))
    for text, said in wrong:
        with pytest.raises(ValueError, match=said):
            coverage.read_levels(text)
    tallies = {name: coverage.Tally(2, 2) for name in ("sample", "capture")}
    entry = coverage.chip_entry(find("reference"), tallies, "interpreted,capture=stand-in", "2026-01-31")
    levels = {name: operator["level"] for name, operator in entry["operators"].items()}
    assert levels == {"sample": "interpreted", "capture": "stand-in"} and entry["level"] == "interpreted"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "qiao", "conformance", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_command_runs_the_kit_and_packs(tmp_path):
    files = tmp_path / "coverage.json", tmp_path / "report.zip"
    options = ("--select", "silu_mul", "--performance", "--json", f"--coverage={files[0]}", f"--report={files[1]}")
    done = run("reference", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    assert told["ok"] and told["partial"] and told["failed"] == 0 and told["passed"] >= 10
    assert told["device"]["chip"] and told["level"] == "device"
    (measured,) = told["performance"]
    assert measured["hook"] == "silu_mul" and measured["microseconds"] > 0
    assert measured["bytes"] == 16 * 14_336 * 3 * 2
    assert not files[0].exists(), "a part of the checks is no coverage"
    assert "coverage.json" not in zipfile.ZipFile(files[1]).namelist()


def test_command_says_what_is_wrong():
    done = run("warp")
    assert done.returncode == 2 and "no plugin 'warp'" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_process_that_is_brought_down_names_the_check(monkeypatch):
    body = (
        "import sys, os, signal, pathlib\n"
        "pathlib.Path(sys.argv[-1].partition('=')[2]).write_text('test_case[x]')\n"
        "os.kill(os.getpid(), signal.SIGSEGV)"
    )
    real = subprocess.run
    monkeypatch.setattr(command.subprocess, "run", lambda argv, **o: real([sys.executable, "-c", body, argv[-1]], **o))
    with pytest.raises(PluginError, match=r"SIGSEGV ended the kit during test_case\[x\]"):
        command.run([])


def test_options_of_both_front_ends_are_the_same():
    import inspect

    from qiao_conformance.__main__ import parser

    mine = {a.dest for a in parser()._actions} - {"help", "trace"}
    theirs = set(inspect.signature(command.conformance).parameters)
    assert mine == {"json" if name == "as_json" else name for name in theirs}


def test_an_unknown_level_is_a_usage_error(pytester):
    result = pytester.runpytest_subprocess("--qiao-device", "reference", "--qiao-level", "perfect")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "'perfect' is none of device" in result.stderr.str() + result.stdout.str()
