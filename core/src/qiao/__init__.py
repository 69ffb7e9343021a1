"""Qiao: serve large language models on whatever accelerator a machine has.

The public names are loaded when they are first used, so that ``import qiao`` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qiao.config import EngineArgs
    from qiao.errors import (
        EngineDeadError,
        KernelError,
        ModelError,
        NotFoundError,
        OverloadedError,
        ParameterError,
        PlanRefusedError,
        PluginError,
        PromptTooLongError,
        QiaoError,
        UsageError,
    )
    from qiao.llm import LLM, TextPrompt, TokensPrompt
    from qiao.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
    from qiao.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

    __version__: str

_HOMES = {
    "qiao.config": ("EngineArgs",),
    "qiao.errors": (
        "EngineDeadError",
        "KernelError",
        "ModelError",
        "NotFoundError",
        "OverloadedError",
        "ParameterError",
        "PlanRefusedError",
        "PluginError",
        "PromptTooLongError",
        "QiaoError",
        "UsageError",
    ),
    "qiao.llm": ("LLM", "TextPrompt", "TokensPrompt"),
    "qiao.outputs": ("CompletionOutput", "Logprob", "RequestMetrics", "RequestOutput"),
    "qiao.sampling_params": ("RequestOutputKind", "SamplingParams", "StructuredOutputsParams"),
}

__all__ = [
    "LLM",
    "CompletionOutput",
    "EngineArgs",
    "EngineDeadError",
    "KernelError",
    "Logprob",
    "ModelError",
    "NotFoundError",
    "OverloadedError",
    "ParameterError",
    "PlanRefusedError",
    "PluginError",
    "PromptTooLongError",
    "QiaoError",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "UsageError",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("qiao")
    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module 'qiao' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
