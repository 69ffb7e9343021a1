from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from qiao.config import EngineArgs
from qiao.engine.request import EngineInfo
from qiao.frontend import Frontend, TokenTable
from qiao.loading import load_tokenizer

from tests.support.tokenizers import EOS, byte_tokenizer, spm_tokenizer

WORDS = ("th", "the", "▁the", "lo", "▁lo", "ing")


@pytest.fixture(scope="session")
def byte_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_tokenizer(tmp_path_factory.mktemp("byte"), extra_tokens={300: "hello"})


@pytest.fixture(scope="session")
def bytetok(byte_folder: Path) -> Any:
    return load_tokenizer(byte_folder)


@pytest.fixture(scope="session")
def spm(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_tokenizer(spm_tokenizer(tmp_path_factory.mktemp("spm"), words=WORDS))


@pytest.fixture(scope="session")
def table(bytetok: Any) -> TokenTable:
    return TokenTable(bytetok)


@pytest.fixture
def make_frontend(bytetok: Any) -> Callable[..., Frontend]:
    """A front end over BYTETOK; keywords change ``EngineInfo`` or ``EngineArgs``."""

    def make(generation_config: dict[str, Any] | None = None, /, **changes: Any) -> Frontend:
        info: dict[str, Any] = {
            "device": "cpu",
            "max_model_len": 64,
            "vocab_size": 320,
            "block_size": 16,
            "num_blocks": 100,
            "max_num_seqs": 8,
            "max_num_queued": 8,
            "dtype": "float32",
        }
        args = {key: changes.pop(key) for key in list(changes) if key not in info}
        info.update(changes)
        engine_args = EngineArgs(model="m", **args)
        return Frontend(bytetok, EngineInfo(**info), engine_args, generation_config, [EOS])

    return make
