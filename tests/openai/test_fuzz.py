"""Random bodies that fit the schema: the answer fits it too, or is a refusal; never a server error."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import response_schema_conformance

from tests.openai.conftest import MODEL


@pytest.fixture(scope="session")
def description(openai_url: str) -> Any:
    """The shared server's own description of itself."""
    return schemathesis.openapi.from_url(f"{openai_url}/openapi.json")


PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize", "/detokenize")


@pytest.mark.parametrize("path", PATHS)
def test_random_bodies_are_answered_or_refused(description: Any, path: str) -> None:
    answered: set[int] = set()

    @settings(max_examples=25, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(case=description[path]["POST"].as_strategy())
    def check(case: Any) -> None:
        case.body["model"] = MODEL  # the server refuses any other at once
        if path == "/tokenize" and case.body.get("messages") is None:
            case.body.setdefault("prompt", "x")
        if "messages" in case.body or "prompt" in case.body:
            case.body |= {"max_tokens": 4, "min_tokens": 0} if path.startswith("/v1") else {}
            case.body.pop("max_completion_tokens", None)
        if path == "/v1/responses":
            case.body |= {"max_output_tokens": 4, "min_tokens": 0, "max_tokens": None, "previous_response_id": None}
        response = case.call(timeout=30)
        answered.add(response.status_code)
        case.validate_response(response, checks=[not_a_server_error, response_schema_conformance])

    check()
    assert 200 in answered
