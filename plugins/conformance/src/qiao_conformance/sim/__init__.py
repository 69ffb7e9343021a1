"""A pretend accelerator for tests: device type ``sim`` on CPU-only PyTorch.

::

    from qiao_conformance import sim

    sim.setup(devices=2, memory=64 << 20)
    with sim.counted() as c:
        torch.randn(4, 4).to("sim:1")
    assert c["h2d"] == 1 and c.bytes["h2d"] == 64
"""

from qiao_conformance.sim.chips import CHIPS
from qiao_conformance.sim.device import SimTensor
from qiao_conformance.sim.knobs import (
    Counted,
    counted,
    fail,
    limit_memory,
    lose,
    peek,
    reset,
    setup,
    slow_copies,
    wrong_numbers,
)
from qiao_conformance.sim.state import NAME, STATE, DeviceFault

__all__ = [
    "CHIPS",
    "NAME",
    "STATE",
    "Counted",
    "DeviceFault",
    "SimTensor",
    "counted",
    "fail",
    "limit_memory",
    "lose",
    "peek",
    "reset",
    "setup",
    "slow_copies",
    "wrong_numbers",
]
