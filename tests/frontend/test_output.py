import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from qiao import SamplingParams
from qiao.engine.request import EngineRequest, SequenceOutput, TokenLogprobs
from qiao.frontend import OutputProcessor, TokenTable
from qiao.outputs import Logprob
from qiao.sampling_params import RequestOutputKind


def request(prompt: list[int] | None = None, **params: Any) -> EngineRequest:
    return EngineRequest(
        request_id="r",
        prompt_token_ids=prompt or [120],
        params=SamplingParams(**params),
        arrival=1.0,
        eos_token_ids=[257, 259],
    )


def feed(
    processor: OutputProcessor, ids: list[int], step: int = 1, finish: str = "length", index: int = 0
) -> list[str]:
    """Send ids in steps; returns the text of each delta."""
    texts = []
    chunks = [ids[i : i + step] for i in range(0, len(ids), step)] or [[]]
    for i, chunk in enumerate(chunks):
        logprobs = [TokenLogprobs([t, 1, 2], [-0.5, -1.0, -math.inf], 3) for t in chunk]
        output = SequenceOutput(
            request_id="r",
            index=index,
            token_ids=chunk,
            logprobs=logprobs if processor.request.params.logprobs is not None else None,
            finish_reason=finish if i == len(chunks) - 1 else None,
        )
        processor.add(output)
        texts += [delta.text for delta in processor.deltas]
        if processor.finished:
            break
    return texts


def test_stop_string_ends_text_tokens_and_logprobs_together(table: TokenTable) -> None:
    processor = OutputProcessor(request(stop=["STOP"], logprobs=1), None, table)
    texts = feed(processor, list(b"abSTOPc"))
    answer = processor.result.outputs[0]
    assert texts == ["a", "b", "", "", "", ""]
    assert (answer.text, answer.finish_reason, answer.stop_reason) == ("ab", "stop", "STOP")
    assert answer.token_ids == list(b"abSTOP")
    assert answer.logprobs is not None
    assert len(answer.logprobs) == 6
    labels = [entry[token].decoded_token for token, entry in zip(answer.token_ids, answer.logprobs, strict=True)]
    assert "".join(str(label) for label in labels).startswith(answer.text)
    assert answer.cumulative_logprob == pytest.approx(-3.0)
    assert processor.finished
    assert processor.to_abort == [0]
    assert processor.stopped


@pytest.mark.parametrize("step", [1, 2, 3, 7])
@pytest.mark.parametrize("include", [False, True])
def test_steps_of_several_tokens_end_at_the_same_place(table: TokenTable, step: int, include: bool) -> None:
    params = {"stop": ["STOP"], "include_stop_str_in_output": include, "logprobs": 0}
    processor = OutputProcessor(request(**params), None, table)
    joined = "".join(feed(processor, list(b"abSTOPc"), step))
    answer = processor.result.outputs[0]
    assert joined == answer.text == ("abSTOP" if include else "ab")
    assert answer.token_ids == list(b"abSTOP")
    assert answer.logprobs is not None
    assert len(answer.logprobs) == 6


def test_held_back_text_is_shown_when_the_run_ends(table: TokenTable) -> None:
    processor = OutputProcessor(request(stop=["DEFZ"]), None, table)
    assert feed(processor, list(b"xDEF")) == ["x", "", "", "DEF"]
    assert processor.result.outputs[0].finish_reason == "length"
    assert processor.to_abort == []
    assert not processor.stopped


@pytest.mark.parametrize(("minimum", "expected"), [(0, 2), (2, 2), (3, 4), (6, 6), (7, 8)])
def test_stop_strings_count_from_min_tokens_on(table: TokenTable, minimum: int, expected: int) -> None:
    processor = OutputProcessor(request(stop=["\n"], min_tokens=minimum, max_tokens=12), None, table)
    feed(processor, list(b"a\n" * 6))
    answer = processor.result.outputs[0]
    assert len(answer.token_ids) == expected
    assert answer.text == ("a\n" * 6)[: expected - 1]


