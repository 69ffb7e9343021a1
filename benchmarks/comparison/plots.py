"""Pictures of the figures: throughput over streams, time to first token over arrival rate, and time per token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from .report import FORMATS
from .targets import SIZES, figure, is_qiao, peers_of, select
from .workload import CELLS

RATES = [cell.rate for cell in CELLS if cell.rate is not None]
STREAMS = {"single": 1.0, "streams8": 8.0, "streams24": 24.0}


def draw(data: dict[str, Any], folder: Path, stem: str) -> list[Path]:
    """Write ``stem``-throughput.png, -ttft.png and -tpot.png for what was measured; returns the files."""
    mpl.use("Agg")
    made = [
        _throughput(data, folder / f"{stem}-throughput.png"),
        _first_token(data, folder / f"{stem}-ttft.png"),
        _per_token(data, folder / f"{stem}-tpot.png"),
    ]
    return [path for path in made if path is not None]


def _line(axes: Axes, peer: str, points: list[tuple[float, float]]) -> None:
    points.sort()
    width = 3.0 if is_qiao(peer) else 1.5
    axes.plot([x for x, _ in points], [y for _, y in points], marker="o", linewidth=width, label=peer)


def _points(runs: list[dict[str, Any]], cells: dict[str, float], name: str) -> list[tuple[float, float]]:
    found = ((place, figure([r for r in runs if r["cell"] == cell], name)) for cell, place in cells.items())
    return [(place, value) for place, value in found if value is not None]


def _panels(
    data: dict[str, Any], cells: dict[str, float], name: str, titles: tuple[str, str], path: Path
) -> Path | None:
    """One panel a model and format that has points; None where nothing has."""
    wanted = []
    for size in SIZES:
        for form in FORMATS:
            lines = {p: _points(select(data, size=size, peer=p), cells, name) for p in peers_of(data, form)}
            lines = {peer: points for peer, points in lines.items() if points}
            if lines:
                wanted.append((f"{SIZES[size]}, {FORMATS[form]}", lines))
    if not wanted:
        return None
    figure_, axes = plt.subplots(1, len(wanted), figsize=(4.6 * len(wanted), 3.8), squeeze=False)
    for panel, (title, lines) in zip(axes[0], wanted, strict=True):
        for peer, points in lines.items():
            _line(panel, peer, points)
        panel.set(title=title, xlabel=titles[0], ylabel=titles[1], xticks=list(cells.values()), ylim=(0, None))
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8)
    figure_.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure_.savefig(path, dpi=110)
    plt.close(figure_)
    return path


def _throughput(data: dict[str, Any], path: Path) -> Path | None:
    return _panels(data, STREAMS, "full_rate", ("streams", "output tokens/s"), path)


def _first_token(data: dict[str, Any], path: Path) -> Path | None:
    cells = {f"poisson-{rate}": rate for rate in RATES}
    return _panels(data, cells, "ttft_mean", ("requests/s (Poisson)", "mean time to first token, ms"), path)


def _per_token(data: dict[str, Any], path: Path) -> Path | None:
    return _panels(data, STREAMS, "tpot_ms", ("streams", "ms a token of a stream"), path)
