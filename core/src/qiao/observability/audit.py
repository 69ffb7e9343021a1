"""The audit log: who asked what, when and with which outcome, as lines of JSON that cannot be changed unseen.

Each line holds a number, the hash of the line before, and its own: SHA-256 over the line without it, keyed (HMAC) where
the variable ``QIAO_AUDIT_KEY`` is set, so that whoever can write the file but has not the key cannot make a new chain.
``FILE.head`` has the last number and hash, so that lines cut off the end are missed. A full file is renamed to
``FILE.000001`` and so on; the chain goes on in the next one.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import logging
import os
import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from qiao.errors import ParameterError

logger = logging.getLogger(__name__)

KEY_VARIABLE = "QIAO_AUDIT_KEY"
FIRST = "0" * 64
"""What stands for the hash before the first line."""

RETRY_SECONDS = 1.0


def line_hash(body: Mapping[str, Any], key: bytes) -> str:
    """Of a line without its ``hash``, which has the hash of the line before in ``prev``."""
    text = json.dumps(body, sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode()
    return hmac.new(key, text, hashlib.sha256).hexdigest() if key else hashlib.sha256(text).hexdigest()


def audit_key(environment: Mapping[str, str] = os.environ) -> bytes:
    """From ``QIAO_AUDIT_KEY``; empty where it is not set."""
    return environment.get(KEY_VARIABLE, "").encode()


def parts(path: Path) -> list[Path]:
    """The files of a log, oldest first, the one that is written last."""
    old = sorted(p for p in path.parent.glob(path.name + ".*") if p.suffix[1:].isdigit())
    return [*old, path] if path.exists() else old


class _Line(NamedTuple):
    number: int
    hash: str
    text: bytes


class AuditLog:
    """Writes on a thread of its own: ``write`` never waits for the disk. ``close`` returns once all is on disk.

    A disk that refuses is tried again until it takes the lines or ``close`` gives up; then they are in the server's
    log. Raises ``ParameterError`` where the file cannot be had.
    """

    def __init__(self, path: str | Path, max_bytes: int = 100 * 2**20, key: bytes = b"") -> None:
        self._path = Path(path)
        self._max_bytes = max_bytes
        self._key = key
        self._lines: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        try:
            self._number, self._last, torn = _last_line(self._path)
            self._file = open(self._path, "ab")  # noqa: SIM115 - kept open
            os.chmod(self._path, 0o600)
            if torn:
                self._file.write(b"\n")
        except OSError as error:
            raise ParameterError("--audit-log", f"cannot write {path}: {error.strerror}") from None
        if torn:
            self.write({"event": "recovered", "torn_bytes": torn})
        self._thread = threading.Thread(target=self._run, name="audit")
        self._thread.start()

    def write(self, record: dict[str, Any]) -> None:
        """Append a record, which must be JSON."""
        self._lines.put(record)

    def close(self) -> None:
        """Write all that was handed over, and end."""
        self._closing.set()
        self._lines.put(None)
        self._thread.join()
        self._file.close()

    def _run(self) -> None:
        while True:
            batch = [self._lines.get()]
            with contextlib.suppress(queue.Empty):
                while batch[-1] is not None:
                    batch.append(self._lines.get_nowait())
            self._write_all([record for record in batch if record is not None])
            if batch[-1] is None:
                return

    def _write_all(self, records: Sequence[dict[str, Any]]) -> None:
        lines = [self._chained(record) for record in records]
        while lines:
            try:
                count = self._append(lines)
            except OSError as error:
                logger.error("the audit log cannot be written (%s); trying again", error)
                if self._closing.wait(RETRY_SECONDS):
                    logger.error("lost from the audit log: %s", b"".join(line.text for line in lines).decode())
                    return
            else:
                lines = lines[count:]

    def _chained(self, record: dict[str, Any]) -> _Line:
        self._number += 1
        body = {"n": self._number, **record, "prev": self._last}
        self._last = line_hash(body, self._key)
        text = json.dumps({**body, "hash": self._last}, ensure_ascii=False).encode() + b"\n"
        return _Line(self._number, self._last, text)

    def _append(self, lines: Sequence[_Line]) -> int:
        """Write as many lines as the file may hold, at least one; their number."""
        size = self._file.tell()
        if size and size + len(lines[0].text) > self._max_bytes:
            self._rotate()
            size = 0
        count, end = 1, size + len(lines[0].text)
        while count < len(lines) and end + len(lines[count].text) <= self._max_bytes:
            end += len(lines[count].text)
            count += 1
        try:
            self._file.write(b"".join(line.text for line in lines[:count]))
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError:
            with contextlib.suppress(OSError):  # a half-written batch would be repeated
                self._file.truncate(size)
            raise
        _write_head(self._path, lines[count - 1].number, lines[count - 1].hash)
        return count

    def _rotate(self) -> None:
        taken = [int(p.suffix[1:]) for p in parts(self._path) if p != self._path]
        self._file.close()
        os.rename(self._path, f"{self._path}.{max(taken, default=0) + 1:06d}")
        self._file = open(self._path, "ab")  # noqa: SIM115 - kept open
        os.chmod(self._path, 0o600)


def _write_head(path: Path, number: int, last: str) -> None:
    temporary = path.with_name(path.name + ".head.new")
    temporary.write_text(json.dumps({"n": number, "hash": last}) + "\n", encoding="utf-8")
    os.replace(temporary, path.with_name(path.name + ".head"))


def _last_line(path: Path) -> tuple[int, str, int]:
    """Number and hash of the last whole line, and the bytes of a torn one after it."""
    torn = 0
    for file in reversed(parts(path)):
        lines = file.read_bytes().split(b"\n")
        if file == path:
            torn = len(lines[-1])
        for line in reversed(lines[:-1]):
            with contextlib.suppress(ValueError, KeyError, TypeError):
                entry = json.loads(line)
                return int(entry["n"]), str(entry["hash"]), torn
    return 0, FIRST, torn


@dataclass
class Verdict:
    """What ``verify`` found: ``problems`` in order, and where the chain begins and ends."""

    lines: int = 0
    first: int | None = None
    last: int | None = None
    head: str = FIRST
    problems: list[str] = field(default_factory=list)


def verify(path: str | Path, key: bytes = b"", head: str | None = None, first: int = 1) -> Verdict:
    """Follow the chain through all files of the log.

    ``head`` is a hash that was noted elsewhere, which the chain must contain. ``first`` is the oldest line that must be
    there, for logs whose oldest files were removed on purpose. Raises ``ParameterError`` where there is no file.
    """
    verdict = Verdict()
    files = parts(Path(path))
    if not files:
        raise ParameterError("FILE", f"{path} does not exist")
    seen_head = head is None
    torn = 0
    for where, line in _lines(files):
        try:
            entry = json.loads(line)
            found = entry.pop("hash")
            number, previous = int(entry["n"]), str(entry["prev"])
        except (ValueError, KeyError, TypeError, AttributeError):
            torn = len(line)
            verdict.problems.append(f"{where}: is not a line of an audit log")
            continue
        if torn and entry.get("torn_bytes") == torn:
            verdict.problems.pop()  # a crash left it, and the next start said so, in the chain
        torn = 0
        _check(verdict, where, entry, found, number, previous, key)
        seen_head = seen_head or found == head
    if verdict.first is not None and verdict.first > first:
        verdict.problems.append(f"the log begins with line {verdict.first}: older ones were removed")
    if not seen_head:
        verdict.problems.append(f"the line with the hash {head} is missing")
    _check_end(verdict, Path(path))
    return verdict


def _lines(files: Sequence[Path]) -> Iterator[tuple[str, bytes]]:
    for file in files:
        with open(file, "rb") as stream:
            for number, line in enumerate(stream, 1):
                yield f"{file.name}:{number}", line.rstrip(b"\n")


def _check(
    verdict: Verdict, where: str, body: dict[str, Any], found: str, number: int, previous: str, key: bytes
) -> None:
    if line_hash(body, key) != found:
        verdict.problems.append(f"{where}: line {number} was changed, or the key is another one")
    if verdict.last is None:
        verdict.first = number
        if number == 1 and previous != FIRST:
            verdict.problems.append(f"{where}: line 1 follows a line that is not there")
    elif number != verdict.last + 1:
        verdict.problems.append(f"{where}: line {number} follows line {verdict.last}: removed, added or moved")
    elif previous != verdict.head:
        verdict.problems.append(f"{where}: line {number} does not belong after the one before it")
    verdict.lines += 1
    verdict.last, verdict.head = number, found


def _check_end(verdict: Verdict, path: Path) -> None:
    try:
        head = json.loads(path.with_name(path.name + ".head").read_text(encoding="utf-8"))
        number, last = int(head["n"]), str(head["hash"])
    except (OSError, ValueError, KeyError, TypeError):
        verdict.problems.append(f"{path.name}.head cannot be read: lines cut off the end would not be seen")
        return
    if verdict.last is None or verdict.last < number:
        verdict.problems.append(
            f"the log ends with line {verdict.last}, and line {number} was written: the end is cut off"
        )
    elif verdict.last == number and verdict.head != last:
        verdict.problems.append(f"line {number} is another one than was written")