@pytest.mark.parametrize(("token", "shown"), [(257, ""), (259, ""), (300, "")])
@pytest.mark.parametrize("skip", [True, False])
def test_the_token_that_stopped_is_kept_but_its_text_is_not(
    table: TokenTable, token: int, shown: str, skip: bool
) -> None:
    processor = OutputProcessor(request(skip_special_tokens=skip, stop_token_ids=[300]), None, table)
    reason = token if token == 300 else None
    processor.add(SequenceOutput(request_id="r", token_ids=[97]))
    processor.add(SequenceOutput(request_id="r", token_ids=[token], finish_reason="stop", stop_reason=reason))
    answer = processor.result.outputs[0]
    assert (answer.text, answer.token_ids, answer.stop_reason) == ("a" + shown, [97, token], reason)


def test_ignored_end_tokens_and_included_stop_tokens_are_shown(table: TokenTable) -> None:
    ignoring = OutputProcessor(request(ignore_eos=True, skip_special_tokens=False), None, table)
    feed(ignoring, [97, 257, 98])
    assert ignoring.result.outputs[0].text == "a</s>b"
    including = OutputProcessor(request(include_stop_str_in_output=True, stop_token_ids=[300]), None, table)
    including.add(SequenceOutput(request_id="r", token_ids=[97, 300], finish_reason="stop", stop_reason=300))
    assert including.result.outputs[0].text == "ahello"


def test_answers_of_one_request_end_one_by_one(table: TokenTable) -> None:
    processor = OutputProcessor(request(n=2, stop=["b"]), None, table)
    feed(processor, list(b"ab"), index=1, finish="length")
    assert not processor.finished
    assert not processor.stopped
    feed(processor, list(b"cde"), index=0)
    assert [a.text for a in processor.result.outputs] == ["cde", "a"]
    assert [a.index for a in processor.result.outputs] == [0, 1]
    assert processor.usage.completion_tokens == 5
    assert (processor.usage.prompt_tokens, processor.usage.total_tokens) == (1, 6)


def test_one_of_two_answers_is_aborted_by_its_index(table: TokenTable) -> None:
    processor = OutputProcessor(request(n=2, stop=["b"]), None, table)
    processor.add(SequenceOutput(request_id="r", index=1, token_ids=list(b"ab")))
    assert processor.to_abort == [1]
    processor.add(SequenceOutput(request_id="r", index=1, token_ids=list(b"zz")))
    assert processor.deltas == []
    assert processor.to_abort == []
    assert processor.result.outputs[1].text == "a"


def test_logprobs_hold_the_sampled_token_first_and_ranks(table: TokenTable) -> None:
    processor = OutputProcessor(request(logprobs=2), None, table)
    entry = TokenLogprobs([97, 98, 310], [-2.0, -0.1, -math.inf], 3)
    processor.add(SequenceOutput(request_id="r", token_ids=[97], logprobs=[entry], finish_reason="length"))
    logprobs = processor.result.outputs[0].logprobs
    assert logprobs is not None
    assert list(logprobs[0].items()) == [
        (97, Logprob(-2.0, 3, "a")),
        (98, Logprob(-0.1, 1, "b")),
        (310, Logprob(-math.inf, 2, "token_id:310")),
    ]


def test_a_sampled_token_among_the_best_is_listed_once(table: TokenTable) -> None:
    processor = OutputProcessor(request(logprobs=2), None, table)
    entry = TokenLogprobs([97, 97, 98], [-0.1, -0.1, -2.0], 1)
    processor.add(SequenceOutput(request_id="r", token_ids=[97], logprobs=[entry], finish_reason="length"))
    logprobs = processor.result.outputs[0].logprobs
    assert logprobs is not None
    assert logprobs[0] == {97: Logprob(-0.1, 1, "a"), 98: Logprob(-2.0, 2, "b")}


def test_prompt_logprobs_cached_tokens_and_times(table: TokenTable) -> None:
    processor = OutputProcessor(request([120, 121], prompt_logprobs=0), "xy", table)
    first = SequenceOutput(
        request_id="r",
        token_ids=[97],
        prompt_logprobs=[None, TokenLogprobs([121], [-1.0], 5)],
        num_cached_tokens=1,
        scheduled=2.0,
        first_token=3.0,
    )
    processor.add(first)
    processor.add(SequenceOutput(request_id="r", token_ids=[98], finish_reason="length"))
    result = processor.result
    assert result.prompt == "xy"
    assert result.prompt_logprobs == [None, {121: Logprob(-1.0, 5, "y")}]
    assert result.num_cached_tokens == processor.usage.cached_tokens == 1
    assert result.metrics is not None
    assert result.metrics.time_in_queue == 1.0
    assert result.metrics.first_token_time == 3.0
    assert result.metrics.finished_time is not None


