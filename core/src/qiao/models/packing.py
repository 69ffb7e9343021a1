"""Loading a model once so that it can be loaded again without its checkpoint.

While a model loads, ``Recorder`` notes what the checkpoint brought and what the plugin packed of it. ``Replay`` then
loads an empty model of the same config: weights that were only packed come as outlines, of which ``pack_weight`` is
answered with the packed weight; the others (norms, embeddings, biases) come as they were.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

import torch

from qiao.contract import PackedWeight, WeightInfo
from qiao.errors import ModelError
from qiao.loading.packed_cache import MIN_BYTES, PackedCache
from qiao.models.base import Model
from qiao.optable import OpTable
from qiao.quantization import QuantizedWeight, Weight, WeightForm

logger = logging.getLogger(__name__)

Restore = Callable[[str, Mapping[str, torch.Tensor], WeightInfo, str], PackedWeight]
"""The plugin's hook ``restore_weight``."""


class Recorder:
    """Notes one load. Load the model with ``table`` in place of the OpTable, and with what ``watch`` passes on."""

    def __init__(self, ops: OpTable) -> None:
        self.table = _with_packers(ops, self._packer)
        self._packed: list[PackedWeight] = []
        self._stream: list[tuple[str, Weight, bool]] = []

    def _packer(self, ops: Any) -> Restore:
        def pack(scheme: str, tensors: Mapping[str, torch.Tensor], info: WeightInfo, device: str) -> PackedWeight:
            packed: PackedWeight = ops.pack_weight(scheme, tensors, info, device)
            self._packed.append(packed)
            return packed

        return pack

    def watch(
        self, weights: Iterable[tuple[str, Weight]], packs: Callable[[str, Weight], bool]
    ) -> Iterator[tuple[str, Weight]]:
        """``weights``; of those that ``packs`` says are only packed no value is kept."""
        for name, weight in weights:
            outlined = packs(name, weight)
            self._stream.append((name, _outline(weight) if outlined else weight, outlined))
            yield name, weight

    def forget(self) -> None:
        """Let go of what was noted."""
        self._packed.clear()
        self._stream.clear()

    def contents(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """All tensors by name, and what else ``Replay`` needs, as JSON."""
        tensors: dict[str, torch.Tensor] = {}
        stream, packed = [], []
        for i, (name, weight, outlined) in enumerate(self._stream):
            parts = weight.tensors if isinstance(weight, QuantizedWeight) else {"": weight}
            form = None
            if isinstance(weight, QuantizedWeight):
                form = [weight.form.scheme, weight.form.group_size]
            shapes = {key: [list(x.shape), str(x.dtype).removeprefix("torch.")] for key, x in parts.items()}
            tensors.update({f"s{i}.{key}": x for key, x in parts.items() if not outlined or key == "perm"})
            stream.append([name, form, shapes])
        for i, one in enumerate(self._packed):
            tensors.update({f"p{i}.{key}": x for key, x in one.data.items()})
            packed.append([one.scheme, asdict(one.info), list(one.data)])
        return tensors, {"stream": stream, "packed": packed}


class Replay:
    """Loads an empty model from what ``Recorder.contents`` gave: use ``table`` in place of the OpTable.

    Raises ``KeyError`` or ``ValueError`` where the model asks for what was not recorded, or not for all of it.
    """

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], notes: Mapping[str, Any], ops: OpTable, restore: Restore
    ) -> None:
        self.table = _with_packers(ops, lambda _: self._take)
        self._tensors, self._notes, self._restore = tensors, notes, restore
        self._places: dict[tuple[str, WeightInfo], deque[int]] = {}
        for i, (scheme, info, _) in enumerate(notes["packed"]):
            self._places.setdefault((scheme, WeightInfo(**info)), deque()).append(i)

    def _take(self, scheme: str, tensors: Mapping[str, torch.Tensor], info: WeightInfo, device: str) -> PackedWeight:
        place = self._places[scheme, info].popleft()
        names = self._notes["packed"][place][2]
        return self._restore(scheme, {name: self._tensors[f"p{place}.{name}"] for name in names}, info, device)

    def weights(self) -> Iterator[tuple[str, Weight]]:
        """What the checkpoint brought, or its outline, in the same order."""
        for i, (name, form, shapes) in enumerate(self._notes["stream"]):
            parts = {key: self._tensor(f"s{i}.{key}", shape, dtype) for key, (shape, dtype) in shapes.items()}
            yield name, parts[""] if form is None else QuantizedWeight(WeightForm(*form), MappingProxyType(parts))

    def _tensor(self, name: str, shape: list[int], dtype: str) -> torch.Tensor:
        found = self._tensors.get(name)
        return torch.empty(shape, dtype=getattr(torch, dtype), device="meta") if found is None else found

    def finish(self) -> None:
        """To be called after the load: all that was packed must have been asked for."""
        left = [key for key, places in self._places.items() if places]
        if left:
            raise ValueError(f"{len(left)} packed weights belong to another model, the first {left[0][1].name}")


def _with_packers(ops: OpTable, packer: Callable[[Any], Restore]) -> OpTable:
    matmul = {scheme: replace(one, pack_weight=packer(one)) for scheme, one in ops.matmul.items()}
    return replace(ops, matmul=MappingProxyType(matmul))


def _outline(weight: Weight) -> Weight:
    """``weight`` without values; a permutation is kept, since parts are compared by it."""
    if isinstance(weight, torch.Tensor):
        return torch.empty_like(weight, device="meta")
    return replace(
        weight,
        tensors={k: x if k == "perm" else torch.empty_like(x, device="meta") for k, x in weight.tensors.items()},
    )


class KeepableModel(Model, Protocol):
    """A model that can be replayed."""

    def packs(self, name: str, weight: Weight) -> bool:
        """Whether ``load`` keeps nothing of this weight of a checkpoint but what ``pack_weight`` makes of it."""
        ...


M = TypeVar("M", bound=KeepableModel)


def load_kept(
    make: Callable[[OpTable], M],
    ops: OpTable,
    weights: Callable[[], Iterable[tuple[str, Weight]]],
    cache: PackedCache,
    key: Mapping[str, Any],
    restore: Restore,
) -> M:
    """The model that ``make`` makes, loaded from the file that ``cache`` has for ``key``, else from ``weights``.

    After the second, what was packed is written down and mapped, so that the memory of the process is the same in both
    cases. Raises as ``Model.load``; what is wrong with the cache is logged and costs time only.
    """
    model = _replayed(make, ops, cache, key, restore)
    if model is not None:
        return model
    recorder = Recorder(ops)
    model = make(recorder.table)
    model.load(recorder.watch(weights(), model.packs))
    tensors, notes = recorder.contents()
    recorder.forget()
    if sum(tensor.nbytes for tensor in tensors.values()) < MIN_BYTES or not cache.write(key, tensors, notes):
        return model
    return _replayed(make, ops, cache, key, restore) or model


def _replayed(
    make: Callable[[OpTable], M], ops: OpTable, cache: PackedCache, key: Mapping[str, Any], restore: Restore
) -> M | None:
    found = cache.read(key)
    if found is None:
        return None
    try:
        replay = Replay(found.tensors, found.notes, ops, restore)
        model = make(replay.table)
        model.load(replay.weights())
        replay.finish()
    except (KeyError, IndexError, ValueError, TypeError, ModelError) as error:
        logger.warning("packed weights %s do not fit the model, and are made anew: %s", cache.path(key), error)
        return None
    logger.info("packed weights are mapped from %s", cache.path(key))
    return model
