"""What a recorded program computes, on changed inputs, against the same Python run again; and what is refused."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest
import qiao_cpu
import torch
from qiao.contract import WeightInfo
from qiao_cpu import native
from qiao_cpu.memory import memory_for

from tests.support.cpu import generator, linear

SIZE = 64
GAIN, BIAS = torch.linspace(0.5, 2, SIZE), torch.linspace(-1, 1, 200)
WEIGHT, INFO = torch.ones(8, SIZE), WeightInfo("w", SIZE, 8)


def region(x):
    """Every kind of step: kernels, views, copies of strided rows, fills, memory that is used again."""
    heads = x.view(3, 2, SIZE).transpose(0, 1)  # [2, 3, SIZE], no longer contiguous
    normed = qiao_cpu.rms_norm(heads, GAIN, 1e-5)
    total = torch.zeros(6, SIZE, dtype=x.dtype)
    for _ in range(3):
        normed, total = qiao_cpu.add_rms_norm(normed.reshape(6, SIZE), total, GAIN, 1e-5)
    wide = torch.cat([normed, total], dim=-1)
    return (
        qiao_cpu.silu_mul(wide),
        heads[1, :, ::2].contiguous(),
        wide.new_empty(2, SIZE).copy_(x[0]),
        wide.narrow(0, 2, 3),
    )


@pytest.fixture
def x():
    return torch.randn(6, SIZE, generator=generator(0))


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_replay_equals_running_the_function_again(x, threads, count, inference, dtype):
    threads(count)
    with torch.inference_mode(inference):
        x = x.to(dtype)
        replay = qiao_cpu.capture(region, (x,), "cpu")
        pointers = [t.data_ptr() for t in replay()]
        for seed in range(1, 4):
            x.copy_(torch.randn(6, SIZE, generator=generator(seed)))
            out = replay()
            assert [t.data_ptr() for t in out] == pointers
            assert all(torch.equal(a, b) for a, b in zip(out, region(x), strict=True))


def test_products_of_every_scheme(x):
    for scheme in ("dense", "w8a16", "w8a8", "w4a16"):
        made = linear(scheme, 200, SIZE, group=32 if scheme == "w4a16" else -1)
        replay = qiao_cpu.capture(lambda x, made=made: made(x, BIAS), (x,), "cpu")
        x.mul_(-1.5)
        assert torch.equal(replay(), made(x, BIAS))


REFUSED = {
    "tanh": torch.tanh,
    "_local_scalar_dense": lambda x: x[0, 0].item(),
    "nonzero": torch.nonzero,
    "lift_fresh": lambda x: torch.tensor([1.0]),
    "packing weights": lambda x: qiao_cpu.pack_weight("dense", {"weight": WEIGHT}, INFO, "cpu"),
    "recording another": lambda x: qiao_cpu.capture(torch.clone, (x,), "cpu"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_program_can_do_is_refused_by_name(x, name):
    def function(x):
        qiao_cpu.rms_norm(x, GAIN, 1e-5)
        return REFUSED[name](x)

    with pytest.raises(NotImplementedError, match=name):
        qiao_cpu.capture(function, (x,), "cpu")
    assert native.set_threads(native.threads()) is None, "nothing records any more"
    assert torch.equal(qiao_cpu.capture(torch.clone, (x,), "cpu")(), x)


def test_an_error_of_the_function_comes_out_as_it_is_and_ends_the_recording(x):
    with pytest.raises(ZeroDivisionError):
        qiao_cpu.capture(lambda x: 1 / 0, (x,), "cpu")
    assert torch.equal(qiao_cpu.capture(torch.clone, (x,), "cpu")(), x)


def test_programs_over_one_buffer_share_memory_and_others_do_not(x):
    def chain(x):
        for _ in range(50):
            x = qiao_cpu.rms_norm(x, GAIN, 1e-5)
        return x

    big = torch.randn(4000, SIZE, generator=generator(0))
    replays = [qiao_cpu.capture(chain, (big[:n],), "cpu") for n in (100, 2000, 4000)]
    memory = memory_for([big])
    assert memory.nbytes == 8 << 20, "two blocks of 1 MB are alive at a time"
    for replay, n in zip(replays, (100, 2000, 4000), strict=True):
        assert torch.equal(replay(), chain(big[:n]))
    other = qiao_cpu.capture(chain, (x,), "cpu")
    kept = other().clone()
    replays[2]()
    assert torch.equal(other(), kept)
    del replays, replay, memory
    gc.collect()
    assert memory_for([big]).nbytes == 0


def test_a_tensor_that_outlives_its_recording_keeps_its_memory(x):
    kept = []

    def function(x):
        kept.append(qiao_cpu.rms_norm(x, GAIN, 1e-5))
        return qiao_cpu.rms_norm(kept[0], GAIN, 1e-5)

    first = qiao_cpu.capture(function, (x,), "cpu")
    want = kept[0].clone()
    replays = [qiao_cpu.capture(lambda x: x.clone().copy_(GAIN), (x[:n],), "cpu") for n in (6, 3, 1)]
    for replay in replays:
        replay()
    assert torch.equal(kept[0], want)
    assert torch.equal(first(), qiao_cpu.rms_norm(want, GAIN, 1e-5))


def test_programs_say_their_size(x):
    sizes = []
    for steps in (1, 100):

        def chain(x, steps=steps):
            for _ in range(steps):
                x = qiao_cpu.rms_norm(x, GAIN, 1e-5)
            return x

        replay = qiao_cpu.capture(chain, (x,), "cpu")
        assert len(replay.program.steps()) == steps
        sizes.append(replay.nbytes)
    assert 32 * 100 < sizes[1] < 1024 * 100 and sizes[0] < sizes[1] / 20


def test_steps_are_named(x):
    replay = qiao_cpu.capture(region, (x,), "cpu")
    assert replay.program.steps() == [
        "copy",
        "rms_norm",
        "zero",
        *["add_rms_norm"] * 3,
        "copy",
        "copy",
        "silu_mul",
        *["copy"] * 2,
    ]


IDS, COLUMNS = torch.tensor([5, 0, 3, 3]), torch.randperm(SIZE, generator=generator(9))
TABLE = torch.randn(20, SIZE, generator=generator(8))
CODES = torch.randint(-128, 128, (6, SIZE), generator=generator(7), dtype=torch.int8)

LIGHT = {
    "embedding": lambda x: torch.nn.functional.embedding(IDS, x),
    "rows": lambda x: x.index_select(0, IDS),
    "columns": lambda x: x.index_select(1, COLUMNS),
    "float": lambda x: x.float(),
    "bfloat16": lambda x: x[:, 8:24].bfloat16(),
    "float16": lambda x: x.t().half(),
    "scale": lambda x: x.view(3, 2, SIZE)[:, 1] * 1.7,
    "scale of columns": lambda x: x[:, ::2] * -0.3,
    "sum": lambda x: x + x.view(2, 3, SIZE).transpose(0, 1).reshape(6, SIZE),
    "sum of types": lambda x: x + x.float(),
    "sum with repetition": lambda x: x.float().view(6, 4, 16) + x.float()[:, :4].unsqueeze(-1),
    "product with repetition": lambda x: x.float().view(6, 4, 16) * x.float()[:, :4].unsqueeze(-1),
    "difference with repetition": lambda x: x.float()[2] - x.float()[:, 3:4],
    "bytes": lambda x: CODES.float() * x.float(),
    "unsigned bytes": lambda x: CODES.view(torch.uint8).float() - x.float(),
    "zeros": lambda x: torch.zeros_like(x).copy_(x) + x.new_zeros(6, SIZE),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", LIGHT)
def test_light_operators_equal_torchs_to_the_bit(x, name, dtype):
    x = x.to(dtype)
    replay = qiao_cpu.capture(LIGHT[name], (x,), "cpu")
    x.copy_(torch.randn(6, SIZE, generator=generator(4)))
    got, want = replay(), LIGHT[name](x)
    assert got.dtype == want.dtype and torch.equal(got, want)


def test_an_id_outside_the_table_is_an_error_that_names_the_step():
    ids = torch.tensor([1, 2])
    replay = qiao_cpu.capture(lambda ids: TABLE.index_select(0, ids), (ids,), "cpu")
    ids[1] = 20
    with pytest.raises(IndexError, match="gather_rows"):
        replay()
    ids[1] = 19
    assert torch.equal(replay(), TABLE[ids])


def test_recording_imports_neither_compiler_nor_algebra() -> None:
    """What torch would import for a dispatch mode and for ``torch.broadcast_shapes`` takes 60 MiB and a second."""
    code = """
import sys, torch
from qiao_cpu.capture import capture
x, y = torch.ones(4, 8), torch.ones(4, 1)
found = capture(lambda x, y: x * y, (x, y), "cpu")
assert found().shape == (4, 8)
print(sorted({"sympy", "torch._dynamo"} & set(sys.modules)))
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
