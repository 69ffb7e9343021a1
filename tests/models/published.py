"""ChatGLM3, InternLM2 and Baichuan 2 as their published remote code computes them, in float64, written for the tests.

transformers has no classes for them. Each takes a checkpoint (a dict by the published names) and ids, and returns
logits of the whole sequence. Nothing here uses Qiao.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn.functional import silu

Tensors = dict[str, torch.Tensor]


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """[T, heads, size] each; keys are repeated for grouped queries."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1])
    mask = torch.ones(scores.shape[-2:]).triu(1).bool()
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(mask, -math.inf).softmax(-1), v).flatten(1)


def _angles(length: int, size: int, theta: float) -> torch.Tensor:
    frequency = theta ** (-torch.arange(0, size, 2).double() / size)
    return torch.arange(length).double()[:, None] * frequency


def _turn_pairs(x: torch.Tensor, theta: float) -> torch.Tensor:
    """ChatGLM: complex rotation of neighbouring pairs in the first half of each head."""
    half = x.shape[-1] // 2
    angles = _angles(x.shape[0], half, theta)
    turned = torch.view_as_complex(x[..., :half].unflatten(-1, (-1, 2)).contiguous())
    turned = turned * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat([torch.view_as_real(turned).flatten(-2), x[..., half:]], -1)


def _turn_halves(x: torch.Tensor, theta: float) -> torch.Tensor:
    """Llama: dimension i turns with dimension i + D/2."""
    angles = _angles(x.shape[0], x.shape[-1], theta)[:, None]
    a, b = x.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


def chatglm(c: dict[str, Any], w: Tensors, ids: list[int]) -> torch.Tensor:
    """THUDM/chatglm3-6b, modeling_chatglm.py."""
    w, eps = {k: v.double() for k, v in w.items()}, c["layernorm_epsilon"]
    size, heads, groups = c["kv_channels"], c["num_attention_heads"], c["multi_query_group_num"]
    theta = 10000.0 * c.get("rope_ratio", 1.0)
    x = w["transformer.embedding.word_embeddings.weight"][ids]
    for i in range(c["num_layers"]):
        p = f"transformer.encoder.layers.{i}."
        h = _norm(x, w[p + "input_layernorm.weight"], eps)
        qkv = h @ w[p + "self_attention.query_key_value.weight"].T + w[p + "self_attention.query_key_value.bias"]
        q, k, v = qkv.split([heads * size, groups * size, groups * size], -1)
        q, k, v = (t.unflatten(-1, (-1, size)) for t in (q, k, v))
        x = x + _attend(_turn_pairs(q, theta), _turn_pairs(k, theta), v) @ w[p + "self_attention.dense.weight"].T
        h = _norm(x, w[p + "post_attention_layernorm.weight"], eps)
        gate, up = (h @ w[p + "mlp.dense_h_to_4h.weight"].T).chunk(2, -1)
        x = x + (silu(gate) * up) @ w[p + "mlp.dense_4h_to_h.weight"].T
    x = _norm(x, w["transformer.encoder.final_layernorm.weight"], eps)
    return x @ w["transformer.output_layer.weight"].T


