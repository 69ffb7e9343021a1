"""Filling a generic model: checkpoint names, old spellings and merged experts, tied weights, buffers."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from qiao.errors import ModelError
from qiao.models.generic_layers import OpLinear
from qiao.models.generic_trace import refuse
from qiao.quantization import QuantizedWeight, Weight

_SHOWN = 5


def fill_buffers(model: nn.Module, architecture: str, device: str) -> None:
    """Compute the buffers that no checkpoint holds (rotary frequencies, position tables), on the host, then place them.

    Called while the parameters are still on the meta device, where initialising them does nothing. Those that a
    checkpoint may hold come from there where it does. Raises ``ModelError`` where the model's own code leaves another
    unset.
    """
    waiting: list[tuple[nn.Module, str]] = []
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device.type == "meta":
                fill = float("nan") if buffer.is_floating_point() else 0
                module._buffers[name] = torch.full(buffer.shape, fill, dtype=buffer.dtype, device="cpu")
                waiting.append((module, name))
    with torch.no_grad():
        for owner in dict.fromkeys(module for module, _ in waiting):
            model._init_weights(owner)  # type: ignore[operator]  # transformers' own way to recompute buffers
    for module, name in waiting:
        buffer = module._buffers[name]
        assert buffer is not None
        if name in module._non_persistent_buffers_set and _unset(buffer):
            raise refuse(
                architecture, f"its buffer {name!r} of {type(module).__name__} is not computed from the config"
            )
        module._buffers[name] = buffer.to(device)


def _unset(buffer: torch.Tensor) -> bool:
    return buffer.is_floating_point() and bool(buffer.isnan().any())


class Loader:
    """Takes tensors by checkpoint name and puts each where it belongs. One use."""

    def __init__(self, model: nn.Module, device: str) -> None:
        self._model = model
        self._device = device
        self._parameters = dict(model.named_parameters(remove_duplicate=False))
        self._buffers = {n for n in model.state_dict() if n not in self._parameters}
        self._linears = {n: m for n, m in model.named_modules(remove_duplicate=False) if isinstance(m, OpLinear)}
        self._expected = self._shapes()
        self._filled: set[str] = set()
        self._unexpected: list[str] = []
        mapping = get_model_conversion_mapping(model)  # type: ignore[arg-type]
        self._renamings = [m for m in mapping if isinstance(m, WeightRenaming)]
        self._converters = [m for m in mapping if isinstance(m, WeightConverter)]
        self._merging: dict[str, WeightConverter] = {}
        # {target: source}: the target has no tensor of its own.
        self._tied: dict[str, str] = dict(getattr(model, "all_tied_weights_keys", None) or {})

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        shapes = {n: tuple(p.shape) for n, p in self._parameters.items()}
        shapes.update({n: tuple(self._model.get_buffer(n).shape) for n in self._buffers})
        for name, linear in self._linears.items():
            shapes.update({f"{name}.{part}": shape for part, shape in linear.expected().items()})
        return shapes

    def load(self, weights: Iterable[tuple[str, Weight]]) -> None:
        """Take them all. Raises ``ModelError`` naming a tensor that is missing, unexpected or of another shape."""
        for name, weight in weights:
            tensor = weight.dequantize() if isinstance(weight, QuantizedWeight) else weight
            target, pattern = self._target(name)
            if target not in self._expected:
                self._note_unexpected(name)
            elif pattern is None:
                self._place_tied(target, tensor)
            else:
                self._collect(target, name, pattern, tensor)
        for target, converter in self._merging.items():
            for part, value in converter.convert(target, model=self._model, config=self._model.config).items():
                self._place(part, value[0] if isinstance(value, list) else value)
        self._check()

    def _target(self, name: str) -> tuple[str, str | None]:
        known: dict[str, Any] = self._expected
        prefix = str(self._model.base_model_prefix)
        target, pattern = rename_source_key(name, self._renamings, self._converters, prefix, known)
        if target not in known:
            plain, _ = rename_source_key(name, [], [], prefix, known)
            if plain in known:
                return plain, None
        return target, pattern

    def _collect(self, target: str, name: str, pattern: str, tensor: torch.Tensor) -> None:
        """Keep a part of a merged parameter (one expert's matrix, say) until all have come."""
        if target not in self._merging:
            source = next(c for c in self._converters if pattern in c.source_patterns)
            self._merging[target] = copy.deepcopy(source)
        self._merging[target].add_tensor(target, name, pattern, tensor)  # type: ignore[arg-type]

    def _place_tied(self, target: str, tensor: torch.Tensor) -> None:
        """Place a tensor and all that are tied to it; of two tied tensors in a file the source's own wins."""
        source = self._tied.get(target)
        if source is not None:
            if source in self._filled:
                return
            target = source
        self._place(target, tensor)
        for other in (t for t, s in self._tied.items() if s == target):
            self._place(other, tensor)

    def _place(self, target: str, tensor: torch.Tensor) -> None:
        shape = self._expected.get(target)
        if shape is None:
            self._note_unexpected(target)
            return
        if tuple(tensor.shape) != shape:
            raise ModelError(f"tensor {target!r} has shape {list(tensor.shape)}, the config asks for {list(shape)}")
        owner, _, part = target.rpartition(".")
        self._filled.add(target)
        if owner in self._linears:
            self._linears[owner].take(part, tensor)
            return
        module = self._model.get_submodule(owner)
        if target in self._buffers:
            held = module._buffers[part]
            assert held is not None
            module._buffers[part] = tensor.to(self._device, held.dtype)
            return
        value = tensor.to(self._device, self._parameters[target].dtype)
        module._parameters[part] = nn.Parameter(value, requires_grad=False)

    def _note_unexpected(self, name: str) -> None:
        # Written by old releases of many models; the values are computed, not learned.
        if name.endswith((".inv_freq", ".masked_bias")) or self._ignored("_keys_to_ignore_on_load_unexpected", name):
            return
        self._unexpected.append(name)

    def _ignored(self, attribute: str, name: str) -> bool:
        return any(re.search(pattern, name) for pattern in getattr(self._model, attribute, None) or ())

    def _check(self) -> None:
        missing = [
            name
            for name in self._expected
            if name not in self._filled
            and not (name in self._buffers and not _unset(self._model.get_buffer(name)))
            and not self._ignored("_keys_to_ignore_on_load_missing", name)
        ]
        for what, names in (("lacks", missing), ("has tensors that the model does not know:", self._unexpected)):
            if names:
                more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
                raise ModelError(f"the checkpoint {what} {', '.join(sorted(names)[:_SHOWN])}{more}")
