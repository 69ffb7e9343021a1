"""Chat templates, run as code that is not trusted.

The environment is transformers': immutable sandbox, ``trim_blocks``, ``lstrip_blocks``, loop controls,
``raise_exception``, ``strftime_now``, ``tojson`` without HTML escapes. Added here: a bound on work and on sizes, since
a template is part of the checkpoint and can loop or double a string without end.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import filters, nodes, pass_eval_context
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment

from qiao.errors import ParameterError
from qiao.frontend import template_limits as limits
from qiao.frontend.template_limits import MAX_OUTPUT, Meter, TemplateLimitError

_CALL_STEPS = 10
_MAX_JSON_INDENT = 64

__all__ = ["MAX_OUTPUT", "ChatTemplate", "TemplateLimitError"]


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
        token = self._environment.meter.set(Meter())
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
            self._environment.meter.reset(token)
        return "".join(pieces)


class _RaisedError(jinja2.TemplateError):
    """The template called ``raise_exception``."""


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**", "%", "+"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], finalize=self._shown
        )
        self.meter: ContextVar[Meter] = ContextVar("meter")
        own = {"tojson": _tojson, "format": _format, "replace": _replace, "join": _join, "indent": _indent}
        given = {name: one for name, one in self.filters.items() if name not in limits.UNBOUNDED_FILTERS}
        self.filters = {name: self._metered(one) for name, one in (given | own).items()}
        self.filters |= {"_counted": self._counted, "_joined": self._joined, "_nested": self._nested}
        self.filters["_data"] = self._data
        self.globals = {name: one for name, one in self.globals.items() if name not in limits.UNBOUNDED_FILTERS}
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for literal in list(tree.find_all((nodes.List, nodes.Tuple, nodes.Pair))):
            _wrap_parts(literal)
        for loop in list(tree.find_all(nodes.For)):
            loop.iter = _filter(loop.iter, "_counted")
        for concat in list(tree.find_all(nodes.Concat)):
            concat.nodes = [_filter(nodes.List(concat.nodes), "_joined")]
        # The text of these is collected before anyone can count it.
        for block in list(tree.find_all((nodes.Macro, nodes.CallBlock, nodes.FilterBlock, nodes.AssignBlock))):
            for output in block.find_all(nodes.Output):
                output.nodes = [_data(n) if isinstance(n, nodes.TemplateData) else n for n in output.nodes]
        return tree

    def _metered(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)  # keeps the marks by which jinja passes its context
        def metered(*args: Any, **kwargs: Any) -> Any:
            meter = self.meter.get()  # not there while a template compiles, so that nothing is computed then
            meter.step()
            return meter.built(function(*args, **kwargs))

        return metered

    def _shown(self, value: Any) -> Any:
        meter = self.meter.get()
        return meter.built(value if isinstance(value, str | Undefined) else str(value))

    def _data(self, text: str) -> Any:
        return self.meter.get().built(text)

    def _nested(self, value: Any) -> Any:
        return self.meter.get().nested(value)

    def _counted(self, values: Iterable[Any]) -> Iterator[Any]:
        meter = self.meter.get()
        for value in values:
            meter.step()
            yield value

    def _joined(self, values: Iterable[Any]) -> Any:
        return self.meter.get().built(limits.joined("", values))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Refuse also what can make a huge value in one call."""
        if isinstance(obj, str | int | bytes) and attr in limits.UNBOUNDED_ATTRIBUTES:
            return False
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """The sandbox's ``str.format`` behind a check of its widths."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        form, run = value.__self__, wrapped

        def bounded(*args: Any, **kwargs: Any) -> str:
            given = [*args, *kwargs.values()]
            limits.check_braces(form, [v for one in given for v in (one.values() if isinstance(one, dict) else [one])])
            return run(*args, **kwargs)

        return bounded

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Any call from a template, counted."""
        meter = self.meter.get()
        meter.step(_CALL_STEPS)
        if isinstance(obj, type):
            meter.nested([*args, *kwargs.values()])
        text, method = getattr(obj, "__self__", None), getattr(obj, "__name__", "")
        if isinstance(text, str) and method == "replace" and len(args) >= 2:
            limits.check_replace(text, str(args[0]), str(args[1]))
        if isinstance(text, str) and method == "join" and len(args) == 1:
            pieces = list(args[0])
            limits.joined(text, (one for one in pieces if isinstance(one, str)))
            args = (pieces,)
        return meter.built(super().call(context, obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """The intercepted operators, checked before and counted after."""
        if operator == "*":
            limits.check_product(left, right)
        elif operator == "**":
            limits.check_power(left, right)
        elif operator == "%" and isinstance(left, str):
            limits.check_percent(left, right)
        return self.meter.get().built(super().call_binop(context, operator, left, right))


class _Generation(Extension):
    """``{% generation %}`` marks the assistant's tokens for training; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The body alone."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _wrap_parts(literal: nodes.Node) -> None:
    if isinstance(literal, nodes.Pair):
        literal.value = _filter(literal.value, "_nested")
    elif isinstance(literal, nodes.List) or (isinstance(literal, nodes.Tuple) and literal.ctx == "load"):
        literal.items = [one if isinstance(one, nodes.Const) else _filter(one, "_nested") for one in literal.items]


def _data(node: nodes.TemplateData) -> nodes.Filter:
    return _filter(nodes.Const(node.data), "_data")


def _format(value: str, *args: Any, **kwargs: Any) -> str:
    limits.check_percent(str(value), kwargs or args)
    return str(value) % (kwargs or args)


@pass_eval_context
def _replace(eval_ctx: nodes.EvalContext, s: Any, old: str, new: str, count: int | None = None) -> str:
    limits.check_replace(str(s), old, new)
    return filters.do_replace(eval_ctx, s, old, new, count)


@pass_eval_context
def _join(eval_ctx: nodes.EvalContext, value: Any, d: Any = "", attribute: Any = None) -> str:
    if attribute is not None:
        value = map(filters.make_attrgetter(eval_ctx.environment, attribute), value)
    return limits.joined(str(d), value)


def _indent(s: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    limits.check_indent(str(s), width)
    return filters.do_indent(s, width, first, blank)


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
    if indent is not None and indent > _MAX_JSON_INDENT:
        raise TemplateLimitError(f"indented by more than {_MAX_JSON_INDENT}")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
