"""Wheels of every distribution: what is in them, and that they run in an environment without the source tree."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
from qiao.contract import CATALOG, GROUP

from tests.support.checkpoints import rand_checkpoint
from tests.support.source import ROOT
from tests.support.wheels import DISTRIBUTIONS, VENDORS, Environment, Wheel, build_wheel

PACKAGES = {
    "qiao": ("core/src/qiao", "plugins/reference/src/qiao_reference"),
    "qiao-conformance": ("plugins/conformance/src/qiao_conformance",),
    "qiao-cpu": ("plugins/cpu/src/qiao_cpu",),
    "qiao-triton": ("plugins/triton/src/qiao_triton",),
    **{name: (f"{name.replace('qiao', 'plugins')}/src/{name.replace('-', '_')}",) for name in VENDORS},
}


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Wheel]:
    target = tmp_path_factory.mktemp("wheels")
    return {name: build_wheel(folder, target) for name, folder in DISTRIBUTIONS.items()}


@pytest.fixture(scope="module")
def installed(wheels: dict[str, Wheel], tmp_path_factory: pytest.TempPathFactory) -> Environment:
    environment = Environment(tmp_path_factory.mktemp("empty") / "env")
    environment.install(list(wheels.values()))
    return environment


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_a_wheel_holds_exactly_its_package(name: str, wheels: dict[str, Wheel]) -> None:
    """Every file of the package, data files included, and nothing from elsewhere in the repository."""
    expected = {
        path.relative_to((ROOT / folder).parent).as_posix()
        for folder in PACKAGES[name]
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".so"
    }
    if name == "qiao-cpu":
        expected.add("qiao_cpu/libqiao_cpu.so")
    packed = {n for n in wheels[name].names() if ".dist-info/" not in n}
    assert packed == expected


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_metadata(name: str, wheels: dict[str, Wheel]) -> None:
    metadata = wheels[name].metadata()
    assert metadata["Name"] == [name]
    assert metadata["License-Expression"] == ["Apache-2.0"]
    assert metadata["Requires-Python"] == ["<3.13,>=3.10"]
    torch = [r for r in metadata.get("Requires-Dist", []) if re.match(r"torch\b", r)]
    assert all("==" not in r and "<" not in r for r in torch), "torch is a peer: a lower bound only"
    if name != "qiao":
        assert any(re.match(r"qiao\b(?!-)", r) for r in metadata["Requires-Dist"])


def test_entry_points(wheels: dict[str, Wheel]) -> None:
    assert f"[{GROUP}]\nreference = qiao_reference" in wheels["qiao"].text("entry_points.txt")
    assert "qiao = qiao.cli.main:main" in wheels["qiao"].text("entry_points.txt")
    assert f"[{GROUP}]\nsim = " in wheels["qiao-conformance"].text("entry_points.txt")


@pytest.mark.skipif("qiao-cpu" not in DISTRIBUTIONS, reason="no C++ compiler or no scikit-build-core")
def test_native_kernels(wheels: dict[str, Wheel], installed: Environment) -> None:
    """The wheel is for this platform and any Python, and the installed plugin is what serves the CPU."""
    assert re.search(r"-py3-none-(linux|macosx)_\w+\.whl$", wheels["qiao-cpu"].path.name)
    assert f"[{GROUP}]\ncpu = qiao_cpu" in wheels["qiao-cpu"].text("entry_points.txt")
    config = str(ROOT / "examples" / "configs" / "llama-3-8b.json")
    plan = json.loads(installed.run("qiao", "plan", "--model", config, "--device", "cpu", "--json").stdout)
    assert plan["plugin"] == "cpu"


@pytest.mark.parametrize("name", VENDORS)
def test_a_vendor_package_claims_nothing_that_it_does_not_have(name: str, wheels: dict[str, Wheel]) -> None:
    coverage = json.loads(wheels[name].text("/coverage.json"))
    implements = bool(coverage["hooks"])
    assert set(coverage["hooks"]) <= set(CATALOG) and bool(coverage["chips"]) <= implements
    assert bool(wheels[name].text("entry_points.txt")) == implements
    readme = (DISTRIBUTIONS[name] / "README.md").read_text(encoding="utf-8")
    assert ("implements nothing yet" in readme) != implements


def test_nothing_comes_from_the_source_tree(installed: Environment) -> None:
    code = (
        "import qiao, qiao_reference, qiao_conformance as c; print(qiao.__file__, qiao_reference.__file__, c.__file__)"
    )
    places = installed.run("python", "-c", code).stdout.split()
    assert len(places) == 3
    assert all(Path(place).is_relative_to(installed.folder) for place in places)


def test_the_command_runs(installed: Environment, wheels: dict[str, Wheel]) -> None:
    version = wheels["qiao"].metadata()["Version"][0]
    assert installed.run("qiao", "--version").stdout == f"qiao {version}\n"
    assert "serve" in installed.run("qiao", "--help").stdout


def test_plugins_are_found(installed: Environment) -> None:
    listed = json.loads(installed.run("qiao", "plugins", "--json").stdout)
    text = json.dumps(listed)
    assert '"reference"' in text and '"sim"' in text
    assert '"cuda"' in text and '"dcu"' in text, "they load without Triton and find no device here"


def test_a_model_is_priced_from_its_config(installed: Environment) -> None:
    config = ROOT / "examples" / "configs" / "llama-3-8b.json"
    plan = json.loads(
        installed.run("qiao", "plan", "--model", str(config), "--device", "sim", "--drop", "attention", "--json").stdout
    )
    assert "attention" in json.dumps(plan)


def test_an_installed_qiao_generates(installed: Environment, tmp_path: Path) -> None:
    model = rand_checkpoint(tmp_path / "rand")
    argv = ("qiao", "run", str(model), "hello", "--raw", "--max-tokens", "4", "--device", "cpu")
    first = installed.run(*argv)
    assert first.stdout.strip()
    assert installed.run(*argv).stdout == first.stdout


def test_python_dash_m_works(installed: Environment) -> None:
    assert installed.run("python", "-m", "qiao", "--version").stdout.startswith("qiao ")


def test_an_error_from_the_installed_command_has_no_traceback(installed: Environment) -> None:
    result: subprocess.CompletedProcess[str] = installed.run("qiao", "run", "./no-such-model", "hi", check=False)
    assert result.returncode == 2
    assert "no-such-model" in result.stderr and "Traceback" not in result.stderr
