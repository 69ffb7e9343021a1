import json
from pathlib import Path
from typing import Any

import pytest
from qiao.errors import ModelError
from qiao.loading import (
    eos_token_ids,
    load_config,
    load_generation_config,
    read_raw_config,
    resolve,
    sampling_defaults,
)

from tests.support.checkpoints import edit_config, rand_checkpoint


def folder_with(tmp_path: Path, **config: Any) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_overrides_replace_keys_also_inside_blocks(rand: Path) -> None:
    config = load_config(resolve(rand), overrides={"vocab_size": 7, "rope_parameters": {"rope_theta": 5.0}})
    assert config.vocab_size == 7
    assert config.rope_parameters == {"rope_theta": 5.0, "rope_type": "default"}
    assert read_raw_config(resolve(rand))["vocab_size"] == 320


@pytest.mark.parametrize("kind", ["chatglm", "internlm2", "baichuan", "never-heard-of"])
def test_types_that_transformers_does_not_know_are_plain(tmp_path: Path, kind: str) -> None:
    marker = tmp_path / "marker"
    (tmp_path / "code.py").write_text(f"open({str(marker)!r}, 'w')")
    folder = folder_with(
        tmp_path,
        model_type=kind,
        architectures=["X"],
        multi_query_group_num=2,
        hidden_size=64,
        auto_map={"AutoConfig": "code.Config"},
        torch_dtype="float16",
        eos_token_id=[1, 2],
    )
    config = load_config(resolve(folder))
    assert (config.model_type, config.multi_query_group_num, config.hidden_size) == (kind, 2, 64)
    assert config.architectures == ["X"]
    assert config.to_dict()["model_type"] == kind
    assert not marker.exists()


def test_code_runs_only_when_asked(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text(
        "from transformers import PretrainedConfig\n"
        "class Config(PretrainedConfig):\n"
        "    model_type = 'own'\n"
        "    def __init__(self, width=1, **kwargs):\n"
        "        super().__init__(**kwargs)\n"
        "        self.width = self.hidden_size = width\n"
    )
    folder = folder_with(tmp_path, model_type="own", width=5, auto_map={"AutoConfig": "code.Config"})
    assert not hasattr(load_config(resolve(folder)), "hidden_size")
    assert load_config(resolve(folder), trust_remote_code=True, overrides={"width": 9}).hidden_size == 9


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", "\xff"])
def test_damaged_config_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelError, match=r"config\.json"):
        load_config(resolve(tmp_path))


def test_model_type_is_needed(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="model_type"):
        load_config(resolve(folder_with(tmp_path, hidden_size=1)))


def test_values_that_the_class_refuses_are_a_model_error(rand: Path) -> None:
    with pytest.raises(ModelError, match="hf_overrides"):
        load_config(resolve(rand), overrides={"hidden_size": "wide"})


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    "keys", [{"rope_type": "llama3"}, {"type": "llama3"}, {"type": "llama3", "rope_type": "llama3"}]
)
@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
def test_spellings_of_rope_scaling(tmp_path: Path, keys: dict[str, str], name: str) -> None:
    folder = rand_checkpoint(tmp_path / "m")
    edit_config(folder, rope_parameters=None)
    edit_config(folder, rope_theta=10000.0, **{name: {**LLAMA3, **keys}})
    found = load_config(resolve(folder)).rope_parameters
    assert {**LLAMA3, "rope_type": "llama3"}.items() <= found.items()


def test_rope_keys_that_differ_are_refused(tmp_path: Path) -> None:
    folder = rand_checkpoint(tmp_path / "m")
    edit_config(folder, rope_scaling={"type": "linear", "rope_type": "llama3", "factor": 2})
    with pytest.raises(ModelError, match=r"'linear'.*'llama3'"):
        load_config(resolve(folder))
    edit_config(folder, rope_scaling="linear")
    with pytest.raises(ModelError, match="rope_scaling must be"):
        load_config(resolve(folder))


def test_sampling_defaults() -> None:
    given = {
        "temperature": 0.6,
        "top_p": 0.9,
        "top_k": 20,
        "repetition_penalty": 1.1,
        "min_p": 0.1,
        "max_new_tokens": 8,
    }
    assert sampling_defaults({**given, "do_sample": True, "eos_token_id": 1, "length_penalty": 2.0}) == {
        **{key: value for key, value in given.items() if key != "max_new_tokens"},
        "max_tokens": 8,
    }
    assert sampling_defaults({"temperature": None}) == {}


@pytest.mark.parametrize(
    ("generation", "config", "tokenizer", "expected"),
    [
        ([257, 259], 257, 257, [257, 259]),
        (None, [257, 259], 257, [257, 259]),
        (259, 257, 257, [259, 257]),
        (None, None, 257, [257]),
        (None, None, None, []),
        (-1, None, None, []),
    ],
)
def test_every_end_token_counts(generation: Any, config: Any, tokenizer: int | None, expected: list[int]) -> None:
    assert eos_token_ids(generation, config, tokenizer) == expected


@pytest.mark.parametrize("wrong", ["</s>", [1, "</s>"], True, 1.5])
def test_end_tokens_must_be_integers(wrong: Any) -> None:
    with pytest.raises(ModelError, match="eos_token_id"):
        eos_token_ids(None, wrong, None)


def test_generation_config_may_be_absent_or_damaged(tmp_path: Path) -> None:
    folder = rand_checkpoint(tmp_path / "m", generation_config=None)
    assert load_generation_config(resolve(folder)) == {}
    (folder / "generation_config.json").write_text("nonsense")
    with pytest.raises(ModelError, match=r"generation_config\.json"):
        load_generation_config(resolve(folder))
