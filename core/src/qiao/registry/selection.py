"""From what the user typed to one backend. A device that was named is used or refused, never replaced."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from dataclasses import replace

from packaging.utils import canonicalize_name

from qiao.contract import DeviceInfo
from qiao.devices import AUTO, HOST, KnownPackages, known_packages, remedy_for
from qiao.errors import ParameterError, PluginError
from qiao.registry.backend import Backend, make_backend, read_capabilities, torch_type
from qiao.registry.discovery import FOUND, Discovery, PluginRecord, allowed_plugins, discover
from qiao.registry.manager import load
from qiao.registry.survey import Surveyed, claims, skipped, survey, survey_one

log = logging.getLogger(__name__)


def choose(device: str = AUTO, discovery: Discovery | None = None) -> Backend:
    """The backend for ``device``: ``auto``, a plugin's name, ``plugin:index``, or a torch device string.

    ``auto`` takes the accelerator that claims this machine, else the CPU; a plugin that cannot be used is skipped with
    one warning. Anything else names one device. ``discovery`` defaults to this environment's, filtered by
    ``QIAO_PLUGINS``. Raises ``PluginError`` where the named device cannot be used or ``auto`` is ambiguous.
    """
    if not device or not device.strip():
        raise ParameterError("device", "must not be empty: use auto, cpu, or a name that `qiao plugins` lists")
    if discovery is None:
        discovery = discover(allowed_plugins(os.environ))
    device = device.strip()
    return _automatic(discovery) if device == AUTO else _named(device, discovery)


def planning_backend(device: str, discovery: Discovery | None = None, chip: str = "") -> Backend:
    """A backend to plan with: no device of this machine is needed, only the plugin's ``capabilities`` hook.

    ``chip`` is a name that the plugin knows, empty for its usual one. Such a backend can be priced; binding it works
    only where the device exists. Raises ``PluginError`` where no such plugin is installed or it cannot be loaded,
    ``ParameterError`` for a chip of no named plugin.
    """
    if chip and device in (AUTO, HOST):
        raise ParameterError("chip", f"belongs to one plugin, and the device is {device}; name one as the device")
    if discovery is None:
        discovery = discover(allowed_plugins(os.environ))
    if device == AUTO:
        return choose(device, discovery)
    name, _, index = device.partition(":")
    known = known_packages()
    if name == HOST:
        return _host(discovery, known)
    record = discovery.named(name) or _by_package(name, discovery, known)
    if record is None or record.status != FOUND:
        return choose(device, discovery)
    try:
        plugin = load(record, discovery.core_version)
        read_capabilities(plugin, chip)
    except PluginError as error:
        raise PluginError(f"device {device!r} cannot be planned: plugin {_origin(record)}: {error}") from error
    info = DeviceInfo(f"{record.name}:{index or 0}", record.name, chip, 0, "planned from capabilities, not probed")
    if record.name in known.hosts:
        info = replace(info, torch_device=HOST)
    return make_backend(plugin, info, _host(discovery, known))


def _automatic(discovery: Discovery) -> Backend:
    surveyed = survey(discovery)
    _warn_of(surveyed)
    claimants = [item for item in surveyed if claims(item, host=False)]
    host = _best_host(surveyed, known_packages())
    if len(claimants) > 1:
        found = "; ".join(
            f"{item.record.name} ({item.record.distribution}): {claims(item, host=False)[0].evidence}"
            for item in claimants
        )
        options = " or ".join(f"--device {item.record.name}" for item in claimants)
        raise PluginError(f"several plugins claim this machine: {found}. Choose one with {options}")
    if not claimants:
        return host
    plugin = claimants[0].plugin
    assert plugin is not None  # a plugin without a module claims nothing
    return make_backend(plugin, claims(claimants[0], host=False)[0], host)


def _named(device: str, discovery: Discovery) -> Backend:
    known = known_packages()
    name, _, index = device.partition(":")
    if index and not index.isdigit():
        raise PluginError(f"device {device!r}: the part after ':' must be a number, as in {name}:0")
    version = discovery.core_version
    if name == HOST:
        return _host(discovery, known)
    record = discovery.named(name) or _by_package(name, discovery, known)
    asked = survey_one(record, version) if record else None
    if asked and asked.usable:
        return _with_host(asked, _pick(device, asked.usable), discovery, known)
    others = [survey_one(r, version) for r in discovery.records if record is None or r.name != record.name]
    same = [item for item in others if any(torch_type(d.torch_device) == name for d in item.usable)]
    if len(same) > 1:
        owners = " and ".join(f"{item.record.name} ({item.usable[0].evidence})" for item in same)
        raise PluginError(f"device {device!r} is claimed by {owners}: choose with --device {same[0].record.name}")
    if same:
        return _with_host(same[0], _pick(device, same[0].usable), discovery, known)
    raise PluginError(_explain(device, name, asked, others, known))


def _pick(device: str, found: tuple[DeviceInfo, ...]) -> DeviceInfo:
    name, _, index = device.partition(":")
    if not index:
        return found[0]
    for info in found:
        if info.name == device or (info.torch_device == device and torch_type(info.torch_device) == name):
            return info
    present = ", ".join(sorted(f"{info.name} ({info.torch_device})" for info in found))
    raise PluginError(f"device {device!r} does not exist on this machine; present: {present}")


def _with_host(item: Surveyed, info: DeviceInfo, discovery: Discovery, known: KnownPackages) -> Backend:
    assert item.plugin is not None  # only loaded plugins have usable devices
    if torch_type(info.torch_device) == HOST:
        return make_backend(item.plugin, info, _best_host(_hosts(discovery, (known.builtin_name,)), known))
    return make_backend(item.plugin, info, _host(discovery, known))


def _host(discovery: Discovery, known: KnownPackages) -> Backend:
    return _best_host(_hosts(discovery, known.hosts), known)


def _hosts(discovery: Discovery, names: tuple[str, ...]) -> list[Surveyed]:
    surveyed = [survey_one(r, discovery.core_version) for r in discovery.records if r.name in names]
    _warn_of(surveyed)
    return surveyed


def _warn_of(surveyed: Iterable[Surveyed]) -> None:
    for record in skipped(surveyed):
        log.warning("plugin %s skipped: %s", _origin(record), record.reason)


def _best_host(surveyed: list[Surveyed] | tuple[Surveyed, ...], known: KnownPackages) -> Backend:
    """The CPU plugin with the highest score; behind it the one that ships with the core, which can do everything."""
    found = [(info, item.plugin) for item in surveyed for info in claims(item, host=True) if item.plugin]
    if not found:
        reasons = "; ".join(f"{item.record.name}: {item.verdict}" for item in surveyed if item.verdict)
        raise PluginError(f"no CPU plugin is usable ({reasons or 'none is installed'}): reinstall qiao")
    last = next(((info, plugin) for info, plugin in found if plugin.name == known.builtin_name), None)
    behind = make_backend(last[1], last[0], None) if last else None
    info, plugin = max(found, key=lambda entry: entry[0].score)
    return make_backend(plugin, info, behind)


def _by_package(name: str, discovery: Discovery, known: KnownPackages) -> PluginRecord | None:
    device = known.devices.get(name)
    if device is None or not device.package:
        return None
    owned = (r for r in discovery.records if canonicalize_name(r.distribution) == device.package)
    return next(owned, None)


def _origin(record: PluginRecord) -> str:
    return f"{record.name} of {record.distribution} {record.version}"


def _explain(device: str, name: str, asked: Surveyed | None, others: list[Surveyed], known: KnownPackages) -> str:
    everything = others + ([asked] if asked else [])
    usable = [f"{info.name} ({info.evidence})" for item in everything for info in item.usable]
    here = f" Usable here: {', '.join(usable)}, or --device {AUTO}." if usable else ""
    if asked:
        return f"device {device!r} cannot be used: plugin {_origin(asked.record)}: {asked.verdict}.{here}"
    remedy = remedy_for(name, [item.record.name for item in everything], known)
    return f"device {device!r} is not available: {remedy}{here}"
