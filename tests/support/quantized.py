"""Logits of a quantized checkpoint on any backend, and of the float model made of its dequantized weights."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from qiao.contract import AttentionMetadata
from qiao.loading import iter_weights, load_config, quantized_weights, resolve
from qiao.models import create, describe
from qiao.models.base import Model
from qiao.optable import OpTable
from qiao.registry import Backend, FallbackCounters, Plan, Policy, backend_of, bind, make_plan

BLOCK = 16
BLOCKS = 8
IDS = [7 * i % 320 for i in range(40)]


BACKENDS = ("reference", "sim", *(["cpu"] if find_spec("qiao_cpu") else []))
"""The reference plugin, the simulated device, and the native plugin where it is installed."""


def backend_called(name: str) -> Backend:
    """A fresh backend: the simulated device is one for the whole process, so none is kept."""
    from tests.support.fallback import host_backend, sim_backend

    if name != "cpu":
        return host_backend() if name == "reference" else sim_backend()
    import qiao_cpu

    return backend_of(qiao_cpu, "cpu", host=host_backend())


def place(model: Path, backend: Backend, **options: Any) -> tuple[Plan, OpTable]:
    """Plan and table of a checkpoint on ``backend``."""
    files = resolve(model)
    shape = describe(load_config(files), quantized_weights(files))
    plan = make_plan(shape, backend, Policy.parse("allow"), block_size=BLOCK, **options)
    return plan, bind(plan, backend, FallbackCounters())


def load(model: Path, ops: OpTable, dtype: torch.dtype = torch.float32) -> Model:
    """The checkpoint over ``ops``, quantized as it is."""
    files = resolve(model)
    made = create(load_config(files), ops, dtype, BLOCK * BLOCKS, quantized_weights(files))
    made.load(iter_weights(files, progress=False))
    return made


def logits(model: Model, ops: OpTable, ids: list[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Logits [T, V] of one sequence, on the host."""
    caches = [
        ops.allocate_kv(BLOCKS, BLOCK, kind.num_kv_heads, kind.head_dim, dtype, ops.kv_layout, ops.kv_device)
        for kind in model.shape.attention
        for _ in range(kind.count)
    ]
    count, kv = len(ids), ops.kv_device
    metadata = AttentionMetadata(
        query_start=torch.tensor([0, count], dtype=torch.int32).to(kv),
        seq_lens=torch.tensor([count], dtype=torch.int32).to(kv),
        block_tables=torch.arange(BLOCKS, dtype=torch.int32)[None].to(kv),
        slot_mapping=torch.arange(count).to(kv),
        query_lens=(count,),
        kv_lens=(count,),
    )
    tokens, positions = torch.tensor(ids).to(ops.device), torch.arange(count).to(ops.device)
    return model.logits(model.forward(tokens, positions, caches, metadata)).cpu()


def float_logits(
    config: Any,
    weights: Mapping[str, torch.Tensor],
    ids: list[int],
    inputs: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """What transformers computes from float weights under a checkpoint's names: [T, V].

    ``inputs`` is done to the inputs of the layers' linear weights first.
    """
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        save_file({n: w.contiguous() for n, w in weights.items()}, f"{folder}/model.safetensors", {"format": "pt"})
        model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    for name, module in model.named_modules():
        if inputs is not None and name.endswith("_proj"):
            module.register_forward_pre_hook(lambda _, given: inputs(given[0]))
    with torch.no_grad():
        found: torch.Tensor = model(torch.tensor([ids]), use_cache=False).logits[0]
    return found
