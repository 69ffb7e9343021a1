"""Several models in one ``qiao.yaml``: beside server flags and flags for every model, ``models`` and ``aliases``.

.. code-block:: yaml

    port: 8000
    dtype: bfloat16                # for every model that has none of its own
    models:
      - {name: small, model: Qwen/Qwen2.5-0.5B-Instruct, memory: 0.2}
      - {name: big, model: Qwen/Qwen2.5-7B-Instruct, memory: 0.6, tool-call-parser: hermes}
    aliases:
      chat: small
      trial: {weights: {small: 9, big: 1}, sticky: [user]}
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StrictStr, ValidationError, field_validator

from qiao.config import EngineArgs
from qiao.errors import ParameterError
from qiao.server.aliases import IDENTITIES, Alias
from qiao.server.args import ServerArgs
from qiao.server.setup import MODEL_FIELDS, ModelSpec, Setup

T = TypeVar("T")

ReadFlags = Callable[[Mapping[str, Any]], dict[str, Any]]
"""Flags as a file has them, to the values of their fields. Raises ``ParameterError`` naming the flag."""


class ModelEntry(BaseModel):
    """One of ``models``. ``memory`` is the share of its device's memory; what is not named here is a flag."""

    model_config = ConfigDict(extra="allow")

    name: StrictStr | list[StrictStr]
    model: StrictStr
    memory: float | None = Field(default=None, gt=0.0, le=1.0)

    @field_validator("name")
    @classmethod
    def _named(cls, name: str | list[str]) -> str | list[str]:
        if not name or not all([name] if isinstance(name, str) else name):
            raise ValueError("must not be empty")
        return name

    @property
    def names(self) -> tuple[str, ...]:
        """All names; the first is its own."""
        return (self.name,) if isinstance(self.name, str) else tuple(self.name)


class AliasEntry(BaseModel):
    """One of ``aliases`` that stands for several models."""

    model_config = ConfigDict(extra="forbid")

    weights: dict[str, Annotated[float, Field(strict=True, json_schema_extra={"minimum": 0})]] = Field(
        json_schema_extra={"minProperties": 1}
    )
    sticky: list[Annotated[str, Field(json_schema_extra={"enum": list(IDENTITIES)})]] = list(IDENTITIES)

    def alias(self, name: str) -> Alias:
        """The checked alias."""
        return Alias(name, self.weights, tuple(self.sticky))


class FileEntry(BaseModel):
    """The two keys of the file that are no flags."""

    models: list[dict[str, Any]] = Field(min_length=1)
    aliases: dict[str, StrictStr | AliasEntry] = {}


def validated(where: str, kind: Callable[..., T], content: Mapping[str, Any]) -> T:
    """``kind`` of ``content``. Raises ``ParameterError`` naming the field below ``where``."""
    try:
        return kind(**content)
    except ValidationError as error:
        first = max(error.errors(), key=lambda one: len(one["loc"]))  # of a union's members, who came furthest
        parts = [part for part in first["loc"] if part not in ("str", "AliasEntry", "list[str]")]
        field = where + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)
        raise ParameterError(field.lstrip(".") or "models", str(first["msg"])) from None


def read_model(
    content: Mapping[str, Any], where: str, read: ReadFlags, defaults: Mapping[str, Any], server: ServerArgs
) -> ModelSpec:
    """One entry of ``models``, which is at ``where``; ``defaults`` are fields for every model.

    Raises ``ParameterError`` naming the field below ``where``.
    """
    entry = validated(where, ModelEntry, {str(key): value for key, value in content.items()})
    try:
        own = read(entry.model_extra or {})
        if entry.memory is not None:
            own["gpu_memory_utilization"] = entry.memory
        mine = {name: own.pop(name) for name in MODEL_FIELDS if name in own}
        for name in own:
            if name not in EngineArgs.names() or name == "served_model_name":
                raise ParameterError(name, "is a flag of the whole server; it cannot differ between models")
        values = {**defaults, **own, "model": entry.model, "served_model_name": entry.names}
        args = {name: getattr(server, name) for name in ServerArgs.__dataclass_fields__}
        return ModelSpec(EngineArgs(**values), ServerArgs(**{**args, **mine}), where)
    except ParameterError as error:
        raise ParameterError(f"{where}.{error.field.removeprefix('--')}", error.detail) from None


def read_setup(content: Mapping[str, Any], read: ReadFlags, defaults: Mapping[str, Any], server: ServerArgs) -> Setup:
    """``models`` and ``aliases`` of the file. Raises ``ParameterError`` naming the field."""
    entry = validated("", FileEntry, content)
    models = tuple(read_model(one, f"models[{i}]", read, defaults, server) for i, one in enumerate(entry.models))
    aliases = tuple(
        Alias(name, {one: 1.0}) if isinstance(one, str) else one.alias(name) for name, one in entry.aliases.items()
    )
    check_names(models, aliases)
    check_memory(models)
    return Setup(models, server, aliases, defaults)


def check_names(models: Sequence[ModelSpec], aliases: Sequence[Alias]) -> None:
    """No name twice, and aliases of models that there are. Raises ``ParameterError``."""
    taken: dict[str, str] = {}
    for model in models:
        for name in model.all_names:
            if name in taken:
                field = "name" if name in model.names else "lora-modules"
                raise ParameterError(f"{model.where}.{field}", f"{name!r} is a name of {taken[name]} already")
            taken[name] = model.where
    for alias in aliases:
        if alias.name in taken:
            raise ParameterError(f"aliases.{alias.name}", f"is the name of {taken[alias.name]}; choose another")
        for name in alias.weights:
            if name not in taken:
                raise ParameterError(f"aliases.{alias.name}", f"{name!r} is no model of this file: {', '.join(taken)}")


def check_memory(models: Sequence[ModelSpec]) -> None:
    """Models on one device must say how they share it, and not more than there is. Raises ``ParameterError``."""
    devices: dict[str, list[ModelSpec]] = {}
    for model in models:
        if model.server.engine:
            continue  # its memory is on another host
        devices.setdefault(model.engine.device, []).append(model)
    for device, several in devices.items():
        if len(several) == 1:
            continue
        total = 0.0
        for model in several:
            args = model.engine
            total += args.gpu_memory_utilization or 0.0
            if not (args.gpu_memory_utilization or args.kv_cache_memory_bytes or args.num_gpu_blocks_override):
                raise ParameterError(
                    f"{model.where}.memory",
                    f"is missing: {len(several)} models share the device {device!r}, so each needs its share, "
                    "from 0 to 1 (or kv-cache-memory-bytes)",
                )
            if total > 1.0 + 1e-9:
                raise ParameterError(f"{model.where}.memory", f"the shares of {device!r} come to {total:g}, above 1")
