from collections.abc import Iterator
from pathlib import Path

import pytest
from qiao import LLM

from tests.support.checkpoints import chain_checkpoint, rand_checkpoint

SMALL = {"device": "cpu", "num_gpu_blocks_override": 64, "max_num_seqs": 8, "check_integrity": True}


@pytest.fixture(scope="session")
def rand(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rand_checkpoint(tmp_path_factory.mktemp("rand"))


@pytest.fixture(scope="session")
def rand_llm(rand: Path) -> LLM:
    return LLM(str(rand), **SMALL)


@pytest.fixture(scope="session")
def chain_llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """After "x" comes "DEFGHIJk", then the end."""
    yield LLM(str(chain_checkpoint(tmp_path_factory.mktemp("chain"), "x>DEFGHIJ>k")), **SMALL)
