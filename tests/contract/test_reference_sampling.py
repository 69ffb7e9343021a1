"""The reference's sampler against the specification's text, one row at a time in plain Python."""

import math

import pytest
import qiao_reference as reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from qiao.contract import PenaltyTensors, SamplingTensors, composites

INF = math.inf


def params(rows):
    """rows of (temperature, top_k, top_p, min_p, uniform)."""
    t, k, p, m, u = zip(*rows, strict=True)
    return SamplingTensors(
        torch.tensor(t), torch.tensor(k, dtype=torch.int32), torch.tensor(p), torch.tensor(m), torch.tensor(u),
        not any(t), any(k), min(p) < 1, max(m) > 0,
    )  # fmt: skip


def tensor(*rows):
    return torch.tensor(rows, dtype=torch.float32)


def sample(logits, rows):
    return reference.sample(logits.clone(), params(rows)).tolist()


def kept_tokens(row, temperature, top_k, top_p, min_p):
    """(token, probability) after all filters, most likely first."""
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))
    weights = [math.exp((row[i] - row[order[0]]) / temperature) for i in order]
    kept = list(zip(order, weights, strict=True))[: top_k or None]
    total, reached, inside = sum(w for _, w in kept), 0.0, []
    for token, weight in kept:
        if top_p < 1 and inside and reached >= top_p * total:
            break
        inside.append((token, weight))
        reached += weight
    inside = [(t, w) for t, w in inside if w >= min_p * inside[0][1] and w > 0]
    total = sum(w for _, w in inside)
    return [(t, w / total) for t, w in inside]


def naive(row, temperature, top_k, top_p, min_p, uniform):
    if temperature == 0:
        return max(range(len(row)), key=lambda i: (row[i], -i))
    reached = 0.0
    kept = kept_tokens(row, temperature, top_k, top_p, min_p)
    for token, share in kept:
        reached += share
        if reached > uniform:
            return token
    return kept[-1][0]


def acceptable(row, temperature, top_k, top_p, min_p, uniform):
    """The right token; its neighbours too where a threshold is nearer than float32 can tell."""
    near = 1e-5
    cuts = {top_p - near, top_p, min(top_p + near, 1.0)} if top_p < 1 else {1.0}
    shares = {min(min_p * (1 + m), 1.0) for m in (-near, 0, near)}
    return {
        naive(row, temperature, top_k, cut, share, uniform + u)
        for cut in cuts
        for share in shares
        for u in (-near, 0, near)
    }


ROW = st.tuples(
    st.sampled_from([0.0, 1e-12, 0.2, 1.0, 3.0]),
    st.sampled_from([0, 1, 3, 40, 300, 100_000]),
    st.sampled_from([1.0, 0.95, 0.5, 1e-6]),
    st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    st.floats(0, 1, exclude_max=True, width=32),
)


