"""How much one rendering of a chat template may do, and what a single operation may build.

A loop or a chain of calls is stopped by counts and by processor time. One operation on a bounded value takes
milliseconds, unless it multiplies its input: those are checked before they run, or are not there at all.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jinja2

MAX_STEPS = 2_000_000
"""Loop rounds of one rendering; a call counts as ten, and so does an element of a list that is put into a list."""

MAX_SECONDS = 5.0
"""Processor time of one rendering. Real templates need milliseconds."""

MAX_OUTPUT = 1 << 24
"""Characters of one rendering, and of any text or list that it builds."""

MAX_BUILT = 1 << 28
"""Characters and elements of all texts and lists that one rendering builds."""

MAX_BITS = 1 << 14
"""Bits of a computed integer."""

MAX_WIDTH = 999
"""Characters to which an operation may pad or indent."""

_NESTED_STEPS = 10

_CLOCK_EVERY = 64
"""Steps between two looks at the clock; 1,024 characters count as one here."""

UNBOUNDED_FILTERS = frozenset({"batch", "center", "lipsum", "pprint", "slice", "urlize", "wordwrap", "xmlattr"})
"""Filters that chat templates do not need and whose work has no bound."""

UNBOUNDED_ATTRIBUTES = frozenset(
    {"center", "encode", "expandtabs", "ljust", "maketrans", "rjust", "to_bytes", "translate", "zfill"}
)
"""Methods of texts and numbers, likewise."""


class TemplateLimitError(jinja2.TemplateError):
    """The template did more work than any real one does."""


class Meter:
    """The work of one rendering so far. Every method raises ``TemplateLimitError`` when it becomes too much."""

    def __init__(self) -> None:
        self._steps = 0
        self._built = 0
        self._unseen = 0
        self._end = time.thread_time() + MAX_SECONDS

    def step(self, count: int = 1) -> None:
        """Count ``count`` steps."""
        self._steps += count
        if self._steps > MAX_STEPS:
            raise TemplateLimitError(f"took more than {MAX_STEPS} loop rounds and calls")
        self._unseen += count
        if self._unseen >= _CLOCK_EVERY:
            self._unseen = 0
            if time.thread_time() > self._end:
                raise TemplateLimitError(f"took more than {MAX_SECONDS:.0f} s of processor time")

    def built(self, value: Any) -> Any:
        """Count ``value``, which an operation has just made, and return it; an iterator is counted as it is read."""
        if isinstance(value, str | list | tuple | dict | bytes):
            if len(value) > MAX_OUTPUT:
                raise TemplateLimitError(f"built a value of more than {MAX_OUTPUT} elements")
            self._built += len(value)
            self._unseen += len(value) >> 10
            if self._built > MAX_BUILT:
                raise TemplateLimitError(f"built values of more than {MAX_BUILT} elements in all")
        elif isinstance(value, int) and value.bit_length() > MAX_BITS:
            raise TemplateLimitError(f"computed a number of more than {MAX_BITS} bits")
        elif isinstance(value, Iterator):
            return self._items(value)
        return value

    def nested(self, value: Any) -> Any:
        """Count all that ``value`` holds, shared parts each time, before it becomes a part of another: a list of twice
        the same list doubles what printing or comparing costs.
        """
        waiting = [value]
        while waiting:
            one = waiting.pop()
            if isinstance(one, Mapping):
                one = list(one.values())
            if isinstance(one, list | tuple):
                self.step(_NESTED_STEPS * len(one))
                waiting.extend(item for item in one if isinstance(item, list | tuple | Mapping))
        return value

    def _items(self, values: Iterator[Any]) -> Iterator[Any]:
        for value in values:
            self.step()
            yield self.built(value)


def check_product(left: Any, right: Any) -> None:
    """Refuse ``left * right`` when it is too large."""
    for value, times in ((left, right), (right, left)):
        if isinstance(value, str | list | tuple | bytes) and isinstance(times, int) and len(value) * times > MAX_OUTPUT:
            raise TemplateLimitError(f"repeated a value beyond {MAX_OUTPUT} elements")
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > MAX_BITS:
        raise TemplateLimitError(f"computed a number of more than {MAX_BITS} bits")


def check_power(base: Any, exponent: Any) -> None:
    """Refuse ``base ** exponent`` when it is too large."""
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * abs(exponent) > MAX_BITS:
        raise TemplateLimitError(f"computed a power of more than {MAX_BITS} bits")


def check_percent(form: str, values: Any) -> None:
    """Refuse ``form % values`` with a large width or very much text."""
    if re.search(r"%[^%a-zA-Z]*(\d{4}|\*)", form):
        raise TemplateLimitError(f"formatted to a width above {MAX_WIDTH}")
    _check_repeats(form.count("%"), values)


def check_braces(form: str, values: Any) -> None:
    """Refuse ``form.format(...)`` with a large width, a width from an argument, or very much text."""
    if re.search(r":[^}]*(\d{4}|\{)", form):
        raise TemplateLimitError(f"formatted to a width above {MAX_WIDTH}")
    _check_repeats(form.count("{"), values)


def check_replace(text: str, old: str, new: str) -> None:
    """Refuse ``text.replace(old, new)`` when it is too large."""
    if text.count(old) * len(new) > MAX_OUTPUT:
        raise TemplateLimitError(f"built a value of more than {MAX_OUTPUT} elements")


def joined(separator: str, values: Iterable[Any]) -> str:
    """``separator.join`` of the values as texts, stopped when it becomes too large."""
    pieces: list[str] = []
    size = 0
    for value in values:
        pieces.append(str(value))
        size += len(pieces[-1]) + len(separator)
        if size > MAX_OUTPUT + len(separator):
            raise TemplateLimitError(f"built a value of more than {MAX_OUTPUT} elements")
    return separator.join(pieces)


def check_indent(text: str, width: Any) -> None:
    """Refuse to indent by a large width, or to a very long text."""
    each = len(width) if isinstance(width, str) else width
    if isinstance(each, int) and (each > MAX_WIDTH or text.count("\n") * each > MAX_OUTPUT):
        raise TemplateLimitError(f"indented by more than {MAX_WIDTH} or beyond {MAX_OUTPUT} characters")


def _check_repeats(fields: int, values: Any) -> None:
    if isinstance(values, Mapping):
        values = list(values.values())
    if not isinstance(values, list | tuple):
        values = [values]
    longest = max((len(one) for one in values if isinstance(one, str | list | tuple | dict)), default=0)
    if fields > 1 and fields * longest > MAX_OUTPUT:
        raise TemplateLimitError(f"formatted beyond {MAX_OUTPUT} characters")
