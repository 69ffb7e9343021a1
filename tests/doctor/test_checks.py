"""Each finding from the facts that cause it, and no finding on a sound machine."""

from __future__ import annotations

import copy
import json
import string
from pathlib import Path
from typing import Any

import pytest
from qiao.cli import doctor, doctor_checks
from qiao.cli.doctor_checks import findings

SOUND: dict[str, Any] = {
    "schema": 1,
    "cpu": {
        "kind": "chip",
        "architecture": "x86_64",
        "features": ["avx2"],
        "cores": 8,
        "usable": 8,
        "quota": None,
        "vector": True,
        "effective": 8.0,
    },
    "memory": {"bytes": 32 << 30, "free": 30 << 30, "explanation": "host 32 GiB"},
    "limits": {"open_files": 65536},
    "system": {"os": "Linux", "python": "3.11.2", "executable": "python", "compiler": "/usr/bin/c++"},
    "distributions": {"qiao": "0.1.0", "torch": "2.9.0"},
    "drivers": [],
    "exclusive": [],
    "packages": {"qiao-acme": ""},
    "torch_packages": {"torch": "2.9.0", "torch-acme": ""},
    "port": {"number": 8000, "busy": False},
    "torch": {"version": "2.9.0", "threads": 8, "cpu_capability": "AVX2"},
    "plugins": [],
    "device": {
        "name": "cpu:0",
        "plugin": "cpu",
        "host": "cpu",
        "evidence": "chip",
        "sdk": {"kernels": "avx2", "kernels_why": "score", "threads": "7 (8 cores, one left to the front end)"},
        "plan": {"total": {"bytes": 0}},
        "fallback": [],
    },
}

DRIVER = {
    "name": "acme",
    "vendor": "ACME",
    "package": "qiao-acme",
    "present": True,
    "evidence": ["/dev/acme0"],
    "versions": {"driver": "1.2"},
    "distributions": {},
    "torch": ["torch-acme"],
    "monitor": {"command": "acme-smi", "chips": [], "driver": "", "problem": ""},
}
SICK = {
    "label": "0",
    "name": "acme-1",
    "family": "",
    "used": 0,
    "total": 1 << 30,
    "health": "Alarm",
    "healthy": False,
}
PLUGIN = {
    "name": "acme",
    "distribution": "qiao-acme",
    "version": "0.1",
    "status": "quarantined",
    "verdict": "no module {x}",
    "hooks": 0,
    "devices": [],
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "python_version": ("warning", {"system": {"python": "3.9.1"}}),
    "torch_missing": ("error", {"torch": {"error": "ImportError: libfoo"}}),
    "exclusive": ("error", {"exclusive": ["torch-a", "torch-b"]}),
    "no_vector": ("warning", {"cpu": {"vector": False}}),
    "few_cores": ("warning", {"cpu": {"effective": 1.5}}),
    "too_many_threads": ("warning", {"cpu": {"quota": 2.0, "effective": 2.0}}),
    "low_memory": ("warning", {"memory": {"free": 1 << 30}}),
    "driver_without_package": ("warning", {"drivers": [DRIVER]}),
    "driver_without_plugin": ("info", {"drivers": [{**DRIVER, "package": ""}]}),
    "driver_without_torch": ("warning", {"drivers": [DRIVER], "packages": {"qiao-acme": "0.1"}}),
    "driver_version_unknown": (
        "warning",
        {
            "drivers": [{**DRIVER, "versions": {}}],
            "packages": {"qiao-acme": "0.1"},
            "torch_packages": {"torch-acme": "2.9"},
        },
    ),
    "driver_with_cpu_torch": (
        "warning",
        {
            "drivers": [{**DRIVER, "torch": ["torch"]}],
            "packages": {"qiao-acme": "0.1"},
            "torch": {"version": "2.9.0+cpu", "threads": 8, "cpu_capability": "AVX2"},
        },
    ),
    "chip_unhealthy": (
        "warning",
        {
            "drivers": [{**DRIVER, "monitor": {**DRIVER["monitor"], "chips": [SICK]}}],
            "packages": {"qiao-acme": "0.1"},
            "torch_packages": {"torch-acme": "2.9"},
        },
    ),
    "monitor_failed": (
        "warning",
        {
            "drivers": [{**DRIVER, "monitor": {**DRIVER["monitor"], "problem": "no driver"}}],
            "packages": {"qiao-acme": "0.1"},
            "torch_packages": {"torch-acme": "2.9"},
        },
    ),
    "sdk_without_device": ("info", {"drivers": [{**DRIVER, "present": False}]}),
    "plugin_quarantined": ("warning", {"plugins": [PLUGIN]}),
    "plugin_crashed": ("warning", {"plugins": [{**PLUGIN, "status": "crashed"}]}),
    "no_device": ("error", {"device": {"error": "several plugins claim this machine"}}),
    "fallback": ("info", {"device": {"fallback": [{"operator": "attention", "reason": "missing"}]}}),
    "slow_host": ("warning", {"device": {"plugin": "reference", "host": "reference"}}),
    "open_files": ("warning", {"limits": {"open_files": 1024}}),
    "no_compiler": ("info", {"system": {"compiler": ""}}),
    "port_busy": ("warning", {"port": {"busy": True}}),
}


