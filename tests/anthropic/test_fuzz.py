"""Random bodies that fit the schema: the answer fits it too, or is a refusal; never a server error."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import response_schema_conformance

from tests.anthropic.conftest import MODEL


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_random_bodies_are_answered_or_refused(roomy_url: str, path: str) -> None:
    description: Any = schemathesis.openapi.from_url(f"{roomy_url}/openapi.json")
    answered: set[int] = set()

    @settings(max_examples=25, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(case=description[path]["POST"].as_strategy())
    def check(case: Any) -> None:
        case.body["model"] = MODEL  # the server refuses any other at once
        if path == "/v1/messages":
            case.body |= {"max_tokens": 4, "min_tokens": 0}
        response = case.call(timeout=30)
        answered.add(response.status_code)
        case.validate_response(response, checks=[not_a_server_error, response_schema_conformance])

    check()
    assert 200 in answered
