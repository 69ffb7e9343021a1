"""What an answer must say: a text, a pattern, a number. Checks look at text alone, so they hold across tokenizers."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Callable, Mapping

import msgspec
import regex

from qiao.errors import ParameterError

MAX_PATTERN = 1000
"""Characters of a pattern."""

MAX_SECONDS = 2.0
"""Processor time of one search; a pattern that backtracks for longer is refused."""

_NUMBER = regex.compile(r"(?<![\w.])[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:e[-+]?\d+)?|(?<=[^\W\d_])\d+(?:\.\d+)?")
_ASIDE = {"−": "-", "－": "-", "，": ","}


class Check(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One expectation of one answer; exactly one of the first four is given.

    ``exact``: the answer is this text, spaces around it aside. ``contains``: all of these are in it, whatever their
    case and width. ``regex``: this is found in it. ``numeric``: one of the answer's numbers differs from it by at most
    ``tolerance``. Raises ``ParameterError``.
    """

    exact: str | None = None
    contains: str | list[str] | None = None
    regex: str | None = None
    numeric: float | None = None
    tolerance: float = 0.0

    def __post_init__(self) -> None:
        if len(self._given()) != 1:
            raise ParameterError("check", "must have exactly one of exact, contains, regex and numeric")
        if self.tolerance and self.numeric is None:
            raise ParameterError("check", "tolerance belongs to numeric")
        if not 0.0 <= self.tolerance < math.inf:
            raise ParameterError("check", f"tolerance must be a number of at least 0, got {self.tolerance}")
        if self.contains is not None and not all(self._texts()):
            raise ParameterError("check", "contains must have a text, and no empty one")
        if self.regex is not None:
            compiled(self.regex)

    @property
    def kind(self) -> str:
        """``exact``, ``contains``, ``regex`` or ``numeric``."""
        return self._given()[0]

    def passes(self, answer: str) -> bool:
        """Whether ``answer`` is as expected. Raises ``ParameterError`` for a pattern that takes too long."""
        tests: Mapping[str, Callable[[str], bool]] = {
            "exact": lambda text: text.strip() == str(self.exact).strip(),
            "contains": lambda text: all(_folded(part) in _folded(text) for part in self._texts()),
            "regex": lambda text: found(str(self.regex), text),
            "numeric": self._has_number,
        }
        return tests[self.kind](answer)

    def expected(self) -> str:
        """The expectation in words, for a report."""
        value = " + ".join(self._texts()) if self.contains is not None else getattr(self, self.kind)
        return f"{value:g} ± {self.tolerance:g}" if self.kind == "numeric" else str(value)

    def _given(self) -> list[str]:
        return [name for name in ("exact", "contains", "regex", "numeric") if getattr(self, name) is not None]

    def _texts(self) -> list[str]:
        assert self.contains is not None
        return [self.contains] if isinstance(self.contains, str) else list(self.contains) or [""]

    def _has_number(self, text: str) -> bool:
        assert self.numeric is not None
        slack = self.tolerance + 1e-12 * abs(self.numeric)  # 0.1 + 0.2 is not 0.3 in binary
        return any(abs(number - self.numeric) <= slack for number in numbers(text))


def compiled(pattern: str) -> regex.Pattern[str]:
    """The compiled ``pattern``. Raises ``ParameterError`` where it is too long or not a pattern."""
    if len(pattern) > MAX_PATTERN:
        raise ParameterError("check", f"a regex has {len(pattern)} characters, at most {MAX_PATTERN} are allowed")
    try:
        return regex.compile(pattern)
    except regex.error as error:
        raise ParameterError("check", f"{pattern!r} is no regex: {error}") from error


def found(pattern: str, text: str) -> bool:
    """Whether ``pattern`` is found in ``text``. Raises ``ParameterError`` after ``MAX_SECONDS``."""
    try:
        return compiled(pattern).search(text, timeout=MAX_SECONDS) is not None
    except TimeoutError:
        raise ParameterError(
            "check", f"the regex {pattern!r} searched for more than {MAX_SECONDS:g} s; write it without nested repeats"
        ) from None


def numbers(text: str) -> list[float]:
    """The numbers written in ``text`` in order: digits of any width, ``1,000``, decimals, signs, exponents."""
    plain = unicodedata.normalize("NFKC", "".join(_ASIDE.get(char, char) for char in text)).lower()
    return [float(match.replace(",", "")) for match in _NUMBER.findall(plain)]


def largest_change(one: str, other: str) -> float:
    """The largest difference between the numbers of two texts, pair by pair; infinity where their counts differ."""
    before, after = numbers(one), numbers(other)
    if len(before) != len(after):
        return math.inf
    return max((abs(x - y) for x, y in zip(before, after, strict=True)), default=0.0)


def _folded(text: str) -> str:
    return unicodedata.normalize("NFKC", text).casefold()
