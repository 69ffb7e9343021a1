"""Tenants through HTTP: who is let in, what each may do, and what it has left."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from qiao.observability.audit import verify
from qiao.tenants import KeyStore, Tenant
from qiao.tenants.usage import utc_day

from tests.support.server import HELD, RunningServer, scripted, server

ENDLESS = dict.fromkeys(range(260), 97)


@dataclass
class Site:
    """A running server and its file of keys."""

    running: RunningServer
    store: KeyStore

    def key(self, tenant: str, **limits: Any) -> str:
        """A new key of a tenant with these limits; the server does not know it yet."""
        self.store.put_tenant(Tenant(name=tenant, **limits))
        return self.store.add_key(tenant).text

    def reload(self) -> None:
        """Let the server read the file, and wait until it has."""
        probe = self.key("probe")
        self.running.process.send_signal(signal.SIGHUP)
        self.running.wait_for(lambda: self.get(probe, "/v1/models").status_code == 200)

    def get(self, key: str, path: str) -> httpx.Response:
        return self.running.http().get(path, headers={"Authorization": f"Bearer {key}"})

    def ask(self, key: str, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
        given = {"prompt": "abcd", "max_tokens": 4, "ignore_eos": True, **body}
        with self.running.http(headers={"Authorization": f"Bearer {key}", **(headers or {})}) as client:
            return client.post("/v1/completions", json=given)


def start(store: KeyStore, model: Path, *flags: str) -> Any:
    return scripted("--keys", str(store.path), "--api-key", "PLAIN", *flags, model=model, table=ENDLESS, pause=0.002)


@pytest.fixture(scope="module")
def site(rand_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    store = KeyStore(tmp_path_factory.mktemp("keys") / "keys.db")
    store.create()
    with start(store, rand_folder, "--scheduling-policy", "priority") as running:
        yield Site(running, store)


def code(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def test_keys_of_the_file_and_plain_ones(site: Site) -> None:
    key = site.key("acme")
    assert code(site.ask(key)) == (401, "invalid_api_key")
    site.reload()
    assert site.ask(key).status_code == site.ask("PLAIN").status_code == 200
    assert code(site.ask(key[:-1])) == (401, "invalid_api_key")
    assert site.running.http().post("/v1/completions", json={"prompt": "a"}).status_code == 401
    anthropic = site.running.http().get("/v1/models", headers={"x-api-key": key})
    both = site.running.http().get("/v1/models", headers={"x-api-key": key, "Authorization": f"Bearer {key}"})
    assert (anthropic.status_code, both.status_code) == (200, 401)
    with pytest.raises(openai.AuthenticationError):
        site.running.openai(api_key="qk-0-0").models.list()


def test_a_revoked_key_is_refused_after_sighup_and_what_runs_goes_on(site: Site) -> None:
    key = site.key("leaving")
    site.reload()
    answers: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: answers.append(site.ask(key, max_tokens=400)))
    thread.start()
    site.running.wait_for(lambda: site.get("PLAIN", "/load").json()["server_load"] == 1)
    site.store.revoke(key.split("-")[1])
    site.reload()
    assert code(site.ask(key))[0] == 401
    thread.join()
    assert answers[0].status_code == 200 and answers[0].json()["usage"]["completion_tokens"] == 400


def test_a_broken_file_leaves_the_keys_as_they_were(site: Site) -> None:
    key = site.key("steady")
    site.reload()
    hidden = site.store.path.with_suffix(".hidden")
    site.store.path.rename(hidden)
    site.running.process.send_signal(signal.SIGHUP)
    site.running.wait_for(lambda: any("keys stay as they were" in line for line in site.running.log))
    assert site.ask(key).status_code == 200
    hidden.rename(site.store.path)


def test_models_that_the_key_does_not_cover(site: Site) -> None:
    key = site.key("narrow", models=("org/M",))
    site.reload()
    assert site.ask(key, model="org/M").status_code == 200
    assert code(site.ask(key, model="M")) == (403, "forbidden")
    assert code(site.ask(key)) == (403, "forbidden"), "the default model is M"
    assert code(site.ask(key, model="X")) == (404, "model_not_found")
    assert [card["id"] for card in site.get(key, "/v1/models").json()["data"]] == ["org/M"]
    assert site.get(key, "/v1/models/M").status_code == 403
    with pytest.raises(openai.PermissionDeniedError):
        site.running.openai(api_key=key).completions.create(model="M", prompt="a")


def test_priority_only_where_the_key_allows(site: Site) -> None:
    plain, trusted = site.key("plain"), site.key("trusted", may_set_priority=True)
    site.reload()
    assert code(site.ask(plain, priority=-5)) == (403, "forbidden")
    assert code(site.ask(plain, {"X-Priority": "urgent"})) == (403, "forbidden")
    assert site.ask(trusted, {"X-Priority": "urgent"}, priority=3).status_code == 200
    assert site.ask(trusted, {"X-Priority": "-7"}).status_code == 200
    assert site.ask(trusted, {"X-Priority": "soon"}).json()["error"]["param"] == "X-Priority"


def test_requests_a_minute(site: Site) -> None:
    key = site.key("calls", requests_per_minute=3)
    site.reload()
    answers = [site.ask(key) for _ in range(4)]
    assert [a.status_code for a in answers] == [200, 200, 200, 429]
    assert [a.headers["x-ratelimit-remaining-requests"] for a in answers] == ["2", "1", "0", "0"]
    last = answers[-1]
    assert code(last) == (429, "rate_limit_exceeded")
    assert last.json()["error"]["type"] == "rate_limit_error"
    assert 1 <= int(last.headers["retry-after"]) <= 20
    assert last.headers["x-ratelimit-limit-requests"] == "3"
    assert site.get(key, "/v1/models").status_code == 200, "only work counts"
    with pytest.raises(openai.RateLimitError):
        site.running.openai(api_key=key).completions.create(model="M", prompt="a")


def test_tokens_a_minute_are_set_aside_and_settled(site: Site) -> None:
    """4 prompt tokens each; the answer is counted as long as it may be, then as it was."""
    key = site.key("tokens", tokens_per_minute=100)
    site.reload()
    first = site.ask(key, max_tokens=60, stop="aa")
    assert first.headers["x-ratelimit-remaining-tokens"] in ("36", "94"), "before or after the end of the answer"
    after = site.get(key, "/v1/models").headers
    used = first.json()["usage"]["total_tokens"]
    assert used < 10
    assert 100 - used <= int(after["x-ratelimit-remaining-tokens"]) <= 100
    assert site.ask(key, max_tokens=200).status_code == 429, "the whole minute would be needed"
    assert code(site.ask(key, prompt=[5] * 101)) == (429, "request_too_large")


def test_several_prompts_are_counted_before_any_runs(site: Site) -> None:
    key = site.key("batch", tokens_per_day=100)
    site.reload()
    assert code(site.ask(key, prompt=["abcd"] * 30)) == (429, "request_too_large")
    assert site.ask(key, prompt=["abcd"] * 5, max_tokens=2, n=2).json()["usage"]["total_tokens"] == 40
    assert site.ask(key, prompt=["abcd"] * 5, max_tokens=2, n=2).status_code == 200
    assert code(site.ask(key, prompt=["abcd"] * 5, max_tokens=2, n=2)) == (429, "daily_quota_exceeded")


def test_a_stream_and_a_client_that_leaves_are_settled(site: Site) -> None:
    key = site.key("leaver", tokens_per_day=450, concurrent_requests=1)
    site.reload()
    body = {"prompt": "abcd", "max_tokens": 440, "ignore_eos": True}
    headers = {"Authorization": f"Bearer {key}"}
    with (
        site.running.http(headers=headers) as client,
        site.running.http(headers=headers) as second,
        client.stream("POST", "/v1/completions", json={**body, "stream": True}) as stream,
    ):
        lines = stream.iter_lines()  # kept: the connection is closed with it
        next(lines)
        assert code(second.post("/v1/completions", json=body)) == (429, "concurrency_limit_exceeded")
    site.running.wait_for(lambda: site.ask(key, max_tokens=100).status_code == 200)


def test_a_deadline_that_has_passed(site: Site) -> None:
    assert site.ask("PLAIN", {"X-Deadline-Ms": "60000"}, deadline_ms=50000).status_code == 200
    assert code(site.ask("PLAIN", deadline_ms=0.001)) == (504, "deadline_exceeded")
    for wrong in ("0", "-1", "soon", "1e3", "99999999999"):
        assert site.ask("PLAIN", {"X-Deadline-Ms": wrong}).json()["error"]["param"] == "X-Deadline-Ms"
    assert site.ask("PLAIN", deadline_ms=-1).status_code == 400


ROUTES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "a"}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ("/v1/responses", {"input": "a"}),
    ("/v1/messages", {"model": "M", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}),
    ("/v1/embeddings", {"input": "a"}),
    ("/v1/score", {"text_1": "a", "text_2": "b"}),
    ("/v1/rerank", {"query": "a", "documents": ["b"]}),
]


@pytest.mark.parametrize(("path", "body"), ROUTES, ids=[path for path, _ in ROUTES])
def test_every_route_that_computes_takes_a_deadline(site: Site, path: str, body: dict[str, Any]) -> None:
    with site.running.http(headers={"Authorization": "Bearer PLAIN"}) as client:
        assert client.post(path, json={**body, "deadline_ms": 0.001}).status_code == 504
        assert client.post(path, json={**body, "deadline_ms": -1}).status_code == 400


def test_responses_are_their_tenant_s_and_count_while_they_run(site: Site) -> None:
    mine, other = site.key("mine", concurrent_requests=1), site.key("other")
    site.reload()
    client, stranger = site.running.openai(api_key=mine), site.running.openai(api_key=other)
    held = {"cache_salt": HELD}
    made = client.responses.create(model="M", input="a", background=True, extra_body=held)
    with pytest.raises(openai.RateLimitError):
        client.responses.create(model="M", input="a")
    for reach in (stranger.responses.retrieve, stranger.responses.cancel, stranger.responses.delete):
        with pytest.raises(openai.NotFoundError):
            reach(made.id)
    assert client.responses.cancel(made.id).status == "cancelled"
    for reach in (stranger.responses.retrieve, stranger.responses.cancel, stranger.responses.delete):
        with pytest.raises(openai.NotFoundError):
            reach(made.id)
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        stranger.responses.create(model="M", input="a", previous_response_id=made.id)
    assert client.responses.create(model="M", input="a", max_output_tokens=2).status == "incomplete"


def test_restarts_keep_the_days_tokens(rand_folder: Path, tmp_path: Path) -> None:
    store = KeyStore(tmp_path / "keys.db")
    store.create()
    store.put_tenant(Tenant(name="daily", tokens_per_day=50))
    key = store.add_key("daily").text
    with start(store, rand_folder) as running:
        site = Site(running, store)
        assert site.ask(key, max_tokens=30).status_code == 200
        assert code(site.ask(key, max_tokens=30)) == (429, "daily_quota_exceeded")
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(timeout=60) == 0
    assert store.usage(utc_day(time.time())) == {"daily": 34}
    with start(store, rand_folder) as running:
        site = Site(running, store)
        answer = site.ask(key, max_tokens=30)
        assert code(answer) == (429, "daily_quota_exceeded")
        assert 1 <= int(answer.headers["retry-after"]) <= 86400
        assert site.ask(key, max_tokens=12).status_code == 200
        running.wait_for(lambda: store.usage(utc_day(time.time())) == {"daily": 50})


def test_prefixes_are_kept_apart(rand_folder: Path, tmp_path: Path) -> None:
    """The real engine: one tenant never finds what another has cached, unless both share; ``cache_salt`` splits one."""
    store = KeyStore(tmp_path / "keys.db")
    store.create()
    flags = ("--keys", str(store.path), "--dtype", "float32", "--num-gpu-blocks-override", "64", "--threads", "1")
    found = {}
    for name, share in (("a", False), ("b", False), ("c", True), ("d", True)):
        store.put_tenant(Tenant(name=name, share_prefixes=share))
        found[name] = store.add_key(name).text
    with server(rand_folder, *flags) as running:
        site = Site(running, store)

        def cached(name: str, **body: Any) -> int:
            answer = site.ask(found[name], prompt=[7, 8, 9] * 20, max_tokens=1, **body)
            return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

        assert [cached("a"), cached("a")] == [0, 48]
        assert [cached("b"), cached("b"), cached("b", cache_salt="x")] == [0, 48, 0]
        assert [cached("c"), cached("d"), cached("d", cache_salt="a")] == [0, 48, 0]
        assert cached("b", cache_salt="a") == 0


def test_the_audit_log_tells_each_request(rand_folder: Path, tmp_path: Path) -> None:
    store = KeyStore(tmp_path / "keys.db")
    store.create()
    store.put_tenant(Tenant(name="acme", requests_per_minute=3))
    made = store.add_key("acme")
    log = tmp_path / "audit.jsonl"
    flags = ("--audit-log", str(log), "--audit-content", "full", "--audit-redact", "email")
    with start(store, rand_folder, *flags) as running:
        site = Site(running, store)
        site.ask(made.text, {"X-Request-Id": "mine"}, prompt="mail bob@example.com", stream=False)
        site.ask(made.text, stream=True)
        site.ask(made.text, model="X")
        site.ask(made.text)
        site.ask("wrong-key-text")
        site.get(made.text, "/v1/models")
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(timeout=60) == 0
        assert "bob@" not in "".join(running.log)
    assert verify(log).problems == []
    text = log.read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    told = [(e["tenant"], e["status"], e["outcome"]) for e in lines]
    assert told == [
        ("acme", 200, "ok"),
        ("acme", 200, "ok"),
        ("acme", 404, "refused"),
        ("acme", 429, "over_quota"),
        ("", 401, "unauthenticated"),
    ]
    first = lines[0]
    assert (first["request_id"], first["key"], first["model"]) == ("mine", made.id, "M")
    assert (first["prompt_tokens"], first["answer_tokens"], first["finish_reasons"]) == (20, 4, ["length"])
    assert first["answers"] == ["aaaa"] and "[redacted]" in first["request"]
    assert 0 < first["first_token_seconds"] <= first["seconds"]
    assert lines[1]["answers"] == ["aaaa"] and lines[1]["answer_tokens"] == 4
    assert made.text not in text and "bob@example.com" not in text and "wrong-key-text" not in text


def test_metrics_by_tenant(site: Site) -> None:
    key = site.key("measured", requests_per_minute=2)
    site.reload()
    statuses = [site.ask(key).status_code for _ in range(3)]
    assert statuses == [200, 200, 429]
    page = site.get("PLAIN", "/metrics").text
    for line in (
        'qiao:tenant_requests_total{finished_reason="length",model_name="M",tenant="measured"} 2.0',
        'qiao:tenant_prompt_tokens_total{model_name="M",tenant="measured"} 8.0',
        'qiao:tenant_generation_tokens_total{model_name="M",tenant="measured"} 8.0',
        'qiao:tenant_refusals_total{model_name="M",reason="quota",tenant="measured"} 1.0',
        'qiao:tenant_time_to_first_token_seconds_count{model_name="M",tenant="measured"} 2.0',
    ):
        assert line in page


def test_streams_are_kept_alive_while_nothing_comes(rand_folder: Path) -> None:
    flags = ("--sse-keep-alive-interval", "0.02")
    with scripted(*flags, model=rand_folder, table=ENDLESS, pause=0.1) as running:
        body = {"prompt": "a", "max_tokens": 4, "ignore_eos": True, "stream": True}
        lines = running.http().post("/v1/completions", json=body).text.split("\n\n")
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert "".join(event["choices"][0]["text"] for event in events) == "aaaa"
        assert lines.count(": keep-alive") >= 4 and lines[-2] == "data: [DONE]"
        chunks = list(running.openai().completions.create(model="M", prompt="a", max_tokens=4, stream=True))
        assert "".join(chunk.choices[0].text for chunk in chunks) == "aaaa"
        stream = {"prompt": [303], "stream": True, "max_tokens": 4}
        failed = running.http().post("/v1/completions", json=stream)
        assert "operator attention raised" in failed.text or failed.status_code == 500
