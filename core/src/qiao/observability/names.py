"""Metric names in one place: vLLM's (new and old), the field's dashboards' and Qiao's own.

The one exemption from "no device name in core" is here: the dashboards of the field ask for ``npu_gpu_utilization``
and for vLLM's old ``gpu_cache_usage_perc`` by these names, whatever the device is.
"""

from __future__ import annotations

RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
WAITING_BY_PRIORITY = "qiao:num_requests_waiting_by_priority"
KV_USAGE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
"""Current name and the name up to vLLM 0.8. A share from 0 to 1 in spite of the name, as in vLLM."""
SWAPPED = "vllm:num_requests_swapped"
HOST_KV_USAGE = "vllm:cpu_cache_usage_perc"
ACTIVE_SEQS = "vllm:num_active_seqs"
UTILIZATION = "npu_gpu_utilization"
HIT_RATE = ("cache_hit_rate", "vllm:gpu_prefix_cache_hit_rate")

PROMPT_TOKENS = "vllm:prompt_tokens"
GENERATION_TOKENS = "vllm:generation_tokens"
PREEMPTIONS = "vllm:num_preemptions"
CACHED_BY_SOURCE = "vllm:prompt_tokens_cached_by_source"
EXTERNAL_QUERIES = "vllm:external_prefix_cache_queries"
EXTERNAL_HITS = "vllm:external_prefix_cache_hits"
PROMPT_BY_SOURCE = "vllm:prompt_tokens_by_source"
DRAFTS = "vllm:spec_decode_num_drafts"
DRAFT_TOKENS = "vllm:spec_decode_num_draft_tokens"
ACCEPTED_TOKENS = "vllm:spec_decode_num_accepted_tokens"
ACCEPTED_PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"
PREFIX_QUERIES = ("vllm:prefix_cache_queries", "vllm:gpu_prefix_cache_queries")
PREFIX_HITS = ("vllm:prefix_cache_hits", "vllm:gpu_prefix_cache_hits")

SUCCESS = "vllm:request_success"
REJECTED = "vllm:admission_rejections"
CACHE_INFO = "vllm:cache_config_info"
LORA_INFO = "vllm:lora_requests_info"

TTFT = ("vllm:time_to_first_token_seconds", "time_to_first_token")
ITL = ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds")
TPOT = "vllm:request_time_per_output_token_seconds"
E2E = "vllm:e2e_request_latency_seconds"
QUEUE = "vllm:request_queue_time_seconds"
PREFILL = "vllm:request_prefill_time_seconds"
DECODE = "vllm:request_decode_time_seconds"
INFERENCE = "vllm:request_inference_time_seconds"
REQUEST_PROMPT = "vllm:request_prompt_tokens"
REQUEST_GENERATION = "vllm:request_generation_tokens"
REQUEST_LONGEST = "vllm:request_max_num_generation_tokens"
REQUEST_COMPUTED = "vllm:request_prefill_kv_computed_tokens"
PARAMS_N = "vllm:request_params_n"
PARAMS_MAX_TOKENS = "vllm:request_params_max_tokens"

TENANT_REQUESTS = "qiao:tenant_requests"
TENANT_PROMPT_TOKENS = "qiao:tenant_prompt_tokens"
TENANT_GENERATION_TOKENS = "qiao:tenant_generation_tokens"
TENANT_TTFT = "qiao:tenant_time_to_first_token_seconds"
TENANT_REFUSALS = "qiao:tenant_refusals"

ALIAS_REQUESTS = "qiao:alias_requests"
ALIAS_PROMPT_TOKENS = "qiao:alias_prompt_tokens"
ALIAS_GENERATION_TOKENS = "qiao:alias_generation_tokens"
ALIAS_TTFT = "qiao:alias_time_to_first_token_seconds"
ALIAS_E2E = "qiao:alias_request_latency_seconds"

STEP_TOKENS = "vllm:iteration_tokens_total"
"""A histogram in spite of its name."""
WAITING_BY_REASON = "vllm:num_requests_waiting_by_reason"
SLEEP_STATE = "vllm:engine_sleep_state"
SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")
CACHED = "vllm:prompt_tokens_cached"

