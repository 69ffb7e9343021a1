"""LoRA adapters beside linear layers: ``x W^T`` gets ``(x A^T) B^T`` added, for the rows that have an adapter.

An adapter's A and B are dense weights like any other, packed and multiplied by the operators of ``W[dense]``: so an
adapter runs wherever dense layers run, is placed, priced and counted with them, and a row's result depends on its batch
no more than theirs does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from qiao.contract import PackedWeight, WeightInfo
from qiao.optable import MatmulOps

NO_ADAPTER = 0
"""The adapter number of a row without one."""

Group = tuple[int, torch.Tensor | None]
"""An adapter and its rows [n] int64 on the compute device, None for all rows of the step."""


@dataclass(slots=True)
class AdapterRows:
    """Which rows of the present step have which adapter; all layers of a model read one of these."""

    groups: tuple[Group, ...] = ()

    def choose(self, adapters: Sequence[int], counts: Sequence[int], device: str) -> None:
        """Sequence i has ``counts[i]`` rows, one after the other, all with ``adapters[i]``."""
        self.groups = group_rows(adapters, counts, device)

    def clear(self) -> None:
        """No row has an adapter."""
        self.groups = ()


def group_rows(adapters: Sequence[int], counts: Sequence[int], device: str) -> tuple[Group, ...]:
    """The rows of each adapter in a step, in rising order; see ``AdapterRows.choose``."""
    of_row = np.repeat(np.array(adapters, np.int64), np.array(counts, np.int64))
    present = sorted(set(adapters) - {NO_ADAPTER})
    if len(present) == 1 and NO_ADAPTER not in adapters:
        return ((present[0], None),)
    rows = [np.flatnonzero(of_row == adapter) for adapter in present]
    return tuple((a, torch.from_numpy(r).to(device)) for a, r in zip(present, rows, strict=True))


@dataclass(frozen=True, slots=True)
class Update:
    """A part of one layer's update: ``b @ a`` is added to the outputs from ``first`` on; ``a`` [r, I], ``b`` [n, r]."""

    first: int
    a: torch.Tensor
    b: torch.Tensor


@dataclass(slots=True)
class LinearAdapters:
    """The adapters of one linear layer with ``in_features`` I and ``out_features`` O, packed for ``ops``."""

    ops: MatmulOps
    rows: AdapterRows
    name: str
    in_features: int
    out_features: int
    dtype: torch.dtype
    _packed: dict[int, tuple[PackedWeight, PackedWeight]] = field(default_factory=dict)

    def put(self, adapter: int, updates: Sequence[Update]) -> None:
        """Pack what ``adapter`` has here. Several updates become one: their A above each other, their B side by side.

        Updates with one and the same A share it.
        """
        shared = {id(u.a): u.a for u in updates}
        places, rank = {}, 0
        for key, a in shared.items():
            places[key] = slice(rank, rank + a.shape[0])
            rank += a.shape[0]
        b = torch.zeros(self.out_features, rank)
        for u in updates:
            b[u.first : u.first + u.b.shape[0], places[id(u.a)]] += u.b
        a = torch.cat(list(shared.values())).to(self.dtype)
        self._packed[adapter] = self._pack("lora_a", a), self._pack("lora_b", b.to(self.dtype))

    def _pack(self, part: str, weight: torch.Tensor) -> PackedWeight:
        info = WeightInfo(f"{self.name}.{part}", weight.shape[1], weight.shape[0])
        return self.ops.pack_weight("dense", {"weight": weight}, info, self.ops.device)

    def drop(self, adapter: int) -> None:
        """Forget ``adapter``, if it has anything here."""
        self._packed.pop(adapter, None)

    def nbytes(self, adapter: int) -> int:
        """Bytes of what ``adapter`` has here."""
        return sum(weight.nbytes for weight in self._packed.get(adapter, ()))

    def add(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """``y`` [T, O], the layer's product of ``x`` [T, I], with the step's updates; may write to ``y``."""
        multiply = self.ops.matmul
        for adapter, rows in self.rows.groups:
            weights = self._packed.get(adapter)
            if weights is None:
                continue
            a, b = weights
            if rows is None:
                y = y + multiply(multiply(x, a, None), b, None)
            else:
                y.index_add_(0, rows, multiply(multiply(x.index_select(0, rows), a, None), b, None))
        return y
