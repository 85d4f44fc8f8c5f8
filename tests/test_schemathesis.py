"""Generated requests, good and bad, against the documented schema: no 500, no undocumented answer.

The routes of the OpenAI and Anthropic APIs, which do nothing without the right model name, have a test of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx
import numpy as np
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from safetensors.numpy import save
from schemathesis import Case, GenerationMode
from schemathesis.core.result import Ok
from schemathesis.schemas import APIOperation
from schemathesis.specs.openapi.checks import positive_data_acceptance

from tests.examples import examples
from tests.fuzzing import TAGS
from tests.routers.breakpoints.pausing import HIDDEN
from tests.serving import serve


@pytest.fixture(scope="module")
def small_url() -> Iterator[str]:
    """A server whose turns are short, because generated requests seldom say `max_tokens`."""
    with serve(max_model_len=64, max_sessions=100_000) as url:
        yield url


def fill_path(parameters: dict[str, Any], path: str, url: str) -> None:
    """Name things that there are: generated names would only ever find the 404."""
    if "session_id" in parameters:
        parameters["session_id"] = httpx.post(f"{url}/v1/sessions").json()["id"]
        session = f"{url}/v1/sessions/{parameters['session_id']}"
        if "/checkpoint" in path or path.endswith("/resume"):
            pause(session)
        if "breakpoint_id" in parameters:
            parameters["breakpoint_id"] = pause(session)
    if path.startswith("/v1/vectors/"):
        parameters["name"] = "named"
        content = save({"v": np.ones(HIDDEN, np.float32)})
        httpx.post(f"{url}/v1/vectors", params={"name": "named"}, content=content).raise_for_status()


def pause(session: str) -> str:
    """Leave the session paused; returns the id of the breakpoint."""
    armed = httpx.post(f"{session}/breakpoints", json={"layer": 0, "action": "pause"}).json()
    turn = httpx.post(f"{session}/generate", json={"token_ids": [5, 6], "max_tokens": 4}).json()
    assert turn["status"] == "paused"
    breakpoint_id: str = armed["id"]
    return breakpoint_id


def check_operation(operation: APIOperation[Any, Any, Any, Any], mode: GenerationMode, url: str) -> None:
    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(max_examples=examples(15), derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    def check(case: Case[Any]) -> None:
        fill_path(case.path_parameters, operation.path, url)
        # Some rules, such as "exactly one of", are not in the schema: a 422 is a fair answer to what it allows.
        case.call_and_validate(excluded_checks=[positive_data_acceptance])

    check()


@pytest.mark.examples
@pytest.mark.timeout(300)
@pytest.mark.parametrize("mode", list(GenerationMode))
def test_every_answer_is_documented(small_url: str, subtests: pytest.Subtests, mode: GenerationMode) -> None:
    """Schemathesis's own pytest integration does not work with pytest 9.2, so the operations are walked here."""
    schema = schemathesis.openapi.from_url(f"{small_url}/openapi.json").exclude(tag=list(TAGS))
    schema = schema.exclude(path="/v1/events")  # it has no end
    operations = [result.ok() for result in schema.get_all_operations() if isinstance(result, Ok)]
    assert len(operations) > 30
    for operation in operations:
        # Nothing can be wrong about a request without fields.
        with subtests.test(operation.label), suppress(Unsatisfiable):
            check_operation(operation, mode, small_url)
