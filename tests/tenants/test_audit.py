"""The audit log's chain against every kind of change, and what redaction takes out."""

from __future__ import annotations

import json
import resource
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from qiao.cli.main import main
from qiao.errors import ParameterError
from qiao.observability import audit
from qiao.observability.audit import AuditLog, parts, verify
from qiao.observability.redaction import MARK, RULES, Redaction

Lines = list[bytes]


def written(path: Path, count: int, key: bytes = b"", max_bytes: int = 10**9) -> Path:
    log = AuditLog(path, max_bytes, key)
    for i in range(count):
        log.write({"event": "request", "who": f"t{i}", "note": "桥\n\u2028"})
    log.close()
    return path


def change(path: Path, how: Callable[[Lines], Lines]) -> None:
    path.write_bytes(b"".join(how(path.read_bytes().splitlines(keepends=True))))


@pytest.mark.parametrize("key", [b"", b"secret"])
def test_what_was_written_is_good_also_after_restarts_and_rotation(tmp_path: Path, key: bytes) -> None:
    path = tmp_path / "audit.jsonl"
    for _ in range(3):
        written(path, 20, key, max_bytes=2000)
    verdict = verify(path, key)
    assert (verdict.problems, verdict.lines, verdict.first, verdict.last) == ([], 60, 1, 60)
    files = parts(path)
    assert len(files) > 3 and all(f.stat().st_size < 2400 and f.stat().st_mode & 0o077 == 0 for f in files)
    names = [json.loads(line)["who"] for f in files for line in f.read_bytes().splitlines()]
    assert names == [f"t{i}" for i in range(20)] * 3
    files[0].unlink()
    rest = verify(path, key)
    assert rest.first is not None and rest.first > 1
    assert rest.problems == [f"the log begins with line {rest.first}: older ones were removed"]
    assert verify(path, key, first=rest.first).problems == []


