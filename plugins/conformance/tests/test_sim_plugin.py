"""The plugin ``sim``: right answers, launches, faults, chips."""

import os
import subprocess
import sys

import pytest
import torch
from qiao.contract import CATALOG, SamplingTensors, WeightInfo, composites
from qiao_conformance import sim
from qiao_conformance.sim import plugin


@pytest.fixture(autouse=True)
def device():
    sim.setup(devices=2, memory=64 << 20)
    yield
    sim.reset()


def on(tensor):
    return tensor.to("sim:0")


def settings(rows, temperature):
    def of(x, dtype):
        return on(torch.full((rows,), x, dtype=dtype))

    return SamplingTensors(
        of(temperature, torch.float32), of(0, torch.int32), of(1.0, torch.float32), of(0.0, torch.float32),
        of(0.5, torch.float32), False, False, False, False,
    )  # fmt: skip


def test_every_hook_of_the_catalog_is_there():
    assert [name for name in CATALOG if not callable(getattr(plugin, name, None))] == []


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_composites_run_on_the_device_without_a_hidden_copy(mode):
    torch.manual_seed(0)
    x, weight, angle = torch.randn(5, 8), torch.rand(8), torch.rand(5, 2)
    query, key = torch.randn(5, 4, 6), torch.randn(5, 2, 6)
    logits, seen = torch.randn(3, 11), torch.tensor([[1, 2, 11], [3, 3, 3], [11, 11, 11]])
    penalties = composites.PenaltyTensors(seen, seen, *(torch.rand(3) + 0.5 for _ in range(3)))
    calls = [
        (composites.rms_norm, (x, weight, 1e-5)),
        (composites.add_rms_norm, (x, x, weight, 1e-5)),
        (composites.rotary, (query, key, angle.cos(), angle.sin(), False)),
        (composites.rotary, (query, key, angle.cos(), angle.sin(), True)),
        (composites.silu_mul, (x,)),
        (composites.gelu_mul, (x,)),
        (composites.cap_logits, (x, 1.5)),
    ]
    with mode():
        for function, args in calls:
            want = function(*args)
            moved = [on(a) if isinstance(a, torch.Tensor) else a for a in args]
            with sim.counted() as c:
                got = function(*moved)
            assert (c["h2d"], c["d2h"], c["syncs"]) == (0, 0, 0), function
            pairs = zip(want, got, strict=True) if isinstance(want, tuple) else [(want, got)]
            for w, g in pairs:
                torch.testing.assert_close(sim.peek(g), w)
        there = composites.PenaltyTensors(*(on(getattr(penalties, f)) for f in penalties.__slots__))
        device_logits = on(logits)
        with sim.counted() as c:
            composites.apply_penalties(device_logits, there)
            out = composites.logprobs(device_logits, there.output_ids[:, 0].clamp(max=10), 3)
        assert (c["h2d"], c["d2h"], c["syncs"]) == (0, 0, 0)
        want = composites.apply_penalties(logits.clone(), penalties)
        torch.testing.assert_close(sim.peek(device_logits), want)
        torch.testing.assert_close(sim.peek(out.top_values), want.log_softmax(-1).topk(3).values)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_operators_that_models_need_make_no_hidden_copy(mode):
    torch.manual_seed(0)
    table, ids = torch.randn(9, 4), torch.tensor([3, 8, 0])
    with mode():
        there, index = on(table), on(ids)
        with sim.counted() as c:
            rows = torch.nn.functional.embedding(index, there)
            picked = there.index_select(0, index)
            masked = torch.where(rows > 0, rows, 1.0).masked_fill(rows < -1, 0.5)
            best = torch.topk(masked, 2, dim=-1)
            routed = torch.zeros_like(there).index_add_(0, index, rows)
            counts = torch.zeros(9, device="sim:0").scatter_add_(0, index, torch.ones(3, device="sim:0"))
            spread = torch.softmax(rows * 0.5 + 1, -1)[:, :2].contiguous()
        assert (c["h2d"], c["d2h"], c["syncs"]) == (0, 0, 0)
        want = torch.where(table[ids] > 0, table[ids], 1.0).masked_fill(table[ids] < -1, 0.5)
        assert torch.equal(sim.peek(picked), table[ids])
        assert torch.equal(sim.peek(best.values), want.topk(2, dim=-1).values)
        assert torch.equal(sim.peek(routed), torch.zeros(9, 4).index_add_(0, ids, table[ids]))
        assert sim.peek(counts).tolist() == [1, 0, 0, 1, 0, 0, 0, 0, 1]
        assert torch.equal(sim.peek(spread), torch.softmax(table[ids] * 0.5 + 1, -1)[:, :2])


def test_a_hook_is_one_launch_and_no_copy():
    x, info = on(torch.randn(3, 4)), WeightInfo("w", 4, 5)
    weight = plugin.pack_weight("dense", {"weight": torch.randn(5, 4)}, info, "sim:0")
    with sim.counted() as c:
        plugin.matmul(x, weight, None)
        plugin.sample(on_device := x, settings_ := settings(3, 0.0))
    assert c.ops["hook.matmul"] == c.ops["hook.sample"] == 1
    with sim.counted() as c:
        plugin.sample(on_device, settings_)
    assert (c["launches"], c["h2d"], c["d2h"], c["syncs"]) == (1, 0, 0, 0)