BLOCK_LIFETIME = "vllm:kv_block_lifetime_seconds"
BLOCK_IDLE = "vllm:kv_block_idle_before_evict_seconds"
BLOCK_REUSE = "vllm:kv_block_reuse_gap_seconds"
STORE_BYTES = "vllm:kv_offload_store_bytes"
STORE_TIME = "vllm:kv_offload_store_time"
STORE_SIZE = "vllm:kv_offload_store_size"
LOAD_BYTES = "vllm:kv_offload_load_bytes"
LOAD_TIME = "vllm:kv_offload_load_time"
LOAD_SIZE = "vllm:kv_offload_load_size"
LOOKUP_SYNC = "vllm:kv_offload_lookup_sync_delay_seconds"
LOOKUP_ASYNC = "vllm:kv_offload_lookup_async_delay_seconds"
ALLOCATION_FAILURES = "vllm:kv_offload_allocation_failure"
PINNED = "vllm:kv_offload_cpu_cache_usage_perc"
PINNED_WRITE = "vllm:kv_offload_cpu_cache_write_usage_perc"
PINNED_READ = "vllm:kv_offload_cpu_cache_read_usage_perc"
SAVES = "vllm:simple_kv_offload_save_outcomes"
SAVE_OUTCOMES = (
    *("stored", "skipped_already_cached", "skipped_in_flight", "dropped_cpu_full"),
    *("dropped_request_gone", "dropped_null_block", "dropped_not_hashed"),
)
"""vLLM's; those of the second line do not happen here."""
LOAD_BLOCKS = "vllm:simple_kv_offload_load_blocks"
USED_BLOCKS = "vllm:simple_kv_offload_used_blocks"
PENDING_STORES = "vllm:simple_kv_offload_pending_store_blocks"
KV_FETCH = "vllm:num_requests_kv_fetch_by_stage"
FETCH_STAGES = ("waiting_to_start", "in_progress", "completed_waiting")
FLOPS = "vllm:estimated_flops_per_gpu"
READ_BYTES = "vllm:estimated_read_bytes_per_gpu"
WRITE_BYTES = "vllm:estimated_write_bytes_per_gpu"

STEPS = "qiao:engine_steps"
OFFLOAD_BYTES = "qiao:kv_offload_bytes"
CAPTURED_STEPS = "qiao:captured_steps"
FALLBACK_CALLS = "qiao:fallback_calls"
FALLBACK_BYTES = "qiao:fallback_bytes"
FALLBACK_SECONDS = "qiao:fallback_seconds"
PROMPT_BUDGET = "qiao:step_prompt_budget_tokens"
ENGINE_UP = "qiao:engine_up"
ENGINE_RESTARTS = "qiao:engine_restarts"
WAITING_FOR_ENGINE = "qiao:num_requests_waiting_for_engine"

HTTP_REQUESTS = "http_requests"
HTTP_SECONDS = "http_request_duration_seconds"

LATENCY_BUCKETS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
ITL_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
STEP_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
RESIDENCY_BUCKETS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800),
)
TRANSFER_BUCKETS = (1e6, 5e6, 10e6, 20e6, 40e6, 60e6, 80e6, 100e6, 150e6, 200e6)
LOOKUP_BUCKETS = (0.00001, 0.00005, 0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1)
WAIT_BUCKETS = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10)
OPERATION_BUCKETS = (0.01, 0.1, 1, 10, 30, 60, 120, 300, 600)
NIXL_TIME_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 5)
NIXL_COUNT_BUCKETS = (10, 20, 30, 50, 75, 100, 200, 400, 1000, 2000, 4000, 10000, 20000, 50000)
N_BUCKETS = (1, 2, 5, 10, 20)


def token_buckets(max_model_len: int) -> tuple[int, ...]:
    """1, 2, 5, 10, ... up to ``max_model_len`` (vLLM's series)."""
    series = (step * 10**power for power in range(10) for step in (1, 2, 5))
    return tuple(value for value in series if value <= max_model_len) or (1,)
