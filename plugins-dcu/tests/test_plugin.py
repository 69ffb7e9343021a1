"""Told apart from AMD and NVIDIA on fake buses; profiles, remedies, hy-smi's words, one copy at a time."""

from __future__ import annotations

import stat
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from qiao.contract import WeightInfo
from qiao_dcu import _sdk, device, identify, loading
from qiao_dcu.chips import HYGON_ONLY, LANES, PROFILES, capabilities_of, profile_of
from qiao_triton.architectures import ARCHITECTURES

from tests.support.gpus import card, runtime

HYGON, AMD, NVIDIA = "0x1d94", "0x1002", "0x10de"


@pytest.mark.parametrize(
    ("cards", "verdict"),
    [
        ([(HYGON, "0x0b4000")], True),
        ([(HYGON, "0x038000")], True),
        ([(HYGON, "0x0b4000"), (NVIDIA, "0x030000")], True),
        ([(AMD, "0x030000")], False),
        ([(NVIDIA, "0x030200")], False),
        ([(HYGON, "0x060000"), (AMD, "0x038000")], False),  # a Hygon CPU's bridge beside an AMD card
        ([(HYGON, "0x108000")], None),  # a Hygon CPU's cipher unit
        ([], None),
    ],
)
def test_by_the_bus(tmp_path, cards, verdict) -> None:
    for number, (vendor, kind) in enumerate(cards):
        card(tmp_path, vendor, kind, f"0000:{number:02x}:00.0")
    found = identify.by_bus(tmp_path, {})
    assert found.dcu is verdict and found.why
    assert identify.by_bus(tmp_path, {"QIAO_DCU": "1"}).dcu is True
    assert identify.by_bus(tmp_path, {"QIAO_DCU": "0"}).dcu is False


@pytest.mark.parametrize(
    ("name", "hygon_torch", "verdict"),
    [
        ("gfx928:sramecc+:xnack-", False, True),
        ("gfx936", False, True),
        ("gfx906:sramecc+:xnack-", True, True),
        ("gfx906", False, False),  # AMD's MI50
        ("gfx90a", True, False),
        ("gfx942", False, False),
    ],
)
def test_by_architecture(name, hygon_torch, verdict) -> None:
    assert identify.by_architecture(name, hygon_torch).dcu is verdict


@pytest.mark.parametrize(
    ("version", "ours"), [("2.9.0+das.opt1.dtk2604", True), ("2.9.0+rocm6.4", False), ("2.9.0", False)]
)
def test_the_vendors_torch(monkeypatch, version, ours) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    assert _sdk.from_hygon() is ours
    assert _sdk.versions().get("dtk") == ("2604" if ours else None)


def test_profiles() -> None:
    assert {name: capabilities_of(name).dtypes[0] for name in PROFILES} == {
        "gfx906": "float16",
        "gfx926": "float16",
        "gfx928": "bfloat16",
        "gfx936": "bfloat16",
        "gfx938": "bfloat16",
    }
    assert [name for name, profile in PROFILES.items() if profile.fp8] == ["gfx938"]
    assert [name for name, profile in PROFILES.items() if profile.public_triton] == ["gfx906"]
    assert {ARCHITECTURES[name].lanes for name in PROFILES} == {LANES}
    assert {ARCHITECTURES[name].bf16 for name in ("gfx906", "gfx926")} == {False}
    assert [max(capabilities_of(name).head_dims) for name in PROFILES] == [128, 128, 256, 256, 256]
    assert "gfx906" not in HYGON_ONLY and "gfx928" in HYGON_ONLY
    assert max(capabilities_of("gfx928").capture_sizes) == 16
    with pytest.raises(LookupError, match="no profile of gfx90a; there are gfx906"):
        profile_of("gfx90a")


def hip(*names: str) -> SimpleNamespace:
    return runtime([{"name": "K100_AI", "gcnArchName": name, "total_memory": 64 << 30} for name in names])


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """``machine(cards, names)``: a bus, and what HIP shows; torch and Triton are the vendor's."""

    by_bus = identify.by_bus

    def make(cards, names, triton="3.3.0+das.opt1.dtk2604"):
        for number, vendor in enumerate(cards):
            card(tmp_path, vendor, address=f"0000:{number:02x}:00.0")
        bus = by_bus(tmp_path, {})
        monkeypatch.setattr(identify, "by_bus", lambda: bus)
        monkeypatch.setattr(_sdk, "runtime", lambda: hip(*names))
        monkeypatch.setattr(_sdk, "has_triton", lambda: bool(triton))
        monkeypatch.setattr(_sdk, "versions", lambda: {"hip": "5.7", "triton": triton})
        for name in ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
            monkeypatch.delenv(name, raising=False)

    return make


def test_probe(machine) -> None:
    machine([HYGON], ["gfx928:sramecc+:xnack-", "gfx928"])
    first, second = device.probe_devices()
    assert (first.name, first.torch_device, first.chip) == ("dcu:0", "cuda:0", "gfx928")
    assert (second.name, second.torch_device) == ("dcu:1", "cuda:1")
    assert "K100_AI" in first.evidence and "Hygon on the PCI bus" in first.evidence


