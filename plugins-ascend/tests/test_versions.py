"""Versions are read from the files that installers leave, and what does not go together is named."""

from __future__ import annotations

from pathlib import Path

import pytest
from qiao_ascend import _sdk
from qiao_ascend.versions import TABLE, Found, fitting_cann, installed, problems

ROOT = Path(__file__).parents[2]


def write(root: Path, name: str, text: str) -> None:
    file = root / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_versions_from_the_usual_places(tmp_path: Path) -> None:
    info = "package_name=Ascend-cann-toolkit\nversion=8.5.0\ninnerversion=V100R001C25\narch=x86_64\n"
    write(tmp_path, "ascend-toolkit/latest/x86_64-linux/ascend_toolkit_install.info", info)
    write(tmp_path, "nnal/atb/latest/version.info", "    Ascend-cann-atb : 8.5.0\nAscend-cann-atb : 8.5.0\n")
    write(tmp_path, "driver/version.info", "Version=25.2.0\nascendhal_version=7.35.23\n")
    found = installed({}, tmp_path)
    assert (found.cann, found.nnal, found.driver) == ("8.5.0", "8.5.0", "25.2.0")


def test_versions_where_the_environment_says(tmp_path: Path) -> None:
    write(tmp_path, "cann/compiler/version.info", "Version=7.7.0.1.238\nversion_dir=8.3.RC1\n")
    write(tmp_path, "atb/version.info", "Ascend-cann-atb : 8.3.RC1\n")
    environment = {"ASCEND_HOME_PATH": str(tmp_path / "cann"), "ATB_HOME_PATH": str(tmp_path / "atb/atb/cxx_abi_1")}
    found = installed(environment, tmp_path / "nothing")
    assert (found.cann, found.nnal, found.driver) == ("8.3.RC1", "8.3.RC1", "")
    running = "runtime_running_version=[7.6.0.1.220:8.2.RC1]\n"
    write(tmp_path, "other/version.cfg", running)
    assert installed({"ASCEND_TOOLKIT_HOME": str(tmp_path / "other")}, tmp_path).cann == "8.2.RC1"


def test_nothing_is_installed(tmp_path: Path) -> None:
    found = installed({}, tmp_path)
    assert (found.cann, found.nnal, found.driver) == ("", "", "")
    assert not problems(found)


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.cann)
def test_what_the_table_has_together_is_no_problem(row) -> None:
    for torch_npu in row.torch_npu:
        torch = ".".join(torch_npu.split(".")[:3])
        for driver in row.drivers or ("24.1.0",):
            assert not problems(Found(torch, torch_npu, row.cann, row.cann, f"{driver}.0"))


GOOD = {"torch": "2.9.0", "torch_npu": "2.9.0", "cann": "8.5.0", "nnal": "8.5.0", "driver": "25.2.0"}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"torch": "2.8.0"}, "torch 2.8.0 is wrong for torch-npu 2.9.0, which needs torch 2.9.0"),
        ({"torch": "2.9.1"}, "pip install torch==2.9.0"),
        ({"cann": "8.2.RC1", "nnal": "8.2.RC1"}, "works with CANN 9.1.0 or 9.0.0 or 8.5.0"),
        ({"cann": "8.2.RC1", "nnal": "8.2.RC1"}, "for this CANN there is torch-npu 2.6.0, 2.5.1.post1"),
        ({"torch": "2.6.0", "torch_npu": "2.6.0"}, "torch-npu 2.6.0, which works with CANN 8.2.RC1"),
        ({"nnal": "8.3.RC1"}, "NNAL 8.3.RC1 is wrong for CANN 8.5.0"),
        ({"driver": "24.1.0"}, "driver 24.1.0 is wrong for CANN 8.5.0, which runs on drivers 25.0, 25.2"),
        ({"cann": "9.1.0", "nnal": "9.1.0", "driver": "25.0.1"}, "runs on drivers 25.2"),
    ],
)
def test_one_wrong_version_is_named(changed, said) -> None:
    (problem,) = problems(Found(**{**GOOD, **changed}))
    assert said in problem


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"cann": "8.5.1", "nnal": "8.5.1"},
        {"cann": "9.0.0", "nnal": "9.0.0"},
        {"cann": "99.0.0", "nnal": "99.0.0"},
        {"torch": "2.13.0", "torch_npu": "2.13.0"},
        {"driver": "27.0.0"},
        {"nnal": "", "driver": "", "cann": ""},
    ],
)
def test_what_fits_or_is_not_known_is_let_through(changed) -> None:
    assert not problems(Found(**{**GOOD, **changed}))


def test_releases_that_are_declared_to_work_together() -> None:
    assert fitting_cann("2.9.0") == fitting_cann("2.12.0") == ("9.1.0", "9.0.0", "8.5.0")
    assert fitting_cann("2.13.0") == ()


@pytest.mark.parametrize(("name", "bad"), [("910B3", [("1", "Warning")]), ("910C", []), ("310P3", [])])
def test_health_by_recorded_outputs(name, bad) -> None:
    text = (ROOT / "tests" / "doctor" / "recordings" / f"npu-smi-{name}.txt").read_text()
    assert _sdk.unhealthy(text) == bad
    assert len(_sdk.unhealthy(text.replace("| OK   ", "| Alarm", 1))) == len(bad) + 1
    assert _sdk.unhealthy("") == []
