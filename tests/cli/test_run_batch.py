"""``qiao run-batch`` on a model whose text is certain."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from qiao.cli.main import main
from qiao.cli.run_batch import ENGINE, SERVER
from qiao.config import EngineArgs
from qiao.server import batch
from qiao.server.args import ServerArgs
from qiao.server.flags import flags

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


FLAGS: dict[str, tuple[list[str], Any]] = {
    "tokenizer": (["T"], "T"),
    "served_model_name": (["a", "--served-model-name", "b"], ("a", "b")),
    "revision": (["r1"], "r1"),
    "tokenizer_revision": (["r2"], "r2"),
    "trust_remote_code": ([], True),
    "download_dir": (["here"], "here"),
    "load_format": (["safetensors"], "safetensors"),
    "dtype": (["bfloat16"], "bfloat16"),
    "quantization": (["gptq"], "gptq"),
    "seed": (["7"], 7),
    "max_model_len": (["2k"], 2000),
    "hf_overrides": (['{"a": 1}'], {"a": 1}),
    "chat_template": (["chat.jinja"], "chat.jinja"),
    "generation_config": (["vllm"], "vllm"),
    "override_generation_config": (['{"top_k": 3}'], {"top_k": 3}),
    "max_logprobs": (["5"], 5),
    "pooler_config": (['{"pooling_type": "MEAN"}'], {"pooling_type": "MEAN"}),
    "device": (["sim:1"], "sim:1"),
    "fallback": (["deny"], "deny"),
    "fallback_budget": (["1MiB"], 1 << 20),
    "drop": (["attention,sample"], ("attention", "sample")),
    "block_size": (["32"], 32),
    "gpu_memory_utilization": (["0.5"], 0.5),
    "kv_cache_dtype": (["int8"], "int8"),
    "kv_cache_memory_bytes": (["64MiB"], 1 << 26),
    "num_gpu_blocks_override": (["9"], 9),
    "kv_offloading_size": (["2"], 2.0),
    "kv_offloading_path": (["kv"], "kv"),
    "kv_offloading_disk_size": (["3.5"], 3.5),
    "max_num_batched_tokens": (["4096"], 4096),
    "max_num_seqs": (["11"], 11),
    "max_num_queued_reqs": (["12"], 12),
    "long_prefill_token_threshold": (["13"], 13),
    "tpot_target_ms": (["14"], 14.0),
    "scheduling_policy": (["priority"], "priority"),
    "priority_floor": (["0.25"], 0.25),
    "speculative_config": (['{"num_speculative_tokens": 4}'], {"num_speculative_tokens": 4}),
    "enforce_eager": ([], True),
    "threads": (["3"], 3),
    "packed_cache": (["off"], "off"),
    "enable_lora": ([], True),
    "lora_modules": (["l=path"], ("l=path",)),
    "max_loras": (["2"], 2),
    "max_lora_rank": (["32"], 32),
    "kv_cache_metrics": ([], True),
    "kv_cache_metrics_sample": (["0.5"], 0.5),
    "step_timeout": (["30"], 30.0),
    "enable_mfu_metrics": ([], True),
    "check_integrity": ([], True),
    "enable_auto_tool_choice": ([], True),
    "tool_call_parser": (["hermes"], "hermes"),
    "reasoning_parser": (["qwen3"], "qwen3"),
    "chat_template_content_format": (["openai"], "openai"),
    "default_chat_template_kwargs": (['{"b": 2}'], {"b": 2}),
    "response_role": (["bot"], "bot"),
    "enable_prefix_caching": (["no"], False),
    "enable_chunked_prefill": (["no"], False),
}
"""Every flag with a value that is not its default. The last two exclude others, so they are tried by themselves."""


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Runs the command up to the start of the engine; what engine and server were to be, by field."""

    def start(*argv: str) -> dict[str, Any]:
        given: list[Any] = []

        async def run_batch(args: EngineArgs, server: ServerArgs, *_: object) -> None:
            given.extend((args, server))

        monkeypatch.setattr(batch, "run_batch", run_batch)
        source = write(tmp_path / "in.jsonl", [request("a")])
        with pytest.raises(SystemExit) as stop:
            main(["run-batch", "--model", "M", "-i", str(source), "-o", str(tmp_path / "out.jsonl"), *argv])
        assert not stop.value.code and len(given) == 2
        return {**vars(given[1]), **vars(given[0])}

    return start


