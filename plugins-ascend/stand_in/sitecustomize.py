"""Python runs this at its start where this folder is on PYTHONPATH: ``import torch_npu`` then finds the stand-in CANN.

``QIAO_ASCEND_STAND_IN`` names the folder that ``make.py`` has made; without it nothing happens.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from typing import Any

_FOLDER = os.environ.get("QIAO_ASCEND_STAND_IN", "")


class _Finder(importlib.abc.MetaPathFinder):
    """Loads CANN's libraries before torch_npu and gives its kernels numbers after."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != "torch_npu":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return spec
        loader, run = spec.loader, spec.loader.exec_module

        def exec_module(module: Any) -> None:
            from qiao_ascend_stand_in import emulate, graphs, libraries

            graphs.install(libraries.load(_FOLDER))
            run(module)
            emulate.install()

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if _FOLDER:
    sys.meta_path.insert(0, _Finder())
