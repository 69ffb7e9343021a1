"""The generic adapter against transformers' own eager attention: packed prefill, a later chunk, and decode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from qiao.models.generic import create_generic
from safetensors.torch import load_file

from tests.support.generic import PagedRunner, random_model, reference_ops, tiny_config

EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2}
SMALL_HEADS = {"head_dim": 16}
WINDOW = {"sliding_window": 5, **SMALL_HEADS}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_neox": ("gpt_neox", {}),
    "gpt_neox sequential": ("gpt_neox", {"use_parallel_residual": False}),
    "stablelm": ("stablelm", {}),
    "cohere": ("cohere", {"use_qk_norm": True}),
    "cohere2": ("cohere2", {**WINDOW, "num_hidden_layers": 4}),
    "olmo": ("olmo", {"clip_qkv": 0.5}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {**WINDOW, "num_hidden_layers": 4}),
    "granite": (
        "granite",
        {"logits_scaling": 3.0, "attention_multiplier": 0.3, "residual_multiplier": 0.5, "embedding_multiplier": 2.0},
    ),
    "starcoder2": ("starcoder2", {"sliding_window": 5}),
    "phi": ("phi", {"qk_layernorm": True}),
    "gpt2": ("gpt2", {}),
    "gpt2 scaled by layer": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    "gpt_bigcode multi-query": ("gpt_bigcode", {}),
    "opt": ("opt", {"word_embed_proj_dim": 32}),
    "persimmon": ("persimmon", {}),
    "gptj": ("gptj", {"rotary_dim": 8}),
    "codegen": ("codegen", {"rotary_dim": 8}),
    "biogpt": ("biogpt", {}),
    "ctrl": ("ctrl", {}),
    "apertus": ("apertus", {}),
    "arcee": ("arcee", {}),
    "diffllama": ("diffllama", {}),
    "ernie4_5": ("ernie4_5", SMALL_HEADS),
    "exaone4": ("exaone4", {**WINDOW, "num_hidden_layers": 4}),
    "helium": ("helium", SMALL_HEADS),
    "modernbert-decoder": ("modernbert-decoder", {"local_attention": 8}),
    "nanochat": ("nanochat", {}),
    "nemotron": ("nemotron", {}),
    "seed_oss": ("seed_oss", SMALL_HEADS),
    "smollm3": ("smollm3", {}),
    "vaultgemma": ("vaultgemma", WINDOW),
    "olmoe": ("olmoe", EXPERTS),
    "granitemoe": ("granitemoe", EXPERTS),
    "phimoe": ("phimoe", EXPERTS),
    "minimax_m2": ("minimax_m2", {**EXPERTS, **SMALL_HEADS}),
    "llama yarn": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "rope_theta": 1e4,
                "original_max_position_embeddings": 32,
            }
        },
    ),
}

FIRST = [(7 * i + 5) % 90 + 3 for i in range(19)]
SECOND = [(5 * i + 1) % 90 + 3 for i in range(11)]


def _served(runner: PagedRunner) -> dict[str, torch.Tensor]:
    """Logits of both sequences: prefill, a chunk beside another's prefill, three decodes, a last chunk."""
    steps = [{"a": FIRST[:6]}, {"a": FIRST[6:11], "b": SECOND[:8]}]
    steps += [{"a": [FIRST[11 + i]], "b": [SECOND[8 + i]]} for i in range(3)]
    steps += [{"a": FIRST[14:]}]
    rows: dict[str, list[torch.Tensor]] = {"a": [], "b": []}
    for step in steps:
        for name, logits in runner.step(step).items():
            rows[name].append(logits)
    return {name: torch.cat(parts) for name, parts in rows.items()}


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, tmp_path: Path) -> None:
    model_type, changes = CASES[case]
    config = tiny_config(model_type, **changes)
    theirs = random_model(config)
    theirs.save_pretrained(tmp_path)  # the names that checkpoints have, experts one by one
    ops = reference_ops()
    ours = create_generic(config, ops, torch.float32)
    ours.load(load_file(tmp_path / "model.safetensors").items())
    served = _served(PagedRunner(ours, ops))
    for name, ids in (("a", FIRST), ("b", SECOND)):
        with torch.no_grad():
            wanted = theirs(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
        assert wanted.std() > 0.01, "the random model must say something"
        torch.testing.assert_close(served[name], wanted, atol=1e-4, rtol=1e-4)
        assert served[name].argmax(-1).tolist() == wanted.argmax(-1).tolist()


def test_decode_hook_is_used_only_for_single_tokens() -> None:
    import dataclasses

    config = tiny_config("gpt_neox")
    seen: list[tuple[int, ...]] = []
    ops = reference_ops()

    def decode(*args: Any) -> torch.Tensor:
        seen.append(args[2].query_lens)
        return ops.attention(*args)

    model = create_generic(config, dataclasses.replace(ops, decode_attention=decode), torch.float32)
    model.load(random_model(config).state_dict().items())
    runner = PagedRunner(model, ops)
    runner.step({"a": [3, 4, 5]})
    assert seen == []
    runner.step({"a": [6]})
    assert seen == [(1,), (1,)]
