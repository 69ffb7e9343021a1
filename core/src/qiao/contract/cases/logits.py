"""Cases of the S group: rows of a batch that differ in everything, ties, masked tokens, tiny temperatures."""

from __future__ import annotations

import itertools

import torch

from qiao.contract.cases.base import Made, Random
from qiao.contract.types import Capabilities, PenaltyTensors, SamplingTensors

_ROWS = (
    # temperature, top_k, top_p, min_p
    (0.0, 0, 1.0, 0.0),
    (1.0, 0, 1.0, 0.0),
    (0.0, 5, 0.5, 0.2),
    (0.7, 20, 1.0, 0.0),
    (1.5, 0, 0.9, 0.0),
    (1.0, 0, 1.0, 0.1),
    (0.8, 50, 0.8, 0.05),
    (0.01, 1, 0.8, 0.0),
    (1.0, 100_000, 0.5, 1.0),
    (1e-12, 0, 1.0, 0.0),
)


def settings(rows: list[tuple[float, int, float, float]], uniform: torch.Tensor) -> SamplingTensors:
    """The record for ``rows`` of (temperature, top_k, top_p, min_p) and ``uniform`` [N]."""
    temperature, top_k, top_p, min_p = zip(*rows, strict=True)
    return SamplingTensors(
        torch.tensor(temperature),
        torch.tensor(top_k, dtype=torch.int32),
        torch.tensor(top_p),
        torch.tensor(min_p),
        uniform,
        all_greedy=not any(temperature),
        any_top_k=any(top_k),
        any_top_p=min(top_p) < 1,
        any_min_p=max(min_p) > 0,
    )


def sample(capabilities: Capabilities, random: Random) -> Made:
    """All kinds of rows in one batch, and greedy rows alone; vocabularies below and above usual block sizes."""
    for vocab, kind in itertools.product((11, 131, 1031), ("plain", "ties", "masked", "hopeless")):
        logits = random.normal(len(_ROWS), vocab) * 3
        if kind == "ties":
            logits = logits.round()
        if kind == "masked":
            logits[:, random.order(vocab)[: vocab // 2]] = float("-inf")
        if kind == "hopeless":  # any id will do for these rows, but no error, and the others' as ever
            logits[0], logits[1], logits[4, vocab // 2] = float("-inf"), float("nan"), float("nan")
        for label, rows in (("greedy", [_ROWS[0]] * len(_ROWS)), ("mixed", list(_ROWS))):
            params = settings(rows, random.uniform(len(rows)))
            note = "temperature, top-k, top-p, min-p per row; lowest id on a tie; never a masked token"
            yield f"{label}-{kind}-{vocab}", "float32", {"logits": logits, "params": params}, note


def apply_penalties(capabilities: Capabilities, random: Random) -> Made:
    """Prompts and outputs of unequal length, so that padding would show."""
    for vocab in (7, 131):
        prompt, output = (random.whole(0, vocab, 3, n) for n in (6, 5))
        prompt[0, 2:] = output[1, :] = output[2, 3:] = vocab
        neutral = torch.tensor([0.0, 0.5, -0.4]), torch.tensor([0.3, 0.0, 1.2]), torch.tensor([1.0, 1.3, 0.8])
        params = PenaltyTensors(prompt, output, *neutral)
        arguments = {"logits": random.normal(3, vocab) * 3, "params": params}
        yield f"{vocab}", "float32", arguments, "repetition over prompt and output, the others over the output"


def logprobs(capabilities: Capabilities, random: Random) -> Made:
    """With and without alternatives, some tokens masked."""
    for vocab, top in itertools.product((11, 131), (0, 5)):
        logits = random.normal(4, vocab) * 3
        logits[3, 2:9] = float("-inf")
        token_ids = torch.tensor([0, 3, vocab - 1, 1])
        arguments = {"logits": logits, "token_ids": token_ids, "top": top}
        yield f"{vocab}-top{top}", "float32", arguments, "value and rank of the token, the largest falling"
