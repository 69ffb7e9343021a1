"""``qiao cache``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from qiao.cli.main import main
from qiao.loading.packed_cache import PackedCache


def run(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["cache", *words])
    assert ended.value.code in (0, None)
    return capsys.readouterr().out


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    assert PackedCache(tmp_path).write({"model": "demo.gguf"}, {"x": torch.zeros(1 << 19)}, [])
    return tmp_path


def test_list(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "--packed-cache", str(folder))
    assert "2 MiB in 1 files" in out
    assert "demo.gguf" in out


def test_json_and_clear(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = json.loads(run(capsys, "--packed-cache", str(folder), "--json"))
    assert [(one["model"], one["bytes"]) for one in data["files"]] == [
        ("demo.gguf", sum(f.stat().st_size for f in folder.iterdir()))
    ]
    data = json.loads(run(capsys, "--packed-cache", str(folder), "--json", "--clear"))
    assert data["freed_bytes"] == data["files"][0]["bytes"]
    assert list(folder.iterdir()) == []


def test_off(capsys: pytest.CaptureFixture[str]) -> None:
    assert "not kept" in run(capsys, "--packed-cache", "off")
