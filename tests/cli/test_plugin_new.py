"""``qiao plugin new``: what it makes installs, passes the kit as it is, and when broken is told so clearly."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from qiao.cli import plugin
from qiao.errors import ParameterError

from tests.support.source import ROOT
from tests.support.wheels import build_wheel


def run(*arguments: str, site: Path | None = None, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    path = [str(site)] if site else []
    env = {k: v for k, v in os.environ.items() if not k.startswith("QIAO_")}
    env["PYTHONPATH"] = os.pathsep.join([*path, *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=180, check=False, env=env, cwd=cwd)


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "qiao-acme"
    done = run("qiao", "plugin", "new", "acme", "--to", str(folder), "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert {folder / file for file in told["files"]} == {p for p in folder.rglob("*") if p.is_file()}
    assert "pyproject.toml" in told["files"] and ".github/workflows/ci.yml" in told["files"]
    return folder


@pytest.fixture(scope="module")
def site(rendered: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The rendered package, built and unpacked as pip would install it."""
    wheels, site = tmp_path_factory.mktemp("wheels"), tmp_path_factory.mktemp("site")
    zipfile.ZipFile(build_wheel(rendered, wheels).path).extractall(site)
    return site


def test_the_rendered_package_passes_the_kit_unchanged(site: Path) -> None:
    done = run("qiao", "conformance", "acme", "--level", "stand-in", "--json", site=site)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    assert told["ok"] and told["device"]["torch_device"] == "sim:0"
    (chip,) = told["coverage"]["chips"].values()
    assert chip["operators"]["rms_norm"] == {
        "level": "stand-in",
        "dtypes": ["bfloat16", "float16", "float32"],
        "checks": chip["operators"]["rms_norm"]["checks"],
        "failed": 0,
    }
    assert chip["operators"]["rms_norm"]["checks"] > 10


def test_the_guide_leads_to_a_full_plugin(rendered: Path, tmp_path: Path) -> None:
    """The files that the guide shows, put where it says, pass the kit with every operator of a dense model."""
    folder = tmp_path / "src"
    shutil.copytree(rendered / "src", folder)
    page = (ROOT / "docs/plugin-guide/operators.md").read_text(encoding="utf-8")
    files = re.findall(r"^```python\n# src/(qiao_acme/\w+\.py)\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert len(files) == 4
    for name, code in files:
        (folder / name).write_text(code)
    edited("qiao_acme/device.py", 'kv_layouts=("NHD",)', 'kv_layouts=("NHD",), schemes=("dense", "w4a16")')(folder)
    edited("qiao_acme/device.py", '("float32", "bfloat16", "float16")', '("float32",)')(folder)  # for a shorter run
    info = folder / "qiao_acme-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: qiao-acme\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[qiao.v1]\nacme = qiao_acme\n")
    done = run("qiao", "conformance", "acme", "--level", "stand-in", "--examples", "5", "--json", site=folder)
    told = json.loads(done.stdout)
    assert done.returncode == 0, json.dumps(told["failures"][:3], indent=1)
    (chip,) = told["coverage"]["chips"].values()
    missing = {"attention", "write_kv", "copy_blocks", "allocate_kv", "matmul", "pack_weight", "sample", "rms_norm"}
    missing -= {name for name, entry in chip["operators"].items() if entry["level"] == "stand-in"}
    assert not missing


def test_its_own_tests_pass_and_it_is_listed(rendered: Path, site: Path) -> None:
    done = run("pytest", "-q", "-p", "no:cacheprovider", site=site, cwd=rendered)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout
    listed = json.loads(run("qiao", "plugins", "--json", site=site).stdout)["plugins"]
    (mine,) = [entry for entry in listed if entry["name"] == "acme"]
    assert mine["status"] == "ready" and "rms_norm" in mine["hooks"]
    assert mine["devices"][0]["score"] == 0, "a simulated device is never taken unasked"


def test_it_keeps_the_projects_style(rendered: Path) -> None:
    rules = "E,F,I,N,UP,B,C4,SIM,RUF,D1"
    options = ("--isolated", "--line-length", "120")
    checked = run("ruff", "check", *options, "--select", rules, "--ignore", "D105,D107", str(rendered / "src"))
    assert checked.returncode == 0, checked.stdout
    assert run("ruff", "format", *options, "--check", str(rendered)).returncode == 0


def edited(file: str, old: str, new: str) -> Callable[[Path], None]:
    def edit(site: Path) -> None:
        (path,) = site.glob(file)
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))

    return edit


def misspelt_hook(site: Path) -> None:
    edited("qiao_acme/fused.py", "def rms_norm", "def rms_nrom")(site)
    edited("qiao_acme/__init__.py", "rms_norm", "rms_nrom")(site)


BROKEN = {
    "unknown hook": (misspelt_hook, "unknown hook 'rms_nrom'. Did you mean 'rms_norm'?"),
    "wrong argument": (
        edited("qiao_acme/fused.py", "weight", "weigth"),
        "rms_norm: unknown argument 'weigth', the contract has: x, weight, eps. Did you mean 'weight'?",
    ),
    "wrong major version": (
        edited("qiao_acme-*/entry_points.txt", "qiao.v1", "qiao.v2"),
        "implements contract qiao.v2, this core 0.1.0 speaks qiao.v1: install a version of qiao-acme made for qiao.v1",
    ),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_one_gets_a_clear_message(site: Path, tmp_path: Path, fault: str) -> None:
    breakage, said = BROKEN[fault]
    mine = tmp_path / "site"
    shutil.copytree(site, mine)
    breakage(mine)
    done = run("qiao_conformance", "acme", site=mine)
    assert done.returncode == 2
    assert said in re.sub(r"\s+", " ", done.stderr)
    assert "Traceback" not in done.stderr


def test_another_name_goes_everywhere(tmp_path: Path) -> None:
    plugin.render("big_chip", tmp_path)
    texts = {p.relative_to(tmp_path).as_posix(): p.read_text() for p in tmp_path.rglob("*") if p.is_file()}
    assert not [name for name, text in texts.items() if "acme" in (name + text).lower()]
    project = texts["pyproject.toml"]
    assert 'name = "qiao-big-chip"' in project and 'big_chip = "qiao_big_chip"' in project
    assert "from qiao_big_chip import _sdk" in texts["src/qiao_big_chip/device.py"]
    assert "BIG_CHIP accelerators" in texts["README.md"]


@pytest.mark.parametrize(
    "name", ["Acme", "a-b", "1a", "", "a__b", "x" * 33, "cpu", "auto", "reference", "../etc", "conformance", "triton"]
)
def test_names_that_cannot_be(name: str) -> None:
    with pytest.raises(ParameterError, match="name"):
        plugin.check_name(name)


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    done = run("qiao", "plugin", "new", "acme", "--to", str(tmp_path))
    assert done.returncode == 2 and "is not an empty folder" in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]
