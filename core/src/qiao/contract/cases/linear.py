"""Cases of the W group: each scheme, odd sizes, groups, zeros and act-order."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from qiao.contract.cases.base import LooseWeight, Made, Random
from qiao.contract.types import Capabilities, WeightInfo


def weight(
    random: Random, scheme: str, rows: int, columns: int, dtype: str, group: int = -1, options: str = ""
) -> LooseWeight:
    """A weight [rows, columns] of ``scheme``, whose last group may be short.

    ``options`` may hold ``zero``, ``symmetric``, ``perm``, ``rows``.
    """
    if scheme == "dense":
        return _dense(random, rows, columns, dtype)
    if scheme == "fp8":
        return _fp8(random, rows, columns, "rows" in options)
    return _integer(random, scheme, rows, columns, group, options)


def _dense(random: Random, rows: int, columns: int, dtype: str) -> LooseWeight:
    weight = (random.normal(rows, columns) * columns**-0.5).to(getattr(torch, dtype))
    return LooseWeight("dense", {"weight": weight}, WeightInfo("w", columns, rows))


def _integer(random: Random, scheme: str, rows: int, columns: int, group: int, options: str) -> LooseWeight:
    bits = 4 if scheme == "w4a16" else 8
    groups = 1 if group < 0 else -(-columns // group)
    low, high, kind = (0, 16, torch.uint8) if bits == 4 else (-128, 128, torch.int8)
    tensors = {"weight": random.whole(low, high, rows, columns).to(kind)}
    tensors["scale"] = (random.uniform(rows, groups) + 0.5) / (high * columns**0.5)
    if bits == 4:
        middle = torch.full((rows, groups), 8.0)  # what symmetric checkpoints have, and some kernels ask for
        tensors["zero"] = middle if "symmetric" in options else random.whole(1, 16, rows, groups).float()
    elif "zero" in options:
        tensors["zero"] = random.uniform(rows, groups) * 40 - 20
    if "perm" in options:
        tensors["perm"] = random.order(columns)
    return LooseWeight(scheme, tensors, WeightInfo("w", columns, rows, bits, group, bits == 8))


def _fp8(random: Random, rows: int, columns: int, per_row: bool) -> LooseWeight:
    weight = random.normal(rows, columns).to(torch.float8_e4m3fn)
    scale = (random.uniform(rows if per_row else 1, 1) + 0.5) * columns**-0.5
    return LooseWeight("fp8", {"weight": weight, "scale": scale}, WeightInfo("w", columns, rows, 8))


def _weights(random: Random, scheme: str, dtype: str) -> Iterator[tuple[str, LooseWeight]]:
    if scheme == "dense":
        for rows, columns in ((16, 32), (17, 33), (64, 128)):
            yield f"{rows}x{columns}", _dense(random, rows, columns, dtype)
    elif scheme == "fp8":
        yield "rows", _fp8(random, 16, 64, True)
        yield "one-scale", _fp8(random, 24, 64, False)
    elif scheme == "w8a8":
        yield "small", _integer(random, scheme, 16, 64, -1, "")
        yield "long", _integer(random, scheme, 8, 1152, -1, "")
    else:
        yield "one-group", _integer(random, scheme, 16, 64, -1, "")
        yield "groups", _integer(random, scheme, 24, 128, 32, "")
        if scheme == "w4a16":
            yield "act-order", _integer(random, scheme, 16, 128, 64, "perm")
            yield "symmetric", _integer(random, scheme, 16, 256, 128, "symmetric")
        else:
            yield "zeros", _integer(random, scheme, 24, 96, 16, "zero")
        yield "short-group", _integer(random, scheme, 16, 144, 64, "")  # 64, 64, 16: not three of 48


def matmul(capabilities: Capabilities, random: Random) -> Made:
    """Each scheme with each dtype that the chip has."""
    for scheme, dtype in itertools.product(capabilities.schemes, capabilities.dtypes):
        for label, weight in _weights(random, scheme, dtype):
            for tokens, biased in ((1, False), (5, True)):
                x = random.normal(tokens, weight.info.in_features, dtype=dtype)
                bias = random.normal(weight.info.out_features, dtype=dtype) if biased else None
                arguments = {"x": x, "weight": weight, "bias": bias}
                yield f"{scheme}-{label}-{tokens}tokens", dtype, arguments, "product with the value of the weight"


def expert_matmul(capabilities: Capabilities, random: Random) -> Made:
    """Each scheme with each dtype: experts that get no row, one and several, in no order."""
    for scheme, dtype in itertools.product(capabilities.schemes, capabilities.dtypes):
        made = [
            [weight for label, weight in _weights(random, scheme, dtype) if "perm" not in weight.tensors]
            for _ in range(4)
        ]
        for place in range(len(made[0])):
            weights = tuple(each[place] for each in made)
            for choice in ([2], [1, 3, 1, 0, 3, 1, 1]):
                x = random.normal(len(choice), weights[0].info.in_features, dtype=dtype)
                arguments = {"x": x, "weights": weights, "experts": torch.tensor(choice)}
                yield f"{scheme}-{place}-{len(choice)}rows", dtype, arguments, "each row by the weight of its expert"
