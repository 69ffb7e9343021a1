"""Tenants and priorities that compete, in a simulated engine: shares, floors, order, and nobody waits for ever."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from qiao.engine.config import EngineConfig
from qiao.engine.fairness import CREDIT_STEPS
from qiao.engine.waiting import MAX_WAIT_STEPS
from qiao.errors import ParameterError, PromptTooLongError

from tests.support.engine import make_engine, request, run
from tests.support.simulation import Simulation


def simulation(**changes: object) -> Simulation:
    settings: dict[str, object] = {
        "num_blocks": 60,
        "vocab_size": 10,
        "max_model_len": 200,
        "block_size": 4,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
        "max_num_queued": 10**6,
    }
    return Simulation(EngineConfig(**(settings | changes)))


sizes = st.tuples(st.integers(1, 60), st.integers(1, 30))
arrivals = st.lists(
    st.fixed_dictionaries(
        {
            "at": st.integers(0, 60),
            "tenant": st.sampled_from(["", "a", "b", "c"]),
            "size": sizes,
            "priority": st.sampled_from([-1000, 0, 0, 3, 1000]),
        }
    ),
    min_size=1,
    max_size=40,
)
machines = st.fixed_dictionaries(
    {
        "num_blocks": st.sampled_from([24, 40, 200]),
        "max_num_seqs": st.sampled_from([1, 3, 8]),
        "max_num_batched_tokens": st.sampled_from([2, 16, 64]),
        "long_prefill_token_threshold": st.sampled_from([0, 5]),
        "scheduling_policy": st.sampled_from(["fcfs", "priority"]),
        "priority_floor": st.sampled_from([0.0, 0.1]),
    }
)


@settings(derandomize=True, max_examples=60, deadline=None)
@given(items=arrivals, machine=machines, weights=st.sampled_from([(1, 1, 1), (4, 2, 1)]))
def test_everything_ends(items: list[dict], machine: dict, weights: tuple[int, ...]) -> None:
    """Whatever competes: nothing is lost, no step is empty, the books balance, and each answer has its length."""
    sim = simulation(**machine)
    share = {"a": 0.5}
    for now in range(61):
        for item in items:
            if item["at"] == now:
                weight = dict(zip("abc", weights, strict=True)).get(item["tenant"], 1)
                prompt, answer = item["size"]
                cap = share.get(item["tenant"])
                if cap is not None:
                    room = sim.config.capped_blocks(cap) * sim.config.block_size
                    prompt = min(prompt, room - 1)
                    answer = min(answer, room - prompt)
                answer = min(answer, sim.config.capacity - prompt)
                sim.add(item["tenant"], prompt, answer, weight=weight, priority=item["priority"], kv_share=cap)
        sim.run()
        if "a" in share:
            held = sum(len(s.blocks) for s in sim.scheduler.running if s.request.account.cap is not None)
            assert held <= sim.config.capped_blocks(share["a"])
    for _ in range(4000):
        if not sim.scheduler.has_work:
            break
        sim.run()
    assert not sim.scheduler.has_work
    assert all(job.ended >= 0 and len(job.seq.tokens) == job.prompt + job.answer for job in sim.jobs)
    for account in {job.seq.request.account for job in sim.jobs}:
        assert (account.active, account.rows, account.blocks) == (0, 0, 0)


tenants = st.lists(st.tuples(sizes, st.sampled_from([1.0, 2.0, 4.0])), min_size=2, max_size=4)


@settings(derandomize=True, max_examples=15, deadline=None)
@given(kinds=tenants, rows=st.sampled_from([2, 8]), budget=st.sampled_from([16, 64]), order=st.booleans())
def test_busy_tenants_get_their_weights(kinds: list, rows: int, budget: int, order: bool) -> None:
    """The bound of the source: the served tokens over weights of two tenants that always have work never differ by more
    than what the batch can hold, twice, over the smaller weight. First come, first served differs without bound.
    """
    sim = simulation(max_num_seqs=rows, max_num_batched_tokens=budget)
    names = [str(i) for i in range(len(kinds))]
    for name in names if order else reversed(names):  # all of one tenant's before the next one's
        (prompt, answer), weight = kinds[int(name)]
        for _ in range(150):
            sim.add(name, prompt, answer, weight=weight)
    sim.run(250)
    waiting = set(sim.scheduler.waiting.items)
    busy = {job.tenant for job in sim.jobs if job.seq in waiting}
    bound = 2 * sim.config.num_blocks * sim.config.block_size
    for counted in sim.history[::20]:
        for one in busy:
            for other in busy:
                difference = counted[one] / kinds[int(one)][1] - counted[other] / kinds[int(other)][1]
                assert abs(difference) <= bound / min(kinds[int(one)][1], kinds[int(other)][1])


def test_the_shares_are_exact_in_the_long_run() -> None:
    sim = simulation(num_blocks=400)
    for _ in range(1500):
        sim.add("heavy", 12, 6, weight=4.0)
    for _ in range(1500):
        sim.add("light", 30, 2, weight=1.0)
    sim.run(500)
    assert sim.tokens["heavy"] / sim.tokens["light"] == pytest.approx(4.0, rel=0.05)


def most_ahead(sim: Simulation, prompt: int) -> int:
    """Tokens by which one tenant may be ahead of another: a prompt, a step, and what the batch can hold."""
    credit = min(prompt, CREDIT_STEPS * sim.config.max_num_batched_tokens)
    return credit + sim.config.max_num_batched_tokens + sim.config.num_blocks * sim.config.block_size


def test_a_tenant_that_was_away_is_ahead_by_its_prompt_and_no_more() -> None:
    sim = simulation(num_blocks=40)
    for _ in range(800):
        sim.add("always", 10, 10)
    sim.run(300)
    before = sim.tokens["always"]
    for _ in range(400):
        sim.add("late", 10, 10)
    sim.run(250)
    bound = most_ahead(sim, 10)
    assert abs(sim.tokens["late"] - (sim.tokens["always"] - before)) <= bound < sim.tokens["late"] / 8


def test_nobody_pays_for_what_nobody_else_wanted() -> None:
    sim = simulation(num_blocks=40)
    for _ in range(300):
        sim.add("early", 10, 10)
    while sim.scheduler.has_work:
        sim.run()
    before = sim.tokens["early"]
    for name in ("late", "early"):
        for _ in range(400):
            sim.add(name, 10, 10)
    sim.run(250)
    bound = most_ahead(sim, 10)
    assert abs(sim.tokens["late"] - (sim.tokens["early"] - before)) <= bound < before / 8


def test_who_comes_is_not_ahead_of_those_that_are_ahead() -> None:
    """A tenant's advantage is measured from the others' counters without theirs, else they would add up."""
    sim = simulation(num_blocks=80)
    for _ in range(800):
        sim.add("always", 10, 10)
    sim.run(100)
    for name in "abcdefghijkl":
        before = sim.tokens["always"]
        for _ in range(20):
            sim.add(name, 160, 2)
        sim.run(2)
    sim.run(200)
    assert sim.tokens["l"] - (sim.tokens["always"] - before) <= most_ahead(sim, 160)


def test_one_slow_stream_does_not_let_others_save_up_without_end() -> None:
    """A tenant that only has a long answer stays far behind; who comes back has no advantage of that, nor has it."""
    sim = simulation(num_blocks=100, max_model_len=300)
    slow = sim.add("slow", 1, 290)
    for _ in range(800):
        sim.add("always", 10, 4)
    sim.run(160)
    before = sim.tokens["always"]
    assert before - sim.tokens["slow"] > 3 * most_ahead(sim, 10)
    for _ in range(800):
        sim.add("late", 10, 4)
    sim.run(120)
    assert slow.ended < 0
    assert sim.tokens["late"] - (sim.tokens["always"] - before) <= most_ahead(sim, 10)


@settings(derandomize=True, max_examples=15, deadline=None)
@given(flood=st.tuples(st.integers(10, 60), st.integers(1, 30)), prompt=st.integers(20, 180))
def test_a_flood_that_begins_goes_ahead_by_one_prompt(flood: tuple[int, int], prompt: int) -> None:
    """However long it had been away, and although the calm tenant had the engine to itself."""
    sim = simulation(num_blocks=300)
    room = sim.config.max_num_batched_tokens - sim.config.max_num_seqs
    for _ in range(10):
        sim.add("calm", prompt, 2)
        sim.run(-(-prompt // room) + 3)
        assert not sim.scheduler.has_work
    calm = sim.add("calm", prompt, 2)
    for _ in range(60):
        sim.add("flood", *flood)
    sim.run(40)
    assert 0 <= calm.first - calm.arrived <= -(-(prompt + flood[0]) // room)


@settings(derandomize=True, max_examples=15, deadline=None)
@given(
    flood=st.tuples(st.integers(10, 60), st.integers(1, 30)),
    prompt=st.integers(20, 18 * CREDIT_STEPS),
    floods=st.integers(1, 2),
    chunk=st.sampled_from([0, 16]),
)
def test_a_flood_delays_by_less_than_half_who_is_below_its_share(
    flood: tuple[int, int], prompt: int, floods: int, chunk: int
) -> None:
    """Its prompts of many steps take what they take beside the decodes, and one step more. That they took turns with
    the flood's prompts, chunk by chunk, took twice as many.
    """
    sim = simulation(num_blocks=300, max_model_len=450, long_prefill_token_threshold=chunk)
    names = [f"flood {i}" for i in range(floods)]
    room = sim.config.max_num_batched_tokens - sim.config.max_num_seqs
    steps = -(-prompt // (min(chunk, room) if chunk else room))
    for _ in range(3):
        for _ in range(8 * steps + 20):  # and those that run
            while len(sim.scheduler.waiting) < 60:
                for name in names:
                    sim.add(name, *flood)
            sim.run()
        calm = sim.add("calm", prompt, 2)
        sim.run(steps + 2)
        assert sim.scheduler.waiting, "the flood has ended"
        assert 0 <= calm.first - calm.arrived <= steps


@settings(derandomize=True, max_examples=15, deadline=None)
@given(flood=sizes, prompt=st.integers(1, 60), blocks=st.sampled_from([60, 200]), chunk=st.sampled_from([0, 8]))
def test_a_flood_does_not_delay_a_calm_tenant(flood: tuple[int, int], prompt: int, blocks: int, chunk: int) -> None:
    """Its first token takes the steps of its own prompt beside the flood's decodes, and two more."""
    sim = simulation(num_blocks=blocks, long_prefill_token_threshold=chunk)
    for _ in range(200):
        sim.add("flood", *flood)
    sim.run(20)
    for _ in range(5):
        calm = sim.add("calm", prompt, 2)
        sim.run(40)
        room = sim.config.max_num_batched_tokens - sim.config.max_num_seqs
        steps = -(-prompt // (min(chunk, room) if chunk else room))
        assert 0 <= calm.first - calm.arrived < steps + 2
    assert sim.tokens["flood"] > 10 * sim.tokens["calm"] or flood[0] + flood[1] < 10


def test_a_displaced_flood_goes_on_and_is_not_displaced_twice_for_one() -> None:
    sim = simulation(max_num_seqs=4)
    for _ in range(8):
        sim.add("flood", 20, 20)
    sim.run(4)
    before = sim.scheduler.num_preemptions
    sim.add("calm", 10, 5)
    sim.run(1)
    assert sim.scheduler.num_preemptions == before + 1
    sim.run(300)
    assert sim.scheduler.num_preemptions == before + 1
    assert all(job.ended >= 0 for job in sim.jobs)


@settings(derandomize=True, max_examples=15, deadline=None)
@given(low=sizes, prompt=st.integers(1, 60), full=st.sampled_from(["rows", "blocks"]), tenant=st.sampled_from("lu"))
def test_urgent_requests_preempt(low: tuple[int, int], prompt: int, full: str, tenant: str) -> None:
    """Though the batch or the blocks are full of a worse priority, it takes the steps it takes alone."""
    machine = {"max_num_seqs": 4, "num_blocks": 200} if full == "rows" else {"max_num_seqs": 64, "num_blocks": 40}
    sim = simulation(scheduling_policy="priority", priority_floor=0.0, **machine, max_num_batched_tokens=70)
    for _ in range(100):
        sim.add("l", *low, priority=5)
    sim.run(10)
    urgent = sim.add(tenant, prompt, 1, priority=-5)
    sim.run(4)
    decodes = min(sim.config.max_num_seqs, sim.config.num_blocks)
    assert urgent.first - urgent.arrived <= -(-prompt // (70 - decodes))


def test_priorities_are_served_in_order() -> None:
    sim = simulation(scheduling_policy="priority", max_num_seqs=1, priority_floor=0.0)
    for priority in (3, -1, 2, 0, -5, 1):
        sim.add("a" if priority % 2 else "b", 9, 3, priority=priority)
    sim.run(200)
    order = sorted(sim.jobs, key=lambda job: job.ended)
    assert [job.seq.key[0] for job in order] == [-5, -1, 0, 1, 2, 3]


def test_who_waits_is_counted_by_class() -> None:
    engine = make_engine(max_num_seqs=1, scheduling_policy="priority")
    for i, priority in enumerate((-2000, -2000, -501, -499, 0, 499, 501, 5000)):
        made = request(str(i), [1, 2, 3], max_tokens=6)
        made.priority = priority
        engine.add_request(made)
    engine.step()
    assert engine.stats().waiting_by_class == {"promoted": 0, "urgent": 2, "standard": 3, "low": 2}


def test_under_fcfs_priorities_mean_nothing() -> None:
    sim = simulation(max_num_seqs=1)
    for priority in (3, -1, 2):
        sim.add("", 9, 3, priority=priority)
    sim.run(200)
    ended = [job.ended for job in sim.jobs]
    assert ended == sorted(ended)


@settings(derandomize=True, max_examples=12, deadline=None)
@given(
    urgent=sizes,
    low=sizes,
    floor=st.sampled_from([0.05, 0.2]),
    rows=st.sampled_from([2, 8]),
    budget=st.sampled_from([16, 64]),
    one=st.booleans(),
)
def test_the_low_priority_keeps_its_floor(
    urgent: tuple[int, int], low: tuple[int, int], floor: float, rows: int, budget: int, one: bool
) -> None:
    """Endless urgent work: the others get their share, up to one request and one batch."""
    sim = simulation(
        scheduling_policy="priority", priority_floor=floor, max_num_seqs=rows, max_num_batched_tokens=budget
    )
    for _ in range(200):
        sim.add("low", *low, priority=5)
    sim.run(3)
    for _ in range(400):
        sim.add("low" if one else "urgent", *urgent, priority=-5)
    start = sim.levels.copy()
    for _ in range(200):
        if sim.jobs[-1].started >= 0:
            break  # there is no endless supply any more
        sim.run()
    served = {level: sim.levels[level] - start[level] for level in (5, -5)}
    total = sum(served.values())
    slack = sum(low) + rows * sum(low) + budget
    assert served[5] >= floor * total - slack
    assert served[5] <= floor * total + slack + 3 * budget


def test_without_a_floor_the_low_priority_waits_its_thousand_steps() -> None:
    sim = simulation(scheduling_policy="priority", priority_floor=0.0, max_num_seqs=2)
    low = sim.add("low", 5, 2, priority=9)
    sim.scheduler.waiting.remove(low.seq)
    for _ in range(2 * MAX_WAIT_STEPS + 200):
        sim.add("urgent", 5, 2, priority=0)
    sim.scheduler.waiting.push(low.seq, 0)
    sim.check_every = 500
    sim.run(MAX_WAIT_STEPS + 100)
    assert MAX_WAIT_STEPS <= low.first < MAX_WAIT_STEPS + 60


def test_a_share_of_the_cache_bounds_what_a_tenant_holds() -> None:
    sim = simulation(num_blocks=40)
    for _ in range(20):
        sim.add("capped", 20, 12, kv_share=0.4)
        sim.add("free", 20, 12)
    most = 0
    while sim.scheduler.has_work:
        sim.run()
        most = max(most, sum(len(s.blocks) for s in sim.scheduler.running if s.request.account.cap is not None))
    assert 8 <= most <= 16


def test_a_prompt_above_its_share_is_refused_and_an_answer_ends_there() -> None:
    engine = make_engine(num_blocks=20, block_size=4)
    made = request("a", [1] * 30, max_tokens=4)
    made.kv_share = 0.25
    with pytest.raises(PromptTooLongError, match="share of the KV cache holds 20"):
        engine.add_request(made)
    fits = request("b", [1] * 10, max_tokens=50)
    fits.kv_share = 0.25
    results = run(engine, [fits])
    assert len(results.of("b")) == 10 and results.reasons["b", 0] == "length"


def test_a_deadline_drops_what_waits_and_nothing_else() -> None:
    engine = make_engine(max_num_seqs=1)
    first, second, third = (request(name, [1, 2, 3], max_tokens=6) for name in "abc")
    first.max_wait = 1e-9
    second.max_wait = 3600.0
    third.max_wait = 1e-9
    third.params.n = 1
    outputs = run(engine, [first]).outputs
    assert [(o.finish_reason, o.token_ids) for o in outputs] == [("late", [])]
    engine.add_request(second)
    engine.step()
    engine.add_request(third)
    results = run(engine)
    assert results.reasons == {("b", 0): "length", ("c", 0): "late"}
    assert not engine.has_work() and engine.stats().waiting == 0


def test_wrong_floors_are_refused() -> None:
    for value in (-0.1, 1.0):
        with pytest.raises(ParameterError, match="priority_floor"):
            simulation(priority_floor=value)
