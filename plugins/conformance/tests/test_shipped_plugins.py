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
    kit.test_arguments_have_the_contracts_names_and_order(target, hook)
    for case in cases(hook, target.capabilities, seed=1):
        kit.test_case(target, case)
