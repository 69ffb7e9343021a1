"""Sampling family: each row by itself, without sorting the vocabulary."""

from __future__ import annotations

import torch
from qiao.contract import SamplingTensors, hookimpl

from qiao_cpu import native


@hookimpl
def sample(logits: torch.Tensor, params: SamplingTensors) -> torch.Tensor:
    """See ``SamplingSpec.sample`` and native/sample.cpp."""
    logits = logits.contiguous()
    rows, vocab = logits.shape
    out = torch.empty(rows, dtype=torch.int64)
    if params.all_greedy:
        native.check(native.argmax(logits.data_ptr(), vocab, out.data_ptr(), rows, vocab))
        return out
    settings = [x.contiguous() for x in (params.temperature, params.top_k, params.top_p, params.min_p, params.uniform)]
    pointers = [x.data_ptr() for x in settings]
    native.check(native.sample(logits.data_ptr(), vocab, *pointers, out.data_ptr(), rows, vocab))
    return out
