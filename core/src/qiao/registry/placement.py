"""Where each operator runs and why: static support first, then whole groups move to the host together."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from qiao.contract import CATALOG, GROUPS, ModelShape, OpSpec
from qiao.devices import did_you_mean
from qiao.errors import ParameterError, PluginError
from qiao.registry.backend import Backend

_FEATURE_OPERATOR = {"KV": "attention", "W": "matmul", "S": "sample"}
"""The operator that a group's static limits are reported at."""


class Kind(str, Enum):
    """How an operator runs: the plugin's hook, the host's, plain torch on the device, or not at all."""

    DEVICE = "device"
    HOST = "host"
    COMPOSITE = "composite"
    UNUSED = "unused"


@dataclass(frozen=True, slots=True)
class Placement:
    """One operator. ``group`` is ``KV``, ``W[scheme]``, ``S`` or empty; ``scheme`` is set for W only.

    ``place`` is the name of the plugin that runs it, ``torch`` for a composite. ``gap`` tells the operators that caused
    a move from those that moved along.
    """

    operator: str
    group: str
    kind: Kind
    place: str
    reason: str
    scheme: str = ""
    gap: bool = False


@dataclass(frozen=True, slots=True)
class Request:
    """What bears on placement beside model and backend.

    ``failed`` maps operators that raised in the start-up probe to what they raised. ``keep`` names groups whose state
    stays on the device although an operator of theirs runs on the host: to price only.
    """

    block_size: int
    drop: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()
    failed: Mapping[str, str] = field(default_factory=dict)


def group_of(spec: OpSpec, scheme: str) -> str:
    """The group's name as users see it: ``KV``, ``W[dense]``, ``S`` or empty."""
    return f"W[{scheme}]" if spec.group == "W" else spec.group


def names_group(name: str, group: str) -> bool:
    """Whether ``name`` (``KV``, ``W``, ``W[dense]``) means ``group``."""
    return bool(group) and name in (group, group.partition("[")[0])


def check_names(names: Sequence[str], what: str, operators: bool) -> tuple[str, ...]:
    """Refuse names that are neither a group nor, where ``operators``, a hook.

    Raises ``ParameterError`` for the field ``what`` with the closest valid name.
    """
    valid = {*GROUPS, *(CATALOG if operators else ())}
    for name in names:
        if name not in valid and not re.fullmatch(r"W\[[a-z0-9]+\]", name):
            raise ParameterError(what, f"no operator or group is called {name!r}.{did_you_mean(name, valid)}")
    return tuple(names)


def check_drop(names: Sequence[str]) -> tuple[str, ...]:
    """Refuse unknown names and hooks without which no device can be used.

    Raises ``ParameterError`` for ``drop``.
    """
    for name in check_names(names, "drop", operators=True):
        spec = CATALOG.get(name)
        if spec is not None and spec.family == "device" and not spec.optional:
            raise ParameterError("drop", f"{name} cannot be dropped: no device works without it")
    return tuple(names)


def place_operators(shape: ModelShape, backend: Backend, request: Request) -> list[Placement]:
    """One placement for each operator that the model may use, matmul operators once for each scheme.

    Raises ``PluginError`` where an operator can run neither on the device nor on the host.
    """
    rows: list[Placement] = []
    for scheme_or_group in ("KV", *shape.schemes, "S", ""):
        specs = _members(scheme_or_group)
        scheme = scheme_or_group if scheme_or_group in shape.schemes else ""
        if scheme_or_group:
            rows.extend(_place_group(specs, scheme, shape, backend, request))
        else:
            rows.extend(_place_single(spec, shape, backend, request) for spec in specs)
    return rows


def _members(group: str) -> list[OpSpec]:
    wanted = group if group in ("KV", "S", "") else "W"
    never_shown = ("probe_devices", "capabilities", "set_threads", "restore_weight", "collective_backend")
    return [spec for spec in CATALOG.values() if spec.group == wanted and spec.name not in never_shown]


def _place_group(
    specs: list[OpSpec], scheme: str, shape: ModelShape, backend: Backend, request: Request
) -> list[Placement]:
    group = group_of(specs[0], scheme)
    gaps = _required_gaps(specs, group, scheme, shape, backend, request)
    if not gaps:
        return [_in_place(spec, group, scheme, backend, request) for spec in specs]
    host = _capable_host(specs, group, scheme, shape, backend, request, gaps)
    kept = any(names_group(name, group) for name in request.keep)
    return [
        _in_place(spec, group, scheme, backend, request)
        if kept and spec.name not in gaps and not _replaced(spec) & gaps.keys()
        else _moved(spec, group, scheme, gaps, host)
        for spec in specs
    ]


def _replaced(spec: OpSpec) -> set[str]:
    """The other operators that an optional hook stands for, empty where it stands only for plain torch."""
    return {name for name in spec.replaces.split(", ") if name and name != spec.name}


def _required_gaps(
    specs: list[OpSpec], group: str, scheme: str, shape: ModelShape, backend: Backend, request: Request
) -> dict[str, str]:
    gaps: dict[str, str] = {}
    for spec in specs:
        gap = _gap(spec, group, backend, request)
        if not gap and spec.name == _FEATURE_OPERATOR[spec.group]:
            gap = unsupported(spec.group, scheme, shape, backend, request.block_size)
        if gap and not spec.optional:
            gaps[spec.name] = gap
    return gaps


