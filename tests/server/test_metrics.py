"""The metrics page, read back with Prometheus's own parser."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families
from qiao.engine.request import EngineStats, FallbackCount, Histogram, OffloadStats, ResidencyStats, WorkStats
from qiao.observability.metrics import FinishedRequest, Metrics, ServerMetrics

STATS = EngineStats(
    running=3,
    waiting=2,
    waiting_by_class={"urgent": 2, "low": 0},
    kv_blocks_total=10,
    kv_blocks_used=4,
    prefix_queries=100,
    prefix_hits=25,
    preemptions=1,
    steps=9,
    captured_steps=6,
    prompt_tokens=50,
    generation_tokens=70,
    step_sizes=Histogram([4, 3, 1, 1, *[0] * 10], 120),
    utilization=0.5,
    drafts=5,
    draft_tokens=15,
    accepted_tokens=7,
    accepted_per_position=[4, 3],
    prompt_from_device=20,
    prompt_from_outside=12,
    offload=OffloadStats(
        queries=75,
        host_hits=30,
        disk_hits=10,
        host_bytes=512,
        host_capacity=2048,
        disk_bytes=4096,
        store_bytes=6_000_000,
        store_seconds=0.5,
        store_sizes=Histogram([1, 1, *[0] * 9], 6_000_000),
        load_bytes=2000,
        load_seconds=0.25,
        load_sizes=Histogram([2, *[0] * 10], 2000),
        load_blocks=4,
        lookups=Histogram([*[0] * 11, 3], 6.0),
        waits=Histogram([0, 5, *[0] * 10], 0.001),
        save_outcomes={"stored": 9, "dropped_cpu_full": 2},
        failures=2,
        pending_blocks=3,
        pending_bytes=300,
        fetched_blocks=1,
        fetched_bytes=100,
        transfer_capacity=1000,
        fetches={"in_progress": 1},
    ),
    residency=ResidencyStats(lifetime=Histogram([*[0] * 21, 2], 5000.0)),
    work=WorkStats(flops=1000, read_bytes=2000, write_bytes=30),
    fallbacks=[FallbackCount("attention", 7, 100, 200, 1.5)],
)


def make() -> Metrics:
    return Metrics("M", lambda: [STATS], max_model_len=512, cache_info={"block_size": "16", "num_gpu_blocks": "10"})


def samples(*models: Metrics) -> dict[str, float]:
    server = ServerMetrics()
    server.models = dict(enumerate(models))
    server.http("/v1/models", "BREW", 200, 0.1)
    page, _ = server.render()
    families = text_string_to_metric_families(page.decode())
    ignored = {"model_name", "engine"}
    return {
        s.name + "".join(f"|{v}" for k, v in sorted(s.labels.items()) if k not in ignored): s.value
        for family in families
        for s in family.samples
    }


def test_gauges_counters_and_their_old_names() -> None:
    got = samples(make())
    assert got["vllm:num_requests_running"] == got["vllm:num_active_seqs"] == 3
    assert got["vllm:num_requests_waiting"] == 2
    assert got["qiao:num_requests_waiting_by_priority|urgent"] == 2
    assert got["qiao:num_requests_waiting_by_priority|low"] == 0
    assert got["vllm:kv_cache_usage_perc"] == got["vllm:gpu_cache_usage_perc"] == 0.4
    assert got["cache_hit_rate"] == got["vllm:gpu_prefix_cache_hit_rate"] == 0.25
    assert got["npu_gpu_utilization"] == 0.5
    assert got["vllm:prompt_tokens_total"] == 50
    assert got["vllm:generation_tokens_total"] == 70
    assert got["vllm:num_preemptions_total"] == 1
    assert got["qiao:engine_steps_total"] == 9 and got["qiao:captured_steps_total"] == 6
    assert got["vllm:prefix_cache_queries_total"] == got["vllm:gpu_prefix_cache_queries_total"] == 100
    assert got["vllm:prefix_cache_hits_total"] == 25
    assert got["vllm:prompt_tokens_cached_by_source_total|device"] == 25
    assert got["vllm:prompt_tokens_cached_by_source_total|host"] == 30
    assert got["vllm:prompt_tokens_cached_by_source_total|disk"] == 10
    assert got["vllm:external_prefix_cache_queries_total"] == 75
    assert got["vllm:external_prefix_cache_hits_total"] == 40
    assert got["vllm:cpu_cache_usage_perc"] == 0.25
    assert (got["qiao:kv_offload_bytes|host"], got["qiao:kv_offload_bytes|disk"]) == (512, 4096)
    assert got["vllm:num_requests_waiting_by_reason|capacity"] == 2
    assert got["vllm:num_requests_waiting_by_reason|deferred"] == 0
    assert got["vllm:prompt_tokens_cached_total"] == 65
    assert (got["vllm:iteration_tokens_total_sum"], got["vllm:iteration_tokens_total_count"]) == (120, 9)
    assert got["vllm:iteration_tokens_total_bucket|8.0"] == 7
    assert got["vllm:spec_decode_num_drafts_total"] == 5
    assert got["vllm:spec_decode_num_draft_tokens_total"] == 15
    assert got["vllm:spec_decode_num_accepted_tokens_total"] == 7
    assert got["vllm:spec_decode_num_accepted_tokens_per_pos_total|0"] == 4
    assert got["vllm:spec_decode_num_accepted_tokens_per_pos_total|1"] == 3
    assert got["qiao:fallback_calls_total|attention"] == 7
    assert got["qiao:fallback_bytes_total|to_host|attention"] == 100
    assert got["qiao:fallback_bytes_total|to_device|attention"] == 200
    assert got["qiao:fallback_seconds_total|attention"] == 1.5
    assert got["vllm:cache_config_info|16|10"] == 1


def test_the_cache_beside_the_device() -> None:
    got = samples(make())
    sources = "vllm:prompt_tokens_by_source_total|"
    assert got[sources + "local_cache_hit"] == 20 and got[sources + "external_kv_transfer"] == 12
    assert got[sources + "local_compute"] == 50 - 32
    kv = "vllm:kv_offload_"
    assert (got[kv + "store_bytes_total"], got[kv + "store_time_total"]) == (6_000_000, 0.5)
    assert (got[kv + "load_bytes_total"], got[kv + "load_time_total"]) == (2000, 0.25)
    assert (got[kv + "store_size_count"], got[kv + "store_size_bucket|1e+06"]) == (2, 1)
    assert (got[kv + "load_size_sum"], got[kv + "load_size_count"]) == (2000, 2)
    assert (got[kv + "lookup_sync_delay_seconds_bucket|1.0"], got[kv + "lookup_sync_delay_seconds_count"]) == (0, 3)
    assert got[kv + "lookup_async_delay_seconds_bucket|0.0005"] == 5
    assert got[kv + "allocation_failure_total"] == 2
    usage = [got[f"{kv}cpu_cache_{part}usage_perc"] for part in ("write_", "read_", "")]
    assert usage == [0.3, 0.1, 0.4]
    simple = "vllm:simple_kv_offload_"
    assert got[simple + "save_outcomes_total|stored"] == 9
    assert got[simple + "save_outcomes_total|skipped_in_flight"] == 0
    assert (got[simple + "used_blocks"], got[simple + "pending_store_blocks"]) == (4, 3)
    assert got[simple + "load_blocks_total|completed"] == 4
    assert got["vllm:num_requests_kv_fetch_by_stage|in_progress"] == 1
    assert got["vllm:num_requests_kv_fetch_by_stage|waiting_to_start"] == 0
    assert got["vllm:kv_block_lifetime_seconds_count"] == 2 and got["vllm:kv_block_reuse_gap_seconds_count"] == 0
    assert [got[f"vllm:estimated_{what}_per_gpu_total"] for what in ("flops", "read_bytes", "write_bytes")] == [
        1000,
        2000,
        30,
    ]


def test_requests_are_counted() -> None:
    metrics = make()
    metrics.first_token(0.2)
    metrics.next_token(0.02)
    metrics.finished(
        FinishedRequest(
            finish_reasons=["stop", "made up by nobody"],
            prompt_tokens=5,
            generation_tokens=22,
            n=2,
            max_tokens=16,
            e2e=1.2,
            queue=0.1,
            prefill=0.1,
            decode=1.0,
            longest=16,
            cached_tokens=3,
        )
    )
    metrics.rejected()
    got = samples(metrics)
    assert got["vllm:request_success_total|stop"] == 1
    assert got["vllm:request_success_total|error"] == 1
    assert got["vllm:request_success_total|abort"] == 0
    assert got["vllm:time_to_first_token_seconds_sum"] == got["time_to_first_token_sum"] == 0.2
    assert got["vllm:inter_token_latency_seconds_sum"] == got["vllm:time_per_output_token_seconds_sum"] == 0.02
    assert got["vllm:request_time_per_output_token_seconds_sum"] == 0.1  # 1 s over the ten tokens after the first
    assert got["vllm:request_max_num_generation_tokens_sum"] == 16
    assert got["vllm:request_prefill_kv_computed_tokens_sum"] == 2
    assert got["vllm:e2e_request_latency_seconds_sum"] == 1.2
    assert got["vllm:request_inference_time_seconds_sum"] == 1.1
    assert got["vllm:admission_rejections_total|max_num_queued_reqs"] == 1
    assert got["http_requests_total|/v1/models|other|2xx"] == 1


def test_registries_are_separate() -> None:
    make().rejected()
    assert "vllm:admission_rejections_total|max_num_queued_reqs" not in samples(make())


def test_engines_and_models_share_each_family() -> None:
    """A name may have its type once only on a page, which Prometheus's own reader demands."""
    idle = EngineStats(running=5)
    two = Metrics("A", lambda: [STATS, idle], max_model_len=512, cache_info={})
    other = Metrics("B", lambda: [idle], max_model_len=512, cache_info={})
    server = ServerMetrics()
    server.models = {"A": two, "B": other}
    page = server.render()[0].decode()
    heads = [line for line in page.splitlines() if line.startswith("# TYPE")]
    assert len(heads) == len(set(heads))
    found = {
        (s.labels["model_name"], s.labels["engine"]): s.value
        for family in text_string_to_metric_families(page)
        for s in family.samples
        if s.name == "vllm:num_requests_running"
    }
    assert found == {("A", "0"): 3, ("A", "1"): 5, ("B", "0"): 5}
