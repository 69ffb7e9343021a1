"""The native library: its functions, argument records, instruction sets and threads.

Pointers and strides are passed as numbers; the library knows nothing of torch.
"""

from __future__ import annotations

import ctypes
import os
import sys
import weakref
from ctypes import POINTER, c_char_p, c_double, c_float, c_int, c_long, c_void_p
from functools import cache
from pathlib import Path

import torch

from qiao_cpu.threads import default_threads, node_facts, pinned_cpus

ISA_VARIABLE = "QIAO_CPU_ISA"

TYPES: dict[torch.dtype, int] = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""``enum Type`` of kernels.h."""

CACHE_TYPES: dict[torch.dtype, int] = {**TYPES, torch.int8: 3}
"""Those that a cache may have."""


class Heads(ctypes.Structure):
    """``struct Heads``: [T, heads, D]."""

    _fields_ = (("data", c_void_p), ("token", c_long), ("head", c_long), ("type", c_int))


class Cache(ctypes.Structure):
    """``struct Cache``: one layer's paged cache."""

    _fields_ = (
        ("key", c_void_p),
        ("value", c_void_p),
        *((name, c_int) for name in ("type", "heads", "size", "block")),
        *((name, c_long) for name in ("key_block", "key_head", "key_dim", "value_block", "value_head", "value_token")),
        *((name, c_void_p) for name in ("key_scale", "value_scale")),
        *((name, c_long) for name in ("scale_block", "scale_head")),
    )


class Weight(ctypes.Structure):
    """``struct PackedWeight``."""

    _fields_ = (
        *((name, c_int) for name in ("inputs", "outputs", "kind", "type")),
        *((name, c_void_p) for name in ("weight", "scale", "zero")),
        ("scale_type", c_int),
        ("group", c_int),
        ("block", c_int),
        ("finest", c_int),
        ("zero_is_scaled", c_int),
        ("all_zeros", c_float),
    )


class RotaryArgs(ctypes.Structure):
    """``struct RotaryArgs``."""

    _fields_ = (
        ("query", Heads),
        ("key", Heads),
        ("value", Heads),
        *((name, c_int) for name in ("tokens", "heads", "kv_heads", "size", "rotated", "interleaved")),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("cos_stride", c_long),
        ("sin_stride", c_long),
        ("cache", Cache),
        ("slots", c_void_p),
    )


class Copy(ctypes.Structure):
    """``struct Copy`` of elements.h."""

    _fields_ = (
        ("source", c_void_p),
        *((name, c_long) for name in ("source_a", "source_b")),
        ("target", c_void_p),
        *((name, c_long) for name in ("target_a", "target_b")),
        *((name, c_int) for name in ("a", "b")),
        ("bytes", c_long),
    )


class Combine(ctypes.Structure):
    """``struct Combine`` of elements.h."""

    _fields_ = (
        ("operation", c_int),
        *((name, c_void_p) for name in ("x", "y", "out")),
        *((name, c_long * 3) for name in ("size", "x_stride", "y_stride")),
    )


_P, _I, _L, _F = c_void_p, c_int, c_long, c_float
_SIGNATURES: dict[str, tuple[type, ...]] = {
    "select": (c_char_p,),
    "finest": (),
    "set_threads": (_I, POINTER(c_int), _I),
    "pack_dense": (_P, _P, _I, _I, _I),
    "pack_int8": (_P, _P, _I, _I),
    "pack_int4": (_P, _P, _I, _I),
    "matmul": (POINTER(Weight), _P, _L, _I, _I, _P, _I, _P),
    "attention": (POINTER(Heads), _P, POINTER(Cache), _I, _I, _P, _P, _P, _L, _F, _F, _I),
    "rotary": (POINTER(RotaryArgs),),
    "write": (POINTER(Heads), POINTER(Heads), POINTER(Cache), _P, _I),
    "copy_blocks": (POINTER(Cache), _P, _P, _I, _L, _L),
    "norm": (_P, _L, _P, _L, _I, _P, _I, _P, _I, _I, _F),
    "gated": (_P, _L, _I, _P, _I, _I, _I),
    "gather_rows": (_P, _L, _L, _L, _P, _P, _I),
    "gather_columns": (_P, _L, _I, _P, _I, _P, _I, _I),
    "convert": (_P, _L, _I, _P, _L, _I, _I, _I),
    "scale": (_P, _L, _I, _F, _P, _L, _I, _I, _I),
    "add": (_P, _L, _I, _P, _L, _I, _P, _L, _I, _I, _I),
    "soft_cap": (_P, _L, _I, _F, _P, _L, _I, _I, _I),
    "work": (_I, _P, _L),
    "argmax": (_P, _L, _P, _I, _I),
    "sample": (_P, _L, _P, _P, _P, _P, _P, _P, _I, _I),
    "expert_matmul": (_P, _I, _P, _L, _I, _I, _P, _P),
    "route_experts": (_P, _L, _I, _I, _I, _I, _I, _P, _P),
    "combine_experts": (_P, _I, _P, _I, _P, _I, _I, _I),
    "copy": (POINTER(Copy),),
    "zero": (_P, _L),
    "widen_bytes": (_P, _I, _P, _L),
    "combine": (POINTER(Combine),),
    "replay": (_P, POINTER(c_int)),
    "profile": (_P, POINTER(c_int), POINTER(c_double)),
    "program_size": (_P,),
    "program_bytes": (_P,),
}


