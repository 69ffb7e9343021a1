"""The web console: its files, what they may do, and its views in a real Chromium against the server's metrics."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from qiao.server.console import FILES

from tests.support.server import RunningServer, chain, scripted

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
    assert state["models"] == ["M", "org/M"]
    assert state["engine"] == "ready"
    assert {row["operator"] for row in state["info"]["plan"]["operators"]} >= {"attention", "sample"}


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


def test_live_figures_are_those_of_the_metrics(rand: RunningServer, page: Any) -> None:
    page.goto(rand.url + "/console/")
    page.wait_for_selector(".card[data-name=generation]")
    client = rand.openai()
    for _ in range(3):
        client.completions.create(model="M", prompt="abc", max_tokens=8, extra_body={"ignore_eos": True})
    row = page.locator("#latency tbody tr").nth(2)
    rand.wait_for(lambda: page.locator("#latency tbody tr").nth(2).locator("td").nth(4).inner_text() == "3")
    assert row.locator("th").inner_text() == "Whole request"
    blocks = float(page.locator(".card[data-name=kv] .figure").inner_text().split()[0])
    assert blocks == pytest.approx(100 * rand.metric("vllm:kv_cache_usage_perc"), abs=0.1)
    facts = page.locator("#facts").inner_text()
    assert "M, org/M" in facts
    assert "cpu:0, float32" in facts


def test_the_plan_has_each_operator_and_tabs_work_by_keyboard(rand: RunningServer, page: Any) -> None:
    page.goto(rand.url + "/console/")
    page.wait_for_selector(".card[data-name=generation]")
    page.locator("#tab-live").focus()
    page.keyboard.press("ArrowRight")
    assert page.locator("#tab-plan").get_attribute("aria-selected") == "true"
    assert page.evaluate("document.activeElement.id") == "tab-plan"
    shown = page.locator("#operators tbody th").all_inner_texts()
    state = rand.http().get("/console/state").json()
    assert shown == [row["operator"] for row in state["info"]["plan"]["operators"]]
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
    assert shown["Time to first token, mean"].endswith(("ms", " s"))


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
