"""``generation_config.json``: the checkpoint's sampling defaults and end tokens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from qiao.errors import ModelError
from qiao.loading.config import read_json
from qiao.loading.sources import ModelFiles

SAMPLING_KEYS = ("temperature", "top_p", "top_k", "repetition_penalty", "min_p", "max_new_tokens")
"""What becomes a default of a request (vLLM's list)."""


def load_generation_config(files: ModelFiles) -> dict[str, Any]:
    """All keys of ``generation_config.json`` (or of a GGUF file's metadata); empty when there is none."""
    if files.gguf is not None:
        from qiao.loading.gguf_config import gguf_generation_config

        return gguf_generation_config(files.header)
    file = files.folder / "generation_config.json"
    return read_json(file) if file.is_file() else {}


def sampling_defaults(generation_config: dict[str, Any]) -> dict[str, Any]:
    """The defaults for requests that do not set a field; ``max_new_tokens`` appears as ``max_tokens``.

    ``do_sample`` has no say, as in vLLM: the request's temperature decides.
    """
    found = {key: generation_config[key] for key in SAMPLING_KEYS if generation_config.get(key) is not None}
    if "max_new_tokens" in found:
        found["max_tokens"] = found.pop("max_new_tokens")
    return found


def eos_token_ids(*sources: Any) -> list[int]:
    """Every id that ends a turn: ``sources`` are the values of ``eos_token_id`` in generation config, model config and
    tokenizer, each an id, a list of ids or None. Negative ids and repeats are left out.

    Raises ``ModelError`` for an id that is no integer.
    """
    ids: dict[int, None] = {}
    for source in sources:
        for token in source if isinstance(source, Iterable) and not isinstance(source, str) else [source]:
            if token is None:
                continue
            if isinstance(token, bool) or not isinstance(token, int):
                raise ModelError(f"eos_token_id must be an integer or a list of them, got {token!r}.")
            if token >= 0:
                ids[token] = None
    return list(ids)
