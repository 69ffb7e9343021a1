"""Rounding to a uniform grid: the numbers that all methods share.

A group of a row has a scale s and a whole zero point z; a value w becomes the code ``clamp(round(w / s) + z, 0, m)``,
m = 2 ** bits - 1, and stands for ``(code - z) * s``. Symmetric: s = 2 max|w| / m, z = (m + 1) / 2. Asymmetric: the
range from the least to the largest value, with 0 in it, is spread over the codes, and z = round(-least / s). Source:
Frantar et al., GPTQ (arXiv 2210.17323), ``quant.py`` of the published code.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Grid:
    """``bits``, whether the zero point lies in the middle, and the dtype in which scales are stored.

    Scales are rounded to ``dtype`` before anything is rounded by them, so that what is stored is what was measured.
    Zero points of 0 are avoided: the first GPTQ format stores them less one, and some loaders do not wrap around.
    """

    bits: int
    symmetric: bool
    dtype: torch.dtype

    @property
    def largest(self) -> int:
        """The largest code."""
        return (1 << self.bits) - 1

    def fit(self, groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scales and zeros, both [..., 1] float32, of ``groups`` [..., g] float32."""
        low, high = groups.amin(-1, keepdim=True).clamp(max=0.0), groups.amax(-1, keepdim=True).clamp(min=0.0)
        if self.symmetric:
            high = torch.maximum(high, -low)
            scale = self._stored(2.0 * high / self.largest)
            return scale, torch.full_like(scale, float((self.largest + 1) // 2))
        scale = self._stored((high - low) / self.largest)
        zero = torch.round(-low / scale).clamp(0.0, float(self.largest))
        narrow = zero < 1.0  # no negative value: one code less, and the zero point stays above 0
        scale = torch.where(narrow, self._stored(high / (self.largest - 1)), scale)
        return scale, zero.clamp(min=1.0)

    def _stored(self, scale: torch.Tensor) -> torch.Tensor:
        """``scale`` as it will be read from the file; a group of zeros gets 1, as it stands for 0 with any scale."""
        scale = scale.to(self.dtype).float()
        return torch.where(scale > 0.0, scale, torch.ones_like(scale))

    def codes(self, values: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
        """Codes, as float32, of ``values``; ``scale`` and ``zero`` broadcast."""
        return torch.clamp(torch.round(values / scale) + zero, 0.0, float(self.largest))

    def round(self, groups: torch.Tensor) -> torch.Tensor:
        """``groups`` [..., g] rounded to a grid of their own, as values."""
        scale, zero = self.fit(groups)
        return (self.codes(groups, scale, zero) - zero) * scale


@dataclass(frozen=True, slots=True)
class Rounded:
    """A rounded weight: ``codes`` [O, I] uint8, ``scale`` [O, G] float32 (exact in the stored dtype), ``zero`` [O, G]
    uint8, and ``group`` [I] int64, the group of each column. Rows are in the order that the method was given."""

    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor
    group: torch.Tensor

    def values(self) -> torch.Tensor:
        """What it stands for [O, I] float32."""
        zero = self.zero.index_select(1, self.group).float()
        return (self.codes.float() - zero) * self.scale.index_select(1, self.group)

    def rows(self, first: int, count: int) -> Rounded:
        """A part of the rows."""
        part = slice(first, first + count)
        return Rounded(self.codes[part], self.scale[part], self.zero[part], self.group)


def in_groups(weight: torch.Tensor, size: int) -> torch.Tensor:
    """``weight`` [O, I] as [O, G, g]; ``size`` -1 is one group a row. ``size`` must divide I."""
    groups: torch.Tensor = weight.unflatten(1, (-1, size if size > 0 else weight.shape[1]))
    return groups


def group_index(columns: int, size: int) -> torch.Tensor:
    """The group of each column [I] int64 where groups lie side by side."""
    return torch.arange(columns) // (size if size > 0 else columns)


def round_to_nearest(weight: torch.Tensor, size: int, grid: Grid, shaped: torch.Tensor | None = None) -> Rounded:
    """``weight`` [O, I] float32, each group to its own grid, or to that of ``shaped`` where it is given (clipping)."""
    groups = in_groups(weight, size)
    scale, zero = grid.fit(groups if shaped is None else in_groups(shaped, size))
    codes = grid.codes(groups, scale, zero).flatten(1).to(torch.uint8)
    return Rounded(codes, scale.squeeze(-1), zero.squeeze(-1).to(torch.uint8), group_index(weight.shape[1], size))


def error_of(weight: torch.Tensor, values: torch.Tensor, gram: torch.Tensor | None) -> float:
    """The squared error of the outputs over the squared outputs, from ``gram`` = X^T X [I, I]; of the weights for None.

    ``||(W - Q) X^T||^2 = tr((W - Q) X^T X (W - Q)^T)``.
    """
    difference = weight - values
    lost = difference if gram is None else difference @ gram
    whole = weight if gram is None else weight @ gram
    below = float((whole * weight).sum(dtype=torch.float64))
    return max(0.0, float((lost * difference).sum(dtype=torch.float64))) / below if below > 0.0 else 0.0
