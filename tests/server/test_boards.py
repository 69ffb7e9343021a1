"""Boards against a running server: ours, and every name that vLLM's example boards ask for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

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


@pytest.mark.parametrize("name", THEIRS["boards"])
def test_their_boards(rand: RunningServer, name: str) -> None:
    served = served_names(rand.http().get("/metrics").text)
    asked = THEIRS["boards"][name]
    assert asked
    assert [one for one in asked if one not in served] == []
