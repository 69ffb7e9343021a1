"""Faults that people met in other engines (scheduler and cache), as behaviour of this one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from qiao.errors import OverloadedError, ParameterError, PromptTooLongError

from tests.support.engine import Results, TinyModel, make_engine, make_ops, request, run

Solo = Callable[[Sequence[int], int], list[int]]


@pytest.mark.parametrize("n", [1, 3])
def test_b001_scoring_without_new_tokens(n: int) -> None:
    engine = make_engine(max_num_batched_tokens=5)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    results = run(engine, [request("score", prompt, max_tokens=0, prompt_logprobs=1, n=n)])
    assert results.tokens == {("score", i): [] for i in range(n)}
    assert set(results.reasons.values()) == {"length"}
    scored = [o.prompt_logprobs for o in results.outputs if o.prompt_logprobs is not None]
    assert len(scored) == 1 and len(scored[0]) == len(prompt) and scored[0][0] is None
    assert engine.stats().generation_tokens == 0
    assert len(run(engine, [request("next", [4, 4], max_tokens=1)]).of("next")) == 1


def test_b033_what_can_never_fit_is_refused_at_once() -> None:
    engine = make_engine(num_blocks=8, block_size=16, max_model_len=512)
    with pytest.raises(PromptTooLongError, match=r"300 tokens.*8 blocks of 16.*128"):
        engine.add_request(request("big", [5] * 300, max_tokens=4))
    assert not engine.has_work()
    with pytest.raises(PromptTooLongError, match="context of 512"):
        engine.add_request(request("bigger", [5] * 512, max_tokens=4))
    assert len(run(engine, [request("small", [1, 2], max_tokens=2)]).of("small")) == 2


@pytest.mark.parametrize(("blocks", "context", "end"), [(3, 64, 12), (16, 10, 10)])
def test_b033_a_prompt_that_fits_ends_with_length_at_the_limit(solo: Solo, blocks: int, context: int, end: int) -> None:
    results = run(make_engine(num_blocks=blocks, max_model_len=context), [request("a", [1, 2, 3], max_tokens=50)])
    assert results.of("a") == solo([1, 2, 3], end - 3)
    assert results.reasons["a", 0] == "length"


def test_b033_the_longest_prompt_can_be_scored_but_not_continued() -> None:
    engine = make_engine(num_blocks=2, max_model_len=64)
    with pytest.raises(PromptTooLongError):
        engine.add_request(request("a", [1] * 8, max_tokens=1))
    assert run(engine, [request("a", [1] * 8, max_tokens=0)]).reasons["a", 0] == "length"


def test_b035_a_victim_that_is_scheduled_already_leaves_the_step(solo: Solo) -> None:
    engine = make_engine(num_blocks=8, block_size=16, max_num_seqs=4, scheduling_policy="priority")
    results = run(engine, [request(str(p), [5] * 40, max_tokens=40, priority=p) for p in (5, 4, 3, 0)])
    assert engine.stats().preemptions > 0
    assert list(results.reasons) == [(p, 0) for p in ("0", "3", "4", "5")]
    for p in ("0", "3", "4", "5"):
        assert results.of(p) == solo([5] * 40, 40)


@pytest.mark.parametrize(("blocks", "prompts", "tokens"), [(10, 1, 1), (12, 2, 4)])
def test_b035_a_decode_gives_way_to_a_prompt_in_the_step_that_had_it(
    blocks: int, prompts: int, tokens: int, solo: Solo
) -> None:
    """Decodes are scheduled before prompts, so the victim is in the step already; its token's budget is used again."""
    engine = make_engine(
        num_blocks=blocks,
        max_num_batched_tokens=4,
        long_prefill_token_threshold=2 * (prompts > 1),
        scheduling_policy="priority",
    )
    results = Results()
    engine.add_request(request("low", [1, 2, 3, 4], max_tokens=25, priority=5))
    for _ in range(prompts):
        results.add(engine.step())
    assert len(results.of("low")) == 1
    for i in range(prompts):
        engine.add_request(request(str(i), [7 + i] * 25, max_tokens=4, priority=i))
    while not engine.stats().preemptions:
        assert len(results.of("low")) < 25
        outputs = engine.step()
        results.add(outputs)
        engine.check_integrity()
    assert "low" not in {o.request_id for o in outputs}
    assert not any(o.error for o in outputs)
    assert engine.stats().last_step_tokens == tokens
    while engine.has_work():
        results.add(engine.step())
        engine.check_integrity()
    assert results.of("low") == solo([1, 2, 3, 4], 25)
    assert all(results.of(str(i)) == solo([7 + i] * 25, 4) for i in range(prompts))


