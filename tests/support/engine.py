"""A tiny float32 decoder over an OpTable made of plain loops, and helpers to drive an engine.

Written apart from the reference plugin, so that both check each other.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
from qiao.contract import AttentionMetadata, AttentionShape, KVCache, LinearShape, MemoryInfo, ModelShape, composites
from qiao.engine import Engine, EngineConfig
from qiao.engine.request import EngineRequest, SequenceOutput
from qiao.optable import OpTable
from qiao.sampling_params import SamplingParams

VOCAB = 96
HEADS, KV_HEADS, HEAD_DIM, LAYERS = 4, 2, 8, 2
HIDDEN = HEADS * HEAD_DIM


def allocate_kv(
    num_blocks: int, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype, layout: str, device: str
) -> KVCache:
    """Filled with NaN, so that a read of a slot that was never written shows."""
    shape = (num_blocks, block_size, kv_heads, head_dim)
    key = torch.full(shape, math.nan, dtype=dtype)
    return KVCache(key, key.clone(), block_size, "NHD")


def copy_blocks(cache: KVCache, source: torch.Tensor, target: torch.Tensor) -> None:
    cache.key[target] = cache.key[source]
    cache.value[target] = cache.value[source]


def write_kv(key: torch.Tensor, value: torch.Tensor, cache: KVCache, slots: torch.Tensor) -> None:
    block, offset = slots // cache.block_size, slots % cache.block_size
    cache.key[block, offset] = key
    cache.value[block, offset] = value


def attention(
    query: torch.Tensor, cache: KVCache, metadata: AttentionMetadata, scale: float, window: int, soft_cap: float
) -> torch.Tensor:
    out = torch.empty_like(query)
    start = metadata.query_start.tolist()
    for i, length in enumerate(metadata.seq_lens.tolist()):
        blocks = metadata.block_tables[i, : -(-length // cache.block_size)].long()
        keys = cache.key[blocks].flatten(0, 1)[:length].repeat_interleave(HEADS // KV_HEADS, 1)
        values = cache.value[blocks].flatten(0, 1)[:length].repeat_interleave(HEADS // KV_HEADS, 1)
        rows = slice(start[i], start[i + 1])
        count = start[i + 1] - start[i]
        scores = torch.einsum("qhd,khd->hqk", query[rows], keys) * scale
        seen = torch.arange(length)[None, :] <= torch.arange(length - count, length)[:, None]
        scores = scores.masked_fill(~seen, -math.inf)
        out[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
    return out


def sample(logits: torch.Tensor, params: object) -> torch.Tensor:
    """The contract's order, one row at a time."""
    ids = logits.argmax(-1)
    for i in range(len(logits)):
        temperature = float(params.temperature[i])
        if temperature == 0.0:
            continue
        order = torch.sort(logits[i] / temperature, descending=True, stable=True)
        p = order.values.softmax(0)
        keep = torch.ones_like(p, dtype=torch.bool)
        if params.top_k[i] > 0:
            keep[int(params.top_k[i]) :] = False
        kept = torch.where(keep, p, 0.0)
        kept = kept / kept.sum()
        if params.top_p[i] < 1:
            keep &= kept.cumsum(0) - kept < params.top_p[i]
        keep &= p >= params.min_p[i] * p.max()
        kept = torch.where(keep, p, 0.0)
        total = kept.cumsum(0) / kept.sum()
        at = int(torch.searchsorted(total, params.uniform[i], right=True).clamp(max=int(keep.sum()) - 1))
        ids[i] = order.indices[at]
    return ids


def make_ops(**changes: object) -> OpTable:
    """Everything on the CPU, from the functions above."""
    ops = OpTable(
        device="cpu",
        kv_device="cpu",
        sample_device="cpu",
        kv_layout="NHD",
        memory_info=lambda device: MemoryInfo(1 << 30, 1 << 30),
        synchronize=lambda device: None,
        allocate_kv=allocate_kv,
        copy_blocks=copy_blocks,
        write_kv=write_kv,
        attention=attention,
        stage_logits=lambda logits: logits,
        sample=sample,
        apply_penalties=composites.apply_penalties,
        logprobs=composites.logprobs,
        matmul={},
        rms_norm=composites.rms_norm,
        add_rms_norm=composites.add_rms_norm,
        rotary=composites.rotary,
        silu_mul=composites.silu_mul,
        gelu_mul=composites.gelu_mul,
        cap_logits=composites.cap_logits,
        route_experts=composites.route_experts,
        combine_experts=composites.combine_experts,
    )
    return replace(ops, **changes)


SHAPE = ModelShape(
    architecture="TinyForTests",
    hidden_size=HIDDEN,
    vocab_size=VOCAB,
    dtype="float32",
    max_position=512,
    attention=(AttentionShape(LAYERS, HEADS, KV_HEADS, HEAD_DIM),),
    linears=(LinearShape("head", HIDDEN, VOCAB, 1, rows="N"),),
)


