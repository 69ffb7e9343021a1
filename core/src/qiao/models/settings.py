"""A model's ``config.json`` with checked, typed access: errors name the field and the file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qiao.errors import ModelError


class Settings:
    """Wraps the raw dict of a config. A field that is absent or null takes the default, and is an error without one."""

    def __init__(self, raw: Mapping[str, Any], file: str = "config.json") -> None:
        self.raw, self.file = raw, file

    def absent(self, **defaults: Any) -> Settings:
        """The same settings where a field that the file does not name at all has the family's default.

        A null is kept: transformers tells the two apart.
        """
        return Settings({**defaults, **self.raw}, self.file)

    def changed(self, **values: Any) -> Settings:
        """The same settings with ``values`` in place of the file's."""
        return Settings({**self.raw, **values}, self.file)

    def error(self, field: str, message: str) -> ModelError:
        """A ``ModelError`` about ``field``, to be raised."""
        return ModelError(f"{self.file}: {field} {message}")

    def get(self, field: str, default: Any = None) -> Any:
        """The value as it stands, ``default`` where absent or null."""
        value = self.raw.get(field)
        return default if value is None else value

    def integer(self, field: str, default: int | None = None, *, minimum: int = 1) -> int:
        """A whole number of at least ``minimum``."""
        value = self._required(field, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.error(field, f"must be a whole number of at least {minimum}, got {value!r}")
        return value

    def number(self, field: str, default: float | None = None) -> float:
        """Any real number."""
        value = self._required(field, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(field, f"must be a number, got {value!r}")
        return float(value)

    def flag(self, field: str, default: bool) -> bool:
        """True or false."""
        value = self.get(field, default)
        if not isinstance(value, bool):
            raise self.error(field, f"must be true or false, got {value!r}")
        return value

    def text(self, field: str, default: str | None = None) -> str:
        """A string."""
        value = self._required(field, default)
        if not isinstance(value, str):
            raise self.error(field, f"must be a string, got {value!r}")
        return value

    def _required(self, field: str, default: Any) -> Any:
        value = self.get(field, default)
        if value is None:
            raise self.error(field, "is missing; without it the model's shape is unknown")
        return value


def settings_of(config: Any) -> Settings:
    """``config`` is a raw dict, ``Settings`` or a transformers ``PretrainedConfig``."""
    if isinstance(config, Settings):
        return config
    if isinstance(config, Mapping):
        return Settings(config)
    if not hasattr(config, "to_dict"):
        raise ModelError(f"a model config must be a dict or a PretrainedConfig, got {type(config).__name__}")
    folder = getattr(config, "name_or_path", "")
    return Settings(config.to_dict(), f"{folder}/config.json" if folder else "config.json")
