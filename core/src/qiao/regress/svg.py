"""Small plots as inline SVG; colours come from the page's style, so that they follow its theme."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _LABEL, _ROW, _RIGHT = 540, 120, 26, 96


@dataclass(frozen=True, slots=True)
class Bar:
    """One row: a value with its interval, a text beside it, and a limit that is drawn as a line."""

    label: str
    value: float
    text: str
    low: float | None = None
    high: float | None = None
    limit: float | None = None
    bad: bool = False


def bars(rows: Sequence[Bar], title: str) -> str:
    """Horizontal bars from 0, one a row."""
    values = [x for row in rows for x in (row.value, row.high, row.limit) if x is not None and math.isfinite(x)]
    top = max(values, default=0.0) or 1.0
    scale = (_WIDTH - _LABEL - _RIGHT) / top
    parts = [_bar(row, index * _ROW + 4, scale) for index, row in enumerate(rows)]
    return _svg(len(rows) * _ROW + 8, title, "".join(parts))


def _bar(row: Bar, y: int, scale: float) -> str:
    right = _WIDTH - _RIGHT
    end = right if not math.isfinite(row.value) else _LABEL + row.value * scale
    found = [
        _text(_LABEL - 8, y + 14, row.label, "end"),
        f'<rect class="{"bad" if row.bad else "bar"}" x="{_LABEL}" y="{y + 3}" width="{max(end - _LABEL, 1):.1f}" '
        'height="14" rx="2"/>',
    ]
    if row.low is not None and row.high is not None and row.high > row.low:
        x1, x2 = _LABEL + row.low * scale, _LABEL + row.high * scale
        found.append(f'<path class="whisker" d="M{x1:.1f} {y + 10}H{x2:.1f}M{x1:.1f} {y + 6}v8M{x2:.1f} {y + 6}v8"/>')
    if row.limit is not None:
        found.append(f'<path class="limit" d="M{_LABEL + row.limit * scale:.1f} {y}v20"/>')
    found.append(_text(right + 8, y + 14, row.text, "start"))
    return "".join(found)


def pairs(rows: Sequence[tuple[str, int, int, int]], title: str) -> str:
    """Rows of (label, base, candidate, of how many): two bars each, the base's paler."""
    span = _WIDTH - _LABEL - _RIGHT
    parts = []
    for index, (label, base, candidate, total) in enumerate(rows):
        y = index * _ROW + 4
        parts.append(_text(_LABEL - 8, y + 14, label, "end"))
        for offset, kind, value in ((2, "pale", base), (10, "bar", candidate)):
            width = span * value / total if total else 0
            parts.append(f'<rect class="{kind}" x="{_LABEL}" y="{y + offset}" width="{max(width, 1):.1f}" height="7"/>')
        parts.append(_text(_WIDTH - _RIGHT + 8, y + 14, f"{base} → {candidate} / {total}", "start"))
    return _svg(len(rows) * _ROW + 8, title, "".join(parts))


def curve(points: Sequence[tuple[float, float]], title: str) -> str:
    """Quantiles: (share of tokens, value), the values on a logarithmic scale; zeros lie on the ground line."""
    height, left, right, ground = 200, 70, _WIDTH - 20, 170
    positive = [value for _, value in points if value > 0]
    if not positive:
        return ""
    low, high = math.floor(math.log10(min(positive))), math.ceil(math.log10(max(positive)))
    high = max(high, low + 1)

    def place(share: float, value: float) -> str:
        up = 0.0 if value <= 0 else (math.log10(value) - low) / (high - low)
        return f"{left + share * (right - left):.1f} {ground - max(up, 0.0) * (ground - 15):.1f}"

    parts = []
    for power in range(low, high + 1):
        y = ground - (power - low) / (high - low) * (ground - 15)
        parts.append(f'<path class="grid" d="M{left} {y:.1f}H{right}"/>' + _text(left - 8, y + 4, f"1e{power}", "end"))
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts.append(_text(left + share * (right - left), height - 8, f"{share:.0%}", "middle"))
    line = "L".join(place(share, value) for share, value in points)
    parts.append(f'<path class="line" d="M{line}"/>')
    return _svg(height, title, "".join(parts))


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(height: int, title: str, content: str) -> str:
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{escape(title)}">'
        f"<title>{escape(title)}</title>{content}</svg>"
    )