@pytest.mark.parametrize(
    ("cards", "names"), [([AMD], ["gfx928"]), ([AMD], ["gfx942"]), ([NVIDIA], []), ([], ["gfx90a"]), ([], ["gfx906"])]
)
def test_others_are_left_alone(machine, cards, names) -> None:
    machine(cards, names)
    assert device.probe_devices() == []


def test_a_bus_that_cannot_be_seen(machine) -> None:
    machine([], ["gfx936"])
    (found,) = device.probe_devices()
    assert found.chip == "gfx936" and "which only Hygon has" in found.evidence


def test_triton_that_cannot_compile_for_the_chip(machine) -> None:
    machine([HYGON], ["gfx928"], "3.9.0")
    with pytest.raises(RuntimeError, match=r"Triton 3.9.0 cannot compile for gfx928: install Hygon's own"):
        device.probe_devices()
    machine([], ["gfx906"], "3.9.0")  # on the same bus
    assert [d.chip for d in device.probe_devices()] == ["gfx906"]
    machine([], ["gfx928"], "")
    with pytest.raises(RuntimeError, match="Triton is missing"):
        device.probe_devices()


def test_variables_that_disagree() -> None:
    _sdk.check_visible({"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "0"})
    _sdk.check_visible({"HIP_VISIBLE_DEVICES": "1"})
    with pytest.raises(RuntimeError, match="HIP_VISIBLE_DEVICES=0 and CUDA_VISIBLE_DEVICES=1 differ"):
        _sdk.check_visible({"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "1"})


def test_troubles_name_what_is_missing(tmp_path, monkeypatch) -> None:
    hyhal, node = tmp_path / "hyhal", tmp_path / "kfd"
    assert identify.trouble(tmp_path / "sys", hyhal, (node,)) == ""
    sysfs = card(tmp_path / "sys", HYGON)
    assert "install the DCU driver (Hygon's rock package" in identify.trouble(sysfs, hyhal, (node,))
    node.touch()
    assert f"add -v {hyhal}:{hyhal}:ro" in identify.trouble(sysfs, hyhal, (node,))
    hyhal.mkdir()
    monkeypatch.setattr(_sdk, "runtime", lambda: None)
    assert "not built for DTK" in identify.trouble(sysfs, hyhal, (node,))
    monkeypatch.setattr(_sdk, "runtime", lambda: hip())
    assert "torch sees none" in identify.trouble(sysfs, hyhal, (node,))


RECORDED = {
    "K100_AI": '{"card0": {"DCU use (%)": "37.0"}, "card1": {"DCU use (%)": "0.0"}}',
    "BW1000": 'a line before\n{"card0": {"HCU use (%)": 100}}',
}


@pytest.mark.parametrize(("chip", "busy"), [("K100_AI", 0.37), ("BW1000", 1.0)])
def test_utilization_by_hy_smi(tmp_path, monkeypatch, chip, busy) -> None:
    script = tmp_path / "hy-smi"
    script.write_text(f"#!/bin/sh\n[ \"$*\" = '--showuse --json' ] || exit 3\ncat <<'END'\n{RECORDED[chip]}\nEND\n")
    script.chmod(script.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert device.utilization("cuda:0") == busy
    with pytest.raises(RuntimeError, match="shows no use of card 5"):
        device.utilization("cuda:5")
    script.write_text("#!/bin/sh\necho not JSON\n")
    with pytest.raises(RuntimeError, match="hy-smi --showuse --json failed"):
        device.utilization("cuda:0")


def test_without_hy_smi(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="hy-smi is not on PATH"):
        device.utilization("cuda:0")


def test_one_copy_at_a_time(monkeypatch) -> None:
    """Eight threads pack at once; the copies, watched by a tensor's ``to``, never overlap."""
    inside, most = [], []

    class Watched:
        def __init__(self, tensor) -> None:
            self.tensor = tensor

        def to(self, device, non_blocking=True):
            assert device == "cpu" and non_blocking is False
            inside.append(1)
            most.append(len(inside))
            time.sleep(0.002)
            inside.pop()
            return self.tensor

    packed = loading.matmul.pack_weight

    def watched(*arguments):
        found = packed(*arguments)
        return type(found)(found.scheme, found.info, {k: Watched(v) for k, v in found.data.items()})

    monkeypatch.setattr(loading, "matmul", SimpleNamespace(pack_weight=watched, Packed=loading.matmul.Packed))
    codes = {"weight": torch.zeros(4, 32, dtype=torch.int8), "scale": torch.ones(4, 1)}
    info = WeightInfo("w", 32, 4, 8)
    done = []
    pack = [
        threading.Thread(target=lambda: done.append(loading.pack_weight("w8a16", codes, info, "cpu"))) for _ in range(8)
    ]
    for thread in pack:
        thread.start()
    for thread in pack:
        thread.join()
    assert len(done) == 8 and len(most) == 16 and max(most) == 1
