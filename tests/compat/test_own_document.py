"""The server's own OpenAPI document: what it allows is answered as it says, and what it does not allow is refused."""

from __future__ import annotations

from typing import Any

import pytest

from tests.compat.conftest import ADMIN_KEY, KEY
from tests.compat.document import answered_well, schemathesis
from tests.support.server import RunningServer

pytestmark = [pytest.mark.compat, pytest.mark.timeout(1300)]


COMPUTE = (
    *("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/responses/input_tokens", "/v1/messages"),
    *("/v1/messages/count_tokens", "/v1/embeddings", "/v1/score", "/v1/rerank", "/tokenize", "/detokenize"),
)


@pytest.fixture(scope="module")
def document(keyed: RunningServer) -> Any:
    return keyed.http(headers={"Authorization": f"Bearer {KEY}"}).get("/openapi.json").json()


def operations(document: Any, admin: bool) -> int:
    return sum(len(found) for path, found in document["paths"].items() if path.startswith("/admin/") == admin)


def test_every_route(keyed: RunningServer, document: Any) -> None:
    before = answered_well(keyed, KEY)
    said = schemathesis(keyed, document, "--exclude-path-regex", "^/admin/", key=KEY)
    assert f"Tested: {operations(document, admin=False)}" in said
    good = answered_well(keyed, KEY) - before
    print(good)
    for path in COMPUTE:
        assert good[path], f"no answer of {path} was looked at"


def test_the_administrator_s_routes(keyed: RunningServer, document: Any) -> None:
    said = schemathesis(keyed, document, "--include-path-regex", "^/admin/", key=ADMIN_KEY)
    assert f"Tested: {operations(document, admin=True)}" in said
    done = [line for line in keyed.log if "/admin/" in line and " 4" not in line.rpartition("'")[2]]
    assert keyed.http().get("/health").status_code == 200, f"the model is gone: {''.join(done[-20:] + keyed.log[-5:])}"
