"""Servers that many tests share: one over RAND with the real engine, one over the scripted engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.checkpoints import rand_checkpoint
from tests.support.server import RunningServer, chain, scripted, server

CHAINS = {
    "stop": chain("x>DEFGHIJk"),
    "euro": {0x82: 0xAC, 0xAC: 0x21},
    "wide": chain("x>é漢😀y", "\n>é漢😀y"),
    "space": chain("x> leading"),
    "long": chain("x>ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789abcd"),
    "word": chain("x>abSTOPc", "\n>abSTOPc"),
    "endless": {**dict.fromkeys(range(260), 97)},
}


@pytest.fixture(scope="session")
def rand_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rand_checkpoint(tmp_path_factory.mktemp("server") / "rand")


@pytest.fixture(scope="session")
def rand(rand_folder: Path) -> Iterator[RunningServer]:
    with server(
        rand_folder,
        *("--dtype", "float32", "--num-gpu-blocks-override", "64", "--max-num-seqs", "8", "--check-integrity"),
        *("--max-body-bytes", "8MiB", "--enable-request-id-headers", "--threads", "1"),
    ) as running:
        yield running


@pytest.fixture(scope="session")
def chained(rand_folder: Path) -> Iterator[RunningServer]:
    with scripted(model=rand_folder, tables=CHAINS, pause=0.002) as running:
        yield running
