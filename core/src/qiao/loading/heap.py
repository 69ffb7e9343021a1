"""What the C library does with memory that loading frees."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # mallopt's parameters, malloc.h
_SMALL, _LARGE = 128 << 10, 32 << 20  # glibc's threshold at start, and the largest that it adapts to by itself


_BODY = 1 << 20
"""Blocks from this size on have pages of their own in a process that takes other people's data."""

_ARENAS = 2
"""Heaps of such a process. Its threads take turns at Python's lock anyway."""


def bound_heap() -> None:
    """For a process whose data come in any size, on any thread: what is freed goes back to the system.

    Else glibc gives each thread a heap of its own, up to eight for each processor, and keeps freed blocks of up to 32
    MiB in them, so that memory grows long after everything that bounds it is full. To be called before there are
    threads. Other C libraries are left alone.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if set_option is not None:
        set_option(_ARENA_MAX, _ARENAS)
        set_option(_MMAP_THRESHOLD, _BODY)
        set_option(_TRIM_THRESHOLD, _BODY)


@contextmanager
def freed_at_once() -> Iterator[None]:
    """While it lasts, each block over 128 KiB has pages of its own, which go back to the system when it is freed.

    Else glibc keeps freed tensors in its heap, in holes that the next ones may not fit, and the peak of a load is more
    than what is in use. Afterwards large blocks come from the heap again, since a step reuses them. Other C libraries
    are left alone.
    """
    library = ctypes.CDLL(None) if os.name == "posix" else None
    set_option, trim = (getattr(library, name, None) for name in ("mallopt", "malloc_trim"))
    if set_option is None or trim is None:
        yield
        return
    set_option(_MMAP_THRESHOLD, _SMALL)
    try:
        yield
    finally:
        set_option(_MMAP_THRESHOLD, _LARGE)
        set_option(_TRIM_THRESHOLD, 2 * _LARGE)
        trim(0)


def give_back() -> None:
    """Return what has been freed in between to the system, from all threads' heaps. Takes some milliseconds."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)
