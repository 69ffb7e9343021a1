"""The names of ``--tool-call-parser``."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from qiao.answers.base import ToolParser
from qiao.answers.marked import (
    DeepSeekParser,
    Glm4Parser,
    HermesParser,
    InternLMParser,
    MistralParser,
    Qwen3Parser,
)
from qiao.answers.whole import JsonParser, Llama3Parser

TOOL_PARSERS: Mapping[str, type[ToolParser]] = MappingProxyType(
    {
        "hermes": HermesParser,
        "qwen3": Qwen3Parser,
        "qwen3_coder": Qwen3Parser,
        "qwen3_xml": Qwen3Parser,
        "llama3_json": Llama3Parser,
        "deepseek_v3": DeepSeekParser,
        "deepseek_v31": DeepSeekParser,
        "glm4": Glm4Parser,
        "glm45": Glm4Parser,
        "mistral": MistralParser,
        "internlm": InternLMParser,
        "json": JsonParser,
    }
)
"""Name to parser; several names are vLLM's for what is one parser here."""
