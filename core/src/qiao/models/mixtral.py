"""Mixtral (arXiv 2401.04088): Mistral's attention, two of eight experts a token."""

from __future__ import annotations

from qiao.layers.moe import MoeSpec
from qiao.models.family import (
    PRE_NORM,
    attention_layers,
    decoder,
    every_window,
    read_experts,
    read_mlp,
    renaming,
    unstacking,
)
from qiao.models.settings import Settings
from qiao.models.spec import DecoderSpec

_translate = unstacking(
    renaming(
        PRE_NORM,
        (r"\.block_sparse_moe\.", ".mlp."),
        (r"(\.experts\.\d+)\.w1\.", r"\1.gate_proj."),
        (r"(\.experts\.\d+)\.w3\.", r"\1.up_proj."),
        (r"(\.experts\.\d+)\.w2\.", r"\1.down_proj."),
    )
)


def spec(settings: Settings, architecture: str) -> DecoderSpec:
    """See the module."""
    settings = settings.absent(num_key_value_heads=8, num_local_experts=8)
    attention = attention_layers(settings, every_window(settings), theta=1000000.0)
    count, chosen = read_experts(settings, ("num_local_experts", "num_experts"), 2)
    moe = MoeSpec(count, chosen, read_mlp(settings), normalise=True)
    return decoder(settings, architecture, attention, (moe,) * len(attention), eps=1e-5, translate=_translate)
