"""Stands in for torch_mlu: a real torch device called ``mlu`` whose memory is the simulated device's. Not the vendor's.

``QIAO_MLU_CHIP`` says which chip it is (MLU590, MLU370). Import it before ``qiao_conformance.sim``.
"""

from __future__ import annotations

import os
from types import SimpleNamespace

os.environ.setdefault("QIAO_SIM_NAME", "mlu")

import torch
from qiao_conformance import sim

if sim.NAME != "mlu":
    raise ImportError(f"the simulated device is already called {sim.NAME} in this process")

from torch_mlu.graphs import MLUGraph, graph

__version__ = "stand-in"
CHIP = os.environ.get("QIAO_MLU_CHIP", "MLU590")
sim.setup(memory=1 << 30, chip="nobf16" if CHIP.startswith("MLU3") else "full")


def _properties(device: object = None) -> SimpleNamespace:
    return SimpleNamespace(name=CHIP, major=int(CHIP[3]), minor=0, total_memory=torch.mlu.mem_get_info()[1])


torch.mlu.get_device_name = lambda device=None: CHIP
torch.mlu.get_device_properties = _properties
torch.mlu.is_bf16_supported = lambda: int(CHIP[3]) >= 5
torch.mlu.MLUGraph = MLUGraph
torch.mlu.graph = graph
