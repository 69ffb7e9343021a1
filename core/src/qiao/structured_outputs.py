"""What an answer must look like: the constraint of a request, as vLLM's users write it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from qiao.errors import ParameterError

MAX_CHARACTERS = 1 << 17
"""Length of a schema, grammar, pattern or list of choices."""

MAX_DEPTH = 64
"""Nesting of a JSON schema (vLLM's bound)."""

MAX_CHOICES = 4096

MAX_GRAMMAR_SIZE = 100_000
"""Symbols of a grammar's rules."""

LEXER_FUEL = 1_000_000
"""Steps for building a grammar's regular expressions; about 20 ms."""

KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


class StructuredOutputsParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Exactly one of ``json`` (a schema, as an object or as text), ``regex`` (Rust's syntax, matched as a whole),
    ``choice``, ``grammar`` (Lark or GBNF), ``json_object`` and ``structural_tag`` (vLLM's older form, as text).

    ``disable_any_whitespace`` gives JSON on one line without spaces, ``whitespace_pattern`` is a regex for what may
    stand between tokens instead; ``disable_additional_properties`` forbids properties that the schema does not name.
    ``lenient`` ignores keywords that cannot be enforced instead of refusing them. ``origin`` is the field to blame in
    errors. Raises ``ParameterError``.
    """

    json: Any = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    lenient: bool = False
    origin: str = "structured_outputs"

    def __post_init__(self) -> None:
        if self.json_object is False:
            self.json_object = None
        given = [name for name in KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            found = f"{' and '.join(given)} are given" if given else "none is given"
            raise ParameterError(self.origin, f"needs exactly one of {', '.join(KINDS)}; {found}")
        for name in ("regex", "grammar", "structural_tag", "whitespace_pattern"):
            self._check_text(name)
        if self.choice is not None:
            self._check_choice(self.choice)
        if hasattr(self.json, "model_json_schema"):  # a pydantic class
            self.json = self.json.model_json_schema()
        if self.json is not None and not isinstance(self.json, str | bool | Mapping):
            raise ParameterError(self.where("json"), f"must be a JSON schema, got {self.json!r:.100}")

    @property
    def kind(self) -> str:
        """The one of ``KINDS`` that is set."""
        return next(name for name in KINDS if getattr(self, name) is not None)

    def where(self, name: str) -> str:
        """The path of field ``name`` as the user knows it."""
        return f"{self.origin}.{name}" if self.origin == "structured_outputs" else self.origin

    def _check_text(self, name: str) -> None:
        value = getattr(self, name)
        if value is None:
            return
        if not isinstance(value, str) or not value:
            raise ParameterError(self.where(name), f"must be a non-empty string, got {value!r:.100}")
        if len(value) > MAX_CHARACTERS:
            raise ParameterError(self.where(name), f"has {len(value)} characters, at most {MAX_CHARACTERS}")

    def _check_choice(self, choice: Any) -> None:
        if isinstance(choice, str) or not isinstance(choice, list | tuple) or not choice:
            raise ParameterError(self.where("choice"), f"must be a list with at least one string, got {choice!r:.100}")
        if not all(isinstance(one, str) and one for one in choice):
            raise ParameterError(self.where("choice"), "must hold non-empty strings")
        if len(choice) > MAX_CHOICES or sum(map(len, choice)) > MAX_CHARACTERS:
            raise ParameterError(self.where("choice"), f"at most {MAX_CHOICES} strings of {MAX_CHARACTERS} characters")
        self.choice = list(choice)


def parser_limits(**more: Any) -> Any:
    """llguidance's ``LLParserLimits`` for checking a grammar and, with ``more``, for matching."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=LEXER_FUEL, max_grammar_size=MAX_GRAMMAR_SIZE, verbose_errors=False, **more
    )
