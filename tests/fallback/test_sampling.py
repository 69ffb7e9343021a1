"""Sampling with everything switched on gives the same tokens and scores wherever the group S lies."""

from __future__ import annotations

import pytest
from qiao.registry import FallbackCounters, bind

from tests.support.fallback import PROMPTS, build, expected, host_backend, plan_for, request, sim_backend

SETTINGS = (
    {"temperature": 0.9, "top_k": 20, "seed": 1, "logprobs": 2},
    {"temperature": 1.3, "top_p": 0.8, "min_p": 0.02, "seed": 2, "repetition_penalty": 1.3},
    {"temperature": 0.0, "presence_penalty": 1.0, "frequency_penalty": 0.5, "logprobs": 1},
    {"temperature": 0.7, "seed": 3, "logit_bias": {5: 4.0, 9: -100.0}},
    {"temperature": 0.8, "seed": 4, "n": 3},
)


def serve(backend):
    plan = plan_for(backend)
    counters = FallbackCounters()
    engine, _ = build(bind(plan, backend, counters), counters)
    for i, (prompt, params) in enumerate(zip(PROMPTS, SETTINGS, strict=True)):
        engine.add_request(request(str(i), prompt, **params))
    tokens, scores = {}, {}
    while engine.has_work():
        for output in engine.step():
            assert output.error is None
            key = output.request_id, output.index
            tokens.setdefault(key, []).extend(output.token_ids)
            for entry in output.logprobs or ():
                scores.setdefault(key, []).append((entry.token_ids, entry.logprobs))
    engine.check_integrity()
    return tokens, scores


@pytest.fixture(scope="module")
def on_the_cpu():
    return serve(host_backend())


@pytest.mark.parametrize(
    "missing",
    [
        (),
        ("sample",),
        ("apply_penalties",),
        ("logprobs",),
        ("copy_blocks",),
        ("attention", "matmul", "sample"),
        ("apply_penalties", "logprobs", "sample"),
    ],
    ids=lambda missing: "+".join(missing) or "nothing",
)
def test_settings_draw_the_same_tokens(missing, on_the_cpu):
    tokens, scores = serve(sim_backend(missing))
    expected_tokens, expected_scores = on_the_cpu
    assert len(tokens) == len(PROMPTS) + 2  # three answers to the last
    assert tokens == expected_tokens
    assert scores.keys() == expected_scores.keys() and scores
    for key, entries in scores.items():
        for (ids, values), (wanted_ids, wanted) in zip(entries, expected_scores[key], strict=True):
            assert ids == wanted_ids
            assert values == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize("missing", [None, (), ("sample",)], ids=["cpu", "device", "moved"])
def test_a_row_with_nothing_to_choose_from_fails_alone(missing):
    """Through the real samplers: one request's settings must not end the others of its step."""
    backend = host_backend() if missing is None else sim_backend(missing)
    counters = FallbackCounters()
    engine, _ = build(bind(plan_for(backend), backend, counters), counters)
    hopeless = {"allowed_token_ids": [9], "bad_words_token_ids": [[9, 9]]}
    engine.add_request(request("good", PROMPTS[0]))
    engine.add_request(request("bad", PROMPTS[1], **hopeless))
    engine.add_request(request("worse", PROMPTS[1], temperature=1.0, **hopeless))
    engine.add_request(request("fine", PROMPTS[2], temperature=1.0, seed=1))
    ends, tokens = {}, {}
    while engine.has_work():
        for output in engine.step():
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
            ends[output.request_id] = output.finish_reason, output.error
    assert tokens["good"] == expected()["0"]
    assert ends["good"][0] == ends["fine"][0] == "length"
    for name in ("bad", "worse"):
        assert tokens[name] == [9] and ends[name][0] == "error" and "allowed_token_ids" in ends[name][1]