@settings(derandomize=True, max_examples=60, deadline=None)
@given(
    rows=st.lists(ROW, min_size=1, max_size=5),
    vocab=st.sampled_from([1, 2, 17, 200, 700]),
    kind=st.sampled_from(["plain", "ties", "masked", "flat"]),
    seed=st.integers(0, 1000),
)
def test_any_batch_follows_the_text(rows, vocab, kind, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(rows), vocab, generator=generator) * {"flat": 1e-3}.get(kind, 3)
    if kind == "ties":
        logits = logits.round()
    if kind == "masked":
        logits[:, torch.randperm(vocab, generator=generator)[: vocab // 2]] = -INF
    for i, token in enumerate(sample(logits, rows)):
        right = acceptable(logits[i].double().tolist(), *map(float32, rows[i]))
        assert token in right, (i, rows[i])


def float32(x):
    return x if isinstance(x, int) else float(torch.tensor(x, dtype=torch.float32))


@settings(derandomize=True, max_examples=20, deadline=None)
@given(rows=st.lists(ROW, min_size=2, max_size=6), seed=st.integers(0, 1000))
def test_a_row_alone_draws_the_same_token(rows, seed):
    logits = torch.randn(len(rows), 300, generator=torch.Generator().manual_seed(seed)).mul(2).round()
    together = sample(logits, rows)
    assert together == [sample(logits[i : i + 1], rows[i : i + 1])[0] for i in range(len(rows))]


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"), [(0, 1.0, 0.0), (3, 1.0, 0.0), (0, 0.7, 0.0), (0, 1.0, 0.3), (4, 0.8, 0.1)]
)
def test_frequencies_over_even_uniforms_are_the_probabilities(top_k, top_p, min_p):
    logits, n = torch.tensor([0.3, 2.0, -1.0, 1.1, 0.3, -3.0]), 4000
    rows = [(0.8, top_k, top_p, min_p, (i + 0.5) / n) for i in range(n)]
    counts = torch.tensor(sample(logits.expand(n, -1), rows)).bincount(minlength=6) / n
    want = torch.zeros(6)
    for token, share in kept_tokens(logits.double().tolist(), 0.8, top_k, top_p, min_p):
        want[token] = share
    torch.testing.assert_close(counts, want, atol=2 / n, rtol=0)


def test_flat_logits_over_a_large_vocabulary_reach_every_token():
    """The candidate list has to grow to the whole vocabulary, and ties go by id."""
    vocab = 5000
    rows = [(1.0, 0, 1.0, 0.0, u) for u in (0.0, 0.25, 0.5, 0.99995)]
    assert sample(torch.zeros(4, vocab), rows) == [0, 1250, 2500, 4999]


def test_greedy_takes_the_lowest_id_of_a_tie_whatever_shares_the_batch():
    logits = torch.zeros(3, 320)
    logits[:, [97, 98]] = 4.0
    for other in ((1.0, 0, 0.9, 0.0, 0.7), (0.0, 0, 1.0, 0.0, 0.0)):
        got = sample(logits, [(0.0, 5, 0.9, 0.5, 0.99), other, other])
        assert got[0] == 97


@pytest.mark.parametrize("temperature", [1e-3, 1e-4, 1e-6, 1e-12, 1e-30, 1e-38, 1e-45])
def test_tiny_temperatures_agree_with_greedy(temperature):
    logits = torch.randn(4, 500, generator=torch.Generator().manual_seed(1)) * 50
    rows = [(temperature, 0, 1.0, 0.0, 0.999)] * 4
    assert sample(logits, rows) == logits.argmax(1).tolist()


def test_filters_that_leave_one_token_agree_with_greedy():
    logits = torch.randn(3, 400, generator=torch.Generator().manual_seed(2))
    rows = [(0.01, 1, 0.8, 0.0, 0.9), (1.0, 100_000, 0.5, 1.0, 0.9), (1.0, 0, 1e-9, 0.0, 0.9)]
    assert sample(logits, rows) == logits.argmax(1).tolist()


def test_top_p_works_on_what_top_k_left():
    # after top_k 2 the shares are 0.5 and 0.5, so that 0.4 is reached by the first alone
    logits = tensor([0.2, 0.2, 0.2, 0.2, 0.2]).log()
    assert sample(logits, [(1.0, 2, 0.4, 0.0, 0.99)]) == [0]
    assert sample(logits, [(1.0, 2, 0.6, 0.0, 0.99)]) == [1]


def test_temperature_comes_before_the_filters():
    logits = tensor([2.0, 1.0, 0.0])
    # at temperature 1 the first has 0.665 of the mass; at 10 it has 0.367, so top_p 0.5 needs two
    assert sample(logits, [(1.0, 0, 0.5, 0.0, 0.99)]) == [0]
    assert sample(logits, [(10.0, 0, 0.5, 0.0, 0.99)]) == [1]


def test_a_masked_token_is_never_drawn():
    logits = torch.full((5, 400), -INF)
    logits[:, [7, 300]] = torch.tensor([0.0, 1.0])
    rows = [(5.0, 0, 1.0, 0.0, u) for u in (0.0, 0.3, 0.6, 0.9, 0.99999994)]
    assert set(sample(logits, rows)) == {7, 300}


@pytest.mark.parametrize("row", [[1.0, math.nan, 0.0], [-INF] * 3, [INF, 0.0, 0.0]])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("vocab", [3, 300])
def test_a_row_without_a_finite_maximum_harms_no_other(row, temperature, vocab):
    logits = torch.zeros(3, vocab)
    logits[[0, 2], 1] = 30.0
    logits[1] = tensor(row)[0, 0] if row[0] == -INF else 0.0
    logits[1, :3] = tensor(row)[0]
    got = sample(logits, [(temperature, 0, 1.0, 0.0, 0.5)] * 3)
    assert (got[0], got[2]) == (1, 1)
    assert 0 <= got[1] < vocab
    assert not math.isfinite(float(logits[1, got[1]])), "the engine sees by the chosen logit that the row is bad"


def test_logits_are_left_alone():
    logits = torch.randn(2, 50)
    kept = logits.clone()
    reference.sample(logits, params([(1.0, 5, 0.9, 0.1, 0.5), (0.0, 0, 1.0, 0.0, 0.5)]))
    assert torch.equal(logits, kept)


def penalised(logits, prompt, output, presence, frequency, repetition):
    out = [list(row) for row in logits]
    for i, row in enumerate(out):
        for token in range(len(row)):
            count = output[i].count(token)
            if count or token in prompt[i]:
                row[token] = row[token] / repetition[i] if row[token] > 0 else row[token] * repetition[i]
            if count:
                row[token] -= frequency[i] * count + presence[i]
    return torch.tensor(out)


@settings(derandomize=True, max_examples=30, deadline=None)
@given(
    histories=st.lists(st.tuples(*[st.lists(st.integers(0, 8), max_size=7)] * 2), min_size=1, max_size=4),
    numbers=st.tuples(st.floats(-2, 2), st.floats(-2, 2), st.floats(0.25, 4)),
    seed=st.integers(0, 100),
)
@pytest.mark.parametrize("function", [composites.apply_penalties, reference.apply_penalties])
def test_penalties_count_tokens_and_never_padding(function, histories, numbers, seed):
    vocab, rows = 9, len(histories)
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))
    prompt, output = zip(*histories, strict=True)

    def padded(lists):
        width = max(map(len, lists))
        return torch.tensor([x + [vocab] * (width - len(x)) for x in lists], dtype=torch.int64).view(rows, width)

    # one row with the drawn numbers, the rest neutral: their logits must stay as they are
    numbers = zip(numbers, (0.0, 0.0, 1.0), strict=True)
    presence, frequency, repetition = ([n] + [neutral] * (rows - 1) for n, neutral in numbers)
    got = logits.clone()
    record = PenaltyTensors(padded(prompt), padded(output), *map(torch.tensor, (presence, frequency, repetition)))
    returned = function(got, record)
    assert returned is got
    want = penalised(logits.tolist(), prompt, output, presence, frequency, repetition)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    assert torch.equal(got[1:], logits[1:])


@pytest.mark.parametrize("function", [composites.logprobs, reference.logprobs])
def test_logprobs_with_masked_tokens(function):
    logits = tensor([1.0, -INF, 3.0, 2.0], [0.0, 0.0, 0.0, 0.0])
    out = function(logits, torch.tensor([3, 2]), 3)
    norm = math.log(sum(math.exp(x) for x in (1, 3, 2)))
    assert out.chosen.tolist() == pytest.approx([2 - norm, -math.log(4)], abs=1e-6)
    assert out.rank.tolist() == [2, 1]
    assert out.top_ids[0].tolist() == [2, 3, 0]
    assert out.top_values[0].tolist() == pytest.approx([3 - norm, 2 - norm, 1 - norm], abs=1e-6)
    assert function(logits, torch.tensor([3, 2]), 0).top_ids.shape == (2, 0)
    assert function(logits, torch.tensor([1, 0]), 4).top_values[0, 3] == -INF
