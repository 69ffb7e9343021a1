"""Load and probe plugins, each on its own, and keep what went wrong beside what works."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from qiao.contract import DeviceInfo
from qiao.devices import HOST
from qiao.errors import PluginError
from qiao.registry.backend import probe, read_capabilities, torch_type
from qiao.registry.discovery import FOUND, QUARANTINED, READY, Discovery, PluginRecord
from qiao.registry.manager import LoadedPlugin, load


@dataclass(frozen=True, slots=True)
class Surveyed:
    """One plugin after loading and probing. ``plugin`` is None where it could not be loaded."""

    record: PluginRecord
    plugin: LoadedPlugin | None = None
    devices: tuple[DeviceInfo, ...] = ()

    @property
    def usable(self) -> tuple[DeviceInfo, ...]:
        """The devices that can be asked for by name, best first; those with score 0 are never chosen unasked."""
        return self.devices if self.record.status == READY else ()

    @property
    def verdict(self) -> str:
        """One line on why there is no usable device, empty where there is one."""
        if self.record.reason:
            return self.record.reason
        if self.usable:
            return ""
        return "it finds no device on this machine"


def survey_one(record: PluginRecord, core_version: str) -> Surveyed:
    """Import, check and probe one plugin; whatever it raises becomes the record's reason."""
    if record.status != FOUND:
        return Surveyed(record)
    try:
        plugin = load(record, core_version)
    except PluginError as error:
        return Surveyed(record.quarantined(str(error)))
    record = replace(record, status=READY, hooks=tuple(sorted(plugin.hooks)))
    devices: tuple[DeviceInfo, ...] = ()
    try:
        devices = probe(plugin)
        for chip in dict.fromkeys(device.chip for device in devices):
            read_capabilities(plugin, chip)
    except PluginError as error:
        record = record.quarantined(str(error))
    return Surveyed(record, plugin, devices)


def survey(discovery: Discovery) -> tuple[Surveyed, ...]:
    """Every plugin of ``discovery``, loaded and probed where that is allowed."""
    return tuple(survey_one(record, discovery.core_version) for record in discovery.records)


def skipped(plugins: Iterable[Surveyed]) -> list[PluginRecord]:
    """The records that were put aside with a reason."""
    return [item.record for item in plugins if item.record.status == QUARANTINED]


def claims(item: Surveyed, host: bool) -> tuple[DeviceInfo, ...]:
    """The devices that ``item`` claims without being asked and that are the CPU (``host``) or are not."""
    return tuple(d for d in item.usable if d.score > 0 and (torch_type(d.torch_device) == HOST) == host)
