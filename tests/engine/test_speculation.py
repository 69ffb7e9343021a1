"""With drafts, good or bad, every sequence gets what it gets without them: token for token, and by distribution."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from qiao.engine import Engine, EngineConfig
from qiao.engine.drafting import DraftParts
from qiao.engine.prompt_lookup import NgramIndex
from qiao.optable import OpTable

from tests.engine.test_captured_steps import capture
from tests.support.engine import VOCAB, Results, TinyModel, make_engine, make_ops, request, run


class Unsure(TinyModel):
    """The large model with some noise: right often enough to matter."""

    def __init__(self, ops: OpTable, noise: float = 0.1) -> None:
        super().__init__(ops)
        self.head = self.head + noise * torch.randn(self.head.shape, generator=torch.Generator().manual_seed(9))


class Broken(TinyModel):
    """Gives NaN now and then."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        found = super().logits(hidden)
        found[::2] = torch.nan
        return found


DRAFTS: dict[str, type[TinyModel] | None] = {"lookup": None, "itself": TinyModel, "unsure": Unsure, "broken": Broken}


def speculating(kind: str, tokens: int = 3, ops: OpTable | None = None, **config: Any) -> Engine:
    """An engine that drafts."""
    plain = make_engine(ops=ops, **config)
    settings = {**vars(plain.config), "num_speculative_tokens": tokens, "prompt_lookup_min": 1, "prompt_lookup_max": 2}
    ops, model = ops or make_ops(), DRAFTS[kind]
    draft = None if model is None else DraftParts(model(ops), ops, torch.float32)
    return Engine(TinyModel(ops), ops, EngineConfig(**settings), draft=draft)


ITEMS = st.lists(
    st.fixed_dictionaries(
        {
            "prompt": st.sampled_from([[5] * 7, [5] * 12 + [6], [7, 8, 9, 7, 8, 9, 7], [11]]),
            "at": st.integers(0, 6),
            "n": st.sampled_from([1, 1, 2]),
            "priority": st.integers(-1, 1),
            "max_tokens": st.integers(1, 16),
            "min_tokens": st.sampled_from([0, 0, 1]),
            "eos": st.sampled_from([(), (31, 40, 7, 8, 9)]),
            "temperature": st.sampled_from([0.0, 0.0, 0.5, 0.9]),
            "top_k": st.sampled_from([0, 4]),
            "seed": st.integers(0, 3),
            "frequency_penalty": st.sampled_from([0.0, 0.0, 0.5]),
            "repetition_penalty": st.sampled_from([1.0, 1.0, 1.3]),
            "logprobs": st.sampled_from([None, None, 2]),
            "prompt_logprobs": st.sampled_from([None, None, 1]),
            "logit_bias": st.sampled_from([None, None, {3: 5.0}]),
            "bad_words_token_ids": st.sampled_from([None, None, [[3, 3], [5], [40, 7, 8]]]),
        }
    ),
    min_size=1,
    max_size=5,
)
CONFIGS = st.fixed_dictionaries(
    {
        "num_blocks": st.sampled_from([9, 13, 40, 40]),
        "max_num_seqs": st.sampled_from([3, 8]),
        "max_num_batched_tokens": st.sampled_from([3, 16, 64, 64]),
        "enable_prefix_caching": st.booleans(),
        "scheduling_policy": st.sampled_from(["fcfs", "priority"]),
        "tpot_target": st.sampled_from([None, None, 1e-9]),
    }
)


def served(engine: Engine, items: list[dict[str, Any]]) -> Results:
    """All outputs; the books are checked after each step."""
    results, later, steps = Results(), dict(enumerate(items)), 0
    while later or engine.has_work():
        for i, item in list(later.items()):
            if item["at"] <= steps:
                del later[i]
                engine.add_request(request(str(i), **{k: v for k, v in item.items() if k != "at"}))
        results.add(engine.step())
        engine.check_integrity()
        steps += 1
        assert steps < 800
    return results


def told(results: Results) -> dict[Any, Any]:
    """Tokens, ends, and log-probabilities to the digits that no order of additions changes."""
    scores: dict[Any, list[Any]] = {}
    for output in results.outputs:
        found = scores.setdefault((output.request_id, output.index), [])
        assert output.logprobs is None or len(output.logprobs) == len(output.token_ids)
        for one in (*(output.prompt_logprobs or ()), *(output.logprobs or ())):
            found.append(one and (one.token_ids, [round(x, 3) + 0.0 for x in one.logprobs], one.rank))
    return {key: (tokens, results.reasons[key], scores[key]) for key, tokens in results.tokens.items()}


