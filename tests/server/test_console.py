"""The web console: its files, what they may do, and its views in a real Chromium against the server's metrics."""

from __future__ import annotations

import json
import re
import shutil
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from qiao.server.console import FILES

from tests.support.server import RunningServer, chain, scripted, started

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def keyed(rand_folder: Path) -> Iterator[RunningServer]:
    with scripted("--api-key", "s3cret", model=rand_folder, table=chain("x>abcdef", "\n>ghijkl")) as one:
        yield one


def test_the_page_needs_no_key_and_what_it_shows_does(keyed: RunningServer) -> None:
    with keyed.http() as http:
        for name, kind in FILES.items():
            answer = http.get(f"/console/{name}")
            assert (answer.status_code, answer.headers["content-type"]) == (200, kind)
            assert "default-src 'self'" in answer.headers["content-security-policy"]
            assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", answer.text), "the page must work offline"
        assert http.get("/console").headers["location"] == "/console/"
        assert http.get("/console/").text == http.get("/console/index.html").text
        assert http.get("/console/state").status_code == http.get("/metrics").status_code == 401
        for path in ("/console/app.py", "/console/../app.js", "/console/%2e%2e/app.py"):
            assert http.get(path, headers={"Authorization": "Bearer s3cret"}).status_code == 404


def test_the_state_names_models_and_plan(rand: RunningServer) -> None:
    state = rand.http().get("/console/state").json()
    (model,) = state["models"]
    assert (model["name"], model["names"], model["adapters"]) == ("M", ["M", "org/M"], [])
    assert model["engine"] == "ready"
    assert {row["operator"] for row in model["info"]["plan"]["operators"]} >= {"attention", "sample"}


def test_every_text_is_there_in_both_languages() -> None:
    folder = resources.files("qiao.server.console")
    english, chinese = folder.joinpath("words.js").read_text().split("  zh: {")
    keys = [re.findall(r"(\w+): \"", part) for part in (english, chinese)]
    assert keys[0] == keys[1]
    page = folder.joinpath("index.html").read_text()
    used = set(re.findall(r'data-(?:word|empty)="(\w+)"', page))
    for name in FILES:
        if name.endswith(".js") and name != "words.js":
            used |= set(re.findall(r"\bt\(\"(\w+)\"\)", folder.joinpath(name).read_text()))
    assert used <= set(keys[0])


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine")
    with sync_api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    context = browser.new_context(locale="en-US", viewport={"width": 1200, "height": 900})
    page = context.new_page()
    page.problems = []
    page.on("pageerror", lambda error: page.problems.append(str(error)))
    page.on("console", lambda m: page.problems.append(m.text) if "Content Security" in m.text else None)
    yield page
    assert page.problems == []
    context.close()


def values(text: str) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Samples of a metrics page by name and labels."""
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for one in family.samples:
            found.setdefault(one.name, {})[tuple(sorted(one.labels.items()))] = one.value
    return found


def grown(before: str, after: str, name: str) -> float:
    """The increase of a counter over all its series."""
    old, new = (sum(values(text).get(name, {}).values()) for text in (before, after))
    return new - old


def quantile(before: str, after: str, name: str, share: float) -> float:
    """Linear within buckets, as PromQL's ``histogram_quantile`` has it."""
    steps: dict[float, float] = {}
    for text, sign in ((before, -1), (after, 1)):
        for labels, value in values(text)[f"{name}_bucket"].items():
            bound = float(dict(labels)["le"])
            steps[bound] = steps.get(bound, 0.0) + sign * value
    bounds = sorted(steps)
    counts = [steps[bound] for bound in bounds]
    return float(np.interp(share * counts[-1], [0.0, *counts], [0.0, *bounds]))


def in_seconds(shown: str) -> float:
    number, unit = shown.split()
    return float(number) * {"ms": 1e-3, "s": 1.0}[unit]


LATENCIES = (
    "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:e2e_request_latency_seconds",
    "vllm:request_queue_time_seconds",
)


