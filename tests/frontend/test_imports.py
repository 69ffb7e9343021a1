"""What the two processes of a server import: torch and transformers cost seconds and hundreds of megabytes each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from qiao.loading.vocabularies import byte_alphabet

from tests.support.checkpoints import rand_checkpoint
from tests.support.gguf import write_gguf

FRONT = """
import sys
from qiao.cli.main import build_app
import qiao.server.lifecycle
from qiao.config import EngineArgs
from qiao.engine.request import EngineInfo
from qiao.frontend import Frontend, TextFiles
args = EngineArgs(model=sys.argv[1])
names = ("max_model_len", "vocab_size", "block_size", "num_blocks", "max_num_seqs", "max_num_queued")
info = EngineInfo(device="cpu", dtype="float32", eos_token_ids=[7], **dict.fromkeys(names, 512))
front = Frontend.load(args, info, TextFiles.read(args))
assert 7 in front.eos_token_ids
assert front.decode(front.encode("abc", add_special_tokens=False)) == "abc"
"""

ENGINE = """
import sys
import qiao.transport.host
from qiao.config import EngineArgs
from qiao.build import build_engine
build_engine(EngineArgs(model=sys.argv[1], device="cpu", num_gpu_blocks_override=8, max_model_len=64))
"""

AGAIN = """
import sys, tempfile
from pathlib import Path
from qiao.config import EngineArgs
from qiao.build import build_engine
from qiao.models import packing
from qiao.loading.packed_cache import PackedCache
packing.MIN_BYTES = 0
folder = tempfile.TemporaryDirectory()
for _ in range(2):
    args = EngineArgs(
        model=sys.argv[1], device="cpu", num_gpu_blocks_override=8, max_model_len=64, dtype=sys.argv[2],
        packed_cache=folder.name
    )
    build_engine(args)
assert PackedCache(Path(folder.name)).entries()
folder.cleanup()
"""

LAUNCH = """
import sys
import qiao.cli.main, qiao.cli.serve, qiao.server.__main__, qiao.server.flags, qiao.server.start
"""

SHOW = "import json; print(json.dumps(sorted({name.split('.')[0] for name in sys.modules} | set(sys.modules))))"

NOT_IN_FRONT = {
    *("torch", "transformers", "numpy", "gguf", "huggingface_hub", "safetensors", "sympy", "sentencepiece"),
    *("opentelemetry.sdk", "opentelemetry.exporter"),  # FastAPI imports the bare interface where it is installed
}
NOT_IN_ENGINE = {
    *("transformers", "huggingface_hub", "fastapi", "pydantic", "uvicorn", "jinja2", "httpx", "prometheus_client"),
    *("gguf", "sentencepiece", "tokenizers", "typer", "rich", "sympy", "networkx", "triton"),
    *("torch._dynamo", "torch._inductor", "torch.distributed.tensor"),
}
NOT_BEFORE_LAUNCH = NOT_IN_FRONT | {
    *("fastapi", "pydantic", "uvicorn", "jinja2", "tokenizers", "prometheus_client", "yaml"),
}


def imported(code: str, *words: Path | str) -> set[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code + SHOW, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env, timeout=300)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rand_checkpoint(tmp_path_factory.mktemp("model") / "m")


@pytest.fixture(scope="module")
def gguf(folder: Path) -> Path:
    tokens = byte_alphabet()
    words = {"model": "gpt2", "pre": "gpt-2", "tokens": list(tokens), "token_type": [1] * len(tokens)}
    words = {f"tokenizer.ggml.{key}": value for key, value in words.items()}
    return write_gguf(folder, folder.parent / "m.gguf", "Q4_1", metadata=words)


@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_front_end(kind: str, request: pytest.FixtureRequest) -> None:
    assert imported(FRONT, request.getfixturevalue(kind)) & NOT_IN_FRONT == set()


@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_engine(kind: str, request: pytest.FixtureRequest) -> None:
    assert imported(ENGINE, request.getfixturevalue(kind)) & NOT_IN_ENGINE == set()


@pytest.mark.skipif(find_spec("qiao_cpu") is None, reason="needs a plugin whose packed weights are kept")
@pytest.mark.parametrize("kind", ["folder", "gguf"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_engine_with_packed_weights(kind: str, dtype: str, request: pytest.FixtureRequest) -> None:
    """torch loads its compiler as soon as some operators run on the meta device, where outlines of weights are."""
    assert imported(AGAIN, request.getfixturevalue(kind), dtype) & NOT_IN_ENGINE == set()


def test_engine_is_started_before_the_rest_is_imported() -> None:
    """``serve`` spawns the engine with what these modules bring, and imports the HTTP side after."""
    found = imported(LAUNCH)
    assert "qiao.server.lifecycle" not in found
    assert found & NOT_BEFORE_LAUNCH == set()
