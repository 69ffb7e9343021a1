"""Responses in an embedded database: in memory, or in a file that outlives the server.

Each tenant has shelves of its own: no statement reaches another's rows, and what one keeps never displaces what another
keeps. Rows go when nobody has used them for the longest age, and the longest unused first where a tenant has too many.
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from qiao.errors import ParameterError, QiaoError

VERSION = 1
"""``user_version`` of the database."""

MEMORY = "memory"
OFF = "off"

MAX_TURNS = 10_000
"""Longest conversation. The way back through it ends there, whatever a damaged file says."""

_SCHEMA = f"""
CREATE TABLE responses (
  tenant TEXT NOT NULL, id TEXT NOT NULL, previous TEXT, used REAL NOT NULL, bytes INTEGER NOT NULL,
  status TEXT NOT NULL, response TEXT NOT NULL, input TEXT NOT NULL, events TEXT, PRIMARY KEY (tenant, id));
CREATE INDEX shelves ON responses (tenant, used, bytes);
CREATE INDEX ages ON responses (used);
PRAGMA user_version = {VERSION};
"""

_CHAIN = """
WITH RECURSIVE chain (id, previous, depth) AS (
  SELECT id, previous, 0 FROM responses WHERE tenant = :tenant AND id = :id AND used >= :oldest
  UNION ALL
  SELECT earlier.id, earlier.previous, depth + 1 FROM responses AS earlier JOIN chain
  ON earlier.tenant = :tenant AND earlier.id = chain.previous WHERE depth < :turns)
SELECT chain.id, responses.previous, status, input, response FROM chain JOIN responses
ON responses.tenant = :tenant AND responses.id = chain.id ORDER BY depth DESC
"""

_CROWDED = """
DELETE FROM responses WHERE tenant = :tenant AND id IN (
  SELECT id FROM (
    SELECT id, row_number() OVER newest AS place, sum(bytes) OVER newest AS total
    FROM responses WHERE tenant = :tenant WINDOW newest AS (ORDER BY used DESC, id))
  WHERE place > :count OR total > :bytes)
