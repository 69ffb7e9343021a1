"""The server's own OpenAPI document: whatever it allows is answered as it says."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings

from tests.compat.test_openai_document import bounded
from tests.support.server import RunningServer

pytestmark = pytest.mark.compat

CHECKS = (
    schemathesis.checks.not_a_server_error,
    schemathesis.checks.status_code_conformance,
    schemathesis.checks.content_type_conformance,
    schemathesis.checks.response_schema_conformance,
)


SETTINGS = settings(
    max_examples=100, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)


def test_anything_that_our_document_allows(real: RunningServer) -> None:
    document = schemathesis.openapi.from_url(real.url + "/openapi.json").exclude(path_regex="^/(metrics|console)")
    asked = []
    for found in document.get_all_operations():
        operation = found.ok()

        @SETTINGS
        @given(case=operation.as_strategy())
        def ask(case: Any) -> None:
            case.body = bounded(case.body)
            case.validate_response(case.call(base_url=real.url, timeout=60), checks=CHECKS)

        ask()
        asked.append(operation.label)
    print(f"{len(asked)} operations: {', '.join(asked)}")
    assert len(asked) > 20
