"""``qiao doctor``: what this machine has, what would run where, and what to mend."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from importlib.resources import files
from typing import Annotated, Any

import typer

from qiao.errors import ParameterError

LANGUAGES = ("en", "zh")


class Catalog:
    """The texts of one language. ``language`` is one of ``LANGUAGES``."""

    def __init__(self, language: str) -> None:
        path = files("qiao.cli").joinpath("messages").joinpath(f"doctor_{language}.json")
        self._texts: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))

    def __call__(self, key: str, **values: Any) -> str:
        """The text ``key`` with its placeholders filled."""
        return self._texts[key].format(**values)

    def __contains__(self, key: str) -> bool:
        """Whether there is a text ``key``."""
        return key in self._texts


def language_of(environment: Mapping[str, str]) -> str:
    """``zh`` where the locale is Chinese (``LC_ALL`` before ``LC_MESSAGES`` before ``LANG``), else ``en``."""
    for name in ("LC_ALL", "LC_MESSAGES", "LANG"):
        if value := environment.get(name):
            return "zh" if value.lower().startswith("zh") else "en"
    return "en"


def report(facts: dict[str, Any], language: str) -> dict[str, Any]:
    """Facts with findings as text, and ``ok``: whether serving is possible."""
    from qiao.cli.doctor_checks import ERROR, findings

    say = Catalog(language)
    found = findings(facts)
    texts = [
        {
            "level": finding.level,
            "id": finding.id,
            "text": say(finding.id, **finding.values),
            "remedy": say(f"{finding.id}.remedy", **finding.values),
        }
        for finding in found
    ]
    return {"ok": all(f.level != ERROR for f in found), "language": language, "findings": texts, **facts}


def render(told: dict[str, Any], language: str) -> str:
    """The report as lines of text."""
    say = Catalog(language)
    sections = {
        "cpu": _cpu(told, say),
        "memory": [told["memory"]["explanation"]],
        "software": _software(told, say),
        "drivers": [line for d in told["drivers"] for line in _driver(d, say)] or [say("drivers.none")],
        "plugins": [_plugin(p, say) for p in told.get("plugins", ())] or [say("none")],
        "runs": _runs(told.get("device", {}), say),
        "findings": _findings(told, say),
    }
    lines = [say("title")]
    for name, texts in sections.items():
        if texts:
            lines += ["", say(name), *(f"  {text}" for text in texts)]
    return "\n".join([*lines, "", say("verdict.ok" if told["ok"] else "verdict.bad")])


def _cpu(told: dict[str, Any], say: Catalog) -> list[str]:
    cpu = told["cpu"]
    quota = say("none") if cpu["quota"] is None else f"{cpu['quota']:g}"
    return [
        say("cpu.line", **{**cpu, "quota": quota}),
        say("cpu.features", features=" ".join(cpu["features"]) or say("cpu.no_features")),
    ]


def _software(told: dict[str, Any], say: Catalog) -> list[str]:
    system, torch = told["system"], told["torch"]
    lines = [say("software.python", version=system["python"], os=system["os"])]
    if "error" not in torch:
        lines.append(
            say("torch", version=torch["version"], threads=torch["threads"], capability=torch["cpu_capability"])
        )
    lines.append(", ".join(f"{name} {version}" for name, version in told["distributions"].items() if name != "torch"))
    lines.append(say("software.compiler", compiler=system["compiler"] or say("none")))
    return lines


def _driver(driver: dict[str, Any], say: Catalog) -> list[str]:
    versions = {**driver["versions"], **driver["distributions"]}
    parts = [say("drivers.present" if driver["present"] else "drivers.absent")]
    parts += [f"{name} {version}" for name, version in versions.items()]
    lines = [f"{driver['vendor']}: {'; '.join((*parts, *driver['evidence']))}"]
    return lines + [f"  {_chip(chip, say)}" for chip in driver["monitor"]["chips"]]


def _chip(chip: dict[str, Any], say: Catalog) -> str:
    name = f"{chip['name']} ({chip['family']})" if chip["family"] else chip["name"]
    sizes = {"used": f"{chip['used'] / 2**30:.1f}", "total": f"{chip['total'] / 2**30:.1f}"}
    memory = say("chip.memory", **sizes) if chip["total"] else say("chip.no_memory")
    return ", ".join(filter(None, (f"{chip['label']}: {name}", memory, chip["health"])))


def _plugin(plugin: dict[str, Any], say: Catalog) -> str:
    names = ", ".join(f"{d['name']} ({d['evidence']})" for d in plugin["devices"])
    if plugin["status"] != "ready":
        state = f"{plugin['status']}: {plugin['verdict']}"
    else:
        state = say("plugins.ready", devices=names) if names else say("plugins.no_device")
    return f"{plugin['name']} ({plugin['distribution']} {plugin['version']}): {state}"


def _runs(device: dict[str, Any], say: Catalog) -> list[str]:
    if not device or "error" in device:
        return []
    lines = [say("runs.device", device=device["name"], plugin=device["plugin"], evidence=device["evidence"])]
    lines += _sdk(device["sdk"], say)
    if device["fallback"]:
        rows = ", ".join(f"{row['operator']} ({row['reason']})" for row in device["fallback"])
        lines.append(say("runs.some", host=device["host"], operators=rows))
    else:
        lines.append(say("runs.all"))
    moved = device["plan"]["total"]["bytes"]
    if moved:
        lines.append(say("runs.bytes", bytes=f"{moved / 2**20:.1f} MiB"))
    return lines


def _sdk(sdk: Mapping[str, str], say: Catalog) -> list[str]:
    """What a plugin declares of its software, where there is a text for it: one for the value itself or for any."""
    keys = {
        name: f"sdk.{name}.{value}" if f"sdk.{name}.{value}" in say else f"sdk.{name}" for name, value in sdk.items()
    }
    return [say(key, value=sdk[name]) for name, key in keys.items() if key in say]


def _findings(told: dict[str, Any], say: Catalog) -> list[str]:
    lines = []
    for finding in told["findings"]:
        lines += [f"[{say('level.' + finding['level'])}] {finding['text']}", f"    -> {finding['remedy']}"]
    return lines or [say("findings.none")]


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    lang: Annotated[str | None, typer.Option("--lang", help="zh or en; the locale's if not given.")] = None,
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="Port that a server would listen on.")] = 8000,
) -> None:
    """Look at this machine: CPU, memory, drivers, plugins, what would run where, and what to mend.

    Exit status 0 where serving is possible, else 1.
    """
    from qiao.cli.doctor_facts import gather

    language = lang or language_of(os.environ)
    if language not in LANGUAGES:
        raise ParameterError("--lang", f"must be one of {', '.join(LANGUAGES)}, got {language!r}")
    told = report(gather(port), language)
    text = json.dumps(told, ensure_ascii=False, indent=2) if as_json else render(told, language)
    # A Chinese text must not fail on a terminal that is set to ASCII.
    sys.stdout.buffer.write(text.encode(sys.stdout.encoding or "utf-8", errors="replace") + b"\n")
    raise typer.Exit(0 if told["ok"] else 1)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("doctor")(doctor)
