"""How far next-token distributions lie from those of another model: what ``llama-perplexity --kl-divergence`` says."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from qiao.regress.divergence import Divergence

LLAMA_FIGURES = {
    "kl": r"Mean\s+KLD:\s+([-\d.]+)",
    "kl_error": r"Mean\s+KLD:\s+[-\d.]+ ±\s+([\d.]+)",
    "kl_median": r"Median\s+KLD:\s+([-\d.]+)",
    "kl_p99": r"99\.0%\s+KLD:\s+([-\d.]+)",
    "same_top": r"Same top p:\s+([\d.]+)",
    "perplexity": r"Mean PPL\(Q\)\s*:\s+([\d.]+)",
    "base_perplexity": r"Mean PPL\(base\)\s*:\s+([\d.]+)",
}


@dataclass
class Totals:
    """Divergences gathered over chunks of a text."""

    parts: list[Divergence] = field(default_factory=list)

    def add(self, base: torch.Tensor, other: torch.Tensor, targets: torch.Tensor) -> None:
        """Take in logits ``base`` and ``other`` [N, V] at the same positions, whose next tokens are ``targets`` [N]."""
        self.parts.append(Divergence.between(base, other, targets))

    def figures(self) -> dict[str, float]:
        """Under the names of ``LLAMA_FIGURES``; ``same_top`` in percent, ``kl_error`` the mean's standard error."""
        found = Divergence.joined(self.parts)
        count = len(found)
        return {
            "positions": count,
            "kl": float(found.kl.mean()),
            "kl_error": float(found.kl.std(ddof=1) / math.sqrt(count)),
            "kl_median": float(np.median(found.kl)),
            "kl_p99": float(np.quantile(found.kl, 0.99)),
            "same_top": 100 * float(found.same_top.mean()),
            "perplexity": math.exp(-found.logprob.mean()),
            "base_perplexity": math.exp(-found.base_logprob.mean()),
        }


def scored(chunk: int) -> slice:
    """Positions of a chunk that count: the second half, so that each has context, less the last, without target."""
    return slice(chunk // 2, chunk - 1)


def chunks_of(tokens: list[int], size: int) -> Iterable[list[int]]:
    """Whole chunks of ``size`` tokens; a rest is left out."""
    return (tokens[start : start + size] for start in range(0, len(tokens) - size + 1, size))


def parse_llama(output: str) -> dict[str, float]:
    """The figures that ``llama-perplexity --kl-divergence`` printed. Raises ``ValueError`` where one is missing."""
    found = {}
    for name, pattern in LLAMA_FIGURES.items():
        match = re.search(pattern, output)
        if match is None:
            raise ValueError(f"no {name} in the output of llama-perplexity:\n{output[-800:]}")
        found[name] = float(match[1])
    return found
