"""What was found of one case."""

from __future__ import annotations

from dataclasses import dataclass

from qiao.regress.checks import largest_change
from qiao.regress.divergence import Divergence
from qiao.regress.models import Answer
from qiao.regress.suite import Case


@dataclass(frozen=True, slots=True)
class Alternative:
    """A token and the probability that each model gives it."""

    token: str
    base: float
    candidate: float


@dataclass(frozen=True, slots=True)
class Split:
    """The first place where two greedy answers differ: ``position`` counts their tokens from 0.

    ``margin`` is by how many nats the base preferred its own token to the candidate's, ``candidate_margin`` the
    reverse; small ones mean that the models nearly agree. ``alternatives`` are the likeliest tokens of both.
    All but the position are empty where no distribution is at hand.
    """

    position: int
    margin: float | None = None
    candidate_margin: float | None = None
    alternatives: tuple[Alternative, ...] = ()


@dataclass(frozen=True, slots=True)
class CaseResult:
    """Both answers to one case, and how the distributions differ along the base's answer and along the reference."""

    case: Case
    base: Answer
    candidate: Answer
    answer: Divergence
    reference: Divergence
    split: Split | None

    @property
    def changed(self) -> bool:
        """Whether the greedy texts differ."""
        return self.base.text != self.candidate.text

    @property
    def base_passes(self) -> bool | None:
        """The check of the base's answer; None without a check."""
        return None if self.case.check is None else self.case.check.passes(self.base.text)

    @property
    def passes(self) -> bool | None:
        """The check of the candidate's answer; None without a check."""
        return None if self.case.check is None else self.case.check.passes(self.candidate.text)

    @property
    def numeric(self) -> float:
        """The largest change of a number between the answers; infinity where one has more numbers."""
        return largest_change(self.base.text, self.candidate.text)

    @property
    def distributions(self) -> Divergence:
        """All positions, those of the answer first."""
        return Divergence.joined([self.answer, self.reference])


def first_difference(one: list[int], other: list[int]) -> int | None:
    """The first place where two lists of tokens differ, None where they are equal."""
    for i, (x, y) in enumerate(zip(one, other, strict=False)):
        if x != y:
            return i
    return None if len(one) == len(other) else min(len(one), len(other))
