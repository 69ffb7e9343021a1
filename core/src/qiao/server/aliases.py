"""Names that stand for one of several models: which request goes where."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from qiao.errors import ParameterError

IDENTITIES = ("session", "user", "tenant")
"""Who a request belongs to, best first: ``X-Session-Id``, the body's ``user``, the tenant of the key."""


BLOCK = 64
"""Of so many requests without an identity, one after the other, each model gets its share."""


class EvenDraws:
    """Numbers in (0, 1) of which every ``size`` in a row are spread evenly, in an order that cannot be foretold.

    Permuted blocks, as clinical trials use them: of n requests the shares are off by about 1/n instead of 1/sqrt(n).
    """

    def __init__(self, size: int = BLOCK) -> None:
        self._size = size
        self._random = random.SystemRandom()
        self._left: list[int] = []

    def next(self) -> float:
        """Another one."""
        if not self._left:
            self._left = list(range(self._size))
            self._random.shuffle(self._left)
        return (self._left.pop() + self._random.random()) / self._size


@dataclass(frozen=True)
class Alias:
    """A name for models, each with a weight of its own; ``sticky`` says by which identities answers stay with one.

    Raises ``ParameterError`` naming the field.
    """

    name: str
    weights: Mapping[str, float]
    sticky: tuple[str, ...] = IDENTITIES
    _draws: EvenDraws = field(default_factory=EvenDraws, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        where = f"aliases.{self.name}"
        if not self.weights:
            raise ParameterError(where, "needs at least one model")
        for model, weight in self.weights.items():
            if not (math.isfinite(weight) and weight >= 0.0):
                raise ParameterError(f"{where}.weights.{model}", f"must be a number of at least 0, got {weight!r}")
        if not any(self.weights.values()):
            raise ParameterError(f"{where}.weights", "are all 0; one must be above")
        for one in self.sticky:
            if one not in IDENTITIES:
                raise ParameterError(f"{where}.sticky", f"may hold {', '.join(IDENTITIES)}, got {one!r}")

    def choose(self, identities: Mapping[str, str], there: Collection[str]) -> str | None:
        """The model for a request of ``identities`` among those that are ``there``; None where there is none.

        Requests without an identity that counts are drawn by weight, evenly. Of others each model's score is
        ``-weight / ln(u)`` with u in (0, 1) from a hash of model and identity; the highest wins. So a model wins with
        its share of the weights, everywhere and after a restart alike, and a changed weight or a missing model moves
        only those who must move (weighted rendezvous hashing, Schindelhauer and Schomaker 2005).
        """
        able = [model for model, weight in self.weights.items() if weight > 0.0 and model in there]
        kind = next((kind for kind in self.sticky if identities.get(kind)), None)
        if kind is None:
            return self._drawn(able) if able else None
        identity = f"{kind}\0{identities[kind]}"
        return max(able, key=lambda model: self._score(model, identity), default=None)

    def _drawn(self, able: list[str]) -> str:
        point = self._draws.next() * sum(self.weights[model] for model in able)
        for model in able:
            point -= self.weights[model]
            if point < 0.0:
                return model
        return able[-1]

    def _score(self, model: str, identity: str) -> float:
        data = "\0".join((self.name, model, identity)).encode("utf-8", "surrogateescape")
        number = int.from_bytes(hashlib.sha256(data).digest()[:8], "big")
        return -self.weights[model] / math.log((number + 0.5) / 2.0**64)