def chatglm_weights(c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of its checkpoint."""
    e, f, v, size = c["hidden_size"], c["ffn_hidden_size"], c["padded_vocab_size"], c["kv_channels"]
    rows = (c["num_attention_heads"] + 2 * c["multi_query_group_num"]) * size
    shapes: dict[str, tuple[int, ...]] = {
        "transformer.embedding.word_embeddings.weight": (v, e),
        "transformer.encoder.final_layernorm.weight": (e,),
        "transformer.output_layer.weight": (v, e),
        "transformer.rotary_pos_emb.inv_freq": (size // 4,),
    }
    for i in range(c["num_layers"]):
        p = f"transformer.encoder.layers.{i}."
        shapes[p + "input_layernorm.weight"] = shapes[p + "post_attention_layernorm.weight"] = (e,)
        shapes[p + "self_attention.query_key_value.weight"] = (rows, e)
        shapes[p + "self_attention.query_key_value.bias"] = (rows,)
        shapes[p + "self_attention.dense.weight"] = (e, c["num_attention_heads"] * size)
        shapes[p + "mlp.dense_h_to_4h.weight"] = (2 * f, e)
        shapes[p + "mlp.dense_4h_to_h.weight"] = (e, f)
    return shapes


def internlm2(c: dict[str, Any], w: Tensors, ids: list[int]) -> torch.Tensor:
    """internlm/internlm2-7b, modeling_internlm2.py: wqkv is '(h gs d)', gs = queries of the group, key, value."""
    w, eps = {k: v.double() for k, v in w.items()}, c["rms_norm_eps"]
    heads, kv = c["num_attention_heads"], c["num_key_value_heads"]
    size, theta = c["hidden_size"] // heads, c["rope_theta"]
    x = w["model.tok_embeddings.weight"][ids]
    for i in range(c["num_hidden_layers"]):
        p = f"model.layers.{i}."
        h = _norm(x, w[p + "attention_norm.weight"], eps)
        qkv = (h @ w[p + "attention.wqkv.weight"].T).view(len(ids), kv, heads // kv + 2, size)
        q = qkv[:, :, :-2].reshape(len(ids), heads, size)
        k, v = qkv[:, :, -2], qkv[:, :, -1]
        x = x + _attend(_turn_halves(q, theta), _turn_halves(k, theta), v) @ w[p + "attention.wo.weight"].T
        h = _norm(x, w[p + "ffn_norm.weight"], eps)
        inner = silu(h @ w[p + "feed_forward.w1.weight"].T) * (h @ w[p + "feed_forward.w3.weight"].T)
        x = x + inner @ w[p + "feed_forward.w2.weight"].T
    return _norm(x, w["model.norm.weight"], eps) @ w["output.weight"].T


def internlm2_weights(c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of its checkpoint."""
    e, f, v = c["hidden_size"], c["intermediate_size"], c["vocab_size"]
    size = e // c["num_attention_heads"]
    rows = (c["num_attention_heads"] + 2 * c["num_key_value_heads"]) * size
    shapes: dict[str, tuple[int, ...]] = {
        "model.tok_embeddings.weight": (v, e),
        "model.norm.weight": (e,),
        "output.weight": (v, e),
    }
    for i in range(c["num_hidden_layers"]):
        p = f"model.layers.{i}."
        shapes[p + "attention_norm.weight"] = shapes[p + "ffn_norm.weight"] = (e,)
        shapes[p + "attention.wqkv.weight"], shapes[p + "attention.wo.weight"] = (rows, e), (e, e)
        shapes[p + "feed_forward.w1.weight"] = shapes[p + "feed_forward.w3.weight"] = (f, e)
        shapes[p + "feed_forward.w2.weight"] = (e, f)
    return shapes


def baichuan(c: dict[str, Any], w: Tensors, ids: list[int]) -> torch.Tensor:
    """baichuan-inc/Baichuan2-7B-Chat, modeling_baichuan.py; NormHead where the config has ``z_loss_weight``."""
    w, eps = {k: v.double() for k, v in w.items()}, c["rms_norm_eps"]
    size = c["hidden_size"] // c["num_attention_heads"]
    x = w["model.embed_tokens.weight"][ids]
    for i in range(c["num_hidden_layers"]):
        p = f"model.layers.{i}."
        h = _norm(x, w[p + "input_layernorm.weight"], eps)
        q, k, v = ((h @ t.T).unflatten(-1, (-1, size)) for t in w[p + "self_attn.W_pack.weight"].chunk(3))
        x = x + _attend(_turn_halves(q, 1e4), _turn_halves(k, 1e4), v) @ w[p + "self_attn.o_proj.weight"].T
        h = _norm(x, w[p + "post_attention_layernorm.weight"], eps)
        inner = silu(h @ w[p + "mlp.gate_proj.weight"].T) * (h @ w[p + "mlp.up_proj.weight"].T)
        x = x + inner @ w[p + "mlp.down_proj.weight"].T
    head = w["lm_head.weight"]
    if "z_loss_weight" in c:
        head = head / head.norm(dim=-1, keepdim=True)
    return _norm(x, w["model.norm.weight"], eps) @ head.T


def baichuan_weights(c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of its checkpoint."""
    e, f, v = c["hidden_size"], c["intermediate_size"], c["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (v, e),
        "model.norm.weight": (e,),
        "lm_head.weight": (v, e),
    }
    for i in range(c["num_hidden_layers"]):
        p = f"model.layers.{i}."
        shapes[p + "input_layernorm.weight"] = shapes[p + "post_attention_layernorm.weight"] = (e,)
        shapes[p + "self_attn.W_pack.weight"], shapes[p + "self_attn.o_proj.weight"] = (3 * e, e), (e, e)
        shapes[p + "self_attn.rotary_emb.inv_freq"] = (e // c["num_attention_heads"] // 2,)
        shapes[p + "mlp.gate_proj.weight"] = shapes[p + "mlp.up_proj.weight"] = (f, e)
        shapes[p + "mlp.down_proj.weight"] = (e, f)
    return shapes


def random_weights(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> Tensors:
    """A checkpoint of ``shapes``: norms near 1, the rest small."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator) * (0.2 if len(shape) > 1 else 0.3)
        + (1.0 if "norm" in name else 0.0)
        for name, shape in shapes.items()
    }