def test_b036_prompt_logprobs_and_a_cached_prefix() -> None:
    engine = make_engine(max_num_seqs=1)
    prompt = [5, 9, 7, 3] * 10
    answers = []
    for i in range(3):
        results = run(engine, [request(str(i), prompt, max_tokens=3, prompt_logprobs=1, logprobs=1)])
        answers.append((results.of(str(i)), results.outputs[0].prompt_logprobs))
    assert answers[0] == answers[1] == answers[2]
    assert len(answers[0][1]) == 40
    assert run(engine, [request("x", prompt, max_tokens=1)]).outputs[0].num_cached_tokens == 36


def test_b038_the_hit_comes_before_the_budget(solo: Solo) -> None:
    engine = make_engine(block_size=16)
    run(engine, [request("a", [5] * 32 + [7], max_tokens=1)])
    model: TinyModel = engine._runner.model
    model.steps.clear()
    prompt = [5] * 32 + [8] * 29
    results = run(engine, [request("b", prompt, max_tokens=4)])
    assert model.steps == [(29,), (1,), (1,), (1,)]
    assert results.of("b") == solo(prompt, 4)
    assert results.outputs[0].num_cached_tokens == 32


def test_b038_a_prompt_that_is_wholly_cached_still_computes_its_last_token(solo: Solo) -> None:
    engine = make_engine()
    for name in "ab":
        results = run(engine, [request(name, [5] * 8, max_tokens=4)])
        assert results.of(name) == solo([5] * 8, 4)
    assert results.outputs[0].num_cached_tokens == 4


def test_b041_prompts_that_a_rolling_hash_confuses(solo: Solo) -> None:
    engine = make_engine(block_size=16)
    run(engine, [request("p", [40] * 32, max_tokens=4)])
    prompt = [71, 39] + [40] * 30
    assert run(engine, [request("q", prompt, max_tokens=4)]).of("q") == solo(prompt, 4)
    assert engine.stats().prefix_hits == 0


@pytest.mark.parametrize("when", range(8))
def test_b042_abort_frees_within_the_call_wherever_the_request_is(when: int, solo: Solo) -> None:
    engine = make_engine(num_blocks=9, max_num_seqs=3, max_num_batched_tokens=6)
    for i in range(6):
        engine.add_request(request(str(i), [i] * 9, max_tokens=20, n=1 + i % 2))
    for _ in range(when):
        engine.step()
    engine.abort(str(i) for i in range(6))
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.kv_blocks_used, engine.has_work()) == (0, 0, 0, False)
    assert engine.step() == []
    assert run(engine, [request("last", [3, 1], max_tokens=2)]).of("last") == solo([3, 1], 2)


@pytest.mark.parametrize("caching", [True, False])
def test_b044_preempted_requests_come_back_unchanged(caching: bool) -> None:
    engine = make_engine(num_blocks=10, block_size=16, enable_prefix_caching=caching)
    made = [
        request(str(i), [i] * 3, max_tokens=60, ignore_eos=True, eos=[31], frequency_penalty=0.5, **extra)
        for i, extra in zip(range(5, 11), [{}, {}, {}, {"temperature": 1.0, "seed": 7}, {}, {}], strict=True)
    ]
    together = run(engine, made)
    assert engine.stats().preemptions > 0
    for item in made:
        alone = run(make_engine(num_blocks=64, block_size=16), [item])
        assert len(together.of(item.request_id)) == 60
        assert together.of(item.request_id) == alone.of(item.request_id)


def test_the_queue_is_bounded() -> None:
    engine = make_engine(max_num_queued=2)
    for i in range(2):
        engine.add_request(request(str(i), [1]))
    with pytest.raises(OverloadedError, match="limit is 2"):
        engine.add_request(request("2", [1]))
    engine.step()
    engine.add_request(request("2", [1]))


