"""The flags of ``qiao serve``, made from the fields of ``EngineArgs`` and ``ServerArgs``: one definition, vLLM's names.

``-`` and ``_`` are the same, booleans have ``--no-X``, sizes may be ``32k`` or ``64MiB``, objects are JSON or
``--flag.key value``, and ``--config FILE.yaml`` holds any of them (the command line wins).
"""

from __future__ import annotations

import difflib
import json
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from pathlib import Path
from typing import Any

from qiao.config import EngineArgs
from qiao.errors import ParameterError
from qiao.server.args import ServerArgs, admin_key_from_environment, keys_from_environment
from qiao.server.setup import Setup
from qiao.server.values import dotted, merge, parse_bool, parse_float, parse_int, parse_list, parse_object, read_yaml
from qiao.vllm_arguments import ALIASES, FIXED, IGNORED, SHORT


@dataclass(frozen=True)
class Flag:
    """One flag: its field, where the field lives, and how its value is read."""

    name: str
    owner: type
    kind: str
    optional: bool
    default: Any

    @property
    def option(self) -> str:
        """As the user writes it."""
        return "--" + self.name.replace("_", "-")


def flags() -> dict[str, Flag]:
    """All flags by field name."""
    table = {}
    for owner in (EngineArgs, ServerArgs):
        hints = typing.get_type_hints(owner)
        for field in fields(owner):
            table[field.name] = _flag(field, owner, hints[field.name])
    return table


def _flag(field: Field[Any], owner: type, hint: Any) -> Flag:
    members = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    optional = type(None) in members
    plain = next(member for member in members if member is not type(None))
    kind = (typing.get_origin(plain) or plain).__name__
    default = field.default_factory() if field.default_factory is not MISSING else field.default
    return Flag(field.name, owner, kind, optional, None if default is MISSING else default)


@dataclass
class ParsedFlags:
    """The result. ``notes`` are warnings about flags that were accepted without effect."""

    setup: Setup
    notes: list[str]

    @property
    def engine(self) -> EngineArgs:
        """The first model's engine."""
        return self.setup.models[0].engine

    @property
    def server(self) -> ServerArgs:
        """The HTTP side."""
        return self.setup.server


def parse(argv: Sequence[str]) -> ParsedFlags:
    """Read a command line. Raises ``ParameterError`` naming the flag, with a did-you-mean for unknown ones."""
    reader = _Reader(flags())
    reader.read(argv)
    reader.read_config()
    values = reader.values
    if "api_key" not in values:
        values["api_key"] = keys_from_environment()
    if "admin_key" not in values:
        values["admin_key"] = admin_key_from_environment()
    server = reader.make(ServerArgs)
    if reader.several:
        return ParsedFlags(_several(reader, server), reader.notes)
    if "model" not in values:
        raise ParameterError("model", "is missing; for example: qiao serve Qwen/Qwen2.5-0.5B-Instruct")
    return ParsedFlags(Setup.single(reader.make(EngineArgs), server), reader.notes)


def _several(reader: _Reader, server: ServerArgs) -> Setup:
    from qiao.server.config_file import read_setup  # most servers have one model and no such file

    if "model" in reader.values:
        raise ParameterError("model", "the file of --config lists models; leave the one of the command line out")
    if "served_model_name" in reader.values:
        raise ParameterError("--served-model-name", "each of models has a name of its own; leave it out")
    defaults = {name: value for name, value in reader.values.items() if reader.owner(name) is EngineArgs}
    return read_setup(reader.several, file_values, defaults, server)


