"""``pytest --qiao-device NAME`` runs the kit on the plugin NAME; with paths after it, these run as well."""

from __future__ import annotations

from pathlib import Path

import pytest

_OPTION = "--qiao-device"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the option."""
    text = "run Qiao's conformance kit on this plugin, or on one device of it (NAME:INDEX)"
    parser.getgroup("qiao").addoption(_OPTION, metavar="NAME", default=None, help=text)


def pytest_configure(config: pytest.Config) -> None:
    """Adds the kit to what is collected; it replaces the project's own default paths."""
    if config.getoption(_OPTION):
        if config.args_source is not pytest.Config.ArgsSource.ARGS:
            config.args.clear()
        kit = str(Path(__file__).with_name("kit.py"))
        if kit not in config.args:
            config.args.append(kit)


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Says what is tested and which tolerances the plugin asks to loosen."""
    asked = config.getoption(_OPTION)
    if not asked:
        return []
    from qiao_conformance.kit import target_of

    target = target_of(config)
    lines = [f"qiao device: {target.device.name} ({target.device.torch_device}), {target.device.evidence}"]
    for (hook, dtype), declared in sorted(target.capabilities.tolerances.items()):
        lines.append(f"qiao tolerance declared by the plugin: {hook} {dtype} atol {declared.atol} rtol {declared.rtol}")
    return lines
