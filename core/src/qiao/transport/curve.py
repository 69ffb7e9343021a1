"""Key files for engines and front ends on different hosts: ZeroMQ's CURVE (curve25519), both sides known to each other.

A folder holds ``engine.key`` and ``gateway.key``, which are public, and ``engine.key_secret`` and
``gateway.key_secret``. An engine's host needs its own secret one and every ``*.key`` of the gateways it serves; a
gateway its own secret one and ``engine.key``. So one folder may be copied to both, or better without the other side's
secret.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import zmq.auth

from qiao.errors import ParameterError

ENGINE, GATEWAY = "engine", "gateway"


def make_keys(folder: Path) -> list[Path]:
    """Write both pairs into ``folder``, secret ones readable by their owner only.

    Raises ``ParameterError`` where there are keys already, or the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if found := sorted(folder.glob("*.key*")):
            raise ParameterError("DIR", f"{found[0]} is there already; engines that run need it. Choose another folder")
        made: list[Path] = []
        before = os.umask(0o077)  # a secret is nobody else's from its first byte on
        try:
            for name in (ENGINE, GATEWAY):
                made += map(Path, zmq.auth.create_certificates(folder, name))
        finally:
            os.umask(before)
        for path in made:
            os.chmod(path, 0o600 if path.suffix == ".key_secret" else 0o644)
        return made
    except OSError as error:
        raise ParameterError("DIR", f"cannot write {folder}: {error.strerror}") from None


@dataclass(frozen=True)
class EngineKeys:
    """What an engine's host needs: its own pair, and the public keys of those whom it serves."""

    public: bytes
    secret: bytes
    clients: frozenset[bytes]

    @classmethod
    def read(cls, folder: Path) -> EngineKeys:
        """From a folder. Raises ``ParameterError``."""
        public, secret = _pair(folder, ENGINE)
        clients = {_load(path)[0] for path in folder.glob("*.key") if path.stem != ENGINE}
        if not clients:
            raise ParameterError("--engine-keys", f"{folder} has no gateway.key, so nobody could use the engine")
        return cls(public, secret, frozenset(clients))


@dataclass(frozen=True)
class GatewayKeys:
    """What a front end needs: its own pair, and the engines' public key."""

    public: bytes
    secret: bytes
    engine: bytes

    @classmethod
    def read(cls, folder: Path) -> GatewayKeys:
        """From a folder. Raises ``ParameterError``."""
        public, secret = _pair(folder, GATEWAY)
        return cls(public, secret, _load(folder / f"{ENGINE}.key")[0])


def _pair(folder: Path, name: str) -> tuple[bytes, bytes]:
    public, secret = _load(folder / f"{name}.key_secret")
    if secret is None:
        raise ParameterError("--engine-keys", f"{folder}/{name}.key_secret holds no secret key")
    return public, secret


def _load(path: Path) -> tuple[bytes, bytes | None]:
    try:
        return zmq.auth.load_certificate(path)
    except (OSError, ValueError):
        remedy = "make the keys with: qiao engine-keys DIR"
        raise ParameterError("--engine-keys", f"{path} is missing or no key file; {remedy}") from None
