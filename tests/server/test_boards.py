"""Boards against a running server: ours, and every name and label that vLLM's example boards ask for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from qiao.engine.request import EngineStats
from qiao.observability.absent import ABSENT
from qiao.observability.metrics import Metrics, ServerMetrics

from tests.support.server import RunningServer
from tools.check_board import board_names, check, main, metric_names, served_names

OURS = Path(__file__).parents[2] / "deploy" / "grafana" / "qiao.json"
THEIRS = json.loads((Path(__file__).parent / "data" / "vllm_boards.json").read_text())


@pytest.mark.parametrize(
    ("expression", "names"),
    [
        ("vllm:num_requests_running", {"vllm:num_requests_running"}),
        ('sum by (le, model) (rate(a:b_bucket{m=~"$x", n="sum(no)"}[5m]))', {"a:b_bucket"}),
        ("sum(a) by (b) / on (c) group_left (d) e", {"a", "e"}),
        ("histogram_quantile(0.95, sum(rate(x_bucket[$__rate_interval])) without (le))", {"x_bucket"}),
        ("rate(x_sum[5m]) / (rate(x_count[5m]) > 0) or vector(0)", {"x_sum", "x_count"}),
        ("x offset 5m and y unless z # not w\n + v @ end()", {"x", "y", "z", "v"}),
        ('{__name__="deep", job="a}b"} + count_values("version", build)', {"deep", "build"}),
        ("topk(5, x) > bool 1e3 + Inf - NaN * .5", {"x"}),
        ("max_over_time(deriv(x[5m:1m])[10m:])", {"x"}),
        ("x{a='b \\' }', c=\"d\"} * $scale + ${other}", {"x"}),
        ("metric_${kind}_total + rest", {"rest"}),
        ("sum + avg", set()),
        ("1 + 2h", set()),
    ],
)
def test_names_in_promql(expression: str, names: set[str]) -> None:
    assert metric_names(expression) == names


def board(**parts: Any) -> dict[str, Any]:
    return {
        "panels": [{"title": "t", "targets": [{"expr": "top"}], "panels": [{"targets": [{"expr": "deep"}]}]}],
        **parts,
    }


def test_everywhere_in_a_board() -> None:
    variables = [
        {"type": "query", "name": "a", "query": {"query": 'label_values(in_a{b="c"}, model)'}},
        {"type": "query", "name": "b", "query": "query_result(in_b)"},
        {"type": "query", "name": "c", "query": "label_values(model_name)"},
        {"type": "custom", "name": "d", "query": "avg : Average"},
    ]
    found = board_names(board(templating={"list": variables}, annotations={"list": [{"name": "n", "expr": "in_n"}]}))
    assert list(found) == ["deep", "in_a", "in_b", "in_n", "top"]
    assert found["top"] == ["panel 't'"]
    assert list(board_names({"dashboard": {"rows": [{"panels": [{"id": 1, "targets": [{"expr": "old"}]}]}]}})) == [
        "old"
    ]


def test_a_missing_metric_is_told(rand: RunningServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = tmp_path / "wrong.json"
    wrong.write_text(json.dumps(board()))
    assert main([str(wrong), "--url", rand.url, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)[str(wrong)]["missing"] == {"deep": ["panel None"], "top": ["panel 't'"]}
    wrong.write_text("{}")
    assert main([str(wrong), "--url", rand.url]) == 1
    assert main([str(wrong), "--url", "http://127.0.0.1:1"]) == 2


def test_our_board(rand: RunningServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(OURS), "--url", rand.url]) == 0, capsys.readouterr().out
    names = check([OURS], rand.http().get("/metrics").text)[str(OURS)]["metrics"]
    assert len(names) > 25


def test_labels_of_our_board(rand: RunningServer) -> None:
    """The labels that it filters and groups by are those of the series, for the metrics that have any."""
    rand.openai().completions.create(model="M", prompt="hi", max_tokens=2)
    assert rand.metric("qiao:tenant_requests_total", model_name="M", tenant="default") >= 1
    assert rand.metric("vllm:iteration_tokens_total_count", model_name="M", engine="0") >= 2
    assert rand.metric("vllm:request_max_num_generation_tokens_sum", model_name="M") >= 2


def page_with_all_features() -> str:
    """A page in this process of an engine with LoRA and guesses, whose series an idle server does not have."""
    stats = EngineStats(running_adapters=[], accepted_per_position=[1])
    page = ServerMetrics()
    page.models["M"] = Metrics("M", lambda: [stats], max_model_len=512, cache_info={}, max_loras=2)
    return page.render()[0].decode()


@pytest.mark.parametrize("name", THEIRS["boards"])
def test_their_boards(rand: RunningServer, name: str) -> None:
    """Every name, and on its series every label that the board filters or groups by."""
    pages = [rand.http().get("/metrics").text, page_with_all_features()]
    asked = THEIRS["boards"][name]
    assert asked
    assert [one for one in asked if one not in served_names(pages[0])] in ([], ["vllm:lora_requests_info"])
    series = [sample for page in pages for family in text_string_to_metric_families(page) for sample in family.samples]
    for metric, labels in asked.items():
        found = [set(sample.labels) for sample in series if sample.name == metric]
        assert found, f"no series of {metric}"
        assert any(set(labels) <= one for one in found), f"{metric} has {found[0]}, the board asks for {labels}"


def test_what_is_not_there_is_zero_and_says_so() -> None:
    families = {one.name: one for one in text_string_to_metric_families(page_with_all_features())}
    for one in ABSENT:
        family = families[one.name]
        assert family.documentation.startswith("Always 0: ") and one.why in family.documentation
        assert {sample.value for sample in family.samples} == {0.0}
        assert {sample.labels.get("operation", "") for sample in family.samples} == set(one.operations or [""])


def test_cache_settings_are_labels(rand: RunningServer) -> None:
    """The ``rand`` server has a prefix cache and keeps nothing beside the device."""
    given = {"prefix_caching_hash_algo": "sha256", "num_cpu_blocks": "0", "num_gpu_blocks": "64"}
    off = {"kv_offloading_backend": "None", "kv_offloading_size": "None"}
    assert rand.metric("vllm:cache_config_info", **given, **off) == 1


def test_prompt_tokens_by_source_add_up(rand: RunningServer) -> None:
    prompt = "a prompt of more than two blocks of sixteen bytes"
    for _ in range(2):
        rand.openai().completions.create(model="M", prompt=prompt, max_tokens=1)
    rand.wait_for(lambda: rand.metric("vllm:num_requests_running") == 0)
    by_source = "vllm:prompt_tokens_by_source_total"
    assert rand.metric(by_source, source="local_cache_hit") >= 32
    assert rand.metric(by_source, source="external_kv_transfer") == 0
    assert rand.metric(by_source) == rand.metric("vllm:prompt_tokens_total")
    computed = rand.metric("vllm:request_prefill_kv_computed_tokens_sum")
    assert 0 < computed <= rand.metric("vllm:request_prompt_tokens_sum") - 32
