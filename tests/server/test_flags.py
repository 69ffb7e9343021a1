"""The command line: vLLM's spellings, sizes, JSON, config files, and refusals that name the flag."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from qiao.config import EngineArgs, SpeculativeConfig
from qiao.errors import ParameterError
from qiao.server.args import ServerArgs
from qiao.server.flags import flags, parse
from qiao.server.flagtext import FLAG_TEXT
from qiao.server.help import help_text
from qiao.vllm_arguments import ALIASES, FIXED, IGNORED


@pytest.fixture(autouse=True)
def no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QIAO_API_KEY", raising=False)
    monkeypatch.delenv("VLLM_API_KEY", raising=False)


def test_every_field_has_one_flag_with_its_own_default() -> None:
    names = [f.name for owner in (EngineArgs, ServerArgs) for f in fields(owner)]
    assert sorted(names) == sorted(flags())
    assert not set(names) & (set(ALIASES) | set(FIXED) | set(IGNORED)), "a flag would be shadowed"
    assert sorted(FLAG_TEXT) == sorted(names)
    parsed = parse(["M"])
    assert parsed.engine == EngineArgs(model="M")
    assert parsed.server == ServerArgs()
    assert all(flag.option in help_text() for name, flag in flags().items() if name != "model")


@pytest.mark.parametrize(
    "argv", [["M", "--max-model-len", "4k"], ["--max_model_len=4k", "M"], ["--model", "M", "--max-model_len", "4000"]]
)
def test_spellings_are_one(argv: list[str]) -> None:
    parsed = parse(argv).engine
    assert (parsed.model, parsed.max_model_len) == ("M", 4000)


@pytest.mark.parametrize(
    ("text", "value"),
    [("7", 7), ("32k", 32000), ("32K", 32768), ("64MiB", 1 << 26), ("1.5G", 3 << 29), ("2GB", 2 * 10**9)],
)
def test_sizes(text: str, value: int) -> None:
    assert parse(["M", "--kv-cache-memory-bytes", text]).engine.kv_cache_memory_bytes == value


@pytest.mark.parametrize("text", ["", "many", "64 parsecs", "1e9", "MiB", "nan", "0x10", "1.0001"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(ParameterError, match="kv-cache-memory-bytes"):
        parse(["M", f"--kv-cache-memory-bytes={text}"])


def test_booleans_lists_objects_and_optionals() -> None:
    parsed = parse(
        [
            *("M", "--no-enable-prefix-caching", "--trust-remote-code", "--enable_chunked_prefill=false"),
            *("--served-model-name", "a/b", "c", "--api-key", "k1", "--api-key", "k2"),
            *("--drop", "attention,sample", "--hf-overrides", '{"a": {"b": 1}}', "--hf-overrides.a.c", "2.5"),
            *("--hf-overrides.name", "x", "--seed", "-1", "--gpu-memory-utilization", "none"),
            *("--allowed-origins", '["https://a", "https://b"]', "-q", "gptq"),
        ]
    )
    engine, server = parsed.engine, parsed.server
    assert (engine.enable_prefix_caching, engine.trust_remote_code, engine.enable_chunked_prefill) == (
        False,
        True,
        False,
    )
    assert engine.served_model_name == ("a/b", "c")
    assert engine.drop == ("attention", "sample")
    assert engine.hf_overrides == {"a": {"b": 1, "c": 2.5}, "name": "x"}
    assert (engine.seed, engine.gpu_memory_utilization, engine.quantization) == (-1, None, "gptq")
    assert server.api_key == ("k1", "k2")
    assert server.allowed_origins == ("https://a", "https://b")


def test_old_and_foreign_flags() -> None:
    parsed = parse(["M", "--swap-space", "4", "-tp", "1", "--disable-log-requests", "--device-memory-utilization=0.5"])
    assert parsed.engine.gpu_memory_utilization == 0.5
    assert len(parsed.notes) == 2
    with pytest.raises(ParameterError, match="--tensor-parallel-size: only 1 is possible"):
        parse(["M", "-tp", "2"])
    with pytest.raises(ParameterError, match=r"kv.cache.dtype.*fp8.*int8"):
        parse(["M", "--kv-cache-dtype", "fp8"])
    assert parse(["M", "--kv-cache-dtype", "int8"]).engine.kv_cache_dtype == "int8"


def test_switches_with_one_position() -> None:
    parsed = parse(["--no-enable-sleep-mode", "M", "--skip-tokenizer-init=false", "--no-async-scheduling"])
    assert parsed.engine.model == "M" and len(parsed.notes) == 1
    for argv in (["--enable-sleep-mode"], ["--enable-expert-parallel=true"]):
        with pytest.raises(ParameterError, match=f"{argv[0].partition('=')[0]}: only false is possible"):
            parse(["M", *argv])
    with pytest.raises(ParameterError, match="--no-nnodes: is not a flag"):
        parse(["M", "--no-nnodes"])


def test_speculation_as_vllm_writes_it() -> None:
    wanted = SpeculativeConfig(method="ngram", num_speculative_tokens=4, prompt_lookup_min=2, prompt_lookup_max=3)
    given = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 2}'
    for argv in (["--speculative-config", given], ["-sc", given], ["--speculative_config=" + given]):
        assert parse(["M", *argv]).engine.speculation == wanted
    one = parse(["M", "--spec-method", "ngram", "--spec-tokens", "4", "--speculative-config.prompt_lookup_max", "3"])
    assert one.engine.speculation == replace(wanted, prompt_lookup_min=3)
    draft = parse(["M", "--spec-model", "small", "--spec-tokens", "2"]).engine.speculation
    assert draft == SpeculativeConfig(method="draft_model", model="small", num_speculative_tokens=2)
    old = parse(["M", "-sc", '{"model": "[ngram]", "num_speculative_tokens": 4}']).engine.speculation
    assert old == SpeculativeConfig(method="ngram", num_speculative_tokens=4)
    assert parse(["M"]).engine.speculation is None


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"method": "eagle", "num_speculative_tokens": 2}, "ngram or draft_model, got 'eagle'"),
        ({"method": "ngram"}, "num_speculative_tokens is missing"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "at least 1, got 0"),
        ({"method": "draft_model", "num_speculative_tokens": 2}, "needs a model"),
        ({"method": "ngram", "num_speculative_tokens": 2, "model": "x"}, "'model' is not known; ngram takes"),
        ({"num_speculative_tokens": 2, "prompt_lookup_min": 3, "prompt_lookup_max": 2}, "must not be above"),
        ({"model": "x", "num_speculative_tokens": 2, "draft_tensor_parallel_size": 2}, "can only be 1"),
    ],
)
def test_speculation_that_is_not_possible_says_why(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ParameterError, match=f"speculative_config: .*{text}"):
        EngineArgs(model="M", speculative_config=given)


def test_config_file_and_the_command_line_over_it(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "model: from-file\nport: 9000\nmax-num-seqs: 8\nenable_prefix_caching: false\n"
        "served-model-name: [a, b]\nhf-overrides: {x: 1, y: 2}\nmax-model-len: 2k\n"
    )
    parsed = parse(["--config", str(file), "--port", "9001", "--hf-overrides.y", "3", "other"])
    assert (parsed.engine.model, parsed.server.port) == ("other", 9001)
    assert (parsed.engine.max_num_seqs, parsed.engine.max_model_len) == (8, 2000)
    assert not parsed.engine.enable_prefix_caching
    assert parsed.engine.served_model_name == ("a", "b")
    assert parsed.engine.hf_overrides == {"x": 1, "y": 3}
    file.write_text("max-num-sequences: 8\n")
    with pytest.raises(ParameterError, match="did you mean --max-num-seqs"):
        parse(["M", "--config", str(file)])


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        ([], "model: is missing"),
        (["M", "N"], "N: is one word too many"),
        (["M", "--max-model-length", "1"], "did you mean --max-model-len"),
        (["M", "--port"], "--port: needs a value"),
        (["M", "--port", "abc"], "--port: must be an integer"),
        (["M", "--port", "70000"], "port: must be between"),
        (["M", "--port.x", "1"], "--port.x: is not a flag"),
        (["M", "--hf-overrides", "{"], "--hf-overrides: is not valid JSON"),
        (["M", "--hf-overrides", "[1]"], "must be a JSON object"),
        (["M", "--api-key", ""], "api_key: must be ASCII"),
        (["M", "--block-size", "0"], "block_size: must be an integer of at least 1"),
        (["M", "--allowed-origins", "*", "--allow-credentials"], "allow_credentials: cannot be combined"),
        (["M", "--allow-credentials"], "allow_credentials: does nothing without allowed_origins"),
        (["M", "--ssl-ca-certs", "ca.pem"], "ssl_ca_certs: clients show certificates over TLS only"),
        (["M", "--revision", "v1", "--tokenizer-revision", "v2"], "tokenizer_revision: needs tokenizer"),
        (["M", "--config", "nowhere.yaml"], "--config: cannot read"),
        (["M", "--shutdown-timeout", "nan"], "shutdown_timeout: must be 0 to 86400"),
        (["M", "--shutdown-timeout", "inf"], "shutdown_timeout: must be 0 to 86400"),
        (["M", "--sse-keep-alive-interval", "nan"], "sse_keep_alive_interval: must be 0"),
        (["M", "--kv-offloading-size", "inf"], "kv_offloading_size: must be GiB"),
    ],
)
def test_mistakes_name_the_flag(argv: list[str], text: str) -> None:
    with pytest.raises(ParameterError) as error:
        parse(argv)
    assert text in str(error.value)


def test_keys_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "old")
    assert parse(["M"]).server.api_key == ("old",)
    monkeypatch.setenv("QIAO_API_KEY", "new")
    assert parse(["M"]).server.api_key == ("new",)
    assert parse(["M", "--api-key", "flag"]).server.api_key == ("flag",)
    assert "new" not in repr(parse(["M"]).server)
    monkeypatch.setenv("QIAO_API_KEY", "")
    with pytest.raises(ParameterError, match="QIAO_API_KEY: is set but empty"):
        parse(["M"])


def test_adapters_in_every_spelling(tmp_path: Path) -> None:
    two = '{"name": "b", "path": "/b"}'
    parsed = parse(
        ["M", "--enable-lora", "--lora-modules", "a=/a", two, "--max-loras", "2", "--max-cpu-loras", "4"]
    ).engine
    assert (parsed.enable_lora, parsed.lora_modules, parsed.max_loras) == (True, ("a=/a", two), 2)
    file = tmp_path / "serve.yaml"
    file.write_text("enable-lora: true\nlora-modules:\n- a=/a\n- name: b\n  path: /b\n")
    assert parse(["M", "--config", str(file)]).engine.lora_modules == ("a=/a", two)


def test_a_key_that_stands_twice_is_refused(tmp_path: Path) -> None:
    """YAML's own rule is that the last one wins: one of two lists of models would go unseen."""
    file = tmp_path / "serve.yaml"
    file.write_text("model: M\nport: 1\nhf-overrides: {a: {b: 1}, c: {b: 2}}\n")
    assert parse(["--config", str(file)]).setup.server.port == 1
    for text in ("port: 1\nmodel: M\nport: 2\n", "model: M\nhf-overrides: {a: {b: 1, b: 2}}\n"):
        file.write_text(text)
        with pytest.raises(ParameterError, match="stands twice"):
            parse(["--config", str(file)])
