"""Adapters on the reference plugin, the native one and the simulated device, against transformers on merged weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from qiao import LLM, ParameterError, SamplingParams
from qiao.lora.request import LoRARequest

from tests.support.adapters import linear_modules, merge, write_adapter
from tests.support.checkpoints import rand_checkpoint

PROMPTS = ([60 + i for i in range(19)], [5, 6, 7, 8, 9, 10, 11], [300, 2], [17])
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=5)
SMALL: dict[str, Any] = {"num_gpu_blocks_override": 64, "max_num_seqs": 8, "check_integrity": True, "threads": 1}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rand_checkpoint(tmp_path_factory.mktemp("lora") / "base")


@pytest.fixture(scope="module")
def adapters(base: Path) -> dict[str, LoRARequest]:
    """One with all modules, one of another rank with rslora and the attention alone, one with patterns."""
    folder = base.parent
    every, attention = linear_modules(base), linear_modules(base, ("q_proj", "v_proj"))
    write_adapter(folder / "every", every, rank=4, seed=1)
    write_adapter(folder / "attention", attention, rank=3, seed=2, use_rslora=True, target_modules=r".*\.(q|v)_proj")
    write_adapter(
        folder / "patterns",
        every,
        rank=2,
        ranks=dict.fromkeys((m for m in every if m.endswith("down_proj")), 5),
        seed=3,
        rank_pattern={"down_proj": 5},
        alpha_pattern={"layers.1.self_attn.o_proj": 9},
        target_modules="all-linear",
        style="base_model.model.{module}.lora_{side}.default.weight",
    )
    names = ("every", "attention", "patterns")
    return {name: LoRARequest(name, i + 1, str(folder / name)) for i, name in enumerate(names)}


@pytest.fixture(scope="module")
def expected(base: Path, adapters: dict[str, LoRARequest]) -> dict[str, list[list[int]]]:
    """Greedy tokens of transformers for each prompt, by adapter; an empty name for the model alone."""
    folders = {"": base}
    for name, one in adapters.items():
        folders[name] = merge(base, Path(one.lora_path), base.parent / f"merged-{name}")
    return {name: greedy(folder) for name, folder in folders.items()}


def greedy(folder: Path) -> list[list[int]]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
        out = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        found.append(out[0, len(prompt) :].tolist())
    return found


def tokens(results: Sequence[Any]) -> list[list[int]]:
    return [list(result.outputs[0].token_ids) for result in results]


@pytest.fixture(scope="module", params=["reference", "cpu", "sim"])
def llm(request: pytest.FixtureRequest, base: Path) -> LLM:
    if request.param == "sim":
        from qiao_conformance import sim

        sim.setup()
    if request.param == "cpu":
        pytest.importorskip("qiao_cpu")
    return LLM(str(base), device=request.param, enable_lora=True, max_lora_rank=8, **SMALL)


def test_each_adapter_alone_equals_merged_weights(
    llm: LLM, adapters: dict[str, LoRARequest], expected: dict[str, list[list[int]]]
) -> None:
    assert len({str(found) for found in expected.values()}) == 4, "the adapters change nothing"
    for name, one in adapters.items():
        results = llm.generate(list(PROMPTS), GREEDY, lora_request=one)
        assert tokens(results) == expected[name], name
        assert results[0].lora_request == one
    assert tokens(llm.generate(list(PROMPTS), GREEDY)) == expected[""]


def test_several_in_one_batch_equal_each_alone(llm: LLM, adapters: dict[str, LoRARequest]) -> None:
    wanted = [adapters["every"], None, adapters["patterns"], adapters["attention"]]
    alone = [llm.generate(p, GREEDY, lora_request=one)[0] for p, one in zip(PROMPTS, wanted, strict=True)]
    llm.reset_prefix_cache()
    together = llm.generate(list(PROMPTS), GREEDY, lora_request=wanted)
    assert tokens(together) == tokens(alone)
    exact = llm.info.plan["plugin"] == "cpu"
    for one, other in zip(together, alone, strict=True):
        ours = [x.logprob for place in one.outputs[0].logprobs for x in place.values()]
        theirs = [x.logprob for place in other.outputs[0].logprobs for x in place.values()]
        assert ours == (theirs if exact else pytest.approx(theirs, abs=2e-4))


def test_adapters_share_no_prefixes(llm: LLM, adapters: dict[str, LoRARequest]) -> None:
    prompt = [100 + i for i in range(40)]
    llm.reset_prefix_cache()
    one = SamplingParams(max_tokens=1, temperature=0.0)

    def cached(adapter: LoRARequest | None) -> int:
        return llm.generate(prompt, one, lora_request=adapter)[0].num_cached_tokens

    assert [cached(None), cached(adapters["every"]), cached(adapters["patterns"])] == [0, 0, 0]
    assert [cached(None), cached(adapters["every"])] == [32, 32]


def test_a_number_means_one_adapter_and_a_removed_one_is_gone(llm: LLM, adapters: dict[str, LoRARequest]) -> None:
    every = adapters["every"]
    llm.generate([5], GREEDY, lora_request=every)
    with pytest.raises(ParameterError, match="1 is the adapter 'every'"):
        llm.generate([5], GREEDY, lora_request=LoRARequest("other", 1, adapters["patterns"].lora_path))
    assert llm.remove_lora(1)
    assert not llm.remove_lora(1)
    renamed = LoRARequest("again", 1, adapters["patterns"].lora_path)
    first = llm.generate(PROMPTS[0], GREEDY, lora_request=renamed)
    assert tokens(first) == tokens(llm.generate(PROMPTS[0], GREEDY, lora_request=adapters["patterns"]))
    assert llm.remove_lora(1)
    with pytest.raises(ParameterError, match="lora_request"):
        llm.generate([[5], [6]], GREEDY, lora_request=[every])


def test_steps_without_adapters_stay_captured(llm: LLM, adapters: dict[str, LoRARequest]) -> None:
    def steps(adapter: LoRARequest | None) -> tuple[int, str]:
        before = llm.get_metrics().captured_steps
        llm.generate(PROMPTS[0], GREEDY, lora_request=adapter)
        stats = llm.get_metrics()
        return stats.captured_steps - before, stats.not_captured

    found = [steps(None), steps(adapters["patterns"]), steps(None)]
    if llm.info.plan["plugin"] == "reference":  # its attention reads lengths on the host
        assert [(count, "kv_lens" in why) for count, why in found] == [(0, True)] * 3
    else:
        assert found == [(5, ""), (0, ""), (5, "")]


@pytest.fixture(scope="module")
def narrow(base: Path) -> LLM:
    """One adapter a step."""
    return LLM(str(base), device="reference", enable_lora=True, max_loras=1, max_lora_rank=8, **SMALL)


def test_a_step_mixes_no_more_adapters_than_allowed(
    narrow: LLM, adapters: dict[str, LoRARequest], expected: dict[str, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though requests for the first adapter keep coming, others have their turn, and the model itself never waits."""
    order: list[set[str]] = []
    runner = narrow._engine._runner
    build = runner.build

    def watched(step: Any) -> Any:
        order.append({"" if s.request.adapter is None else s.request.adapter.name for s in step.seqs})
        return build(step)

    monkeypatch.setattr(runner, "build", watched)
    every, patterns = adapters["every"], adapters["patterns"]
    wanted = [every, every, patterns, None, every, every, every, every, every, every]
    results = narrow.generate([PROMPTS[0]] * len(wanted), GREEDY, lora_request=wanted)
    names = ["" if one is None else one.lora_name for one in wanted]
    assert tokens(results) == [expected[name][0] for name in names]
    assert all(len(step - {""}) <= 1 for step in order)
    assert "" in order[0]
    turns = [name for step in order for name in step - {""}]
    last = len(turns) - 1 - turns[::-1].index("patterns")
    assert turns[: turns.index("patterns")] == ["every"] * 6, "the second adapter waits for two answers of 6 tokens"
    assert "every" in turns[last:], "later requests for the first adapter come after it"


def test_what_is_not_enabled_is_refused(base: Path, adapters: dict[str, LoRARequest]) -> None:
    plain = LLM(str(base), device="reference", **SMALL)
    with pytest.raises(ParameterError, match="lora_request: LoRA adapters are not enabled; start with --enable-lora"):
        plain.generate([5], GREEDY, lora_request=adapters["every"])