def test_without_detokenizing_there_is_no_text(table: TokenTable) -> None:
    processor = OutputProcessor(request(detokenize=False), None, table)
    feed(processor, list(b"abc"))
    assert (processor.result.outputs[0].text, processor.result.outputs[0].token_ids) == ("", list(b"abc"))


def test_no_tokens_at_all(table: TokenTable) -> None:
    processor = OutputProcessor(request(max_tokens=0, logprobs=1), None, table)
    feed(processor, [])
    answer = processor.result.outputs[0]
    assert (answer.text, answer.token_ids, answer.logprobs, answer.finish_reason) == ("", [], [], "length")


def test_errors_and_aborts(table: TokenTable) -> None:
    failed = OutputProcessor(request(), None, table)
    failed.add(SequenceOutput(request_id="r", finish_reason="error", error="sample: boom"))
    assert (failed.result.error, failed.result.outputs[0].finish_reason) == ("sample: boom", "error")
    aborted = OutputProcessor(request(stop=["yz"], n=2), None, table)
    aborted.add(SequenceOutput(request_id="r", token_ids=list(b"xy")))
    aborted.abort()
    assert [a.finish_reason for a in aborted.result.outputs] == ["abort", "abort"]
    assert aborted.result.outputs[0].text == "xy"
    assert aborted.finished


def test_offsets_are_characters_before_each_token(table: TokenTable) -> None:
    processor = OutputProcessor(request(logprobs=0), None, table)
    offsets: list[int] = []
    for token in "aé€b".encode():
        processor.add(SequenceOutput(request_id="r", token_ids=[token]))
        offsets += processor.deltas[0].offsets
    assert offsets == [0, 1, 1, 2, 2, 2, 3]


@settings(derandomize=True, max_examples=100, deadline=None)
@given(
    text=st.text(st.sampled_from("abSTOP é漢😀"), max_size=12),
    stops=st.lists(st.sampled_from(["STOP", "TO", "a", "é", "漢😀"]), max_size=2),
    step=st.integers(1, 4),
)
def test_deltas_join_to_the_cumulative_result(text: str, stops: list[str], step: int, table: TokenTable) -> None:
    processor = OutputProcessor(request(stop=stops or None, logprobs=0), None, table)
    output: list[int] = []
    joined = ""
    for chunk_start in range(0, max(1, len(text.encode())), step):
        ids = list(text.encode())[chunk_start : chunk_start + step]
        last = chunk_start + step >= len(text.encode())
        logprobs = [TokenLogprobs([t], [-1.0], 1) for t in ids]
        reason = "length" if last else None
        processor.add(SequenceOutput(request_id="r", token_ids=ids, logprobs=logprobs, finish_reason=reason))
        snapshot = processor.snapshot(RequestOutputKind.DELTA)
        assert snapshot is not None
        for answer in snapshot.outputs:
            joined += answer.text
            output += answer.token_ids
        if processor.finished:
            break
    answer = processor.result.outputs[0]
    assert (joined, output) == (answer.text, answer.token_ids)
    assert answer.logprobs is not None
    assert len(answer.logprobs) == len(output)
    first = min((text.find(stop) + len(stop) for stop in stops if stop in text), default=None)
    assert (answer.finish_reason == "stop") == (first is not None)
    if first is None:
        assert joined == text


def test_snapshots_do_not_change_later(table: TokenTable) -> None:
    processor = OutputProcessor(request(), None, table)
    processor.add(SequenceOutput(request_id="r", token_ids=[97]))
    assert processor.snapshot(RequestOutputKind.FINAL_ONLY) is None
    before = processor.snapshot(RequestOutputKind.CUMULATIVE)
    processor.add(SequenceOutput(request_id="r", token_ids=[98], finish_reason="length"))
    after = processor.snapshot(RequestOutputKind.FINAL_ONLY)
    assert before is not None
    assert after is not None
    assert (before.outputs[0].text, before.outputs[0].token_ids, before.finished) == ("a", [97], False)
    assert (after.outputs[0].text, after.finished) == ("ab", True)
