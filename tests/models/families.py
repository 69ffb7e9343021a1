"""Small configs of every family that transformers knows, each with the features that set it apart."""

from __future__ import annotations

from typing import Any

import transformers

BASE = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
MOE = {"moe_intermediate_size": 32, "num_experts": 6, "num_experts_per_tok": 2}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"rope_theta": 500000.0}),
    "llama-biases": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("LlamaConfig", {"head_dim": 24}),
    "llama-mqa-tied": ("LlamaConfig", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "llama-mha": ("LlamaConfig", {"num_key_value_heads": None}),
    "llama-ignores-window": ("LlamaConfig", {"sliding_window": 16, "layer_types": MIXED}),
    "mistral": ("MistralConfig", {"sliding_window": 8}),
    "mistral-full": ("MistralConfig", {"sliding_window": None, "head_dim": 32}),
    "smollm3": ("SmolLM3Config", {"no_rope_layer_interval": 2}),
    "smollm3-sliding": (
        "SmolLM3Config",
        {"no_rope_layers": [1, 0, 1], "use_sliding_window": True, "sliding_window": 8},
    ),
    "internlm3": ("InternLM3Config", {"qkv_bias": True, "bias": True, "head_dim": 16}),
    "qwen2": ("Qwen2Config", {}),
    "qwen2-last-layer-slides": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
    ),
    "qwen2-window-off": (
        "Qwen2Config",
        {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 0},
    ),
    "qwen2-no-layer-left": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3},
    ),
    "qwen2-types-full": (
        "Qwen2Config",
        {
            "use_sliding_window": True,
            "sliding_window": 8,
            "max_window_layers": 0,
            "layer_types": ["full_attention"] * 3,
        },
    ),
    "qwen2-types-mixed": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 8, "layer_types": MIXED},
    ),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "qwen3-bias-tied": ("Qwen3Config", {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True}),
    "qwen2-moe": ("Qwen2MoeConfig", {**MOE, "shared_expert_intermediate_size": 48}),
    "qwen2-moe-some-dense": (
        "Qwen2MoeConfig",
        {**MOE, "shared_expert_intermediate_size": 48, "mlp_only_layers": [1], "norm_topk_prob": True},
    ),
    "qwen3-moe": ("Qwen3MoeConfig", {**MOE, "head_dim": 32, "norm_topk_prob": True}),
    "qwen3-moe-every-second": ("Qwen3MoeConfig", {**MOE, "head_dim": 16, "decoder_sparse_step": 2}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "mixtral-sliding": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 3, "sliding_window": 8}),
    "phi3": ("Phi3Config", {"sliding_window": 8}),
    "phi3-partial": ("Phi3Config", {"partial_rotary_factor": 0.75, "head_dim": 16, "tie_word_embeddings": True}),
    "glm": ("GlmConfig", {"head_dim": 16, "num_hidden_layers": 4}),
    "glm-no-bias": ("GlmConfig", {"head_dim": 32, "attention_bias": False}),
    "glm4": ("Glm4Config", {"head_dim": 16, "num_hidden_layers": 4}),
    "gemma2": ("Gemma2Config", {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 24}),
    "gemma2-no-caps": (
        "Gemma2Config",
        {
            "head_dim": 32,
            "sliding_window": 8,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "layer_types": MIXED,
        },
    ),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 16, "sliding_window": 8, "sliding_window_pattern": 3}),
    "gemma3-scaled": (
        "Gemma3TextConfig",
        {
            "head_dim": 16,
            "sliding_window": 8,
            "layer_types": MIXED,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "query_pre_attn_scalar": 16,
        },
    ),
}


def config_of(name: str) -> Any:
    """The transformers config of one entry."""
    kind, extra = FAMILIES[name]
    return getattr(transformers, kind)(**{**BASE, **extra})
