"""What a server is to serve, as the command line, ``qiao.yaml`` and the administrator say it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from qiao.config import EngineArgs
from qiao.lora.request import parse_modules
from qiao.server.aliases import Alias
from qiao.server.args import ServerArgs

MODEL_FIELDS = (
    *("enable_auto_tool_choice", "tool_call_parser", "reasoning_parser", "chat_template_content_format"),
    *("default_chat_template_kwargs", "response_role", "engine", "engine_keys"),
)
"""Server flags that each model may set for itself."""


@dataclass(frozen=True)
class ModelSpec:
    """One model: its engine, and how its answers are read. ``where`` leads the field's name in errors."""

    engine: EngineArgs
    server: ServerArgs
    where: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """What clients may call it; the first is its own."""
        return self.engine.served_model_name or (self.engine.model,)

    @property
    def all_names(self) -> tuple[str, ...]:
        """The names, and those of its LoRA adapters from the start."""
        return (*self.names, *(one.lora_name for one in parse_modules(self.engine.lora_modules)))

    @property
    def name(self) -> str:
        """The first of its names."""
        return self.names[0]

    def renamed(self, names: tuple[str, ...]) -> ModelSpec:
        """The same under other names."""
        return replace(self, engine=replace(self.engine, served_model_name=names))


@dataclass(frozen=True)
class Setup:
    """Everything that one server serves. The first model answers requests that name none.

    ``defaults`` are fields of ``EngineArgs`` for models that are loaded later.
    """

    models: tuple[ModelSpec, ...]
    server: ServerArgs
    aliases: tuple[Alias, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def single(cls, engine: EngineArgs, server: ServerArgs) -> Setup:
        """One model and no alias."""
        return cls((ModelSpec(engine, server),), server)
