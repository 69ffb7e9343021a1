"""RAND and CHAIN of the public cases, written as Hugging Face folders with BYTETOK."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.support.tokenizers import BOS, EOS, byte_tokenizer

VOCAB = 320
_KEEP: dict[str, Any] = {"eos_token_id": EOS, "bos_token_id": BOS}

ChainSpec = str | Mapping[int, int | Sequence[int]]


def rand_config(**changes: Any) -> Any:
    """The transformers config of RAND: a Llama of 2 layers and hidden 64, unless ``changes`` say otherwise."""
    from transformers import AutoConfig

    values: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCAB,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": None,
        "dtype": "float32",
        **changes,
    }
    return AutoConfig.for_model(values.pop("model_type", "llama"), **values)


def rand_checkpoint(
    path: str | Path,
    *,
    seed: int = 0,
    max_shard_size: str = "50GB",
    generation_config: dict[str, Any] | None = _KEEP,
    tokenizer: dict[str, Any] | None = None,
    **changes: Any,
) -> Path:
    """RAND with the config keys in ``changes`` (also ``model_type``); the same weights for the same arguments.

    ``generation_config`` None writes no ``generation_config.json``; ``tokenizer`` goes to ``byte_tokenizer``.
    """
    from transformers import AutoModelForCausalLM

    config = rand_config(**changes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=config.dtype or torch.float32)
    return _save(model, Path(path), max_shard_size, generation_config, tokenizer)


def chain_table(spec: ChainSpec) -> dict[int, tuple[int, ...]]:
    """Successors of each id.

    ``"x>DEF>id 259>k"`` is a chain of bytes and ids: a start, then the text; the first text id also follows newline
    where that is free. A mapping gives the successors themselves; several for one id tie exactly.
    """
    if not isinstance(spec, str):
        return {i: (n,) if isinstance(n, int) else tuple(n) for i, n in spec.items()}
    ids: list[int] = []
    for part in spec.split(">"):
        ids += [int(part[3:])] if part.startswith("id ") else list(part.encode())
    table = {a: (b,) for a, b in itertools.pairwise(ids)}
    assert len(table) == len(ids) - 1, "ids within one chain must differ"
    if ord("\n") not in ids:
        table[ord("\n")] = (ids[1],)
    return table


def chain_checkpoint(
    path: str | Path,
    spec: ChainSpec,
    *,
    generation_config: dict[str, Any] | None = _KEEP,
    tokenizer: dict[str, Any] | None = None,
    **changes: Any,
) -> Path:
    """CHAIN: the next id depends on the last id only, with probability near 1; no successor means EOS 257.

    One Llama layer with identity embeddings, zero o_proj and down_proj, and 4.0 at [next(i), i] of the head.
    """
    from transformers import AutoModelForCausalLM

    values: dict[str, Any] = {
        "hidden_size": VOCAB,
        "num_hidden_layers": 1,
        "num_attention_heads": 5,
        "num_key_value_heads": 5,
        "intermediate_size": 64,
        **changes,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(rand_config(**values), dtype=torch.float32)
    table = chain_table(spec)
    head = torch.zeros(VOCAB, VOCAB)
    for i in range(VOCAB):
        for successor in table.get(i, (EOS,)):
            head[successor, i] = 4.0
    with torch.no_grad():
        layer = model.model.layers[0]
        model.model.embed_tokens.weight.copy_(torch.eye(VOCAB))
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
        for norm in (layer.input_layernorm, layer.post_attention_layernorm, model.model.norm):
            norm.weight.fill_(1.0)
        model.lm_head.weight.copy_(head)
    return _save(model, Path(path), "50GB", generation_config, tokenizer)


def edit_config(path: str | Path, **changes: Any) -> None:
    """Set keys of ``config.json`` as written there, without transformers' normalising; None removes a key."""
    file = Path(path) / "config.json"
    config = json.loads(file.read_text())
    config.update(changes)
    file.write_text(json.dumps({k: v for k, v in config.items() if changes.get(k, v) is not None}))


def _save(
    model: Any,
    path: Path,
    max_shard_size: str,
    generation_config: dict[str, Any] | None,
    tokenizer: dict[str, Any] | None,
) -> Path:
    model.save_pretrained(path, max_shard_size=max_shard_size)
    (path / "generation_config.json").unlink(missing_ok=True)
    if generation_config is not None:
        (path / "generation_config.json").write_text(json.dumps(generation_config))
    return byte_tokenizer(path, **(tokenizer or {}))
