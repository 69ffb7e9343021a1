"""GGUF files, versions 2 and 3: metadata and the places of the tensors, all checked against the file's size.

Format: the GGUF specification in ggml's documentation.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qiao.errors import ModelError
from qiao.loading.ggml_types import TYPES, GgmlType

_SCALARS: Mapping[int, str] = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4
_PART = re.compile(r"(.+)-00001-of-(\d{5})\.gguf$")


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One tensor: ``shape`` in torch's order, ``offset`` and ``size`` in bytes from the start of ``file``."""

    name: str
    shape: tuple[int, ...]
    kind: GgmlType
    file: Path
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class GGUFModel:
    """The metadata of the (first) file and the tensors of all its parts, by name."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]

    def get(self, key: str, default: Any = None) -> Any:
        """A metadata value."""
        return self.metadata.get(key, default)

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the model family."""
        return str(self.metadata.get("general.architecture", ""))

    def hparam(self, key: str, default: Any = None) -> Any:
        """The value of ``<architecture>.<key>``."""
        return self.metadata.get(f"{self.architecture}.{key}", default)


def open_gguf(path: Path) -> GGUFModel:
    """Read headers only. ``path`` is the file, or the first of ``NAME-00001-of-0000N.gguf``.

    Raises ``ModelError`` naming the file when it is damaged, truncated, or a part is missing.
    """
    parts = _parts(path)
    metadata: dict[str, Any] = {}
    tensors: dict[str, GGUFTensor] = {}
    for i, part in enumerate(parts):
        found, held = _read_part(part)
        if i == 0:
            metadata = found
        for tensor in held:
            if tensor.name in tensors:
                raise ModelError(f"{part}: damaged: {tensor.name} is listed twice.")
            tensors[tensor.name] = tensor
    if not metadata.get("general.architecture"):
        raise ModelError(f"{path}: has no general.architecture. It is not a language model, or damaged.")
    return GGUFModel(path, metadata, tensors)


def _parts(path: Path) -> list[Path]:
    match = _PART.match(path.name)
    if not match:
        return [path]
    total = int(match[2])
    parts = [path.with_name(f"{match[1]}-{i:05d}-of-{total:05d}.gguf") for i in range(1, total + 1)]
    for part in parts:
        if not part.is_file():
            raise ModelError(f"{path.parent}: the part {part.name} is missing. Finish the download.")
    return parts


def _read_part(path: Path) -> tuple[dict[str, Any], list[GGUFTensor]]:
    size = path.stat().st_size
    if size < 24:
        raise ModelError(f"{path}: is no GGUF file: it has {size} bytes. Fetch it again.")
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            return _Reader(path, data).read()
        except (struct.error, IndexError, UnicodeDecodeError, OverflowError, MemoryError) as error:
            raise ModelError(f"{path}: damaged header ({error}). Fetch it again.") from error


class _Reader:
    """A cursor over a mapped file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.at = path, data, 0

    def read(self) -> tuple[dict[str, Any], list[GGUFTensor]]:
        magic = self.data[:4]
        if magic != b"GGUF":
            hint = " It is a Git LFS pointer: run `git lfs pull`." if magic == b"vers" else " Fetch it again."
            raise ModelError(f"{self.path}: is no GGUF file (it starts with {magic!r}).{hint}")
        self.at = 4
        version = self._number("I")
        if version not in (2, 3):
            raise ModelError(f"{self.path}: GGUF version {version} (or big-endian) is not read; versions 2 and 3 are.")
        tensor_count, pair_count = self._number("Q"), self._number("Q")
        if tensor_count + pair_count > len(self.data) // 8:
            raise ModelError(f"{self.path}: damaged header: {tensor_count} tensors, {pair_count} keys. Fetch it again.")
        metadata: dict[str, Any] = {}
        for _ in range(pair_count):
            key = self._string()
            metadata[key] = self._value(self._number("I"), key)
        infos = [self._tensor_info() for _ in range(tensor_count)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise ModelError(f"{self.path}: damaged: general.alignment is {alignment!r}.")
        start = -(-self.at // alignment) * alignment
        return metadata, self._place(infos, start)

    def _number(self, code: str) -> Any:
        value = struct.unpack_from("<" + code, self.data, self.at)[0]
        self.at += struct.calcsize("<" + code)
        return value

    def _string(self) -> str:
        length = self._number("Q")
        if length > len(self.data) - self.at:
            raise ModelError(f"{self.path}: damaged header: a string of {length} bytes. Fetch it again.")
        text = self.data[self.at : self.at + length].decode("utf-8", errors="replace")
        self.at += length
        return text

    def _strings(self, count: int) -> list[str]:
        """A vocabulary is most of a header, so its loop calls nothing that it need not."""
        data, at, end = self.data, self.at, len(self.data)
        length_at = struct.Struct("<Q").unpack_from
        texts = []
        for _ in range(count):
            (length,) = length_at(data, at)
            at += 8
            if length > end - at:
                raise ModelError(f"{self.path}: damaged header: a string of {length} bytes. Fetch it again.")
            texts.append(data[at : at + length].decode("utf-8", "replace"))
            at += length
        self.at = at
        return texts

    def _value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            if kind not in _SCALARS:
                raise ModelError(f"{self.path}: damaged header: {key} has the unknown type {kind}.")
            return self._number(_SCALARS[kind])
        element, count = self._number("I"), self._number("Q")
        if count > len(self.data) - self.at or element == _ARRAY:
            raise ModelError(f"{self.path}: damaged header: {key} is an array of {count}. Fetch it again.")
        if element == _STRING:
            return self._strings(count)
        if element not in _SCALARS:
            raise ModelError(f"{self.path}: damaged header: {key} has elements of the unknown type {element}.")
        values = struct.unpack_from(f"<{count}{_SCALARS[element]}", self.data, self.at)
        self.at += struct.calcsize(f"<{count}{_SCALARS[element]}")
        return list(values)

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        dims = self._number("I")
        if dims > _MAX_DIMS:
            raise ModelError(f"{self.path}: damaged header: {name} has {dims} dimensions. Fetch it again.")
        shape = tuple(self._number("Q") for _ in range(dims))
        return name, shape[::-1], self._number("I"), self._number("Q")

    def _place(self, infos: list[tuple[str, tuple[int, ...], int, int]], start: int) -> list[GGUFTensor]:
        tensors = []
        for name, shape, number, offset in infos:
            kind = TYPES.get(number)
            if kind is None:
                raise ModelError(
                    f"{self.path}: {name} has the quantization type {number}, which is not known here. "
                    "Update qiao, or take another quantization."
                )
            if shape and shape[-1] % kind.block:
                raise ModelError(
                    f"{self.path}: damaged: {name} {shape} does not split into {kind.name} blocks of {kind.block}."
                )
            size = math.prod(shape) // kind.block * kind.block_bytes
            if start + offset + size > len(self.data):
                raise ModelError(
                    f"{self.path}: truncated: {name} ends at byte {start + offset + size}, "
                    f"the file has {len(self.data)}. Fetch it again."
                )
            tensors.append(GGUFTensor(name, shape, kind, self.path, start + offset, size))
        self._check_overlap(tensors)
        return tensors

    def _check_overlap(self, tensors: list[GGUFTensor]) -> None:
        end, last = 0, ""
        for tensor in sorted(tensors, key=lambda t: (t.offset, t.size)):
            if tensor.offset < end:
                raise ModelError(f"{self.path}: damaged: {tensor.name} overlaps {last}. Fetch it again.")
            end, last = tensor.offset + tensor.size, tensor.name
