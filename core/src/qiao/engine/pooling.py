"""The hidden states of a prompt as one vector: what embeddings and scores are made of."""

from __future__ import annotations

import numpy as np
import torch

from qiao.engine.sequence import Sequence

POOLINGS = ("last", "mean")
"""The last token's hidden state, or the mean over all tokens."""


def pool(seq: Sequence, hidden: torch.Tensor) -> None:
    """Take in ``hidden`` [count, E], the step's chunk of the prompt of ``seq``.

    The mean is summed in float64, token after token, so that it does not depend on the chunks. Positions that an
    earlier, preempted run has added are skipped.
    """
    request = seq.request
    end = seq.num_computed + len(hidden)
    if request.pooling == "last":
        if end < seq.num_prompt:
            return
        hidden = hidden[-1:]  # all that has to leave the device
    states = hidden.float().cpu().numpy()
    if request.pooling == "last":
        request.pooled = states[0].astype(np.float64)
    else:
        new = states[max(0, request.pooled_count - seq.num_computed) :].astype(np.float64)
        if request.pooled is not None:
            new = np.vstack([request.pooled, new])
        request.pooled, request.pooled_count = np.add.reduce(new, axis=0), max(end, request.pooled_count)
    if not np.isfinite(states).all():
        request.fault = "the model's hidden states for the prompt hold NaN or infinity"


def embedding(seq: Sequence) -> bytes | None:
    """The pooled vector [E] of ``seq`` as little-endian float32 bytes; None where none was asked for."""
    request = seq.request
    if request.pooled is None:
        return None
    count = seq.num_prompt if request.pooling == "mean" else 1
    return (request.pooled / count).astype("<f4").tobytes()
