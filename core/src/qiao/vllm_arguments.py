"""vLLM's arguments that are no fields here: other names, those with one possible value, those without effect.

One table for the keyword arguments of ``LLM`` and the flags of the commands.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

SHORT: Mapping[str, str] = MappingProxyType(
    {
        "-q": "--quantization",
        "-tp": "--tensor-parallel-size",
        "-pp": "--pipeline-parallel-size",
        "-dp": "--data-parallel-size",
        "-sc": "--speculative-config",
    }
)

ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "model_tag": "model",
        "device_memory_utilization": "gpu_memory_utilization",
        "max_num_queued_requests": "max_num_queued_reqs",
        "log_level": "uvicorn_log_level",
        "disable_uvicorn_access_log": "disable_access_log",
        "num_device_blocks_override": "num_gpu_blocks_override",
        "spec_method": "speculative_config.method",
        "spec_model": "speculative_config.model",
        "spec_tokens": "speculative_config.num_speculative_tokens",
        "override_pooler_config": "pooler_config",
        "rope_scaling": "hf_overrides.rope_scaling",
        "rope_theta": "hf_overrides.rope_theta",
    }
)
"""Other name to field name, or to a key of a field that holds an object."""


@dataclass(frozen=True, slots=True)
class Only:
    """The ``values`` that mean what is done anyway, and why there are no others."""

    values: tuple[Any, ...]
    why: str

    @property
    def switch(self) -> bool:
        """Whether the flag takes no value."""
        return all(isinstance(value, bool) for value in self.values)

    @property
    def texts(self) -> tuple[str, ...]:
        """``values`` as people write them in flags."""
        return tuple(str(value).lower() for value in self.values if not isinstance(value, list))


_ONE_DEVICE = "one device a server for now"
_NOT_YET = "it would change answers and is not supported yet"

FIXED: Mapping[str, Only] = MappingProxyType(
    {
        "tensor_parallel_size": Only((1,), _ONE_DEVICE),
        "pipeline_parallel_size": Only((1,), _ONE_DEVICE),
        "data_parallel_size": Only((1,), _ONE_DEVICE),
        "enable_expert_parallel": Only((False,), _ONE_DEVICE),
        "distributed_executor_backend": Only((None, "mp", "uni"), _ONE_DEVICE),
        "api_server_count": Only((1,), "one front end for now"),
        "nnodes": Only((1,), "one machine for now"),
        "cpu_offload_gb": Only((0,), "weights are not offloaded"),
        "kv_offloading_backend": Only(("native", None), "blocks are kept in this process's memory and in files"),
        "kv_transfer_config": Only((None,), "caches are not transferred between servers"),
        "logits_processors": Only((None, []), _NOT_YET),
        "quantization_config": Only((None,), "the checkpoint says how it is quantized"),
        "skip_tokenizer_init": Only((False,), "text needs the tokenizer"),
        "tokenizer_mode": Only(("auto", "hf", "slow"), "there is one tokeniser mode"),
        "runner": Only(("auto", "generate", "pooling"), "one server both generates and embeds"),
        "task": Only(("auto", "generate", "embed", "embedding"), "one server both generates and embeds"),
        "convert": Only(("auto", "none", "embed"), "one server both generates and embeds"),
        "disable_sliding_window": Only((False,), _NOT_YET),
        "logprobs_mode": Only(("raw_logprobs",), "log-probabilities are the model's own"),
        "config_format": Only(("auto", "hf"), "there is one config format"),
        "enable_sleep_mode": Only((False,), "a model stays in memory until the process ends"),
    }
)
"""Arguments whose other values would change answers or memory: those are refused, not ignored."""

IGNORED: Mapping[str, bool] = MappingProxyType(
    {
        "allowed_local_media_path": True,
        "allowed_media_domains": True,
        "async_scheduling": False,
        "attention_config": True,
        "compilation_config": True,
        "disable_async_output_proc": False,
        "disable_custom_all_reduce": False,
        "disable_frontend_multiprocessing": False,
        "disable_log_requests": False,
        "disable_log_stats": False,
        "enable_log_requests": False,
        "enable_prompt_tokens_details": False,
        "enable_reasoning": False,
        "enable_server_load_tracking": False,
        "exclude_tools_when_tool_choice_none": False,
        "guided_decoding_backend": True,
        "hf_token": True,
        "max_cpu_loras": True,
        "max_log_len": True,
        "max_seq_len_to_capture": True,
        "mm_processor_kwargs": True,
        "num_scheduler_steps": True,
        "preemption_mode": True,
        "prefix_caching_hash_algo": True,
        "stream_interval": True,
        "structured_outputs_config": True,
        "swap_space": True,
        "use_v2_block_manager": False,
        "worker_cls": True,
    }
)
"""Accepted without effect, with a warning; the value says whether the flag takes a value."""