def _capable_host(
    specs: list[OpSpec],
    group: str,
    scheme: str,
    shape: ModelShape,
    backend: Backend,
    request: Request,
    gaps: Mapping[str, str],
) -> Backend:
    """The first host that can take the whole group: two plugins never share one state, their forms of it differ."""
    refusals = [f"{backend.plugin}: {_list(gaps)}"]
    for host in backend.hosts:
        missing = _required_gaps(specs, group, scheme, shape, host, Request(request.block_size))
        if not missing:
            return host
        refusals.append(f"{host.plugin}: {_list(missing)}")
    raise PluginError(f"{group} can run nowhere. " + ". ".join(refusals))


def _moved(spec: OpSpec, group: str, scheme: str, gaps: Mapping[str, str], host: Backend) -> Placement:
    # On the host a hook that stands for others would copy more (the rotation can stay on the device) or hide which one
    # the user asked about, so there the operators that it stands for are used.
    if spec.optional and (spec.name not in host.hooks or _replaced(spec)):
        kind, place = _without(spec)
        return Placement(spec.name, group, kind, place, f"{group} is on the host", scheme)
    gap = spec.name in gaps
    reason = gaps[spec.name] if gap else f"moves with {', '.join(gaps)} ({group})"
    return Placement(spec.name, group, Kind.HOST, host.plugin, reason, scheme, gap)


def _in_place(spec: OpSpec, group: str, scheme: str, backend: Backend, request: Request) -> Placement:
    gap = _gap(spec, group, backend, request)
    if not gap:
        return Placement(spec.name, group, Kind.DEVICE, backend.plugin, "", scheme)
    kind, place = _without(spec)
    return Placement(spec.name, group, kind, place, gap, scheme)


def _place_single(spec: OpSpec, shape: ModelShape, backend: Backend, request: Request) -> Placement:
    gap = _gap(spec, "", backend, request)
    if not gap and spec.family == "fused":
        gap = _dtype_gap(shape.dtype, backend.capabilities.dtypes, backend)
    if not gap:
        return Placement(spec.name, "", Kind.DEVICE, backend.plugin, "")
    kind, place = _without(spec)
    return Placement(spec.name, "", kind, place, gap)


def _without(spec: OpSpec) -> tuple[Kind, str]:
    """What an optional hook's absence means: the sequence of the same name in torch, or nothing."""
    return (Kind.COMPOSITE, "torch") if spec.replaces == spec.name else (Kind.UNUSED, "")


def _gap(spec: OpSpec, group: str, backend: Backend, request: Request) -> str:
    dropped = spec.name in request.drop or any(names_group(name, group) for name in request.drop)
    if dropped:
        return "left out by --drop"
    if spec.name in request.failed:
        return request.failed[spec.name]
    if spec.name not in backend.hooks:
        return f"{backend.plugin} does not implement it"
    return ""


def unsupported(group: str, scheme: str, shape: ModelShape, backend: Backend, block_size: int) -> str:
    """Why the chip's declared capabilities rule out ``group`` for this model, empty where they do not."""
    capabilities = backend.capabilities
    if group == "W":
        if scheme not in capabilities.schemes:
            return f"{backend.plugin} takes the schemes {', '.join(capabilities.schemes) or 'none'}, not {scheme}"
        return _dtype_gap(shape.dtype, capabilities.dtypes, backend)
    return _cache_gap(shape, backend, block_size) if group == "KV" else ""


def _cache_gap(shape: ModelShape, backend: Backend, block_size: int) -> str:
    can = backend.capabilities
    gap = _dtype_gap(shape.dtype, can.dtypes, backend)
    if gap:
        return gap
    kept = can.kv_dtypes or can.dtypes
    if shape.cache_dtype not in kept:
        remedy = ": set --kv-cache-dtype" if shape.kv_dtype else ""
        return f"{backend.plugin} keeps a cache of {', '.join(kept)}, not of {shape.cache_dtype}{remedy}"
    if not can.kv_layouts:
        return f"{backend.plugin} declares no KV layout"
    if can.block_sizes and block_size not in can.block_sizes:
        sizes = ", ".join(map(str, can.block_sizes))
        return f"{backend.plugin} takes KV blocks of {sizes} tokens, not {block_size}: set --block-size"
    for a in shape.attention:
        if can.head_dims and a.head_dim not in can.head_dims:
            return f"{backend.plugin} takes head sizes {', '.join(map(str, can.head_dims))}, not {a.head_dim}"
        if a.sliding_window and not can.sliding_window:
            return f"{backend.plugin} has no sliding window, the model uses {a.sliding_window}"
        if a.soft_cap and not can.soft_cap:
            return f"{backend.plugin} has no soft cap, the model uses {a.soft_cap}"
    return ""


def _dtype_gap(dtype: str, supported: Sequence[str], backend: Backend) -> str:
    if dtype in supported:
        return ""
    return f"{backend.plugin} computes in {', '.join(supported) or 'no dtype'}, not in {dtype}"


def _list(gaps: Mapping[str, str]) -> str:
    return "; ".join(f"{operator} ({reason})" for operator, reason in gaps.items())
