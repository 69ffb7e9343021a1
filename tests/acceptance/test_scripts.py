"""The acceptance scripts' own judgement: that they pass what is right and, above all, fail what is not."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
import torch

TOOLS = Path(__file__).parents[2] / "tools" / "acceptance"


def script(name: str) -> ModuleType:
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


REPORT = """<testsuites><testsuite>
<testcase classname="tests.api_resources.test_completions.TestCompletions" name="test_method_create_overload_1[loose]"/>
<testcase classname="tests.api_resources.test_completions.TestCompletions" name="{name}">{fault}</testcase>
</testsuite></testsuites>"""


@pytest.mark.parametrize(
    ("name", "fault", "failed", "excused", "unexpected"),
    [
        ("test_raw_response_create_overload_1[strict]", "<failure message='no'/>", 1, 0, 0),
        ("test_raw_response_create_overload_1[strict]", "<error message='no'/>", 1, 0, 0),
        ("test_method_create_with_all_params_overload_2[loose]", "<failure message='400'/>", 0, 1, 0),
        ("test_method_create_with_all_params_overload_2[loose]", "", 0, 0, 1),
    ],
)
def test_sdk_report(tmp_path: Path, name: str, fault: str, failed: int, excused: int, unexpected: int) -> None:
    suite = script("openai_sdk_suite")
    (tmp_path / "report.xml").write_text(REPORT.format(name=name, fault=fault))
    told = suite.judge(tmp_path / "report.xml")
    assert len(told["failed"]) == failed
    assert sum(len(names) for names in told["not_applicable"].values()) == excused
    assert len(told["passes_unexpectedly"]) == unexpected
    assert told["passed"] == 1 + unexpected


def test_client_side_checks_of_the_sdk_are_not_excused() -> None:
    reason = script("openai_sdk_suite").reason_for
    assert not reason("tests.api_resources.chat.test_completions.TestCompletions", "test_path_params_delete[loose]")
    assert not reason(
        "tests.api_resources.chat.test_completions.TestCompletions", "test_method_create_overload_1[loose]"
    )
    assert not reason("tests.api_resources.test_models.TestModels", "test_method_retrieve[loose]")
    assert reason("tests.api_resources.test_models.TestModels", "test_method_delete[loose]")
    assert not reason("tests.api_resources.test_qiao_supported_params", "test_chat[loose]")


def _compare(tokens: list[int], theirs: list[int], margin: float, ids: list[int] | None = None) -> Any:
    parity = script("parity")
    row = torch.zeros(10)
    row[3], row[4] = 5.0 + margin, 5.0
    answer = parity.Answer(tokens, [[-1.0, -1.0 - margin]] * len(tokens), ids or [1, 2])
    return parity.compare(parity.Prompt("plain", "x", [1, 2]), answer, theirs, lambda _: row)


def test_parity_tells_equal_tie_and_wrong() -> None:
    assert _compare([7, 3], [7, 3], 0.5).equal
    tie = _compare([7, 4], [7, 3], 1e-5)
    assert (tie.equal, tie.tie, tie.position) == (False, True, 1)
    wrong = _compare([7, 4], [7, 3], 0.5)
    assert not wrong.equal
    assert not wrong.tie
    assert not _compare([7, 9], [7, 3], 1e-5).tie, "a tie is between the two best tokens"
    assert not _compare([7], [7, 3], 0.5).equal, "a shorter answer is not equal"
    assert not _compare([7, 3], [7, 3], 0.5, ids=[1]).equal, "other prompt ids are not equal"


def _verdicts(**changes: Any) -> dict[str, bool]:
    soak = script("soak")
    sample = soak.Sample(0.0, 100 << 20, 5, 1, 0)
    values: dict[str, Any] = {
        "tally": soak.Tally(tokens=10),
        "samples": [sample] * 8,
        "before": soak.Sample(0.0, 0, 0, 0, 0),
        "after": soak.Sample(0.0, 0, 0, 0, 0),
        "ended": {
            "in_flight": 8,
            "right": 8,
            "of": 8,
            "new_request_refused": True,
            "exit_status": 0,
            "seconds": 2.0,
        },
        "allowed": 0.03,
        "drain_time": 30.0,
    }
    checks: dict[str, bool] = soak.verdicts(**{**values, **changes})
    return checks


def test_soak_passes_a_sound_run_and_fails_each_fault() -> None:
    soak = script("soak")
    assert all(_verdicts().values())
    ended = {"in_flight": 8, "right": 8, "of": 8, "new_request_refused": True, "exit_status": 0, "seconds": 2.0}
    grown = [soak.Sample(0.0, (100 + 20 * i) << 20, 5, 1, 0) for i in range(8)]
    faults: list[tuple[str, dict[str, Any]]] = [
        ("no wrong answer", {"tally": soak.Tally(tokens=10, wrong=["x"])}),
        ("no unexpected error", {"tally": soak.Tally(tokens=10, errors=["x"])}),
        ("answers were given", {"tally": soak.Tally()}),
        ("blocks return to the baseline", {"after": soak.Sample(0.0, 0, 1, 0, 0)}),
        ("memory does not grow", {"samples": grown}),
        ("exit status 0 in time", {"ended": {**ended, "exit_status": 1}}),
        ("exit status 0 in time", {"ended": {**ended, "exit_status": None}}),
        ("exit status 0 in time", {"ended": {**ended, "seconds": 60.0}}),
        ("requests in flight finished right", {"ended": {**ended, "right": 7}}),
        ("new requests are refused while draining", {"ended": {**ended, "new_request_refused": False}}),
    ]
    for name, changes in faults:
        assert [check for check, held in _verdicts(**changes).items() if not held] == [name]


def _fake_server(fault: str) -> httpx.MockTransport:
    """A server that answers ``ab...``; ``fault`` spoils answers at the longest length after the prompts are learned."""
    asked: list[int] = []

    def answer(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        asked.append(1)
        text = ("ab" * body["max_tokens"])[: body["max_tokens"]]
        late = len(asked) > 60
        if late and fault == "wrong":
            text = text[:-1] + "X"
        if late and fault == "status":
            return httpx.Response(500, text="boom")
        if not body.get("stream"):
            choices = [{"text": text} for _ in range(body.get("n", 1))]
            return httpx.Response(200, json={"choices": choices})
        events = [json.dumps({"choices": [{"text": char}]}) for char in text]
        if late and fault == "event":
            events.append(json.dumps({"error": {"message": "boom"}}))
        ends = [] if late and fault == "cut" else ["[DONE]"]
        return httpx.Response(200, text="".join(f"data: {event}\n\n" for event in events + ends))

    return httpx.MockTransport(answer)


@pytest.mark.parametrize("fault", ["", "wrong", "status", "event", "cut"])
def test_soak_clients_see_each_fault_of_a_server(fault: str) -> None:
    module = script("soak_client")

    async def go() -> Any:
        load = module.Load("http://fake", "m", 1)
        async with httpx.AsyncClient(base_url="http://fake", transport=_fake_server(fault)) as client:
            await load.learn(client)
            for prompt in module.PROMPTS[:2]:
                for stream in (False, True):
                    try:
                        text = await (load.stream if stream else load.whole)(client, prompt, 32)
                        load._check(prompt, 32, text)
                    except (RuntimeError, httpx.HTTPError) as error:
                        load.tally.errors.append(str(error))
        return load.tally

    tally = asyncio.run(go())
    assert len(tally.wrong) == (4 if fault == "wrong" else 0)
    assert len(tally.errors) == {"": 0, "wrong": 0, "status": 4, "event": 2, "cut": 2}[fault]
