"""Logit changes, stops, log-probabilities and errors, against formulas on the model's own logits."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import pytest
import torch
from qiao.contract import SamplingTensors
from qiao.engine.uniform import uniforms
from qiao.errors import KernelError, ParameterError
from qiao.optable import OpTable

from tests.support.engine import VOCAB, TinyModel, attention, make_engine, make_ops, request, run, sample

Solo = Callable[[Sequence[int], int], list[int]]
PROMPT = [1, 2, 3, 4, 5]


class TableModel(TinyModel):
    """Logits by a function of the last token alone."""

    def __init__(self, ops: OpTable, table: torch.Tensor) -> None:
        super().__init__(ops)
        self.table = table
        self.fed: torch.Tensor = torch.zeros(0)

    def forward(self, token_ids: torch.Tensor, *rest: object) -> torch.Tensor:
        return torch.nn.functional.one_hot(token_ids, VOCAB).float()

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.table[hidden.argmax(-1)].clone()


def chain(*successors: tuple[int, int]) -> Callable[[OpTable], TableModel]:
    """Token a is followed by b, with 4.0 over the rest."""
    table = torch.zeros(VOCAB, VOCAB)
    for a, b in successors:
        table[a, b] = 4.0
    return lambda ops: TableModel(ops, table)


LOOP = chain((1, 2), (2, 3), (3, 1), (0, 3))


# ends -----------------------------------------------------------------------------------------------------------------


def end(**params: object) -> tuple[list[int], str, int | None]:
    eos = params.pop("eos", [])
    results = run(make_engine(LOOP), [request("a", [1], eos=eos, **{"max_tokens": 9, **params})])
    return results.of("a"), results.reasons["a", 0], results.outputs[-1].stop_reason


def test_eos_stops_without_a_reason_and_any_of_many_does() -> None:
    assert end(eos=[50, 51, 3]) == ([2, 3], "stop", None)


def test_a_stop_id_is_the_reason() -> None:
    assert end(stop_token_ids=[3]) == ([2, 3], "stop", 3)


def test_ignore_eos_runs_on_but_stop_ids_still_stop() -> None:
    assert end(eos=[3], ignore_eos=True) == ([2, 3, 1] * 3, "length", None)
    assert end(eos=[3], ignore_eos=True, stop_token_ids=[1]) == ([2, 3, 1], "stop", 1)


def test_min_tokens_bans_the_ends_until_then() -> None:
    """With 3 banned, 2 and 0 are followed by 0; once it is free, 0 is followed by 3."""
    assert end(eos=[3], stop_token_ids=[1], min_tokens=4) == ([2, 0, 0, 0, 3], "stop", None)


def test_length_wins_nothing_over_stop_at_the_last_token() -> None:
    assert end(eos=[3], max_tokens=2) == ([2, 3], "stop", None)


# edits and penalties --------------------------------------------------------------------------------------------------


def first_logits() -> torch.Tensor:
    return TinyModel(make_ops()).naive(PROMPT)[-1]


def only(**params: object) -> list[int]:
    return run(make_engine(), [request("a", PROMPT, **{"max_tokens": 6, **params})]).of("a")


def test_logit_bias_plus_hundred_forces_and_minus_hundred_bans() -> None:
    assert only(logit_bias={77: 100.0}) == [77] * 6
    best = int(first_logits().argmax())
    assert best not in only(logit_bias={best: -100.0})
    assert only(logit_bias={}) == only()


def test_logit_bias_is_added() -> None:
    logits = first_logits()
    best, second = logits.topk(2).indices.tolist()
    gap = float(logits[best] - logits[second])
    assert only(logit_bias={second: gap - 0.01}, max_tokens=1) == [best]
    assert only(logit_bias={second: gap + 0.01}, max_tokens=1) == [second]


def test_allowed_token_ids() -> None:
    logits = first_logits()
    allowed = logits.argsort()[:5].tolist()
    tokens = only(allowed_token_ids=allowed)
    assert set(tokens) <= set(allowed)
    assert tokens[0] == max(allowed, key=lambda t: float(logits[t]))
    assert set(only(allowed_token_ids=[8], temperature=2.0)) == {8}


def test_bad_words_of_one_and_of_several_tokens(solo: Solo) -> None:
    plain = solo(PROMPT, 6)
    assert plain[0] not in only(bad_words_token_ids=[[plain[0]]])
    tokens = only(bad_words_token_ids=[plain[1:4]])
    assert tokens[:3] == plain[:3] and tokens[3] != plain[3]
    assert only(bad_words_token_ids=[[90, plain[0]]]) == plain  # the word has not begun
    assert only(bad_words_token_ids=[[5, plain[0]]]) == plain  # the prompt's last id begins no word of the answer


@pytest.mark.parametrize(
    "penalty", [{"frequency_penalty": 0.9}, {"presence_penalty": 1.5}, {"repetition_penalty": 1.8}]
)
def test_penalties_follow_the_published_formulas(penalty: dict[str, float]) -> None:
    model, tokens = TinyModel(make_ops()), list(PROMPT)
    for _ in range(12):
        logits = model.naive(tokens)[-1].double()
        output = tokens[len(PROMPT) :]
        for token in range(VOCAB):
            if token in tokens and "repetition_penalty" in penalty:
                factor = penalty["repetition_penalty"]
                logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
            logits[token] -= penalty.get("frequency_penalty", 0.0) * output.count(token)
            logits[token] -= penalty.get("presence_penalty", 0.0) * (token in output)
        tokens.append(int(logits.argmax()))
    assert only(max_tokens=12, **penalty) == tokens[len(PROMPT) :]


def test_b052_a_neighbour_with_penalties_changes_nothing(solo: Solo) -> None:
    made = [
        request("short", [1, 2], max_tokens=20),
        request("long", list(range(30)), max_tokens=20, frequency_penalty=1.05),
    ]
    together = run(make_engine(), made)
    assert together.of("short") == solo([1, 2], 20)
    assert together.of("long") == run(make_engine(), made[1:]).of("long")


# choosing -------------------------------------------------------------------------------------------------------------


def test_b059_ties_go_to_the_lowest_id_whatever_shares_the_batch() -> None:
    table = torch.zeros(VOCAB, VOCAB)
    table[:, [40, 41]] = 4.0
    for seed in range(5):
        results = run(
            make_engine(lambda ops: TableModel(ops, table)),
            [request("g", [1], top_p=0.9), request("r", [1], temperature=1.0, seed=seed)],
        )
        assert results.of("g") == [40] * 8


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.01, "top_k": 1, "top_p": 0.8},
        {"temperature": 1.0, "top_k": 100000, "top_p": 0.5, "min_p": 1.0},
        *({"temperature": value} for value in (1e-3, 1e-4, 1e-5, 1e-6)),
        {"temperature": 1e-12},
        {"temperature": 0.0, "top_k": 3, "min_p": 0.5},
    ],
)
def test_b050_b061_settings_that_amount_to_greedy(params: dict[str, float], solo: Solo) -> None:
    assert only(**params, seed=5) == solo(PROMPT, 6)


@pytest.mark.parametrize("seed", [0, 1, -2, 2**63 - 1, -(2**63)])
def test_b054_any_64_bit_seed_is_reproducible(seed: int) -> None:
    assert only(temperature=1.0, seed=seed) == only(temperature=1.0, seed=seed)


def test_unseeded_requests_differ_and_follow_the_engines_seed() -> None:
    def several(seed: int) -> list[list[int]]:
        results = run(make_engine(seed=seed), [request(str(i), PROMPT, temperature=1.0) for i in range(4)])
        return [results.of(str(i)) for i in range(4)]

    first = several(0)
    assert len({tuple(t) for t in first}) > 1
    assert first == several(0) != several(1)


def test_sampled_frequencies_match_the_softmax() -> None:
    """A chi-square statistic with 4 degrees of freedom; 30 would be a chance of 5e-6, and the seeds are fixed."""
    table = torch.full((VOCAB, VOCAB), -50.0)
    table[:, :5] = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0])
    engine = make_engine(lambda ops: TableModel(ops, table), max_model_len=512, num_blocks=128)
    tokens = run(engine, [request("a", [1], temperature=0.8, seed=11, max_tokens=500)]).of("a")
    expected = 500 * (table[0, :5].double() / 0.8).softmax(0)
    counts = torch.tensor([tokens.count(i) for i in range(5)])
    assert float(((counts - expected) ** 2 / expected).sum()) < 30


def test_uniforms_are_uniform_and_independent_of_the_batch() -> None:
    seeds = np.arange(4000, dtype=np.uint64)
    values = uniforms(seeds, np.zeros(4000, np.int64))
    assert values.dtype == np.float32 and values.min() >= 0 and values.max() < 1
    histogram = np.histogram(values, bins=10, range=(0, 1))[0]
    assert (((histogram - 400) ** 2) / 400).sum() < 40
    stream = uniforms(np.full(4000, 7, np.uint64), np.arange(4000))
    assert abs(np.corrcoef(stream[:-1], stream[1:])[0, 1]) < 0.06
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.06
    assert uniforms(np.array([7], np.uint64), np.array([9]))[0] == stream[9]


def test_settings_reach_the_operator_row_by_row_with_flags() -> None:
    seen: list[SamplingTensors] = []

    def spy(logits: torch.Tensor, params: SamplingTensors) -> torch.Tensor:
        seen.append(params)
        return sample(logits, params)

    def flags() -> list[bool]:
        last = seen[-1]
        return [last.all_greedy, last.any_top_k, last.any_top_p, last.any_min_p]

    ops = make_ops(sample=spy)
    run(make_engine(ops=ops), [request("a", PROMPT, max_tokens=1, top_k=4, top_p=0.5)])
    assert flags() == [True, False, False, False]
    made = [
        request("a", PROMPT, max_tokens=1, temperature=0.5, top_k=4, top_p=0.5, min_p=0.25),
        request("b", PROMPT, max_tokens=1),
        request("c", PROMPT, max_tokens=1, temperature=2.0, top_k=-1),
    ]
    run(make_engine(ops=ops), made)
    assert flags() == [False, True, True, True]
    assert seen[-1].temperature.tolist() == [0.5, 0.0, 2.0]
    assert seen[-1].top_k.tolist() == [4, 0, 0]
    assert seen[-1].top_p.tolist() == [0.5, 1.0, 1.0]
    assert seen[-1].min_p.tolist() == [0.25, 0.0, 0.0]
    assert [t.dtype for t in (seen[-1].temperature, seen[-1].top_k)] == [torch.float32, torch.int32]


# log-probabilities ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("company", [True, False])
@pytest.mark.parametrize("wanted", [0, 3, -1])
def test_logprobs_are_those_of_the_raw_logits(wanted: int, company: bool) -> None:
    """Before bias, penalties and temperature, in float64 by hand."""
    made = [request("a", PROMPT, logprobs=wanted, temperature=1.7, seed=3, logit_bias={9: 7.0}, presence_penalty=1.0)]
    if company:
        made += [request("b", PROMPT), request("c", PROMPT, logprobs=1)]
    results = run(make_engine(), made)
    model, tokens = TinyModel(make_ops()), list(PROMPT)
    count = VOCAB if wanted == -1 else wanted
    for out in (o for o in results.outputs if o.request_id == "a"):
        expected = model.naive(tokens)[-1].double().log_softmax(-1)
        entry = out.logprobs[0]
        token = out.token_ids[0]
        order = expected.argsort(descending=True).tolist()
        assert entry.token_ids == [token, *order[:count]]
        assert entry.logprobs == pytest.approx(expected[entry.token_ids].tolist(), abs=1e-4)
        assert entry.rank == order.index(token) + 1
        tokens.append(token)
    assert all(o.logprobs is None for o in results.outputs if o.request_id == "b")
    assert all(len(o.logprobs[0].token_ids) == 2 for o in results.outputs if o.request_id == "c")


@pytest.mark.parametrize("budget", [3, 64])
def test_prompt_logprobs_chunk_by_chunk_and_through_preemption(budget: int) -> None:
    prompts = [[i, 7, 7, i, 9, 11, 13, i] for i in range(3)]
    engine = make_engine(num_blocks=6, max_num_batched_tokens=budget)
    results = run(engine, [request(str(i), p, prompt_logprobs=2, max_tokens=12) for i, p in enumerate(prompts)])
    model = TinyModel(make_ops())
    for i, prompt in enumerate(prompts):
        found = [o.prompt_logprobs for o in results.outputs if o.request_id == str(i) and o.prompt_logprobs]
        assert len(found) == 1 and found[0][0] is None and len(found[0]) == len(prompt)
        expected = model.naive(prompt).double().log_softmax(-1)
        for position, entry in enumerate(found[0][1:]):
            row = expected[position]
            assert entry.token_ids == [prompt[position + 1], *row.topk(2).indices.tolist()]
            assert entry.logprobs == pytest.approx(row[entry.token_ids].tolist(), abs=1e-4)
            assert entry.rank == int((row > row[prompt[position + 1]]).sum()) + 1


def test_prompt_logprobs_of_a_prompt_that_is_preempted_half_way() -> None:
    engine = make_engine(num_blocks=9, max_num_batched_tokens=4)
    engine.add_request(request("first", [1, 2, 3, 4, 5, 6, 7], max_tokens=20))
    for _ in range(2):
        engine.step()
    prompt = list(range(24))
    engine.add_request(request("scored", prompt, prompt_logprobs=0, max_tokens=1))
    while not engine.stats().preemptions:
        assert not [o for o in engine.step() if o.request_id == "scored"]
    scored = next(o.prompt_logprobs for o in run(engine).outputs if o.request_id == "scored")
    expected = TinyModel(make_ops()).naive(prompt).double().log_softmax(-1)
    assert [e.token_ids[0] for e in scored[1:]] == prompt[1:]
    assert [e.logprobs[0] for e in scored[1:]] == pytest.approx(
        [float(expected[i, t]) for i, t in enumerate(prompt[1:])], abs=1e-4
    )


def test_prompt_logprobs_hold_few_logits_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from qiao.engine import logprobs

    monkeypatch.setattr(logprobs, "_SLICE_LOGITS", 4 * VOCAB)
    rows: list[int] = []

    class Watched(TinyModel):
        def logits(self, hidden: torch.Tensor) -> torch.Tensor:
            rows.append(len(hidden))
            return super().logits(hidden)

    results = run(make_engine(Watched), [request("a", list(range(30)), prompt_logprobs=0, max_tokens=1)])
    assert len(results.outputs[0].prompt_logprobs) == 30
    assert max(rows) == 4


def test_b048_minus_infinity_becomes_finite() -> None:
    table = torch.full((VOCAB, VOCAB), -math.inf)
    table[:, 7] = 0.0
    made = [request("a", [7, 7], logprobs=5, prompt_logprobs=5), request("b", [7], logprobs=5, allowed_token_ids=[7])]
    for out in run(make_engine(lambda ops: TableModel(ops, table)), made).outputs:
        json.dumps(msgspec.to_builtins(out), allow_nan=False)
        assert out.logprobs[0].logprobs[0] == 0.0 and min(out.logprobs[0].logprobs) == -9999.0


# errors ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "seed": 1}])
def test_nan_logits_fail_their_request_only(params: dict[str, float], solo: Solo) -> None:
    class Broken(TinyModel):
        """NaN for whoever has token 90 last."""

        def forward(self, token_ids: torch.Tensor, *rest: object) -> torch.Tensor:
            hidden = super().forward(token_ids, *rest)
            return torch.where((token_ids == 90)[:, None], torch.nan, hidden)

    engine = make_engine(Broken, enable_prefix_caching=False)
    results = run(engine, [request("good", PROMPT), request("bad", [90], n=2, **params), request("ok", [3])])
    assert results.of("good") == solo(PROMPT, 8)
    assert results.of("ok") == solo([3], 8)
    for out in (o for o in results.outputs if o.request_id == "bad"):
        assert out.finish_reason == "error" and "NaN" in out.error
    assert results.tokens["bad", 0] == results.tokens["bad", 1] == []


@pytest.mark.parametrize("drawn", [5, 9, -3, 10**6])
def test_one_nan_among_the_logits_fails_a_random_row_whatever_was_drawn(drawn: int) -> None:
    table = torch.zeros(VOCAB, VOCAB)
    table[:, 9] = math.nan
    ops = make_ops(sample=lambda logits, params: torch.full((len(logits),), drawn))
    results = run(make_engine(lambda ops: TableModel(ops, table), ops), [request("a", PROMPT, temperature=1.0)])
    assert results.reasons == {("a", 0): "error"} and "NaN" in results.outputs[0].error


def test_nan_in_a_scored_prompt_is_an_error() -> None:
    table = torch.full((VOCAB, VOCAB), math.nan)
    engine = make_engine(lambda ops: TableModel(ops, table))
    for tokens in (0, 3):
        results = run(engine, [request("a", PROMPT, max_tokens=tokens, prompt_logprobs=1)])
        assert results.reasons == {("a", 0): "error"} and "NaN" in results.outputs[0].error


def test_nothing_left_to_choose_is_an_error_that_says_so() -> None:
    results = run(make_engine(), [request("a", [1], allowed_token_ids=[3], bad_words_token_ids=[[3, 3]])])
    assert results.of("a") == [3] and results.reasons == {("a", 0): "error"}
    assert "allowed_token_ids" in results.outputs[-1].error


@pytest.mark.parametrize(
    "params",
    [
        {"bad_words_token_ids": [[3], [4]]},
        {"stop_token_ids": [3, 4], "min_tokens": 1},
        {"stop_token_ids": [3], "bad_words_token_ids": [[4]], "min_tokens": 2, "temperature": 1.0},
    ],
)
def test_settings_that_leave_no_first_token_are_refused(params: dict[str, object]) -> None:
    engine = make_engine()
    with pytest.raises(ParameterError, match="allowed_token_ids"):
        engine.add_request(request("a", [1], allowed_token_ids=[3, 4], **params))
    assert not engine.has_work()
    assert len(run(engine, [request("a", [1], allowed_token_ids=[3, 4, 5], **params)]).of("a")) >= 1


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (KernelError("attention of plugin acme: code 507"), "attention of plugin acme"),
        (torch.OutOfMemoryError("tried 3 GiB"), "lower --max-num-batched-tokens"),
        (RuntimeError("shape"), "RuntimeError: shape"),
    ],
)
def test_an_operator_that_raises_fails_the_step_and_not_the_engine(error: Exception, text: str, solo: Solo) -> None:
    calls = 0

    def failing(*args: object) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise error
        return attention(*args)

    engine = make_engine(ops=make_ops(attention=failing), max_num_seqs=3)
    results = run(engine, [request("a", PROMPT, n=2), request("b", [5] * 8), request("c", [6, 5])])
    failed = {o.request_id for o in results.outputs if o.finish_reason == "error"}
    assert failed == {"a", "b"}
    assert all(text in o.error for o in results.outputs if o.finish_reason == "error")
    assert results.of("c") == solo([6, 5], 8)
    assert run(engine, [request("d", PROMPT)]).of("d") == solo(PROMPT, 8)


def test_a_failed_step_leaves_no_prefix_behind(solo: Solo) -> None:
    """Blocks of a step that raised are never found by a later request."""
    broken = True

    def sometimes(*args: object) -> torch.Tensor:
        if broken:
            raise KernelError("attention: fault")
        return attention(*args)

    engine = make_engine(ops=make_ops(attention=sometimes))
    run(engine, [request("a", [5] * 12)])
    broken = False
    results = run(engine, [request("b", [5] * 12)])
    assert results.outputs[0].num_cached_tokens == 0
    assert results.of("b") == solo([5] * 12, 8)


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "n": 2}, {"max_tokens": 0, "prompt_logprobs": 1}])
def test_blocks_that_gave_nan_are_not_found_again(params: dict[str, object], solo: Solo) -> None:
    """A fault of the device that passes must not live on in the prefix cache."""
    broken = True

    def passing(*args: object) -> torch.Tensor:
        return attention(*args) * (torch.nan if broken else 1.0)

    engine = make_engine(ops=make_ops(attention=passing), max_num_batched_tokens=8)
    results = run(engine, [request("a", [5] * 21, **params)])
    assert set(results.reasons.values()) == {"error"}
    broken = False
    assert run(engine, [request("b", [5] * 21)]).of("b") == solo([5] * 21, 8)
    again = run(engine, [request("c", [5] * 21)])
    assert again.of("c") == solo([5] * 21, 8) and again.outputs[0].num_cached_tokens == 20
