"""Safetensors checkpoints: checked headers, memory-mapped, one tensor at a time. Pickle files are refused."""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import torch
from safetensors import safe_open

from qiao.errors import ModelError
from qiao.loading.config import read_json

MAX_HEADER = 100_000_000
"""Bytes; the format's own limit."""

INDEX = "model.safetensors.index.json"

_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors$")


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file's header: ``start`` and ``end`` are bytes after the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def checkpoint_files(folder: Path) -> dict[Path, list[str] | None]:
    """The safetensors files of a folder, each with the names to take from it (None: all).

    Raises ``ModelError`` naming a shard that is missing, or when there are only pickle files.
    """
    if (folder / "model.safetensors").is_file():
        return {folder / "model.safetensors": None}
    index = folder / INDEX
    if index.is_file():
        return _from_index(index)
    files = sorted(f for f in folder.glob("*.safetensors") if not f.name.startswith(("consolidated", "adapter_")))
    if not files:
        raise ModelError(_nothing_to_load(folder))
    _check_shard_names(folder, files)
    return dict.fromkeys(files)


def read_header(file: Path) -> list[TensorEntry]:
    """The tensors of a file, ordered by place.

    Checked against the format: the header fits, offsets lie inside, do not overlap, leave no hole, match shape and
    dtype, and end where the file ends. Raises ``ModelError`` naming file and tensor.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        if prefix == b"version ":
            raise ModelError(f"{file}: is a Git LFS pointer, not the weights. Run `git lfs pull` in its folder.")
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1
        if not 2 <= length <= min(MAX_HEADER, size - 8):
            raise ModelError(
                f"{file}: damaged: its header would be {length} bytes in a file of {size}. Fetch it again."
            )
        header = _parse_header(file, stream.read(length))
    data_size = size - 8 - length
    entries = sorted((_entry(file, n, v) for n, v in header.items()), key=lambda e: (e.start, e.end))
    end = 0
    for entry in entries:
        if entry.start != end:
            problem = "overlaps the tensor before it" if entry.start < end else "leaves a gap before it"
            raise ModelError(f"{file}: damaged: {entry.name} {problem} (bytes {entry.start} to {entry.end}).")
        end = entry.end
    if end != data_size:
        what = "truncated" if end > data_size else "damaged"
        raise ModelError(f"{file}: {what}: tensors take {end} bytes, the file has {data_size}. Fetch it again.")
    return entries


def iter_safetensors(folder: Path, device: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor of a folder once, on ``device``, in the order of the files. Raises ``ModelError``."""
    for file, entries in tensors_of(folder).items():
        with safe_open(file, framework="pt", device=device) as handle:
            for entry in entries:
                yield entry.name, read_tensor(handle, entry.name)


def read_tensor(handle: Any, name: str) -> torch.Tensor:
    """A tensor of an open file, never as a view of the mapped file.

    Such views would keep whole shards in memory beside the weights made of them, and a file that is cut short later
    would end the process.
    """
    tensor: torch.Tensor = handle.get_tensor(name)
    return tensor.clone() if tensor.device.type == "cpu" else tensor


def count_tensors(folder: Path) -> int:
    """How many tensors ``iter_safetensors`` will yield."""
    return sum(len(entries) for entries in tensors_of(folder).values())


def tensors_of(folder: Path) -> dict[Path, list[TensorEntry]]:
    """The tensors to take from each file of a folder. All headers are checked before the first tensor is read."""
    seen: dict[str, Path] = {}
    plan: dict[Path, list[TensorEntry]] = {}
    for file, wanted in checkpoint_files(folder).items():
        held = read_header(file)
        missing = sorted(set(wanted or ()) - {entry.name for entry in held})
        if missing:
            raise ModelError(f"{file}: lacks {missing[0]} ({len(missing)} in all), which {INDEX} places there.")
        keep = {entry.name for entry in held} if wanted is None else set(wanted)
        plan[file] = [entry for entry in held if entry.name in keep]
        for entry in plan[file]:
            if entry.name in seen:
                raise ModelError(
                    f"{entry.name}: is in both {seen[entry.name].name} and {file.name} of {file.parent}. "
                    "Remove the file that does not belong."
                )
            seen[entry.name] = file
    return plan


def _from_index(index: Path) -> dict[Path, list[str] | None]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index}: has no weight_map. Fetch it again.")
    files: dict[Path, list[str] | None] = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or PurePath(shard).name != shard:
            raise ModelError(f"{index}: the shard of {name} must be a plain file name, got {shard!r}.")
        names = files.setdefault(index.parent / shard, [])
        assert names is not None
        names.append(name)
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ModelError(
            f"{index.parent}: the shard {missing[0]} is missing ({len(missing)} in all). Finish the download."
        )
    return files


def _check_shard_names(folder: Path, files: list[Path]) -> None:
    """Without an index, the names themselves say how many shards there must be."""
    for file in files:
        match = _SHARD.match(file.name)
        if not match:
            continue
        stem, total = match[1], int(match[3])
        for i in range(1, total + 1):
            name = f"{stem}-{i:05d}-of-{total:05d}.safetensors"
            if not (folder / name).is_file():
                raise ModelError(f"{folder}: the shard {name} is missing. Finish the download.")


def _nothing_to_load(folder: Path) -> str:
    pickles = sorted(f.name for pattern in _PICKLES for f in folder.glob(pattern))
    if pickles:
        return (
            f"{folder}: holds only pickle files ({', '.join(pickles[:3])}), which can run code when loaded. "
            "Take a revision with .safetensors, or convert it on a machine that you trust."
        )
    return f"{folder}: holds no .safetensors file. Is the download complete?"


def _parse_header(file: Path, text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, value in pairs:
            if key in result:
                raise ModelError(f"{file}: damaged: {key} is listed twice.")
            result[key] = value
        return result

    try:
        header = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file}: damaged: the header is not JSON ({error}). Fetch it again.") from error
    if not isinstance(header, dict):
        raise ModelError(f"{file}: damaged: the header is not a JSON object.")
    header.pop("__metadata__", None)
    return header


def _entry(file: Path, name: str, value: Any) -> TensorEntry:
    try:
        dtype, shape, (start, end) = value["dtype"], value["shape"], value["data_offsets"]
        numbers = [*shape, start, end]
    except (TypeError, KeyError, ValueError) as error:
        raise ModelError(f"{file}: damaged: the entry of {name} is {value!r}.") from error
    if not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in numbers):
        raise ModelError(f"{file}: damaged: the entry of {name} is {value!r}.")
    if dtype not in _BITS:
        raise ModelError(
            f"{file}: {name} has the dtype {dtype!r}, which is not known. Update qiao, or convert the file."
        )
    needed = math.prod(shape) * _BITS[dtype]
    if needed != (end - start) * 8:
        raise ModelError(
            f"{file}: damaged: {name} {dtype}{shape} needs {needed // 8} bytes, its place has {end - start}."
        )
    return TensorEntry(name, dtype, tuple(shape), start, end)
