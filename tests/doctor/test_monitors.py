"""Chips and memory read from what vendors' monitoring commands print.

The recordings are written from the documented and published formats of each command; none was made on a device here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from qiao.cli import doctor
from qiao.observability import monitors
from qiao.observability.drivers import find_drivers, known_drivers

from tests.doctor.test_checks import changed

RECORDINGS = Path(__file__).parent / "recordings"
MONITORS = {e["monitor"]["command"][0]: e["monitor"] for e in known_drivers()["accelerators"] if "monitor" in e}

CHIPS = {
    # recording: (driver, [(label, name, part of the family, used MiB, total MiB)])
    "npu-smi-910B3": ("25.2.0", [("0", "910B3", "A2", 59356, 65536), ("1", "910B3", "A2", 3314, 65536)]),
    "npu-smi-910C": (
        "25.5.0",
        [
            ("0/0", "Ascend910", "A3", 3144, 65536),
            ("0/1", "Ascend910", "A3", 2892, 65536),
            ("1/0", "Ascend910", "A3", 3131, 65536),
            ("1/1", "Ascend910", "A3", 2905, 65536),
        ],
    ),
    "npu-smi-310P3": (
        "24.1.rc2",
        [("1/0", "310P3", "no bfloat16", 1703, 44280), ("1/1", "310P3", "no bfloat16", 1501, 43693)],
    ),
    "cnmon-MLU370": (
        "4.20.11",
        [("0", "MLU370-X4", "no bfloat16", 0, 23308), ("1", "MLU370-X4", "no bfloat16", 512, 23308)],
    ),
    "cnmon-MLU590": ("6.2.29", [("0", "MLU590-M9", "", 33654, 98304), ("1", "MLU590-M9", "", 0, 98304)]),
    "hy-smi-Z100L": ("5.16.29", [("0", "Z100L", "gfx906", 6, 32752), ("1", "Z100L", "gfx906", 2, 32752)]),
    "hy-smi-K100_AI": ("6.3.8", [("0", "K100_AI", "gfx928", 51920, 65520), ("1", "K100_AI", "gfx928", 2, 65520)]),
    "hy-smi-BW1000": ("6.3.13", [("0", "BW1000", "gfx936", 1021, 65520), ("1", "BW1000", "gfx936", 2, 65520)]),
    "hy-smi-BW1100": ("6.3.20", [("0", "BW1100", "fp8", 4, 147440), ("1", "BW1100", "fp8", 2, 147440)]),
    "nvidia-smi-T4": ("535.129.03", [("0", "Tesla T4", "", 3, 15360), ("1", "Tesla T4", "", 3, 15360)]),
    "nvidia-smi-A100": ("550.54.15", [("0", "NVIDIA A100-SXM4-80GB", "", 4, 81920)]),
    "nvidia-smi-A10": ("550.54.15", [("0", "NVIDIA A10", "", 0, 23028)]),
    "nvidia-smi-L40S": ("565.57.01", [("0", "NVIDIA L40S", "", 1, 46068)]),
    "nvidia-smi-H200": ("570.86.15", [("0", "NVIDIA H200", "", 4, 143771)]),
    "nvidia-smi-B200": ("570.133.20", [("0", "NVIDIA B200", "", 0, 183359)]),
    "nvidia-smi-GB10": ("580.95.05", [("0", "NVIDIA GB10", "", 0, 0)]),
}


def recorded(name: str) -> str:
    return (RECORDINGS / f"{name}.txt").read_text(encoding="utf-8")


def entry_of(name: str) -> dict[str, object]:
    return next(entry for command, entry in MONITORS.items() if name.startswith(command))


@pytest.mark.parametrize("name", CHIPS)
def test_each_chip_and_its_memory(name: str) -> None:
    driver, chips = CHIPS[name]
    reading = monitors.read(entry_of(name), lambda command, folders: (0, recorded(name)))
    found = [(c.label, c.name, c.used >> 20, c.total >> 20) for c in reading.chips]
    assert found == [(label, chip, used, total) for label, chip, _, used, total in chips]
    assert all(part in chip.family for chip, (_, _, part, _, _) in zip(reading.chips, chips, strict=True))
    assert (reading.driver, reading.problem) == (driver, "")


def test_every_recording_is_tested() -> None:
    assert {path.stem for path in RECORDINGS.glob("*.txt")} == {*CHIPS, "npu-smi-no-driver", "nvidia-smi-no-driver"}


def test_a_sick_chip_is_told_apart() -> None:
    chips = monitors.parse(MONITORS["npu-smi"], recorded("npu-smi-910B3"))
    assert [(c.health, c.healthy) for c in chips] == [("OK", True), ("Warning", False)]


@pytest.mark.parametrize("text", ["", "\n\n", "| 0 |", "0, ", "HCU[0] : vram Total Memory (MiB): x", "\x00\xff" * 50])
@pytest.mark.parametrize("command", MONITORS)
def test_anything_else_is_no_chip_and_no_error(command: str, text: str) -> None:
    assert monitors.read(MONITORS[command], lambda *_: (0, text)).chips == ()


@pytest.mark.parametrize("command", ["npu-smi", "nvidia-smi"])
def test_a_command_that_finds_nothing_says_why(command: str) -> None:
    text = recorded(f"{command}-no-driver")
    reading = monitors.read(MONITORS[command], lambda *_: (255, text))
    assert reading.chips == () and reading.problem == text.strip()


def test_no_command_is_no_reading(tmp_path: Path) -> None:
    assert monitors.read(MONITORS["cnmon"], lambda *_: None) == monitors.Reading()
    assert monitors.ask(["no-such-command-anywhere"], [str(tmp_path)]) is None


def test_a_command_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(tmp_path / "slow", "exec sleep 30\n")
    monkeypatch.setattr(monitors, "TIMEOUT", 0.2)
    assert monitors.ask(["slow"], [str(tmp_path)]) == (-1, "no answer within 0.2 s")


def test_chips_alone_show_that_a_device_is_here(tmp_path: Path) -> None:
    """A container may see neither device nodes of the usual names nor a version file."""

    def ask(command, folders):
        return (0, recorded("cnmon-MLU590")) if command[0] == "cnmon" else None

    (driver,) = find_drivers(tmp_path, {}, ask)
    assert driver.name == "cambricon" and driver.present and driver.versions == {"driver": "6.2.29"}


def script(path: Path, body: str) -> None:
    path.write_text(f"#!/bin/sh\n{body}")
    path.chmod(0o755)


def facts(name: str, status: int = 0) -> dict[str, object]:
    reading = monitors.read(entry_of(name), lambda *_: (status, recorded(name)))
    from dataclasses import asdict

    driver = {
        "name": "acme", "vendor": "ACME", "package": "qiao-acme", "present": True, "evidence": [],
        "versions": {"driver": "1.2"}, "distributions": {}, "torch": ["torch"], "monitor": asdict(reading),
    }  # fmt: skip
    return {"drivers": [driver], "packages": {"qiao-acme": "0.1"}}


@pytest.mark.parametrize("language", doctor.LANGUAGES)
def test_findings_about_chips(language: str) -> None:
    told = doctor.report(changed(facts("npu-smi-910B3")), language)
    assert [f["id"] for f in told["findings"]] == ["chip_unhealthy"]
    assert "910B3" in told["findings"][0]["text"] and "Warning" in told["findings"][0]["text"]
    text = doctor.render(told, language)
    assert "0: 910B3 (Atlas A2)" in text and "64.0 GiB" in text
    told = doctor.report(changed(facts("npu-smi-no-driver", 255)), language)
    assert [f["id"] for f in told["findings"]] == ["monitor_failed"] and "-8005" in told["findings"][0]["text"]
    cpu_torch = {"torch": {"version": "2.13.0+cpu", "threads": 8, "cpu_capability": "AVX2"}}
    told = doctor.report(changed({**facts("nvidia-smi-GB10"), **cpu_torch}), language)
    assert [f["id"] for f in told["findings"]] == ["driver_with_cpu_torch"]


REAL = {"npu-smi": "ascend", "cnmon": "cambricon", "hy-smi": "dcu", "nvidia-smi": "cuda"}


def machine_with(name: str, installed: dict[str, str], torch_packages: dict[str, str]) -> dict[str, object]:
    """Facts of a machine with the recorded chips, its driver, and what is ``installed``."""
    found = facts(name)
    real = next(device for command, device in REAL.items() if name.startswith(command))
    known = next(e for e in known_drivers()["accelerators"] if e["name"] == real)
    driver = {**found["drivers"][0], **{k: known[k] for k in ("name", "vendor", "package", "torch")}}
    nothing = {n: None for e in known_drivers()["accelerators"] for n in (e["package"], *e["torch"])}
    there = {"packages": {**nothing, **installed}, "torch_packages": {**nothing, **torch_packages}}
    return changed({"drivers": [driver], **there})


def missing(told: dict[str, object]) -> list[dict[str, str]]:
    return [f for f in told["findings"] if f["id"].startswith("driver_")]


@pytest.mark.parametrize("language", doctor.LANGUAGES)
@pytest.mark.parametrize("name", CHIPS)
def test_every_chip_its_memory_and_what_is_missing_in_both_languages(name: str, language: str) -> None:
    bare = machine_with(name, {}, {})
    (driver,) = bare["drivers"]
    package, needed = driver["package"], driver["torch"]
    text = doctor.render(doctor.report(bare, language), language)
    for label, chip, _, used, total in CHIPS[name][1]:
        (line,) = [x for x in text.splitlines() if x.strip().startswith(f"{label}: {chip}")]
        assert not total or (f"{total / 1024:.1f} GiB" in line and f"{used / 1024:.1f}" in line)
    (found,) = missing(doctor.report(bare, language))
    assert (found["id"], found["remedy"]) == ("driver_without_package", f"pip install {package}")
    assert driver["vendor"] in found["text"]
    assert any("\u4e00" <= c <= "\u9fff" for c in found["text"]) == (language == "zh")
    (found,) = missing(doctor.report(machine_with(name, {package: "0.1"}, {}), language))
    assert found["id"] == "driver_without_torch" and "docs/install" in found["remedy"]
    assert all(part in found["text"] for part in needed)
    whole = machine_with(name, {package: "0.1"}, dict.fromkeys(needed, "2.9"))
    assert missing(doctor.report(whole, language)) == []


@pytest.mark.parametrize(
    ("recording", "written", "families"),
    [
        ("npu-smi-910B3", "910B3", {"910B3": "Atlas A2", "910B4": "Atlas A2", "Ascend910_9391": "Atlas A3"}),
        ("npu-smi-310P3", "310P3", {"310P3": "Atlas inference, no bfloat16"}),
        ("cnmon-MLU590", "MLU590-M9", {"MLU590-H8": "", "MLU580": "", "MLU370-S4": "no bfloat16"}),
        (
            "hy-smi-K100_AI",
            "K100_AI",
            {
                "Z100": "gfx906, no bfloat16",
                "Z100L": "gfx906, no bfloat16",
                "K100": "gfx926",
                "K500SM_AI": "gfx928",
                "BW1000": "gfx936",
                "BW1100": "gfx938, fp8",
            },
        ),
    ],
)
def test_families_are_told_apart_by_name(recording: str, written: str, families: dict[str, str]) -> None:
    """Names of which there is no recording of their own, put into one."""
    for name, family in families.items():
        text = recorded(recording).replace(written, name)
        chips = monitors.parse(entry_of(recording), text)
        assert {(c.name, c.family) for c in chips} == {(name, family)}


@pytest.mark.parametrize("locale", ["en_US.UTF-8", "zh_CN.UTF-8"])
def test_no_driver_at_all(tmp_path: Path, locale: str) -> None:
    """The command in each environment, with nothing but an empty folder on PATH."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("QIAO_", "LC_"))}
    env |= {"PATH": str(tmp_path), "LANG": locale, "QIAO_PLUGINS": "reference"}
    command = [sys.executable, "-m", "qiao", "doctor"]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=120, check=False)
    said = "no accelerator's driver or SDK found" if locale.startswith("en") else "未发现任何加速卡的驱动或 SDK"
    assert said in done.stdout and "Traceback" not in done.stderr
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_command_names_chips_memory_and_what_is_missing(tmp_path: Path) -> None:
    """All four vendors' commands on PATH at once, each printing its recording."""
    names = {"npu-smi": "910B3", "cnmon": "MLU590", "hy-smi": "K100_AI", "nvidia-smi": "H200"}
    for command, chip in names.items():
        script(tmp_path / command, f"exec cat '{RECORDINGS / f'{command}-{chip}.txt'}'\n")
    env = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "QIAO_PLUGINS": "reference"}
    command = [sys.executable, "-m", "qiao", "doctor"]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, env=env, timeout=120, check=False)
    told = json.loads(done.stdout)
    chips = {d["vendor"]: [(c["name"], c["total"] >> 20) for c in d["monitor"]["chips"]] for d in told["drivers"]}
    assert chips["Huawei Ascend"][0] == ("910B3", 65536) and chips["Cambricon"][0] == ("MLU590-M9", 98304)
    assert chips["Hygon DCU"][0] == ("K100_AI", 65520) and chips["NVIDIA"] == [("NVIDIA H200", 143771)]
    missing = {f["text"].partition(":")[0] for f in told["findings"] if f["id"].startswith("driver_without")}
    assert missing >= {"Huawei Ascend", "Cambricon"}, "whatever is installed here, their torch backends are not"
    assert {d["versions"]["driver"] for d in told["drivers"]} >= {"25.2.0", "6.2.29", "6.3.8", "570.86.15"}
