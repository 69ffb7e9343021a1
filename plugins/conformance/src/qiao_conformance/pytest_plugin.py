"""``pytest --qiao-device NAME`` runs the kit on the plugin NAME; with paths after it, these run as well."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from qiao_conformance.results import Results

_OPTION = "--qiao-device"
_KIT = ("kit.py", "speed.py")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options."""
    group = parser.getgroup("qiao")
    text = "run Qiao's conformance kit on this plugin, or on one device of it (NAME:INDEX)"
    group.addoption(_OPTION, metavar="NAME", default=None, help=text)
    group.addoption("--qiao-examples", type=int, default=25, metavar="N", help="drawn cases for each hook (25)")
    group.addoption("--qiao-performance", action="store_true", help="measure each hook as well")
    group.addoption("--qiao-coverage", metavar="FILE", default=None, help="write what holds to this coverage.json")
    text = "how the device is there: device (the usual), vendor-host, compiled, interpreted, stand-in; after a comma "
    text += "HOOK=LEVEL where a hook was there in another way"
    group.addoption("--qiao-level", metavar="LEVEL", default="device", help=text)


def pytest_configure(config: pytest.Config) -> None:
    """Adds the kit to what is collected; it replaces the project's own default paths."""
    if not config.getoption(_OPTION):
        return
    from qiao_conformance.coverage import read_levels

    try:
        read_levels(config.getoption("--qiao-level"))
    except ValueError as error:
        raise pytest.UsageError(f"--qiao-level: {error}") from error
    if config.args_source is not pytest.Config.ArgsSource.ARGS:
        config.args.clear()
    for name in _KIT if config.getoption("--qiao-performance") else _KIT[:1]:
        path = str(Path(__file__).with_name(name))
        if path not in config.args:
            config.args.append(path)
    if not hasattr(config, "workerinput"):  # with xdist only the main process sums up
        config.pluginmanager.register(_Collector(config), "qiao-results")


def results_of(config: pytest.Config) -> Results:
    """What has been found so far in this session."""
    collector = config.pluginmanager.getplugin("qiao-results")
    assert isinstance(collector, _Collector)
    return collector.results


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Says of each item of the kit what it checks, for the reports."""
    if not config.getoption(_OPTION):
        return
    from qiao_conformance.kit import target_of
    from qiao_conformance.results import TAG, tag_of

    hooks = target_of(config).hooks
    for item in items:
        if Path(item.path).parent == Path(__file__).parent:
            item.user_properties.append((TAG, tag_of(item, hooks)))  # type: ignore[arg-type]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Keeps what a failed check says, without the traceback."""
    if (
        call.excinfo is not None
        and item.config.getoption(_OPTION)
        and not call.excinfo.errisinstance(pytest.skip.Exception)
    ):
        from qiao_conformance.results import message_of

        item.user_properties.append(("qiao_message", message_of(call.excinfo.value)))
    return (yield)


class _Collector:
    """Sums up one session and writes the coverage file at its end."""

    def __init__(self, config: pytest.Config) -> None:
        from qiao_conformance.results import Results

        self.config, self.results = config, Results()
        self.note = ""

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        self.results.partial = True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.results.add(report)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        file = self.config.getoption("--qiao-coverage")
        if not file or not self.results.tallies:
            return
        if self.results.partial or session.shouldstop or session.shouldfail:
            self.note = f"{file} is not written: this run left checks out"
            return
        from qiao_conformance import coverage
        from qiao_conformance.kit import target_of

        target = target_of(self.config)
        entry = coverage.chip_entry(
            target, self.results.tallies, self.config.getoption("--qiao-level"), date.today().isoformat()
        )
        coverage.write(Path(file), target, entry)
        self.note = f"wrote {file}"


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Says what is tested."""
    if not config.getoption(_OPTION):
        return []
    from qiao_conformance.kit import target_of

    device = target_of(config).device
    return [f"qiao device: {device.name} ({device.torch_device}), {device.evidence}"]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Says, in quiet runs as well, which tolerances the plugin asked to loosen, and what was measured."""
    if not config.getoption(_OPTION):
        return
    from qiao_conformance.kit import target_of

    for (hook, dtype), loose in sorted(target_of(config).capabilities.tolerances.items()):
        terminalreporter.write_line(f"looser by the plugin's wish: {hook} {dtype} atol {loose.atol} rtol {loose.rtol}")
    for line in results_of(config).measured:
        speed = f"{line['microseconds']:>12,.1f} us {line['bytes_per_second'] / 1e9:>9.3f} GB/s"
        terminalreporter.write_line(f"{speed}  {line['case']}")
    collector = config.pluginmanager.getplugin("qiao-results")
    if collector is not None and collector.note:
        terminalreporter.write_line(collector.note)
