"""Which plugins are installed: entry points are read by name, nothing is imported."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from importlib.util import find_spec

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from qiao.contract import GROUP, GROUP_PREFIX
from qiao.devices import known_packages

ALLOW_LIST_VARIABLE = "QIAO_PLUGINS"
"""Environment variable with the comma-separated names of the plugins that may be loaded; unset means all."""

CORE_DISTRIBUTION = "qiao"

FOUND, READY, QUARANTINED, IGNORED = "found", "ready", "quarantined", "ignored"


@dataclass(frozen=True, slots=True)
class PluginRecord:
    """One entry point.

    ``status`` is ``found`` (not imported yet), ``ready`` (imported and valid), ``quarantined`` or ``ignored`` (not on
    the allow-list); ``reason`` explains the last two. ``target`` is ``module`` or ``module:object``. ``requires`` is
    the range of core versions that the distribution declares, empty if none. ``hooks`` is filled by loading.
    """

    name: str
    distribution: str
    version: str
    group: str
    target: str
    status: str = FOUND
    reason: str = ""
    requires: str = ""
    hooks: tuple[str, ...] = ()

    def quarantined(self, reason: str) -> PluginRecord:
        """The same record, put aside for ``reason``."""
        return replace(self, status=QUARANTINED, reason=reason)


@dataclass(frozen=True, slots=True)
class Discovery:
    """All records, by name, and the version of the core that looked."""

    records: tuple[PluginRecord, ...]
    core_version: str

    def named(self, name: str) -> PluginRecord | None:
        """The record of the plugin ``name``, one that may load before one that may not."""
        mine = [record for record in self.records if record.name == name]
        return next((record for record in mine if record.status == FOUND), mine[0] if mine else None)


def allowed_plugins(environment: Mapping[str, str]) -> tuple[str, ...] | None:
    """The allow-list of ``QIAO_PLUGINS`` in ``environment``, None where it is unset or empty."""
    names = tuple(n.strip() for n in environment.get(ALLOW_LIST_VARIABLE, "").split(",") if n.strip())
    return names or None


def core_version() -> str:
    """The installed version of the core, ``0`` where it runs from a tree without metadata."""
    try:
        return metadata.version(CORE_DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return "0"


def discover(allowed: Sequence[str] | None = None) -> Discovery:
    """Read the entry points of this environment without importing any plugin.

    ``allowed`` restricts which plugins may load; the plugin that ships with the core always may, as the last resort.
    A plugin of another contract version, outside its own declared range of core versions, or with a
    name that two distributions claim is recorded as quarantined.
    """
    version = core_version()
    known = known_packages()
    records = [_checked(record, version) for record in _entry_points()]
    if not any(r.name == known.builtin_name and r.group == GROUP for r in records) and find_spec(known.builtin_module):
        # Metadata can be missing (a source tree, a frozen program); the last resort must not depend on it.
        records.append(PluginRecord(known.builtin_name, CORE_DISTRIBUTION, version, GROUP, known.builtin_module))
    records = _without_duplicates(records)
    if allowed is not None:
        records = [_filtered(record, allowed, known.builtin_name) for record in records]
    return Discovery(tuple(sorted(records, key=lambda r: (r.name, r.distribution, r.group))), version)


def _entry_points() -> Iterator[PluginRecord]:
    seen: set[str] = set()
    for distribution in metadata.distributions():
        try:
            if not _ours(distribution):  # its name need not be known, which is in a file that takes long to parse
                continue
            name = canonicalize_name(distribution.name)
            distribution = metadata.distribution(name)  # the first of that name, not an older copy down sys.path
            points = _ours(distribution)
        except Exception:  # noqa: S112 - a package with unreadable metadata is none of ours and harms no other
            continue
        if name in seen:
            continue
        seen.add(name)
        for point in points:
            requires = _declared_range(distribution.requires or [])
            version = distribution.version or "unknown"
            yield PluginRecord(point.name, distribution.name, version, point.group, point.value, requires=requires)


def _ours(distribution: metadata.Distribution) -> list[metadata.EntryPoint]:
    return [point for point in distribution.entry_points if point.group.startswith(GROUP_PREFIX)]


def _declared_range(requirements: Iterable[str]) -> str:
    for text in requirements:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        if canonicalize_name(requirement.name) != CORE_DISTRIBUTION:
            continue
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            return str(requirement.specifier)
    return ""


def _checked(record: PluginRecord, version: str) -> PluginRecord:
    if record.group != GROUP:
        return record.quarantined(
            f"implements contract {record.group}, this core {version} speaks {GROUP}: "
            f"install a version of {record.distribution} made for {GROUP}"
        )
    if record.requires and not Requirement(f"{CORE_DISTRIBUTION}{record.requires}").specifier.contains(
        version, prereleases=True
    ):
        return record.quarantined(
            f"declares {CORE_DISTRIBUTION}{record.requires}, the core is {version}: "
            f"install matching versions of {CORE_DISTRIBUTION} and {record.distribution}"
        )
    return record


def _without_duplicates(records: list[PluginRecord]) -> list[PluginRecord]:
    result = []
    for record in records:
        rivals = [r for r in records if r.name == record.name and r.group == record.group == GROUP]
        built_in = canonicalize_name(record.distribution) == CORE_DISTRIBUTION
        if len(rivals) > 1 and not built_in:
            owners = " and ".join(sorted(f"{r.distribution} {r.version}" for r in rivals))
            record = record.quarantined(
                f"the plugin name {record.name!r} is claimed by both {owners}: uninstall all but one of them"
            )
        result.append(record)
    return result


def _filtered(record: PluginRecord, allowed: Sequence[str], builtin: str) -> PluginRecord:
    if record.name in allowed or record.name == builtin:
        return record
    return replace(record, status=IGNORED, reason=f"not named in {ALLOW_LIST_VARIABLE}={','.join(allowed)}")
