"""CANN's libraries of the stand-in, loaded so that torch_npu finds their symbols."""

from __future__ import annotations

import ctypes
from pathlib import Path


def load(folder: str) -> None:
    """Load what ``make.py`` has put into ``folder``; raises ``OSError`` where it is not there."""
    libraries = Path(folder) / "lib"
    first = libraries / "libcann_stub.so"
    for path in [first, *sorted(libraries.glob("lib*.so"))]:
        ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
