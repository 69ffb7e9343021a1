"""What the pretend device does and does not do."""

import threading

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from qiao_conformance import sim

D = "sim"


@pytest.fixture(autouse=True)
def device():
    sim.setup(devices=2, memory=32 << 20)
    yield
    sim.reset()


def test_memory_is_opaque():
    t = torch.randn(3).to(D)
    with pytest.raises(TypeError):
        t.numpy()
    with pytest.raises(TypeError):
        np.asarray(t)
    with pytest.raises(RuntimeError):
        t + torch.randn(3)
    with pytest.raises(RuntimeError):
        torch.mm(torch.randn(2, 3), torch.randn(3, 2).to(D))
    assert t.data_ptr() == 0


def test_devices_do_not_mix():
    a, b = torch.ones(2, device="sim:0"), torch.ones(2, device="sim:1")
    with pytest.raises(RuntimeError):
        a + b
    with sim.counted() as c:
        assert (a + b.to("sim:0")).tolist() == [2, 2]
    assert (c["peer"], c["d2h"]) == (1, 1)
    with torch.sim.device(1):
        assert torch.empty(1, device=D).device.index == 1
    with pytest.raises(RuntimeError):
        torch.empty(1, device="sim:2")


def test_copies_are_counted():
    x = torch.randn(8, 8)
    with sim.counted() as c:
        y = x.to(D)
        z = (y @ y).relu_()
        z.cpu()
    assert (c["h2d"], c["d2h"], c["launches"]) == (1, 1, 2)
    assert sim.STATE.bytes["h2d"] == 8 * 8 * 4
    with sim.counted() as c:
        bool((y > 0).any())
    assert c["d2h"] == 1 and c["syncs"] == 1


def test_views_share_memory_and_it_is_freed():
    base = torch.sim.memory_allocated()
    t = torch.zeros(1024, device=D)
    v = t.view(32, 32)[1]
    v.fill_(3)
    assert t.sum().item() == 96
    assert torch.sim.memory_allocated() == base + 4096
    del t
    assert torch.sim.memory_allocated() == base + 4096
    del v
    assert torch.sim.memory_allocated() == base


def test_views_and_writes_across_inference_mode():
    t = torch.zeros(4, 4, device=D)
    with torch.inference_mode():
        t.view(16)[3:5].fill_(1)
        t[2].copy_(torch.ones(4))
        t.view(2, 8).add_(t.view(2, 8))
    assert t.sum().item() == 12


def test_out_of_memory():
    keep = [torch.empty(4 << 20, dtype=torch.uint8, device=D) for _ in range(8)]
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1, device=D)
    del keep
    torch.empty(8 << 20, dtype=torch.uint8, device=D)
    sim.fail("aten.mm", error=lambda n: torch.OutOfMemoryError("injected"))
    with pytest.raises(torch.OutOfMemoryError):
        torch.eye(3, device=D) @ torch.eye(3, device=D)
    torch.eye(3, device=D) @ torch.eye(3, device=D)


def test_missing_op_and_dtype():
    sim.STATE.missing_ops.add("aten.sort")
    sim.STATE.missing_dtypes.add(torch.bfloat16)
    t = torch.randn(4).to(D)
    with pytest.raises(NotImplementedError):
        t.sort()
    with pytest.raises(RuntimeError):
        t.bfloat16()
    with pytest.raises(RuntimeError):
        torch.empty(1, dtype=torch.bfloat16, device=D)


def test_failures_now_late_and_lost():
    t = torch.randn(4, 4).to(D)
    sim.fail("aten.mm", skip=1)
    t @ t
    with pytest.raises(sim.DeviceFault):
        t @ t
    sim.fail("aten.mm", late=True)
    r = t @ t
    with pytest.raises(sim.DeviceFault):
        r.cpu()
    r.cpu()
    sim.fail("copy.h2d", device=1)
    torch.ones(1).to("sim:0")
    with pytest.raises(sim.DeviceFault):
        torch.ones(1).to("sim:1")
    sim.lose(0)
    with pytest.raises(sim.DeviceFault):
        t + 1
    with pytest.raises(sim.DeviceFault):
        t.cpu()
    assert torch.ones(1, device="sim:1").item() == 1


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_transformer_block_matches_the_cpu(mode):
    torch.manual_seed(0)
    block = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=True).eval()
    x = torch.randn(2, 7, 32)
    with mode():
        want = block(x)
        block.to(D)
        with sim.counted() as c:
            got = block(x.to(D))
        assert torch.allclose(got.cpu(), want, atol=1e-5)
    assert (c["h2d"], c["d2h"], c["syncs"]) == (1, 0, 0)


def test_paged_cache_write_and_read():
    torch.manual_seed(0)
    cache = torch.zeros(6, 4, 2, 8, device=D)
    k = torch.randn(5, 2, 8)
    slots = torch.tensor([9, 10, 11, 20, 21])
    cache.view(-1, 2, 8).index_copy_(0, slots.to(D), k.to(D))
    table = torch.tensor([[2, 5]]).to(D)
    got = cache[table].reshape(1, -1, 2, 8)[0, 1:6].cpu()
    assert torch.equal(got, k)
    q = torch.randn(1, 2, 1, 8).to(D)
    o = F.scaled_dot_product_attention(q, got.to(D).transpose(0, 1)[None], got.to(D).transpose(0, 1)[None])
    assert o.device.type == D


def test_threads_keep_their_own_current_device():
    seen = {}

    def work(i):
        torch.sim.set_device(i)
        seen[i] = torch.zeros(3, device=D).device.index

    ts = [threading.Thread(target=work, args=(i,)) for i in (0, 1)]
    [t.start() for t in ts]
    [t.join() for t in ts]
    assert seen == {0: 0, 1: 1}


def test_device_agnostic_front():
    assert torch.accelerator.is_available()
    assert str(torch.accelerator.current_accelerator()) == D
    assert torch.accelerator.device_count() == 2
    free, total = torch.sim.mem_get_info()
    assert 0 < free <= total == 32 << 20


def _rank(rank, port, q):
    import os

    import torch.distributed as dist

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
    sim.setup(devices=2)
    torch.sim.set_device(rank)
    dist.init_process_group(f"cpu:gloo,{D}:gloo")
    x = torch.full((4,), float(rank + 1), device=D)
    dist.all_reduce(x)
    out = [torch.empty(4, device=D) for _ in range(2)]
    dist.all_gather(out, x)
    q.put((rank, x.device.index, x.tolist(), [o.tolist() for o in out]))
    dist.destroy_process_group()


def test_collectives_between_two_processes():
    import socket

    import torch.multiprocessing as mp

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    ctx = mp.get_context("spawn")
    q = ctx.Queue()
    ps = [ctx.Process(target=_rank, args=(r, port, q)) for r in range(2)]
    [p.start() for p in ps]
    got = sorted(q.get(timeout=60) for _ in ps)
    [p.join() for p in ps]
    assert got == [(r, r, [3.0] * 4, [[3.0] * 4] * 2) for r in range(2)]


def test_what_the_python_route_cannot_do():
    with pytest.raises(NotImplementedError):
        torch.Generator(device=D)
    with pytest.raises(NotImplementedError):
        torch.zeros(1).pin_memory()
    with pytest.raises(RuntimeError):
        torch.accelerator.synchronize()
