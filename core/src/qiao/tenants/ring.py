"""The keys of a file in memory, for look-ups."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass

from qiao.tenants.keys import KeyStore, StoredKey, key_digest, key_id
from qiao.tenants.tenant import Tenant

_NOBODY = bytes(32)


@dataclass(frozen=True)
class KeyRing:
    """All good keys by id, and all tenants by name, as the file had them when it was read."""

    secret: bytes
    keys: Mapping[str, StoredKey]
    tenants: Mapping[str, Tenant]

    @classmethod
    def read(cls, store: KeyStore) -> KeyRing:
        """From the file. Raises ``ParameterError``."""
        store.check()
        tenants = store.tenants()
        keys = store.keys()
        good = {key.id: key for key in keys if key.revoked is None and key.tenant in tenants}
        return cls(store.secret(), good, tenants)

    def find(self, text: str) -> tuple[Tenant, str] | None:
        """The tenant and the id of a key.

        The id, which is no secret, finds the hash; the comparison takes as long whatever differs, and an unknown id is
        compared too.
        """
        key = self.keys.get(key_id(text))
        expected = _NOBODY if key is None else key.digest
        if hmac.compare_digest(key_digest(self.secret, text), expected) and key is not None:
            return self.tenants[key.tenant], key.id
        return None
