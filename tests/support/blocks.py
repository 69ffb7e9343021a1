"""Keys of the prefix cache."""

from __future__ import annotations

from qiao.engine.prefix import BlockKey, block_key, root_digest


def chain(tokens: list[int], size: int) -> list[BlockKey]:
    """Keys of the full blocks of ``size`` tokens of a prompt without salt."""
    keys: list[BlockKey] = []
    for i in range(len(tokens) // size):
        parent = keys[-1].digest if keys else root_digest("")
        keys.append(block_key(parent, tokens[i * size : (i + 1) * size]))
    return keys
