"""Whether two ways of computing one model choose the same tokens, and how near a choice was where they do not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

NEAR: Mapping[str, float] = {"float32": 1e-3, "float16": 0.02, "bfloat16": 0.15}
"""Log-probabilities that differ by no more are a tie in this dtype.

About twice the rounding of a logit of 20, which is as large as a likely token's gets: 2^-11 and 2^-8 of it.
"""


@dataclass(frozen=True)
class Answer:
    """The tokens of one prompt, and at each position the log-probabilities of the likeliest."""

    tokens: list[int]
    likeliest: list[dict[int, float]]


@dataclass(frozen=True)
class Parting:
    """Where two answers to ``prompt`` part: the position, both tokens, and by how much each side prefers its own.

    A gap is None where the other's token is not among the likeliest.
    """

    prompt: int
    position: int
    tokens: tuple[int, int]
    gaps: tuple[float | None, float | None]

    def near(self, limit: float) -> bool:
        """Whether both sides hold the two tokens for about equally likely."""
        return all(gap is not None and gap <= limit for gap in self.gaps)


def parting(prompt: int, first: Answer, second: Answer) -> Parting | None:
    """Where the answers part; None where they are equal. What comes after is about another text."""
    for position, pair in enumerate(zip(first.tokens, second.tokens, strict=False)):
        if pair[0] != pair[1]:
            gaps = (_gap(first, position, pair), _gap(second, position, pair[::-1]))
            return Parting(prompt, position, pair, gaps)
    if len(first.tokens) != len(second.tokens):
        return Parting(prompt, min(len(first.tokens), len(second.tokens)), (-1, -1), (None, None))
    return None


def _gap(answer: Answer, position: int, pair: tuple[int, int]) -> float | None:
    chances = answer.likeliest[position]
    return chances[pair[0]] - chances[pair[1]] if pair[1] in chances else None


def verdict(first: Sequence[Answer], second: Sequence[Answer], dtype: str) -> dict[str, Any]:
    """Counts, near ties and what is wrong, ready for JSON; ``passed`` where nothing is."""
    found = [parting(i, a, b) for i, (a, b) in enumerate(zip(first, second, strict=True))]
    parted, limit = [one for one in found if one is not None], NEAR[dtype]
    wrong = [one for one in parted if not one.near(limit)]
    return {
        "prompts": len(found),
        "equal": len(found) - len(parted),
        "near_limit": limit,
        "near_ties": [asdict(one) for one in parted if one.near(limit)],
        "wrong": [asdict(one) for one in wrong],
        "compared_tokens": sum(len(a.tokens) if p is None else p.position for a, p in zip(first, found, strict=True)),
        "passed": not wrong,
    }
