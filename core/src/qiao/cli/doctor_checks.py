"""From facts to findings: what is wrong on this machine and what to do about it. Pure, so that each rule is tested."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from qiao.devices import known_packages

ERROR, WARNING, INFO = "error", "warning", "info"

LOW_MEMORY = 2 << 30
"""Bytes; the demo model in float32 with its cache takes about one GiB."""

NO_MEMORY = 512 << 20
OPEN_FILES = 4096
"""A server with many clients needs a file descriptor for each."""


@dataclass(frozen=True, slots=True)
class Finding:
    """``id`` names the pair of texts in the catalog (``ID`` and ``ID.remedy``), which ``values`` fill in."""

    level: str
    id: str
    values: dict[str, Any] = field(default_factory=dict)


def findings(facts: dict[str, Any]) -> list[Finding]:
    """All findings, worst first."""
    checks = (_software, _cpu, _memory, _drivers, _chips, _plugins, _device, _surroundings)
    order = (ERROR, WARNING, INFO)
    found = [finding for check in checks for finding in check(facts)]
    return sorted(found, key=lambda finding: order.index(finding.level))


def _software(facts: dict[str, Any]) -> Iterator[Finding]:
    version = tuple(int(part) for part in facts["system"]["python"].split(".")[:2])
    if not (3, 10) <= version < (3, 13):
        yield Finding(WARNING, "python_version", {"version": facts["system"]["python"]})
    if error := facts["torch"].get("error"):
        yield Finding(ERROR, "torch_missing", {"error": error})
    if len(facts["exclusive"]) > 1:
        yield Finding(ERROR, "exclusive", {"names": ", ".join(facts["exclusive"]), "python": sys.executable})


def _cpu(facts: dict[str, Any]) -> Iterator[Finding]:
    cpu = facts["cpu"]
    if not cpu["vector"]:
        yield Finding(WARNING, "no_vector", {"kind": cpu["kind"]})
    if cpu["effective"] < 2:
        yield Finding(WARNING, "few_cores", {"cores": f"{cpu['effective']:g}", "total": cpu["cores"]})
    threads = facts["torch"].get("threads", 0)
    if cpu["quota"] is not None and threads > cpu["quota"] + 1:
        yield Finding(WARNING, "too_many_threads", {"threads": threads, "quota": f"{cpu['quota']:g}"})


def _memory(facts: dict[str, Any]) -> Iterator[Finding]:
    free = facts["memory"]["free"]
    if free < LOW_MEMORY:
        level = ERROR if free < NO_MEMORY else WARNING
        yield Finding(
            level, "low_memory", {"free": f"{free / 2**30:.2f}", "explanation": facts["memory"]["explanation"]}
        )


def _chips(facts: dict[str, Any]) -> Iterator[Finding]:
    for driver in facts["drivers"]:
        reading, values = driver["monitor"], {"vendor": driver["vendor"]}
        for chip in reading["chips"]:
            if not chip["healthy"]:
                yield Finding(WARNING, "chip_unhealthy", {**values, **chip})
        if reading["problem"] and driver["present"]:
            yield Finding(WARNING, "monitor_failed", {**values, **reading})


def _drivers(facts: dict[str, Any]) -> Iterator[Finding]:
    for driver in facts["drivers"]:
        package, values = driver["package"], {"vendor": driver["vendor"], "package": driver["package"]}
        if not driver["present"]:
            if driver["versions"]:
                yield Finding(INFO, "sdk_without_device", values)
            continue
        if not package:
            yield Finding(INFO, "driver_without_plugin", values)
        elif not facts["packages"].get(package):
            yield Finding(WARNING, "driver_without_package", values)
        elif missing := [name for name in driver["torch"] if not facts["torch_packages"].get(name)]:
            yield Finding(WARNING, "driver_without_torch", {**values, "names": ", ".join(missing)})
        elif driver["torch"] == ["torch"] and facts["torch"].get("version", "").endswith("+cpu"):
            yield Finding(WARNING, "driver_with_cpu_torch", {**values, "version": facts["torch"]["version"]})
        elif "driver" not in driver["versions"]:
            yield Finding(WARNING, "driver_version_unknown", values)


def _plugins(facts: dict[str, Any]) -> Iterator[Finding]:
    for plugin in facts.get("plugins", ()):
        values = {key: plugin[key] for key in ("name", "distribution", "version")}
        if plugin["status"] in ("quarantined", "crashed"):
            level = ERROR if plugin["distribution"] == "qiao" else WARNING
            yield Finding(level, f"plugin_{plugin['status']}", {**values, "reason": plugin["verdict"]})


def _device(facts: dict[str, Any]) -> Iterator[Finding]:
    device = facts.get("device", {})
    if "error" in device:
        yield Finding(ERROR, "no_device", {"reason": device["error"]})
        return
    fallback = device.get("fallback")
    known = known_packages()
    if device["host"] == known.builtin_name and (fallback or device["plugin"] == known.builtin_name):
        yield Finding(WARNING, "slow_host", {"plugin": known.builtin_name, "package": known.builtin_faster})
    if fallback:
        names = ", ".join(dict.fromkeys(row["operator"] for row in fallback))
        yield Finding(INFO, "fallback", {"device": device["name"], "operators": names})


def _surroundings(facts: dict[str, Any]) -> Iterator[Finding]:
    limit = facts["limits"]["open_files"]
    if limit is not None and limit < OPEN_FILES:
        yield Finding(WARNING, "open_files", {"limit": limit, "wanted": OPEN_FILES})
    if not facts["system"]["compiler"]:
        yield Finding(INFO, "no_compiler")
    if facts["port"]["busy"]:
        yield Finding(WARNING, "port_busy", {"port": facts["port"]["number"], "next": facts["port"]["number"] + 1})
