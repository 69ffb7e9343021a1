"""Decode steps captured on the simulated device: the same tokens, one launch a step, and no more copies than priced."""

from __future__ import annotations

import pytest
import torch
from qiao.engine import Engine, EngineConfig
from qiao.engine.capture import MOST_BYTES
from qiao.models import create
from qiao.registry import FallbackCounters, bind
from qiao_conformance import sim

from tests.support.fallback import BLOCK, PROMPTS, Served, checkpoint, expected, plan_for, request, sim_backend

ROWS = 8


def build(missing=(), chip="full", **settings):
    backend = sim_backend(missing, chip=chip)
    plan = plan_for(backend)
    table = bind(plan, backend, FallbackCounters())
    config, weights = checkpoint()
    model = create(config, table, torch.float32)
    model.load(weights.items())
    sizes = EngineConfig(
        num_blocks=32,
        block_size=BLOCK,
        vocab_size=config.vocab_size,
        max_model_len=64,
        max_num_seqs=ROWS,
        max_num_batched_tokens=16,
        enable_prefix_caching=False,
        check_integrity=True,
        **settings,
    )
    return Engine(model, table, sizes), plan


def serve(engine, prompts=PROMPTS, **params):
    """Tokens and errors, and what each step counted."""
    served, counts = Served(), []
    for i, prompt in enumerate(prompts):
        engine.add_request(request(str(i), prompt, **params))
    while engine.has_work():
        with sim.counted() as counted:
            served.take(engine.step())
        counts.append(counted)
    return served, counts


@pytest.mark.parametrize("chip", ["full", "sizes"])
def test_the_same_tokens(chip):
    engine, _ = build(chip=chip)
    served, counts = serve(engine)
    assert served.errors == {} and served.tokens == expected()
    stats = engine.stats()
    assert stats.not_captured == "" and 0 < stats.captured_steps < stats.steps
    replays = [c for c in counts if c.ops["hook.replay"]]
    assert len(replays) == stats.captured_steps
    if chip == "sizes":  # all recorded at the start, the five sequences at once are more than the largest
        assert all(c.ops["hook.matmul"] == 0 for c in replays)
        assert any(not c.ops["hook.replay"] for c in counts[4:])


def test_rows_that_fill_up_a_step_change_nothing():
    """Three sequences in a program for four: slots, cache and tokens are those of the three alone."""
    engine, _ = build(chip="sizes")
    served, _ = serve(engine, PROMPTS[:3], max_tokens=9)
    plain, _ = serve(build(chip="sizes", enforce_eager=True)[0], PROMPTS[:3], max_tokens=9)
    assert served.tokens == plain.tokens and served.errors == {}
    assert engine.stats().captured_steps >= 8


def test_a_captured_step_copies_no_more_than_an_eager_one():
    engine, _ = build(chip="sizes")
    _, captured = serve(engine, PROMPTS[:2])
    _, eager = serve(build(enforce_eager=True)[0], PROMPTS[:2])
    for a, b in zip(captured[2:], eager[2:], strict=True):
        assert a["h2d"] < b["h2d"] and a["d2h"] == b["d2h"] and a.bytes["h2d"] < b.bytes["h2d"]


@pytest.mark.parametrize("missing", [("attention",), ("matmul",), ("capture",)], ids="+".join)
def test_what_the_plan_does_not_capture_runs_eagerly(missing):
    engine, plan = build(missing)
    served, counts = serve(engine)
    assert not plan.regions[0].capturable and served.tokens == expected()
    assert engine.stats().captured_steps == 0 and not any(c.ops["hook.replay"] for c in counts)
    assert "plan" in engine.stats().not_captured


def test_sampling_on_the_host_does_not_keep_the_layers_from_it():
    engine, _ = build(("sample",))
    assert serve(engine)[0].tokens == expected()
    assert engine.stats().captured_steps > 0


def test_a_refusal_is_kept_and_nothing_else_changes(monkeypatch):
    engine, _ = build()
    calls = []

    def refuse(*args):
        calls.append(args)
        raise NotImplementedError("aten.sort has no kernel")

    object.__setattr__(engine._ops, "capture", refuse)
    assert serve(engine)[0].tokens == expected()
    assert len(calls) == 1 and engine.stats().not_captured == "aten.sort has no kernel"


@pytest.mark.parametrize("hook", ["attention", "decode_attention", "matmul"])
def test_a_fault_in_a_replay_fails_the_step_and_names_the_operator(hook):
    engine, _ = build(("decode_attention",) if hook == "attention" else ())
    for i, prompt in enumerate(PROMPTS[:2]):
        engine.add_request(request(str(i), prompt))
    while engine.stats().captured_steps < 2:
        engine.step()
    before = engine.stats().captured_steps
    sim.fail(f"hook.{hook}")
    errors = [o.error for o in engine.step()]
    assert len(errors) == 2 and all(f"operator {hook} on sim:0" in e for e in errors)
    assert engine.stats().captured_steps == before
    assert serve(engine)[0].tokens == expected(), "the engine goes on"


def test_random_sampling_and_log_probabilities_over_captured_logits():
    options = {"temperature": 0.8, "top_k": 20, "seed": 5, "logprobs": 3, "frequency_penalty": 0.5, "max_tokens": 8}
    captured, _ = serve(build()[0], **options)
    eager, _ = serve(build(enforce_eager=True)[0], **options)
    assert captured.tokens == eager.tokens and not captured.errors


class _Sized:
    """A recording that says how much it holds."""

    def __init__(self, replay, nbytes):
        self._replay, self.nbytes = replay, nbytes

    def __call__(self):
        return self._replay()


@pytest.mark.parametrize(("each", "kept"), [(0, 3), (MOST_BYTES // 2, 2), (MOST_BYTES - 1, 1), (2 * MOST_BYTES, 1)])
def test_programs_that_hold_much_are_fewer(each, kept):
    """Steps of three, two and one sequences, twice; the program used longest ago goes first."""
    engine, _ = build()
    right, recorded = engine._ops.capture, []

    def capture(function, example, device):
        recorded.append(len(example[0]))
        return _Sized(right(function, example, device), each)

    object.__setattr__(engine._ops, "capture", capture)
    for _ in range(2):
        for i, prompt in enumerate(PROMPTS[:3]):
            engine.add_request(request(str(i), prompt, max_tokens=3 + 2 * i))
        while engine.has_work():
            engine.step()
    steps = engine._runner.captured
    assert list(steps._programs) == [3, 2, 1][-kept:] and steps.nbytes == kept * each
    assert recorded == ([3, 2, 1] if kept == 3 else [3, 2, 1, 3, 2, 1])
