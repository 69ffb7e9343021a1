"""From what the user typed to one device: never another one than was named, and always some device for ``auto``."""

from __future__ import annotations

import logging
import subprocess
import sys
import time

import pytest
from qiao.errors import ParameterError, PluginError
from qiao.registry import choose, discover, planning_backend
from qiao.registry.discovery import Discovery

from tests.support.plugins import good_source


def only(*names):
    """A discovery of the named fake plugins and the last resort."""
    return discover(names)


@pytest.fixture
def no_plugins(monkeypatch):
    """As where no vendor's package is installed."""
    monkeypatch.setattr("qiao.registry.discovery._entry_points", lambda: iter(()))


def refused(device, *names):
    with pytest.raises(PluginError) as caught:
        choose(device, only(*names))
    return str(caught.value)


def warnings(caplog):
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


@pytest.mark.parametrize("device", ["auto", "cpu", "cpu:0", "reference", "reference:0"])
def test_the_cpu_is_always_a_valid_last_resort(site, device):
    backend = choose(device, only())
    assert (backend.plugin, backend.device.torch_device) == ("reference", "cpu")
    assert backend.host is backend and backend.on_host


def test_the_cpu_serves_even_without_any_metadata():
    """A source tree, or a package without entry points: the device is never empty (B104)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("qiao.registry.discovery.metadata.distributions", lambda: iter(()))
        backend = choose("auto", discover())
    assert backend.device.torch_device == "cpu"


def test_auto_takes_the_accelerator(site):
    site.install("acme", good_source("acme"))
    backend = choose("auto", only("acme"))
    assert (backend.plugin, backend.device.name, backend.host.plugin) == ("acme", "acme:0", "reference")
    assert not backend.on_host


def test_auto_takes_the_better_device_of_one_plugin(site):
    extra = (
        "\n@hookimpl\ndef probe_devices():\n"
        "    return [DeviceInfo(f'acme:{i}', 'meta', 'c', i + 1, 'x') for i in range(3)]\n"
    )
    site.install("acme", good_source("acme", extra=extra))
    assert choose("auto", only("acme")).device.name == "acme:2"


def test_score_0_is_never_taken_unasked(site):
    site.install("acme", good_source("acme", score=0))
    assert choose("auto", only("acme")).plugin == "reference"
    assert choose("acme", only("acme")).plugin == "acme"


def test_two_claimants_need_a_choice(site):
    site.install("acme", good_source("acme"))
    site.install("zeta", good_source("zeta", score=99))
    text = refused("auto", "acme", "zeta")
    for part in (
        "acme",
        "zeta",
        "saw acme:0",
        "saw zeta:0",
        "--device acme",
        "--device zeta",
        "qiao-acme",
        "qiao-zeta",
    ):
        assert part in text
    assert choose("zeta", only("acme", "zeta")).plugin == "zeta"


def test_a_better_cpu_plugin_takes_over_with_the_reference_behind_it(site):
    site.install("cpu", good_source("cpu", score=5, torch="cpu"), distribution="qiao-cpu")
    for device in ("auto", "cpu"):
        backend = choose(device, only("cpu"))
        assert (backend.plugin, backend.host.plugin) == ("cpu", "reference")
    site.install("acme", good_source("acme"))
    assert [b.plugin for b in choose("acme", only("cpu", "acme")).hosts] == ["cpu", "reference"]


@pytest.mark.parametrize("device", ["auto", "cpu", "acme"])
def test_a_broken_cpu_plugin_is_skipped_with_one_warning(site, caplog, device):
    site.install("acme", good_source("acme"))
    site.install("cpu", "raise OSError('no AVX2')", distribution="qiao-cpu")
    assert choose(device, only("acme", "cpu")).host.plugin == "reference"
    said = warnings(caplog)
    assert len(said) == 1 and "no AVX2" in said[0] and "qiao-cpu" in said[0]


def test_a_broken_plugin_is_skipped_with_one_warning(site, caplog):
    """B092 and B094: the others go on, and the warning names what is missing."""
    site.install("acme", "import torch_fake")
    site.install("newer", good_source("newer"), requires=["qiao>=99"])
    site.install("fine", good_source("fine"))
    assert choose("auto", only("acme", "newer", "fine")).plugin == "fine"
    said = warnings(caplog)
    assert len(said) == 2
    assert "acme" in said[0] and "torch_fake" in said[0]
    assert "newer" in said[1] and "qiao>=99" in said[1] and discover().core_version in said[1]


def test_an_explicit_device_gets_the_reason_and_no_fallback(site):
    site.install("acme", "import torch_fake")
    text = refused("acme", "acme")
    assert "torch_fake" in text and "qiao-acme 1.2.3" in text and "reference:0" in text


def test_an_explicit_device_loads_no_other_accelerator(site):
    site.install("acme", good_source("acme"))
    other = site.install("other", good_source("other"))
    choose("acme", only("acme", "other"))
    assert other not in site.imported()
    choose("cpu", only("acme", "other"))
    assert other not in site.imported()


def test_a_plugin_without_a_device_here(site):
    site.install("acme", good_source("acme", count=0))
    assert "it finds no device on this machine" in refused("acme", "acme")
    assert choose("auto", only("acme")).plugin == "reference"


@pytest.mark.parametrize(
    ("device", "said"),
    [
        ("ascend", "pip install qiao-ascend"),
        ("npu", "pip install qiao-ascend"),
        ("npu:3", "pip install qiao-ascend"),
        ("mlu", "pip install qiao-cambricon"),
        ("camb", "pip install qiao-cambricon"),
        ("dcu", "pip install qiao-dcu"),
        ("cuda", "pip install qiao-cuda"),
        ("sim", "pip install qiao-conformance"),
        ("maca", "no Qiao package for MetaX"),
        ("asend", "Did you mean 'ascend'?"),
        ("cpuu", "Did you mean 'cpu'?"),
        ("quux", "no plugin or package of that name is known"),
    ],
)
def test_a_device_that_is_not_installed(monkeypatch, device, said):
    """B096: within a second, which package provides it and what works here; never the CPU instead."""
    here = only()
    bare = Discovery(tuple(r for r in here.records if r.name == "reference"), here.core_version)
    monkeypatch.setattr("qiao.devices.installed_version", lambda package: "")
    start = time.process_time()
    with pytest.raises(PluginError) as caught:
        choose(device, bare)
    assert time.process_time() - start < 1.0
    assert said in str(caught.value)
    assert repr(device) in str(caught.value) and "Usable here: reference:0" in str(caught.value)


def test_a_package_that_is_installed_but_offers_nothing(monkeypatch, no_plugins):
    monkeypatch.setattr("qiao.devices.installed_version", lambda package: "0.1.0")
    assert "qiao-ascend 0.1.0 is installed but offers no plugin" in refused("npu")


def test_an_index_that_does_not_exist(site):
    site.install("acme", good_source("acme", count=2))
    assert choose("acme:1", only("acme")).device.name == "acme:1"
    text = refused("acme:2", "acme")
    assert "acme:0" in text and "acme:1" in text
    assert "must be a number" in refused("acme:x", "acme")


@pytest.mark.parametrize("device", ["", "  "])
def test_an_empty_device_is_a_mistake(device):
    with pytest.raises(ParameterError, match="device"):
        choose(device, only())


def test_a_torch_device_string_finds_its_plugin(site):
    site.install("acme", good_source("acme", torch="meta"))
    assert choose("meta", only("acme")).plugin == "acme"
    site.install("zeta", good_source("zeta", torch="meta"))
    text = refused("meta", "acme", "zeta")
    assert "acme" in text and "zeta" in text and "--device acme" in text


def test_a_torch_device_string_with_an_index(site):
    extra = (
        "\n@hookimpl\ndef probe_devices():\n"
        "    return [DeviceInfo(f'acme:{i}', f'meta:{i}', 'c', 1, 'x') for i in range(2)]\n"
    )
    site.install("acme", good_source("acme", extra=extra))
    assert choose("meta:1", only("acme")).device.name == "acme:1"
    assert "meta:0" in refused("meta:7", "acme")


def test_the_torch_name_of_a_known_package_loads_only_that_package(site):
    site.install("ascend", good_source("ascend"), distribution="qiao-ascend")
    other = site.install("other", good_source("other"))
    assert choose("npu", only("ascend", "other")).plugin == "ascend"
    assert other not in site.imported()


def test_planning_needs_no_device(site):
    site.install("acme", good_source("acme", extra="\n@hookimpl\ndef probe_devices():\n    raise OSError('no SDK')\n"))
    backend = planning_backend("acme", only("acme"))
    assert backend.capabilities.dtypes == ("float32", "bfloat16") and backend.host.plugin == "reference"
    with pytest.raises(PluginError, match="no SDK"):
        choose("acme", only("acme"))


def test_planning_with_a_plugin_that_does_not_load(site):
    site.install("acme", "import torch_fake")
    with pytest.raises(PluginError, match="torch_fake"):
        planning_backend("acme", only("acme"))


def test_planning_with_a_plugin_that_is_not_there(no_plugins):
    with pytest.raises(PluginError, match=r"pip install qiao-dcu|installed but offers no plugin"):
        planning_backend("dcu", only())


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_a_chip_belongs_to_a_named_plugin(device):
    with pytest.raises(ParameterError, match="chip: belongs to one plugin"):
        planning_backend(device, only(), chip="v1")


def test_importing_qiao_and_discovering_imports_no_vendor_module(site):
    """B099: a mask of visible devices that is set late still counts, because nothing has looked yet."""
    vendor = "import os\nSEEN = os.environ.get('FAKE_VISIBLE_DEVICES')\n"
    (site.folder / "fake_vendor_sdk.py").write_text(vendor)
    site.install("acme", "import fake_vendor_sdk\n" + good_source("acme"))
    script = (
        "import os, sys\n"
        "import qiao, qiao.registry, qiao.cli.main\n"
        "found = qiao.registry.discover()\n"
        "assert found.named('acme') is not None\n"
        "assert 'fake_vendor_sdk' not in sys.modules, 'imported too early'\n"
        "os.environ['FAKE_VISIBLE_DEVICES'] = '3'\n"
        "qiao.registry.choose('acme')\n"
        "print(sys.modules['fake_vendor_sdk'].SEEN)\n"
    )
    path = {"PYTHONPATH": str(site.folder), "PATH": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=path, check=False)
    assert done.stdout.strip() == "3", done.stderr
