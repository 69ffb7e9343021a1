"""One usable device: a plugin's plain functions, the device, and what its chip supports."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from qiao.contract import Capabilities, DeviceInfo
from qiao.devices import HOST
from qiao.errors import PluginError
from qiao.registry.manager import Function, LoadedPlugin, load_object


@dataclass(frozen=True, slots=True)
class Backend:
    """What plan and binder need of a device.

    ``hooks`` maps hook names to functions that take the contract's arguments by position. ``host_backend`` is the
    CPU plugin that serves what this one lacks, None where this one is the last resort itself.
    """

    plugin: str
    hooks: Mapping[str, Function]
    device: DeviceInfo
    capabilities: Capabilities
    host_backend: Backend | None = None

    @property
    def host(self) -> Backend:
        """The CPU plugin's backend; the backend itself where it is the last resort."""
        return self.host_backend or self

    @property
    def hosts(self) -> tuple[Backend, ...]:
        """The CPU plugins behind this one, in the order in which they are asked; empty for the last resort."""
        return (self.host_backend, *self.host_backend.hosts) if self.host_backend else ()

    @property
    def on_host(self) -> bool:
        """Whether the device is the CPU, so that nothing is ever copied."""
        return torch_type(self.device.torch_device) == HOST

    def named(self, plugin: str) -> Backend:
        """This backend or the one of its hosts that is called ``plugin``."""
        return next(backend for backend in (self, *self.hosts) if backend.plugin == plugin)


def torch_type(device: str) -> str:
    """The type of a torch device string, without its index."""
    return device.partition(":")[0]


def read_capabilities(plugin: LoadedPlugin, chip: str) -> Capabilities:
    """Ask ``plugin`` what ``chip`` supports.

    Raises ``PluginError`` where the hook raises, returns something else than ``Capabilities``, or one with a field that
    the contract does not allow.
    """
    try:
        found = plugin.hooks["capabilities"](chip)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise PluginError(f"capabilities failed: {type(error).__name__}: {error}") from error
    if not isinstance(found, Capabilities):
        raise PluginError(f"capabilities failed: returned {type(found).__name__}, the contract asks for Capabilities")
    for fault in _capability_faults(found):
        raise PluginError(f"capabilities failed: {fault}")
    return found


def _capability_faults(found: Capabilities) -> Iterator[str]:
    for field in ("dtypes", "kv_dtypes", "kv_layouts", "schemes", "block_sizes", "head_dims"):
        if not isinstance(getattr(found, field), tuple | list):
            yield f"{field} must be a tuple, got {getattr(found, field)!r}"
            return
    if not found.dtypes:
        yield "dtypes is empty: the chip computes in nothing"
    for name in (*found.dtypes, *found.kv_dtypes):
        if not isinstance(name, str) or not isinstance(getattr(torch, name, None), torch.dtype):
            yield f"{name!r} is no dtype: torch's names without the prefix are asked for, as in 'bfloat16'"
    for layout in found.kv_layouts:
        if layout not in ("NHD", "HND", "NZ"):
            yield f"the KV layout {layout!r} is unknown: NHD, HND or NZ"
    for size in (*found.block_sizes, *found.head_dims):
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            yield f"block_sizes and head_dims hold whole numbers of at least 1, got {size!r}"


def probe(plugin: LoadedPlugin) -> tuple[DeviceInfo, ...]:
    """The devices that ``plugin`` finds here, best first; those with score 0 only serve when named.

    Raises ``PluginError`` where the hook raises or returns something that the contract does not allow.
    """
    try:
        found = list(plugin.hooks["probe_devices"]())
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise PluginError(f"probe failed: {type(error).__name__}: {error}") from error
    for info in found:
        if not isinstance(info, DeviceInfo):
            raise PluginError(f"probe failed: returned a {type(info).__name__}, the contract asks for DeviceInfo")
        try:
            torch_name = torch.device(info.torch_device).type
        except (RuntimeError, TypeError) as error:
            message = f"probe failed: {info.name} has no valid torch device, got {info.torch_device!r}: {error}"
            raise PluginError(message) from error
        if not torch_name or info.name.partition(":")[0] != plugin.name:
            raise PluginError(f"probe failed: a device is called {info.name!r}, expected '{plugin.name}:INDEX'")
    return tuple(sorted(found, key=lambda info: -info.score))


def backend_of(plugin: object, name: str, host: Backend | None = None, device: DeviceInfo | None = None) -> Backend:
    """A backend straight from a module or instance with hook implementations, without entry points.

    ``device`` defaults to the first that the plugin's probe finds. ``host`` is needed unless the device is the CPU.
    Raises ``PluginError`` where the plugin is not valid or finds no device.
    """
    loaded = load_object(plugin, name)
    if device is None:
        found = probe(loaded)
        if not found:
            raise PluginError(f"plugin {name} finds no device on this machine")
        device = found[0]
    return make_backend(loaded, device, host)


def make_backend(plugin: LoadedPlugin, device: DeviceInfo, host: Backend | None) -> Backend:
    """Join a loaded plugin, one of its devices, and the host that serves what the plugin lacks.

    Raises ``PluginError`` where a device other than the CPU comes without a host.
    """
    if host is None and torch_type(device.torch_device) != HOST:
        raise PluginError(f"plugin {plugin.name} needs a CPU plugin for what it lacks, none is usable: reinstall qiao")
    if host is not None and host.plugin == plugin.name:
        host = None
    return Backend(plugin.name, plugin.hooks, device, read_capabilities(plugin, device.chip), host)