def test_every_live_figure_is_that_of_the_metrics(rand: RunningServer, page: Any) -> None:
    """The page sees two states of the real server's metrics, one second apart, and none after them."""
    before = rand.http().get("/metrics").text
    for text in ("console " * 4 + "one", "console " * 4 + "two", "three"):
        rand.openai().completions.create(model="M", prompt=text, max_tokens=8, extra_body={"ignore_eos": True})
    name = "vllm:request_success_total"
    rand.wait_for(lambda: grown(before, rand.http().get("/metrics").text, name) == 3)
    after = rand.http().get("/metrics").text
    bodies = iter((before, after))

    def metrics(route: Any) -> None:
        if (body := next(bodies, None)) is not None:
            route.fulfill(body=body, content_type="text/plain")

    page.add_init_script("let seconds = 0; performance.now = () => 1000 * ++seconds;")
    page.route("**/metrics", metrics)
    page.goto(rand.url + "/console/")
    page.wait_for_selector(".card[data-name=generation]")
    now = {name: sum(series.values()) for name, series in values(after).items()}
    wanted = {
        "generation": grown(before, after, "vllm:generation_tokens_total"),
        "prompt": grown(before, after, "vllm:prompt_tokens_total"),
        "requests": 60 * 3,
        "running": now["vllm:num_requests_running"],
        "waiting": now["vllm:num_requests_waiting"],
        "kv": 100 * now["vllm:kv_cache_usage_perc"],
        "hits": 100 * now["vllm:prefix_cache_hits_total"] / now["vllm:prefix_cache_queries_total"],
        "preemptions": now["vllm:num_preemptions_total"],
    }
    assert wanted["generation"] == 24 and wanted["prompt"] > 60 and wanted["hits"] > 0
    cards = page.eval_on_selector_all(
        ".card", "cards => cards.map(c => [c.dataset.name, c.querySelector('.figure').textContent])"
    )
    shown = {name: float(text.split()[0]) for name, text in cards if name != "utilization"}
    assert shown == pytest.approx(wanted, abs=0.0501)
    rows = [row.split("\t")[1:] for row in page.locator("#latency tbody tr").all_inner_texts()]
    for name, (*quantiles, mean, count) in zip(LATENCIES, rows, strict=True):
        made = grown(before, after, f"{name}_count")
        assert float(count) == made > 0
        for share, text in zip((0.5, 0.95, 0.99), quantiles, strict=True):
            assert in_seconds(text) == pytest.approx(quantile(before, after, name, share), rel=6e-3, abs=6e-5), name
        assert in_seconds(mean) == pytest.approx(grown(before, after, f"{name}_sum") / made, rel=6e-3, abs=6e-5)
    facts = page.locator("#facts").inner_text()
    assert "M, org/M" in facts
    assert "cpu:0, float32" in facts


OPERATORS = [
    {"operator": "attention", "group": "KV", "place": "cpu", "reason": "no kernel", "policy": "warn"},
    {"operator": "sample", "group": "S", "place": "cpu", "reason": ""},
]


