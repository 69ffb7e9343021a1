"""``benchmarks/quantize.py`` uses nothing again that was made from other settings or another calibration file."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.source import ROOT


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("quantize")


def made(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def test_the_digest_is_of_settings_and_of_the_calibration_file(script: ModuleType, tmp_path: Path) -> None:
    data = tmp_path / "calibration.jsonl"
    found = set()
    for text in ("one", "two"):
        data.write_text(text)
        for name in script.RUNS:
            for samples in (8, 16):
                found.add((name, text, samples, script.settings_of(script.RUNS[name], data, samples)[1]))
    digests = {name: len({d for n, *_, d in found if n == name}) for name in script.RUNS}
    assert digests == {name: 1 if "rtn" in name else 4 for name in script.RUNS}
    assert len({d for *_, d in found}) == sum(digests.values()), "no two ways share one"
    data.write_text("one")
    assert script.settings_of(script.RUNS["awq"], data, 8)[1] in {d for *_, d in found}
    assert str(data) in map(str, script.settings_of(script.RUNS["awq"], data, 8)[0])


def test_a_folder_of_another_calibration_is_refused(script: ModuleType, tmp_path: Path) -> None:
    assert not script.is_made(tmp_path / "awq", "x")
    folder = made(tmp_path / "awq")
    with pytest.raises(SystemExit, match="awq was made from other settings"):  # from before there were digests
        script.is_made(folder, "x")
    script.note(folder, "x", peak_bytes=7)
    assert json.loads((tmp_path / "awq.json").read_text()) == {"peak_bytes": 7, "made_from": "x"}
    assert script.is_made(folder, "x")
    with pytest.raises(SystemExit, match=r"another calibration file \(x, not y\); remove it"):
        script.is_made(folder, "y")


def test_making_again_refuses_instead_of_using_the_old(script: ModuleType, tmp_path: Path) -> None:
    data, out = tmp_path / "calibration.jsonl", made(tmp_path / "awq")
    data.write_text("one")
    flags = script.RUNS["awq"]
    script.note(out, script.settings_of(flags, data, 8)[1])
    script.quantized(tmp_path, out, flags, data, 8)  # nothing to do
    data.write_text("two")
    with pytest.raises(SystemExit, match="another calibration file"):
        script.quantized(tmp_path, out, flags, data, 8)