@pytest.mark.parametrize(
    ("field", "make"),
    [
        ("prompt", lambda: request("a", [])),
        ("prompt", lambda: request("a", [96])),
        ("prompt", lambda: request("a", [-1])),
        ("n", lambda: request("a", [1], n=9)),
        ("logit_bias", lambda: request("a", [1], logit_bias={191222: -100.0})),
        ("logit_bias", lambda: request("a", [1], logit_bias={-1: 5.0})),
        ("stop_token_ids", lambda: request("a", [1], stop_token_ids=[96])),
        ("allowed_token_ids", lambda: request("a", [1], allowed_token_ids=[500])),
        ("bad_words", lambda: request("a", [1], bad_words_token_ids=[[1, 96]])),
        ("logprobs", lambda: request("a", [1], logprobs=97)),
    ],
)
def test_wrong_fields_are_refused_by_name_and_leave_nothing(field: str, make: Callable) -> None:
    engine = make_engine()
    with pytest.raises(ParameterError) as caught:
        engine.add_request(make())
    assert caught.value.field == field
    assert not engine.has_work()


def test_an_id_in_use_is_refused_and_free_again_after_the_end() -> None:
    engine = make_engine()
    engine.add_request(request("a", [1], max_tokens=2))
    with pytest.raises(ParameterError, match="running already"):
        engine.add_request(request("a", [1]))
    run(engine)
    assert len(run(engine, [request("a", [1], max_tokens=2)]).of("a")) == 2


# starvation -----------------------------------------------------------------------------------------------------------


def test_decodes_do_not_stall_behind_a_long_prompt() -> None:
    engine = make_engine(max_num_batched_tokens=8)
    engine.add_request(request("chat", [1, 2], max_tokens=30))
    engine.step()
    engine.add_request(request("long", [3] * 90, max_tokens=2))
    for _ in range(10):
        names = [o.request_id for o in engine.step()]
        assert "chat" in names


def test_a_low_priority_is_served_in_the_end_under_endless_load(monkeypatch: pytest.MonkeyPatch) -> None:
    from qiao.engine import waiting

    monkeypatch.setattr(waiting, "MAX_WAIT_STEPS", 60)
    engine = make_engine(max_num_seqs=1, scheduling_policy="priority")
    engine.add_request(request("low", [1, 2, 3], max_tokens=4, priority=10))
    done = False
    for step in range(200):
        engine.add_request(request(f"high{step}", [4], max_tokens=2, priority=0))
        done = done or any(o.request_id == "low" and o.finish_reason for o in engine.step())
    assert done


def test_later_arrivals_do_not_delay_a_preempted_request(solo: Solo) -> None:
    def steps_until_all_end(stream: bool) -> int:
        engine = make_engine(num_blocks=9, max_num_seqs=4)
        results = Results()
        for i in range(4):
            engine.add_request(request(str(i), [i] * 8, max_tokens=16))
        for step in range(200):
            if stream and step % 2 == 0:
                engine.add_request(request(f"late{step}", [9, 8, 7], max_tokens=3))
            results.add(engine.step())
            if all((str(i), 0) in results.reasons for i in range(4)):
                assert engine.stats().preemptions > 0
                assert all(results.of(str(i)) == solo([i] * 8, 16) for i in range(4))
                return step
        raise AssertionError("starved")

    assert steps_until_all_end(stream=True) <= steps_until_all_end(stream=False) + 5


# n > 1 ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("length", [3, 8, 9])
def test_n_computes_the_prompt_once_and_shares_its_blocks(caching: bool, length: int, solo: Solo) -> None:
    engine = make_engine(enable_prefix_caching=caching)
    engine.add_request(request("a", [5] * length, n=4, max_tokens=9))
    results = Results()
    results.add(engine.step())
    full, rest = divmod(length, 4)
    assert engine.stats().kv_blocks_used == full + (4 if rest else 0)
    assert engine._runner.model.steps == [(length,)]
    while engine.has_work():
        results.add(engine.step())
        engine.check_integrity()
    assert all(results.of("a", i) == solo([5] * length, 9) for i in range(4))


def test_n_differs_by_seed_plus_index() -> None:
    together = run(make_engine(), [request("a", [5, 6], n=3, max_tokens=10, temperature=1.0, seed=40)])
    answers = [together.of("a", i) for i in range(3)]
    assert len({tuple(a) for a in answers}) == 3
    for i in range(3):
        single = run(make_engine(), [request("b", [5, 6], max_tokens=10, temperature=1.0, seed=40 + i)])
        assert single.of("b") == answers[i]


def test_n_counts_as_sequences() -> None:
    engine = make_engine(max_num_seqs=4)
    engine.add_request(request("a", [1], n=3))
    engine.add_request(request("b", [2], n=2))
    engine.step()
    assert (engine.stats().running, engine.stats().waiting) == (3, 1)