@settings(derandomize=True, max_examples=60, deadline=None)
@given(items=ITEMS, config=CONFIGS, kind=st.sampled_from(sorted(DRAFTS)), tokens=st.integers(1, 5))
def test_nothing_changes_but_the_number_of_steps(
    items: list[dict[str, Any]], config: dict[str, Any], kind: str, tokens: int
) -> None:
    """Through stops, limits, penalties, forks, chunks, preemption and hits."""
    assert told(served(speculating(kind, tokens, **config), items)) == told(served(make_engine(**config), items))


def test_the_property_covers_acceptance_rejection_hits_and_preemption() -> None:
    """The conditions of the property do occur, all in one run."""
    items = [{"prompt": [5] * 12 + [i], "at": i, "max_tokens": 24, "temperature": 0.8, "seed": i} for i in range(5)]
    for kind in ("lookup", "unsure"):
        engine = speculating(kind, num_blocks=23, max_num_batched_tokens=24)
        assert told(served(engine, items)) == told(served(make_engine(), items))
        stats = engine.stats()
        assert stats.preemptions and stats.prefix_hits
        assert 0 < stats.accepted_tokens < stats.draft_tokens
        assert sum(stats.accepted_per_position) == stats.accepted_tokens


def test_a_model_that_drafts_for_itself_is_always_right() -> None:
    for temperature in (0.0, 1.0):
        engine = speculating("itself", tokens=3)
        run(engine, [request("a", [1, 2, 3], max_tokens=13, temperature=temperature, seed=4)])
        stats = engine.stats()
        # The prompt's step gives one token and three steps give four each; nothing is guessed beyond the limit.
        assert (stats.steps, stats.drafts, stats.draft_tokens) == (4, 3, 9)
        assert (stats.accepted_tokens, stats.accepted_per_position) == (9, [3, 3, 3])


def test_steps_are_saved_where_the_answer_repeats_itself() -> None:
    """The tiny model falls into a loop; then each step gives four tokens."""
    item = request("a", [5, 5, 5, 5], max_tokens=100, temperature=0.0, logit_bias={5: 50.0})
    plain, engine = make_engine(), speculating("lookup", tokens=3)
    assert run(plain, [item]).of("a") == run(engine, [item]).of("a")
    assert (plain.stats().steps, engine.stats().steps) == (100, 26)


def best_of(model: TinyModel, tokens: list[int], bias: dict[int, float], heat: float, kept: int) -> dict[int, float]:
    """Probabilities of the ``kept`` likeliest next tokens, in float64."""
    logits = model.naive(tokens)[-1].double()
    for token, value in bias.items():
        logits[token] += value
    best = (logits / heat).topk(kept)
    return dict(zip(best.indices.tolist(), best.values.softmax(0).tolist(), strict=True))


@pytest.mark.parametrize("kind", ["lookup", "unsure"])
def test_tokens_are_distributed_as_the_model_says(kind: str) -> None:
    """Chi-squared over three tokens of an answer: without a draft, before a draft, and behind its first token."""
    prompt, count, rounds, kept = [5, 6, 7, 5, 6, 7, 5], 64, 12, 3
    bias: dict[int, float] = {}
    heat = 1.0
    if kind == "lookup":  # only the prompt's own tokens, so that what followed them is a guess at all
        bias, heat = dict.fromkeys((5, 6, 7), 40.0), 2.0
    model = TinyModel(make_ops())
    expected: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        longer: dict[tuple[int, ...], float] = {}
        for tokens, p in expected.items():
            likely = best_of(model, [*prompt, *tokens], bias, heat, kept)
            longer.update({(*tokens, token): p * q for token, q in likely.items()})
        expected = longer
    engine = speculating(kind, num_blocks=1024, max_num_seqs=count, max_num_batched_tokens=1024)
    seen: Counter[tuple[int, ...]] = Counter()
    params: dict[str, Any] = {"max_tokens": 4, "temperature": heat, "top_k": kept, "logit_bias": bias or None}
    for i in range(rounds):
        found = run(engine, [request(str(i), prompt, n=count, seed=1000 * i, **params)])
        seen.update(tuple(tokens[:3]) for tokens in found.tokens.values())
    stats = engine.stats()
    assert 0.05 < stats.accepted_tokens / stats.draft_tokens < 0.95
    assert set(seen) <= set(expected)
    total = count * rounds
    cells = [(seen[tokens], p * total) for tokens, p in expected.items() if p * total >= 5]
    rest = total - sum(wanted for _, wanted in cells)
    if rest > 1:
        cells.append((total - sum(n for n, _ in cells), rest))
    statistic = sum((n - wanted) ** 2 / wanted for n, wanted in cells)
    # The 99.9 % quantile of the chi-squared distribution, by Wilson and Hilferty.
    free = len(cells) - 1
    assert free >= 5
    assert statistic < free * (1 - 2 / (9 * free) + 3.0902 * (2 / (9 * free)) ** 0.5) ** 3


