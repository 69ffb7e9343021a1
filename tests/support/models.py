"""Run a model over a paged cache without the engine, and compare it with transformers."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from typing import Any

import qiao_reference as reference
import torch
from qiao.contract import AttentionMetadata, KVCache
from qiao.models import create
from qiao.models.base import Model
from qiao.optable import MatmulOps, OpTable

BLOCK = 4
LENGTH = 320
"""Tokens that a runner's cache holds."""


def cpu_ops(**changes: Any) -> OpTable:
    """An OpTable made directly of the reference functions, without a registry; ``changes`` replaces slots."""
    table = OpTable(
        device="cpu",
        kv_device="cpu",
        sample_device="cpu",
        kv_layout="NHD",
        memory_info=reference.memory_info,
        synchronize=reference.synchronize,
        allocate_kv=reference.allocate_kv,
        copy_blocks=reference.copy_blocks,
        write_kv=reference.write_kv,
        attention=reference.attention,
        stage_logits=lambda logits: logits,
        sample=reference.sample,
        apply_penalties=reference.apply_penalties,
        logprobs=reference.logprobs,
        matmul={"dense": MatmulOps("cpu", reference.pack_weight, reference.matmul)},
        rms_norm=reference.rms_norm,
        add_rms_norm=reference.add_rms_norm,
        rotary=reference.rotary,
        silu_mul=reference.silu_mul,
        gelu_mul=reference.gelu_mul,
        cap_logits=reference.cap_logits,
        route_experts=reference.route_experts,
        combine_experts=reference.combine_experts,
    )
    return replace(table, **changes)


def counting_ops() -> tuple[OpTable, Counter[str], list[tuple[int, int, bool]]]:
    """``cpu_ops`` that counts calls by slot, and lists (inputs, outputs, bias) of every product."""
    calls, products, base = Counter[str](), list[tuple[int, int, bool]](), cpu_ops()

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            calls[name] += 1
            return function(*args)

        return call

    def product(x: torch.Tensor, weight: Any, bias: torch.Tensor | None) -> torch.Tensor:
        products.append((x.shape[1], weight.info.out_features, bias is not None))
        return reference.matmul(x, weight, bias)

    slots = {f.name: getattr(base, f.name) for f in fields(OpTable)}
    wrapped = {name: counted(name, value) for name, value in slots.items() if callable(value)}
    wrapped["matmul"] = {"dense": MatmulOps("cpu", reference.pack_weight, product)}
    return replace(base, **wrapped), calls, products


class Paged:
    """One sequence over shuffled blocks of four tokens; each ``feed`` is one step."""

    def __init__(self, model: Model, ops: OpTable | None = None, dtype: torch.dtype = torch.float32) -> None:
        self.model, ops = model, ops or cpu_ops()
        blocks = LENGTH // BLOCK
        self.caches: list[KVCache] = []
        kinds = [a for a in model.shape.attention for _ in range(a.count)]
        for kind in kinds:
            cache = ops.allocate_kv(blocks, BLOCK, kind.num_kv_heads, kind.head_dim, dtype, "NHD", "cpu")
            cache.key.fill_(1e4)
            self.caches.append(cache)
        self.table = random.Random(0).sample(range(blocks), blocks)
        self.length = 0

    def feed(self, tokens: list[int]) -> torch.Tensor:
        """Logits [T, V] of ``tokens`` placed after what was fed before."""
        positions = list(range(self.length, self.length + len(tokens)))
        slots = [self.table[p // BLOCK] * BLOCK + p % BLOCK for p in positions]
        self.length += len(tokens)
        metadata = AttentionMetadata(
            query_start=torch.tensor([0, len(tokens)], dtype=torch.int32),
            seq_lens=torch.tensor([self.length], dtype=torch.int32),
            block_tables=torch.tensor([self.table], dtype=torch.int32),
            slot_mapping=torch.tensor(slots),
            query_lens=(len(tokens),),
            kv_lens=(self.length,),
        )
        hidden = self.model.forward(torch.tensor(tokens), torch.tensor(positions), self.caches, metadata)
        return self.model.logits(hidden)

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """The prompt and ``count`` tokens after it, one step each."""
        tokens, logits = list(prompt), self.feed(prompt)
        for _ in range(count):
            tokens.append(int(logits[-1].argmax()))
            logits = self.feed(tokens[-1:])
        return tokens


def build(
    config: Any,
    weights: Iterable[tuple[str, torch.Tensor]],
    ops: OpTable | None = None,
    dtype: torch.dtype = torch.float32,
    max_length: int | None = None,
) -> Model:
    """A loaded model over ``ops``."""
    model = create(config, ops or cpu_ops(), dtype, max_length)
    model.load(weights)
    return model


def reference_model(config: Any, seed: int = 0) -> Any:
    """transformers' model of ``config`` with lively random weights: norms and biases differ from 1 and 0."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.2 if parameter.dim() > 1 else 0.3
            noise = torch.randn(parameter.shape, generator=generator) * scale
            parameter.copy_(noise + (1.0 if parameter.dim() == 1 and "bias" not in name else 0.0))
    return model


def token_ids(count: int, vocab: int, seed: int = 1) -> list[int]:
    """``count`` random ids below ``vocab``."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab, (count,), generator=generator).tolist()
