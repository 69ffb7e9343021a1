"""GPTQ (Frantar et al., arXiv 2210.17323): columns are rounded one after another, later ones make up for the error.

With H = X^T X + damping and U the upper Cholesky factor of its inverse, the rounding error of column i,
``e = (w_i - q_i) / U_ii``, is taken from the later columns: ``w_j -= e U_ij``. Rows are independent of each other.
"""

from __future__ import annotations

import torch

from qiao.quantize.grid import Grid, Rounded, group_index, in_groups

_BLOCK = 128
"""Columns whose updates reach the rest of the weight together."""


def gptq(
    weight: torch.Tensor, gram: torch.Tensor, size: int, grid: Grid, *, act_order: str = "static", damp: float = 0.1
) -> Rounded:
    """Round ``weight`` [O, I] float32 for inputs with ``gram`` = X^T X [I, I] float32.

    ``size`` is the group size, -1 or a divisor of I; for ``act_order`` and ``damp`` see ``Options``. Raises
    ``ValueError`` where the damped Hessian is not positive definite in float64.
    """
    columns = weight.shape[1]
    work, seen = weight.clone(), gram.diagonal() != 0.0
    work[:, ~seen] = 0.0  # inputs that never came: their weights do not count
    order = torch.arange(columns)
    if act_order != "none":
        order = torch.argsort(gram.diagonal(), descending=True, stable=True)
    factor = inverse_factor(gram, order, damp)
    fixed = grid.fit(in_groups(work, size)) if act_order == "static" else None
    work = work[:, order]
    places = group_index(columns, size)
    group = places[order] if act_order == "static" else places
    codes, scale, zero = _sweep(work, factor, group, size, grid, fixed)
    back = torch.argsort(order)
    return Rounded(codes[:, back], scale, zero.to(torch.uint8), group[back])


def inverse_factor(gram: torch.Tensor, order: torch.Tensor, damp: float) -> torch.Tensor:
    """U [I, I] float32, upper triangular: U^T U is the inverse of the damped ``gram``, rows and columns by ``order``.

    Inputs that never came have 1 on the diagonal. Worked out in float64 without the inverse itself: backwards from the
    last column, H = R R^T with R upper triangular, and U = R^-1. At most three such matrices are held at once, as they
    are the largest thing of a layer. Raises ``ValueError`` where the Hessian is not positive definite.
    """
    reverse = order.flip(0)
    hessian = gram[reverse].index_select(1, reverse).double()
    diagonal = hessian.diagonal()
    diagonal[diagonal == 0.0] = 1.0
    diagonal.add_(damp * float(diagonal.mean()))
    lower, failed = torch.linalg.cholesky_ex(hessian)
    if int(failed):
        raise ValueError(f"the Hessian is not positive definite at its row {int(failed)}")
    del hessian, diagonal
    inverse = torch.eye(lower.shape[0], dtype=torch.float64)
    torch.linalg.solve_triangular(lower, inverse, upper=False, out=inverse)
    return inverse.float().flip(0, 1)


def _sweep(
    work: torch.Tensor,
    factor: torch.Tensor,
    group: torch.Tensor,
    size: int,
    grid: Grid,
    fixed: tuple[torch.Tensor, torch.Tensor] | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Round the columns of ``work`` [O, I] in their order; it is used up.

    ``group`` [I] is the group of each. Without ``fixed`` scales and zeros, a group takes them from its columns as they
    are when it begins, and groups lie side by side. Returns codes [O, I] uint8, scales and zeros [O, G] float32.
    """
    rows, columns = work.shape
    codes = torch.empty(rows, columns, dtype=torch.uint8)
    width = size if size > 0 else columns
    if fixed is None:
        scale, zero = torch.empty(2, rows, columns // width).unbind(0)
    else:
        scale, zero = (numbers.squeeze(-1) for numbers in fixed)
    step = min(_BLOCK, width)  # a group begins where a block does, so that all updates have reached it
    for first in range(0, columns, step):
        last = min(first + step, columns)
        if fixed is None and first % width == 0:
            at = first // width
            scale[:, at : at + 1], zero[:, at : at + 1] = grid.fit(work[:, first : first + width])
        errors = torch.empty(rows, last - first)
        for i in range(first, last):
            s, z = scale[:, group[i]], zero[:, group[i]]
            code = grid.codes(work[:, i], s, z)
            codes[:, i] = code.to(torch.uint8)
            error = (work[:, i] - (code - z) * s) / factor[i, i]
            work[:, i + 1 : last].addr_(error, factor[i, i + 1 : last], alpha=-1.0)
            errors[:, i - first] = error
        work[:, last:].addmm_(errors, factor[first:last, last:], alpha=-1.0)
    return codes, scale, zero
