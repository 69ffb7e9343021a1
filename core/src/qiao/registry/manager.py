"""Import one plugin, check it against the contract, and take plain functions out of it.

pluggy registers and identifies hook implementations; nothing that leaves this module refers to it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from importlib import import_module
from types import MappingProxyType
from typing import Any

import pluggy

from qiao.contract import CATALOG, PROJECT, SPECS
from qiao.devices import did_you_mean
from qiao.errors import PluginError
from qiao.registry.discovery import CORE_DISTRIBUTION, PluginRecord

Function = Callable[..., Any]

_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True, slots=True)
class LoadedPlugin:
    """A valid plugin: its hooks as functions that take the contract's arguments by position, in its order."""

    name: str
    hooks: Mapping[str, Function]


def load(record: PluginRecord, core_version: str) -> LoadedPlugin:
    """Import the plugin of ``record`` and check it.

    Raises ``PluginError`` with the reason, whatever went wrong inside the plugin, so that a broken one harms no other.
    """
    try:
        plugin = _import(record.target)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a plugin may raise anything on import, SystemExit included
        raise PluginError(_import_reason(record, error, core_version)) from error
    return load_object(plugin, record.name)


def load_object(plugin: object, name: str) -> LoadedPlugin:
    """Check a module or an instance that holds hook implementations.

    Raises ``PluginError`` naming each unknown hook, wrong argument, forbidden default and missing required hook.
    """
    if inspect.isclass(plugin):
        raise PluginError(f"the entry point is the class {plugin.__name__}: name a module or an instance instead")
    manager = pluggy.PluginManager(PROJECT)
    for spec in SPECS:
        manager.add_hookspecs(spec)
    faults: list[str] = []
    found: dict[str, tuple[str, Function]] = {}
    for attribute in dir(plugin):
        options = manager.parse_hookimpl_opts(plugin, attribute)
        if options is None:
            continue
        hook = options.get("specname") or attribute
        if hook not in CATALOG:
            if not options.get("optionalhook"):
                faults.append(f"unknown hook {hook!r}.{did_you_mean(hook, CATALOG)}")
            continue
        if options.get("hookwrapper") or options.get("wrapper"):
            faults.append(f"{hook}: hook wrappers are not part of the contract, implement the hook itself")
            continue
        if hook in found:
            faults.append(f"{hook}: implemented twice, by {found[hook][0]} and {attribute}")
            continue
        function = getattr(plugin, attribute)
        found[hook] = (attribute, function)
        faults.extend(_argument_faults(hook, function))
    faults.extend(_missing_hooks(found))
    if faults:
        raise PluginError("; ".join(faults))
    return LoadedPlugin(name, MappingProxyType(_extract(manager, plugin, name)))


def _import(target: str) -> object:
    module, _, path = target.partition(":")
    found: object = import_module(module.strip())
    for part in filter(None, path.strip().split(".")):
        found = getattr(found, part)
    return found


def _import_reason(record: PluginRecord, error: BaseException, core_version: str) -> str:
    declared = f"it declares {CORE_DISTRIBUTION}{record.requires}" if record.requires else "it declares no core range"
    versions = f"{record.distribution} {record.version}, {declared}, the core is {core_version}"
    missing = error.name if isinstance(error, ImportError) else None
    if missing and missing.split(".")[0] == CORE_DISTRIBUTION:
        return (
            f"import failed: {error} ({versions}): it was made for another version of the core, "
            f"install matching versions of {CORE_DISTRIBUTION} and {record.distribution}"
        )
    if isinstance(error, ModuleNotFoundError) and missing:
        return (
            f"import failed: module {missing!r} is missing ({versions}): install what provides {missing!r} "
            f"(see the README of {record.distribution}), or uninstall {record.distribution}"
        )
    return (
        f"import failed: {type(error).__name__}: {error} ({versions}): "
        f"see the README of {record.distribution}, or uninstall it"
    )


def _argument_faults(hook: str, function: Function) -> list[str]:
    known = [operand.name for operand in CATALOG[hook].args]
    faults = []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in _VARIADIC or parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            faults.append(f"{hook}: argument {name!r} must be an ordinary positional argument")
        elif name not in known:
            expected = ", ".join(known) or "none"
            hint = did_you_mean(name, known)
            faults.append(f"{hook}: unknown argument {name!r}, the contract has: {expected}.{hint}")
        elif parameter.default is not inspect.Parameter.empty:
            faults.append(f"{hook}: argument {name!r} must not have a default, the core always passes it")
    return faults


def _missing_hooks(found: Mapping[str, object]) -> list[str]:
    required = [op.name for op in CATALOG.values() if op.family == "device" and not op.optional]
    return [f"required hook {name!r} is missing" for name in required if name not in found]


def _extract(manager: pluggy.PluginManager, plugin: object, name: str) -> dict[str, Function]:
    manager.register(plugin, name)
    hooks: dict[str, Function] = {}
    for caller in manager.get_hookcallers(plugin) or ():
        if caller.name not in CATALOG:  # made for a newer minor version, declared optional
            continue
        implementation = next(impl for impl in caller.get_hookimpls() if impl.plugin is plugin)
        wanted = tuple(operand.name for operand in CATALOG[caller.name].args)
        hooks[caller.name] = _positional(implementation.function, tuple(implementation.argnames), wanted)
    return hooks


def _positional(function: Function, names: tuple[str, ...], wanted: tuple[str, ...]) -> Function:
    if names == wanted:
        return function
    order = tuple(wanted.index(name) for name in names)

    @wraps(function)
    def reordered(*args: Any) -> Any:
        return function(*[args[i] for i in order])

    return reordered
