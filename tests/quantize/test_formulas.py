"""The algorithms against their published formulas, written here in float64 and the slow way."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from qiao.quantize import awq
from qiao.quantize.gptq import gptq
from qiao.quantize.grid import Grid, error_of, round_to_nearest

GROUP = 32


def data(rows: int, columns: int, tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight [O, I] and correlated inputs [T, I], a few channels of which are large."""
    random = np.random.default_rng(seed)
    mixing = random.normal(size=(columns // 4, columns))
    inputs = random.normal(size=(tokens, columns // 4)) @ mixing + 0.5 * random.normal(size=(tokens, columns))
    inputs[:, random.choice(columns, 3, replace=False)] *= 12
    weight = random.normal(size=(rows, columns)) * 0.05
    return torch.tensor(weight, dtype=torch.float32), torch.tensor(inputs, dtype=torch.float32)


def grid_of(values: np.ndarray, bits: int, symmetric: bool) -> tuple[float, int]:
    """Scale (stored as bfloat16) and zero point of one group: the definition in ``quant.py`` of GPTQ's code."""
    low, high = min(values.min(), 0.0), max(values.max(), 0.0)
    top = 2**bits - 1
    if symmetric:
        high = max(high, -low)
        low = -high
    scale = float(torch.tensor((high - low) / top).bfloat16())
    return scale, (top + 1) // 2 if symmetric else round(-low / scale)


def to_grid(value: float, scale: float, zero: int, bits: int) -> int:
    return int(np.clip(np.rint(value / scale) + zero, 0, 2**bits - 1))


def optimal_brain(
    weight: torch.Tensor, inputs: torch.Tensor, bits: int, symmetric: bool, act_order: str, damp: float
) -> np.ndarray:
    """Equations 2 and 3 of the GPTQ paper: round a column, update the rest by the inverse of their own Hessian.

    Row by row is the same as all rows at once. Nothing is shared with the Cholesky form: the inverse is taken anew for
    each column.
    """
    w, x = weight.double().numpy().copy(), inputs.double().numpy()
    hessian = x.T @ x / len(x)
    columns = w.shape[1]
    order = np.arange(columns) if act_order == "none" else np.argsort(-np.diag(hessian), kind="stable")
    hessian = hessian + damp * np.diag(hessian).mean() * np.eye(columns)
    group = np.arange(columns) // GROUP
    if act_order == "group":
        group[order] = np.arange(columns) // GROUP
    grids = {}
    if act_order == "static":
        grids = {
            (r, g): grid_of(w[r, group == g], bits, symmetric) for r in range(len(w)) for g in range(columns // GROUP)
        }
    values = np.zeros_like(w)
    left = list(order)
    while left:
        i = left[0]
        inverse = np.linalg.inv(hessian[np.ix_(left, left)])
        for r in range(len(w)):
            if (r, group[i]) not in grids:
                grids[r, group[i]] = grid_of(w[r, group == group[i]], bits, symmetric)
            scale, zero = grids[r, group[i]]
            values[r, i] = (to_grid(w[r, i], scale, zero, bits) - zero) * scale
            w[r, left] -= (w[r, i] - values[r, i]) / inverse[0, 0] * inverse[0]
        left = left[1:]
    return values


@pytest.mark.parametrize("act_order", ["none", "static", "group"])
@pytest.mark.parametrize(
    ("bits", "symmetric", "damp"), [(4, True, 0.1), (4, False, 0.01), (3, False, 0.01), (2, True, 0.1)]
)
def test_gptq_rounds_as_the_paper_says(act_order: str, bits: int, symmetric: bool, damp: float) -> None:
    weight, inputs = data(6, 96, 300, seed=bits)
    gram = inputs.T @ inputs / len(inputs)
    rounded = gptq(weight, gram, GROUP, Grid(bits, symmetric, torch.bfloat16), act_order=act_order, damp=damp)
    want = optimal_brain(weight, inputs, bits, symmetric, act_order, damp)
    got = rounded.values().double().numpy()
    same = np.isclose(got, want, rtol=0, atol=1e-6).mean()
    assert same > 0.99, f"{same:.3f} of the values are the same"  # float32 may tip a value over that lies in the middle
    assert error_of(weight, rounded.values(), gram) == pytest.approx(
        error_of(weight, torch.tensor(want, dtype=torch.float32), gram), rel=0.02
    )


def test_gptq_loses_less_than_rounding_to_nearest() -> None:
    weight, inputs = data(64, 128, 1000, seed=1)
    gram, grid = inputs.T @ inputs / len(inputs), Grid(4, True, torch.bfloat16)
    plain = error_of(weight, round_to_nearest(weight, GROUP, grid).values(), gram)
    for act_order in ("none", "static", "group"):
        assert error_of(weight, gptq(weight, gram, GROUP, grid, act_order=act_order).values(), gram) < 0.7 * plain


def test_gptq_leaves_out_inputs_that_never_came() -> None:
    weight, inputs = data(8, 64, 200, seed=2)
    inputs[:, 5] = 0.0
    values = gptq(weight, inputs.T @ inputs, GROUP, Grid(4, False, torch.bfloat16)).values()
    assert bool((values[:, 5] == 0.0).all())
    assert bool(torch.isfinite(values).all())


def test_gptq_in_one_group_a_row() -> None:
    weight, inputs = data(8, 160, 400, seed=3)
    gram, grid = inputs.T @ inputs, Grid(8, True, torch.float16)
    rounded = gptq(weight, gram, -1, grid)
    assert rounded.scale.shape == (8, 1)
    torch.testing.assert_close(rounded.values(), weight, atol=0.01, rtol=0)


def test_a_hessian_that_is_not_one_is_said_so() -> None:
    with pytest.raises(ValueError, match="not positive definite"):
        gptq(torch.randn(4, 32), -torch.ones(32, 32) + 0.5 * torch.eye(32), 32, Grid(4, True, torch.bfloat16))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_the_grid_is_the_published_one(bits: int, symmetric: bool) -> None:
    groups = torch.randn(5, 3, GROUP) * torch.tensor([0.01, 1.0, 30.0])[:, None] + 0.005
    scale, zero = Grid(bits, symmetric, torch.bfloat16).fit(groups)
    for o in range(5):
        for g in range(3):
            s, z = grid_of(groups[o, g].double().numpy(), bits, symmetric)
            assert float(scale[o, g]) == pytest.approx(s, rel=2**-7)
            assert int(zero[o, g]) == pytest.approx(z, abs=1)


def test_a_group_without_negative_values_has_a_zero_point_of_one() -> None:
    """0 cannot be stored by all: GPTQ's first format keeps zero points less one."""
    groups = torch.rand(4, 1, GROUP) + 0.5
    grid = Grid(4, False, torch.float16)
    _, zero = grid.fit(groups)
    assert bool((zero == 1.0).all())
    assert float((grid.round(groups) - groups).abs().max()) < 0.06  # half of 1.5 / 14


def test_zeros_stay_zero() -> None:
    for symmetric in (True, False):
        assert bool((Grid(4, symmetric, torch.float16).round(torch.zeros(2, 3, GROUP)) == 0.0).all())


def asymmetric(groups: np.ndarray) -> np.ndarray:
    """[..., g] rounded to 16 numbers from its least to its largest value; scales as bfloat16."""
    low, high = np.minimum(groups.min(-1, keepdims=True), 0), np.maximum(groups.max(-1, keepdims=True), 0)
    scale = torch.tensor((high - low) / 15).float().bfloat16().double().numpy()
    zero = np.clip(np.rint(-low / scale), 0, 15)
    return (np.clip(np.rint(groups / scale) + zero, 0, 15) - zero) * scale


def test_awq_finds_the_exponent_that_the_inputs_themselves_prefer() -> None:
    """Equation 4 and 5 of the AWQ paper with the inputs at hand instead of their second moments."""
    weight, inputs = data(48, 64, 500, seed=4)
    w, x = weight.double().numpy(), inputs.double().numpy()
    mean = np.abs(x).mean(0)
    losses, scales = [], []
    for step in range(20):
        s = mean ** (step / 20)
        s = s / np.sqrt(s.max() * s.min())
        q = asymmetric((w * s).reshape(48, -1, GROUP)).reshape(48, 64)
        losses.append(np.square(q @ (x / s).T - w @ x.T).sum())
        scales.append(s)
    best = int(np.argmin(losses))
    assert 0 < best < 19 and losses[best] < 0.8 * losses[0], "the case must have something to find"
    gram, absolute = inputs.T @ inputs / len(inputs), inputs.abs().mean(0)
    got = awq.search_scale(weight, gram, absolute, GROUP, Grid(4, False, torch.bfloat16))
    torch.testing.assert_close(got.double(), torch.tensor(scales[best]), rtol=1e-4, atol=1e-6)


def test_awq_clips_each_group_where_its_outputs_are_nearest() -> None:
    weight, inputs = data(4, 64, 300, seed=5)
    weight[:, 7] *= 6  # values far out, over inputs of ordinary size
    w, x = weight.double().numpy(), inputs.double().numpy()
    got = awq.clip(weight, inputs.T @ inputs, GROUP, Grid(4, False, torch.bfloat16)).double().numpy()
    clipped = 0
    for o in range(4):
        for first in (0, GROUP):
            part, values = slice(first, first + GROUP), w[o, first : first + GROUP]
            losses = []
            for step in range(10):
                limit = np.abs(values).max() * (1 - step / 20)
                q = asymmetric(np.clip(values, -limit, limit)[None])[0]
                losses.append(np.square(x[:, part] @ (q - values)).sum())
            best = int(np.argmin(losses))
            limit = np.abs(values).max() * (1 - best / 20)
            np.testing.assert_allclose(got[o, part], np.clip(values, -limit, limit), rtol=1e-5)
            clipped += best > 0
    assert clipped > 2, "the case must have something to clip"
