"""Whole distributions of one sequence, computed alone and with the engine's own model, operators and cache."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from qiao.contract import AttentionMetadata
from qiao.engine.batch import place
from qiao.engine.rows import Int64
from qiao.engine.runner import Runner

_SLICE_LOGITS = 1 << 22
"""Logits yielded at once (16 MiB in float32), however long the sequence."""


def token_logits(runner: Runner, blocks: list[int], tokens: Int64, start: int, chunk: int) -> Iterator[torch.Tensor]:
    """Float32 logits [n, V] on the host, slice by slice, at the positions from ``start`` to the end of ``tokens`` [T].

    The row of position p is the distribution of the token at p + 1. ``tokens`` run in chunks of at most ``chunk``
    with the cache in ``blocks``, which hold nothing that is needed. Chunks and slices follow from the arguments alone,
    so that equal models give equal bits.
    """
    vocab_size = runner.model.shape.vocab_size
    size = max(1, _SLICE_LOGITS // vocab_size)
    for low in range(0, len(tokens), chunk):
        high = min(low + chunk, len(tokens))
        hidden = _hidden(runner, blocks, tokens, low, high)
        for begin in range(max(low, start), high, size):
            end = min(begin + size, high)
            yield runner.model.logits(hidden[begin - low : end - low]).cpu()


def _hidden(runner: Runner, blocks: list[int], tokens: Int64, low: int, high: int) -> torch.Tensor:
    """Hidden states [high - low, E] of these tokens after those before them, whose keys and values are cached."""
    ops, size = runner.ops, runner.block_size
    positions = np.arange(low, high)
    table = np.array(blocks, np.int64)
    slots = table[positions // size] * size + positions % size
    used = table[: -(-high // size)].astype(np.int32)[None]
    metadata = AttentionMetadata(
        query_start=place(np.array([0, high - low], np.int32), ops.kv_device),
        seq_lens=place(np.array([high], np.int32), ops.kv_device),
        block_tables=place(used, ops.kv_device),
        slot_mapping=place(slots, ops.kv_device),
        query_lens=(high - low,),
        kv_lens=(high,),
    )
    ids = place(np.ascontiguousarray(tokens[low:high]), ops.device)
    return runner.forward(ids, place(positions, ops.device), metadata)
