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
    """Where two answers to ``prompt`` part: the position, both tokens, and what each side holds of both.

    ``logprobs`` has a pair for each side, of the two tokens in their order: logits less the side's own constant. None
    where a token is not among the side's likeliest.
    """

    prompt: int
    position: int
    tokens: tuple[int, int]
    logprobs: tuple[tuple[float | None, float | None], tuple[float | None, float | None]]

    @property
    def gaps(self) -> tuple[float | None, float | None]:
        """By how much each side prefers its own token; None where it is not known."""
        (own, other), (others, others_own) = self.logprobs
        return _less(own, other), _less(others_own, others)

    def near(self, limit: float) -> bool:
        """Whether both sides hold the two tokens for about equally likely."""
        return all(gap is not None and gap <= limit for gap in self.gaps)


def parting(prompt: int, first: Answer, second: Answer) -> Parting | None:
    """Where the answers part; None where they are equal. What comes after is about another text."""
    for position, pair in enumerate(zip(first.tokens, second.tokens, strict=False)):
        if pair[0] != pair[1]:
            held = [
                (side.likeliest[position].get(pair[0]), side.likeliest[position].get(pair[1]))
                for side in (first, second)
            ]
            return Parting(prompt, position, pair, (held[0], held[1]))
    if len(first.tokens) != len(second.tokens):
        return Parting(prompt, min(len(first.tokens), len(second.tokens)), (-1, -1), ((None, None), (None, None)))
    return None


def _less(own: float | None, other: float | None) -> float | None:
    return None if own is None or other is None else own - other


def verdict(first: Sequence[Answer], second: Sequence[Answer], dtype: str) -> dict[str, Any]:
    """Counts, near ties and what is wrong, ready for JSON; ``passed`` where nothing is."""
    found = [parting(i, a, b) for i, (a, b) in enumerate(zip(first, second, strict=True))]
    parted, limit = [one for one in found if one is not None], NEAR[dtype]
    wrong = [one for one in parted if not one.near(limit)]
    return {
        "prompts": len(found),
        "equal": len(found) - len(parted),
        "near_limit": limit,
        "near_ties": [_row(one) for one in parted if one.near(limit)],
        "wrong": [_row(one) for one in wrong],
        "compared_tokens": sum(len(a.tokens) if p is None else p.position for a, p in zip(first, found, strict=True)),
        "passed": not wrong,
    }


def _row(one: Parting) -> dict[str, Any]:
    return {**asdict(one), "gaps": one.gaps}
