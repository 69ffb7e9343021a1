"""lm-eval's ``local-completions``: scores by the server equal those by transformers on the same weights."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.server import RunningServer

pytestmark = pytest.mark.compat

TOLERANCE = 1e-3
TEXT = "the river runs under an old stone bridge while boats pass slowly and people watch them from above"


def pairs(count: int = 24) -> list[tuple[str, str]]:
    """Contexts and continuations of many lengths; the first context is empty."""
    rng, words = random.Random(7), TEXT.split()
    found = [("", "a bridge")]
    while len(found) < count:
        context = " ".join(rng.choices(words, k=rng.randint(1, 30)))
        found.append((context, " " + " ".join(rng.choices(words, k=rng.randint(1, 12)))))
    return found


def wanted(folder: Path, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """The sum of the continuation's log-probabilities, and whether greedy decoding would have said it."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.tensor([context + continuation])).logits[0]
    scores = logits.double().log_softmax(-1)[len(context) - 1 : -1]
    ids = torch.tensor(continuation)
    total = float(scores.gather(1, ids[:, None]).sum())
    return total, bool((scores.argmax(-1) == ids).all())


def test_loglikelihood_equals_transformers(real: RunningServer, folder: Path) -> None:
    api = pytest.importorskip("lm_eval.models.openai_completions", reason="lm-eval is not installed (make compat)")
    from lm_eval.api.instance import Instance

    model: Any = api.LocalCompletionsAPI(
        model="M",
        base_url=real.url + "/v1/completions",
        tokenizer_backend="huggingface",
        tokenizer=str(folder),
        max_length=512,
        batch_size=4,
        num_concurrent=1,
        max_retries=1,
    )
    asked = pairs()
    requests = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(asked)]
    found = model.loglikelihood(requests, disable_tqdm=True)
    worst = 0.0
    for pair, (total, greedy) in zip(asked, found, strict=True):
        context, continuation = (
            model._encode_pair(*pair) if pair[0] else ([model.prefix_token_id], model.tok_encode(pair[1]))
        )
        expected, likeliest = wanted(folder, context, continuation)
        worst = max(worst, abs(total - expected))
        assert greedy == likeliest
    print(f"largest difference of {len(asked)} log-likelihoods: {worst:.2e}")
    assert worst < TOLERANCE
