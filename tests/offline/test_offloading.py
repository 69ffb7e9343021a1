"""``LLM`` with a cache of a few blocks: what it evicts comes back, by index and by a device's own hook."""

from __future__ import annotations

from pathlib import Path

import pytest
from qiao import LLM, SamplingParams
from qiao.errors import ParameterError

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, logprobs=2)
LONG = "a long conversation " * 4


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_a_conversation_outlives_the_cache_and_the_process(device: str, rand: Path, tmp_path: Path) -> None:
    def engine() -> LLM:
        size = {"num_gpu_blocks_override": 8, "max_model_len": 128, "kv_offloading_path": str(tmp_path / "kv")}
        return LLM(str(rand), device=device, kv_offloading_size=1e-4, check_integrity=True, fallback="allow", **size)

    llm = engine()
    first, second = (llm.generate(LONG, GREEDY, use_tqdm=False)[0] for _ in range(2))
    hit, cached = second.outputs[0], second.num_cached_tokens
    assert cached >= 64
    for i in range(3):
        llm.generate(str(i) * 100, GREEDY, use_tqdm=False)
    found = llm.generate(LONG, GREEDY, use_tqdm=False)[0]
    stats = llm.get_metrics().offload
    assert stats is not None
    assert found.num_cached_tokens == cached == stats.host_hits + stats.disk_hits
    assert 0 < stats.host_bytes <= stats.host_capacity
    assert (found.outputs[0].token_ids, found.outputs[0].logprobs) == (hit.token_ids, hit.logprobs)
    assert found.outputs[0].token_ids == first.outputs[0].token_ids
    for i in range(3):
        llm.generate(str(i) * 100, GREEDY, use_tqdm=False)
    llm._engine._offload.disk.flush()  # type: ignore[union-attr]
    again = engine().generate(LONG, GREEDY, use_tqdm=False)[0]
    assert again.num_cached_tokens == cached
    assert (again.outputs[0].token_ids, again.outputs[0].logprobs) == (hit.token_ids, hit.logprobs)


def test_a_folder_that_cannot_be_used_is_named(rand: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ParameterError, match=r"kv_offloading_path: .*file cannot be used"):
        LLM(str(rand), device="cpu", num_gpu_blocks_override=8, kv_offloading_path=str(tmp_path / "file"))
    with pytest.raises(ParameterError, match="needs prefix caching"):
        LLM(str(rand), device="cpu", enable_prefix_caching=False, kv_offloading_size=1.0)
