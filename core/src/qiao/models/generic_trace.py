"""Describing a transformers model without weights: it is built and run once on the meta device, and watched.

Watching beats reading configs: heads, windows, caps and scales are what the model's code really passes on, and a layer
that the contract cannot express is seen and refused by name before a single weight is read.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from qiao.contract import AttentionShape, LinearShape, ModelShape
from qiao.errors import ModelError
from qiao.models import generic_attention as routes
from qiao.models.generic_layers import Passthrough, features, is_linear

_TOKENS = 5
_CONTEXT_NAMES = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length", "max_sequence_length")
_STATEFUL_LAYERS = ("linear", "mamba", "ssm", "recurrent", "conv", "rwkv", "chunked", "delta", "cross")


@dataclass(frozen=True)
class Trace:
    """A model on the meta device, the attention calls of one forward pass, and how often each linear layer ran.

    ``linears`` are those that ran on each token, ``head_linears`` those on each wanted row.
    """

    model: nn.Module
    calls: tuple[routes.AttentionCall, ...]
    linears: dict[str, int]
    head_linears: dict[str, int]


def refuse(architecture: str, reason: str) -> ModelError:
    """The error that says why the generic adapter will not take a model."""
    return ModelError(f"{architecture} cannot be served through the generic adapter: {reason}.")


def as_config(config: PretrainedConfig | dict[str, Any]) -> PretrainedConfig:
    """A private copy of ``config``, made from the dict of a config.json where that is given.

    Raises ``ModelError`` where transformers does not know the ``model_type``.
    """
    if isinstance(config, PretrainedConfig):
        return copy.deepcopy(config)
    values = dict(config)
    model_type = values.pop("model_type", None)
    if not model_type:
        raise ModelError("config.json has no model_type, so no model can be chosen")
    try:
        made = AutoConfig.for_model(model_type, **values)
    except ValueError as error:
        raise ModelError(
            f"model_type {model_type!r} is unknown to the installed transformers; a newer one may know it ({error})"
        ) from error
    assert isinstance(made, PretrainedConfig)
    return made


def architecture_of(config: PretrainedConfig) -> str:
    """The class name that the checkpoint states, or its model_type."""
    names = getattr(config, "architectures", None) or []
    return str(names[0] if names else config.model_type)


def check_config(config: PretrainedConfig) -> None:
    """Refuse what the config alone shows to be out of reach. Raises ``ModelError``."""
    name, text = architecture_of(config), config.get_text_config(decoder=True)
    if getattr(config, "is_encoder_decoder", False):
        raise refuse(name, "it is an encoder-decoder; only decoders are served")
    if getattr(config, "quantization_config", None):
        raise refuse(name, "its weights are quantized, and only models with a definition of their own take those")
    for kind in getattr(text, "layer_types", None) or ():
        if any(word in str(kind) for word in _STATEFUL_LAYERS):
            raise refuse(name, f"it has layers of kind {kind!r}, whose state is not a paged cache")
    for kind in _rope_types(getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}):
        if kind in ("dynamic", "longrope"):
            raise refuse(
                name,
                f"rope kind {kind!r} is computed from the longest sequence of a batch, "
                "so an answer would depend on its neighbours",
            )


def _rope_types(parameters: dict[str, Any]) -> set[str]:
    nested = [p for p in parameters.values() if isinstance(p, dict)]
    return {str(p.get("rope_type", p.get("type", ""))) for p in (parameters, *nested)}


def build(config: PretrainedConfig, dtype: torch.dtype) -> nn.Module:
    """The causal model of ``config`` on the meta device. Raises ``ModelError`` where transformers cannot make one."""
    routes.register()
    name = architecture_of(config)
    # A config class of the checkpoint's own code is only here because the user allowed that code when it was loaded.
    remote = type(config).__module__.startswith("transformers_modules")
    if not remote and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(f"{name} is not a causal language model that the installed transformers knows")
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=routes.TRACE, trust_remote_code=remote
            )
    except KeyError as error:
        # Old models choose among their own attention classes by name.
        raise refuse(name, "its attention is not one of transformers' replaceable ones") from error
    except (ValueError, ImportError, AttributeError, TypeError) as error:
        raise refuse(name, f"transformers cannot build it from this config ({error})") from error
    assert isinstance(model, nn.Module)
    # The one form of fused experts whose shapes do not depend on where the router sends tokens.
    set_experts(model, "batched_mm")
    return model.eval().requires_grad_(False)


def set_experts(model: nn.Module, implementation: str) -> None:
    """How a mixture of experts multiplies, by transformers' name; of no effect on other models."""
    model.config._experts_implementation = implementation  # type: ignore[union-attr]


def decoder_of(model: nn.Module) -> nn.Module:
    """The causal model without its head. Raises ``ModelError`` where it takes no ``position_ids``."""
    config = model.config
    assert isinstance(config, PretrainedConfig)
    base = getattr(model, str(model.base_model_prefix), None)
    if not isinstance(base, nn.Module) or base is model:
        raise refuse(architecture_of(config), "its decoder cannot be told from its head")
    if "position_ids" not in inspect.signature(base.forward).parameters:
        raise refuse(architecture_of(config), "it takes no position_ids, so sequences cannot share a batch")
    return base


