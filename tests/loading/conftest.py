import socket
from pathlib import Path

import pytest

from tests.support.checkpoints import rand_checkpoint


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every attempt to reach the network fails and is noted."""
    attempts: list[str] = []

    def refuse(*args: object, **kwargs: object) -> None:
        attempts.append(repr(args))
        raise OSError("the network is blocked in this test")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket.socket, "connect_ex", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    return attempts


@pytest.fixture(scope="session")
def rand(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """RAND in one file."""
    return rand_checkpoint(tmp_path_factory.mktemp("rand"))


@pytest.fixture(scope="session")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """RAND in several shards with an index."""
    return rand_checkpoint(tmp_path_factory.mktemp("sharded"), max_shard_size="100KB")
