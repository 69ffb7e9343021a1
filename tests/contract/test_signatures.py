"""The contract is frozen: a change of a hook's signature must be made on purpose, here and in ``hooks.txt``.

A new hook or a new trailing argument raises the minor of ``CONTRACT_VERSION``; anything else needs a new group.
"""

import inspect
from dataclasses import fields
from pathlib import Path

from qiao.contract import CATALOG, CONTRACT_VERSION, GROUP, SPECS, types

GOLDEN = Path(__file__).with_name("hooks.txt")


def signatures():
    lines = [f"{GROUP} {'.'.join(map(str, CONTRACT_VERSION))}"]
    for spec in SPECS:
        for name, function in vars(spec).items():
            if name.startswith("_"):
                continue
            found = inspect.signature(function)
            args = ", ".join(f"{p.name}: {p.annotation}" for p in list(found.parameters.values())[1:])
            lines.append(f"{name}({args}) -> {found.return_annotation}")
    for record in (types.KVCache, types.AttentionMetadata, types.SamplingTensors, types.PenaltyTensors,
                   types.LogprobOutput, types.WeightInfo, types.PackedWeight, types.DeviceInfo, types.Capabilities,
                   types.MemoryInfo, types.Tolerance):  # fmt: skip
        lines.append(f"{record.__name__}({', '.join(f'{f.name}: {f.type}' for f in fields(record))})")
    return lines


def test_signatures_are_those_of_the_golden_text():
    assert signatures() == GOLDEN.read_text().splitlines()


def test_golden_text_covers_the_catalog():
    named = {line.split("(")[0] for line in GOLDEN.read_text().splitlines()}
    assert set(CATALOG) <= named
