"""What the engine's tests share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from tests.support.engine import TinyModel, make_ops


@pytest.fixture(scope="session")
def solo() -> Callable[[Sequence[int], int], list[int]]:
    """Greedy tokens of a prompt by full recomputation, remembered."""
    model = TinyModel(make_ops())
    known: dict[tuple[int, ...], list[int]] = {}

    def greedy(prompt: Sequence[int], count: int) -> list[int]:
        done = known.setdefault(tuple(prompt), [])
        if len(done) < count:
            done += model.greedy([*prompt, *done], count - len(done))
        return done[:count]

    return greedy
