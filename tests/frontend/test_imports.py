"""A front end over a GGUF file loads no torch, which costs seconds and hundreds of megabytes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from qiao.loading.vocabularies import byte_alphabet

from tests.support.checkpoints import rand_checkpoint
from tests.support.gguf import write_gguf

CODE = """
import sys
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
print("torch" in sys.modules)
"""


def test_no_torch_in_the_front_end(tmp_path: Path) -> None:
    tokens = byte_alphabet()
    words = {"model": "gpt2", "pre": "gpt-2", "tokens": list(tokens), "token_type": [1] * len(tokens)}
    words = {f"tokenizer.ggml.{key}": value for key, value in words.items()}
    file = write_gguf(rand_checkpoint(tmp_path / "m"), tmp_path / "m.gguf", metadata=words)
    done = subprocess.run([sys.executable, "-c", CODE, str(file)], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "False", done.stderr
