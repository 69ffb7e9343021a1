"""What a pattern must not be, though the grammar library would take it."""

from __future__ import annotations

import re

from qiao.errors import ParameterError

MAX_POSITIONS = 1_000_000
"""Characters of the longest way to write a pattern without its counted repeats."""

_PART = re.compile(
    r"""
    (?P<atom>\\[pPxuU]\{[^}]{0,64}\}|\\.|[^()|*+?{\[])
    |(?P<repeat>[*+?]|\{(?P<least>\d+)(?:,(?P<most>\d*))?\})
    |(?P<open>\((?:\?(?:P?<\w*>|[\w-]*:?))?)
    |(?P<close>\))
    |(?P<other>[|{])
    |(?P<set>\[)
    """,
    re.VERBOSE | re.DOTALL,
)
"""One part of a pattern in Rust's syntax, roughly: what is malformed is left for the library to name."""


class _Reader:
    """Goes over the parts of a pattern once, from left to right."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._sizes = [0]  # of the groups that are open, outermost first
        self._last = 0  # of what a repeat would repeat
        self._repeats = 0  # behind it so far; a lazy one's question mark counts

    def repeat(self, part: re.Match[str]) -> None:
        if self._repeats > 1 or (self._repeats == 1 and part["repeat"] != "?"):
            raise ParameterError(
                self._where,
                f"has two repeats behind each other at character {part.start()}; put the first into parentheses",
            )
        self._repeats += 1
        if part["least"] is not None:
            times = max(_count(part["least"]), _count(part["most"] or "0"), 1)
            self._add(self._last * (times - 1))
            self._last *= times

    def open(self) -> None:
        self._sizes.append(0)
        self._repeats = 0

    def close(self) -> None:
        self.atom(self._sizes.pop() if len(self._sizes) > 1 else 0)

    def atom(self, size: int) -> None:
        self._last, self._repeats = size, 0
        self._add(size)

    def _add(self, size: int) -> None:
        self._sizes[-1] += size
        if self._sizes[-1] > MAX_POSITIONS:
            raise ParameterError(self._where, f"repeats more than {MAX_POSITIONS} characters; its counts multiply")


def check_pattern(pattern: str, where: str) -> None:
    """Raises ``ParameterError`` for the field ``where`` when repeats follow each other, as in ``a**``, or multiply
    beyond ``MAX_POSITIONS``.

    The library reads ``a**`` as ``(a*)*`` and ``a++`` as ``(a+)+``. Python and JavaScript refuse the first, and the
    second means something else to those who know possessive repeats: so it is more likely a mistake than meant.
    """
    reader, at = _Reader(where), 0
    while part := _PART.match(pattern, at):
        at = part.end()
        if part["repeat"]:
            reader.repeat(part)
        elif part["open"]:
            reader.open()
        elif part["close"]:
            reader.close()
        elif part["set"]:
            at = _set_end(pattern, at)
            reader.atom(1)
        else:
            reader.atom(1 if part["atom"] else 0)


def _set_end(pattern: str, at: int) -> int:
    """Where the set of characters ends that was opened before ``at``; sets nest."""
    depth, fresh = 1, True
    while depth and at < len(pattern):
        one = pattern[at]
        if one == "\\":
            at += 1
        elif one == "[":
            depth += 1
        elif one == "]" and not fresh:
            depth -= 1
        fresh = one == "[" or (fresh and one == "^")
        at += 1
    return at


def _count(digits: str) -> int:
    return int(digits) if len(digits) <= 8 else MAX_POSITIONS + 1