_NAME = "libqiao_cpu.so"


def _load() -> ctypes.CDLL:
    # an editable install has the Python files in one folder of the package and the library in another
    folders = [Path(folder) for folder in sys.modules[__name__.partition(".")[0]].__path__]
    path = next((found for folder in folders if (found := folder / _NAME).exists()), folders[0] / _NAME)
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise ImportError(f"qiao-cpu's native library does not load: {error}; reinstall qiao-cpu") from error
    for name, arguments in _SIGNATURES.items():
        function = getattr(library, f"qiao_cpu_{name}", None)
        if function is None:
            raise ImportError(f"qiao-cpu's native library {path} is older than its Python files; reinstall qiao-cpu")
        function.argtypes, function.restype = arguments, c_int
    for name in ("variants", "isa"):
        getattr(library, f"qiao_cpu_{name}").restype = c_char_p
    library.qiao_cpu_program_step.argtypes, library.qiao_cpu_program_step.restype = (_P, _I), c_char_p
    library.qiao_cpu_record_begin.restype = _P
    library.qiao_cpu_program_bytes.restype = c_long
    library.qiao_cpu_program_free.argtypes = (_P,)
    library.qiao_cpu_program_free.restype = library.qiao_cpu_record_end.restype = None
    return library


_LIBRARY = _load()

pack_dense = _LIBRARY.qiao_cpu_pack_dense
pack_int8 = _LIBRARY.qiao_cpu_pack_int8
pack_int4 = _LIBRARY.qiao_cpu_pack_int4
matmul = _LIBRARY.qiao_cpu_matmul
attention = _LIBRARY.qiao_cpu_attention
rotary = _LIBRARY.qiao_cpu_rotary
write = _LIBRARY.qiao_cpu_write
copy_blocks = _LIBRARY.qiao_cpu_copy_blocks
norm = _LIBRARY.qiao_cpu_norm
gated = _LIBRARY.qiao_cpu_gated
gather_rows = _LIBRARY.qiao_cpu_gather_rows
gather_columns = _LIBRARY.qiao_cpu_gather_columns
convert = _LIBRARY.qiao_cpu_convert
scale = _LIBRARY.qiao_cpu_scale
add = _LIBRARY.qiao_cpu_add
soft_cap = _LIBRARY.qiao_cpu_soft_cap
work = _LIBRARY.qiao_cpu_work
argmax = _LIBRARY.qiao_cpu_argmax
sample = _LIBRARY.qiao_cpu_sample
expert_matmul = _LIBRARY.qiao_cpu_expert_matmul
route_experts = _LIBRARY.qiao_cpu_route_experts
combine_experts = _LIBRARY.qiao_cpu_combine_experts
copy = _LIBRARY.qiao_cpu_copy
zero = _LIBRARY.qiao_cpu_zero
widen_bytes = _LIBRARY.qiao_cpu_widen_bytes
combine = _LIBRARY.qiao_cpu_combine

_OUTSIDE, _NOT_RECORDABLE = 2, 3


def check(status: int) -> None:
    """Raise where a native function could not do its work.

    ``MemoryError`` for lack of memory, ``IndexError`` for a row that is not there, ``NotImplementedError`` for what
    cannot be part of a program.
    """
    if status == _OUTSIDE:
        raise IndexError("qiao-cpu: an index is outside the table")
    if status == _NOT_RECORDABLE:
        raise NotImplementedError("packing weights and changing threads cannot be part of a captured region")
    if status:
        raise MemoryError("qiao-cpu: the kernels' scratch memory could not be had")


