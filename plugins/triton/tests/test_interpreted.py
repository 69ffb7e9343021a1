"""The kernels in Triton's interpreter: a part of the kit's cases of each hook, and what the kit does not ask."""

from __future__ import annotations

import pytest

CASES = """
import sys
from itertools import islice
import qiao_reference
import qiao_triton_interpreted as plugin
from qiao.contract.cases import cases
from qiao.registry import backend_of
from qiao_conformance import kit
from qiao_conformance.target import Target
backend = backend_of(plugin, "triton", host=backend_of(qiao_reference, "reference"))
target = Target("triton", backend.hooks, backend.device, backend.capabilities)
for hook in sys.argv[2:]:
    assert hook in target.hooks, hook
    count = 0
    for case in islice(cases(hook, target.capabilities), 0, None, int(sys.argv[1])):
        kit.check_case(target, case, strided=bool(count % 2))
        count += 1
    print(hook, count)
"""

HOOKS = (
    ("24", "attention", "decode_attention", "write_kv", "rope_write_kv"),
    ("11", "matmul", "expert_matmul", "copy_blocks"),
    ("3", "rms_norm", "add_rms_norm", "rotary", "silu_mul", "gelu_mul", "cap_logits", "route_experts"),
    ("4", "combine_experts", "apply_penalties"),
    ("15", "sample"),
)


@pytest.mark.parametrize("hooks", HOOKS, ids=lambda hooks: hooks[1])
def test_cases(run, hooks) -> None:
    printed = run(CASES, *hooks).split()
    assert printed[::2] == list(hooks[1:]) and all(int(n) > 0 for n in printed[1::2])


SAMPLE = """
import math, torch
from qiao.contract.cases.logits import settings
from qiao_triton.sampling import sample
from qiao_conformance import oracle
draw = torch.Generator().manual_seed(3)
logits = torch.randn(5, 1100, generator=draw) * 2
logits[0, 7] = logits[0, 1090] = logits[0].max() + 1  # a tie over two tiles
rows = [(1.0, 2, 1.0, 0.0), (1.0, 0, 0.9, 0.0), (0.7, 40, 0.95, 0.02), (1.0, 0, 1.0, 0.0), (0.0, 0, 1.0, 0.0)]
for uniform in (0.49, 0.51):
    params = settings(rows, torch.full((5,), uniform))
    right = oracle.draws(logits, params)
    got = sample(logits, params).tolist()
    assert all(token in right[i] for i, token in enumerate(got)), (uniform, got, right)
    assert got[0] == (7 if uniform < 0.5 else 1090), got
print("ok")
"""


def test_long_rows_and_a_tie_over_tiles(run) -> None:
    assert run(SAMPLE).strip() == "ok"


SPLIT = """
import torch
from dataclasses import replace
from qiao.contract import AttentionMetadata
from qiao_triton import architectures, attention, cache
draw = torch.Generator().manual_seed(1)
stored = cache.allocate_kv(40, 16, 2, 64, torch.float32, "NHD", "cpu")
for part in (stored.key, stored.value):
    part.copy_(torch.randn(part.shape, generator=draw))
lens = (300, 1, 77)
tables = torch.zeros(3, 19, dtype=torch.int32)
for i in range(3):
    tables[i, :] = torch.randperm(40, generator=draw)[:19]
metadata = AttentionMetadata(torch.arange(4, dtype=torch.int32), torch.tensor(lens, dtype=torch.int32), tables,
                             torch.full((3,), -1), (1, 1, 1), lens)
query = torch.randn(3, 8, 64, generator=draw)
found = {}
for count in (1, 2, 16):
    attention.parts = lambda *given, count=count: count
    found[count] = attention.decode_attention(query, stored, metadata, 0.125, 0, 0.0)
whole = attention.attention(query, stored, metadata, 0.125, 0, 0.0)
for count, one in found.items():
    assert (one - whole).abs().max() < 2e-6, (count, (one - whole).abs().max())
for i, length in enumerate(lens):  # in float64, by torch
    slots = (tables[i].long()[:, None] * 16 + torch.arange(16)).flatten()[:length]
    key, value = (x.flatten(0, 1)[slots].double().repeat_interleave(4, 1) for x in (stored.key, stored.value))
    scores = torch.einsum("hd,nhd->hn", query[i].double(), key) * 0.125
    want = torch.einsum("hn,nhd->hd", scores.softmax(1), value)
    assert (whole[i] - want).abs().max() < 2e-6
print("ok")
"""


def test_a_context_in_one_or_many_parts(run) -> None:
    assert run(SPLIT).strip() == "ok"