def file_values(content: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that flags in a file set. Raises as ``parse``."""
    reader = _Reader(flags())
    reader.take_file(content)
    return reader.values


def values_of(owner: type, argv: Sequence[str]) -> dict[str, Any]:
    """The fields of ``EngineArgs`` or ``ServerArgs`` that ``argv``, flags of it alone, sets. Raises as ``parse``."""
    reader = _Reader({name: flag for name, flag in flags().items() if flag.owner is owner})
    reader.read(argv)
    return reader.values


class _Reader:
    def __init__(self, table: dict[str, Flag]) -> None:
        self._table = table
        self._config: str | None = None
        self.several: dict[str, Any] = {}
        self.values: dict[str, Any] = {}
        self.notes: list[str] = []

    def make(self, owner: type) -> Any:
        return owner(**{name: value for name, value in self.values.items() if self._table[name].owner is owner})

    def read(self, argv: Sequence[str]) -> None:
        position, words = 0, list(argv)
        while position < len(words):
            word = words[position]
            position += 1
            if not word.startswith("-") or word == "-":
                if "model" in self.values:
                    raise ParameterError(word, "is one word too many; flags start with --")
                self.values["model"] = word
                continue
            given, equals, inline = word.partition("=")
            rest = words[position : position + _values_ahead(words, position)]
            used = self._take(given, [inline] if equals else None, rest)
            position += used

    def read_config(self) -> None:
        """Fill from ``--config`` what the command line left open."""
        if self._config is None:
            return
        import yaml  # most starts have no such file

        given, self.values = self.values, {}
        try:
            content = read_yaml(Path(self._config).read_text(encoding="utf-8")) or {}
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise ParameterError("--config", f"cannot read {self._config}: {error}") from None
        if not isinstance(content, dict):
            raise ParameterError("--config", f"{self._config} must hold flag: value pairs")
        self.several = {key: content.pop(key) for key in ("models", "aliases") if key in content}
        self.take_file(content)
        objects = {n: merge(self.values[n], v) for n, v in given.items() if isinstance(v, dict) and n in self.values}
        self.values.update({**given, **objects})

    def owner(self, name: str) -> type:
        """Which arguments the field ``name`` belongs to."""
        return self._table[name].owner

    def take_file(self, content: Mapping[str, Any]) -> None:
        """Take the flags of a file."""
        for key, value in content.items():
            self._take_from_file(str(key), value)

    def _take_from_file(self, key: str, value: Any) -> None:
        option = "--" + key.lstrip("-")
        name = _field_name(option)
        if isinstance(value, dict) and name in self._table and self._table[name].kind == "dict":
            self.values[name] = merge(self.values.get(name, {}), value)
        elif isinstance(value, bool):
            self._take(option, ["true" if value else "false"], [])
        elif isinstance(value, list):
            self._take(option, [json.dumps(one) if isinstance(one, dict) else str(one) for one in value], [])
        elif value is not None:
            self._take(option, [json.dumps(value) if isinstance(value, dict) else str(value)], [])

    def _take(self, option: str, inline: list[str] | None, ahead: list[str]) -> int:
        """Take one flag; the number of following words that it used."""
        option = SHORT.get(option, option)
        name, _, path = _field_name(option).partition(".")
        if name == "config":
            self._config, used = _one(option, inline, ahead)
            return used
        plain = name.removeprefix("no_") if name not in IGNORED else name
        if plain in FIXED or plain in IGNORED:
            return self._take_without_effect(plain, plain != name, option, inline, ahead)
        negative = name.startswith("no_") and self._table.get(name[3:], None)
        flag = self._table.get(name) or negative
        if not flag:
            raise self._unknown(option)
        if flag.kind == "bool":
            return self._take_bool(flag, bool(negative) and name not in self._table, option, inline, ahead)
        if flag.kind == "tuple":
            return self._take_tuple(flag, option, inline, ahead)
        text, used = _one(option, inline, ahead)
        self._set(flag, option, text, path)
        return used

    def _set(self, flag: Flag, option: str, text: str, path: str) -> None:
        if flag.kind == "dict":
            value = dotted(path, text) if path else parse_object(option, text)
            self.values[flag.name] = merge(self.values.get(flag.name, {}), value)
        elif path:
            raise self._unknown(option)
        elif flag.optional and text.lower() in ("none", "null"):
            self.values[flag.name] = None
        elif flag.kind == "int":
            self.values[flag.name] = parse_int(option, text)
        elif flag.kind == "float":
            self.values[flag.name] = parse_float(option, text)
        else:
            self.values[flag.name] = text

    def _take_bool(self, flag: Flag, negative: bool, option: str, inline: list[str] | None, ahead: list[str]) -> int:
        used = 0
        value = True
        if inline is not None:
            value = parse_bool(option, inline[0])
        elif ahead and ahead[0].lower() in ("true", "false"):
            value, used = parse_bool(option, ahead[0]), 1
        self.values[flag.name] = value != negative
        return used

    def _take_tuple(self, flag: Flag, option: str, inline: list[str] | None, ahead: list[str]) -> int:
        words = ahead if inline is None else inline
        if not words:
            raise ParameterError(option, "needs a value")
        # Each of these stands alone, as in `--api-key A --api-key B MODEL`; others take all words up to the next flag.
        taken = words[:1] if flag.name in ("api_key", "engine") and inline is None else words
        items = parse_list(option, taken)
        if flag.name == "drop":
            items = tuple(part for item in items for part in item.split(",") if part)
        self.values[flag.name] = self.values.get(flag.name, ()) + items
        return len(taken) if inline is None else 0

    def _take_without_effect(
        self, name: str, negative: bool, option: str, inline: list[str] | None, ahead: list[str]
    ) -> int:
        only = FIXED.get(name)
        switch = only.switch if only else not IGNORED[name]
        if negative and not switch:
            raise self._unknown(option)
        text, used = (inline[0] if inline else str(not negative).lower(), 0) if switch else _one(option, inline, ahead)
        if only is None:
            self.notes.append(f"{option} is accepted for vLLM's sake and has no effect here")
        elif text.lower() not in only.texts:
            raise ParameterError(option, f"only {' or '.join(only.texts)} is possible: {only.why}; got {text!r}")
        return used

    def _unknown(self, option: str) -> ParameterError:
        known = [flag.option for flag in self._table.values()] + ["--config"]
        known += ["--" + name.replace("_", "-") for name in (*ALIASES, *FIXED, *IGNORED)]
        wanted = option.replace("_", "-")
        close = difflib.get_close_matches(wanted, known, n=2, cutoff=0.6)
        hint = f"did you mean {' or '.join(close)}?" if close else "qiao serve --help lists all"
        return ParameterError(option, f"is not a flag of this server; {hint}")


def _field_name(option: str) -> str:
    head, dot, path = option.lstrip("-").partition(".")
    name = head.replace("-", "_")
    return ALIASES.get(name, name) + dot + path


def _values_ahead(words: list[str], position: int) -> int:
    count = 0
    while position + count < len(words) and not _is_option(words[position + count]):
        count += 1
    return count


def _is_option(word: str) -> bool:
    return word.startswith("-") and word != "-" and not word[1:2].isdigit()


def _one(option: str, inline: list[str] | None, ahead: list[str]) -> tuple[str, int]:
    if inline is not None:
        if len(inline) != 1:
            raise ParameterError(option, f"takes one value, got {len(inline)}")
        return inline[0], 0
    if not ahead:
        raise ParameterError(option, "needs a value")
    return ahead[0], 1
