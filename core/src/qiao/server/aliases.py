"""Names that stand for one of several models: which request goes where."""

from __future__ import annotations

import hashlib
import math
import uuid
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from qiao.errors import ParameterError

IDENTITIES = ("session", "user", "tenant")
"""Who a request belongs to, best first: ``X-Session-Id``, the body's ``user``, the tenant of the key."""


@dataclass(frozen=True)
class Alias:
    """A name for models, each with a weight of its own; ``sticky`` says by which identities answers stay with one.

    Raises ``ParameterError`` naming the field.
    """

    name: str
    weights: Mapping[str, float]
    sticky: tuple[str, ...] = IDENTITIES

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

        Requests without an identity that counts are drawn by weight, each for itself. Of others each model's score is
        ``-weight / ln(u)`` with u in (0, 1) from a hash of model and identity; the highest wins. So a model wins with
        its share of the weights, everywhere and after a restart alike, and a changed weight or a missing model moves
        only those who must move (weighted rendezvous hashing, Schindelhauer and Schomaker 2005).
        """
        kind = next((kind for kind in self.sticky if identities.get(kind)), None)
        identity = f"{kind}\0{identities[kind]}" if kind is not None else uuid.uuid4().hex
        able = [model for model, weight in self.weights.items() if weight > 0.0 and model in there]
        return max(able, key=lambda model: self._score(model, identity), default=None)

    def _score(self, model: str, identity: str) -> float:
        data = "\0".join((self.name, model, identity)).encode("utf-8", "surrogateescape")
        number = int.from_bytes(hashlib.sha256(data).digest()[:8], "big")
        return -self.weights[model] / math.log((number + 0.5) / 2.0**64)