SPOILED = """
import torch
from qiao.contract import AttentionMetadata
from qiao_triton import attention, cache
stored = cache.allocate_kv(4, 16, 1, 32, torch.int8, "NHD", "cpu")
vectors = torch.randn(20, 1, 32, generator=torch.Generator().manual_seed(0))
vectors[3, 0, 5], vectors[9, 0, 0] = float("nan"), float("-inf")
cache.write_kv(vectors, vectors, stored, torch.arange(20))
scale = stored.key_scale.flatten()[:20]
assert scale[[3, 9]].isnan().all() and scale.isfinite().sum() == 18
assert not stored.key.flatten(0, 1)[[3, 9]].any(), "codes of a vector that is not finite are 0"
start, lens = torch.tensor([0, 8], dtype=torch.int32), torch.tensor([20], dtype=torch.int32)
metadata = AttentionMetadata(start, lens, torch.tensor([[0, 1]], dtype=torch.int32), torch.arange(12, 20), (8,), (20,))
out = attention.attention(torch.randn(8, 2, 32), stored, metadata, 0.1, 6, 0.0)
bad = out.isnan().flatten(1).any(1)
assert bad.tolist() == [True] * 3 + [False] * 5, bad  # positions 12, 13, 14 still see position 9
print("ok")
"""


def test_a_bad_vector_spoils_only_what_reads_it(run) -> None:
    assert run(SPOILED).strip() == "ok"


EXPERTS = """
import torch
from qiao.contract import WeightInfo
from qiao_triton import matmul
draw = torch.Generator().manual_seed(0)
info, weights, values = WeightInfo("w", 64, 24, 4, 32), [], []
for i in range(3):  # one symmetric, one whose scale is exact in half precision, one that needs float32
    codes = torch.randint(0, 16, (24, 64), generator=draw, dtype=torch.uint8)
    scale = torch.rand(24, 2, generator=draw) + 0.5
    scale = scale.half().float() if i == 1 else scale
    zero = torch.full((24, 2), 8.0) if i == 0 else torch.randint(1, 16, (24, 2), generator=draw).float()
    weights.append(matmul.pack_weight("w4a16", {"weight": codes, "scale": scale, "zero": zero}, info, "cpu"))
    spread = [x.double().repeat_interleave(32, 1) for x in (zero, scale)]
    values.append((codes.double() - spread[0]) * spread[1])
assert len({tuple(sorted((k, v.dtype) for k, v in w.data.items())) for w in weights}) == 3
x, chosen = torch.randn(40, 64, generator=draw), torch.randint(0, 3, (40,), generator=draw)
got = matmul.expert_matmul(x, weights, chosen)
want = torch.stack([values[e] @ x[i].double() for i, e in enumerate(chosen.tolist())])
assert (got - want).abs().max() < 1e-4 * want.abs().max()
assert len(weights[0].data.stacks) == 1
matmul.expert_matmul(x, list(weights), chosen)
assert len(weights[0].data.stacks) == 1, "the addresses are put together once"
print("ok")
"""


def test_experts_that_were_packed_differently(run) -> None:
    assert run(EXPERTS).strip() == "ok"


REFUSED = """
import pytest, torch
from qiao.contract import WeightInfo
from qiao_triton import cache, matmul
with pytest.raises(ValueError, match="NHD"):
    cache.allocate_kv(2, 16, 1, 64, torch.float32, "HND", "cpu")
with pytest.raises(ValueError, match="w: weight .3, 4. is not"):
    matmul.pack_weight("dense", {"weight": torch.zeros(3, 4)}, WeightInfo("w", 3, 4), "cpu")
with pytest.raises(ValueError, match="no kernel for w2a16"):
    matmul.pack_weight("w2a16", {"weight": torch.zeros(3, 4)}, WeightInfo("w", 4, 3), "cpu")
print("ok")
"""


def test_what_is_refused(run) -> None:
    assert run(REFUSED).strip() == "ok"


WITHOUT_INT8 = """
import torch
from dataclasses import replace
from qiao.contract import WeightInfo
from qiao_triton import launch, matmul
from qiao_triton.architectures import INTERPRETER
draw = torch.Generator().manual_seed(0)
codes, scale = torch.randint(-128, 128, (40, 200), generator=draw, dtype=torch.int8), torch.rand(40, 1, generator=draw)
weight = matmul.pack_weight("w8a8", {"weight": codes, "scale": scale}, WeightInfo("w", 200, 40, 8), "cpu")
x = torch.randn(3, 200, generator=draw)
found = []
for half in (True, False):
    matmul.architecture_of = lambda x, half=half: replace(INTERPRETER, half=half)
    found.append(matmul.matmul(x, weight, None))
assert torch.equal(*found) and found[0].abs().max() > 1, "both ways are exact"
print("ok")
"""


def test_codes_multiply_the_same_without_int8_products(run) -> None:
    assert run(WITHOUT_INT8).strip() == "ok"