@pytest.fixture(scope="module")
def fleet(rand_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Two models, the first with an adapter, fallbacks and one row, and an alias."""
    folder = tmp_path_factory.mktemp("fleet")
    (folder / "answer").write_text("adapter")
    script = {"table": dict.fromkeys(range(260), 97), "pause": 0.01}
    fallen = {"operators": OPERATORS, "fallbacks": [["attention", 1234, 600, 50, 0.25]]}
    lora = {"enable-lora": True, "lora-modules": [f"tuned={folder}"]}
    common = {"model": str(rand_folder), "memory": 0.2}
    content = {
        "max-model-len": 512,
        "scheduling-policy": "priority",
        "models": [
            {"name": "one", **common, "hf-overrides": {**script, **fallen}, "max-num-seqs": 1, **lora},
            {"name": ["two", "second"], **common, "hf-overrides": {**script, "operators": OPERATORS[1:]}},
        ],
        "aliases": {"trial": {"weights": {"one": 1, "two": 1}}},
    }
    (folder / "qiao.yaml").write_text(json.dumps(content))  # JSON is YAML
    with started(["--config", str(folder / "qiao.yaml")], "tests.support.server") as running:
        yield running


@contextmanager
def left_open(running: RunningServer, *bodies: dict[str, Any]) -> Iterator[None]:
    """Requests whose answers nobody reads; they end with the block."""
    with ExitStack() as stack:
        for body in bodies:
            data = json.dumps({"prompt": "x", "max_tokens": 450, "ignore_eos": True, **body}).encode()
            host, _, port = running.url.removeprefix("http://").partition(":")
            head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
            connection = stack.enter_context(socket.create_connection((host, int(port))))
            connection.sendall(head.encode() + f"Content-Length: {len(data)}\r\n\r\n".encode() + data)
        yield


def test_each_model_has_its_own_figures(fleet: RunningServer, page: Any) -> None:
    page.goto(fleet.url + "/console/")
    asked = [{"model": "one", "priority": level} for level in (-1000, -1000, 0, 7)]
    with left_open(fleet, *asked, {"model": "two"}, {"model": "two"}):
        fleet.wait_for(lambda: fleet.metric("vllm:num_requests_waiting", model_name="one") == 3)
        figure = page.locator(".card[data-name=waiting] .figure")
        fleet.wait_for(lambda: figure.count() == 1 and figure.inner_text() == "3")
        queue = dict(row.split("\t") for row in page.locator("#queue tbody tr").all_inner_texts())
        name = "qiao:num_requests_waiting_by_priority"
        for word in ("urgent", "standard", "low"):
            assert float(queue[word]) == fleet.metric(name, model_name="one", priority=word) == 1
        assert queue["waited too long"] == "0"
        assert page.locator("#which-label").inner_text().split() == ["Model", "one", "two"]
        page.locator("#which").focus()
        page.keyboard.press("ArrowDown")
        for name in ("running", "waiting"):
            shown = page.locator(f".card[data-name={name}] .figure").inner_text()
            assert float(shown) == fleet.metric(f"vllm:num_requests_{name}", model_name="two") != 1
        assert "two, second" in page.locator("#facts").inner_text()
    assert page.locator("#status").inner_text() == "one · ready, two · ready"


def test_the_plan_of_each_model_with_its_fallback_counters(fleet: RunningServer, page: Any) -> None:
    page.goto(fleet.url + "/console/#plan")
    page.wait_for_selector("#operators tbody tr")
    first, second = (row.split("\t") for row in page.locator("#operators tbody tr").all_inner_texts())
    for value, counter in zip(first[4:], ("calls", "bytes", "seconds"), strict=True):
        counted = fleet.metric(f"qiao:fallback_{counter}_total", model_name="one", operator="attention")
        assert float(value.replace(",", "")) == counted > 0
    assert (first[0], first[2], second[4:]) == ("attention", "cpu", ["", "", ""])
    assert page.locator("#plan-note").inner_text() == "1 operators run on the CPU instead of the device."
    page.locator("#which").select_option("two")
    assert page.locator("#operators tbody th").all_inner_texts() == ["sample"]
    assert page.locator("#plan-note").inner_text() == "Every operator runs on the device."


def test_the_playground_offers_models_adapters_and_aliases(fleet: RunningServer, page: Any) -> None:
    page.goto(fleet.url + "/console/#play")
    page.wait_for_selector("#model option", state="attached")

    def offered() -> dict[str, list[str]]:
        return dict(
            page.eval_on_selector_all(
                "#model optgroup", "groups => groups.map(g => [g.label, [...g.children].map(o => o.value)])"
            )
        )

    assert offered() == {"Models": ["one", "two", "second"], "Adapters": ["tuned"], "Aliases": ["trial"]}
    names = [name for group in offered().values() for name in group]
    assert sorted(names) == sorted(card.id for card in fleet.openai().models.list())
    page.locator("#model").select_option("tuned")
    page.locator("#message").fill("hello")
    page.locator("#send").click()
    fleet.wait_for(lambda: page.locator(".tok.end").count() == 1)
    assert "".join(page.locator(".tok:not(.end)").all_inner_texts()) == "adapter"
    page.locator("#language").select_option("zh")
    assert list(offered()) == ["模型", "适配器", "别名"]
    assert page.locator("#model").input_value() == "tuned"


def test_the_plan_has_each_operator_and_tabs_work_by_keyboard(rand: RunningServer, page: Any) -> None:
    page.goto(rand.url + "/console/")
    page.wait_for_selector(".card[data-name=generation]")
    page.locator("#tab-live").focus()
    page.keyboard.press("ArrowRight")
    assert page.locator("#tab-plan").get_attribute("aria-selected") == "true"
    assert page.evaluate("document.activeElement.id") == "tab-plan"
    shown = page.locator("#operators tbody th").all_inner_texts()
    state = rand.http().get("/console/state").json()
    assert shown == [row["operator"] for row in state["models"][0]["info"]["plan"]["operators"]]
    page.keyboard.press("End")
    assert page.locator("#play").is_visible()
    page.reload()
    assert page.locator("#play").is_visible()


def test_tenants_and_what_they_used(rand: RunningServer, page: Any) -> None:
    rand.openai().completions.create(model="M", prompt="abc", max_tokens=8, extra_body={"ignore_eos": True})
    page.goto(rand.url + "/console/#tenants")
    page.wait_for_selector("#tenant-table tbody tr")
    heads = page.locator("#tenant-table thead th").all_inner_texts()
    (row,) = [row.split("\t") for row in page.locator("#tenant-table tbody tr").all_inner_texts()]
    shown = dict(zip(heads, row, strict=True))
    for name in ("generation_tokens", "prompt_tokens", "requests"):
        value = rand.metric(f"qiao:tenant_{name}_total", tenant=row[0])
        assert value > 0
        assert float(shown[name.replace("_", " ")]) == value
    total, count = (
        rand.metric(f"qiao:tenant_time_to_first_token_seconds_{part}", tenant=row[0]) for part in ("sum", "count")
    )
    assert in_seconds(shown["Time to first token, mean"]) == pytest.approx(total / count, rel=6e-3, abs=6e-5)


def test_a_key_is_asked_for_and_kept_for_the_tab_only(keyed: RunningServer, page: Any) -> None:
    page.goto(keyed.url + "/console/")
    page.wait_for_selector("#gate:not([hidden])")
    assert page.locator("#status").inner_text() == "This server needs a key."
    page.locator("#key").fill("s3cret")
    page.keyboard.press("Enter")
    page.wait_for_selector(".card[data-name=running]")
    assert not page.locator("#gate").is_visible()
    assert page.evaluate("localStorage.getItem('key')") is None


def test_an_answer_streams_in_with_its_probabilities(keyed: RunningServer, page: Any) -> None:
    page.goto(keyed.url + "/console/#play")
    page.locator("#key").fill("s3cret")
    page.keyboard.press("Enter")
    page.wait_for_selector("#model option", state="attached")
    page.locator("#message").fill("hello")
    page.keyboard.press("Enter")
    keyed.wait_for(lambda: page.locator(".tok.end").count() == 1)
    assert "".join(page.locator(".tok:not(.end)").all_inner_texts()) == "ghijkl"
    page.locator(".tok").first.click()
    cells = page.locator("#token tr").first.inner_text()
    assert '"g"' in cells
    assert "60.65 %" in cells  # the scripted engine's log-probability is -0.5
    page.locator("#clear").click()
    assert page.locator("article").count() == 0


def test_languages_and_themes(rand: RunningServer, page: Any) -> None:
    page.goto(rand.url + "/console/")
    page.wait_for_selector(".card[data-name=generation]")
    light = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.locator("#language").select_option("zh")
    assert page.locator("#tab-live").inner_text() == "实时"
    assert page.evaluate("document.documentElement.lang") == "zh-CN"
    page.locator("#theme").select_option("dark")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != light
    page.reload()
    assert page.locator("#tab-live").inner_text() == "实时"


def test_every_control_has_a_name(rand: RunningServer, page: Any) -> None:
    page.goto(rand.url + "/console/")
    page.wait_for_selector(".card[data-name=generation]")
    nameless = page.evaluate(
        """[...document.querySelectorAll('input,select,textarea,button,[role=img]')].filter(e =>
        !(e.getAttribute('aria-label') || e.textContent.trim() || e.labels?.[0]?.textContent.trim())).length"""
    )
    assert nameless == 0
    assert page.title() == "Qiao"


def test_tokens_that_only_together_make_a_character_are_one_button(chained: RunningServer, page: Any) -> None:
    page.goto(chained.url + "/console/#play")
    page.wait_for_selector("#model option", state="attached")
    page.route(
        "**/v1/chat/completions",
        lambda route: route.continue_(post_data=json.dumps({**route.request.post_data_json, "cache_salt": "wide"})),
    )
    page.locator("#message").fill("hello")
    page.locator("#send").click()
    chained.wait_for(lambda: page.locator(".tok.end").count() == 1)
    assert page.locator(".tok:not(.end)").all_inner_texts() == ["é", "漢", "😀", "y"]
    page.locator(".tok").nth(2).click()
    assert page.locator("#token table").count() == 4
