"""Log-probabilities as plain records, for sampled tokens and for prompts."""

from __future__ import annotations

import numpy as np
import torch

from qiao.engine.batch import place
from qiao.engine.request import TokenLogprobs
from qiao.engine.rows import Int64
from qiao.engine.sequence import Sequence
from qiao.models.base import Model
from qiao.optable import OpTable

FLOOR = -9999.0
"""Stands for -inf, which JSON cannot hold (vLLM's value)."""

_SLICE_LOGITS = 1 << 22
"""Logits of a prompt held at once (16 MiB in float32), however long the prompt."""


def score(ops: OpTable, logits: torch.Tensor, token_ids: torch.Tensor, wanted: Int64) -> list[TokenLogprobs]:
    """Log-probabilities of ``token_ids`` [N] and of the ``wanted[i]`` best under ``logits`` [N, V], all on one device.

    Each record holds the token itself, then the best in order (the token may be among them).
    """
    out = ops.logprobs(logits, token_ids, min(int(wanted.max()), logits.shape[1]))
    chosen_ids, ranks = token_ids.tolist(), out.rank.tolist()
    chosen = _finite(out.chosen).tolist()
    top_ids, top_values = out.top_ids.tolist(), _finite(out.top_values).tolist()
    return [
        TokenLogprobs(
            token_ids=[chosen_ids[i], *top_ids[i][:count]],
            logprobs=[chosen[i], *top_values[i][:count]],
            rank=ranks[i],
        )
        for i, count in enumerate(wanted.tolist())
    ]


def _finite(values: torch.Tensor) -> torch.Tensor:
    return values.nan_to_num(nan=FLOOR, neginf=FLOOR).clamp(min=FLOOR)


def score_prompt(seq: Sequence, hidden: torch.Tensor, model: Model, ops: OpTable) -> None:
    """Extend the request's prompt log-probabilities by what ``hidden`` [count, E], the step's chunk of ``seq``, tells.

    The hidden state at position p scores the token at p + 1. Positions that an earlier, preempted run has scored are
    skipped.
    """
    request = seq.request
    collected = request.prompt_logprobs
    if not collected:
        collected.append(None)
    wanted = request.params.prompt_logprobs
    assert wanted is not None
    begin = len(collected)
    end = min(seq.num_computed + hidden.shape[0] + 1, seq.num_prompt)
    vocab_size = model.shape.vocab_size
    size = max(1, _SLICE_LOGITS // vocab_size)
    for low in range(begin, end, size):
        high = min(low + size, end)
        offset = seq.num_computed + 1
        logits = ops.stage_logits(model.logits(hidden[low - offset : high - offset]))
        targets = place(np.array(seq.tokens[low:high], np.int64), ops.sample_device)
        counts = np.full(high - low, vocab_size if wanted == -1 else wanted, np.int64)
        if logits.amax().isnan():
            request.fault = "the model's logits for the prompt hold NaN"
        collected += score(ops, logits, targets, counts)
