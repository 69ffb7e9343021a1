"""What ``capture`` owes: a replay computes from the buffers as they are now, and what cannot be recorded is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from qiao.contract import AttentionMetadata, KVCache, UnreadLengths, WeightInfo, composites
from qiao.contract.cases import LooseCache, LooseWeight, Random, place

from qiao_conformance.target import Target, host, same, worst

Tensor = torch.Tensor

_VOCABULARY, _HEADS, _KV_HEADS, _FEED_FORWARD, _WIDTH = 50, 4, 2, 48, 3
_EPS = 1e-5
_NEEDED = ("allocate_kv", "write_kv", "attention", "pack_weight", "matmul")


@dataclass(frozen=True)
class Inputs:
    """The step of some sequences, as the engine gives it to a recorded program; ``used`` are its real rows."""

    token_ids: Tensor
    positions: Tensor
    query_start: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    slot_mapping: Tensor
    used: int

    def tensors(self) -> tuple[Tensor, ...]:
        """The fields in the order of ``Layer.step``."""
        return (
            *(self.token_ids, self.positions, self.query_start),
            *(self.seq_lens, self.block_tables, self.slot_mapping),
        )

    def first(self, rows: int) -> Inputs:
        """Views of the first ``rows`` rows."""
        start = self.query_start[: rows + 1]
        parts = (x[:rows] for x in (self.seq_lens, self.block_tables, self.slot_mapping))
        return Inputs(self.token_ids[:rows], self.positions[:rows], start, *parts, used=min(rows, self.used))


class Layer:
    """One decoder layer of the plugin's own hooks, composites where it lacks one, over a full cache of its own."""

    def __init__(self, target: Target, dtype: str) -> None:
        facts, random = target.capabilities, Random("capture", 0)
        self._target, self._device = target, target.device.torch_device
        self.size = (facts.head_dims or (64,))[0]
        self.block = (facts.block_sizes or (16,))[0]
        self.blocks, self._dtype = 4 * _WIDTH + 1, dtype
        hidden = _HEADS * self.size

        def there(*shape: int, kind: str = dtype) -> Tensor:
            return random.normal(*shape, dtype=kind).to(self._device)

        self._table, self._gain = there(_VOCABULARY, hidden), there(hidden)
        length = self.block * _WIDTH
        angle = random.uniform(length, self.size // 2) * 6.28
        self._cos, self._sin = angle.cos().to(self._device), angle.sin().to(self._device)
        shapes = {
            "qkv": (hidden + 2 * _KV_HEADS * self.size, hidden),
            "out": (hidden, hidden),
            "gate_up": (2 * _FEED_FORWARD, hidden),
            "down": (hidden, _FEED_FORWARD),
        }
        self._weights = {name: self._weight(random, name, *shape) for name, shape in shapes.items()}
        slots = torch.arange(self.blocks * self.block)
        key, value = (random.normal(len(slots), _KV_HEADS, self.size, dtype=dtype) for _ in range(2))
        kept = dtype if dtype in (facts.kv_dtypes or facts.dtypes) else (facts.kv_dtypes or facts.dtypes)[0]
        loose = LooseCache(key, value, slots, self.blocks, self.block, facts.kv_layouts[0], kept)
        self.cache: KVCache = place(loose, target.hooks, self._device)
        self._kv_lens: tuple[int, ...] = UnreadLengths()

    def run(self, values: Inputs) -> tuple[Tensor, ...]:
        """``step`` as it is, on inputs from the host, whose lengths it may read there."""
        self._kv_lens = tuple(values.seq_lens.tolist())
        return self.step(*(x.to(self._device) for x in values.tensors()))

    def _weight(self, random: Random, name: str, rows: int, columns: int) -> Any:
        weight = random.normal(rows, columns) * columns**-0.5
        info = WeightInfo(name, columns, rows)
        loose = LooseWeight("dense", {"weight": weight.to(getattr(torch, self._dtype))}, info)
        return place(loose, self._target.hooks, self._device)

    def _hook(self, name: str) -> Callable[..., Any]:
        return self._target.hooks.get(name) or getattr(composites, name)

    def step(
        self,
        token_ids: Tensor,
        positions: Tensor,
        query_start: Tensor,
        seq_lens: Tensor,
        block_tables: Tensor,
        slot_mapping: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """What is captured: the layer's output and the residual, [B, E] each."""
        hooks, rows = self._target.hooks, len(token_ids)
        x = self._table.index_select(0, token_ids)
        qkv = hooks["matmul"](self._hook("rms_norm")(x, self._gain, _EPS), self._weights["qkv"], None)
        parts = qkv.view(rows, _HEADS + 2 * _KV_HEADS, self.size).split([_HEADS, _KV_HEADS, _KV_HEADS], dim=1)
        angles = self._cos.index_select(0, positions), self._sin.index_select(0, positions)
        query = self._rotate_and_write(*parts, *angles, slot_mapping)
        metadata = AttentionMetadata(
            query_start, seq_lens, block_tables, slot_mapping, query_lens=(1,) * rows, kv_lens=self._kv_lens
        )
        attention = hooks.get("decode_attention", hooks["attention"])
        out = attention(query, self.cache, metadata, self.size**-0.5, 0, 0.0)
        out = hooks["matmul"](out.view(rows, -1), self._weights["out"], None)
        normed, total = self._hook("add_rms_norm")(out, x, self._gain, _EPS)
        gated = self._hook("silu_mul")(hooks["matmul"](normed, self._weights["gate_up"], None))
        return hooks["matmul"](gated, self._weights["down"], None), total

    def _rotate_and_write(
        self, query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, slots: Tensor
    ) -> Tensor:
        hooks = self._target.hooks
        if "rope_write_kv" in hooks:
            turned: Tensor = hooks["rope_write_kv"](query, key, value, cos, sin, False, self.cache, slots)
            return turned
        query, key = self._hook("rotary")(query, key, cos, sin, False)
        hooks["write_kv"](key, value, self.cache, slots)
        return query

    def inputs(self, random: Random, rows: int, used: int) -> Inputs:
        """A step on the host: other tokens, lengths, blocks and slots each time; rows from ``used`` on are empty."""
        lens = random.whole(1, self.block * _WIDTH + 1, rows)
        blocks = (random.order(self.blocks - 1) + 1)[: rows * _WIDTH].view(rows, _WIDTH)
        lens[used:], blocks[used:] = 1, 0
        last = lens - 1
        slots = blocks.gather(1, (last // self.block)[:, None])[:, 0] * self.block + last % self.block
        slots[used:] = -1
        tokens = random.whole(0, _VOCABULARY, rows)
        return Inputs(
            tokens, last, torch.arange(rows + 1, dtype=torch.int32), lens.int(), blocks.int(), slots, used=used
        )


def _steps(layer: Layer, sizes: tuple[int, ...]) -> Iterator[tuple[int, Inputs]]:
    """Programs in turn, the largest at last with rows that nobody uses."""
    random = Random("steps", 0)
    for size in (*sizes, *reversed(sizes)):
        yield size, layer.inputs(random, size, size)
    if sizes[-1] > 1:
        yield sizes[-1], layer.inputs(random, sizes[-1], sizes[-1] - 1)


def _fill(buffers: Inputs, values: Inputs) -> None:
    for buffer, value in zip(buffers.tensors(), values.tensors(), strict=True):
        buffer.copy_(value)


def check_replays(target: Target, dtype: str) -> None:
    """Programs of two sizes over one set of buffers, replayed in turn on other inputs, against the same steps eagerly.

    Skips, with the plugin's reason, where the plugin refuses to record the layer or lacks a hook that it needs.
    """
    missing = [name for name in ("capture", *_NEEDED) if name not in target.hooks]
    if missing:
        pytest.skip(f"the plugin has no {', '.join(missing)}")
    sizes = (target.capabilities.capture_sizes or (1, 4))[:2]
    recorded, eager = Layer(target, dtype), Layer(target, dtype)
    values, device = recorded.inputs(Random("first", 0), sizes[-1], sizes[-1]), target.device.torch_device
    buffers = Inputs(*(x.to(device) for x in values.tensors()), used=sizes[-1])
    programs = {}
    for size in sizes:
        inputs = buffers.first(size).tensors()
        try:
            programs[size] = target.hooks["capture"](recorded.step, inputs, device)
        except NotImplementedError as error:
            assert str(error).strip(), "a refusal needs a reason for people"
            pytest.skip(f"not captured: {error}")
        eager.run(values.first(size))  # a recording runs the step
    results: dict[int, tuple[Tensor, ...]] = {}
    for size, values in _steps(recorded, sizes):
        _fill(buffers.first(size), values)
        got = programs[size]()
        target.hooks["synchronize"](device)
        _compare(target, dtype, got, eager.run(values), values.used)
        before = results.setdefault(size, got)
        assert all(a is b for a, b in zip(got, before, strict=True)), "a replay returned other tensors than the first"
    kept = [host(x.cache) for x in (recorded, eager)]
    assert all(same(kept[0][name], kept[1][name]) for name in ("key", "value")), "the caches differ after the replays"


def _compare(target: Target, dtype: str, got: tuple[Tensor, ...], want: tuple[Tensor, ...], used: int) -> None:
    tolerance = target.tolerance("matmul", dtype)
    for name, a, b in zip(("output", "residual"), got, want, strict=True):
        ratio, index = worst(a[:used], host(b[:used]), tolerance)
        assert ratio <= 1, f"{name} of a replay is off by {ratio:.3g} times the tolerance at flat index {index}"


def check_host_value(target: Target) -> None:
    """A value read on the host is refused with a reason, or followed in the replays."""
    device = target.device.torch_device
    x = torch.ones(2, 4).to(device)

    def function(x: Tensor) -> Tensor:
        return x * float(x[0, 0])

    try:
        replay = target.hooks["capture"](function, (x,), device)
    except NotImplementedError as error:
        assert str(error).strip(), "a refusal needs a reason for people"
        return
    x.copy_(torch.full((2, 4), 3.0))
    assert same(host(replay()), torch.full((2, 4), 9.0)), "a replay kept a value that was read on the host"


def check_errors(target: Target) -> None:
    """What a region raises comes out as it is, and the next one can be recorded.

    Skips, with the plugin's reason, where the chip records nothing at all.
    """
    device = target.device.torch_device
    x = torch.ones(2, 4).to(device)
    try:
        target.hooks["capture"](lambda x: x.clone(), (x,), device)
    except NotImplementedError as error:
        assert str(error).strip(), "a refusal needs a reason for people"
        pytest.skip(f"not captured: {error}")
    for function, kind in ((lambda x: UnreadLengths()[0], NotImplementedError), (lambda x: 1 // 0, ZeroDivisionError)):
        with pytest.raises(kind):
            target.hooks["capture"](function, (x,), device)
    assert same(host(target.hooks["capture"](lambda x: x.clone(), (x,), device)()), host(x))
