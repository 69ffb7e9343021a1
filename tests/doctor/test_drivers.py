"""Drivers and SDKs found by the files that vendors' installers leave."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from qiao.devices import known_packages
from qiao.observability.drivers import Driver, find_drivers, known_drivers

from tests.doctor.test_machine import write


def found(root: Path, **environment: str) -> dict[str, Driver]:
    return {driver.name: driver for driver in find_drivers(root, environment)}


def test_an_empty_machine_has_none(tmp_path: Path) -> None:
    assert found(tmp_path) == {}


def test_device_node_driver_and_toolkit(tmp_path: Path) -> None:
    write(tmp_path, "dev/davinci0", "")
    write(tmp_path, "dev/davinci1", "")
    write(tmp_path, "usr/local/Ascend/driver/version.info", "Version=25.2.0\nascendhal_version=7.35.23\n")
    write(
        tmp_path,
        "usr/local/Ascend/ascend-toolkit/latest/aarch64-linux/ascend_toolkit_install.info",
        "package_name=Ascend-cann-toolkit\nversion=8.3.RC1\n",
    )
    driver = found(tmp_path)["ascend"]
    assert driver.present
    assert dict(driver.versions) == {"driver": "25.2.0", "CANN toolkit": "8.3.RC1"}
    assert driver.evidence[:2] == ("/dev/davinci0", "/dev/davinci1")
    assert driver.package == "qiao-ascend"


def test_kernel_module_version_text(tmp_path: Path) -> None:
    text = (
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 18:56:32 UTC 2023\nGCC version: 12.3\n"
    )
    write(tmp_path, "proc/driver/nvidia/version", text)
    write(tmp_path, "usr/local/cuda/version.json", '{"cuda" : {"name" : "CUDA SDK", "version" : "12.4.1"}}')
    driver = found(tmp_path)["cuda"]
    assert driver.present
    assert dict(driver.versions) == {"driver": "535.129.03", "toolkit": "12.4.1"}


def test_open_kernel_module_version_text(tmp_path: Path) -> None:
    text = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15  Release Build\n"
    write(tmp_path, "proc/driver/nvidia/version", text)
    assert found(tmp_path)["cuda"].versions["driver"] == "550.54.15"


def test_pci_device_without_driver(tmp_path: Path) -> None:
    write(tmp_path, "sys/bus/pci/devices/0000:3b:00.0/vendor", "0xcabc\n")
    write(tmp_path, "sys/bus/pci/devices/0000:3b:00.0/class", "0x120000\n")
    driver = found(tmp_path)["cambricon"]
    assert driver.present
    assert "driver" not in driver.versions


def test_a_vendors_other_devices_do_not_count(tmp_path: Path) -> None:
    """The same PCI vendors make network cards, management chips and CPU bridges."""
    for slot, vendor, kind in (("1", "0x19e5", "0x020000"), ("2", "0x19e5", "0x030000"), ("3", "0x1d94", "0x060400")):
        write(tmp_path, f"sys/bus/pci/devices/0000:0{slot}:00.0/vendor", vendor)
        write(tmp_path, f"sys/bus/pci/devices/0000:0{slot}:00.0/class", kind)
    assert found(tmp_path) == {}


def test_sdk_from_the_environment_without_a_device(tmp_path: Path) -> None:
    write(tmp_path, "opt/nw/version.txt", "Neuware Version 4.4.3\n")
    driver = found(tmp_path, NEUWARE_HOME="/opt/nw")["cambricon"]
    assert not driver.present
    assert driver.versions["neuware"] == "4.4.3"
    assert "$NEUWARE_HOME" in driver.evidence


def test_unreadable_version_file_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "usr/local/Ascend/driver/version.info").mkdir(parents=True)
    assert found(tmp_path) == {}


@pytest.mark.parametrize("entry", known_drivers()["accelerators"], ids=lambda e: e["name"])
def test_data_is_sound(entry: dict[str, object]) -> None:
    for version in entry["versions"]:  # type: ignore[attr-defined]
        assert re.compile(version["pattern"]).groups == 1
        assert version["files"]
    packages = {device.package for device in known_packages().devices.values()}
    assert entry["package"] in packages | {""}
