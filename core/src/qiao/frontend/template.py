"""Chat templates, run as code that is not trusted.

The environment is transformers': immutable sandbox, ``trim_blocks``, ``lstrip_blocks``, loop controls,
``raise_exception``, ``strftime_now``, ``tojson`` without HTML escapes. Added here: a bound on work and on sizes, since
a template is part of the checkpoint and can loop or double a string without end.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from qiao.errors import ParameterError

MAX_STEPS = 2_000_000
"""Loop rounds of one rendering; a call counts as ten."""

_CALL_STEPS = 10

MAX_OUTPUT = 1 << 24
"""Characters of one rendering, and of any text or list that it builds."""


class TemplateLimitError(jinja2.TemplateError):
    """The template did more work than any real one does."""


class ChatTemplate:
    """A compiled template. ``render`` raises ``ParameterError`` for whatever goes wrong in it."""

    def __init__(self, source: str) -> None:
        self._environment = _Environment()
        try:
            self._template = self._environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ParameterError("chat_template", f"does not compile: {error} (line {error.lineno})") from error
        except (RecursionError, OverflowError, MemoryError) as error:
            raise ParameterError("chat_template", f"does not compile: {error}") from error

    def render(self, variables: Mapping[str, Any]) -> str:
        """The prompt's text."""
        token = self._environment.steps.set([0])
        pieces: list[str] = []
        size = 0
        try:
            for piece in self._template.generate(variables):
                size += len(piece)
                if size > MAX_OUTPUT:
                    raise TemplateLimitError(f"made more than {MAX_OUTPUT} characters")
                pieces.append(piece)
        except TemplateLimitError as error:
            raise ParameterError("chat_template", f"was stopped: it {error}") from error
        except jinja2.exceptions.SecurityError as error:
            raise ParameterError("chat_template", f"was stopped by the sandbox (security): {error}") from error
        except _RaisedError as error:
            raise ParameterError("messages", str(error)) from error
        except Exception as error:  # whatever odd messages make of a template's own expressions
            kind = "" if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: "
            raise ParameterError("messages", f"the chat template cannot use them: {kind}{error}") from error
        finally:
            self._environment.steps.reset(token)
        return "".join(pieces)


class _RaisedError(jinja2.TemplateError):
    """The template called ``raise_exception``."""


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**", "%", "+"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self.steps: ContextVar[list[int]] = ContextVar("steps")
        self.filters["tojson"] = _tojson
        self.filters["format"] = _format
        self.filters["_counted"] = self._counted
        self.filters["_joined"] = _joined
        self.filters["_bounded"] = _bounded
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.iter = _filter(loop.iter, "_counted")
        for concat in tree.find_all(nodes.Concat):
            concat.nodes = [_filter(nodes.List(concat.nodes), "_joined")]
        for block in tree.find_all(nodes.AssignBlock):
            block.filter = _filter(block.filter, "_bounded")
        return tree

    def _counted(self, values: Iterable[Any]) -> Iterator[Any]:
        for value in values:
            self._step()
            yield value

    def _step(self, count: int = 1) -> None:
        steps = self.steps.get()
        steps[0] += count
        if steps[0] > MAX_STEPS:
            raise TemplateLimitError(f"took more than {MAX_STEPS} loop rounds and calls")

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        self._step(_CALL_STEPS)
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            _check_repeat(left, right)
            _check_repeat(right, left)
        elif operator == "%" and isinstance(left, str):
            _check_widths(left)
        elif operator == "**" and isinstance(right, int) and abs(right) > 1024:
            raise TemplateLimitError("used a power above 1024")
        return _bounded(super().call_binop(context, operator, left, right))


class _Generation(Extension):
    """``{% generation %}`` marks the assistant's tokens for training; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The body alone."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _check_repeat(value: Any, times: Any) -> None:
    if isinstance(value, str | list | tuple) and isinstance(times, int) and len(value) * times > MAX_OUTPUT:
        raise TemplateLimitError(f"repeated a value beyond {MAX_OUTPUT} elements")


def _check_widths(form: str) -> None:
    if re.search(r"%[^%a-zA-Z]*(\d{4}|\*)", form):
        raise TemplateLimitError("formatted to a width above 999")


def _format(value: str, *args: Any, **kwargs: Any) -> str:
    _check_widths(str(value))
    return str(_bounded(str(value) % (kwargs or args)))


def _joined(values: Iterable[Any]) -> str:
    return str(_bounded("".join(map(str, values))))


def _bounded(value: Any) -> Any:
    if isinstance(value, str | list | tuple) and len(value) > MAX_OUTPUT:
        raise TemplateLimitError(f"built a value of more than {MAX_OUTPUT} elements")
    return value


def _filter(node: Any, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=1)


def _raise_exception(message: Any) -> None:
    raise _RaisedError(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
