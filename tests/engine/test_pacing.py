"""Chunks that keep the pace of running answers, against simulated machines of known speed."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from qiao.config import EngineArgs
from qiao.engine import Engine
from qiao.engine.pacing import MIN_CHUNK, Pacer
from qiao.errors import ParameterError

from tests.support.engine import LAYERS, make_engine, make_ops, request, run
from tests.support.engine import attention as plain_attention

MOST = 2048


@dataclass
class Machine:
    """``fixed + per_decode * decodes + per_prompt * prompt_tokens`` seconds a step."""

    fixed: float
    per_decode: float
    per_prompt: float

    def seconds(self, decodes: int, prompt_tokens: int) -> float:
        return self.fixed + self.per_decode * decodes + self.per_prompt * prompt_tokens

    def drive(self, pacer: Pacer, decodes: int, steps: int, prompts: bool = True) -> None:
        for step in range(steps):
            tokens = pacer.chunk(decodes, MOST - decodes) if prompts and step % 2 else 0
            pacer.observe(decodes, tokens, self.seconds(decodes, tokens))


machines = st.builds(Machine, st.floats(1e-4, 0.02), st.floats(0, 1e-3), st.floats(1e-5, 2e-3))
targets = st.floats(0.005, 0.5)


def assert_paced(pacer: Pacer, machine: Machine, decodes: int, target: float) -> None:
    chunk = pacer.chunk(decodes, MOST - decodes)
    assert MIN_CHUNK <= chunk <= MOST - decodes
    seconds = machine.seconds(decodes, chunk)
    if chunk > MIN_CHUNK:
        assert seconds <= 1.15 * target
    if chunk < MOST - decodes and seconds < 0.85 * target:
        pytest.fail(f"{chunk} tokens take {seconds}, and the target is {target}")


@settings(derandomize=True, deadline=None)
@given(machines, targets, st.integers(1, 256))
def test_a_step_takes_about_the_target(machine: Machine, target: float, decodes: int) -> None:
    pacer = Pacer(target)
    machine.drive(pacer, decodes, 120)
    assert_paced(pacer, machine, decodes, target)


@settings(derandomize=True, deadline=None)
@given(machines, targets, st.lists(st.integers(1, 256), min_size=2, max_size=6))
def test_other_numbers_of_decodes_are_foreseen(machine: Machine, target: float, counts: list[int]) -> None:
    """The last number has no step of its own before it is asked for."""
    pacer = Pacer(target)
    assume(max(counts) - min(counts) > 20)
    for _ in range(30):
        for decodes in counts:
            machine.drive(pacer, decodes, 2)
    assert_paced(pacer, machine, (min(counts) + max(counts)) // 2, target)


@settings(derandomize=True, deadline=None)
@given(machines, machines, targets, st.integers(1, 64), st.booleans())
def test_a_change_of_speed_is_learned(before: Machine, after: Machine, target: float, decodes: int, pure: bool) -> None:
    """Also where prompts never cease, so that no step shows what decodes alone take."""
    pacer = Pacer(target)
    before.drive(pacer, decodes, 60)
    if pure:
        after.drive(pacer, decodes, 240)
        assert_paced(pacer, after, decodes, target)
        return
    for _ in range(240):
        tokens = pacer.chunk(decodes, MOST - decodes)
        pacer.observe(decodes, tokens, after.seconds(decodes, tokens))
    assert_paced(pacer, after, decodes, target)


@settings(derandomize=True, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 300),
            st.integers(0, 4096),
            st.one_of(st.just(0.0), st.floats(allow_nan=True, allow_infinity=True)),
        )
    ),
    st.floats(1e-9, 1e9),
    st.integers(0, 300),
    st.integers(0, 4096),
)
def test_whatever_was_measured_a_chunk_is_within_its_bounds(
    seen: list[tuple[int, int, float]], target: float, decodes: int, most: int
) -> None:
    pacer = Pacer(target)
    for entry in seen:
        pacer.observe(*entry)
    chunk = pacer.chunk(decodes, most)
    assert min(MIN_CHUNK, most) <= chunk <= most
    assert chunk == pacer.allowed
    assert decodes or chunk == most


def test_an_outlier_moves_the_pace_little() -> None:
    machine = Machine(0.004, 0.0, 1e-4)
    pacer = Pacer(0.02)
    machine.drive(pacer, 8, 80)
    usual = pacer.chunk(8, MOST)
    pacer.observe(8, 0, 5.0)
    assert pacer.chunk(8, MOST) >= 0.9 * usual


def test_a_long_prompt_leaves_running_answers_their_pace_and_changes_no_token() -> None:
    """The engine on a simulated clock that attention advances; the prompt alone would take 40 times the target."""
    now = 0.0

    def attention(query, cache, metadata, *rest):
        nonlocal now
        now += 0.0005 + 1e-4 * sum(n for n in metadata.query_lens if n > 1)
        return plain_attention(query, cache, metadata, *rest)

    config = {"num_blocks": 250, "max_model_len": 512, "max_num_batched_tokens": 500}
    long = [i % 90 for i in range(450)]
    made = [request("short", [1, 2, 3], max_tokens=60), request("long", long, max_tokens=3)]
    engine = make_engine(ops=make_ops(attention=attention), clock=lambda: now, tpot_target=0.01, **config)
    engine.add_request(made[0])
    for _ in range(10):
        engine.step()
    engine.add_request(made[1])
    tokens: dict[str, list[int]] = {"short": [], "long": []}
    times: list[float] = []
    while engine.has_work():
        began = now
        outputs = engine.step()
        times.append(now - began)
        for output in outputs:
            tokens[output.request_id] += output.token_ids
    assert engine.stats().prompt_budget is not None
    assert len(tokens["long"]) == 3
    assert max(times[3:]) <= 0.0115
    assert sum(t > 0.0085 for t in times) >= 5, "the target was used"
    plain = run(make_engine(**config), made)
    assert tokens["long"] == plain.of("long")
    assert tokens["short"] == plain.of("short")[10:]


def loaded(target: float | None) -> tuple[list[float], float, dict[str, list[int]], Engine]:
    """Five running answers, and a long prompt every 50 ms: seconds of steps with answers, of all, and the tokens.

    A prompt token takes 0.1 ms on the simulated clock, so prompts alone are four fifths of the machine's work.
    """
    now = 0.0

    def attention(query, cache, metadata, *rest):
        nonlocal now
        prompt = sum(n for n in metadata.query_lens if n > 1)
        now += (0.002 + 2e-4 * (len(metadata.query_lens)) + 1e-4 * prompt) / LAYERS
        return plain_attention(query, cache, metadata, *rest)

    config = {"num_blocks": 600, "max_model_len": 512, "max_num_batched_tokens": 500, "max_num_seqs": 32}
    engine = make_engine(ops=make_ops(attention=attention), clock=lambda: now, tpot_target=target, **config)
    for i in range(5):
        engine.add_request(request(f"short{i}", [i + 1, 2, 3], max_tokens=150))
    arrivals = [
        (0.05 + 0.05 * i, request(f"long{i}", [(7 * i + j) % 90 for j in range(400)], max_tokens=8)) for i in range(12)
    ]
    tokens: dict[str, list[int]] = defaultdict(list)
    steps = []
    while engine.has_work() or arrivals:
        while arrivals and arrivals[0][0] <= now:
            engine.add_request(arrivals.pop(0)[1])
        running, began = engine.stats().running, now
        for output in engine.step():
            tokens[output.request_id] += output.token_ids
        if running:
            steps.append(now - began)
    return steps, now, dict(tokens), engine


def test_a_loaded_engine_keeps_its_pace_and_answers_everything() -> None:
    free_steps, free_end, free_tokens, _ = loaded(None)
    steps, end, tokens, engine = loaded(0.012)
    assert sorted(free_steps)[-12] > 0.04, "without a target long prompts hold answers up"
    assert max(steps[6:]) <= 0.012 * 1.15, "with one, once what prompts cost has been seen"
    assert tokens == free_tokens and len(tokens) == 17
    assert end < 1.6 * free_end, "prompts are computed in smaller parts, not left waiting"
    budget = engine.stats().prompt_budget
    assert budget is not None and budget >= MIN_CHUNK


@pytest.mark.parametrize("value", [0, -1.0, math.nan, "10", True])
def test_a_wrong_target_is_refused(value: object) -> None:
    with pytest.raises(ParameterError, match="tpot_target_ms"):
        EngineArgs(model="m", tpot_target_ms=value)


def test_a_target_needs_chunks() -> None:
    with pytest.raises(ParameterError, match=r"tpot_target_ms.*chunked prefill"):
        EngineArgs(model="m", tpot_target_ms=10, enable_chunked_prefill=False, max_model_len=64)
