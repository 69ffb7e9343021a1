"""The file of keys, and the command that manages it."""

from __future__ import annotations

import json
import sqlite3
import stat
import threading
from pathlib import Path

import pytest
from qiao.cli.main import main
from qiao.errors import ParameterError
from qiao.tenants import DailyUsage, KeyRing, KeyStore, Tenant
from qiao.tenants.usage import until_midnight, utc_day


@pytest.fixture
def store(tmp_path: Path) -> KeyStore:
    made = KeyStore(tmp_path / "keys.db")
    made.create()
    made.put_tenant(Tenant(name="acme"))
    return made


def keys(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["keys", *words])
    captured = capsys.readouterr()
    assert (ended.value.code or 0) == status, captured.err
    return captured.out if status == 0 else captured.err


def test_a_key_is_found_and_only_its_hash_is_kept(store: KeyStore) -> None:
    made = store.add_key("acme", note="for tests")
    ring = KeyRing.read(store)
    assert ring.find(made.text) == (Tenant(name="acme"), made.id)
    content = store.path.read_bytes()
    secret = made.text.split("-", 2)[2]
    assert made.text.encode() not in content and secret.encode() not in content
    assert made.id.encode() in content
    assert stat.S_IMODE(store.path.stat().st_mode) == 0o600


def test_near_misses_are_no_keys(store: KeyStore) -> None:
    made, other = store.add_key("acme"), store.add_key("acme")
    ring = KeyRing.read(store)
    prefix, number, secret = made.text.split("-", 2)
    wrong = [
        *("", prefix, made.id, f"{prefix}-{number}", f"{prefix}-{number}-", made.text[:-1], made.text + "x"),
        *(f"{prefix}-{other.id}-{secret}", f"{prefix}-000000000000-{secret}", f"sk-{number}-{secret}", secret),
        *(made.text.upper(), " " + made.text, made.text + " ", "\udcff", made.text.swapcase()),
    ]
    assert [text for text in wrong if ring.find(text) is not None] == []


def test_the_hash_depends_on_the_file(tmp_path: Path, store: KeyStore) -> None:
    other = KeyStore(tmp_path / "other.db")
    other.create()
    assert store.secret() != other.secret() and len(store.secret()) == 32


def test_revoked_keys_are_not_found(store: KeyStore) -> None:
    first, second = store.add_key("acme"), store.add_key("acme")
    revoked = store.revoke(first.id)
    assert revoked.revoked is not None and store.revoke(first.id).revoked == revoked.revoked
    ring = KeyRing.read(store)
    assert ring.find(first.text) is None and ring.find(second.text) is not None
    with pytest.raises(ParameterError, match="qiao keys list"):
        store.revoke("ffffffffffff")


def test_a_wrong_file_is_refused_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="qiao keys add"):
        KeyStore(tmp_path / "missing.db").check()
    text = tmp_path / "text.db"
    text.write_text("this is no database, but long enough to be looked at as one" * 40)
    with pytest.raises(ParameterError, match="cannot use"):
        KeyStore(text).check()
    with sqlite3.connect(tmp_path / "new.db") as database:
        database.execute("PRAGMA user_version = 99")
    with pytest.raises(ParameterError, match="version 99"):
        KeyStore(tmp_path / "new.db").check()
    with pytest.raises(ParameterError, match="cannot make"):
        KeyStore(tmp_path / "no" / "folder.db").create()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("name", name) for name in ("a b", "a\0", "-a", "é", "a" * 65, "a/b")),
        *(("priority_class", "high"), ("kv_share", 0.0), ("kv_share", 1.1), ("tokens_per_day", -1)),
    ],
)
def test_wrong_limits_are_refused(field: str, value: object) -> None:
    with pytest.raises(ParameterError):
        Tenant(**{"name": "a", field: value})


def test_the_days_tokens_outlive_the_process_and_add_up_over_servers(store: KeyStore) -> None:
    now = [1_000_000.0]
    first, second = DailyUsage(store, lambda: now[0]), DailyUsage(store, lambda: now[0])
    first.add("acme", 100)
    assert (first.total("acme"), second.total("acme")) == (100, 0)
    first.flush()
    second.add("acme", 7)
    second.flush()
    assert (first.total("acme"), second.total("acme")) == (100, 107)
    first.add("acme", -40)
    first.flush()
    assert first.total("acme") == 67
    assert DailyUsage(store, lambda: now[0]).total("acme") == 67
    assert store.usage(utc_day(now[0])) == {"acme": 67}
    now[0] += until_midnight(now[0])
    assert first.total("acme") == 0
    first.add("acme", 5)
    first.flush()
    assert first.total("acme") == 5
    assert store.usage(utc_day(now[0] - 1)) == {"acme": 67}


