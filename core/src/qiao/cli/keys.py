"""``qiao keys``: tenants, their limits and their keys, in the file that ``qiao serve --keys`` reads."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qiao.errors import ParameterError

if TYPE_CHECKING:
    from qiao.tenants import KeyStore, StoredKey, Tenant

File = Annotated[str, typer.Option("--keys", help="The file of keys; made by `add` where it is missing.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print as JSON.")]

DEFAULT_FILE = "qiao-keys.db"


def add(
    tenant: Annotated[str, typer.Argument(help="Whom the key is for; a new name makes a new tenant.")],
    file: File = DEFAULT_FILE,
    note: Annotated[str, typer.Option("--note", help="Reminds you what the key is for.")] = "",
    cls: Annotated[str | None, typer.Option("--class", help="urgent, standard (a new tenant's) or low.")] = None,
    rpm: Annotated[int | None, typer.Option("--requests-per-minute", help="0 for no limit.")] = None,
    tpm: Annotated[int | None, typer.Option("--tokens-per-minute", help="Prompt and answer; 0 for no limit.")] = None,
    tpd: Annotated[int | None, typer.Option("--tokens-per-day", help="Days are UTC; 0 for no limit.")] = None,
    concurrent: Annotated[int | None, typer.Option("--concurrent-requests", help="0 for no limit.")] = None,
    kv_share: Annotated[
        float | None, typer.Option("--kv-share", help="Most of the KV cache at a time, as 0.25; 0 for no limit.")
    ] = None,
    model: Annotated[
        list[str] | None, typer.Option("--model", help="A model it may use; repeatable; `all` for all.")
    ] = None,
    priority: Annotated[
        bool | None, typer.Option("--may-set-priority/--no-may-set-priority", help="Requests may name a priority.")
    ] = None,
    share_prefixes: Annotated[
        bool | None, typer.Option("--share-prefixes/--no-share-prefixes", help="Share cached prefixes with others.")
    ] = None,
    new_key: Annotated[bool, typer.Option("--key/--no-key", help="Make a key; without, set the limits only.")] = True,
    as_json: AsJson = False,
) -> None:
    """Make a key, which is shown once. The limits given are set for the tenant, whatever its other keys.

    A running server reads the file again when it gets SIGHUP.
    """
    from qiao.tenants import KeyStore

    store = KeyStore(file)
    store.create()
    counts = {
        "requests_per_minute": rpm,
        "tokens_per_minute": tpm,
        "tokens_per_day": tpd,
        "concurrent_requests": concurrent,
        "kv_share": kv_share,
    }
    changes: dict[str, Any] = {name: value or None for name, value in counts.items() if value is not None}
    if cls is not None:
        changes["priority_class"] = cls
    if model:
        changes["models"] = () if model == ["all"] else tuple(model)
    if priority is not None:
        changes["may_set_priority"] = priority
    if share_prefixes is not None:
        changes["share_prefixes"] = share_prefixes
    made = _put(store, tenant, changes)
    key = store.add_key(tenant, note) if new_key else None
    if as_json:
        data = {"schema": 1, "file": file, "tenant": _limits(made)}
        _dump(data | ({"id": key.id, "key": key.text} if key is not None else {}))
        return
    print(f"tenant {made.name}: {_describe(made)}")
    if key is not None:
        print(f"key {key.id}, which is not shown again:\n{key.text}")


def show(file: File = DEFAULT_FILE, as_json: AsJson = False) -> None:
    """Tenants with their limits, today's tokens and the ids of their keys; the keys themselves are not known."""
    from qiao.tenants import KeyStore
    from qiao.tenants.usage import utc_day

    store = KeyStore(file)
    store.check()
    tenants, keys, used = store.tenants(), store.keys(), store.usage(utc_day(time.time()))
    if as_json:
        rows = [{**_limits(t), "tokens_today": used.get(t.name, 0)} for t in tenants.values()]
        _dump({"schema": 1, "file": file, "tenants": rows, "keys": [_key(key) for key in keys]})
        return
    for tenant in tenants.values():
        print(f"{tenant.name}: {_describe(tenant)}; {used.get(tenant.name, 0)} tokens today")
        for key in keys:
            if key.tenant == tenant.name:
                made = time.strftime("%Y-%m-%d", time.gmtime(key.created))
                state = "revoked" if key.revoked is not None else "good"
                print(f"  {key.id}  {state}  made {made}  {key.note}".rstrip())


def revoke(
    number: Annotated[str, typer.Argument(metavar="ID", help="The key's id, as `qiao keys list` shows it.")],
    file: File = DEFAULT_FILE,
    as_json: AsJson = False,
) -> None:
    """Close a key for good. A running server refuses it from its next SIGHUP on; what runs goes on."""
    from qiao.tenants import KeyStore

    store = KeyStore(file)
    store.check()
    key = store.revoke(number)
    if as_json:
        _dump({"schema": 1, "file": file, **_key(key)})
    else:
        print(f"key {key.id} of {key.tenant} is revoked; send SIGHUP to running servers")


def register(app: typer.Typer) -> None:
    """Add the commands."""
    group = typer.Typer(no_args_is_help=True, help="Tenants, their limits and their API keys.")
    group.command("add")(add)
    group.command("list")(show)
    group.command("revoke")(revoke)
    app.add_typer(group, name="keys")


def _put(store: KeyStore, name: str, changes: dict[str, Any]) -> Tenant:
    import msgspec

    from qiao.tenants import Tenant

    if not name:
        raise ParameterError("tenant", "must not be empty")
    old = store.tenants().get(name)
    known = {} if old is None else msgspec.structs.asdict(old)
    tenant = Tenant(**{"name": name, **known, **changes})
    store.put_tenant(tenant)
    return tenant


def _limits(tenant: Tenant) -> dict[str, Any]:
    import msgspec

    return msgspec.structs.asdict(tenant)


def _describe(tenant: Tenant) -> str:
    parts = [f"class {tenant.priority_class}"]
    for name, value in _limits(tenant).items():
        if name not in ("name", "priority_class") and value not in (None, (), False):
            text = ", ".join(value) if isinstance(value, tuple) else value
            parts.append(name.replace("_", " ") if value is True else f"{name.replace('_', ' ')} {text}")
    return ", ".join(parts)


def _key(key: StoredKey) -> dict[str, Any]:
    return {"id": key.id, "tenant": key.tenant, "note": key.note, "created": key.created, "revoked": key.revoked}


def _dump(data: dict[str, Any]) -> None:
    json.dump(data, sys.stdout, indent=2)
    print()
