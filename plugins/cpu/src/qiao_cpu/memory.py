"""Memory of captured regions: blocks that are used again as soon as a tensor dies, as its program will do each time."""

from __future__ import annotations

import math
import mmap
import weakref
from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from functools import cache

import torch

_ALIGNMENT = 64
_CHUNK = 8 << 20
"""Bytes asked of the system at once; what is never touched costs nothing."""


class _Chunk:
    """One piece of the system's memory and the ranges of it that are free, in order."""

    def __init__(self, size: int) -> None:
        self.memory = memoryview(mmap.mmap(-1, size))
        self.returned: list[tuple[int, int]] = []
        """Ranges of tensors that died; whoever finds them dead, at any moment, only appends."""
        self._free = [(0, size)]

    def take(self, size: int) -> int | None:
        """The start of ``size`` bytes, the lowest that are free."""
        while self.returned:
            insort(self._free, self.returned.pop())
        self._join()
        for i, (start, end) in enumerate(self._free):
            if end - start >= size:
                self._free[i : i + 1] = [(start + size, end)] if end - start > size else []
                return start
        return None

    def _join(self) -> None:
        joined = self._free[:1]
        for first, last in self._free[1:]:
            if first == joined[-1][1]:
                joined[-1] = (joined[-1][0], last)
            else:
                joined.append((first, last))
        self._free = joined


class Memory:
    """Where the tensors of programs that never run at the same time lie: these programs share it.

    A tensor's block is free for the next one once nothing refers to it any more. In a replay the same kernels follow
    each other in the same order, so what was safe while recording is safe again.
    """

    def __init__(self) -> None:
        self._chunks: list[_Chunk] = []
        self._blocks: dict[int, Callable[[], object]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes asked of the system so far."""
        return sum(len(chunk.memory) for chunk in self._chunks)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor with whatever was there."""
        size = math.prod(shape) * dtype.itemsize
        if not size:
            return torch.empty(tuple(shape), dtype=dtype)
        padded = -(-size // _ALIGNMENT) * _ALIGNMENT
        chunk, start = self._take(padded)
        view = chunk.memory[start : start + padded]
        block = weakref.finalize(view, chunk.returned.append, (start, start + padded))
        block.atexit = False
        tensor = torch.frombuffer(view, dtype=dtype, count=math.prod(shape)).view(tuple(shape))
        self._blocks[tensor.data_ptr()] = block
        return tensor

    def _take(self, size: int) -> tuple[_Chunk, int]:
        for chunk in self._chunks:
            start = chunk.take(size)
            if start is not None:
                return chunk, start
        chunk = _Chunk(max(_CHUNK, 1 << (size - 1).bit_length()))
        self._chunks.append(chunk)
        start = chunk.take(size)
        assert start is not None  # it was made for this
        return chunk, start

    def finish(self, results: Iterable[torch.Tensor]) -> None:
        """End a recording: others may use the blocks of ``results``, which are readable until one of them does."""
        for tensor in results:
            block = self._blocks.pop(tensor.untyped_storage().data_ptr(), None)
            if block is not None:
                block()
        self._blocks.clear()


@cache
def _shared() -> weakref.WeakValueDictionary[int, Memory]:
    return weakref.WeakValueDictionary()


def memory_for(inputs: Sequence[torch.Tensor]) -> Memory:
    """The memory of programs with these fixed inputs. Programs over one buffer cannot run at the same time.

    The caller keeps the inputs alive as long as the result.
    """
    if not inputs:
        return Memory()
    return _shared().setdefault(inputs[0].untyped_storage().data_ptr(), Memory())