def test_hooks_refuse_host_tensors_and_mixed_devices():
    with pytest.raises(RuntimeError, match="cpu"):
        plugin.silu_mul(torch.randn(2, 4))
    with pytest.raises(RuntimeError, match="devices"):
        plugin.rms_norm(on(torch.randn(2, 4)), torch.randn(4).to("sim:1"), 1e-5)


def test_injected_faults_now_and_late():
    x = on(torch.randn(2, 4))
    sim.fail("hook.silu_mul", skip=1)
    plugin.silu_mul(x)
    with pytest.raises(sim.DeviceFault, match=r"hook\.silu_mul"):
        plugin.silu_mul(x)
    sim.fail("hook.silu_mul", late=True)
    plugin.silu_mul(x)
    with pytest.raises(sim.DeviceFault):
        plugin.synchronize("sim:0")


def test_lost_device_limited_memory_and_wrong_numbers():
    x = on(torch.rand(4, 8) + 1)
    right = sim.peek(plugin.silu_mul(x))
    with sim.wrong_numbers("silu_mul", by=0.25):
        torch.testing.assert_close(sim.peek(plugin.silu_mul(x)), right * 1.25)
    sim.limit_memory(100)
    assert plugin.memory_info("sim:0").free == 100
    with pytest.raises(torch.OutOfMemoryError):
        plugin.allocate_kv(4, 16, 2, 8, torch.float32, "NHD", "sim:0")
    sim.lose(0)
    with pytest.raises(sim.DeviceFault):
        plugin.memory_info("sim:0")


def test_chips_differ():
    sim.setup(chip="nobf16")
    assert "bfloat16" not in plugin.capabilities(plugin.probe_devices()[0].chip).dtypes
    with pytest.raises(RuntimeError, match="bfloat16"):
        torch.zeros(1, dtype=torch.bfloat16).to("sim:0")
    sim.setup(chip="hnd")
    with pytest.raises(ValueError, match="blocks of 16"):
        plugin.allocate_kv(4, 16, 2, 8, torch.float32, "HND", "sim:0")
    with pytest.raises(ValueError, match="nobf16"):
        sim.setup(chip="warp")


def test_a_replay_is_one_launch():
    weight = on(torch.rand(8))
    there = on(torch.randn(2, 8))
    replay = plugin.capture(lambda x: plugin.silu_mul(plugin.rms_norm(x, weight, 1e-5)), (there,), "sim:0")
    first, x = replay(), torch.randn(2, 8)
    there.copy_(x)
    with sim.counted() as c:
        got = replay()
    assert dict(c.ops) == {"hook.replay": 1} and c["launches"] == 1 and got is first
    torch.testing.assert_close(sim.peek(got), composites.silu_mul(composites.rms_norm(x, sim.peek(weight), 1e-5)))


def test_what_reads_the_host_cannot_be_captured():
    there = on(torch.randn(2, 8))
    for function in (lambda x: x.cpu(), lambda x: x + on(torch.ones(8)), lambda x: x * x[0, 0].item()):
        with pytest.raises(NotImplementedError, match="between sim and the host"):
            plugin.capture(function, (there,), "sim:0")


def test_swap_is_one_copy_for_keys_and_one_for_values():
    there = plugin.allocate_kv(4, 2, 1, 3, torch.float32, "NHD", "sim:0")
    host = type(there)(torch.randn(4, 2, 1, 3), torch.randn(4, 2, 1, 3), 2, "NHD")
    with sim.counted() as c:
        plugin.swap_blocks(host, there, torch.tensor([1, 3]), torch.tensor([0, 2]))
    assert (c["h2d"], c.bytes["h2d"]) == (2, 2 * 2 * 6 * 4)
    assert torch.equal(sim.peek(there.key)[[0, 2]], host.key[[1, 3]])
    assert sim.peek(there.key)[1].isnan().all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_holds_nan_harms_no_other(temperature):
    logits = torch.randn(2, 5)
    whole = plugin.sample(on(logits), settings(2, temperature)).tolist()
    logits[1, 3] = float("nan")
    assert plugin.sample(on(logits), settings(2, temperature)).tolist() == [whole[0], 3]


def probe(**environment):
    code = (
        "from qiao_conformance.sim import plugin\n"
        "print([(d.name, d.score, d.chip, d.memory_bytes) for d in plugin.probe_devices()], hasattr(plugin, 'sample'))"
    )
    env = {k: v for k, v in os.environ.items() if not k.startswith("QIAO_")} | environment
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_environment_decides_what_auto_may_take():
    assert probe() == "[('sim:0', 0, 'full', 2147483648)] True"
    assert probe(QIAO_SIM_DEVICES="2", QIAO_SIM_MEMORY="1MiB", QIAO_SIM_CHIP="nosample") == (
        "[('sim:0', 50, 'nosample', 1048576), ('sim:1', 50, 'nosample', 1048576)] False"
    )


def test_a_plugin_that_lacks_hooks():
    partial = plugin.without("sample", "attention")
    assert not hasattr(partial, "sample") and partial.matmul is plugin.matmul
