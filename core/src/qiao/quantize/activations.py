"""Calibration data through a model layer by layer: only one layer's weights are there at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn import functional

from qiao.contract import AttentionMetadata, KVCache, PackedWeight, WeightInfo
from qiao.devices import HOST
from qiao.layers.attention import Step
from qiao.layers.embedding import Embedding
from qiao.layers.rotary import RotaryTable
from qiao.layers.weights import fill
from qiao.models.decoder import DecoderLayer
from qiao.models.spec import DecoderSpec
from qiao.optable import MatmulOps, OpTable
from qiao.quantize.source import is_router

Listener = Callable[[str, torch.Tensor], None]
"""Takes the name of a linear layer and its inputs [T, I]."""


@dataclass
class Statistics:
    """What a linear layer's inputs x were like, over ``count`` tokens.

    ``gram`` is the sum of x x^T [I, I], ``absolute`` that of |x| [I], both float32; means once ``settled``.
    """

    gram: torch.Tensor
    absolute: torch.Tensor
    count: int = 0

    @classmethod
    def empty(cls, columns: int, device: str) -> Statistics:
        """Nothing seen yet."""
        return cls(torch.zeros(columns, columns, device=device), torch.zeros(columns, device=device))

    def add(self, x: torch.Tensor) -> None:
        """Take in ``x`` [T, I]."""
        x = x.float()
        self.gram.addmm_(x.T, x)
        self.absolute += x.abs().sum(0)
        self.count += x.shape[0]

    def settled(self) -> Statistics:
        """Means instead of sums, on the host."""
        return Statistics((self.gram / self.count).cpu(), (self.absolute / self.count).cpu(), self.count)

    def divided(self, scale: torch.Tensor) -> Statistics:
        """As if the inputs had been divided by ``scale`` [I]."""
        return Statistics(self.gram / scale / scale[:, None], self.absolute / scale, self.count)


class _EnoughError(Exception):
    """A listener has heard what it waited for; the rest of the layer need not run."""


class Layers:
    """Runs single layers of ``spec`` over ``ops`` in ``dtype``, on sequences of at most ``length`` tokens.

    Products are torch's own on the device's backend, so that weights need no packing and inputs can be overheard.
    Attention, norms and the rest are those of ``ops``.
    """

    def __init__(self, spec: DecoderSpec, ops: OpTable, dtype: torch.dtype, block_size: int, length: int) -> None:
        self._spec, self._dtype, self._block_size, self._length = spec, dtype, block_size, length
        dense = MatmulOps(ops.device, self._keep, self._multiply)
        self._ops = replace(ops, matmul={"dense": dense})
        ropes = dict.fromkeys(x.attention.rope for x in spec.layers if x.attention.rope is not None)
        self._ropes = list(ropes)
        self._tables = [RotaryTable(rope, length, ops.device) for rope in self._ropes]
        self._listener: Listener | None = None
        self._caches: dict[tuple[int, int], KVCache] = {}

    def embed(self, table: torch.Tensor, sequences: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """The first hidden states [T, E] of each sequence, from the embedding ``table`` [V, E]."""
        spec = self._spec
        embedding = Embedding(
            self._ops, self._dtype, "model.embed_tokens", spec.vocab_size, spec.hidden_size, spec.embedding_scale
        )
        embedding.put(table)
        return [embedding(torch.tensor(ids, device=self._ops.device)) for ids in sequences]

    def make(self, index: int, weights: Mapping[str, torch.Tensor]) -> DecoderLayer:
        """Layer ``index`` with ``weights``, given under the names of ``Decoder``. Raises ``ModelError``."""
        rope = self._spec.layers[index].attention.rope
        layer = DecoderLayer(
            self._ops,
            self._dtype,
            f"model.layers.{index}",
            self._spec,
            self._spec.layers[index],
            self._ropes.index(rope) if rope is not None else -1,
        )
        fill(layer.targets(), weights.items())
        return layer

    def run(self, index: int, layer: DecoderLayer, hidden: list[torch.Tensor]) -> None:
        """Replace each of ``hidden`` [T, E] by what ``layer`` makes of it."""
        for i, x in enumerate(hidden):
            mixed, residual = layer(x, None, *self._step(index, x.shape[0]))
            hidden[i] = mixed + residual

    def listen(
        self, index: int, layer: DecoderLayer, hidden: Sequence[torch.Tensor], names: Sequence[str]
    ) -> dict[str, Statistics]:
        """Statistics of the inputs of the linear layers called ``names``, in the order in which they run.

        The layer is left as soon as the last of them has been heard. Experts that no token visited are left out.
        """
        heard: dict[str, Statistics] = {}
        left: set[str] = set()

        def listener(name: str, x: torch.Tensor) -> None:
            if name not in names:
                return
            if name not in heard:
                heard[name] = Statistics.empty(x.shape[1], self._ops.device)
            heard[name].add(x)
            left.discard(name)
            if not left:
                raise _EnoughError

        self._listener = listener
        try:
            for x in hidden:
                left.update(names)
                self._until_enough(layer, x.clone(), index)
        finally:
            self._listener = None
        return {name: found.settled() for name, found in heard.items()}

    def _until_enough(self, layer: DecoderLayer, x: torch.Tensor, index: int) -> None:
        try:
            layer(x, None, *self._step(index, x.shape[0]))
        except _EnoughError:
            return

    def _step(self, index: int, count: int) -> tuple[Step, KVCache]:
        ops = self._ops
        positions = torch.arange(count, device=ops.device)
        cache = self._cache(index)
        metadata = AttentionMetadata(
            query_start=torch.tensor([0, count], dtype=torch.int32, device=ops.kv_device),
            seq_lens=torch.tensor([count], dtype=torch.int32, device=ops.kv_device),
            block_tables=torch.arange(cache_blocks(self._length, self._block_size), dtype=torch.int32)[None].to(
                ops.kv_device
            ),
            slot_mapping=torch.arange(count, device=ops.kv_device),
            query_lens=(count,),
            kv_lens=(count,),
        )
        return Step(metadata, metadata.decode_only, tuple(table.at(positions) for table in self._tables)), cache

    def _cache(self, index: int) -> KVCache:
        """One cache for all layers of a shape: a sequence is through before the next comes."""
        spec = self._spec.layers[index].attention
        shape = (spec.num_kv_heads, spec.head_dim)
        if shape not in self._caches:
            self._caches[shape] = self._ops.allocate_kv(
                cache_blocks(self._length, self._block_size),
                self._block_size,
                *shape,
                self._dtype,
                self._ops.kv_layout,
                self._ops.kv_device,
            )
        return self._caches[shape]

    def _keep(self, scheme: str, tensors: Mapping[str, torch.Tensor], info: WeightInfo, device: str) -> PackedWeight:
        weight = tensors["weight"].to(device)
        if weight.device.type == HOST:  # few processors multiply 16 bits; torch takes up to eight times as long
            weight = weight.float()
        return PackedWeight(scheme, info, {"weight": weight})

    def _multiply(self, x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
        if self._listener is not None:
            self._listener(weight.info.name, x)
        kept = weight.data["weight"]
        y = functional.linear(x.to(kept.dtype), kept, None if bias is None else bias.to(kept.dtype))
        return y.to(x.dtype)


def cache_blocks(length: int, block_size: int) -> int:
    """Blocks that hold ``length`` tokens."""
    return -(-length // block_size)


def linear_names(layer: DecoderLayer) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The linear layers in the order in which they run, each with the names of its parts where it has several.

    Routers of mixtures are left out.
    """
    targets = layer.targets()
    covered = {name for target in targets.values() for name in target.covers}
    for name, target in targets.items():
        if name.endswith(".weight") and len(target.shape) == 2 and name not in covered and not is_router(name):
            yield name.removesuffix(".weight"), tuple(part.removesuffix(".weight") for part in target.covers)