def test_every_flag_reaches_the_engine_or_the_routes(started: Callable[..., dict[str, Any]]) -> None:
    assert set(FLAGS) == {*ENGINE, *SERVER}, "each flag of the command is here"
    plain = started()
    alone = {"enable_prefix_caching", "enable_chunked_prefill"}
    argv = [word for name in FLAGS.keys() - alone for word in (flags()[name].option, *FLAGS[name][0])]
    found = started(*argv)
    for name in FLAGS.keys() - alone:
        assert plain[name] != found[name] == FLAGS[name][1], name
    found = started(*(f"--no-{name.replace('_', '-')}" for name in sorted(alone)))
    assert [name for name in plain if plain[name] != found[name]] == [n for n in plain if n in alone]


def test_flags_of_vllm_are_taken_as_by_serve(started: Callable[..., dict[str, Any]]) -> None:
    argv = (
        "--tensor-parallel-size",
        "1",
        "--swap-space",
        "4",
        "--device-memory-utilization",
        "0.5",
        "--max_model_len=8k",
    )
    found = started(*argv, "--hf-overrides.a.b", "2")
    assert (found["gpu_memory_utilization"], found["max_model_len"]) == (0.5, 8000)
    assert found["hf_overrides"] == {"a": {"b": 2}}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--max-model-len", "many"), "--max-model-len: must be an integer, such as 4096"),
        (("--max-model-length", "5"), "did you mean --max-model-len"),
        (("--tensor-parallel-size", "2"), "--tensor-parallel-size: only 1 is possible"),
        (("--kv-cache-dtype", "fp8"), "int8 takes the same memory"),
        (("--dtype", "int3"), "dtype: must be one of auto"),
        (("--lora-modules", "a=b"), "add --enable-lora"),
        (("--tool-call-parser", "other"), "tool_call_parser"),
        (("--reasoning-parser", "other"), "reasoning_parser"),
        (("--port", "8000"), "--port: is not a flag of this"),
        (("more",), "more: is one word too many"),
    ],
    ids=str,
)
def test_a_flag_that_cannot_be_says_why(
    argv: tuple[str, ...], message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path / "in.jsonl", [request("a")])
    assert run(tmp_path / "no-model", source, tmp_path / "out.jsonl", *argv) == 2
    assert message in capfd.readouterr().err
    assert not (tmp_path / "out.jsonl").exists()


def test_flags_change_answers(chain: Path, tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text("{{ b }}x")
    lines = [
        request("named", model="alias", prompt="x", max_tokens=8),
        request("unknown", model="other", prompt="x"),
        request("long", prompt="x" * 70, max_tokens=1),
        request("logprobs", prompt="x", logprobs=3),
        request("chat", "/v1/chat/completions", messages=[{"role": "user", "content": "hello"}]),
    ]
    source, target = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    argv = ("--served-model-name", "alias", "--max-model-len", "64", "--max-logprobs", "2", "--response-role", "bot")
    argv += ("--chat-template", str(tmp_path / "chat.jinja"), "--default-chat-template-kwargs", '{"b": "yy"}')
    assert run(chain, source, target, *argv) == 1
    found = {name: one["response"] for name, one in answers(target).items()}
    statuses = {name: one["status_code"] for name, one in found.items()}
    assert statuses == {"named": 200, "unknown": 404, "long": 400, "logprobs": 400, "chat": 200}
    chat = found["chat"]["body"]
    assert (chat["choices"][0]["message"]["content"], chat["choices"][0]["message"]["role"]) == ("DEF", "bot")
    assert chat["usage"]["prompt_tokens"] == len("yyx")


def test_the_answers_of_another_batch_are_not_touched(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "in.jsonl", [request("a")])
    target = write(tmp_path / "out.jsonl", [{"custom_id": "b", "response": {"status_code": 200}}])
    before = target.read_text()
    assert run(tmp_path / "no-model", source, target) == 2
    assert "'b', which is not in this batch" in capfd.readouterr().err
    assert target.read_text() == before
