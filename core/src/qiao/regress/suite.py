"""Suites: the user's own prompts as JSON lines, and those that come with Qiao."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import TypeVar

import msgspec

from qiao.errors import ParameterError
from qiao.regress.checks import Check

_T = TypeVar("_T")

BUILT_IN = ("en", "zh")
"""Suites inside the package: law, dosage, official writing, arithmetic and general knowledge."""

MAX_CASES = 5000
MAX_TOKENS = 64
"""Of an answer, where neither the case nor the header says."""


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One message of a conversation."""

    role: str
    content: str


class Case(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One prompt: a text to continue (``prompt``) or a conversation to answer (``messages``).

    ``reference`` is a text that both models are scored on, in place of their own answer; ``max_tokens`` 0 means the
    suite's.
    """

    id: str
    prompt: str | None = None
    messages: list[Message] | None = None
    reference: str | None = None
    tags: list[str] = []
    check: Check | None = None
    max_tokens: int = 0

    def __post_init__(self) -> None:
        if not self.id:
            raise ParameterError("id", "must not be empty")
        if bool(self.prompt) == bool(self.messages):
            raise ParameterError("prompt", "a case has either prompt or messages, and not an empty one")
        if self.max_tokens < 0:
            raise ParameterError("max_tokens", f"must be at least 1, got {self.max_tokens}")
        if self.reference == "":
            raise ParameterError("reference", "must not be empty; leave it out")
        for tag in self.tags:
            if not tag.strip() or tag == "all" or ":" in tag or "," in tag:
                raise ParameterError("tags", f"{tag!r}: a tag is a word without : and , and not 'all'")

    @property
    def question(self) -> str:
        """The prompt as a report shows it."""
        return self.prompt or "\n".join(f"{m.role}: {m.content}" for m in self.messages or ())


class Header(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The optional first line of a suite: its name, what it is, what must hold, and how long answers may be."""

    suite: str
    description: str = ""
    thresholds: list[str] = []
    max_tokens: int = MAX_TOKENS


class Suite(msgspec.Struct, frozen=True):
    """A header and its cases, ids unique."""

    header: Header
    cases: list[Case]

    @property
    def tags(self) -> list[str]:
        """``all``, then each tag in order of its first case."""
        return list(dict.fromkeys(["all", *(tag for case in self.cases for tag in case.tags)]))

    def tagged(self, tag: str) -> list[int]:
        """Places of the cases with ``tag``."""
        return [i for i, case in enumerate(self.cases) if tag == "all" or tag in case.tags]

    def limited(self, max_tokens: int) -> Suite:
        """The same cases with answers of at most ``max_tokens``."""
        cases = [msgspec.structs.replace(case, max_tokens=min(case.max_tokens, max_tokens)) for case in self.cases]
        return Suite(msgspec.structs.replace(self.header, max_tokens=max_tokens), cases)

    def max_tokens(self, case: Case) -> int:
        """Longest answer to ``case``."""
        return case.max_tokens or self.header.max_tokens


def load_suite(name: str) -> Suite:
    """The suite called ``en`` or ``zh``, or that of a file. Raises ``ParameterError`` naming file and line."""
    if name in BUILT_IN:
        return read_suite(files("qiao.regress").joinpath("suites").joinpath(f"{name}.jsonl").read_text("utf-8"), name)
    try:
        text = Path(name).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        built_in = " or ".join(BUILT_IN)
        raise ParameterError("--suite", f"{name!r} is neither {built_in} nor a readable file ({error})") from error
    return read_suite(text, name)


def read_suite(text: str, name: str) -> Suite:
    """The suite in JSON lines ``text``; ``name`` is for messages. Raises ``ParameterError``."""
    header, cases, seen = Header(suite=Path(name).stem), [], set()
    for i, (number, line) in enumerate(_lines(text)):
        where = f"{name}, line {number}"
        if i == 0 and b'"suite"' in line and "suite" in _decoded(line, dict[str, msgspec.Raw], where):
            header = _decoded(line, Header, where)
            continue
        case = _decoded(line, Case, where)
        if case.id in seen:
            raise ParameterError("--suite", f"{where}: the id {case.id!r} is there twice")
        seen.add(case.id)
        cases.append(case)
    if not 1 <= len(cases) <= MAX_CASES:
        raise ParameterError("--suite", f"{name}: has {len(cases)} cases; 1 to {MAX_CASES} are needed")
    if header.max_tokens < 1:
        raise ParameterError("--suite", f"{name}: max_tokens must be at least 1, got {header.max_tokens}")
    return Suite(header, cases)


def _lines(text: str) -> Iterator[tuple[int, bytes]]:
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield number, line.encode()


def _decoded(line: bytes, kind: type[_T], where: str) -> _T:
    try:
        return msgspec.json.decode(line, type=kind)
    except (msgspec.MsgspecError, ParameterError, ValueError) as error:
        raise ParameterError("--suite", f"{where}: {error}") from error