@settings(derandomize=True, max_examples=60, deadline=None)
@given(data=st.data(), kind=st.sampled_from(["edit", "remove", "swap", "repeat", "cut", "insert"]))
def test_every_change_is_found(data: st.DataObject, kind: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = written(tmp_path_factory.mktemp("audit") / "a.jsonl", 8)
    at = data.draw(st.integers(0, 7))
    other = data.draw(st.integers(0, 7).filter(lambda i: i != at))

    def edit(lines: Lines) -> Lines:
        entry = json.loads(lines[at])
        field = data.draw(st.sampled_from(sorted(entry)))
        entry[field] = entry[field] + 1 if isinstance(entry[field], int) else entry[field] + "x"
        lines[at] = json.dumps(entry).encode() + b"\n"
        return lines

    def swap(lines: Lines) -> Lines:
        lines[at], lines[other] = lines[other], lines[at]
        return lines

    changes: dict[str, Callable[[Lines], Lines]] = {
        "edit": edit,
        "swap": swap,
        "remove": lambda lines: lines[:at] + lines[at + 1 :],
        "repeat": lambda lines: [*lines[: at + 1], *lines[at:]],
        "cut": lambda lines: lines[:at],
        "insert": lambda lines: [*lines[:at], b'{"n": 1}\n', *lines[at:]],
    }
    assert verify(path).problems == []
    change(path, changes[kind])
    assert verify(path).problems != []


@pytest.mark.parametrize("key", ["", "secret"])
@pytest.mark.parametrize(
    ("how", "problem"),
    [
        (lambda lines: [lines[0], lines[1].replace(b"t1", b"t7"), *lines[2:]], "line 2 was changed"),
        (lambda lines: [lines[0], *lines[2:]], "line 3 follows line 1: removed"),
        (lambda lines: [lines[0], lines[2], lines[1], *lines[3:]], "line 3 follows line 1: removed, added or moved"),
        (lambda lines: lines[:-1], "the log ends with line 4, and line 5 was written"),
    ],
    ids=["edited", "removed", "swapped", "cut"],
)
def test_the_command_names_the_line(
    how: Callable[[Lines], Lines],
    problem: str,
    key: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("QIAO_AUDIT_KEY", key)
    path = written(tmp_path / "a.jsonl", 5, key.encode())
    change(path, how)
    with pytest.raises(SystemExit) as ended:
        main(["audit", "verify", str(path)])
    assert ended.value.code == 1
    assert problem in capsys.readouterr().out.splitlines()[0]


def test_a_line_of_another_chain_is_found_by_what_it_follows(tmp_path: Path) -> None:
    """Its number and its own hash are right."""
    path, other = written(tmp_path / "a.jsonl", 5), AuditLog(tmp_path / "b.jsonl")
    for _ in range(5):
        other.write({"event": "another"})
    other.close()
    foreign = (tmp_path / "b.jsonl").read_bytes().splitlines(keepends=True)
    change(path, lambda lines: [*lines[:2], foreign[2], *lines[3:]])
    assert [one.split(":", 2)[2] for one in verify(path).problems] == [
        " line 3 does not belong after the one before it",
        " line 4 does not belong after the one before it",
    ]


def test_a_new_chain_is_found_by_the_key_or_a_noted_hash(tmp_path: Path) -> None:
    """Whoever may write the file can compute plain hashes again, from the changed line on, and the head too."""
    original = written(tmp_path / "a.jsonl", 5)
    noted = json.loads(original.read_bytes().splitlines()[2])["hash"]
    assert verify(original, head=noted).problems == []
    forged = written(tmp_path / "b.jsonl", 4)
    assert verify(forged).problems == []
    assert verify(forged, head="f" * 64).problems == [f"the line with the hash {'f' * 64} is missing"]
    assert len(verify(forged, key=b"secret").problems) == 4
    assert verify(written(tmp_path / "c.jsonl", 4, b"secret"), key=b"other").problems != []


def test_a_line_that_a_crash_tore_is_told_and_accepted(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", 3)
    with open(path, "ab") as file:
        file.write(b'{"n": 4, "event": "requ')
    assert verify(path).problems != []
    written(path, 2)
    verdict = verify(path)
    assert verdict.problems == [] and verdict.lines == 6
    change(path, lambda lines: [*lines[:3], b'{"n": 4, "event": "another"}\n', *lines[4:]])
    assert verify(path).problems != []


def test_nothing_is_lost_between_write_and_close(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", 5000, max_bytes=100_000)
    assert verify(path).lines == 5000


def test_a_missing_head_is_said_and_a_bad_place_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", 2)
    (tmp_path / "a.jsonl.head").unlink()
    assert "cannot be read" in verify(path).problems[0]
    with pytest.raises(ParameterError, match="cannot write"):
        AuditLog(tmp_path / "no" / "folder")
    with pytest.raises(ParameterError, match="does not exist"):
        verify(tmp_path / "missing")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QIAO_AUDIT_KEY", "k")
    path = written(tmp_path / "a.jsonl", 3, b"k")

    def run(*words: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            main(["audit", "verify", str(path), *words])
        return int(ended.value.code or 0), capsys.readouterr().out

    status, out = run("--json")
    data = json.loads(out)
    assert (status, data["good"], data["lines"]) == (0, True, 3)
    assert run()[1].startswith("good: lines 1 to 3")
    change(path, lambda lines: [lines[0], lines[2]])
    assert run()[0] == 1
    assert run("--json")[0] == 1


def on_disk(log: AuditLog, path: Path, lines: int) -> None:
    """Wait until ``path`` holds ``lines`` lines."""
    end = time.monotonic() + 30
    while path.read_bytes().count(b"\n") < lines or log._waiting:
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "RETRY_SECONDS", 0.01)


@pytest.fixture
def full_at() -> Iterator[Callable[[int], None]]:
    """Makes every file end at a size, as on a full disk: what fits of a write is written, and then it fails."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def failed(caplog: pytest.LogCaptureFixture, times: int) -> None:
    end = time.monotonic() + 30
    while sum("cannot be written" in r.getMessage() for r in caplog.records) < times:
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.mark.usefixtures("impatient")
def test_a_full_disk_loses_and_repeats_nothing(
    tmp_path: Path, full_at: Callable[[int], None], caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "a.jsonl"
    log = AuditLog(path)
    log.write({"who": 0})
    on_disk(log, path, 1)
    full_at(path.stat().st_size + 50)
    for i in range(1, 6):
        log.write({"who": i})
    failed(caplog, 3)
    full_at(10**9)
    log.write({"who": 6})
    log.close()
    verdict = verify(path)
    assert (verdict.problems, verdict.lines) == ([], 7)
    assert [json.loads(line)["who"] for line in path.read_bytes().splitlines()] == list(range(7))


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("name", ["rename", "replace", "chmod"])
def test_a_folder_that_refuses_for_a_while_stops_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """While files change, and when ``FILE.head`` is written: the disk takes lines and not their head."""
    path = tmp_path / "a.jsonl"
    log = AuditLog(path, max_bytes=300)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(30, "read-only")

    with monkeypatch.context() as patch:
        patch.setattr(audit.os, name, refuse)
        for i in range(6):
            log.write({"who": i, "note": "x" * 50})
        failed(caplog, 3)
    log.close()
    verdict = verify(path)
    assert (verdict.problems, verdict.lines) == ([], 6)
    assert len(parts(path)) == 6


def test_a_log_has_one_writer(tmp_path: Path) -> None:
    """Two would each go on from the same line. Also after a change of files."""
    path = tmp_path / "a.jsonl"
    log = AuditLog(path, max_bytes=10)
    for _ in range(2):
        with pytest.raises(ParameterError, match="another server writes it"):
            AuditLog(path)
        log.write({})
        log.write({})
        on_disk(log, path, 1)
    log.close()
    AuditLog(path).close()


def test_a_restart_does_not_hide_that_lines_were_cut_off(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", 5)
    change(path, lambda lines: lines[:-2])
    written(path, 2)
    assert verify(path).problems == ["a.jsonl:4: line 6 follows line 3: removed, added or moved"]


def test_what_does_not_fit_the_memory_is_told_in_the_chain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "MOST_WAITING", 5000)
    path, go = tmp_path / "a.jsonl", Event()
    log = AuditLog(path)
    log.write({"who": 0}, lambda: {"waited": go.wait(30)})
    for i in range(1, 8):
        log.write({"who": i})
    go.set()
    log.close()
    entries = [json.loads(line) for line in path.read_bytes().splitlines()]
    assert [e.get("who") for e in entries] == [0, 1, 2, 3, None]
    assert entries[0]["waited"] is True
    assert (entries[-1]["event"], entries[-1]["records"]) == ("lost", 4)
    assert verify(path).problems == []


def test_odd_names_and_texts(tmp_path: Path) -> None:
    """A name that is a pattern, and half a character, which JSON can hold and UTF-8 cannot."""
    path = tmp_path / "a[1].jsonl"
    log = AuditLog(path, max_bytes=10)
    for text in ("\ud800", "桥", "\udfff"):
        log.write({"text": text})
    log.close()
    assert (verify(path).problems, verify(path).lines, len(parts(path))) == ([], 3, 3)
    assert [json.loads(p.read_text(encoding="utf-8"))["text"] for p in parts(path)] == ["\ud800", "桥", "\udfff"]


@pytest.mark.parametrize(
    ("rule", "secret", "harmless"),
    [
        ("email", "anna.b+c@example.co.uk", "a @ b"),
        ("phone", "+86 138-0013-8000", "in 2026"),
        ("card", "4111 1111 1111 1111", "123 456"),
        ("key", "sk-proj_abcdEFGH1234", "sky-high"),
        ("key", "Bearer abc.def-ghi", "bearer of news"),
        ("ip", "192.168.10.3", "version 1.2.3"),
        (r"\bQ\d+\b", "Q42", "Q"),
    ],
)
def test_redaction(rule: str, secret: str, harmless: str) -> None:
    redaction = Redaction((rule,))
    assert redaction.apply(f"a {secret} b {secret}") == f"a {MARK} b {MARK}"
    assert redaction.apply(harmless) == harmless


def test_a_pattern_that_runs_away_hides_the_text_and_a_wrong_one_is_refused() -> None:
    assert Redaction((r"(a|aa)+$", *RULES)).apply("a" * 60 + "!") in (MARK, "a" * 60 + "!")
    with pytest.raises(ParameterError, match="audit_redact"):
        Redaction(("(",))
