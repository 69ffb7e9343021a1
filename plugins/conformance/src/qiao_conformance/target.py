"""The plugin under test, found by its entry point, and what its results are compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from qiao.contract import CATALOG, GROUP, Capabilities, DeviceInfo, KVCache, Tolerance
from qiao.contract.cases import Case, LooseCache, LooseWeight, place
from qiao.errors import PluginError
from qiao.registry.backend import probe, read_capabilities
from qiao.registry.discovery import discover
from qiao.registry.manager import load


@dataclass(frozen=True)
class Target:
    """One device of one plugin."""

    name: str
    hooks: Mapping[str, Callable[..., Any]]
    device: DeviceInfo
    capabilities: Capabilities
    distribution: str = ""
    version: str = ""

    def tolerance(self, hook: str, dtype: str, scheme: str = "") -> Tolerance:
        """The catalog's, or the looser one that the plugin declares, be it for one weight format or for all."""
        usual = CATALOG[hook].tolerance[dtype]
        found = self.capabilities.tolerances
        declared = found.get((f"{hook}.{scheme}", dtype), found.get((hook, dtype)))
        if declared is None:
            return usual
        return Tolerance(max(usual.atol, declared.atol), max(usual.rtol, declared.rtol))

    def placed(self, case: Case) -> dict[str, Any]:
        """The case's arguments on the device, but those that the contract has on the host."""
        device = self.device.torch_device
        found = {}
        for operand in CATALOG[case.hook].args:
            value = device if operand.name == "device" else case.arguments[operand.name]
            stays = operand.place == "host" and isinstance(value, torch.Tensor)
            found[operand.name] = value.clone() if stays else place(value, self.hooks, device)
        return found

    def call(self, hook: str, arguments: Mapping[str, Any]) -> Any:
        """Call and wait, so that a late fault raises here."""
        result = self.hooks[hook](*arguments.values())
        self.hooks["synchronize"](self.device.torch_device)
        return result


def find(asked: str) -> Target:
    """The target for ``asked``, a plugin's name or ``plugin:index``, loaded and checked as Qiao itself does.

    Raises ``LookupError`` saying what there is, or what is wrong with the plugin.
    """
    name, _, index = asked.partition(":")
    discovery = discover()
    record = discovery.named(name)
    if record is None:
        names = sorted({r.name for r in discovery.records})
        raise LookupError(f"no plugin {name!r} in group {GROUP}; installed: {', '.join(names) or 'none'}")
    if record.reason:
        raise LookupError(f"plugin {name!r} cannot be used: {record.reason}")
    try:
        plugin = load(record, discovery.core_version)
        devices = probe(plugin)
        chosen = [d for d in devices if not index or d.name == asked]
        if not chosen:
            raise LookupError(f"plugin {name!r} finds no such device; it finds {[d.name for d in devices]}")
        capabilities = read_capabilities(plugin, chosen[0].chip)
    except PluginError as error:
        raise LookupError(f"plugin {name!r} cannot be used: {error}") from error
    origin = (record.distribution, record.version)
    return Target(name, plugin.hooks, chosen[0], capabilities, *origin)


def host(value: Any) -> Any:
    """``value`` with all tensors copied to the host, for comparing before and after."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: host(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {k: host(v) for k, v in value.items()}
    return tuple(host(v) for v in value) if isinstance(value, tuple) else value


def same(a: Any, b: Any) -> bool:
    """Equal to the bit, NaN included."""
    if isinstance(a, torch.Tensor):
        equal = a.shape == b.shape and a.dtype == b.dtype
        return equal and bool(((a == b) | ((a != a) & (b != b))).all())
    if isinstance(a, dict):
        return all(same(a[k], b[k]) for k in a)
    if isinstance(a, tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def worst(got: torch.Tensor, want: torch.Tensor, tolerance: Tolerance) -> tuple[float, int]:
    """The largest ``|a - b| / (atol + rtol |b|)`` and its flat index; infinite for a NaN or a wrong shape."""
    if got.shape != want.shape:
        return float("inf"), 0
    a, b = got.detach().cpu().double().flatten(), want.double().flatten()
    if not a.numel():
        return 0.0, 0
    allowed = tolerance.atol + tolerance.rtol * b.abs()
    gap = (a - b).abs()
    ratio = torch.where(gap == 0, torch.zeros_like(gap), gap / allowed)  # 0 / 0 where exactness is asked for and met
    ratio = torch.where((a == b) | (a.isnan() & b.isnan()), torch.zeros_like(ratio), ratio)  # equal infinities
    ratio = torch.nan_to_num(ratio, nan=float("inf"), posinf=float("inf"))
    index = int(ratio.argmax())
    return float(ratio[index]), index


def flat_rows(cache: KVCache) -> tuple[torch.Tensor, torch.Tensor]:
    """Key and value on the host as float64 [slots, K, D], codes times their scales.

    Raises ``LookupError`` for a layout that only the plugin knows.
    """
    if cache.layout not in ("NHD", "HND"):
        raise LookupError(f"layout {cache.layout} cannot be read from outside")
    parts = [host(x).double() for x in (cache.key, cache.value)]
    if cache.key_scale is not None and cache.value_scale is not None:
        scales = [host(x).double()[..., None] for x in (cache.key_scale, cache.value_scale)]
        parts = [part * scale for part, scale in zip(parts, scales, strict=True)]
    key, value = (x.transpose(1, 2) if cache.layout == "HND" else x for x in parts)
    return key.flatten(0, 1), value.flatten(0, 1)


__all__ = ["LooseCache", "LooseWeight", "Target", "find", "flat_rows", "host", "same", "worst"]
