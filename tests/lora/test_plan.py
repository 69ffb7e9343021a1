"""Adapters in the plan: they run with the dense weights, and a device without those pays for their activations."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from qiao import EngineArgs
from qiao.build import place
from qiao.cli.plan import read_shape
from qiao.contract import StepShape
from qiao.loading.lora import read_adapter
from qiao.models import create
from qiao.models.adapters import ModelAdapters, adapter_bytes, with_adapters
from qiao.registry import FallbackCounters

from tests.support.adapters import linear_modules, write_adapter
from tests.support.checkpoints import rand_checkpoint
from tests.support.fallback import checkpoint, shape, sim_backend

RANK = 4
LAYERS = 2


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plan")
    return write_adapter(folder / "adapter", linear_modules(rand_checkpoint(folder / "base")), rank=RANK)


def test_adapters_are_dense_weights_that_are_priced(adapter: Path) -> None:
    """Without a dense product on the device, a step with one adapter for all moves just what the plan says."""
    wide = with_adapters(shape(), 3, RANK)
    backend = sim_backend(missing=("matmul",))
    args = EngineArgs(model="m", device="sim", fallback="allow", block_size=16)
    counters = FallbackCounters()
    plan, ops = place(wide, backend, args, counters)
    step = StepShape(tokens=5, seqs=1, logits=5, context=5)
    plain = replace(plan, shape=shape()).price(step)
    full = plan.price(step)
    row, bare = (next(r for r in p.rows if r.operator == "matmul") for p in (full, plain))
    assert row.kind.value == "host"
    assert row.price.estimate
    # Four linear layers of each decoder layer get two products each.
    assert row.price.calls - bare.price.calls == LAYERS * 4 * 2
    widths = {"qkv": (64, 3 * RANK, 128), "o": (64, RANK, 64), "gate_up": (64, 2 * RANK, 256), "down": (128, RANK, 64)}
    down = sum(i + r for i, r, _ in widths.values()) * LAYERS * 5 * 4
    back = sum(r + o for _, r, o in widths.values()) * LAYERS * 5 * 4
    assert row.price.bytes_to_host - bare.price.bytes_to_host == down
    assert row.price.bytes_to_device - bare.price.bytes_to_device == back

    config, weights = checkpoint()
    model = create(config, ops, torch.float32, 64)
    model.load(weights.items())
    adapters = ModelAdapters(model, ops)
    assert adapters.load(1, read_adapter(str(adapter), RANK)) == adapter_bytes(wide) // 3
    adapters.choose([1], [5])
    from tests.support.quantized import logits

    logits(model, ops, [5, 6, 7, 8, 9])
    counted = counters.record("matmul")
    assert (counted.calls, counted.bytes_to_host, counted.bytes_to_device) == (
        row.price.calls,
        row.price.bytes_to_host,
        row.price.bytes_to_device,
    )


def test_more_adapters_more_calls_not_more_bytes() -> None:
    step = StepShape(tokens=8, seqs=8, logits=8, context=64)
    rows = []
    for count in (1, 4):
        args = EngineArgs(model="m", device="sim", fallback="allow", block_size=16)
        plan, _ = place(with_adapters(shape(), count, RANK), sim_backend(missing=("matmul",)), args, FallbackCounters())
        rows.append(next(r.price for r in plan.price(step).rows if r.operator == "matmul"))
    assert rows[1].calls - rows[0].calls == 3 * LAYERS * 4 * 2
    assert rows[1].bytes == rows[0].bytes


def test_a_quantized_model_gets_a_dense_group_for_its_adapters() -> None:
    args = {"model": "examples/configs/llama-3-8b.json", "max_lora_rank": 16}
    plain, _ = read_shape(EngineArgs(**args))
    quantized = replace(plain, linears=tuple(replace(x, scheme="w4a16", group_size=128) for x in plain.linears))
    assert with_adapters(quantized, 2, 16).schemes == ("w4a16", "dense")
    adapted, _ = read_shape(EngineArgs(**args, enable_lora=True, max_loras=2))
    # Rank 16 on all seven projections of 32 layers in bfloat16; q, k and v have one A of three times the rank.
    widths = [(4096, 48), (48, 6144), (4096, 16), (16, 4096), (4096, 32), (32, 28672), (14336, 16), (16, 4096)]
    assert adapter_bytes(adapted) == 2 * 32 * 2 * sum(i * o for i, o in widths)
    assert adapter_bytes(plain) == 0