def changed(changes: dict[str, Any]) -> dict[str, Any]:
    facts = copy.deepcopy(SOUND)
    for key, value in changes.items():
        replace = not isinstance(value, dict) or "error" in value
        facts[key] = value if replace else {**facts[key], **value}
    return facts


def test_a_sound_machine_has_no_findings() -> None:
    assert findings(SOUND) == []
    assert doctor.report(SOUND, "en")["ok"]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("language", doctor.LANGUAGES)
def test_each_cause_gives_its_finding_with_a_remedy(name: str, language: str) -> None:
    level, changes = CASES[name]
    told = doctor.report(changed(changes), language)
    assert [(f["id"], f["level"]) for f in told["findings"]] == [(name, level)]
    assert told["findings"][0]["text"]
    assert told["findings"][0]["remedy"]
    assert told["ok"] == (level != "error")
    text = doctor.render(told, language)
    assert told["findings"][0]["remedy"] in text
    assert text.isascii() == (language == "en") or "{x}" in text


def test_no_memory_and_a_broken_core_are_errors() -> None:
    assert [f.level for f in findings(changed({"memory": {"free": 100 << 20}}))] == ["error"]
    assert [f.level for f in findings(changed({"plugins": [{**PLUGIN, "distribution": "qiao"}]}))] == ["error"]


def test_the_slow_host_counts_only_where_something_runs_on_it() -> None:
    accelerator = {"plugin": "acme", "host": "reference"}
    assert not findings(changed({"device": accelerator}))
    rows = [{"operator": "attention", "reason": "missing"}]
    assert [f.id for f in findings(changed({"device": {**accelerator, "fallback": rows}}))] == ["slow_host", "fallback"]


@pytest.mark.parametrize("language", doctor.LANGUAGES)
def test_what_the_kernels_use_and_why(language: str) -> None:
    text = doctor.render(doctor.report(SOUND, language), language)
    assert "avx2" in text and "7 (8 cores" in text and doctor.Catalog(language)("sdk.kernels_why.score") in text
    forced = {**SOUND["device"], "sdk": {"kernels_why": "QIAO_CPU_ISA=scalar", "unknown": "never shown"}}
    text = doctor.render(doctor.report(changed({"device": forced}), language), language)
    assert "QIAO_CPU_ISA=scalar" in text and "never shown" not in text


def test_the_worst_comes_first() -> None:
    changes = {"system": {"compiler": ""}, "port": {"busy": True}, "exclusive": ["a", "b"]}
    assert [f.level for f in findings(changed(changes))] == ["error", "warning", "info"]


def test_a_missing_package_is_named_in_the_remedy() -> None:
    told = doctor.report(changed({"drivers": [DRIVER]}), "en")
    assert told["findings"][0]["remedy"] == "pip install qiao-acme"


def _catalog(language: str) -> dict[str, str]:
    path = Path(doctor.__file__).parent / "messages" / f"doctor_{language}.json"
    texts: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))
    return texts


def _placeholders(text: str) -> set[str]:
    return {name for _, name, _, _ in string.Formatter().parse(text) if name}


def test_both_languages_say_the_same_things() -> None:
    english, chinese = _catalog("en"), _catalog("zh")
    assert list(english) == list(chinese)
    for key, text in english.items():
        if key not in ("cpu.line",):
            assert _placeholders(text) == _placeholders(chinese[key]), key
        assert chinese[key].strip()


def test_every_finding_of_the_source_is_in_the_catalog_and_tested() -> None:
    source = Path(doctor_checks.__file__).read_text(encoding="utf-8")
    english = _catalog("en")
    for name in CASES:
        assert name in english
        assert f"{name}.remedy" in english
        assert name in source or name.startswith("plugin_")
    remedies = {key.removesuffix(".remedy") for key in english if key.endswith(".remedy")}
    assert remedies == set(CASES)


@pytest.mark.parametrize(
    ("environment", "language"),
    [
        ({}, "en"),
        ({"LANG": "C.UTF-8"}, "en"),
        ({"LANG": "zh_CN.UTF-8"}, "zh"),
        ({"LANG": "zh_CN.UTF-8", "LC_ALL": "C"}, "en"),
        ({"LANG": "en_US.UTF-8", "LC_ALL": "zh_TW.Big5"}, "zh"),
        ({"LANG": "en_US.UTF-8", "LC_MESSAGES": "zh_CN"}, "zh"),
        ({"LC_ALL": "", "LANG": "zh_CN"}, "zh"),
    ],
)
def test_language_by_locale(environment: dict[str, str], language: str) -> None:
    assert doctor.language_of(environment) == language
