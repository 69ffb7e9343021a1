"""Sampling family over the kernels; nothing is read on the host."""

from __future__ import annotations

import torch
from qiao.contract import PenaltyTensors, SamplingTensors, hookimpl

from qiao_triton.cache import last_contiguous
from qiao_triton.launch import architecture_of, launch, power_of_two

PART = 4096
"""Logits that a program looks at together."""


def _width(logits: torch.Tensor) -> int:
    most = 1024 if architecture_of(logits).family == "interpreter" else PART
    return min(most, power_of_two(logits.shape[1]))


@hookimpl
def sample(logits: torch.Tensor, params: SamplingTensors) -> torch.Tensor:
    """A program a row; what no row asks for is not compiled in."""
    logits = last_contiguous(logits)
    out = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    arguments = {"out": out, "logits": logits, "temperatures": params.temperature, "top_ks": params.top_k}
    arguments |= {"top_ps": params.top_p, "min_ps": params.min_p, "uniforms": params.uniform}
    arguments |= {"vocab": logits.shape[1], "l_row": logits.stride(0)}
    constants = {"GREEDY": params.all_greedy, "TOP_K": params.any_top_k, "TOP_P": params.any_top_p}
    constants |= {"MIN_P": params.any_min_p, "WIDTH": _width(logits)}
    launch("sampling.draw", (logits.shape[0],), arguments, constants, 8 if architecture_of(logits).lanes == 32 else 4)
    return out


@hookimpl
def apply_penalties(logits: torch.Tensor, params: PenaltyTensors) -> torch.Tensor:
    """Tokens are counted into one number each, then each logit is changed once."""
    rows, vocab = logits.shape
    counts = torch.zeros((rows, vocab), dtype=torch.int32, device=logits.device)
    for ids, prompt in ((params.output_ids, False), (params.prompt_ids, True)):
        ids = last_contiguous(ids)
        length = ids.shape[1]
        width = min(256, power_of_two(length))
        counted = {"counts": counts, "ids": ids, "vocab": vocab, "i_row": ids.stride(0), "length": length}
        launch("sampling.count_tokens", (rows, -(-length // width)), counted, {"PROMPT": prompt, "WIDTH": width}, 4)
    width = min(1024, power_of_two(vocab))
    arguments = {"logits": logits, "counts": counts, "presence": params.presence, "frequency": params.frequency}
    arguments |= {"repetition": params.repetition, "vocab": vocab, "l_row": logits.stride(0)}
    launch("sampling.penalise", (rows, -(-vocab // width)), arguments, {"WIDTH": width}, 4)
    return logits
