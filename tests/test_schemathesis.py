"""Generated requests, good and bad, against the documented schema: no 500, no undocumented answer.

The OpenAI routes, which do nothing without the right model name, have a test of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import Case, GenerationMode
from schemathesis.core.result import Ok
from schemathesis.schemas import APIOperation
from schemathesis.specs.openapi.checks import positive_data_acceptance

from tests.serving import serve

schemathesis.serializer.alias("application/vnd.safetensors", "application/octet-stream")


@pytest.fixture(scope="module")
def small_url() -> Iterator[str]:
    """A server whose turns are short, because generated requests seldom say `max_tokens`."""
    with serve(max_model_len=64, max_sessions=100_000) as url:
        yield url


def check_operation(operation: APIOperation[Any, Any, Any, Any], mode: GenerationMode, url: str) -> None:
    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(max_examples=15, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    def check(case: Case[Any]) -> None:
        if "session_id" in case.path_parameters:
            # A generated id would only ever find the 404.
            case.path_parameters["session_id"] = httpx.post(f"{url}/v1/sessions").json()["id"]
        # Some rules, such as "exactly one of", are not in the schema: a 422 is a fair answer to what it allows.
        case.call_and_validate(excluded_checks=[positive_data_acceptance])

    check()


@pytest.mark.parametrize("mode", list(GenerationMode))
def test_every_answer_is_documented(small_url: str, subtests: pytest.Subtests, mode: GenerationMode) -> None:
    """Schemathesis's own pytest integration does not work with pytest 9.2, so the operations are walked here."""
    schema = schemathesis.openapi.from_url(f"{small_url}/openapi.json").exclude(tag="openai")
    operations = [result.ok() for result in schema.get_all_operations() if isinstance(result, Ok)]
    assert len(operations) > 10
    for operation in operations:
        # Nothing can be wrong about a request without fields.
        with subtests.test(operation.label), suppress(Unsatisfiable):
            check_operation(operation, mode, small_url)
