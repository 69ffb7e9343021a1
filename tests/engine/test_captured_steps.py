"""Decode steps that go on from the last one give what steps built anew give, whatever happens in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from qiao.engine.batch import Batch
from qiao.engine.request import SequenceOutput

from tests.support.engine import make_engine, make_ops, request, run


def capture(function: Callable[..., Any], example: tuple[Any, ...], device: str) -> Callable[[], Any]:
    """What a device records: the same buffers are read again, and the same results are filled again."""
    kept = function(*example)

    def replay() -> Any:
        for old, new in zip(kept, function(*example), strict=True):
            if old is not None:
                old.copy_(new)
        return kept

    return replay


def captured_engine(sizes: tuple[int, ...] = (), **config: Any) -> Any:
    return make_engine(ops=make_ops(capture=capture, capture_sizes=sizes), **config)


REQUESTS = st.lists(
    st.fixed_dictionaries(
        {
            "prompt": st.sampled_from([[5] * 7, [5] * 12 + [6], [7, 8, 9], [11]]),
            "at": st.integers(0, 8),
            "abort_at": st.sampled_from([None, None, None, 2, 9]),
            "n": st.sampled_from([1, 1, 2]),
            "priority": st.integers(-1, 1),
            "max_tokens": st.integers(1, 16),
            "eos": st.sampled_from([(), (31, 40, 7, 8, 9)]),
            "temperature": st.sampled_from([0.0, 0.0, 0.9]),
            "seed": st.integers(0, 3),
            "frequency_penalty": st.sampled_from([0.0, 0.0, 0.5]),
            "logprobs": st.sampled_from([None, None, 2]),
            "prompt_logprobs": st.sampled_from([None, None, 1]),
            "logit_bias": st.sampled_from([None, None, {3: 5.0}]),
        }
    ),
    min_size=1,
    max_size=5,
)
CONFIGS = st.fixed_dictionaries(
    {
        "num_blocks": st.sampled_from([9, 13, 40]),
        "block_size": st.sampled_from([4, 8]),
        "max_num_seqs": st.sampled_from([3, 8]),
        "max_num_batched_tokens": st.sampled_from([3, 16, 64]),
        "enable_prefix_caching": st.booleans(),
        "scheduling_policy": st.sampled_from(["fcfs", "priority"]),
    }
)


def served(engine: Any, items: list[dict[str, Any]]) -> list[list[SequenceOutput]]:
    """The outputs of each step, without times, while requests come and are aborted."""
    steps: list[list[SequenceOutput]] = []
    later = dict(enumerate(items))
    while later or engine.has_work():
        for i, item in list(later.items()):
            if item["at"] <= len(steps):
                del later[i]
                params = {k: v for k, v in item.items() if k not in ("at", "abort_at", "prompt", "temperature")}
                engine.add_request(request(str(i), item["prompt"], temperature=item["temperature"], **params))
        for i, item in enumerate(items):
            if item["abort_at"] is not None and item["at"] + item["abort_at"] == len(steps):
                engine.abort([str(i)])
        outputs = engine.step()
        for output in outputs:
            output.scheduled = output.first_token = None
        steps.append(outputs)
        assert len(steps) < 500
    return steps


@settings(derandomize=True, max_examples=60, deadline=None)
@given(items=REQUESTS, config=CONFIGS)
def test_every_output_is_the_one_of_steps_built_anew(items: list[dict[str, Any]], config: dict[str, Any]) -> None:
    """Bit for bit: tokens, log-probabilities, ends, and the step in which each comes."""
    engine = captured_engine(**config)
    assert served(engine, items) == served(make_engine(enforce_eager=True, **config), items)


@settings(derandomize=True, max_examples=20, deadline=None)
@given(items=REQUESTS, config=CONFIGS)
def test_steps_filled_up_to_a_larger_program(items: list[dict[str, Any]], config: dict[str, Any]) -> None:
    """Sums over more rows may differ in the last bit; tokens do not here."""
    found = served(captured_engine((1, 4), **config), items)
    plain = served(make_engine(enforce_eager=True, **config), items)

    def tokens(steps: list[list[SequenceOutput]]) -> Any:
        return [[(o.request_id, o.index, o.token_ids, o.finish_reason) for o in step] for step in steps]

    assert tokens(found) == tokens(plain)


def count_goings_on(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each decode step after a captured one whether it went on from it."""
    seen: list[bool] = []
    plain = Batch.goes_on
    monkeypatch.setattr(Batch, "goes_on", lambda batch, step: seen.append(plain(batch, step)) or seen[-1])
    return seen


def test_a_step_goes_on_until_a_block_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = count_goings_on(monkeypatch)
    run(captured_engine(block_size=4), [request("a", [1, 2, 3], max_tokens=11)])
    # Positions 3 | 4 5 6 7 | 8 9 10 11 | 12 are computed by ten decode steps; the first in a block is built anew.
    assert seen == [False, True, True, True, False, True, True, True, False]


def test_a_step_beside_a_prompt_is_not_gone_on_from() -> None:
    """The same sequence alone before and after a step that no program ran."""
    item = {"prompt": [1, 2], "at": 0, "abort_at": None, "max_tokens": 12, "temperature": 0.0}
    items = [item, item | {"prompt": [9, 8, 7], "at": 4, "max_tokens": 1}]
    found = served(captured_engine(block_size=16), items)
    assert [len(step) for step in found] == [1, 1, 1, 1, 2] + [1] * 7
    assert found == served(make_engine(enforce_eager=True, block_size=16), items)


def test_a_failed_step_is_not_gone_on_from() -> None:
    """What ran before the failure has changed the buffers."""
    fails = {"now": False}
    plain = make_ops()

    def sample(logits: torch.Tensor, params: Any) -> torch.Tensor:
        if fails["now"]:
            raise RuntimeError("broken")
        return plain.sample(logits, params)

    engine = make_engine(ops=make_ops(capture=capture, sample=sample), block_size=16)
    results: dict[str, list[int]] = {"a": [], "b": []}
    engine.add_request(request("a", [1, 2], max_tokens=9))
    for step in range(30):
        fails["now"] = step == 4
        if step == 6:
            engine.add_request(request("b", [1, 2], max_tokens=9))
        for output in engine.step():
            results[output.request_id] += output.token_ids
            assert (output.error is not None) == (step == 4)
    assert len(results["a"]) == 4 and len(results["b"]) == 9
    assert results["b"][:4] == results["a"]
    assert results["b"] == run(make_engine(enforce_eager=True), [request("x", [1, 2], max_tokens=9)]).of("x")
