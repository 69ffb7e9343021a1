"""The audit log: who asked what, when and with which outcome, as lines of JSON that cannot be changed unseen.

Each line holds a number, the hash of the line before, and its own: SHA-256 over the line without it, keyed (HMAC) where
the variable ``QIAO_AUDIT_KEY`` is set, so that whoever can write the file but has not the key cannot make a new chain.
``FILE.head`` has the last number and hash, so that lines cut off the end are missed. A full file is renamed to
``FILE.000001`` and so on; the chain goes on in the next one.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import hmac
import json
import logging
import os
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

from qiao.errors import ParameterError

try:
    import fcntl
except ImportError:  # not a POSIX system: two servers with one log are not told apart there
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

KEY_VARIABLE = "QIAO_AUDIT_KEY"
FIRST = "0" * 64
"""What stands for the hash before the first line."""

RETRY_SECONDS = 1.0

MOST_WAITING = 256 << 20
"""Bytes that may wait for a disk that refuses or is slow, about; what comes beyond is lost, and the chain says so."""

_RECORD_BYTES = 1024
"""What a record takes in memory without its contents, about."""


def line_hash(body: Mapping[str, Any], key: bytes) -> str:
    """Of a line without its ``hash``, which has the hash of the line before in ``prev``."""
    plain = json.dumps(body, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    text = plain.encode("utf-8", "surrogatepass")
    return hmac.new(key, text, hashlib.sha256).hexdigest() if key else hashlib.sha256(text).hexdigest()


def audit_key(environment: Mapping[str, str] = os.environ) -> bytes:
    """From ``QIAO_AUDIT_KEY``; empty where it is not set."""
    return environment.get(KEY_VARIABLE, "").encode()


def parts(path: Path) -> list[Path]:
    """The files of a log, oldest first, the one that is written last."""
    old = sorted(p for p in path.parent.glob(glob.escape(path.name) + ".*") if p.suffix[1:].isdigit())
    return [*old, path] if path.exists() else old


class _Line(NamedTuple):
    number: int
    hash: str
    text: bytes


class _Record(NamedTuple):
    facts: dict[str, Any]
    content: Callable[[], dict[str, Any]] | None
    size: int


class AuditLog:
    """Writes on a thread of its own: ``write`` never waits for the disk. ``close`` returns once all is on disk.

    A disk that refuses is tried again until it takes the lines or ``close`` gives up; then they are in the server's
    log. One process writes a log at a time. Raises ``ParameterError`` where the file cannot be had.
    """

    def __init__(self, path: str | Path, max_bytes: int = 100 * 2**20, key: bytes = b"") -> None:
        self._path = Path(path)
        self._max_bytes = max_bytes
        self._key = key
        self._records: queue.SimpleQueue[_Record | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._waiting = self._lost = 0
        self._closing = threading.Event()
        try:
            self._file = self._opened()
            self._number, self._last, torn = _continued(self._path)
            if torn:
                self._file.write(b"\n")
            self._size = os.fstat(self._file.fileno()).st_size
        except OSError as error:
            raise ParameterError("--audit-log", f"cannot write {path}: {error.strerror}") from None
        if torn:
            self.write({"event": "recovered", "torn_bytes": torn})
        self._thread = threading.Thread(target=self._run, name="audit")
        self._thread.start()

    def write(
        self, facts: dict[str, Any], content: Callable[[], dict[str, Any]] | None = None, content_bytes: int = 0
    ) -> None:
        """Append a record, which must be JSON. ``content`` is called on the thread for what takes long to find out;
        ``content_bytes`` is what it holds in memory.
        """
        record = _Record(facts, content, _RECORD_BYTES + content_bytes)
        with self._lock:
            if self._waiting and self._waiting + record.size > MOST_WAITING:
                self._lost += 1
                return
            self._waiting += record.size
        self._records.put(record)

    def close(self) -> None:
        """Write all that was handed over, and end."""
        self._closing.set()
        self._records.put(None)
        self._thread.join()
        self._file.close()

    def _opened(self) -> FileIO:
        """The file to append to, which no other process may write. Raises ``OSError``."""
        file = open(self._path, "ab", buffering=0)  # noqa: SIM115 - kept open
        try:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.chmod(self._path, 0o600)
        except BlockingIOError:
            file.close()
            raise OSError(errno.EBUSY, "another server writes it; give each server a log of its own") from None
        except OSError:
            file.close()
            raise
        return file

    def _run(self) -> None:
        while True:
            batch = [self._records.get()]
            with contextlib.suppress(queue.Empty):
                while batch[-1] is not None:
                    batch.append(self._records.get_nowait())
            found = [record for record in batch if record is not None]
            self._write_all([self._chained(self._told(record)) for record in found])
            with self._lock:
                self._waiting -= sum(record.size for record in found)
                lost, self._lost = self._lost, 0
            if lost:
                logger.error("%d records did not get into the audit log: too many waited for the disk", lost)
                self._write_all([self._chained({"event": "lost", "records": lost})])
            if batch[-1] is None:
                return

    def _told(self, record: _Record) -> dict[str, Any]:
        return record.facts if record.content is None else {**record.facts, **record.content()}

    def _write_all(self, lines: Sequence[_Line]) -> None:
        while lines:
            closing = self._closing.is_set()  # one more try after that
            try:
                count = self._append(lines)
            except OSError as error:
                logger.error("the audit log cannot be written (%s); trying again", error)
                if closing:
                    logger.error("lost from the audit log: %s", b"".join(line.text for line in lines).decode())
                    return
                self._closing.wait(RETRY_SECONDS)
            else:
                lines = lines[count:]

    def _chained(self, record: dict[str, Any]) -> _Line:
        body = {"n": self._number + 1, **record, "prev": self._last}
        found = line_hash(body, self._key)
        whole = {**body, "hash": found}
        try:
            text = json.dumps(whole, ensure_ascii=False).encode()
        except UnicodeEncodeError:  # an unpaired surrogate: the file stays UTF-8
            text = json.dumps(whole).encode()
        self._number, self._last = body["n"], found
        return _Line(self._number, found, text + b"\n")

    def _append(self, lines: Sequence[_Line]) -> int:
        """Write as many lines as the file may hold, at least one; their number. Raises ``OSError``; then there are
        none of them, or will be none before the next ones.
        """
        if os.fstat(self._file.fileno()).st_size > self._size:
            self._file.truncate(self._size)  # what a failure left
        if self._size and self._size + len(lines[0].text) > self._max_bytes:
            self._rotate()
        count, end = 1, self._size + len(lines[0].text)
        while count < len(lines) and end + len(lines[count].text) <= self._max_bytes:
            end += len(lines[count].text)
            count += 1
        data = memoryview(b"".join(line.text for line in lines[:count]))
        while data:
            data = data[self._file.write(data) :]
        os.fsync(self._file.fileno())
        _write_head(self._path, lines[count - 1].number, lines[count - 1].hash)
        self._size = end
        return count

    def _rotate(self) -> None:
        taken = [int(p.suffix[1:]) for p in parts(self._path) if p != self._path]
        with contextlib.suppress(FileNotFoundError):  # moved by somebody else, or when the new one could not be opened
            if os.path.samestat(os.stat(self._path), os.fstat(self._file.fileno())):
                os.rename(self._path, f"{self._path}.{max(taken, default=0) + 1:06d}")
        full, self._file = self._file, self._opened()
        self._size = os.fstat(self._file.fileno()).st_size
        full.close()


def _write_head(path: Path, number: int, last: str) -> None:
    temporary = path.with_name(path.name + ".head.new")
    temporary.write_text(json.dumps({"n": number, "hash": last}) + "\n", encoding="utf-8")
    os.replace(temporary, path.with_name(path.name + ".head"))


def _continued(path: Path) -> tuple[int, str, int]:
    """Number and hash that the next line follows, and the bytes of a torn one before it.

    Where the file ends before what ``FILE.head`` says was written, the chain goes on from there, so that a restart
    does not hide that lines were cut off.
    """
    number, last, torn = _last_line(path)
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        written, noted = _read_head(path)
        if written >= number:
            number, last = written, noted
    return number, last, torn


def _read_head(path: Path) -> tuple[int, str]:
    head = json.loads(path.with_name(path.name + ".head").read_text(encoding="utf-8"))
    return int(head["n"]), str(head["hash"])


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
        number, last = _read_head(path)
    except (OSError, ValueError, KeyError, TypeError):
        verdict.problems.append(f"{path.name}.head cannot be read: lines cut off the end would not be seen")
        return
    if verdict.last is None or verdict.last < number:
        verdict.problems.append(
            f"the log ends with line {verdict.last}, and line {number} was written: the end is cut off"
        )
    elif verdict.last == number and verdict.head != last:
        verdict.problems.append(f"line {number} is another one than was written")