def test_steps_without_a_draft_stay_captured() -> None:
    engine = speculating("lookup", ops=make_ops(capture=capture))
    run(engine, [request("a", [1, 2, 3], max_tokens=9, logit_bias={t: float(t) for t in range(VOCAB)})])
    stats = engine.stats()
    assert stats.captured_steps + stats.drafts + stats.accepted_tokens == 8
    assert stats.captured_steps > 0 and stats.drafts > 0


def test_captured_and_eager_drafts_are_one() -> None:
    items = [{"prompt": [5] * 9, "at": i, "max_tokens": 20, "temperature": 0.7, "seed": i} for i in range(3)]
    for kind in ("lookup", "unsure"):
        found = told(served(speculating(kind, ops=make_ops(capture=capture)), items))
        assert found == told(served(make_engine(), items))


def test_nobody_drafts_while_many_run() -> None:
    items = [request(str(i), [5, 5, 5, 5, i], max_tokens=12) for i in range(3)]
    engine = speculating("itself", most_drafting=2)
    run(engine, items)
    assert engine.stats().drafts == 0
    run(engine, items[:2])
    assert engine.stats().drafts > 0


def test_an_aborted_answer_leaves_nothing() -> None:
    engine = speculating("unsure")
    engine.add_request(request("a", [5] * 6, max_tokens=40, n=2))
    for _ in range(3):
        engine.step()
    engine.abort(["a"], 0)
    engine.check_integrity()
    engine.abort(["a"])
    engine.check_integrity()
    assert engine.stats().kv_blocks_used == 0


def test_a_fault_behind_a_rejected_draft_harms_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN counts where a token is wanted, not where a guess went wrong before it."""

    class Poisoned(TinyModel):
        def logits(self, hidden: torch.Tensor) -> torch.Tensor:
            found = super().logits(hidden)
            if len(found) == 4:  # one sequence with its draft of three
                found[2:] = torch.nan
            return found

    ops = make_ops()
    config = EngineConfig(**{**vars(make_engine().config), "num_speculative_tokens": 3})
    for draft in (TinyModel(ops), Unsure(ops, noise=2.0)):
        engine = Engine(Poisoned(ops), ops, config, draft=DraftParts(draft, ops, torch.float32))
        item = request("a", [1, 2, 3], max_tokens=20)
        assert run(engine, [item]).of("a") == run(make_engine(), [item]).of("a")


def test_the_longest_ending_that_occurred_before_is_found_where_it_occurred_last() -> None:
    index = NgramIndex(1, 3)
    tokens = [1, 2, 3, 9, 2, 3, 8, 3]
    assert index.find(tokens) == 6  # 3 alone; last seen before the 8
    assert index.find([*tokens, 9, 2, 3]) == 6  # 9 2 3, and not the later 3 or an earlier 2 3
    assert index.find([*tokens, 9, 2, 3, 7]) is None


@settings(derandomize=True, max_examples=100, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    shortest=st.integers(1, 3),
    more=st.integers(0, 2),
    cuts=st.lists(st.integers(1, 40), max_size=4),
)
def test_the_index_finds_what_a_search_finds(tokens: list[int], shortest: int, more: int, cuts: list[int]) -> None:
    index = NgramIndex(shortest, shortest + more)
    for end in sorted({min(cut, len(tokens)) for cut in cuts} | {len(tokens)}):
        text = tokens[:end]
        places = (
            at
            for n in range(shortest + more, shortest - 1, -1)
            for at in range(end - 1, n - 1, -1)
            if len(text) >= n and text[at - n : at] == text[end - n :]
        )
        assert index.find(text) == next(places, None)
