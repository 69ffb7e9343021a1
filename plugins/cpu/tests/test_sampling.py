"""Arg max and sampling of large vocabularies against a full sort in float64."""

from __future__ import annotations

import math

import pytest
import qiao_cpu
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from qiao.contract import SamplingTensors
from qiao_cpu import native

from tests.support.cpu import generator

EACH = settings(
    max_examples=40, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def argmax(logits):
    out = torch.empty(len(logits), dtype=torch.int64)
    native.check(native.argmax(logits.data_ptr(), logits.stride(0), out.data_ptr(), *logits.shape))
    return out


@pytest.mark.parametrize("vocab", [1, 7, 300, 8192, 20001, 49152])
def test_argmax_takes_the_lowest_id_of_a_tie(isa, threads, vocab):
    logits = (torch.randn(5, vocab + 3, generator=generator(vocab)) * 4).round()[:, :vocab]
    want = [row.index(max(row)) for row in logits.tolist()]
    for count in (1, 2, 4):
        threads(count)
        assert argmax(logits).tolist() == want
        assert argmax(logits[2:3]).tolist() == want[2:3]


def test_argmax_of_infinities(isa):
    logits = torch.full((3, 9000), -math.inf)
    logits[1, 8888], logits[2, 77], logits[2, 8000] = -1e30, math.inf, math.inf
    assert argmax(logits).tolist() == [0, 8888, 77]


def acceptable(logits, temperature, top_k, top_p, min_p, uniform):
    """Ids that inverting the distribution gives for ``uniform`` and its neighbours a little off, in float64."""
    weights = ((logits.double() - logits.double().max()) / temperature).exp()
    order = weights.argsort(descending=True, stable=True)
    sizes = weights[order]
    if top_k > 0:
        sizes = sizes[:top_k]
    if top_p < 1:
        before = sizes.cumsum(0) - sizes
        sizes = sizes[before < top_p * sizes.sum()]
    sizes = sizes[sizes >= min_p * sizes[0]]
    shares = sizes.cumsum(0) / sizes.sum()
    off = 1e-5
    first = int((shares < uniform - off).sum())
    last = min(int((shares < uniform + off).sum()), len(sizes) - 1)
    return set(order[first : last + 1].tolist())


@EACH
@given(data=st.data())
def test_sampling(threads, data):
    vocab = data.draw(st.sampled_from([50, 3000, 33000]))
    spread = data.draw(st.sampled_from([0.01, 1.0, 3.0, 8.0]))
    logits = torch.randn(1, vocab, generator=generator(data.draw(st.integers(0, 9)))) * spread
    if data.draw(st.booleans()):
        logits[0, : vocab // 4] = -math.inf
    temperature = data.draw(st.sampled_from([0.5, 1.0, 1.3]))
    top_k = data.draw(st.sampled_from([0, 0, 5, 1000, vocab, vocab + 7]))
    # away from the sizes of sets that float32 and float64 round to different sides of
    top_p = data.draw(st.sampled_from([1.0, 0.9, 0.37]))
    min_p = data.draw(st.sampled_from([0.0, 0.05, 1e-5]))
    uniform = data.draw(st.floats(0, 0.9999))
    threads(data.draw(st.sampled_from([1, 3])))
    params = SamplingTensors(
        torch.tensor([temperature]),
        torch.tensor([top_k], dtype=torch.int32),
        torch.tensor([top_p]),
        torch.tensor([min_p]),
        torch.tensor([uniform]),
        all_greedy=False,
        any_top_k=top_k > 0,
        any_top_p=top_p < 1,
        any_min_p=min_p > 0,
    )
    got = int(qiao_cpu.sample(logits, params))
    assert got in acceptable(logits[0], temperature, top_k, top_p, min_p, uniform)
