"""The plugins of this repository pass the kit, hook by hook."""

import pytest
from qiao.contract import CATALOG
from qiao.contract.cases import cases
from qiao_conformance import kit, sim
from qiao_conformance.target import find


@pytest.mark.parametrize("hook", CATALOG)
@pytest.mark.parametrize("plugin", ["reference", "sim"])
def test_plugin_passes(plugin, hook):
    sim.setup(memory=256 << 20)
    target = find(plugin)
    kit.test_names_and_types(target, hook)
    for case in cases(hook, target.capabilities, seed=1):
        kit.test_case(target, case)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_replays_of_the_simulated_device(dtype):
    sim.setup(memory=256 << 20)
    kit.test_replays_follow_their_buffers(find("sim"), dtype)


def test_the_reference_plugin_refuses_layers():
    with pytest.raises(pytest.skip.Exception, match="kv_lens"):
        kit.test_replays_follow_their_buffers(find("reference"), "float32")


@pytest.mark.parametrize("plugin", ["reference", "sim"])
def test_what_cannot_be_followed(plugin):
    sim.setup(memory=256 << 20)
    kit.test_capture_refuses_what_it_cannot_follow(find(plugin))
