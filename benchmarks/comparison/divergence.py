"""How far next-token distributions lie from those of another model: what ``llama-perplexity --kl-divergence`` says."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch

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
class Divergence:
    """Figures gathered over chunks of a text. KL in nats; ``base`` is the distribution taken as true."""

    kl: list[float]
    same_top: int = 0
    loss: float = 0.0
    base_loss: float = 0.0

    @classmethod
    def empty(cls) -> Divergence:
        """Nothing seen yet."""
        return cls([])

    def add(self, base: torch.Tensor, other: torch.Tensor, targets: torch.Tensor) -> None:
        """Take in logits ``base`` and ``other`` [N, V] at the same positions, whose next tokens are ``targets`` [N].

        KL(base || other) = sum over the vocabulary of p_base * (log p_base - log p_other), in float64.
        """
        p, q = (logits.double().log_softmax(-1) for logits in (base, other))
        self.kl += (p.exp() * (p - q)).sum(-1).tolist()
        self.same_top += int((p.argmax(-1) == q.argmax(-1)).sum())
        self.base_loss -= float(p.gather(-1, targets[:, None]).sum())
        self.loss -= float(q.gather(-1, targets[:, None]).sum())

    def figures(self) -> dict[str, float]:
        """Under the names of ``LLAMA_FIGURES``; ``same_top`` in percent, ``kl_error`` the mean's standard error."""
        values = torch.tensor(self.kl, dtype=torch.float64)
        count = len(self.kl)
        return {
            "positions": count,
            "kl": float(values.mean()),
            "kl_error": float(values.std() / math.sqrt(count)),
            "kl_median": float(values.median()),
            "kl_p99": float(values.quantile(0.99)),
            "same_top": 100 * self.same_top / count,
            "perplexity": math.exp(self.loss / count),
            "base_perplexity": math.exp(self.base_loss / count),
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
