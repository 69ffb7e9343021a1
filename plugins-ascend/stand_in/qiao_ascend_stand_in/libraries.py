"""CANN's libraries of the stand-in, loaded so that torch_npu finds their symbols."""

from __future__ import annotations

import ctypes
from pathlib import Path


def load(folder: str) -> ctypes.CDLL:
    """Load what ``make.py`` has put into ``folder``, and return the one that has all symbols.

    Raises ``OSError`` where it is not there.
    """
    libraries = Path(folder) / "lib"
    first = libraries / "libcann_stub.so"
    loaded = [ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL) for path in [first, *sorted(libraries.glob("lib*.so"))]]
    return loaded[0]