def head_of(model: nn.Module) -> nn.Module:
    """A view of the causal model whose decoder passes hidden states through: its head alone, weights shared."""
    head = copy.copy(model)
    object.__setattr__(head, "_modules", {**model._modules, str(model.base_model_prefix): Passthrough()})
    return head


@contextmanager
def _counting(model: nn.Module, tokens: int) -> Iterator[dict[str, int]]:
    """Counts, by name, how often each linear layer is called with exactly ``tokens`` rows; others get -1."""
    counts: dict[str, int] = {}
    handles = []

    def watch(name: str, module: nn.Module) -> None:
        def hook(_: nn.Module, args: tuple[Any, ...], __: Any) -> None:
            rows = args[0].numel() // features(module)[0] if args and isinstance(args[0], torch.Tensor) else -1
            fits = rows == tokens and counts.get(name, 0) >= 0
            counts[name] = counts.get(name, 0) + 1 if fits else -1

        handles.append(module.register_forward_hook(hook))

    for name, module in model.named_modules():
        if is_linear(module):
            watch(name, module)
    try:
        yield counts
    finally:
        for handle in handles:
            handle.remove()


def trace(config: PretrainedConfig, dtype: torch.dtype) -> Trace:
    """Build ``config``'s model on the meta device and run decoder and head once.

    Raises ``ModelError`` naming the architecture and what the contract cannot express.
    """
    check_config(config)
    name = architecture_of(config)
    model = build(config, dtype)
    recorder = routes.Recorder(name)
    routes.set_route(model, recorder)
    decoder, head = decoder_of(model), head_of(model)
    ids = torch.zeros((1, _TOKENS), dtype=torch.int64, device="meta")
    with torch.no_grad(), torch.device("meta"):
        try:
            with _counting(model, _TOKENS) as linears:
                hidden = decoder(
                    input_ids=ids,
                    position_ids=ids,
                    # Given, so that transformers does not search position_ids for packed sequences (a device read).
                    attention_mask=torch.ones((1, _TOKENS), dtype=torch.int64),
                    use_cache=False,
                ).last_hidden_state
            with _counting(model, 1) as head_linears:
                head(inputs_embeds=hidden[:, :1], use_cache=False)
        except ModelError:
            raise
        except (RuntimeError, NotImplementedError, ValueError, TypeError, AttributeError, KeyError) as error:
            raise refuse(name, f"it does not run without data ({str(error).strip().splitlines()[0]})") from error
    if not recorder.calls:
        raise refuse(name, "its attention is not one of transformers' replaceable ones")
    routes.set_route(model, recorder)
    kept = {n: c for n, c in linears.items() if c > 0}
    return Trace(model, tuple(recorder.calls), kept, {n: c for n, c in head_linears.items() if c > 0})


def shape_of(traced: Trace, dtype: torch.dtype) -> ModelShape:
    """The plan's view of a traced model."""
    config = traced.model.config
    assert isinstance(config, PretrainedConfig)
    text = config.get_text_config(decoder=True)
    return ModelShape(
        architecture=architecture_of(config),
        hidden_size=int(text.hidden_size),
        vocab_size=int(text.vocab_size),
        dtype=str(dtype).removeprefix("torch."),
        max_position=_context(config, text),
        attention=_attention_shapes(traced.calls),
        linears=(
            *_linear_shapes(traced.model, traced.linears, "T"),
            *_linear_shapes(traced.model, traced.head_linears, "N"),
        ),
        experts_per_token=int(getattr(text, "num_experts_per_tok", 0) or 0),
    )


def _context(config: PretrainedConfig, text: PretrainedConfig) -> int:
    for name in _CONTEXT_NAMES:
        value = getattr(text, name, None)
        if isinstance(value, int) and value > 0:
            return value
    raise refuse(
        architecture_of(config),
        "its config states no context length; give one as hf_overrides={'max_position_embeddings': N}",
    )


def _attention_shapes(calls: tuple[routes.AttentionCall, ...]) -> tuple[AttentionShape, ...]:
    """Neighbouring calls of one kind together, in layer order: that order is the caches'."""

    def kind(call: routes.AttentionCall) -> tuple[int, int, int, int, float]:
        return call.num_heads, call.num_kv_heads, call.head_dim, call.sliding_window, call.soft_cap

    return tuple(AttentionShape(len(list(group)), *key) for key, group in groupby(calls, kind))


def _linear_shapes(model: nn.Module, counts: dict[str, int], rows: str) -> Iterator[LinearShape]:
    found: dict[tuple[str, int, int, bool], int] = {}
    for name, count in counts.items():
        module = model.get_submodule(name)
        inputs, outputs = features(module)
        key = (name.rpartition(".")[2], inputs, outputs, getattr(module, "bias", None) is not None)
        found[key] = found.get(key, 0) + count
    for (name, inputs, outputs, bias), count in found.items():
        yield LinearShape(name, inputs, outputs, count, rows=rows, bias=bias)
