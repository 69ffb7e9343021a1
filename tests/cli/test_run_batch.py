"""``qiao run-batch`` on a model whose text is certain."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from qiao.cli.main import main

from tests.support.checkpoints import chain_checkpoint


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """After ``x`` and after a newline comes ``DEF``, then the end."""
    return chain_checkpoint(tmp_path_factory.mktemp("chain") / "model", "x>DEF")


def request(name: str, url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    given = body or {"prompt": "x", "max_tokens": 8, "temperature": 0}
    return {"custom_id": name, "method": "POST", "url": url, "body": given}


def write(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def run(model: Path, source: Path, target: Path, *argv: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(["run-batch", "--model", str(model), "-i", str(source), "-o", str(target), "--device", "cpu", *argv])
    return int(stop.value.code or 0)


def answers(path: Path) -> dict[str, Any]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({line["custom_id"] for line in lines}) == len(lines)
    return {line["custom_id"]: line for line in lines}


def test_every_line_gets_its_answer_and_a_second_run_goes_on(
    chain: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    messages = [{"role": "user", "content": "hello"}]
    lines = [
        request("one"),
        request("two", "/v1/chat/completions", messages=messages, max_tokens=2),
        request("three", "/v1/embeddings", input=["a", "b"]),
        request("wrong", prompt="x", temperature=-1),
    ]
    source, target = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    assert run(chain, source, target, "--json") == 1
    figures = json.loads(capfd.readouterr().out)
    assert figures == {"requests": 4, "answered_before": 0, "answered": 3, "failed": 1}
    found = answers(target)
    assert found["one"]["response"]["body"]["choices"][0]["text"] == "DEF"
    assert found["two"]["response"]["body"]["choices"][0]["message"]["content"] == "DE"
    assert len(found["three"]["response"]["body"]["data"]) == 2
    assert found["wrong"]["response"]["status_code"] == 400
    assert found["wrong"]["error"]["param"] == "temperature"

    kept = target.read_text().splitlines(keepends=True)
    first = next(line for line in kept if '"one"' in line)
    target.write_text(first + '{"custom_id":"two","respo')  # as a kill leaves it
    lines[3] = request("wrong")
    write(source, lines)
    assert run(chain, source, target, "--json") == 0
    assert json.loads(capfd.readouterr().out)["answered_before"] == 1
    again = answers(target)
    assert again.keys() == found.keys()
    assert again["one"]["id"] == found["one"]["id"]
    assert again["wrong"]["response"]["body"]["choices"][0]["text"] == "DEF"
    assert run(chain, source, target) == 0
    assert "4 of 4 requests answered, 4 of them in an earlier run" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([request("a"), request("a")], "line 2: custom_id 'a' is that of line 1"),
        ([request("a"), "{"], "line 2: "),
        ([request("a", "/v1/files")], "line 1: url must be one of"),
        ([request("a") | {"method": "GET"}], "line 1: method must be POST"),
        ([request("a", prompt="x", stream=True)], "line 1: body.stream"),
        ([{"custom_id": "a", "url": "/v1/completions"}], "`body`"),
        ([], "holds no request"),
    ],
)
def test_a_wrong_line_is_named_before_a_model_is_loaded(
    lines: list[Any], message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path / "no-model", write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl") == 2
    assert message in capfd.readouterr().err


def test_the_answers_of_another_batch_are_not_touched(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "in.jsonl", [request("a")])
    target = write(tmp_path / "out.jsonl", [{"custom_id": "b", "response": {"status_code": 200}}])
    before = target.read_text()
    assert run(tmp_path / "no-model", source, target) == 2
    assert "'b', which is not in this batch" in capfd.readouterr().err
    assert target.read_text() == before
