"""Kernels of recorded graphs: ``fake_acl.c`` keeps the order of a graph's parts, here is what its kernels compute."""

from __future__ import annotations

import atexit
import ctypes
import itertools
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch

_COMPUTE, _REFUSED = 0, 507011
"""What the C side asks for (else: forget), and the code of an execution in which a kernel raised."""

_Function = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_long, ctypes.c_int)


class _Library:
    """The C side and the work that its graphs hold."""

    def __init__(self, library: Any) -> None:
        self.c, self.work, self.ids = library, dict[int, Callable[[], None]](), itertools.count(1)
        self.callback = _Function(self.called)
        library.cann_stub_add.argtypes = [ctypes.c_void_p, ctypes.c_long]
        library.cann_stub_computes(self.callback)
        atexit.register(library.cann_stub_computes, None)

    def called(self, number: int, what: int) -> int:
        if what != _COMPUTE:
            self.work.pop(number, None)
            return 0
        try:
            with torch.inference_mode():
                self.work[number]()
        except Exception:
            traceback.print_exc(file=sys.stderr)
            return _REFUSED
        return 0


_LOADED: list[_Library] = []


def install(library: Any) -> None:
    """Let ``library`` (``libcann_stub.so``) hold graphs."""
    _LOADED.append(_Library(library))


def recording() -> bool:
    """Whether some stream is being recorded or a part of a graph gets new calls."""
    return bool(_LOADED and _LOADED[0].c.cann_stub_recording())


def add(work: Callable[[], None]) -> bool:
    """Note ``work`` where the current stream is being recorded; whether it is."""
    side, number = _LOADED[0], next(_LOADED[0].ids)
    side.work[number] = work
    if side.c.cann_stub_add(torch.npu.current_stream().npu_stream, number):
        return True
    del side.work[number]
    return False