"""


@dataclass(frozen=True)
class Bounds:
    """``age`` is in seconds since the last use; the others are for each tenant."""

    count: int
    age: float
    bytes: int


@dataclass
class Stored:
    """A response with the items that asked for it, and its events, each as JSON, where somebody may want to hear them
    again.
    """

    tenant: str
    response: dict[str, Any]
    input: list[dict[str, Any]]
    events: list[bytes] | None = field(default=None)


class ResponseStore:
    """One database. Used from one thread at a time.

    ``path`` is a file, which no other process may use meanwhile, or ``memory``. ``clock`` is ``time.time()``.
    Raises ``ParameterError`` naming ``--responses-db`` where the file cannot be used, and ``QiaoError`` later.
    """

    def __init__(self, path: str, bounds: Bounds, clock: Callable[[], float] = time.time) -> None:
        self.bounds = bounds
        self._clock = clock
        try:
            if path != MEMORY:
                os.close(os.open(Path(path), os.O_CREAT | os.O_RDWR, 0o600))
            self._database = sqlite3.connect(
                ":memory:" if path == MEMORY else path, timeout=1.0, isolation_level=None, check_same_thread=False
            )
            self._open()
        except (OSError, sqlite3.Error) as error:
            why = getattr(error, "strerror", None) or str(error)
            raise ParameterError("--responses-db", f"cannot use {path} as a database of responses: {why}") from None

    def _open(self) -> None:
        run = self._database.execute
        run("PRAGMA locking_mode = EXCLUSIVE")  # what another server runs must not be taken for lost
        run("PRAGMA journal_mode = WAL")
        run("PRAGMA synchronous = NORMAL")
        run("PRAGMA secure_delete = ON")  # deleted texts do not stay in the file
        run("BEGIN EXCLUSIVE")
        run("COMMIT")
        version = run("PRAGMA user_version").fetchone()[0]
        if version == 0:
            self._database.executescript(_SCHEMA)
        elif version != VERSION:
            raise sqlite3.DatabaseError(f"it has version {version}, this Qiao reads {VERSION}")
        self._end_lost()

    def _end_lost(self) -> None:
        """What an earlier server was still at has failed."""
        lost = "SELECT tenant, id, response FROM responses WHERE status IN ('queued', 'in_progress')"
        for tenant, name, text in self._database.execute(lost).fetchall():
            response = json.loads(text)
            error = {"code": "server_error", "message": "the server ended before the response was complete"}
            response |= {"status": "failed", "error": error}
            self._database.execute(
                "UPDATE responses SET status = 'failed', response = ? WHERE tenant = ? AND id = ?",
                (json.dumps(response), tenant, name),
            )

    def put(self, stored: Stored) -> None:
        """Keep a response, or its newer state, and let go what is too old or too much."""
        response, items = json.dumps(stored.response), json.dumps(stored.input)
        events = None if stored.events is None else b"[%b]" % b",".join(stored.events)
        size = len(response) + len(items) + len(events or b"")
        if size > self.bounds.bytes:  # it would push out all others and go then
            raise QiaoError(f"it has {size} bytes, and --responses-max-bytes is {self.bounds.bytes}")
        name, previous, now = stored.response["id"], stored.response["previous_response_id"], self._clock()
        told = None if events is None else events.decode()
        row = (stored.tenant, name, previous, now, size, stored.response["status"], response, items, told)
        self._change("INSERT OR REPLACE INTO responses VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
        self._change("DELETE FROM responses WHERE used < ?", (now - self.bounds.age,))
        crowd = {"tenant": stored.tenant, "count": self.bounds.count, "bytes": self.bounds.bytes}
        self._change(_CROWDED, crowd)

    def get(self, tenant: str, name: str) -> Stored | None:
        """A response of ``tenant``, None where there is none."""
        statement = "SELECT response, input, events FROM responses WHERE tenant = ? AND id = ? AND used >= ?"
        row = self._rows(statement, (tenant, name, self._clock() - self.bounds.age))
        if not row:
            return None
        response, items, events = row[0]
        told = None if events is None else list(map(bytes, msgspec.json.decode(events, type=list[msgspec.Raw])))
        return Stored(tenant, json.loads(response), json.loads(items), told)

    def delete(self, tenant: str, name: str) -> bool:
        """Forget a response. False where there is none."""
        return self._change("DELETE FROM responses WHERE tenant = ? AND id = ?", (tenant, name)) == 1

    def history(self, tenant: str, name: str) -> list[dict[str, Any]]:
        """All items of a conversation up to and with the response ``name``, which keeps them from growing old.

        Raises ``ParameterError`` where it is not whole.
        """
        oldest = self._clock() - self.bounds.age
        rows = self._rows(_CHAIN, {"tenant": tenant, "id": name, "turns": MAX_TURNS, "oldest": oldest})
        if not rows:
            raise ParameterError("previous_response_id", f"no response has the id {name[:100]!r}; it may have expired")
        if rows[0][1] is not None:
            raise ParameterError("previous_response_id", f"the earlier response {rows[0][1]} is gone; send its items")
        if rows[-1][2] in ("queued", "in_progress"):
            raise ParameterError("previous_response_id", "this response is not complete yet; wait for it")
        now = self._clock()
        for one in rows:
            self._change("UPDATE responses SET used = ? WHERE tenant = ? AND id = ?", (now, tenant, one[0]))
        return [item for row in rows for item in (*json.loads(row[3]), *json.loads(row[4])["output"])]

    def close(self) -> None:
        """Let go of the file."""
        self._database.close()

    def _change(self, statement: str, values: Any) -> int:
        try:
            return self._database.execute(statement, values).rowcount
        except sqlite3.Error as error:
            raise QiaoError(f"the database of responses cannot be written: {error}") from None

    def _rows(self, statement: str, values: Any) -> list[Any]:
        try:
            return self._database.execute(statement, values).fetchall()
        except sqlite3.Error as error:
            raise QiaoError(f"the database of responses cannot be read: {error}") from None
