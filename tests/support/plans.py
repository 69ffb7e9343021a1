"""Backends and shapes to plan with; nothing here runs on a device."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from qiao.contract import Capabilities, ModelShape
from qiao.models import describe
from qiao.registry import Backend, backend_of
from qiao.registry.backend import make_backend
from qiao.registry.manager import LoadedPlugin

from tests.support.plugins import module_with

CONFIGS = Path(__file__).parents[2] / "examples" / "configs"


def shape_of(name: str) -> ModelShape:
    """The shape of an example config."""
    return describe(json.loads((CONFIGS / f"{name}.json").read_text()))


def host() -> Backend:
    """The reference plugin on the CPU."""
    import qiao_reference

    return backend_of(qiao_reference, "reference")


def device(missing: Sequence[str] = (), behind: Backend | None = None, **capabilities: Any) -> Backend:
    """A full plugin on a device that is not the CPU, but for ``missing`` hooks and changed ``capabilities``."""
    behind = behind or host()
    facts = replace(Capabilities(("bfloat16", "float32"), schemes=("dense", "w4a16")), **capabilities)
    whole = backend_of(module_with(capabilities=lambda chip: facts), "fake", behind)
    hooks = {**behind.hooks, **whole.hooks}
    hooks = {name: hook for name, hook in hooks.items() if name not in missing}
    return make_backend(LoadedPlugin("fake", hooks), whole.device, behind)