def test_tokens_of_yesterday_go_to_yesterday(store: KeyStore) -> None:
    now = [86_400.0 * 10 - 1]
    usage = DailyUsage(store, lambda: now[0])
    usage.add("acme", 9)
    now[0] += 2
    usage.add("acme", 4)
    usage.flush()
    assert usage.total("acme") == 4
    assert (store.usage(utc_day(now[0] - 2)), store.usage(utc_day(now[0]))) == ({"acme": 9}, {"acme": 4})


def test_a_file_that_cannot_be_written_loses_no_tokens(store: KeyStore, tmp_path: Path) -> None:
    usage = DailyUsage(store)
    usage.add("acme", 11)
    hidden = tmp_path / "away"
    store.path.rename(hidden)
    store.path.mkdir()
    with pytest.raises(ParameterError):
        usage.flush()
    assert usage.total("acme") == 11
    store.path.rmdir()
    hidden.rename(store.path)
    usage.flush()
    assert DailyUsage(store).total("acme") == 11


def test_a_file_that_is_gone_is_not_made_anew(store: KeyStore) -> None:
    """An empty one in its place would close the server to everybody at its next start, or hide a moved one."""
    store.put_tenant(Tenant(name="acme"))
    usage = DailyUsage(store)
    usage.add("acme", 5)
    store.path.rename(store.path.with_suffix(".moved"))
    with pytest.raises(ParameterError, match="--keys: cannot use"):
        usage.flush()
    assert not store.path.exists()
    store.path.with_suffix(".moved").rename(store.path)
    usage.flush()
    assert usage.total("acme") == 5


def test_flushing_beside_counting_loses_nothing(store: KeyStore) -> None:
    usage = DailyUsage(store)
    stop = threading.Event()

    def flush() -> None:
        while not stop.is_set():
            usage.flush()

    thread = threading.Thread(target=flush)
    thread.start()
    last = 0
    for _ in range(2000):
        usage.add("acme", 1)
        assert usage.total("acme") > last
        last = usage.total("acme")
    stop.set()
    thread.join()
    usage.flush()
    assert DailyUsage(store).total("acme") == 2000


def test_the_command_makes_lists_and_revokes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = ("--keys", str(tmp_path / "k.db"))
    limits = ("--requests-per-minute", "60", "--kv-share", "0.25", "--model", "M", "--class", "urgent")
    made = json.loads(keys(capsys, "add", "acme", *file, *limits, "--json"))
    assert made["tenant"]["requests_per_minute"] == 60 and made["tenant"]["models"] == ["M"]
    out = keys(capsys, "add", "acme", *file, "--note", "second", "--requests-per-minute", "0", "--may-set-priority")
    text = out.splitlines()[-1]
    ring = KeyRing.read(KeyStore(file[1]))
    tenant, number = ring.find(text)
    assert tenant == Tenant(name="acme", priority_class="urgent", kv_share=0.25, models=("M",), may_set_priority=True)
    listed = json.loads(keys(capsys, "list", *file, "--json"))
    assert {key["id"] for key in listed["keys"]} == {number, made["id"]}
    assert made["key"] not in json.dumps(listed) and "digest" not in json.dumps(listed)
    shown = keys(capsys, "list", *file)
    assert "acme: class urgent" in shown and "second" in shown
    assert "revoked" in keys(capsys, "revoke", number, *file)
    assert json.loads(keys(capsys, "revoke", number, *file, "--json"))["revoked"]
    assert KeyRing.read(KeyStore(file[1])).find(text) is None
    only = json.loads(keys(capsys, "add", "acme", *file, "--no-key", "--model", "all", "--json"))
    assert "key" not in only and only["tenant"]["models"] == []


def test_the_command_refuses_with_a_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = ("--keys", str(tmp_path / "k.db"))
    assert "qiao keys add" in keys(capsys, "list", *file, status=2)
    assert "urgent" in keys(capsys, "add", "a", "--class", "top", *file, status=2)
    assert "letters" in keys(capsys, "add", "a b", *file, status=2)
    assert "must not be empty" in keys(capsys, "add", "", *file, status=2)
    assert "no key has the id" in keys(capsys, "revoke", "123", *file, status=2)
