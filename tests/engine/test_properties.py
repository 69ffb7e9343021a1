"""Greedy output is the same alone, in any batch, with or without a hit, however chunked, and after preemption."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.engine import Results, make_engine, request, run

Solo = Callable[[Sequence[int], int], list[int]]

PREFIXES = ([], [5] * 4, [5] * 8, [5] * 12 + [6], [7, 8, 9, 10, 11, 12, 13, 14])

requests = st.lists(
    st.fixed_dictionaries(
        {
            "prefix": st.sampled_from(PREFIXES),
            "tail": st.lists(st.integers(0, 90), min_size=1, max_size=7),
            "n": st.sampled_from([1, 1, 1, 2, 3]),
            "max_tokens": st.integers(1, 14),
            "priority": st.integers(-2, 2),
            "salt": st.sampled_from(["", "tenant"]),
            "at": st.integers(0, 12),
            "abort_at": st.sampled_from([None, None, None, 3, 9]),
        }
    ),
    min_size=1,
    max_size=6,
)

configs = st.fixed_dictionaries(
    {
        "num_blocks": st.sampled_from([9, 11, 16, 40]),
        "max_num_seqs": st.sampled_from([3, 4, 8]),
        "max_num_batched_tokens": st.sampled_from([1, 3, 7, 16, 64]),
        "long_prefill_token_threshold": st.sampled_from([0, 5]),
        "tpot_target": st.sampled_from([None, 1e-9, 0.01]),
        "enable_prefix_caching": st.booleans(),
        "scheduling_policy": st.sampled_from(["fcfs", "priority"]),
    }
)


@settings(derandomize=True, max_examples=60, deadline=None)
@given(items=requests, config=configs)
def test_greedy_output_does_not_depend_on_company(solo: Solo, items: list[dict], config: dict) -> None:
    engine = make_engine(**config)
    results, aborted, step = Results(), set(), 0
    pending = {str(i): item for i, item in enumerate(items)}
    while pending or engine.has_work():
        for name, item in list(pending.items()):
            if item["at"] <= step:
                del pending[name]
                engine.add_request(
                    request(
                        name,
                        item["prefix"] + item["tail"],
                        n=item["n"],
                        max_tokens=item["max_tokens"],
                        priority=item["priority"],
                        salt=item["salt"],
                    )
                )
        for i, item in enumerate(items):
            if item["abort_at"] is not None and item["at"] + item["abort_at"] == step:
                engine.abort([str(i)])
                aborted.add(str(i))
                engine.check_integrity()
        outputs = engine.step()
        assert not aborted & {o.request_id for o in outputs}
        results.add(outputs)
        engine.check_integrity()
        step += 1
        assert step < 1000
    assert engine.stats().kv_blocks_used == 0
    for i, item in enumerate(items):
        for index in range(item["n"]):
            expected = solo(item["prefix"] + item["tail"], item["max_tokens"])
            got = results.tokens.get((str(i), index), [])
            if str(i) in aborted:
                assert got == expected[: len(got)]
            else:
                assert got == expected
                assert results.reasons[str(i), index] == "length"


def test_the_property_covers_hits_preemption_and_chunks(solo: Solo) -> None:
    """The conditions of the property do occur: one run that has all of them."""
    engine = make_engine(num_blocks=12, max_num_batched_tokens=7)
    results = Results()
    prompts = [[5] * 12 + [i] for i in range(4)]
    engine.add_request(request("first", prompts[0], max_tokens=3))
    while engine.has_work():
        results.add(engine.step())
    for i, prompt in enumerate(prompts):
        engine.add_request(request(str(i), prompt, max_tokens=20))
    while engine.has_work():
        results.add(engine.step())
    stats = engine.stats()
    assert stats.prefix_hits > 0 and stats.preemptions > 0
    for i, prompt in enumerate(prompts):
        assert results.of(str(i)) == solo(prompt, 20)


sampled = st.lists(
    st.fixed_dictionaries(
        {
            "temperature": st.sampled_from([0.0, 0.7, 1.5]),
            "top_k": st.sampled_from([0, 1, 5, 1000]),
            "top_p": st.sampled_from([1.0, 0.8]),
            "min_p": st.sampled_from([0.0, 0.1]),
            "seed": st.integers(-(2**63), 2**63 - 1).filter(lambda s: s != -1),
            "frequency_penalty": st.sampled_from([0.0, 0.5]),
            "repetition_penalty": st.sampled_from([1.0, 1.3]),
            "logit_bias": st.sampled_from([None, {3: 5.0}]),
            "min_tokens": st.sampled_from([0, 4]),
            "logprobs": st.sampled_from([None, 0, 3]),
            "n": st.sampled_from([1, 2]),
        }
    ),
    min_size=2,
    max_size=5,
)


@settings(derandomize=True, max_examples=25, deadline=None)
@given(items=sampled, budget=st.sampled_from([2, 9, 64]), caching=st.booleans())
def test_seeded_sampling_does_not_depend_on_company(items: list[dict], budget: int, caching: bool) -> None:
    """With all logit changes, through preemption: the same tokens as alone on a large cache."""
    made = [request(str(i), [i, 5, 5, 5, i], max_tokens=12, eos=[31], **item) for i, item in enumerate(items)]
    together = run(make_engine(num_blocks=9, max_num_batched_tokens=budget, enable_prefix_caching=caching), made)
    for item in made:
        alone = run(make_engine(), [item])
        for key, tokens in alone.tokens.items():
            assert together.tokens[key] == tokens
            assert together.reasons[key] == alone.reasons[key]
