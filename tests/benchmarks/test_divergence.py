"""KL divergence against scipy's formula in numpy, and llama-perplexity's output."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from benchmarks.comparison.divergence import Totals, chunks_of, parse_llama, scored

OUTPUT = """
====== Perplexity statistics ======
Mean PPL(Q)                   :  23.551006 ±   1.477924
Mean PPL(base)                :  18.654394 ±   1.215718
====== KL divergence statistics ======
Mean    KLD:   0.558150 ±   0.021049
99.0%   KLD:   3.829837
Median  KLD:   0.276990
Same top p: 60.980 ± 1.247 %
"""


def test_figures_are_those_of_the_formulas() -> None:
    generator = torch.Generator().manual_seed(0)
    base, other = (torch.randn(50, 11, generator=generator) * 3 for _ in range(2))
    targets = torch.randint(0, 11, (50,), generator=generator)
    found = Totals()
    found.add(base[:20], other[:20], targets[:20])
    found.add(base[20:], other[20:], targets[20:])
    p, q = (np.exp(x.double().numpy()) / np.exp(x.double().numpy()).sum(-1, keepdims=True) for x in (base, other))
    kl = (p * np.log(p / q)).sum(-1)
    figures = found.figures()
    assert figures["kl"] == pytest.approx(kl.mean())
    assert figures["kl_error"] == pytest.approx(kl.std(ddof=1) / math.sqrt(50))
    assert figures["kl_p99"] == pytest.approx(np.quantile(kl, 0.99))
    assert figures["same_top"] == pytest.approx(100 * (p.argmax(-1) == q.argmax(-1)).mean())
    picked = q[np.arange(50), targets.numpy()]
    assert figures["perplexity"] == pytest.approx(np.exp(-np.log(picked).mean()))


def test_equal_distributions_have_no_divergence() -> None:
    logits = torch.randn(9, 5)
    found = Totals()
    found.add(logits, logits + 7, torch.zeros(9, dtype=torch.long))  # a shift of all logits changes nothing
    figures = found.figures()
    assert figures["kl"] == pytest.approx(0, abs=1e-7) and figures["same_top"] == 100
    assert figures["perplexity"] == pytest.approx(figures["base_perplexity"])


def test_llamas_output_is_read() -> None:
    figures = parse_llama(OUTPUT)
    assert figures["kl"] == 0.55815 and figures["kl_error"] == 0.021049 and figures["same_top"] == 60.98
    assert figures["perplexity"] == 23.551006 and figures["base_perplexity"] == 18.654394
    with pytest.raises(ValueError, match="same_top"):
        parse_llama(OUTPUT.replace("Same top", "Other"))


def test_whole_chunks_and_their_second_halves() -> None:
    assert list(chunks_of(list(range(10)), 4)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert list(range(8))[scored(8)] == [4, 5, 6]
