"""What the reference says about the machine."""

import pytest
import qiao_reference as reference
import torch


def test_probe_says_what_it_saw():
    (info,) = reference.probe_devices()
    assert (info.name, info.torch_device, info.score) == ("reference:0", "cpu", 1)
    assert torch.__version__ in info.evidence and info.memory_bytes > 0
    assert set(reference.capabilities(info.chip).dtypes) == {"float32", "bfloat16", "float16"}


def test_the_rest_of_the_family():
    assert 0 <= reference.utilization("cpu") <= 1
    assert reference.synchronize("cpu") is None
    assert torch.distributed.is_gloo_available() and reference.collective_backend() == "gloo"
    x = torch.ones(2)
    replay = reference.capture(lambda x: (x * 2, [x + 1]), (x,), "cpu")
    first, _ = replay()
    x.fill_(3)
    double, (next_one,) = replay()
    assert double is first and (double.tolist(), next_one.tolist()) == ([6.0, 6.0], [4.0, 4.0])


def test_memory_is_at_least_what_torch_can_still_take():
    info = reference.memory_info("cpu")
    assert 0 < info.free <= info.total
    assert pytest.approx(info.total) == reference.probe_devices()[0].memory_bytes
