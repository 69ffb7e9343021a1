"""Model definitions over the OpTable, found by the architecture name of a checkpoint's config."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from importlib import import_module
from types import MappingProxyType
from typing import Any

import torch

from qiao.contract import ModelShape
from qiao.errors import ModelError
from qiao.models.base import Model
from qiao.models.decoder import Decoder
from qiao.models.settings import Settings, settings_of
from qiao.models.spec import DecoderSpec, Translate, shape_of, with_forms
from qiao.optable import OpTable
from qiao.quantization import QuantizedWeight, Weight

__all__ = ["Model", "architectures", "create", "describe", "read_spec"]

_NONE: Mapping[str, QuantizedWeight] = MappingProxyType({})

_BARE = re.compile(r"(embed_tokens|layers|norm)\.")
"""Beginnings of tensor names in checkpoints that were saved from the model without its head."""

_FAMILIES = MappingProxyType(
    {
        "LlamaForCausalLM": "llama",
        "LLaMAForCausalLM": "llama",
        "MistralForCausalLM": "llama",
        "SmolLM3ForCausalLM": "llama",
        "InternLM3ForCausalLM": "llama",
        "Qwen2ForCausalLM": "qwen2",
        "Qwen3ForCausalLM": "qwen3",
        "Qwen2MoeForCausalLM": "qwen_moe",
        "Qwen3MoeForCausalLM": "qwen_moe",
        "MixtralForCausalLM": "mixtral",
        "ChatGLMModel": "chatglm",
        "ChatGLMForConditionalGeneration": "chatglm",
        "GlmForCausalLM": "glm",
        "Glm4ForCausalLM": "glm",
        "InternLM2ForCausalLM": "internlm2",
        "BaichuanForCausalLM": "baichuan",
        "BaiChuanForCausalLM": "baichuan",
        "Phi3ForCausalLM": "phi3",
        "Gemma2ForCausalLM": "gemma2",
        "Gemma3ForCausalLM": "gemma3",
        "Gemma3ForConditionalGeneration": "gemma3",
    }
)
"""Architecture to the module that defines it; the module is imported on first use."""

_MODEL_TYPES = MappingProxyType(
    {
        "llama": "LlamaForCausalLM",
        "mistral": "MistralForCausalLM",
        "smollm3": "SmolLM3ForCausalLM",
        "internlm3": "InternLM3ForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
        "qwen2_moe": "Qwen2MoeForCausalLM",
        "qwen3_moe": "Qwen3MoeForCausalLM",
        "mixtral": "MixtralForCausalLM",
        "chatglm": "ChatGLMModel",
        "glm": "GlmForCausalLM",
        "glm4": "Glm4ForCausalLM",
        "internlm2": "InternLM2ForCausalLM",
        "baichuan": "BaichuanForCausalLM",
        "phi3": "Phi3ForCausalLM",
        "gemma2": "Gemma2ForCausalLM",
        "gemma3_text": "Gemma3ForCausalLM",
        "gemma3": "Gemma3ForConditionalGeneration",
    }
)
"""For configs without ``architectures``."""


def architectures() -> tuple[str, ...]:
    """Architectures with a definition of their own; others run through the generic adapter."""
    return tuple(_FAMILIES)


def has_family(config: Mapping[str, Any]) -> bool:
    """Whether a raw ``config.json`` is of an architecture with a definition of its own, which needs no config class."""
    settings = settings_of(config)
    return bool(settings.get("architectures") or settings.get("model_type")) and _architecture(settings) in _FAMILIES


def describe(config: Any, quantized: Mapping[str, QuantizedWeight] = _NONE) -> ModelShape:
    """The shape of a model from its config, and its ``quantized`` weights by name: no other weights, no device.

    ``config`` is the raw dict of a ``config.json`` or a transformers ``PretrainedConfig``.
    Raises ``ModelError`` naming the field that is missing or wrong.
    """
    settings, architecture = _read(config)
    if architecture not in _FAMILIES:
        _refuse_generic(architecture, quantized)
        return _generic().describe_generic(config)  # type: ignore[no-any-return]
    spec = with_forms(_spec(settings, architecture), quantized)
    return shape_of(spec, _dtype_name(settings))


def read_spec(config: Any) -> DecoderSpec:
    """The layers of a model from its config.

    Raises ``ModelError`` naming a field that is missing or wrong, or an architecture without a definition of its own.
    """
    settings, architecture = _read(config)
    if architecture not in _FAMILIES:
        raise ModelError(f"{architecture} has no definition of its own here; {', '.join(_FAMILIES)} have")
    return _spec(settings, architecture)


def create(
    config: Any,
    ops: OpTable,
    dtype: torch.dtype,
    max_length: int | None = None,
    quantized: Mapping[str, QuantizedWeight] = _NONE,
) -> Model:
    """An empty model of ``config`` whose weights will lie where ``ops`` reads them; fill it with ``load``.

    ``max_length`` is the longest sequence that will be served, in tokens (the model's own context where None).
    ``quantized`` holds the weights that ``load`` will bring in quantized form, by their names in the checkpoint.
    Raises ``ModelError`` naming the field that is missing or wrong.
    """
    settings, architecture = _read(config)
    if architecture not in _FAMILIES:
        _refuse_generic(architecture, quantized)
        return _generic().create_generic(config, ops, dtype)  # type: ignore[no-any-return]
    spec = with_forms(_spec(settings, architecture), quantized)
    return Decoder(spec, ops, dtype, max_length)


def _spec(settings: Settings, architecture: str) -> DecoderSpec:
    """The family's spec; tensors of a checkpoint that was saved without its head are taken by their full names."""
    found = _family(architecture).spec(settings, architecture)
    assert isinstance(found, DecoderSpec)
    return replace(found, translate=partial(_with_prefix, found.translate))


def _with_prefix(translate: Translate, name: str, weight: Weight) -> Iterable[tuple[str, Weight]]:
    return translate(f"model.{name}" if _BARE.match(name) else name, weight)


def _refuse_generic(architecture: str, quantized: Mapping[str, QuantizedWeight]) -> None:
    if quantized:
        raise ModelError(
            f"{architecture} has no definition of its own here, and the generic one takes no quantized weights: "
            "use --quantization none, which dequantizes them at load"
        )


def _read(config: Any) -> tuple[Settings, str]:
    """The settings and the architecture. A model saved without its head, for vectors, gets the embedding for one.

    What it then says in text means nothing; a head of the right size is what the rest of the server expects.
    """
    settings = settings_of(config)
    architecture = _architecture(settings)
    given = settings.get("architectures") or [architecture]
    return (settings if architecture in given else settings.changed(tie_word_embeddings=True)), architecture


def _architecture(settings: Settings) -> str:
    given = settings.get("architectures") or []
    if isinstance(given, str) or not isinstance(given, list | tuple):
        raise settings.error("architectures", f"must be a list of names, got {given!r}")
    for name in given:
        for known in (str(name), f"{str(name).removesuffix('Model')}ForCausalLM"):
            if known in _FAMILIES:
                return known
    if given:
        return str(given[0])
    model_type = settings.text("model_type", "")
    if not model_type:
        raise settings.error("architectures", "is missing, and so is model_type; one of them must name the model")
    return _MODEL_TYPES.get(model_type, model_type)


def _family(architecture: str) -> Any:
    return import_module(f"qiao.models.{_FAMILIES[architecture]}")


def _generic() -> Any:
    return import_module("qiao.models.generic")


def _dtype_name(settings: Settings) -> str:
    value = settings.get("dtype", settings.get("torch_dtype"))
    if value is None:
        inner = settings.get("text_config", {})
        value = inner.get("dtype") or inner.get("torch_dtype") or "float32"
    return str(value).removeprefix("torch.")
