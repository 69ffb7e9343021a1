"""``qiao chat``, ``complete`` and ``bench`` against a stub server."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest
from qiao.cli.loadgen import Load, Timing, percentile, summarise
from qiao.cli.main import main
from qiao.errors import UsageError

from tests.support.openai_stub import openai_stub


def run(argv: list[str]) -> int:
    with pytest.raises(SystemExit) as stop:
        main(argv)
    return int(stop.value.code or 0)


def test_quick_chat_prints_the_streamed_answer(capsys: pytest.CaptureFixture[str]) -> None:
    with openai_stub(["Hel", "lo", " 桥"]) as stub:
        status = run(
            [
                "chat",
                "--url",
                stub.url,
                "-q",
                "hi",
                "--system-prompt",
                "be brief",
                "--max-tokens",
                "9",
                "--temperature",
                "0",
                "--stats",
            ]
        )
    printed = capsys.readouterr()
    assert status == 0
    assert printed.out == "Hello 桥\n"
    assert "7 prompt tokens, 3 generated" in printed.err
    path, _, body = stub.received[0]
    assert path == "/v1/chat/completions"
    assert body["model"] == "stub-model" and body["max_tokens"] == 9
    assert body["temperature"] == 0
    assert [m["role"] for m in body["messages"]] == ["system", "user"]


def test_conversation_sends_earlier_turns_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n"))
    with openai_stub(["ok"]) as stub:
        assert run(["chat", "--url", stub.url]) == 0
    assert [m["content"] for m in stub.received[1][2]["messages"]] == ["one", "ok", "two"]


def test_complete_sends_the_text_and_the_key(capsys: pytest.CaptureFixture[str]) -> None:
    with openai_stub([" world"]) as stub:
        assert run(["complete", "--url", stub.url + "/v1/", "-q", "hello", "--api-key", "k", "--model-name", "m"]) == 0
    path, headers, body = stub.received[0]
    assert (path, headers["Authorization"]) == ("/v1/completions", "Bearer k")
    assert (body["prompt"], body["model"]) == ("hello", "m")
    assert capsys.readouterr().out == " world\n"


@pytest.mark.parametrize(
    ("options", "status", "said"),
    [
        ({"status": 400}, 2, "400: no such thing"),
        ({"status": 401}, 2, "--api-key"),
        ({"status": 404}, 1, "404"),
        ({"status": 500}, 1, "500"),
        ({"truncate": True}, 1, "before its end"),
        ({"error_in_stream": True}, 1, "kernel failed"),
    ],
)
def test_a_server_error_is_one_line(
    options: dict[str, object], status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with openai_stub(["x"], **options) as stub:
        assert run(["chat", "--url", stub.url, "-q", "hi"]) == status
    printed = capsys.readouterr().err
    assert said in printed and printed.count("\n") == 1


def test_no_server_names_the_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["chat", "--url", "http://127.0.0.1:9", "-q", "hi"]) == 2
    assert "qiao serve" in capsys.readouterr().err
    assert run(["chat", "--url", "127.0.0.1:9", "-q", "hi"]) == 2
    assert "http://" in capsys.readouterr().err


def test_a_proxy_from_the_environment_is_not_used_for_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with openai_stub(["x"]) as stub:
        assert run(["complete", "--url", stub.url, "-q", "hi"]) == 0


@pytest.mark.parametrize("extra", [[], ["--chat"], ["--rate", "500"]])
def test_bench_counts_every_request(extra: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with openai_stub(["a", "b", "c"]) as stub:
        argv = ["bench", "--url", stub.url, "--requests", "6", "--concurrency", "3", "--output-tokens", "3", "--json"]
        assert run(argv + extra) == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["completed"], figures["failed"]) == (6, 0)
    assert (figures["prompt_tokens"], figures["completion_tokens"]) == (42, 18)
    assert figures["ttft_ms"]["p50"] <= figures["e2e_ms"]["p99"]
    prompts = [json.dumps(body.get("prompt") or body["messages"]) for _, _, body in stub.received]
    assert len(set(prompts)) == 6, "prefix caches must not help unless asked"


def test_bench_reports_failures(capsys: pytest.CaptureFixture[str]) -> None:
    with openai_stub(["a"], truncate=True) as stub:
        assert run(["bench", "--url", stub.url, "--requests", "2"]) == 1
    printed = capsys.readouterr()
    assert "2 failed" in printed.out and "ended early" in printed.err


def test_load_is_repeatable_and_checked() -> None:
    load = Load(requests=4, shared_words=3, input_words=5, rate=2.0)
    assert load.prompts() == Load(requests=4, shared_words=3, input_words=5, rate=2.0).prompts()
    assert {tuple(p.split()[:3]) for p in load.prompts()} == {tuple(load.prompts()[0].split()[:3])}
    assert load.arrivals() == sorted(load.arrivals())
    with pytest.raises(UsageError, match="--requests"):
        Load(requests=0)
    with pytest.raises(UsageError, match="--rate"):
        Load(rate=0.0)


def test_percentiles_are_numpys() -> None:
    values = list(np.random.default_rng(0).normal(size=37))
    for share in (0, 50, 90, 99, 100):
        assert percentile(values, share) == pytest.approx(np.percentile(values, share))


def test_figures_of_known_timings() -> None:
    timing = Timing(seconds=1.0, prompt_tokens=5)
    for moment in (0.2, 0.3, 0.5):
        timing.note({"choices": [{"text": "x"}]}, moment)
    timing.note({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 4}}, 0.5)
    figures = summarise(Load(requests=1), [timing], wall=2.0)
    assert figures["ttft_ms"]["mean"] == 200
    assert figures["tpot_ms"]["mean"] == 100  # (0.5 - 0.2) s over the 3 tokens after the first
    assert figures["itl_ms"]["mean"] == 150
    assert figures["output_tokens_per_second"] == 2
