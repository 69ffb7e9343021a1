"""Through the front door: tokens equal the reference plugin's, and a request's numbers do not depend on others."""

from __future__ import annotations

import pytest
import torch
from qiao.build import build_engine
from qiao.config import EngineArgs
from qiao.engine.request import EngineRequest
from qiao.sampling_params import SamplingParams

from tests.support.checkpoints import rand_checkpoint

PROMPTS = ([60 + i for i in range(90)], [5, 6, 7, 8, 9, 10, 11], [300, 2], [40 + i for i in range(33)], [17])
COUNT = 12

MODELS = {
    "llama": {"architectures": ["LlamaForCausalLM"]},
    "odd-heads": {"architectures": ["LlamaForCausalLM"], "head_dim": 20, "num_key_value_heads": 1},
    "sliding": {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 24},
    "biases": {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},
    "soft-cap": {
        "model_type": "gemma2",
        "architectures": ["Gemma2ForCausalLM"],
        "head_dim": 16,
        "sliding_window": 16,
        "hidden_activation": "gelu_pytorch_tanh",
    },
}


@pytest.fixture(scope="module", params=MODELS)
def folder(request, tmp_path_factory):
    return rand_checkpoint(tmp_path_factory.mktemp(request.param), **MODELS[request.param])


def run(folder, prompts, device, **options):
    """Tokens and their log probabilities of each prompt."""
    options = {"max_num_seqs": 8, "num_gpu_blocks_override": 64, **options}
    built = build_engine(EngineArgs(model=str(folder), device=device, **options))
    params = SamplingParams(temperature=0.0, max_tokens=COUNT, min_tokens=COUNT, logprobs=3, ignore_eos=True)
    for i, prompt in enumerate(prompts):
        built.engine.add_request(
            EngineRequest(request_id=str(i), prompt_token_ids=list(prompt), params=params, arrival=0.0)
        )
    tokens, values = ([[] for _ in prompts] for _ in range(2))
    while built.engine.has_work():
        for output in built.engine.step():
            tokens[int(output.request_id)] += output.token_ids
            values[int(output.request_id)] += [entry.logprobs for entry in output.logprobs or ()]
    return built, tokens, values


def test_greedy_tokens_equal_the_reference_plugins(folder):
    built, tokens, _ = run(folder, PROMPTS, "cpu")
    assert built.info.device == "cpu:0"
    assert tokens == run(folder, PROMPTS, "reference")[1]


@pytest.mark.parametrize("kept", ["int8", "float16"])
def test_greedy_tokens_over_another_cache_equal_the_reference_plugins(folder, kept):
    built, tokens, _ = run(folder, PROMPTS, "cpu", kv_cache_dtype=kept)
    assert built.info.plan["kv"] == {**built.info.plan["kv"], "place": "cpu", "dtype": kept}
    assert tokens == run(folder, PROMPTS, "reference", kv_cache_dtype=kept)[1]


def test_numbers_do_not_depend_on_batch_or_chunks(folder, threads):
    for dtype, kept in (("float32", "auto"), ("bfloat16", "auto"), ("bfloat16", "int8")):
        kind = {"dtype": dtype, "kv_cache_dtype": kept}
        _, tokens, values = run(folder, PROMPTS, "cpu", **kind)
        assert all(len(row) == COUNT for row in values)
        threads(3)
        _, chunked, chunked_values = run(folder, PROMPTS, "cpu", **kind, max_num_batched_tokens=16)
        assert (chunked, chunked_values) == (tokens, values)
        threads(1)
        for i, prompt in enumerate(PROMPTS):
            _, alone, alone_values = run(folder, [prompt], "cpu", **kind)
            assert (alone[0], alone_values[0]) == (tokens[i], values[i])


def test_what_the_plugin_lacks_is_served_by_the_reference_plugin_without_copies(folder):
    built, _, _ = run(folder, PROMPTS[:1], "cpu")
    operators = {o["operator"]: o for o in built.info.plan["operators"]}
    assert operators["attention"]["place"] == "cpu"
    assert not any(o.get("bytes") for o in operators.values())
    assert torch.get_num_threads() >= 1
