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
    """Says what is tested."""
    if not config.getoption(_OPTION):
        return []
    from qiao_conformance.kit import target_of

    device = target_of(config).device
    return [f"qiao device: {device.name} ({device.torch_device}), {device.evidence}"]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Says, in quiet runs as well, which tolerances the plugin asked to loosen."""
    if not config.getoption(_OPTION):
        return
    from qiao_conformance.kit import target_of

    for (hook, dtype), loose in sorted(target_of(config).capabilities.tolerances.items()):
        terminalreporter.write_line(f"looser by the plugin's wish: {hook} {dtype} atol {loose.atol} rtol {loose.rtol}")