class Program:
    """Native calls with their arguments, written down once. Filled while entered as a context, by this thread's calls.

    The memory that the calls read and write must outlive it.
    """

    def __init__(self) -> None:
        self._handle: int | None = None
        self._step = c_int(0)

    def __enter__(self) -> Program:
        self._handle = _LIBRARY.qiao_cpu_record_begin()
        if self._handle is None:
            raise NotImplementedError("this thread is recording another region already")
        weakref.finalize(self, _LIBRARY.qiao_cpu_program_free, self._handle)
        return self

    def __exit__(self, *exc: object) -> None:
        _LIBRARY.qiao_cpu_record_end()

    def steps(self) -> list[str]:
        """The names of the calls in order."""
        count = _LIBRARY.qiao_cpu_program_size(self._handle)
        return [_LIBRARY.qiao_cpu_program_step(self._handle, i).decode() for i in range(count)]

    @property
    def nbytes(self) -> int:
        """Bytes of the calls and their arguments."""
        return int(_LIBRARY.qiao_cpu_program_bytes(self._handle))

    def replay(self) -> None:
        """Run all calls again. Raises as ``check``, naming the call that failed."""
        status = _LIBRARY.qiao_cpu_replay(self._handle, self._step)
        if status:
            self._raise(status)

    def profile(self, times: int) -> list[tuple[str, float]]:
        """Run all calls ``times`` times: each call's name and mean seconds, in order. Raises as ``replay``."""
        names = self.steps()
        seconds = (c_double * len(names))()
        for _ in range(times):
            status = _LIBRARY.qiao_cpu_profile(self._handle, self._step, seconds)
            if status:
                self._raise(status)
        return [(name, spent / times) for name, spent in zip(names, seconds, strict=True)]

    def _raise(self, status: int) -> None:
        try:
            check(status)
        except (MemoryError, IndexError) as error:
            raise type(error)(f"{error} (in {self.steps()[self._step.value]})") from None


def variants() -> dict[str, int]:
    """The instruction sets of this build and their scores; 0 means that this processor cannot run it."""
    lines = _LIBRARY.qiao_cpu_variants().decode().splitlines()
    return {name: int(score) for name, score, _ in (line.split(" ", 2) for line in lines)}


def needs() -> dict[str, str]:
    """What each instruction set of this build asks of a processor."""
    lines = _LIBRARY.qiao_cpu_variants().decode().splitlines()
    return {name: text for name, _, text in (line.split(" ", 2) for line in lines)}


def path() -> Path:
    """The library's file."""
    return Path(str(_LIBRARY._name))


def isa() -> str:
    """The instruction set in use."""
    return str(_LIBRARY.qiao_cpu_isa().decode())


strip = _LIBRARY.qiao_cpu_strip
"""Columns of a strip of packed weights, for the instruction set in use."""


def lanes() -> int:
    """Floats of a vector, for the instruction set in use."""
    return int(_LIBRARY.qiao_cpu_lanes())


def finest() -> int:
    """The largest code of activations beside int8 weights that the instruction set in use takes: 127 or 32767."""
    return int(_LIBRARY.qiao_cpu_finest())


def select(name: str) -> None:
    """Use instruction set ``name`` from now on; weights and caches made before must not be used with it.

    Raises ``ValueError`` where this build has none of that name or the processor cannot run it.
    """
    usable = ", ".join(n for n, score in variants().items() if score)
    status = _LIBRARY.qiao_cpu_select(name.encode())
    if status == 1:
        raise ValueError(f"{ISA_VARIABLE}={name}: unknown instruction set; this processor can run {usable}")
    if status == 2:
        raise ValueError(f"{ISA_VARIABLE}={name}: this processor cannot run it; it can run {usable}")


def threads() -> int:
    """Threads that kernels use, the caller's included."""
    return int(_LIBRARY.qiao_cpu_threads())


def set_threads(count: int, cpus: tuple[int, ...] = ()) -> None:
    """Use ``count`` threads, the caller's included; thread i is tied to ``cpus[i]`` where given."""
    if count < 1:
        raise ValueError(f"threads must be at least 1, got {count}")
    check(_LIBRARY.qiao_cpu_set_threads(count, (c_int * len(cpus))(*cpus), len(cpus)))


@cache
def start() -> str:
    """Choose instruction set and threads by the environment, once; returns what was chosen and why."""
    wanted = os.environ.get(ISA_VARIABLE, "")
    if wanted:
        select(wanted)
    count, reason = default_threads()
    set_threads(count, pinned_cpus(count))
    why = f"by {ISA_VARIABLE}" if wanted else "best of " + ", ".join(n for n, score in variants().items() if score)
    return f"{isa()} ({why}), {count} threads ({reason})"


def facts() -> dict[str, str]:
    """Instruction set and threads in use and why, and the other instruction sets of this build, for reports."""
    start()
    asked = os.environ.get(ISA_VARIABLE, "")
    scores, wanted = variants(), needs()
    usable = sorted((n for n, score in scores.items() if score and n != isa()), key=lambda n: -scores[n])
    lacking = [f"{name} ({wanted[name]})" for name, score in scores.items() if not score]
    found = {
        "kernels": isa(),
        "kernels_why": f"{ISA_VARIABLE}={asked}" if asked else "score",
        "kernels_usable": ", ".join(usable),
        "kernels_lacking": ", ".join(lacking),
        "threads": f"{threads()} ({default_threads()[1]})",
        "nodes": node_facts(threads()),
    }
    return {key: value for key, value in found.items() if value}
