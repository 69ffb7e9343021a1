"""The file of tenants and keys: a SQLite database that ``qiao keys`` writes and the server reads.

A key is shown once, when it is made, and then known by a hash alone. It holds 256 random bits, so that a keyed fast
hash (HMAC-SHA256 with a random key of the file) is enough: there is nothing to guess, and a slow hash would only give a
flood of wrong keys a way to burn the server's time.
"""

from __future__ import annotations

import os
import secrets
import sqlite3
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from hashlib import sha256
from hmac import digest
from pathlib import Path
from typing import NamedTuple

import msgspec

from qiao.errors import ParameterError
from qiao.tenants.tenant import Tenant

PREFIX = "qk"
"""First part of every key, so that scanners for leaked secrets can find them."""

VERSION = 1
"""``user_version`` of the database."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS secret (key BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS tenants (name TEXT PRIMARY KEY, settings TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS keys (
  id TEXT PRIMARY KEY, tenant TEXT NOT NULL REFERENCES tenants (name), digest BLOB NOT NULL,
  note TEXT NOT NULL, created REAL NOT NULL, revoked REAL);
CREATE TABLE IF NOT EXISTS usage (
  tenant TEXT NOT NULL, day TEXT NOT NULL, tokens INTEGER NOT NULL, PRIMARY KEY (tenant, day));
"""


class StoredKey(NamedTuple):
    """A key as the file knows it. Times are ``time.time()``; ``revoked`` is None while the key is good."""

    id: str
    tenant: str
    digest: bytes
    note: str
    created: float
    revoked: float | None


class NewKey(NamedTuple):
    """A key that has just been made; ``text`` cannot be had again."""

    id: str
    tenant: str
    text: str


def key_digest(secret: bytes, text: str) -> bytes:
    """What is kept of a key."""
    return digest(secret, text.encode("utf-8", "surrogateescape"), sha256)


def key_id(text: str) -> str:
    """The public part of a key; empty where it has none."""
    prefix, _, rest = text.partition("-")
    return rest.partition("-")[0] if prefix == PREFIX else ""


class KeyStore:
    """One file. Every method opens it anew, so that several processes and threads may use it.

    Raises ``ParameterError`` naming ``--keys`` where it cannot be read or is something else.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def create(self) -> None:
        """Make the file, readable by its owner alone, unless it is there."""
        try:
            os.close(os.open(self.path, os.O_CREAT | os.O_RDWR, 0o600))
        except OSError as error:
            raise ParameterError("--keys", f"cannot make {self.path}: {error.strerror}") from None
        with self._open() as database:
            database.executescript(_SCHEMA)
            if database.execute("SELECT count(*) FROM secret").fetchone()[0] == 0:
                database.execute("INSERT INTO secret VALUES (?)", (secrets.token_bytes(32),))
            database.execute(f"PRAGMA user_version = {VERSION}")

    def check(self) -> None:
        """Raise unless the file is there and of this version."""
        if not self.path.is_file():
            raise ParameterError("--keys", f"{self.path} does not exist; `qiao keys add TENANT` makes it")
        with self._open() as database:
            version = database.execute("PRAGMA user_version").fetchone()[0]
        if version != VERSION:
            raise ParameterError("--keys", f"{self.path} has version {version}, this Qiao reads {VERSION}")

    def secret(self) -> bytes:
        """The key of the hashes."""
        with self._open() as database:
            value: bytes = database.execute("SELECT key FROM secret").fetchone()[0]
            return value

    def tenants(self) -> dict[str, Tenant]:
        """All tenants by name."""
        with self._open() as database:
            rows = database.execute("SELECT settings FROM tenants ORDER BY name").fetchall()
        try:
            found = [msgspec.json.decode(text, type=Tenant) for (text,) in rows]
        except msgspec.MsgspecError as error:
            raise ParameterError("--keys", f"{self.path} holds a tenant that cannot be read: {error}") from None
        return {tenant.name: tenant for tenant in found}

    def put_tenant(self, tenant: Tenant) -> None:
        """Add a tenant, or change its limits."""
        text = msgspec.json.encode(tenant).decode()
        with self._open() as database:
            database.execute("INSERT OR REPLACE INTO tenants VALUES (?, ?)", (tenant.name, text))

    def keys(self) -> list[StoredKey]:
        """All keys, oldest first, the revoked ones too."""
        with self._open() as database:
            rows = database.execute("SELECT id, tenant, digest, note, created, revoked FROM keys ORDER BY created")
            return [StoredKey(*row) for row in rows]

    def add_key(self, tenant: str, note: str = "") -> NewKey:
        """Make a key of a tenant that is in the file."""
        number = secrets.token_hex(6)
        text = f"{PREFIX}-{number}-{secrets.token_urlsafe(32)}"
        row = (number, tenant, key_digest(self.secret(), text), note, time.time())
        with self._open() as database:
            database.execute("INSERT INTO keys VALUES (?, ?, ?, ?, ?, NULL)", row)
        return NewKey(number, tenant, text)

    def revoke(self, number: str) -> StoredKey:
        """Close the key with this id. Raises ``ParameterError`` for an unknown one; again is no error."""
        with self._open() as database:
            statement = "UPDATE keys SET revoked = coalesce(revoked, ?) WHERE id = ?"
            if database.execute(statement, (time.time(), number)).rowcount != 1:
                raise ParameterError("id", f"no key has the id {number[:40]!r}; `qiao keys list` shows them")
        return next(key for key in self.keys() if key.id == number)

    def usage(self, day: str) -> dict[str, int]:
        """Tokens of each tenant on ``day`` (UTC, ``2026-01-31``)."""
        with self._open() as database:
            return dict(database.execute("SELECT tenant, tokens FROM usage WHERE day = ?", (day,)).fetchall())

    def add_usage(self, used: Mapping[tuple[str, str], int]) -> None:
        """Add tokens, by (tenant, day), to what is there: several servers may share the file."""
        statement = (
            "INSERT INTO usage VALUES (?, ?, ?) "
            "ON CONFLICT (tenant, day) DO UPDATE SET tokens = tokens + excluded.tokens"
        )
        with self._open() as database:
            database.executemany(statement, [(tenant, day, tokens) for (tenant, day), tokens in used.items()])

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        try:
            address = f"{self.path.absolute().as_uri()}?mode=rw"  # one that is gone is not made anew, empty
            with closing(sqlite3.connect(address, timeout=10.0, uri=True)) as database, database:
                yield database
        except (sqlite3.Error, OSError) as error:
            raise ParameterError("--keys", f"cannot use {self.path} as a file of keys: {error}") from None
