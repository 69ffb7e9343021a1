"""The only file that knows torch_mlu and torch_mlu_ops; both are imported when first needed.

torch_mlu_ops changes names and arguments between releases, so each operation is looked for under the names of both
generations, and an argument that came later is looked for in its signature.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module, metadata
from importlib.util import find_spec
from inspect import signature
from typing import Any

import torch

RUNTIME, OPERATIONS = "torch_mlu", "torch_mlu_ops"
_DISTRIBUTIONS = {"torch-mlu": RUNTIME, "torch-mlu-ops": OPERATIONS}


@cache
def runtime() -> Any:
    """``torch.mlu``, or None where torch_mlu is not installed. Raises whatever its import raises."""
    if find_spec(RUNTIME) is None:
        return None
    import_module(RUNTIME)
    return torch.mlu  # type: ignore[attr-defined]


@cache
def operations() -> Any:
    """torch_mlu_ops, or None where it is not installed."""
    return import_module(OPERATIONS) if find_spec(OPERATIONS) is not None else None


def operation(name: str) -> Callable[..., Any]:
    """The operation ``name``; raises ``NotImplementedError`` where this release of torch_mlu_ops has none."""
    found = getattr(operations(), name, None)
    if found is None:
        raise NotImplementedError(f"torch_mlu_ops {versions().get('torch-mlu-ops', '')} has no {name}")
    return found  # type: ignore[no-any-return]


def has(*names: str) -> bool:
    """Whether this release has every one of ``names``."""
    return all(hasattr(operations(), name) for name in names)


@cache
def accepts(name: str, argument: str) -> bool:
    """Whether this release's operation ``name`` has an argument of that name; no where it does not say."""
    try:
        return argument in signature(operation(name)).parameters
    except (TypeError, ValueError):  # a function of C
        return False


def versions() -> dict[str, str]:
    """Installed versions by distribution, or what the modules say of themselves."""
    found = {}
    for name, module in _DISTRIBUTIONS.items():
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            version = getattr(sys.modules.get(module), "__version__", "")
            found |= {name: str(version)} if version else {}
    return found
