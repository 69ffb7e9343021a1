import logging
import subprocess
import sys
from typing import Any

import msgspec
import numpy as np
import pytest
import qiao
import torch
from qiao.errors import ParameterError, UsageError
from qiao.llm import engine_args


def test_vllms_arguments_mean_what_they_say() -> None:
    args = engine_args(
        "m",
        {
            "tokenizer": "t",
            "dtype": torch.bfloat16,
            "block_size": 16,
            "max_num_seqs": 256,
            "enable_prefix_caching": True,
            "device": "npu",
            "served_model_name": "name",
            "hf_overrides": None,
            "seed": None,
            "device_memory_utilization": 0.5,
            "rope_scaling": {"rope_type": "linear", "factor": 2.0},
            "rope_theta": 5.0,
        },
    )
    assert (args.model, args.tokenizer, args.dtype, args.device) == ("m", "t", "torch.bfloat16", "npu")
    assert (args.served_model_name, args.seed, args.gpu_memory_utilization) == (("name",), 0, 0.5)
    assert args.hf_overrides == {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_theta": 5.0}


def test_none_means_the_default_and_devices_may_be_torchs() -> None:
    names = ("max_num_seqs", "max_num_batched_tokens", "enable_prefix_caching", "enable_chunked_prefill", "seed")
    args = engine_args("m", {**dict.fromkeys(names), "device": torch.device("cpu"), "max_model_len": None})
    assert args == engine_args("m", {"device": "cpu"})


def test_arguments_without_meaning_are_accepted_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        engine_args("m", {"swap_space": 4, "disable_log_stats": True, "compilation_config": 3})
    assert all(name in caplog.text for name in ("swap_space", "disable_log_stats", "compilation_config"))


@pytest.mark.parametrize(
    "given",
    [
        {"tensor_parallel_size": 2},
        {"enable_sleep_mode": True},
        {"kv_cache_dtype": "fp8"},
        {"runner": "draft"},
        {"logits_processors": ["x"]},
        {"cpu_offload_gb": 4},
    ],
)
def test_what_would_change_answers_is_refused_and_its_neutral_value_is_not(given: dict[str, Any]) -> None:
    name = next(iter(given))
    with pytest.raises(UsageError, match=f"{name}.*not supported"):
        engine_args("m", given)
    neutral = {"tensor_parallel_size": 1, "enable_sleep_mode": False, "kv_cache_dtype": "auto", "runner": "auto"}
    engine_args("m", {key: value for key, value in neutral.items() if key == name})


@pytest.mark.parametrize(
    ("name", "meant"), [("max_model_length", "max_model_len"), ("tensor_paralel_size", "tensor_parallel_size")]
)
def test_unknown_arguments_have_a_suggestion(name: str, meant: str) -> None:
    with pytest.raises(TypeError, match=f"'{name}'; did you mean '{meant}'"):
        engine_args("m", {name: 1})
    with pytest.raises(TypeError, match=r"'zzz'$"):
        engine_args("m", {"zzz": 1})


def test_wrong_values_name_the_field() -> None:
    with pytest.raises(ParameterError, match="hf_overrides"):
        engine_args("m", {"hf_overrides": lambda config: config})
    with pytest.raises(ParameterError, match="block_size"):
        engine_args("m", {"block_size": 0})


def test_public_names_exist_and_are_all_there_is() -> None:
    for name in qiao.__all__:
        assert getattr(qiao, name) is not None
    assert dir(qiao) == sorted(qiao.__all__)
    assert qiao.SamplingParams.__module__ == "qiao.sampling_params"
    with pytest.raises(AttributeError, match="no_such_name"):
        qiao.no_such_name  # noqa: B018


def test_importing_qiao_loads_nothing_heavy() -> None:
    heavy = "('torch', 'transformers', 'pluggy')"
    code = f"import sys, qiao; qiao.SamplingParams(); print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stop", 5),
        ("stop", [5]),
        ("stop_token_ids", 5),
        ("stop_token_ids", "12"),
        ("bad_words", "abc"),
        ("bad_words", [5]),
        ("allowed_token_ids", {5: 1.0}),
        ("logit_bias", [1]),
        ("logit_bias", {97.5: 1.0}),
        ("temperature", "1"),
        ("max_tokens", 2.5),
    ],
)
def test_sampling_fields_of_a_wrong_type_are_named(field: str, value: Any) -> None:
    with pytest.raises(ParameterError, match=f"^{field}: "):
        qiao.SamplingParams(**{field: value})


def test_numbers_and_collections_of_other_libraries_become_plain() -> None:
    params = qiao.SamplingParams(
        temperature=np.float32(0.5),
        max_tokens=np.int64(3),
        stop=("a", "b"),
        stop_token_ids={5},
        allowed_token_ids=np.array([5, 6]),
        logit_bias={np.int64(7): np.float32(2.0)},
    )
    assert msgspec.json.decode(msgspec.json.encode(params)) == {
        "temperature": 0.5,
        "max_tokens": 3,
        "stop": ["a", "b"],
        "stop_token_ids": [5],
        "allowed_token_ids": [5, 6],
        "logit_bias": {"7": 2.0},
    }


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("long_prefill_token_threshold", -1),
        ("gpu_memory_utilization", "0.5"),
        ("block_size", "16"),
        ("max_num_seqs", 0),
    ],
)
def test_engine_arguments_are_refused_before_anything_is_read(field: str, value: Any) -> None:
    with pytest.raises(ParameterError, match=f"^{field}: "):
        engine_args("m", {field: value})


@pytest.mark.parametrize(
    ("field", "value", "neutral", "instead"),
    [
        ("logits_processors", [print], [], "logit_bias"),
        ("extra_args", {"a": 1}, {}, "leave them out"),
        ("flat_logprobs", True, False, "list of dicts"),
        ("skip_reading_prefix_cache", True, False, "cache_salt"),
        ("thinking_token_budget", 0, None, "max_tokens"),
    ],
)
def test_sampling_fields_that_are_not_there_say_what_to_do(field: str, value: Any, neutral: Any, instead: str) -> None:
    with pytest.raises(ParameterError, match=f"^{field}: .*{instead}"):
        qiao.SamplingParams(**{field: value})
    plain = qiao.SamplingParams(**{field: neutral})
    assert plain == qiao.SamplingParams() and msgspec.json.encode(plain) == b"{}"
