"""The folder that a run writes: a shard for each finished layer, a state to resume from, and at the end a model."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from qiao.errors import ModelError, ParameterError
from qiao.loading import ModelFiles, load_generation_config, load_tokenizer
from qiao.loading.config import read_json
from qiao.loading.safetensors import INDEX, read_header

STATE = "quantize-state.json"
_FORMAT = 2
_PART = ".part"
_NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".onnx", ".index.json", ".md")


class Output:
    """``folder`` with the layers that are ``done``; ``asked`` is all that must agree for them to be used again.

    Raises ``ParameterError`` where the folder holds something else, or what was asked for then differs.
    """

    def __init__(self, folder: Path, asked: Mapping[str, Any], shards: int) -> None:
        self._folder, self._shards = folder, shards
        self._state: dict[str, Any] = {"format": _FORMAT, "asked": dict(asked), "layers": []}
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / STATE).is_file():
            self._resume(read_json(folder / STATE))
        elif any(folder.iterdir()):
            raise ParameterError("-o", f"{folder} is not empty and holds no unfinished run; give another folder")
        else:
            self._write_state()
        for left in folder.glob(f"*{_PART}"):
            left.unlink()

    @property
    def done(self) -> list[dict[str, Any]]:
        """The records of the finished layers, in order."""
        layers: list[dict[str, Any]] = self._state["layers"]
        return layers

    def _resume(self, state: Mapping[str, Any]) -> None:
        asked, before = self._state["asked"], state.get("asked", {})
        for key in asked:
            if state.get("format") != _FORMAT or asked[key] != before.get(key):
                raise ParameterError(
                    "-o",
                    f"{self._folder} holds an unfinished run with {key} {before.get(key)!r}, and now it is "
                    f"{asked[key]!r}; repeat the run as it was, give another folder, or delete this one to start anew",
                )
        for record in state["layers"]:
            file = self._folder / record["file"]
            if not file.is_file() or _digest(file) != record["sha256"]:
                raise ModelError(f"{file}: is not as this run left it; delete {self._folder} and start anew")
            self._state["layers"].append(record)

    def read_layer(self, index: int) -> dict[str, torch.Tensor]:
        """The tensors of a finished layer."""
        return load_file(self._folder / self.done[index]["file"])

    def write_layer(self, tensors: Mapping[str, torch.Tensor], record: Mapping[str, Any]) -> None:
        """The next layer, whole or not at all; ``record`` goes into the state."""
        file = self.write_shard(len(self.done), tensors)
        self._state["layers"].append({"file": file.name, "sha256": _digest(file), **record})
        self._write_state()

    def write_shard(self, index: int, tensors: Mapping[str, torch.Tensor]) -> Path:
        """Shard ``index``, counted from 0."""
        file = self._folder / f"model-{index + 1:05d}-of-{self._shards:05d}.safetensors"
        part = file.with_name(file.name + _PART)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, part, {"format": "pt"})
        _settle(part, file)
        return file

    def finish(self, files: ModelFiles, config: Mapping[str, Any]) -> None:
        """Tokenizer and the like, the index, ``config.json`` last; then the state is deleted."""
        _copy_rest(files, self._folder)
        shards = sorted(self._folder.glob("model-*.safetensors"))
        held = {entry.name: (shard, entry) for shard in shards for entry in read_header(shard)}
        self._write_json(
            INDEX,
            {
                "metadata": {"total_size": sum(entry.end - entry.start for _, entry in held.values())},
                "weight_map": {name: shard.name for name, (shard, _) in sorted(held.items())},
            },
        )
        self._write_json("config.json", config)
        (self._folder / STATE).unlink()

    def _write_state(self) -> None:
        self._write_json(STATE, self._state)

    def _write_json(self, name: str, data: Mapping[str, Any]) -> None:
        file = self._folder / name
        part = file.with_name(name + _PART)
        part.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        _settle(part, file)


def _settle(part: Path, file: Path) -> None:
    """``part`` becomes ``file`` once its bytes are on the disk, so that a crash leaves the one or the other."""
    with part.open("rb") as stream:
        os.fsync(stream.fileno())
    os.replace(part, file)


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        found = hashlib.sha256()
        while block := stream.read(1 << 20):
            found.update(block)
    return found.hexdigest()


def _copy_rest(files: ModelFiles, folder: Path) -> None:
    """What belongs to a model besides config and weights; a GGUF file carries its own."""
    if files.gguf is not None:
        load_tokenizer(files).save_pretrained(folder)
        generation = load_generation_config(files)
        (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")
        return
    for file in sorted(files.folder.iterdir()):
        left = file.name in ("config.json", STATE) or file.name.startswith(".") or file.name.endswith(_NOT_COPIED)
        if file.is_file() and not left:
            shutil.copyfile(file, folder / file.name)


def shards_of(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Indices of tensors of ``sizes`` in bytes, put together up to ``limit``; a larger one is alone."""
    found: list[list[int]] = []
    room = 0
    for i, size in enumerate(sizes):
        if not found or size > room:
            found.append([])
            room = limit
        found[-1].append(i)
        room -= size
    return found
