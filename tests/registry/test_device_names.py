"""A device that nothing installed can be is refused before torch is loaded (public case B096)."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata

import pytest
from qiao import devices
from qiao.devices import check_device_name
from qiao.errors import PluginError


class _Point:
    def __init__(self, name: str) -> None:
        self.name = name


def _installed(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    monkeypatch.setattr(devices.metadata, "entry_points", lambda group: [_Point(name) for name in names])


@pytest.mark.parametrize(
    ("device", "said"),
    [
        ("maca", "no Qiao package for MetaX yet"),
        ("ascend", "pip install qiao-ascend"),
        ("npu:1", "pip install qiao-ascend"),
        ("camb", "pip install qiao-cambricon"),
        ("asscend", "Did you mean 'ascend'?"),
    ],
)
def test_unavailable_devices_name_the_remedy(monkeypatch: pytest.MonkeyPatch, device: str, said: str) -> None:
    _installed(monkeypatch, "reference")
    monkeypatch.setattr(devices, "installed_version", lambda package: "")
    with pytest.raises(PluginError, match="Usable here: cpu") as raised:
        check_device_name(device)
    assert said in str(raised.value) and repr(device) in str(raised.value)


def test_a_package_without_a_plugin_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    _installed(monkeypatch, "reference")
    monkeypatch.setattr(metadata, "version", lambda package: "0.0.1")
    with pytest.raises(PluginError, match=r"qiao-cuda 0\.0\.1 is installed but offers no plugin"):
        check_device_name("cuda")


@pytest.mark.parametrize("device", ["", "auto", "cpu", "cpu:0", "reference", "acme", "acme:1", "npu"])
def test_names_that_may_work_are_left_to_the_probe(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """With another plugin installed, ``npu`` may be what torch calls that plugin's device."""
    _installed(monkeypatch, "reference", "acme")
    check_device_name(device)


def test_the_refusal_loads_neither_torch_nor_a_plugin() -> None:
    code = (
        "import sys\n"
        "from qiao import devices\n"
        "devices.metadata.entry_points = lambda group: []\n"
        "from qiao.server.__main__ import main\n"
        "try:\n    main(['model', '--device', 'maca'])\n"
        "except SystemExit as end:\n    print(end.code, 'torch' in sys.modules, 'qiao_reference' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "False", "False"]
    assert "'maca'" in done.stderr and "Traceback" not in done.stderr
