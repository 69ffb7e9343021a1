"""``qiao plan`` and ``qiao plugins`` as a user types them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from qiao.cli.main import main

from tests.support.plans import CONFIGS
from tests.support.plugins import good_source

LLAMA = str(CONFIGS / "llama-3-8b.json")


@pytest.fixture
def run(capsys, monkeypatch):
    """Run ``qiao`` with arguments: exit status, stdout, stderr. Other CPU plugins that are installed stay out."""
    monkeypatch.setenv("QIAO_PLUGINS", "reference,sim")

    def call(*arguments):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        shown = capsys.readouterr()
        return caught.value.code or 0, shown.out, shown.err

    return call


def test_plan_prices_without_weights_and_shows_the_difference(run):
    """The acceptance line of the design: the same gap with the cache moved, and with the cache kept."""
    arguments = ["plan", "--model", LLAMA, "--device", "sim", "--drop", "attention", "--json"]
    status, moved, _ = run(*arguments)
    assert status == 0
    status, kept, _ = run(*arguments, "--keep", "KV")
    assert status == 0
    moved, kept = json.loads(moved), json.loads(kept)
    assert moved["kv"]["place"] == "reference" and kept["kv"]["place"] == "sim"
    cache = 32 * 32 * 2048 * 2 * 8 * 128 * 2
    assert kept["total"]["bytes_to_host"] > cache > 100 * moved["total"]["bytes"]
    assert moved["bindable"] and not kept["bindable"]
    assert next(o for o in moved["operators"] if o["operator"] == "attention")["reason"] == "left out by --drop"


def test_plan_for_people(run):
    status, out, _ = run("plan", "--model", LLAMA, "--device", "sim", "--drop", "sample,attention")
    assert status == 0
    for part in ("attention (KV) runs on reference", "W[dense]", "16.4 MB", "total", "not captured"):
        assert part in out


def test_plan_takes_the_step_from_its_options(run):
    status, out, _ = run(
        *("plan", "--model", LLAMA, "--device", "sim", "--drop", "sample", "--json"),
        *("--batch", "2", "--context", "100", "--prefill", "50", "--bandwidth", "1", "--sync-us", "0"),
    )
    data = json.loads(out)
    assert status == 0
    assert data["step"] == {"tokens": 50, "seqs": 2, "logits": 2, "context": 100, "table_width": 7}
    assert data["fallback"]["bytes"] == 2 * 128256 * 4
    assert data["fallback"]["seconds"] == pytest.approx(2 * 128256 * 4 / 1e9)


def test_plan_of_a_folder(run, tmp_path):
    (tmp_path / "config.json").write_text((CONFIGS / "qwen3-8b.json").read_text())
    status, out, _ = run("plan", "--model", str(tmp_path), "--device", "cpu", "--dtype", "float32", "--json")
    data = json.loads(out)
    assert status == 0 and data["model"] == "Qwen3ForCausalLM" and data["dtype"] == "float32"
    assert data["total"]["bytes"] == 0


def test_plan_of_a_gguf_file(run, tmp_path):
    from tests.support.checkpoints import rand_checkpoint
    from tests.support.gguf import write_gguf

    folder = rand_checkpoint(tmp_path / "rand")
    file = write_gguf(folder, tmp_path / "rand.gguf")
    shapes = []
    for model in (folder, file):
        status, out, _ = run(
            "plan", "--model", str(model), "--device", "sim", "--drop", "KV,W", "--dtype", "float32", "--json"
        )
        assert status == 0
        shapes.append(json.loads(out)["total"])
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["--drop", "atention"], 2, "Did you mean 'attention'?"),
        (["--keep", "S"], 2, "holds no state"),
        (["--fallback", "perhaps"], 2, "allow, warn or deny"),
        (["--fallback-budget", "many"], 2, "--fallback-budget"),
        (["--dtype", "int3"], 2, "dtype: must be one of"),
        (["--quantization", "awq"], 2, "the model is not quantized"),
        (["--batch", "8", "--prefill", "4"], 2, "--prefill"),
        (["--device", "maca"], 1, "MetaX"),
        (["--drop", "attention", "--fallback", "deny"], 1, "forbids running these operators on the host"),
        (["--drop", "attention", "--fallback-budget", "1MiB"], 1, "the budget is 1.0 MB"),
    ],
)
def test_plan_mistakes(run, arguments, status, said):
    device = [] if "--device" in arguments else ["--device", "sim"]
    code, _, err = run("plan", "--model", LLAMA, *device, *arguments)
    assert code == status and said in err and "Traceback" not in err


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [("none.json", None, "not found"), ("bad.json", "{", "not readable as JSON"), ("list.json", "[]", "JSON object")],
)
def test_plan_of_a_bad_config(run, tmp_path, name, text, said):
    if text is not None:
        (tmp_path / name).write_text(text)
    code, _, err = run("plan", "--model", str(tmp_path / name), "--device", "cpu")
    assert code == 2 and said in err and name in err


def test_plugins_lists_what_works_and_why_the_rest_does_not(run, site):
    site.install("acme", good_source("acme", count=2))
    site.install("broken", "import torch_fake")
    site.install("newer", good_source("newer"), group="qiao.v2")
    site.install("older", good_source("older"), requires=["qiao<0.0.1"])
    status, out, _ = run("plugins", "--json")
    assert status == 0
    found = {entry["name"]: entry for entry in json.loads(out)["plugins"]}
    assert found["acme"]["status"] == "ready" and [d["name"] for d in found["acme"]["devices"]] == ["acme:0", "acme:1"]
    assert "probe_devices" in found["acme"]["hooks"] and found["acme"]["distribution"] == "qiao-acme"
    assert found["broken"]["status"] == "quarantined" and "torch_fake" in found["broken"]["reason"]
    assert found["newer"]["status"] == "quarantined" and "qiao.v2" in found["newer"]["reason"]
    assert found["older"]["status"] == "quarantined" and "<0.0.1" in found["older"]["reason"]
    assert found["reference"]["status"] == "ready" and "attention" in found["reference"]["hooks"]


def test_plugins_for_people(run, site):
    site.install("broken", "import torch_fake")
    status, out, _ = run("plugins")
    assert status == 0 and "reference" in out and "quarantined" in out


def test_help_survives_broken_plugins(site):
    """B092: in a process of its own, where nothing is imported yet."""
    site.install("broken", "raise SystemExit('plugin says no')")
    command = [sys.executable, "-m", "qiao.cli.main", "--help"]
    path = {"PYTHONPATH": str(site.folder), "PATH": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=path, check=False)
    assert done.returncode == 0 and "plan" in done.stdout and "plugin says no" not in done.stdout + done.stderr
