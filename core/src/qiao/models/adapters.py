"""The LoRA adapters of a decoder: from a checkpoint's module names to its linear layers, and what the plan sees."""

from __future__ import annotations

from dataclasses import replace

import torch

from qiao.contract import LinearShape, ModelShape
from qiao.errors import ModelError
from qiao.layers.linear import Linear
from qiao.layers.lora import AdapterRows, LinearAdapters, Update
from qiao.loading.lora import LoraFile, LoraModule
from qiao.models.base import Model
from qiao.models.decoder import Decoder
from qiao.optable import OpTable

_PARTS = {"qkv": 3, "o": 1, "gate_up": 2, "down": 1, "shared_expert_gate_up": 2, "shared_expert_down": 1}
"""Linear layers that may have adapters, by their names in ``ModelShape``, and of how many projections they consist."""


def with_adapters(shape: ModelShape, max_loras: int, max_rank: int) -> ModelShape:
    """``shape`` with what adapters add to a step at most: all modules adapted, of the largest rank."""
    added: list[LinearShape] = []
    for line in shape.linears:
        if line.name in _PARTS:
            rank = max_rank * _PARTS[line.name]
            added.append(LinearShape(f"{line.name}.lora_a", line.in_features, rank, line.count, rows="L"))
            added.append(LinearShape(f"{line.name}.lora_b", rank, line.out_features, line.count, rows="L"))
    return replace(shape, linears=(*shape.linears, *added), max_loras=max_loras)


def adapter_bytes(shape: ModelShape) -> int:
    """Bytes of ``max_loras`` adapters as ``with_adapters`` describes them, 0 without any."""
    values = sum(x.count * x.in_features * x.out_features for x in shape.linears if x.rows == "L")
    return shape.max_loras * values * getattr(torch, shape.dtype).itemsize if values else 0


class ModelAdapters:
    """Adapters by number over one loaded model. ``rows`` says for each step which rows have which.

    A and B lie with dense weights. Raises ``ModelError`` for a model without a definition of its own.
    """

    def __init__(self, model: Model, ops: OpTable) -> None:
        if not isinstance(model, Decoder):
            raise ModelError(
                f"{model.shape.architecture} has no definition of its own here, and the generic one takes no adapters: "
                "leave out --enable-lora, or merge the adapter into the model"
            )
        self.rows = AdapterRows()
        self._translate = model.translate
        self._device = ops.device
        self._linears: dict[str, LinearAdapters] = {}
        self._places: dict[str, tuple[Linear, int, int]] = {}
        for linear in model.linears():
            self._linears[linear.name] = linear.adapt(ops.matmul["dense"], self.rows)
            self._places[linear.name] = (linear, 0, linear.out_features)
            first = 0
            for part, count in linear.parts.items():
                self._places[part] = (linear, first, count)
                first += count

    def load(self, number: int, file: LoraFile) -> int:
        """Pack ``file`` as adapter ``number``; returns its bytes.

        Raises ``ModelError`` naming a tensor that has no place here. Then, and when packing fails, nothing is kept.
        """
        updates: dict[str, list[Update]] = {}
        for module, weights in file.modules.items():
            for name, update in self._updates(file, module, weights):
                updates.setdefault(name, []).append(update)
        try:
            for name, found in updates.items():
                self._linears[name].put(number, found)
        except BaseException:
            self.drop(number)
            raise
        return sum(linear.nbytes(number) for linear in self._linears.values())

    def drop(self, number: int) -> None:
        """Forget an adapter."""
        for linear in self._linears.values():
            linear.drop(number)

    def choose(self, adapters: list[int], counts: list[int]) -> None:
        """The adapter and the number of rows of each sequence of the step to come; 0 is none."""
        self.rows.choose(adapters, counts, self._device)

    def _updates(self, file: LoraFile, module: str, weights: LoraModule) -> list[tuple[str, Update]]:
        """The linear layers that a checkpoint's module leads to; a stored tensor may be taken apart, by rows."""
        name_a, name_b = (f"{file.path}: tensor {name}" for name in weights.tensors)
        found = []
        for name, part in self._translate(f"{module}.weight", weights.b):
            place = self._places.get(name.removesuffix(".weight"))
            if place is None:
                raise ModelError(f"{name_a} {_no_place(name)}")
            linear, first, rows = place
            if weights.a.shape[1] != linear.in_features:
                raise ModelError(_other_model(name_a, weights.a, f"{linear.in_features} columns"))
            assert isinstance(part, torch.Tensor)
            if part.shape[0] != rows:
                raise ModelError(_other_model(name_b, weights.b, f"{rows} rows"))
            found.append((linear.name, Update(first, weights.a, part)))
        if not found:
            raise ModelError(f"{name_a} {_no_place(module)}")
        return found


def _other_model(tensor: str, found: torch.Tensor, wanted: str) -> str:
    return f"{tensor} is {list(found.shape)}, but the layer needs {wanted}; the adapter was trained on another model"


def _no_place(name: str) -> str:
    if ".experts." in name or ".gate." in name:
        return "adapts an expert or a router, which is not supported; merge the adapter into the model"
    if "embed_tokens" in name or "lm_head" in name:
        return "adapts the embedding or the head, which is not supported; leave them out of target_modules"
    return "belongs to no linear layer of this model; the adapter was trained on another one"
