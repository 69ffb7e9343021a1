"""Whole runs on tiny random models: what comes out loads, resumes, and is refused where it must be."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from qiao.cli.main import main
from qiao.errors import ModelError, ParameterError
from qiao.loading import WeightStore, load_config, load_generation_config, load_tokenizer, resolve
from qiao.quantize import Device, Options, Report, quantize
from safetensors.torch import load_file

from tests.support.checkpoints import VOCAB, rand_checkpoint
from tests.support.models import cpu_ops, token_ids
from tests.support.quantized import IDS, backend_called, float_logits, load, logits, place

SEQUENCES = [token_ids(40, VOCAB, seed=i) for i in range(3)]
METHODS: dict[str, dict[str, Any]] = {
    "rtn": {"method": "rtn"},
    "rtn-3-asym": {"method": "rtn", "bits": 3, "symmetric": False},
    "gptq": {"method": "gptq"},
    "gptq-2-none": {"method": "gptq", "bits": 2, "act_order": "none"},
    "gptq-8-asym-group": {"method": "gptq", "bits": 8, "symmetric": False, "act_order": "group"},
    "awq": {"method": "awq"},
    "awq-sym": {"method": "awq", "symmetric": True},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers, tied, in bfloat16."""
    return rand_checkpoint(
        tmp_path_factory.mktemp("rand") / "model", num_hidden_layers=3, dtype="bfloat16", tie_word_embeddings=True
    )


def run(model: Path, folder: Path, sequences: list[list[int]] = SEQUENCES, **options: Any) -> Report:
    settings = Options(**{"group": 32, **options})
    return quantize(resolve(model), folder, settings, Device(cpu_ops(), torch.float32, 8), sequences)


def stored(folder: Path) -> dict[str, torch.Tensor]:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    held = {}
    for name, shard in index["weight_map"].items():
        held[name] = load_file(folder / shard)[name]
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in held.values())
    return held


