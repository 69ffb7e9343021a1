"""The goals of the comparison, and whether a run meets them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .stats import median_of, pooled_ttft

SIZES = {"135m": "135M", "1b": "1.1B"}


@dataclass(frozen=True, slots=True)
class Target:
    """Qiao's figure over the best peer's must be at least ``ratio`` (or at most, where ``lower`` is better)."""

    cell: str
    size: str
    figure: str
    title: str
    four_bit: float
    sixteen_bit: float
    lower: bool = False

    def ratio(self, form: str) -> float:
        """The goal for a format."""
        return self.four_bit if form == "4bit" else self.sixteen_bit


@dataclass(frozen=True, slots=True)
class Verdict:
    """A target beside what was measured. ``met`` is None where Qiao or every peer has no figure."""

    target: Target
    format: str
    own: float | None
    best: float | None
    best_peer: str | None
    met: bool | None

    @property
    def ratio(self) -> float | None:
        """Qiao's figure over the best peer's."""
        return self.own / self.best if self.own is not None and self.best else None


TARGETS = (
    Target("single", "135m", "decode_rate", "single stream decode, tokens/s", 2.5, 1.8),
    Target("single", "1b", "decode_rate", "single stream decode, tokens/s", 1.6, 1.25),
    Target("prefill", "135m", "prefill_rate", "prefill of 1,024, tokens/s", 2.0, 1.3),
    Target("prefill", "1b", "prefill_rate", "prefill of 1,024, tokens/s", 1.25, 1.3),
    Target("streams8", "135m", "full_rate", "8 streams, tokens/s", 2.5, 1.5),
    Target("streams8", "1b", "full_rate", "8 streams, tokens/s", 2.5, 1.5),
    Target("streams24", "135m", "full_rate", "24 streams, tokens/s", 3.0, 1.8),
    *(
        Target(f"poisson-{rate}", "135m", figure, f"{rate} requests/s: {title}, ms", 0.5, 0.7, lower=True)
        for rate in (0.6, 1.2, 2.2)
        for figure, title in (("ttft_mean", "mean time to first token"), ("ttft_p95", "95th percentile of it"))
    ),
    Target("", "135m", "pss_mib", "peak memory, MiB", 0.8, 0.8, lower=True),
    Target("", "1b", "pss_mib", "peak memory, MiB", 0.8, 0.8, lower=True),
)


def select(data: dict[str, Any], **wanted: str) -> list[dict[str, Any]]:
    """The runs whose fields have the wanted values; an empty value stands for any."""
    return [run for run in data["runs"] if all(not value or run[key] == value for key, value in wanted.items())]


def is_qiao(peer: str) -> bool:
    """Whether this is the row of Qiao."""
    return peer.split(" ")[0] == "qiao"


def figure(runs: Sequence[dict[str, Any]], name: str) -> float | None:
    """One figure over the rounds of a cell: medians of rates, pooled times to first token, the highest memory."""
    if not runs:
        return None
    if name == "pss_mib":
        return max(float(run["pss_mib"]) for run in runs)
    if name in ("ttft_mean", "ttft_p95"):
        pooled = pooled_ttft(runs)
        return None if pooled is None else pooled[name == "ttft_p95"]
    return median_of(runs, name)


def peers_of(data: dict[str, Any], form: str) -> list[str]:
    """Names of the servers of a format, Qiao first."""
    names = dict.fromkeys(run["peer"] for run in data["runs"] if run["format"] == form)
    return sorted(names, key=lambda name: not is_qiao(name))


def judge(data: dict[str, Any]) -> list[Verdict]:
    """Every target in both formats, in the table's order."""
    return [_verdict(data, target, form) for target in TARGETS for form in ("4bit", "16bit")]


def _verdict(data: dict[str, Any], target: Target, form: str) -> Verdict:
    found = {
        name: figure(select(data, size=target.size, peer=name, cell=target.cell), target.figure)
        for name in peers_of(data, form)
    }
    own = next((value for name, value in found.items() if is_qiao(name)), None)
    others = {name: value for name, value in found.items() if not is_qiao(name) and value is not None}
    best = (min if target.lower else max)(others, key=lambda name: others[name], default=None)
    if own is None or best is None:
        return Verdict(target, form, own, others.get(best or ""), best, None)
    ratio, goal = own / others[best], target.ratio(form)
    return Verdict(target, form, own, others[best], best, ratio <= goal if target.lower else ratio >= goal)