class TinyModel:
    """Rotary attention and a feed-forward part: each logit depends on every earlier token and its position."""

    def __init__(self, ops: OpTable, seed: int = 0) -> None:
        self.shape = SHAPE
        self.ops = ops
        make = torch.Generator().manual_seed(seed)

        def weight(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=make) / math.sqrt(size[0])

        self.embed = torch.randn(VOCAB, HIDDEN, generator=make)
        width = (HEADS + 2 * KV_HEADS) * HEAD_DIM
        self.layers = [(weight(HIDDEN, width), weight(HIDDEN, HIDDEN), weight(HIDDEN, HIDDEN)) for _ in range(LAYERS)]
        self.head = 4 * weight(HIDDEN, VOCAB)
        self.one = torch.ones(HIDDEN)
        self.inverse = 100.0 ** (-torch.arange(HEAD_DIM // 2) / (HEAD_DIM / 2))
        self.steps: list[tuple[int, ...]] = []

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Nothing to load."""

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, caches: list[KVCache], metadata: AttentionMetadata
    ) -> torch.Tensor:
        self.steps.append(metadata.query_lens)
        x = self.embed[token_ids]
        angle = positions[:, None] * self.inverse
        cos, sin = angle.cos(), angle.sin()
        for (qkv, out, up), cache in zip(self.layers, caches, strict=True):
            y = (self.ops.rms_norm(x, self.one, 1e-6) @ qkv).view(len(x), -1, HEAD_DIM)
            q, k, v = y.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
            q, k = self.ops.rotary(q, k, cos, sin, False)
            self.ops.write_kv(k, v, cache, metadata.slot_mapping)
            attended = self.ops.attention(q, cache, metadata, HEAD_DIM**-0.5, 0, 0.0)
            x = x + attended.reshape(len(x), HIDDEN) @ out
            x = x + torch.tanh(self.ops.rms_norm(x, self.one, 1e-6) @ up)
        return self.ops.rms_norm(x, self.one, 1e-6)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.head

    def naive(self, tokens: Sequence[int]) -> torch.Tensor:
        """Logits [len, V] of a whole sequence in one block: no paging, batching or chunking."""
        size = len(tokens)
        caches = [allocate_kv(1, size, KV_HEADS, HEAD_DIM, torch.float32, "NHD", "cpu") for _ in self.layers]
        metadata = AttentionMetadata(
            torch.tensor([0, size], dtype=torch.int32),
            torch.tensor([size], dtype=torch.int32),
            torch.zeros(1, 1, dtype=torch.int32),
            torch.arange(size),
            (size,),
            (size,),
        )
        return self.logits(self.forward(torch.tensor(tokens), torch.arange(size), caches, metadata))

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """``count`` arg max tokens, each from a full recomputation."""
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.naive(tokens)[-1].argmax()))
        return tokens[len(prompt) :]


def make_engine(
    model: Callable[[OpTable], TinyModel] = TinyModel,
    ops: OpTable | None = None,
    clock: Callable[[], float] = time.perf_counter,
    **config: object,
) -> Engine:
    """An engine with small blocks and the integrity check on."""
    settings: dict[str, object] = {
        "num_blocks": 64,
        "block_size": 4,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": 128,
        "vocab_size": VOCAB,
        "check_integrity": True,
    }
    ops = ops or make_ops()
    return Engine(model(ops), ops, EngineConfig(**(settings | config)), clock=clock)


def request(
    name: str,
    prompt: Sequence[int],
    *,
    priority: int = 0,
    salt: str = "",
    eos: Sequence[int] = (),
    **params: object,
) -> EngineRequest:
    """Greedy unless told otherwise."""
    settings: dict[str, object] = {"temperature": 0.0, "max_tokens": 8}
    return EngineRequest(
        request_id=name,
        prompt_token_ids=list(prompt),
        params=SamplingParams(**(settings | params)),
        arrival=0.0,
        eos_token_ids=list(eos),
        priority=priority,
        cache_salt=salt,
    )


class Results:
    """Outputs gathered by (request, index), in order of completion."""

    def __init__(self) -> None:
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.reasons: dict[tuple[str, int], str] = {}
        self.outputs: list[SequenceOutput] = []

    def add(self, outputs: Iterable[SequenceOutput]) -> None:
        for out in outputs:
            key = (out.request_id, out.index)
            assert key not in self.reasons, f"{key} speaks after its end"
            self.tokens.setdefault(key, []).extend(out.token_ids)
            self.outputs.append(out)
            if out.finish_reason is not None:
                self.reasons[key] = out.finish_reason

    def of(self, name: str, index: int = 0) -> list[int]:
        return self.tokens[name, index]


def run(engine: Engine, requests: Iterable[EngineRequest] = (), max_steps: int = 2000) -> Results:
    """Add all, step until idle, check the books after each step."""
    results = Results()
    for item in requests:
        engine.add_request(item)
    steps = 0
    while engine.has_work():
        results.add(engine.step())
        engine.check_integrity()
        steps += 1
        assert steps < max_steps, "the engine does not come to an end"
    stats = engine.stats()
    assert (stats.kv_blocks_used, stats.running, stats.waiting) == (0, 0, 0)
    return results
