"""Tiny transformers checkpoints and a small paged runner over the reference hooks."""

from __future__ import annotations

import qiao_reference as ref
import torch
from qiao.contract import AttentionMetadata, KVCache
from qiao.models.base import Model
from qiao.optable import MatmulOps, OpTable
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

BLOCK = 4


def reference_ops() -> OpTable:
    """An OpTable of the reference hooks alone, without a registry."""
    return OpTable(
        device="cpu",
        kv_device="cpu",
        sample_device="cpu",
        kv_layout="NHD",
        memory_info=ref.memory_info,
        synchronize=ref.synchronize,
        allocate_kv=ref.allocate_kv,
        copy_blocks=ref.copy_blocks,
        write_kv=ref.write_kv,
        attention=ref.attention,
        stage_logits=lambda x: x,
        sample=ref.sample,
        apply_penalties=ref.apply_penalties,
        logprobs=ref.logprobs,
        matmul={"dense": MatmulOps("cpu", ref.pack_weight, ref.matmul)},
        rms_norm=ref.rms_norm,
        add_rms_norm=ref.add_rms_norm,
        rotary=ref.rotary,
        silu_mul=ref.silu_mul,
        gelu_mul=ref.gelu_mul,
        cap_logits=ref.cap_logits,
        route_experts=ref.route_experts,
        combine_experts=ref.combine_experts,
    )


def tiny_config(model_type: str, **changes: object) -> object:
    """A two-layer config of ``model_type`` with 64 hidden units and 96 tokens."""
    base: dict[str, object] = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 80,
        "vocab_size": 96,
        "max_position_embeddings": 128,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return AutoConfig.for_model(model_type, **{**base, **changes})


def random_model(config: object, seed: int = 0) -> PreTrainedModel:
    """transformers' own model of ``config`` with random weights large enough to matter, eager attention, float32."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.15)
            elif "bias" in name:
                parameter.normal_(0, 0.1)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


class PagedRunner:
    """Runs sequences of a model over paged caches with shuffled blocks."""

    def __init__(self, model: Model, ops: OpTable, num_blocks: int = 32) -> None:
        self.model = model
        self.caches: list[KVCache] = [
            ops.allocate_kv(num_blocks, BLOCK, a.num_kv_heads, a.head_dim, torch.float32, "NHD", "cpu")
            for a in model.shape.attention
            for _ in range(a.count)
        ]
        self._free = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(3)).tolist()
        self._tables: dict[str, list[int]] = {}
        self._lengths: dict[str, int] = {}

    def step(self, batch: dict[str, list[int]]) -> dict[str, torch.Tensor]:
        """Logits [n, V] of the new tokens of each sequence."""
        slots, positions, ids = [], [], []
        for name, new in batch.items():
            table, start = self._tables.setdefault(name, []), self._lengths.get(name, 0)
            while len(table) * BLOCK < start + len(new):
                table.append(self._free.pop())
            places = range(start, start + len(new))
            positions += places
            slots += [table[p // BLOCK] * BLOCK + p % BLOCK for p in places]
            ids += new
            self._lengths[name] = start + len(new)
        counts = [len(new) for new in batch.values()]
        lens = [self._lengths[name] for name in batch]
        width = max(len(self._tables[name]) for name in batch)
        metadata = AttentionMetadata(
            query_start=torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32),
            seq_lens=torch.tensor(lens, dtype=torch.int32),
            block_tables=torch.tensor(
                [self._tables[n] + [0] * (width - len(self._tables[n])) for n in batch], dtype=torch.int32
            ),
            slot_mapping=torch.tensor(slots),
            query_lens=tuple(counts),
            kv_lens=tuple(lens),
        )
        hidden = self.model.forward(torch.tensor(ids), torch.tensor(positions), self.caches, metadata)
        rows = self.model.logits(hidden).split(counts)
        return dict(zip(batch, rows, strict=True))
