"""A checkpoint's tensors sorted by layer, with the way from their names and rows to those of ``Decoder`` and back."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from qiao.errors import ModelError
from qiao.loading import WeightStore
from qiao.models.decoder import BUFFERS
from qiao.models.spec import DecoderSpec

_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_ROUTER = re.compile(r"\.mlp\.(gate|shared_expert_gate)(\.weight)?$")
_EXPERT = re.compile(r"\.mlp\.experts\.\d+\.")
_ALL_EXPERTS = re.compile(r"\.experts\.(gate_up_proj|down_proj)$")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
"""Names of ``Decoder``; a tied checkpoint may hold only one of the two."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor called ``name`` in the checkpoint and ``inner`` in ``Decoder``. ``order`` [rows] int64: row i of
    ``inner`` is row ``order[i]`` of the checkpoint's; None where they are the same."""

    name: str
    inner: str
    shape: tuple[int, ...]
    order: torch.Tensor | None

    @property
    def linear(self) -> bool:
        """Whether it is a weight to round: a matrix, but not the router of a mixture of experts, whose choices turn on
        small differences and which is small itself."""
        return len(self.shape) == 2 and not is_router(self.inner)

    def into(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor`` in the checkpoint's order of rows, in ``Decoder``'s."""
        return tensor if self.order is None else tensor[self.order]

    def back(self, tensor: torch.Tensor) -> torch.Tensor:
        """The other way round."""
        return tensor if self.order is None else tensor[torch.argsort(self.order)]


@dataclass(frozen=True, slots=True)
class Stack:
    """A linear layer of ``Decoder``: one matrix, that is one tensor of the checkpoint or several stacked."""

    name: str
    weights: tuple[Entry, ...]
    biases: tuple[Entry, ...]


def is_router(name: str) -> bool:
    """Whether ``name`` of ``Decoder`` chooses or weighs experts."""
    return _ROUTER.search(name) is not None


def is_expert(name: str) -> bool:
    """Whether ``name`` of ``Decoder`` belongs to an expert that only some tokens visit."""
    return _EXPERT.search(name) is not None


def join(entries: Sequence[Entry], tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The checkpoint's ``tensors`` of ``entries`` as one, in ``Decoder``'s order of rows."""
    return torch.cat([entry.into(tensors[entry.name]) for entry in entries])


def part(entries: Sequence[Entry], joined: torch.Tensor) -> dict[str, torch.Tensor]:
    """The rows of ``joined`` back under the names of the checkpoint, in its order."""
    pieces = joined.split([entry.shape[0] for entry in entries])
    return {entry.name: entry.back(piece) for entry, piece in zip(entries, pieces, strict=True)}


class Source:
    """The tensors of ``store`` for ``spec``: ``layers`` by index, and the ``rest``.

    Raises ``ModelError`` by name for what cannot be quantized: tensors of other models beside the text model, and all
    experts in one tensor.
    """

    def __init__(self, store: WeightStore, spec: DecoderSpec) -> None:
        self._store, self.spec = store, spec
        self.layers: list[list[Entry]] = [[] for _ in spec.layers]
        self.rest: list[Entry] = []
        for name, shape in store.shapes.items():
            if BUFFERS.search(name):
                continue
            entry = self._entry(name, shape)
            found = _LAYER.match(entry.inner)
            if found is None:
                self.rest.append(entry)
                continue
            if int(found[1]) >= len(self.layers):
                raise ModelError(f"tensor {name} belongs to a layer that config.json does not have")
            self.layers[int(found[1])].append(entry)

    def _entry(self, name: str, shape: tuple[int, ...]) -> Entry:
        if _ALL_EXPERTS.search(name):
            raise ModelError(
                f"tensor {name} holds all experts of its layer, and each is rounded by itself: take a checkpoint with "
                "one tensor for each expert, as transformers' save_pretrained writes it"
            )
        rows = torch.arange(shape[0] if shape else 1)
        found = list(self.spec.translate(name, rows.view(-1, *(1 for _ in shape[1:]))))
        if len(found) != 1:
            raise ModelError(
                f"tensor {name} is no part of the text model of {self.spec.architecture}, and only that is quantized; "
                "take a checkpoint without it"
            )
        inner, moved = found[0]
        assert isinstance(moved, torch.Tensor)
        order = moved.flatten(1)[:, 0] if moved.dim() > 1 else moved
        return Entry(name, inner, shape, None if torch.equal(order, rows) else order.clone())

    def read(self, entry: Entry, dtype: torch.dtype) -> torch.Tensor:
        """The tensor in the checkpoint's order of rows.

        What is not a matrix passes through ``dtype`` first, in which it will be stored, so that a layer is calibrated
        with what it will be served with.
        """
        tensor = self._store.read(entry.name)
        if not tensor.is_floating_point():
            kind = str(tensor.dtype).removeprefix("torch.")
            raise ModelError(f"tensor {entry.name} is {kind}, expected floating point")
        return tensor.to(dtype) if tensor.dim() != 2 else tensor

    def layer(self, index: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """All tensors of a layer in float32, under the checkpoint's names and in its order of rows."""
        return {entry.name: self.read(entry, dtype).float() for entry in self.layers[index]}

    def embedding(self, dtype: torch.dtype) -> torch.Tensor:
        """The embedding [V, E] in ``dtype``. Raises ``ModelError`` where there is none."""
        for wanted in (EMBEDDING, HEAD) if self.spec.tied else (EMBEDDING,):
            for entry in self.rest:
                if entry.inner == wanted:
                    return self._store.read(entry.name).to(dtype)
        raise ModelError(f"the checkpoint lacks the embedding, {EMBEDDING}")

    def linears(self, index: int, stacks: Iterable[tuple[str, Sequence[str]]]) -> list[Stack]:
        """The linear layers of a layer, from their names and those of their parts in ``Decoder``."""
        held = {entry.inner: entry for entry in self.layers[index]}

        def entries(name: str, parts: Sequence[str], kind: str) -> tuple[Entry, ...]:
            names = (f"{name}.{kind}", *(f"{part}.{kind}" for part in parts if part != name))
            return tuple(held[n] for n in names if n in held)

        return [Stack(name, entries(name, parts, "weight"), entries(name, parts, "bias")) for name, parts in stacks]

    def inner(self, index: int, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """``tensors`` of a layer under the names of ``Decoder`` and in its order of rows."""
        return {entry.inner: entry.into(tensors[entry.name]) for entry in self.layers[index]}
