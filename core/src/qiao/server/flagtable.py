"""Other spellings: vLLM's short flags and old names, and flags that have one possible value or no effect here."""

from __future__ import annotations

from collections.abc import Mapping

SHORT: Mapping[str, str] = {
    "-q": "--quantization",
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
}

ALIASES: Mapping[str, str] = {
    "model_tag": "model",
    "device_memory_utilization": "gpu_memory_utilization",
    "max_num_queued_requests": "max_num_queued_reqs",
    "log_level": "uvicorn_log_level",
    "disable_uvicorn_access_log": "disable_access_log",
    "num_device_blocks_override": "num_gpu_blocks_override",
}
"""Other name to field name."""

FIXED: Mapping[str, tuple[tuple[str, ...], str]] = {
    "tensor_parallel_size": (("1",), "one device a server for now"),
    "pipeline_parallel_size": (("1",), "one device a server for now"),
    "data_parallel_size": (("1",), "one device a server for now"),
    "tokenizer_mode": (("auto", "hf"), "there is one tokeniser mode"),
    "runner": (("auto", "generate"), "only generation is served"),
    "task": (("auto", "generate"), "only generation is served"),
    "cpu_offload_gb": (("0",), "weights are not offloaded"),
    "logprobs_mode": (("raw_logprobs",), "log-probabilities are the model's own"),
    "distributed_executor_backend": (("mp", "uni"), "one device a server for now"),
    "api_server_count": (("1",), "one front end for now"),
    "nnodes": (("1",), "one machine for now"),
    "config_format": (("auto", "hf"), "there is one config format"),
}
"""Flags whose other values would change what is served: those are refused, not ignored."""

IGNORED: Mapping[str, bool] = {
    "swap_space": True,
    "preemption_mode": True,
    "num_scheduler_steps": True,
    "use_v2_block_manager": False,
    "max_seq_len_to_capture": True,
    "disable_async_output_proc": False,
    "async_scheduling": False,
    "no_async_scheduling": False,
    "disable_log_requests": False,
    "enable_log_requests": False,
    "no_enable_log_requests": False,
    "disable_log_stats": False,
    "disable_frontend_multiprocessing": False,
    "guided_decoding_backend": True,
    "prefix_caching_hash_algo": True,
    "disable_custom_all_reduce": False,
    "enable_prompt_tokens_details": False,
    "enable_server_load_tracking": False,
    "compilation_config": True,
    "chat_template_content_format": True,
    "max_log_len": True,
    "stream_interval": True,
}
"""Accepted without effect, with a warning; the value says whether a value follows."""
