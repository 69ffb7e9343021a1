"""A model's plain tensors by name, in any order, one at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open

from qiao.errors import ModelError
from qiao.loading.safetensors import read_tensor, tensors_of
from qiao.loading.sources import ModelFiles
from qiao.loading.weights import has_nan, quantization_of

_SAMPLE = 1 << 16
_SAMPLES = 64
"""Of each file so many pieces of so many bytes are hashed, spread over it."""


class WeightStore:
    """``shapes`` of the tensors of a model, under their Hugging Face names; ``read`` reads one, and keeps nothing.

    Raises ``ModelError`` for safetensors that are quantized already. Quantized tensors of GGUF become float32.
    """

    def __init__(self, files: ModelFiles) -> None:
        self._name = files.gguf or files.folder
        method = quantization_of(files)
        if method not in (None, "gguf"):
            raise ModelError(f"{self._name}: is quantized already, by {method}. Take the model in 16 bits.")
        self.shapes: Mapping[str, tuple[int, ...]]
        self.files: list[Path]
        if files.gguf is not None:
            from qiao.loading.gguf import gguf_tensors

            self._gguf = gguf_tensors(files.header)
            self._places: dict[str, Path] = {}
            self.shapes = {name: tensor.shape for name, tensor in self._gguf.items()}
            self.files = sorted({tensor.file for tensor in self._gguf.values()})
        else:
            self._gguf = {}
            held = tensors_of(files.folder)
            self._places = {entry.name: file for file, entries in held.items() for entry in entries}
            self.shapes = {entry.name: entry.shape for entries in held.values() for entry in entries}
            self.files = sorted(held)

    def read(self, name: str) -> torch.Tensor:
        """The tensor, on the host, in its own floating-point type. Raises ``ModelError`` for NaN."""
        if name in self._gguf:
            from qiao.loading.gguf import read_plain

            tensor = read_plain(self._gguf[name])
        else:
            with safe_open(self._places[name], framework="pt", device="cpu") as handle:
                tensor = read_tensor(handle, name)
        if has_nan(tensor):
            raise ModelError(f"{self._name}: {name} holds NaN. The file is damaged.")
        return tensor

    def fingerprint(self) -> str:
        """A hash over sizes, headers and pieces of the files: equal for equal models, and quick for large ones."""
        found = hashlib.sha256()
        for file in self.files:
            size = file.stat().st_size
            found.update(f"{size};".encode())
            with file.open("rb") as stream:
                for i in range(_SAMPLES):
                    stream.seek(i * max(0, size - _SAMPLE) // max(1, _SAMPLES - 1))
                    found.update(stream.read(_SAMPLE))
        return found.hexdigest()