@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize("after", [0, 1, 2, 3])
def test_one_answer_of_several_can_be_aborted(index: int, after: int, solo: Solo) -> None:
    engine = make_engine(max_num_batched_tokens=4)
    engine.add_request(request("a", [5] * 9, n=3, max_tokens=5))
    results = Results()
    for _ in range(after):
        results.add(engine.step())
    engine.abort(["a"], index=index)
    engine.check_integrity()
    while engine.has_work():
        results.add(engine.step())
        engine.check_integrity()
    assert set(results.reasons) == {("a", i) for i in range(3) if i != index}
    assert all(results.of("a", i) == solo([5] * 9, 5) for i in range(3) if i != index)


def test_a_sibling_without_a_block_computes_the_prompt_itself(solo: Solo) -> None:
    engine = make_engine(num_blocks=3, max_model_len=12)
    results = run(engine, [request("a", [5] * 9, n=3, max_tokens=3)])
    assert all(results.of("a", i) == solo([5] * 9, 3) for i in range(3))


# prefix cache ---------------------------------------------------------------------------------------------------------


def test_tenants_do_not_share() -> None:
    engine = make_engine()
    for salt, hits in (("a", 0), ("b", 0), ("a", 8)):
        out = run(engine, [request("x", [5] * 9, salt=salt)]).outputs[0]
        assert out.num_cached_tokens == hits


def test_generated_tokens_are_found_again(solo: Solo) -> None:
    engine = make_engine()
    answer = run(engine, [request("a", [5] * 4, max_tokens=8)]).of("a")
    prompt = [5] * 4 + answer + [1]
    results = run(engine, [request("b", prompt, max_tokens=4)])
    assert results.outputs[0].num_cached_tokens == 8
    assert results.of("b") == solo(prompt, 4)
    engine.reset_prefix_cache()
    engine.check_integrity()
    assert run(engine, [request("c", prompt, max_tokens=4)]).outputs[0].num_cached_tokens == 0


def test_without_chunked_prefill_prompts_run_whole(solo: Solo) -> None:
    engine = make_engine(
        enable_chunked_prefill=False, enable_prefix_caching=False, max_model_len=40, max_num_batched_tokens=40
    )
    prompts = [[i] * 25 for i in range(4)]
    results = run(engine, [request(str(i), p, max_tokens=3) for i, p in enumerate(prompts)])
    assert all(results.of(str(i)) == solo(p, 3) for i, p in enumerate(prompts))
    model: TinyModel = engine._runner.model
    assert {n for step in model.steps for n in step} == {1, 25}


def test_without_chunked_prefill_the_chunk_threshold_has_no_effect(solo: Solo) -> None:
    engine = make_engine(enable_chunked_prefill=False, max_num_batched_tokens=128, long_prefill_token_threshold=4)
    prompts = {"a": [5] * 19, "b": [6, 7]}
    results = run(engine, [request(name, prompt) for name, prompt in prompts.items()])
    assert all(results.of(name) == solo(prompt, 8) for name, prompt in prompts.items())


def test_stats_and_times() -> None:
    engine = make_engine()
    results = run(engine, [request("a", [1, 2, 3], max_tokens=4)])
    stats = engine.stats()
    assert (stats.prompt_tokens, stats.generation_tokens, stats.steps, stats.last_step_tokens) == (3, 4, 4, 1)
    assert (stats.step_sizes.sum, stats.step_sizes.counts[:3], sum(stats.step_sizes.counts)) == (6, [3, 1, 0], 4)
    assert stats.kv_blocks_total == 64 and stats.prefix_queries == 3
    run(engine, [request("b", [1], max_tokens=1)])
    assert stats.steps == 4, "a snapshot does not move"
    first, *rest = results.outputs
    assert first.scheduled is not None and first.first_token >= first.scheduled
    assert all(o.scheduled is None and o.first_token is None for o in rest)


def test_utilization_and_fallbacks_are_passed_on() -> None:
    from qiao.engine import Engine
    from qiao.engine.request import FallbackCount

    base = make_engine()
    ops = make_ops(utilization=lambda device: 0.25)
    engine = Engine(TinyModel(ops), ops, base.config, lambda: [FallbackCount("sample", calls=2)])
    assert engine.stats().utilization == 0.25
    assert engine.stats().fallbacks == [FallbackCount("sample", calls=2)]