def stream(words: torch.Tensor, bits: int) -> np.ndarray:
    """[n, m] words as [n, m * 32 / bits] numbers: each row is one long number, the lowest first."""
    rows = []
    for row in words.numpy().view(np.uint32).tolist():
        long = sum(word << (32 * i) for i, word in enumerate(row))
        rows.append([long >> (bits * i) & ((1 << bits) - 1) for i in range(len(row) * 32 // bits)])
    return np.array(rows)


def dequantized(folder: Path) -> dict[str, torch.Tensor]:
    """Every weight in float32, by the definitions of AutoGPTQ's and AutoAWQ's formats."""
    settings, held = json.loads((folder / "config.json").read_text())["quantization_config"], stored(folder)
    found = {n: x.float() for n, x in held.items() if n.rpartition(".")[2] in ("weight", "bias")}
    for name in [n.removesuffix(".qweight") for n in held if n.endswith(".qweight")]:
        qweight, qzeros = held[f"{name}.qweight"], held[f"{name}.qzeros"]
        scales = held[f"{name}.scales"].double().numpy()
        if settings["quant_method"] == "awq":
            place = [0, 4, 1, 5, 2, 6, 3, 7]  # nibble that holds output i of eight
            codes = stream(qweight, 4).reshape(len(qweight), -1, 8)[..., place].reshape(len(qweight), -1)
            zeros = stream(qzeros, 4).reshape(len(qzeros), -1, 8)[..., place].reshape(len(qzeros), -1)
            owner = np.arange(len(codes)) // settings["group_size"]
        else:
            codes = stream(qweight.T.contiguous(), settings["bits"]).T
            zeros = stream(qzeros, settings["bits"]) + 1
            owner = held[f"{name}.g_idx"].numpy()
        values = (codes - zeros[owner]) * scales[owner]
        found[f"{name}.weight"] = torch.tensor(values.T, dtype=torch.float32)
    return found


@pytest.mark.parametrize("name", sorted(METHODS))
def test_qiao_serves_what_the_file_means(name: str, model: Path, tmp_path: Path) -> None:
    """Logits of Qiao equal those of transformers with the weights dequantized here."""
    run(model, tmp_path, **METHODS[name])
    _, ops = place(tmp_path, backend_called("reference"))
    got = logits(load(tmp_path, ops), ops, IDS)
    config = load_config(resolve(model))
    want = float_logits(config, dequantized(tmp_path), IDS)
    torch.testing.assert_close(got, want, atol=1e-3, rtol=1e-3)
    plain = float_logits(config, {n: x.float() for n, x in load_file(model / "model.safetensors").items()}, IDS)
    assert not torch.allclose(got, plain, atol=1e-2), "quantizing must have changed something"


def test_what_is_no_linear_layer_stays_as_it_was(model: Path, tmp_path: Path) -> None:
    run(model, tmp_path, method="gptq")
    before, after = load_file(model / "model.safetensors"), stored(tmp_path)
    for name, tensor in before.items():
        if "_proj" not in name:
            assert after[name].dtype == torch.bfloat16
            assert torch.equal(after[name], tensor), name
    assert "lm_head.weight" not in after, "a tied head stays tied"
    assert sum(name.endswith(".qweight") for name in after) == 3 * 7


def test_the_folder_is_a_whole_model(model: Path, tmp_path: Path) -> None:
    report = run(model, tmp_path, method="rtn")
    files = resolve(tmp_path)
    assert load_tokenizer(files)("hello")["input_ids"] == load_tokenizer(resolve(model))("hello")["input_ids"]
    assert load_generation_config(files) == load_generation_config(resolve(model))
    left = {file.name for file in tmp_path.iterdir()}
    assert not {name for name in left if "state" in name or name.endswith(".part")}
    with pytest.raises(ModelError, match="quantized already, by gptq"):
        WeightStore(files)
    assert report.bytes_after < 0.3 * report.bytes_before + 3 * 7 * 128 * 8  # a tiny model has many indices


def test_float32_is_stored_in_16_bits(tmp_path: Path) -> None:
    source = rand_checkpoint(tmp_path / "model", tie_word_embeddings=False)
    run(source, tmp_path / "out", method="awq")
    held = stored(tmp_path / "out")
    assert {x.dtype for x in held.values()} == {torch.bfloat16, torch.int32}
    assert "lm_head.weight" in held
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def files_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize("method", ["gptq", "awq", "rtn"])
def test_a_killed_run_goes_on_and_ends_the_same(method: str, model: Path, tmp_path: Path) -> None:
    whole = run(model, tmp_path / "whole", method=method)
    code = f"""
import os, signal, torch
from pathlib import Path
from qiao.loading import resolve
from qiao.quantize import Device, Options, quantize
from qiao.quantize import output
from tests.support.models import cpu_ops
torch.set_num_threads({torch.get_num_threads()})
settle, count = output._settle, 0
def die(part, file):
    global count
    count += file.suffix == ".safetensors"
    if count == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    settle(part, file)
output._settle = die
options = Options(method={method!r}, group=32)
device = Device(cpu_ops(), torch.float32, 8)
quantize(resolve({str(model)!r}), Path({str(tmp_path / "killed")!r}), options, device, {SEQUENCES!r})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr
    left = sorted(file.name for file in (tmp_path / "killed").iterdir())
    assert [name for name in left if name.endswith(".safetensors")] == [
        "model-00001-of-00004.safetensors",
        "model-00002-of-00004.safetensors",
    ]
    assert "model-00003-of-00004.safetensors.part" in left
    assert "config.json" not in left, "an unfinished folder must not look like a model"
    with pytest.raises(ModelError):
        resolve(tmp_path / "killed")
    resumed = run(model, tmp_path / "killed", method=method)
    assert (whole.resumed, resumed.resumed) == (0, 2)
    assert files_of(tmp_path / "killed") == files_of(tmp_path / "whole")
    assert resumed.errors == whole.errors


def stop_after(layers: int) -> Any:
    def progress(done: int, total: int, error: float | None) -> None:
        if done == layers:
            raise KeyboardInterrupt

    return progress


@pytest.fixture
def unfinished(model: Path, tmp_path: Path) -> Path:
    """A folder with one finished layer of gptq."""
    with pytest.raises(KeyboardInterrupt):
        quantize(
            resolve(model),
            tmp_path / "out",
            Options(group=32),
            Device(cpu_ops(), torch.float32, 8),
            SEQUENCES,
            stop_after(1),
        )
    return tmp_path / "out"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"method": "rtn"}, ["method", "'gptq'", "'rtn'"]),
        ({"bits": 8}, ["bits 4", "8"]),
        ({"group": 64}, ["group 32", "64"]),
        ({"symmetric": False}, ["symmetric True", "False"]),
        ({"act_order": "none"}, ["act_order", "'static'", "'none'"]),
        ({"damp": 0.01}, ["damp 0.1", "0.01"]),
        ({"sequences": SEQUENCES[:2]}, ["calibration"]),
    ],
)
def test_a_changed_setting_is_refused_with_a_remedy(
    unfinished: Path, model: Path, changes: dict[str, Any], words: list[str]
) -> None:
    before = files_of(unfinished)
    with pytest.raises(ParameterError) as caught:
        run(model, unfinished, **changes)
    for word in [*words, "repeat the run as it was, give another folder, or delete this one"]:
        assert word in str(caught.value)
    assert files_of(unfinished) == before


def test_another_model_is_refused(unfinished: Path, tmp_path: Path) -> None:
    other = rand_checkpoint(tmp_path / "other", seed=1, num_hidden_layers=3, dtype="bfloat16", tie_word_embeddings=True)
    with pytest.raises(ParameterError, match="unfinished run with model"):
        run(other, unfinished)


def test_a_damaged_shard_is_refused(unfinished: Path, model: Path) -> None:
    shard = next(unfinished.glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(ModelError, match=f"{shard.name}.*start anew"):
        run(model, unfinished)


def test_a_folder_with_something_else_is_left_alone(model: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ParameterError, match="not empty"):
        run(model, tmp_path, method="rtn")
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]


def test_a_group_that_does_not_fit_is_refused_before_anything_is_written(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"layers\.0\..*64 inputs.*--group 64 or 32 or -1 would"):
        run(model, tmp_path / "out", group=128)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"method": "magic"}, "--method"),
        ({"bits": 5}, "--bits"),
        ({"bits": 8, "method": "awq"}, "--bits"),
        ({"group": 48}, "--group"),
        ({"act_order": "yes"}, "--act-order"),
        ({"damp": 0.0}, "--damp"),
        ({"samples": 0}, "--samples"),
        ({"length": 1}, "--length"),
        ({"seed": -1}, "--seed"),
    ],
)
def test_wrong_settings_name_their_flag(options: dict[str, Any], field: str) -> None:
    with pytest.raises(ParameterError) as caught:
        Options(**options)
    assert caught.value.field == field


def command(*argv: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(["quantize", *argv])
    return int(stop.value.code or 0)


def calibration(path: Path, lines: list[str]) -> str:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def test_the_command_writes_a_model_and_a_report(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [json.dumps({"text": f"the text of line {i}, and more of it"}) for i in range(6)]
    lines.append(json.dumps({"messages": [{"role": "user", "content": "hello"}]}))
    file = calibration(tmp_path / "c.jsonl", lines)
    argv = (str(model), "--group", "32", "--calibration", file, "--samples", "7", "--device", "cpu", "--json")
    assert command(*argv, "-o", str(tmp_path / "out")) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["method"] == "gptq" and len(report["errors"]) == 3 and report["resumed"] == 0
    assert 0.0 < report["mean_error"] < 0.2
    assert report["tokens"] > 6 * 20
    settings = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert {key: settings[key] for key in ("quant_method", "bits", "group_size", "sym", "desc_act")} == {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 32,
        "sym": True,
        "desc_act": False,
    }


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", ["line 2", "not JSON"]),
        ("[]", ["line 2", "messages"]),
        ('{"txt": "x"}', ["line 2", "messages"]),
        ('{"text": 3}', ["line 2", "string"]),
    ],
)
def test_wrong_calibration_lines_are_named(
    line: str, words: list[str], model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = calibration(tmp_path / "c.jsonl", ['{"text": "fine"}', line])
    assert command(str(model), "--group", "32", "--calibration", file, "-o", str(tmp_path / "out")) == 2
    shown = capsys.readouterr().err
    for word in ["--calibration", *words]:
        assert word in shown


def test_gptq_asks_for_data(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(str(model), "-o", str(tmp_path / "out")) == 2
    assert "--calibration" in capsys.readouterr().err


def test_lines_are_drawn_by_the_seed(model: Path, tmp_path: Path) -> None:
    from qiao.quantize import read_samples

    file = Path(calibration(tmp_path / "c.jsonl", [json.dumps({"text": f"line {i:03d}"}) for i in range(100)]))
    tokenizer = load_tokenizer(resolve(model))
    draws = [read_samples(file, tokenizer, 10, 512, seed) for seed in (0, 0, 1)]
    assert draws[0] == draws[1] != draws[2]
    assert len(draws[0]) == 10
    assert all(len(ids) <= 3 for ids in read_samples(file, tokenizer, 10, 3, 0))


def test_a_gguf_file_gives_the_same_as_its_folder(tmp_path: Path) -> None:
    """Names, rows of q and k, config and tokenizer come out of the file."""
    from tests.support.gguf import write_gguf
    from tests.support.tokenizers import byte_alphabet

    source = rand_checkpoint(tmp_path / "model", dtype="bfloat16")
    tokens = [*byte_alphabet().values(), *(f"<{i}>" for i in range(256, VOCAB))]
    words = {"model": "gpt2", "pre": "gpt-2", "tokens": tokens, "token_type": [1] * VOCAB}
    file = write_gguf(source, tmp_path / "m.gguf", metadata={f"tokenizer.ggml.{k}": v for k, v in words.items()})
    run(source, tmp_path / "a", method="gptq")
    run(file, tmp_path / "b", method="gptq")
    one, other = stored(tmp_path / "a"), stored(tmp_path / "b")
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []
    tokenizer = load_tokenizer(resolve(tmp_path / "b"))
    assert tokenizer.decode(tokenizer("abc")["input_ids"]) == "abc"
